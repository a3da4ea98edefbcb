"""Charts of data: the same text every time, words that stay words, and no warning for letters of another font."""

import subprocess
import sys
import warnings
from xml.etree import ElementTree

from helpers.charts import Chart
from virtual_gpu.drawing import svg

SPACE = "{http://www.w3.org/2000/svg}"


def chart_of_losses() -> Chart:
    chart = Chart("학습한 샘플 수와 손실", "배치 <16> & 누적", columns=2)
    for ax in chart.axes:
        ax.plot([1, 2, 3], [3, 2, -1], label="배치 16")
        ax.set_xlabel("샘플 수")
        ax.legend()
    return chart


def test_the_same_data_give_the_same_text():
    chart = chart_of_losses()
    assert chart.svg() == chart_of_losses().svg() == chart.svg()


def test_words_stay_words_in_the_readers_font():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = ElementTree.fromstring(chart_of_losses().svg())
    words = [text for text in picture.iter(f"{SPACE}text") if text.text == "샘플 수"]
    assert len(words) == 2 and all(svg.FONT in word.get("style") for word in words)
    assert any("1" in (text.text or "") for text in picture.iter(f"{SPACE}text"))


def test_no_legend_has_a_frame():
    chart = chart_of_losses()
    chart.figure.legend(loc="outside lower center")
    picture = ElementTree.fromstring(chart.svg())
    legends = [group for group in picture.iter(f"{SPACE}g") if group.get("id", "").startswith("legend")]
    assert len(legends) == 3
    assert not [group for legend in legends for group in legend if group.get("id", "").startswith("patch")]


def test_it_is_described_and_measured_in_pixels():
    chart = Chart("제목", "배치 <16> & 누적", width=500, height=200)
    picture = ElementTree.fromstring(chart.svg())
    assert picture.get("aria-label") == "제목. 배치 <16> & 누적" == picture.find(f"{SPACE}title").text
    assert (picture.get("width"), picture.get("height"), picture.get("viewBox")) == ("500", "200", "0 0 500 200")


def test_no_style_sheet_reaches_the_page_around_it():
    assert "<style" not in chart_of_losses().svg() and "<?xml" not in chart_of_losses().svg()


def test_the_readers_own_settings_are_left_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    chart_of_losses().svg()
    assert dict(matplotlib.rcParams) == before


def test_matplotlib_comes_with_the_first_chart_only():
    code = "import sys, helpers.charts; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
