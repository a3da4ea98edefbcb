"""Numbers as pandas frames and matplotlib axes: the same numbers as in the report, or a clear word without them."""

import importlib.util

import numpy as np
import pytest
from test_svg_report import OUT_OF_MEMORY as OUT
from test_svg_report import report

from virtual_gpu.plan import plan_training
from virtual_gpu.report import MemoryTable
from virtual_gpu.trace.timeline import CATEGORIES
from virtual_gpu.units import GiB


def test_a_reports_phases():
    pytest.importorskip("pandas")
    one = report()
    frame = one.to_frame()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame.peak.tolist() == [phase.peak_bytes for phase in one.timeline.phases]
    assert (frame[list(CATEGORIES)].sum(axis=1) == frame.peak).all()
    assert frame.loc[frame.peak.idxmax(), list(CATEGORIES)].to_dict() == one.at_peak


def test_a_sweeps_reports():
    pytest.importorskip("pandas")
    frame = MemoryTable([report(), OUT]).to_frame()
    assert frame.fits.tolist() == [True, False]
    assert frame.batch_size.tolist() == [4, 4]
    assert frame.peak_bytes.tolist() == [report().peak_bytes, OUT.peak_bytes]


def test_plans():
    pytest.importorskip("pandas")
    plans = plan_training("EleutherAI/polyglot-ko-1.3b", "T4", length=256, batch=4, methods="lora")
    frame = plans.to_frame()
    kinds = [f"{kind}_bytes" for kind in plans.best.at_peak]
    assert frame.optimizer[0] == plans.best.recipe.optimizer
    assert frame.title.tolist() == [plan.title for plan in (*plans.plans, *plans.losers)]
    assert (frame.loc[0, kinds].sum(), frame.needed_bytes[0]) == (plans.best.needed_bytes,) * 2


def tops(ax):
    return [float(bar.get_y() + bar.get_height()) for bar in ax.patches]


def test_a_timeline_on_axes():
    figure = pytest.importorskip("matplotlib.figure")
    ax = figure.Figure().subplots()
    one = report()
    assert one.plot(ax) is ax
    highest = max(collection.get_paths()[0].vertices[:, 1].max() for collection in ax.collections)
    assert highest == pytest.approx(one.peak_bytes / GiB)
    assert ax.lines[0].get_ydata()[0] == one.capacity_bytes / GiB
    assert len(ax.get_legend().get_texts()) == len(CATEGORIES)


def test_bars_on_axes():
    figure = pytest.importorskip("matplotlib.figure")
    ax = figure.Figure().subplots()
    reports = MemoryTable([report(), OUT])
    reports.plot(ax)
    assert max(tops(ax)) == pytest.approx(OUT.needed_bytes / GiB)
    assert np.unique([line.get_ydata()[0] for line in ax.lines]).tolist() == [15]


@pytest.mark.parametrize(
    "ask", [lambda one: one.to_frame(), lambda one: one.plot(), lambda one: MemoryTable([one]).plot()]
)
def test_without_the_library_it_says_which(ask, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install (pandas|matplotlib)"):
        ask(report())
