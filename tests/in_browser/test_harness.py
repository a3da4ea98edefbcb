"""The browser harness itself, on a notebook of three cells with one slider."""

import nbformat
import pytest

CELLS = [
    "import ipywidgets\nfrom IPython.display import display",
    """\
slider = ipywidgets.IntSlider(value=4, min=1, max=32)
table = ipywidgets.HTML("batch 4")
slider.add_class("course-slider")
table.add_class("course-table")
slider.observe(lambda change: setattr(table, "value", f"batch <b>{change.new}</b>"), "value")
display(ipywidgets.VBox([slider, table]))""",
    'print("ran to the end")',
]


# Without a kernel's name JupyterLab asks for one.
METADATA = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}}


def write_notebook(path, *sources, text=""):
    cells = [nbformat.v4.new_markdown_cell(text), *(nbformat.v4.new_code_cell(source) for source in sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=METADATA), path)
    return path


@pytest.mark.browser
def test_a_slider_moves_what_the_reader_sees(open_notebook, tmp_path):
    notebook = open_notebook(write_notebook(tmp_path / "tiny.ipynb", *CELLS))
    notebook.run_all()
    assert notebook.text(".course-table") == "batch 4"
    notebook.press_slider(".course-slider", "ArrowRight", times=2)
    notebook.wait_until_text(".course-table", lambda text: text == "batch 6")
    assert "<b>6</b>" in notebook.html(".course-table")
    assert notebook.cells()[-1]["outputs"][0]["text"] == "ran to the end\n"
    assert notebook.errors() == []
    assert notebook.console_errors == []
    assert notebook.screenshot("browser_harness", ".course-slider").stat().st_size > 0


@pytest.mark.browser
def test_an_error_in_a_cell_is_seen(open_notebook, tmp_path):
    code = 'import sys\nprint("careful", file=sys.stderr)\n1 / 0'
    notebook = open_notebook(write_notebook(tmp_path / "broken.ipynb", code))
    notebook.run_all()
    assert notebook.errors() == ["cell 2: stderr: careful\n", "cell 2: ZeroDivisionError: division by zero"]


@pytest.mark.browser
def test_run_all_waits_beyond_a_wanted_error(open_notebook, tmp_path):
    path = write_notebook(tmp_path / "wanted.ipynb", "1 / 0", "import time; time.sleep(3)", 'print("ran to the end")')
    content = nbformat.read(path, as_version=4)
    content.cells[1].metadata["tags"] = ["raises-exception"]
    nbformat.write(content, path)
    notebook = open_notebook(path)
    notebook.run_all()
    assert notebook.cells()[-1]["outputs"][0]["text"] == "ran to the end\n"
    assert notebook.errors() == []


@pytest.mark.browser
def test_a_picture_that_is_not_there_is_seen(open_notebook, tmp_path):
    there = "data:image/svg+xml;utf8,<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    text = f'<img src="{there}" alt="there"> ![missing](../../image/nothing.svg)'
    notebook = open_notebook(write_notebook(tmp_path / "pictures.ipynb", "1", text=text))
    notebook.run_all()
    assert notebook.broken_pictures() == ["missing"]
