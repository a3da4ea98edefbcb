"""Chapter 8's panel: the planner."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

from ..gpu_catalog import CATALOG
from ..language import tr
from ..models import architectures
from ..planner import METHODS, PRECISIONS, Plans, plan_training
from ..planner.pictures import table_html
from ..planner.plans import make_request, method_label
from ..training import OPTIMIZERS
from . import STYLE, WIDE, error_line, status_line

FIRST = "EleutherAI/polyglot-ko-5.8b"


class PlannerPanel(widgets.VBox):
    """Chapter 8: choose a model and GPUs; see the ranked plans, why each loser loses, and the files of one plan."""

    def __init__(self) -> None:
        def control(kind: Any, name: str, description: str, **arguments: Any) -> Any:
            widget = kind(description=description, layout=WIDE, style=STYLE, **arguments)
            widget.add_class(f"planner-{name}")
            widget.observe(self._changed, names="value")
            return widget

        free = tr(ko="플래너가 고른다", en="the planner chooses")
        self.controls = {
            "model": control(
                widgets.Combobox,
                "model",
                tr(ko="모델", en="model"),
                options=list(architectures()),
                value=FIRST,
                continuous_update=False,
            ),
            "gpu": control(widgets.Dropdown, "gpu", "GPU", options=list(CATALOG), value="T4"),
            "gpus": control(
                widgets.SelectionSlider,
                "gpus",
                tr(ko="GPU 수", en="GPUs"),
                options=[1, 2, 4, 8, 16, 32, 64],
                continuous_update=False,
            ),
            "length": control(
                widgets.SelectionSlider,
                "length",
                tr(ko="길이(토큰)", en="length (tokens)"),
                options=[64, 128, 256, 512, 1024, 2048, 4096, 8192],
                value=512,
                continuous_update=False,
            ),
            "batch": control(
                widgets.Text, "batch", tr(ko="배치(샘플)", en="batch (samples)"), value="16", continuous_update=False
            ),
            "precision": control(
                widgets.Dropdown,
                "precision",
                tr(ko="정밀도", en="precision"),
                options=[(free, ""), *((name, name) for name in PRECISIONS)],
            ),
            "optimizer": control(
                widgets.Dropdown,
                "optimizer",
                tr(ko="옵티마이저", en="optimizer"),
                options=[(free, ""), *((name, name) for name in OPTIMIZERS)],
            ),
            "margin": control(
                widgets.SelectionSlider,
                "margin",
                tr(ko="여유", en="margin"),
                options=[(f"{share}%", share / 100) for share in (0, 5, 10, 15, 20, 30)],
                value=0.1,
                continuous_update=False,
            ),
            **{
                method: control(widgets.Checkbox, method, method_label(method), value=True, indent=False)
                for method in METHODS
            },
        }
        self.search = widgets.Button(description=tr(ko="찾기", en="search"), button_style="primary", icon="search")
        self.search.add_class("planner-search")
        self.search.on_click(self._search)
        self.status, self.table, self.picture, self.why, self.files = (widgets.HTML() for _ in range(5))
        for name in ("status", "table", "picture", "why", "files"):
            getattr(self, name).add_class(f"planner-{name}")
        self.choice = widgets.Dropdown(
            description=tr(ko="파일 보기", en="files of"), options=[], layout={"width": "680px"}, style=STYLE
        )
        self.choice.add_class("planner-choice")
        self.choice.observe(self._chosen, names="value")
        self.plans: Plans | None = None
        self._found: dict[Any, Plans] = {}
        values = [*self.controls.values()]
        left, right, methods = values[:4], values[4:8], values[8:]
        columns = widgets.HBox([widgets.VBox(left), widgets.VBox(right)], layout={"flex_flow": "row wrap"})
        super().__init__(
            [
                columns,
                widgets.HBox([*methods, self.search], layout={"flex_flow": "row wrap"}),
                *(self.status, self.table, self.picture, self.why, self.choice, self.files),
            ]
        )
        self.add_class("planner-panel")
        self._search(None)

    def __repr__(self) -> str:
        return "PlannerPanel()"

    def values(self) -> dict[str, Any]:
        """The chosen request, as `plan_training` takes it."""
        values = {name: widget.value for name, widget in self.controls.items()}
        methods = tuple(method for method in METHODS if values.pop(method))
        batch = values["batch"].strip()
        values["batch"] = int(batch) if batch.isascii() and batch.removeprefix("-").isdecimal() else values["batch"]
        values |= {"precision": values["precision"] or None, "optimizer": values["optimizer"] or None}
        return {**values, "model": values["model"].strip(), "methods": methods}

    def _changed(self, _: Any) -> None:
        text = tr(ko="바뀌었다. '찾기'를 누르면 다시 찾는다.", en="Changed: press 'search'.")
        self.status.value = status_line(text)

    def _search(self, _: Any) -> None:
        text = tr(
            ko="찾는 중이다. 처음 보는 모델이면 몇십 초 걸린다.",
            en="Searching; a new model takes some tens of seconds.",
        )
        self.status.value = status_line(text)
        try:
            request = make_request(**self.values())
            if request not in self._found:
                plans = plan_training(**self.values())
                plans.changes  # noqa: B018 - found once, with the rest
                self._found[request] = plans
            plans = self._found[request]
        except (ValueError, ImportError, OSError) as error:
            self._show(None)
            self.status.value = error_line(error)
            return
        self._show(plans)

    def _show(self, plans: Plans | None) -> None:
        self.plans = plans
        options = [(f"{i}. {plan.title}", i) for i, plan in enumerate(plans or [], 1)]
        if plans is None:
            self.table.value = self.picture.value = self.why.value = ""
        else:
            self.status.value = status_line(plans.verdict)
            self.table.value = table_html(plans)
            self.picture.value = plans.chart().svg()
            head = tr(ko="진 것과 그 까닭", en="the losers, and why")
            self.why.value = f"<details><summary>{escape(head)}</summary>{plans.why()._repr_html_()}</details>"
        self.choice.options = options
        self.choice.value = options[0][1] if options else None
        self.choice.disabled = not options
        self._chosen(None)

    def _chosen(self, _: Any) -> None:
        if self.plans is None or not self.choice.value:
            self.files.value = ""
            return
        files = self.plans[self.choice.value - 1].files()
        self.files.value = "".join(
            f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
            for name, text in files.items()
        )
