"""Chapter 7: a model that is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.shards.rank_peak import RankStep
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.units import choose, human_bytes, positive_int

from ...ranks.launcher import RankError, run_ranks
from ...self_check import Case, Exercise, compare, filled, right
from .pipeline import PipelineRun, bubble, pipeline
from .tensor import HOMES, LLAMA_LAYERS, known_plan, tensor_parallel_llama


def _judge_micro_batches(function: Callable[[int, float], int]) -> str:
    for stages, most in ((4, 0.21), (8, 0.11), (16, 0.07)):
        expected = next(m for m in range(1, 10**4) if (stages - 1) / (m + stages - 1) <= most)
        wrong = compare(function(stages, most), expected, f"stages={stages}, most={most}")
        if wrong:
            return wrong
    return right()


def _judge_plan(plan: dict[str, str]) -> str:
    plan = filled(plan)
    if not isinstance(plan, dict):
        return tr(ko=f"행렬의 이름과 방향을 dict로 적는다: {plan!r}", en=f"A dict of name and direction: {plan!r}")
    empty = [name for name, how in plan.items() if how in (None, ...)]
    if empty:
        return tr(ko=f"아직 비어 있다: {', '.join(empty)}", en=f"Still empty: {', '.join(empty)}")
    plan = known_plan(plan)
    try:
        run = run_ranks(tensor_parallel_llama, 2, plan)[0]
    except RankError as error:
        said = str(error).splitlines()[0].split(": ", 1)[1]
        return tr(ko=f"이 계획으로는 나눌 수 없다. {said}", en=f"This plan does not work. {said}")
    sums = run.forward["all_reduce"] / LLAMA_LAYERS
    said = tr(ko=f"층마다 순전파의 all-reduce {sums:g}번", en=f"{sums:g} all-reduces a layer in the forward pass")
    if run.difference > 1e-9:
        return tr(
            ko=f"{said}. 나누지 않은 모델과 {run.difference:.2g}만큼 다르다.",
            en=f"{said}; {run.difference:.2g} off the whole model.",
        )
    if len(plan) < len(HOMES):
        return tr(ko=f"{said}. 나누지 않은 행렬이 남았다.", en=f"{said}; a matrix is left whole.")
    return right(said)


def _step_of_70b(**settings: Any) -> RankStep:
    """Llama-3.1-70B on 64 H100: `tensor_parallel`, and what may be varied beside."""
    for name in settings:
        allowed = ("tensor_parallel", "gradient_checkpointing", "sequence_length")
        choose(name, allowed, tr(ko="설정", en="setting"))
    return rank_step("meta-llama/Llama-3.1-70B", 64, **{"sequence_length": 4096} | settings)


def _judge_tensor_parallel(degree: int) -> str:
    degree = positive_int(filled(degree), "tensor_parallel")
    step = _step_of_70b(tensor_parallel=degree)
    if degree < 64 and not _is_refused(2 * degree):
        return tr(ko=f"{degree}: 되지만, {2 * degree}도 된다.", en=f"{degree} works, and so does {2 * degree}.")
    return right(human_bytes(step.total))


def _is_refused(degree: int) -> bool:
    try:
        _step_of_70b(tensor_parallel=degree)
    except ValueError:
        return True
    return False


def _pipeline_of_four(schedule: str = "GPipe", micro_batches: int = 8) -> list[PipelineRun]:
    return run_ranks(pipeline, 4, schedule, micro_batches)


MOST_BUBBLE, MOST_BYTES = 0.1, 8 * 2**20


def _judge_schedule(answer: tuple[str, int]) -> str:
    answer = filled(answer)
    if not isinstance(answer, tuple) or len(answer) != 2:
        return tr(ko=f"(순서, 마이크로 배치 수)로 답한다: {answer!r}", en=f"(schedule, micro-batches): {answer!r}")
    runs = _pipeline_of_four(*answer)
    waits, held = float(bubble(runs)), max(run.kept_bytes for run in runs)
    said = tr(
        ko=f"버블 {waits:.1%}, 가장 많이 붙든 rank {human_bytes(held)}", en=f"bubble {waits:.1%}, {human_bytes(held)}"
    )
    if waits > MOST_BUBBLE or held > MOST_BYTES:
        limit = f"{MOST_BUBBLE:.0%}, {human_bytes(MOST_BYTES)}"
        return tr(ko=f"{said}. 한도는 {limit}다.", en=f"{said}; the limits are {limit}.")
    return right(said)


EXERCISES = {
    "7-1": lambda: Exercise(
        "7-1",
        _judge_micro_batches,
        lambda: [
            tr(
                ko="버블은 (p − 1)/(m + p − 1)이다. p는 단계 수, m은 마이크로 배치 수다.",
                en="The bubble is (p - 1)/(m + p - 1): p stages, m micro-batches.",
            ),
            tr(
                ko="m을 1부터 하나씩 늘리다가 처음으로 most 이하가 되는 곳에서 멈춘다.",
                en="Count m up from 1 and stop where the bubble is first at most `most`.",
            ),
        ],
        "def micro_batches(stages, most):\n"
        "    m = 1\n"
        "    while (stages - 1) / (m + stages - 1) > most:\n"
        "        m += 1\n"
        "    return m",
    ),
    "7-2": lambda: Exercise(
        "7-2",
        _judge_plan,
        lambda: [
            tr(
                ko="SwiGLU는 gate_proj와 up_proj의 결과를 원소끼리 곱한다. 그 앞에서 아무것도 더하지 않으려면?",
                en="SwiGLU multiplies gate_proj by up_proj element by element: nothing may be added before.",
            ),
            tr(
                ko="열로 나눈 결과를 그대로 받는 행렬은 행으로 나눈다. o_proj는 헤드를, down_proj는 폭을 받는다.",
                en="What takes a result split by columns is split by rows: o_proj takes heads, down_proj the width.",
            ),
        ],
        "plan = {\n"
        '    "q_proj": "columns", "k_proj": "columns", "v_proj": "columns", "o_proj": "rows",\n'
        '    "gate_proj": "columns", "up_proj": "columns", "down_proj": "rows",\n'
        "}",
    ),
}

CASES = {
    "7-A": lambda: Case(
        "7-A",
        _judge_schedule,
        lambda: [
            tr(
                ko="rank 0이 붙드는 수는 GPipe에서 m개, 1F1B에서 p개다. m을 늘리면 마이크로 배치 하나는 작아진다.",
                en="Rank 0 holds m micro-batches under GPipe and p under 1F1B. A larger m makes each of them smaller.",
            ),
            tr(
                ko="버블은 m을 늘리거나 순서를 바꾸어 줄인다.",
                en="More micro-batches, or another schedule, shrink the bubble.",
            ),
        ],
        'case("7-A").run(schedule="1F1B", micro_batches=32)\nanswer = ("1F1B", 32)',
        experiment=_pipeline_of_four,
        thread="deepspeedai/DeepSpeed #4477",
    ),
    "7-B": lambda: Case(
        "7-B",
        _judge_tensor_parallel,
        lambda: [
            tr(
                ko="16이 거절되면 오류 문장에 나오는 헤드 수를 읽는다.",
                en="If 16 is refused, read the number of heads in the error.",
            ),
            tr(ko="KV 헤드를 똑같이 나누는 가장 큰 수다.", en="The largest number that divides the KV heads."),
        ],
        'case("7-B").run(tensor_parallel=8)\ndegree = 8',
        experiment=_step_of_70b,
        thread="huggingface/transformers #48307, pytorch/torchtitan #2574",
    ),
}
