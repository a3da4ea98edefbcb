"""Chapter 9's panel: the planner."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

from virtual_gpu.host.machines import MACHINES
from virtual_gpu.language import tr
from virtual_gpu.models.adapters import LORA_TARGETS
from virtual_gpu.models.configs import architectures, load_config
from virtual_gpu.plan import MARGIN, METHODS, PRECISIONS, Plans, plan_training
from virtual_gpu.plan.pictures import table_html
from virtual_gpu.plan.ranking import PREFERENCES, preference_label
from virtual_gpu.plan.recipes import cpu_offload_label, method_label
from virtual_gpu.plan.request import make_request
from virtual_gpu.shards.mesh import context_label, copies_label, experts_label, stages_label, tensor_label

from ...panel import Panel, status_line, whole
from .heat_map import BATCH, SHOWN, TARGET, heat_map, stored

FIRST = "EleutherAI/polyglot-ko-5.8b"
_GOALS = {  # GRPO has lengths of its own: `virtual-gpu fit` asks for them
    "sft": ("SFT(지도 미세 조정)", "SFT"),
    "dpo": ("DPO(선호 학습, 배치는 쌍의 수)", "DPO (the batch counts pairs)"),
}
# How several GPUs share the work, where it is not left to the planner; each by itself, so many of them.
_SPLITS = {
    "tensor_parallel": tensor_label, "context_parallel": context_label, "pipeline_parallel": stages_label,
    "expert_parallel": experts_label, "replicas": copies_label,
}  # fmt: skip
_DEGREES = (2, 4, 8)


class PlannerPanel(Panel):
    """Chapter 9: choose a model and GPUs; see the ranked plans, why each loser loses, and the files of one plan."""

    prefix = "planner"

    def __init__(self) -> None:
        super().__init__()
        free = tr(ko="플래너가 고른다", en="the planner chooses"), ""
        models, precisions = [*architectures()], [free, *((name, name) for name in PRECISIONS)]
        margins = [(f"{share}%", share / 100) for share in (0, 5, 10, 15, 20, 30)]
        model, gpus, batch = (
            tr(ko="모델", en="model"),
            tr(ko="GPU 수", en="GPUs"),
            tr(ko="배치(샘플)", en="batch (samples)"),
        )
        precision, margin = tr(ko="정밀도", en="precision"), tr(ko="여유", en="margin")
        goals = [(tr(ko=ko, en=en), name) for name, (ko, en) in _GOALS.items()]
        ranks = [(preference_label(name), name) for name in PREFERENCES]
        anywhere = tr(ko="따지지 않는다", en="any"), ""
        goal, rank, ram = tr(ko="학습 목표", en="objective"), tr(ko="순위 기준", en="ranked by"), tr(ko="RAM", en="RAM")
        selective = tr(ko="남는 메모리로 재계산 줄이기", en="spend what is left on recomputing less")
        kinds = tr(ko="어텐션", en="attention"), tr(ko="모든 선형층", en="all linear layers")
        whole_layers = tr(ko="통째로 학습할 층", en="trained whole")
        target, split = tr(ko="LoRA 대상", en="LoRA on"), tr(ko="분할 방식", en="shared by")
        spread = tr(ko="device_map(층을 GPU에 나누어 올리기)", en="device_map (layers spread)"), ("device_map", True)
        splits = [(label(n), (name, n)) for name, label in _SPLITS.items() for n in _DEGREES]
        slider = widgets.SelectionSlider
        self.controls = {
            "model": self.control(widgets.Combobox, "model", model, options=models, value=FIRST),
            "gpu": self.gpu(),
            "gpus": self.control(slider, "gpus", gpus, options=[1, 2, 4, 8, 16, 32, 64]),
            "length": self.length(512),
            "batch": self.control(widgets.Text, "batch", batch, value="16"),
            "precision": self.control(widgets.Dropdown, "precision", precision, options=precisions),
            "optimizer": self.optimizer(free),
            "margin": self.control(slider, "margin", margin, options=margins, value=MARGIN),
            "objective": self.control(widgets.Dropdown, "objective", goal, options=goals),
            "prefer": self.control(widgets.Dropdown, "prefer", rank, options=ranks),
            "host": self.control(
                widgets.Dropdown, "host", ram, options=[anywhere, *((name, name) for name in MACHINES)]
            ),
            **{
                method: self.control(widgets.Checkbox, method, method_label(method), value=True, indent=False)
                for method in METHODS
            },
            "cpu_offload": self.control(
                widgets.Checkbox, "cpu_offload", cpu_offload_label(), value=False, indent=False
            ),
            "selective": self.control(widgets.Checkbox, "selective", selective, value=False, indent=False),
            "lora_rank": self.control(widgets.Text, "rank", "LoRA rank", value="8"),
            "lora_targets": self.control(
                widgets.Dropdown, "targets", target, options=[*zip(kinds, LORA_TARGETS, strict=True)]
            ),
            "modules_to_save": self.control(
                widgets.Text, "modules", whole_layers, placeholder="modules_to_save (embed_tokens,lm_head)"
            ),
            "split": self.control(widgets.Dropdown, "split", split, options=[free, *splits, spread]),
        }
        search = tr(ko="찾기", en="search")
        self.search = self.button("search", search, self._search, button_style="primary", icon="search")
        self.table, self.why, self.files = (self.html(name) for name in ("table", "why", "files"))
        self.map = self.html("map").add_class("course-lasting")  # it is of no setting
        self.map.value = self._map()
        files = tr(ko="파일 보기", en="files of")
        wide = {"width": "680px"}
        self.choice = self.control(widgets.Dropdown, "choice", files, self._chosen, options=[], layout=wide)
        self.plans: Plans | None = None
        self._shown_for: dict[str, Any] | None = None  # what the plans were found for
        self._found: dict[Any, Plans] = {}
        boxes = [*self.controls.values()]
        seldom = widgets.Accordion([widgets.VBox(boxes[-4:])], selected_index=None).add_class("planner-more")
        seldom.set_title(0, tr(ko="추가 설정: LoRA, 여러 GPU로 나누는 방식", en="More: LoRA, how several GPUs share"))
        shown = self.map, self.table, self.picture, self.why, self.choice, self.files
        rows = boxes[8:11], [seldom], [*boxes[11:-4], self.search]
        self.lay_out(boxes[:4], boxes[4:8], *rows, shown=shown)
        self.move(self._search)

    def clear(self) -> None:
        self._show(None)

    def values(self) -> dict[str, Any]:
        """The chosen request, as `plan_training` takes it."""
        values = super().values()
        methods = tuple(method for method in METHODS if values.pop(method))
        values["batch"] = whole(values["batch"])
        values["lora_rank"] = whole(values["lora_rank"])
        values["modules_to_save"] = tuple(filter(None, map(str.strip, values["modules_to_save"].split(","))))
        values |= {name: values[name] or None for name in ("precision", "optimizer", "host")}
        if split := values.pop("split"):
            values |= dict([split])
        return {**values, "model": values["model"].strip(), "methods": methods}

    def _in_its_words(self, text: str) -> str:
        """As of every panel; of a split, which is an option, its name."""
        split = self.controls["split"]
        said = f"{split.value[0]}=" if split.value else ""
        if said and text.startswith(said):
            return f"{split.label}:{text.partition(':')[2]}"
        return super()._in_its_words(text)

    def _map(self) -> str:
        """What was computed before: a cell that is pressed chooses its model and its GPU."""
        if not TARGET.exists():  # helpers alone, without the course
            return ""
        head = tr(
            ko=f"모델 × GPU 한눈에 보기 (길이 {SHOWN}, 배치 {BATCH}; 칸을 누르면 그 모델과 GPU를 고른다)",
            en=f"Model × GPU (length {SHOWN}, batch {BATCH}; a cell that is pressed chooses its model and GPU)",
        )
        picture = heat_map(stored(), to=("planner-model", "planner-gpu")).svg()
        return f"<details><summary>{escape(head)}</summary>{picture}</details>"

    def _changed(self) -> None:
        text = tr(ko="바뀌었다. '찾기'를 누르면 다시 찾는다.", en="Changed: press 'search'.")
        self.status.value = status_line(text)
        (self.remove_class if self.values() == self._shown_for else self.add_class)("course-old")

    def _search(self) -> None:
        text = tr(
            ko="찾는 중이다. 처음 보는 모델이면 길게는 1분쯤 걸린다. 찾은 계획은 바로 아래에 나온다.",
            en="Searching; a new model can take a minute. What is found is shown below at once.",
        )
        self.status.value = status_line(text)
        request = make_request(**self.values())
        key = request, load_config(request.model).to_json_string()  # a folder may say something else by now
        if key not in self._found:
            self.clear()
            self.remove_class("course-old")
            self._found[key] = plan_training(**self.values(), progress=self._so_far)
        self._show(self._found[key])

    def _so_far(self, plans: Plans) -> None:
        """Draw what is found while the search goes on."""
        if plans.plans:
            self.table.value = table_html(plans)
            self.picture.value = plans.chart()._repr_svg_()
        sure = tr(ko=" 1번은 정해졌다.", en=" Number 1 is settled.") if plans.settled else ""
        text = tr(ko=f"찾는 중이다. 지금까지 {len(plans)}가지.{sure}", en=f"Searching: {len(plans)} so far.{sure}")
        self.status.value = status_line(text)

    def _show(self, plans: Plans | None) -> None:
        self.plans, self._shown_for = plans, None if plans is None else self.values()
        self.remove_class("course-old")
        options = [(f"{i}. {plan.title}", i) for i, plan in enumerate(plans or [], 1)]
        if plans is None:
            self.table.value = self.picture.value = self.why.value = ""
        else:
            self.table.value = table_html(plans)
            head = tr(ko="탈락한 방법과 그 까닭", en="the losers, and why")
            self.why.value = f"<details><summary>{escape(head)}</summary>{plans.why()._repr_html_()}</details>"
        self.choice.options = options
        self.choice.value = options[0][1] if options else None
        self.choice.disabled = not options
        self._chosen()
        if plans is not None:
            self.show(plans.verdict, picture=plans.chart())

    def _chosen(self) -> None:
        if self.plans is None or not self.choice.value:
            self.files.value = ""
            return
        files = self.plans[self.choice.value - 1].files()
        self.files.value = "".join(
            f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
            for name, text in files.items()
        )


def planner_panel() -> PlannerPanel:
    """Chapter 9: model, GPUs, length, batch, methods → ranked plans, why each loser loses, the files of a plan."""
    return PlannerPanel()
