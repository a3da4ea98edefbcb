"""Claims about levers that people repeat, each tried on the record of benchmarks/levers: true, conditional or false.

A verdict follows from the numbers beside it: where they change so that it no longer holds, it changes too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.levers.catalogue import BASES, LARGE, META
from virtual_gpu.models.configs import load_config
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.states import states_of
from virtual_gpu.units import GiB

Rows = dict[str, dict[str, Any]]
TRUE, CONDITIONAL, FALSE, UNKNOWN = "참", "조건부", "거짓", "확인하지 못했다"
ACTIVE_PARAMETERS = 3.3e9  # of Qwen3-30B-A3B, as its model card says


class Claim(NamedTuple):
    """What is claimed, where, and how it is tried. needs: (base, lever) that the record has to have."""

    text: str
    source: str
    needs: tuple[tuple[str, str], ...]
    tried: Callable[[Rows], tuple[str, str]]


def gib(nbytes: float) -> str:
    return f"{nbytes / GiB:.2f} GiB"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _sixteen(rows: Rows) -> tuple[str, str]:
    sizes = {
        precision: sum(states_of(Setting(batch_size=1, model_id="Qwen/Qwen2.5-7B", precision=precision)).values())
        for precision in ("mixed_bf16", "bf16")
    }
    lora = sum(states_of(Setting(batch_size=1, model_id="Qwen/Qwen2.5-7B", precision="bf16", peft="lora")).values())
    return CONDITIONAL, (
        f"Qwen2.5-7B의 가중치, 그레이디언트, AdamW 상태는 fp32로 두면 {gb(sizes['mixed_bf16'])}, 모두 bf16이면 "
        f"{gb(sizes['bf16'])}, LoRA면 {gb(lora)}다. ‘7B’가 70억은 아니고, 순전파 상태는 더해야 한다"
    )


def _table(rows: Rows) -> tuple[str, str]:
    said = {"8b": 8, "8b-lora": 2, "nf4": 0.5}
    found = {
        "8b": rows["8b"]["base"]["peak"],
        "8b-lora": rows["8b-lora"]["base"]["peak"],
        "nf4": rows["8b-lora"]["nf4_checkpointed"]["peak"],
    }
    worst = max(abs(said[name] * 8e9 / found[name] - 1) for name in said)
    verdict = TRUE if worst < 0.1 else CONDITIONAL if abs(8 * 8e9 / found["8b"] - 1) < 0.1 else FALSE
    return verdict, (
        f"8B에 표는 64, 16, 4 GB라고 한다. 여기서는 bf16 전체 {gb(found['8b'])}, LoRA "
        f"{gb(found['8b-lora'])}, "
        f"QLoRA와 체크포인팅 {gb(found['nf4'])}다. 어댑터의 줄은 길이와 로짓을 빼고 가중치만 센 값에 가깝다"
    )


def _float8(rows: Rows) -> tuple[str, str]:
    start, fp8 = rows["8b"]["base"]["peak"], rows["8b"]["float8"]["peak"]
    verdict = TRUE if fp8 < 0.6 * start else CONDITIONAL if fp8 < 0.95 * start else FALSE
    return verdict, (
        f"torchao의 fp8 학습은 {gib(start)}를 {gib(fp8)}로 바꾼다(컴파일하지 않고). 곱만 fp8이고 가중치, 그레이디언트, "
        "옵티마이저 상태는 그대로다"
    )


def _experts(rows: Rows) -> tuple[str, str]:
    peak = rows["moe-lora"]["base"]["peak"]
    active = 2 * ACTIVE_PARAMETERS
    return (TRUE if peak < 1.5 * active else FALSE), (
        f"Qwen3-30B-A3B가 한 토큰에 쓰는 33억 개는 bf16으로 {gb(active)}지만, 가중치는 모두 카드에 있어야 "
        f"해서 LoRA에도 {gb(peak)}가 든다. 줄어드는 것은 연산이다"
    )


def _muon(rows: Rows) -> tuple[str, str]:
    setting = Setting(batch_size=1, model_id=LARGE, precision="bf16", optimizer="adamw_fused")
    state = states_of(setting)["optimizer"]
    start, muon, loop = (rows["8b"][name]["peak"] for name in ("base", "muon", "loop"))
    saved = start - muon
    verdict = TRUE if saved > 0.45 * state else CONDITIONAL if saved > 0 else FALSE
    return verdict, (
        f"AdamW의 상태 {gib(state)} 가운데 행렬의 분산이 없어지지만 임베딩과 출력층은 AdamW이고, 스텝의 임시가 "
        f"생긴다. 최대는 {gib(start)}에서 {gib(muon)}로 {gib(saved)} 준다(하나씩 스텝하는 AdamW는 {gib(loop)})"
    )


def _galore(rows: Rows) -> tuple[str, str]:
    galore, layers = rows["8b"]["galore"]["peak"], rows["8b"]["galore_layerwise"]["peak"]
    lora = rows["8b-lora"]["checkpointing"]["peak"]
    verdict = TRUE if galore < lora else CONDITIONAL if layers < lora else FALSE
    return verdict, (
        f"체크포인팅을 켠 8B에서 GaLore {gib(galore)}, 층마다 바로 스텝하는 GaLore {gib(layers)}, LoRA {gib(lora)}다. "
        "메모리만 견준 것이고, 배우는 질은 여기서 재지 않았다"
    )


def _paged(rows: Rows) -> tuple[str, str]:
    start, paged = rows["8b"]["base"]["peak"], rows["8b"]["paged"]["peak"]
    setting = Setting(batch_size=1, model_id=LARGE, precision="fp32", optimizer="adamw_fused")
    state = states_of(setting)["optimizer"]
    return CONDITIONAL, (
        f"PyTorch가 세는 최대는 {gib(start)}에서 {gib(paged)}로 줄지만, fp32 상태 {gb(state)}는 관리 메모리에 그대로 "
        f"있다. 카드에 자리가 없으면 스텝마다 그것이 PCIe를 들어오고 나간다(최대 {gb(2 * state)}). "
        "torchtune이 8B로 재니 8비트 페이지는 느려지지 않았고(오갔는지는 적혀 있지 않다) 8비트가 아닌 페이지는 스텝에 "
        "6초 넘게 걸렸다"
        "([#990](https://github.com/meta-pytorch/torchtune/pull/990))"
    )


def _eight_bits(rows: Rows) -> tuple[str, str]:
    ways = "base", "int8", "checkpointing", "int8_checkpointed", "int8_reentrant"
    found = {name: [rows[name][key]["peak"] for key in ways] for name in ("1.3b-lora", "8b-lora")}
    # The weights, and adapters that they leave as they are: half of it, or nearly.
    halved = [eight <= 0.6 * whole for whole, eight, *_ in found.values()]
    halved += [min(eights) <= 0.6 * whole for _, _, whole, *eights in found.values()]
    said = ". ".join(
        f"`{name}`: LoRA {gib(whole)}, 8비트 {gib(eight)}. 체크포인팅을 켜면 {gib(checkpointed)}, {gib(kept)}, "
        f"`use_reentrant=True`이면 {gib(dropped)}"
        for name, (whole, eight, checkpointed, kept, dropped) in found.items()
    )
    said += (
        ". 절반이 되는 것은 선형층의 가중치뿐이고, 8비트 곱셈은 체크포인팅의 새 구현이 버리지 못하게 입력을 들고 있다"
    )
    return (TRUE if all(halved) else CONDITIONAL if any(halved) else FALSE), said


def _qlora(rows: Rows, chapter_8: tuple[int, int] | None = None) -> tuple[str, str]:
    """chapter_8: peaks of LoRA and QLoRA where chapter 8 compares them, in pure fp16 and with 32-bit layer norms."""
    if chapter_8 is None:
        chapter_8 = tuple(
            predict_memory(Setting(batch_size=16, peft=peft), gpu="T4").needed_bytes for peft in ("lora", "qlora")
        )
    pairs = [
        (name, rows[name]["base"]["peak"], rows[name]["nf4"]["peak"], rows[name]["checkpointing"]["peak"],
         rows[name]["nf4_checkpointed"]["peak"])
        for name in ("1.3b-lora", "8b-lora")
    ]  # fmt: skip
    less = [qlora < lora for _, lora, qlora, *_ in pairs] + [both < checkpointed for *_, checkpointed, both in pairs]
    less.append(chapter_8[1] < chapter_8[0])
    said = ". ".join(
        f"`{name}`: LoRA {gib(lora)}, QLoRA {gib(qlora)}, 둘 다 체크포인팅을 켜면 {gib(checkpointed)}, {gib(both)}"
        for name, lora, qlora, checkpointed, both in pairs
    )
    said += (
        f". [8장](../notebooks/ko/08_lora.ipynb)의 순수 fp16 polyglot(배치 16, 체크포인팅 없음): "
        f"LoRA {gib(chapter_8[0])}, QLoRA {gib(chapter_8[1])}. 층 정규화를 fp32로 바꾸어 순전파 상태가 커지는 탓이다"
    )
    return (TRUE if all(less) else CONDITIONAL if any(less) else FALSE), said


def _half(rows: Rows) -> tuple[str, str]:
    pairs = [(name, rows[name]["base"]["peak"], rows[name]["fsdp2"]["peak"]) for name in ("1.3b-x2", "8b-x8")]
    pairs.append(("8b-lora-x2", rows["8b-lora-x2"]["base"]["peak"], rows["8b-lora-x2"]["fsdp2_lora"]["peak"]))
    near = [0.45 < fsdp2 / ddp < 0.55 for _, ddp, fsdp2 in pairs]
    less = [fsdp2 < 0.55 * ddp for _, ddp, fsdp2 in pairs]
    said = ", ".join(f"`{name}`: {gib(ddp)}에서 {gib(fsdp2)}({fsdp2 / ddp * 100:.0f}%)" for name, ddp, fsdp2 in pairs)
    return (TRUE if all(near) else CONDITIONAL if any(less) else FALSE), (
        f"{said}. 상태는 카드 수로 나누어지고(DDP의 묶음도 없어진다) 순전파 상태는 나누어지지 않는다. "
        "절반은 어느 쪽도 아니다"
    )


def _hybrid(rows: Rows) -> tuple[str, str]:
    fsdp2, hsdp, ddp = (rows["8b-x8"][name] for name in ("fsdp2", "hsdp", "base"))
    verdict = TRUE if hsdp["peak"] < 1.1 * fsdp2["peak"] else FALSE
    return verdict, (
        f"여덟 장을 네 장씩 두 묶음으로 나누면 {gib(hsdp['peak'])}, 여덟 장으로 나누면 {gib(fsdp2['peak'])}다"
        f"(DDP {gib(ddp['peak'])}). 상태를 8이 아니라 4로 나누기 때문이다. 보내는 양도 {gb(fsdp2['sent'])}에서 "
        f"{gb(hsdp['sent'])}로 는다. 얻는 것은 모으는 일이 네 장 안에서 끝나는 것이다"
    )


def _by_n(rows: Rows, alone: int | None = None) -> tuple[str, str]:
    """alone: what one card would need for the same text."""
    if alone is None:
        same = {"precision": "mixed_bf16", "optimizer": "adamw_fused", "gradient_checkpointing": True}
        setting = Setting(batch_size=1, sequence_length=2048, model_id=LARGE, **same)
        alone = predict_memory(setting, gpu="H100").peak_bytes
    tensor, sequence, loss = (rows["8b-x8"][name]["peak"] for name in ("tensor", "sequence", "loss_parallel"))
    verdict = TRUE if tensor < 1.05 * alone / 8 else CONDITIONAL if loss < 1.05 * alone / 8 else FALSE
    return verdict, (
        f"글 하나(1 × 2048)를 한 장이 하면 {gib(alone)}, 그 8분의 1은 {gib(alone / 8)}다. 텐서 병렬 8은 "
        f"{gib(tensor)}, 시퀀스 병렬까지 {gib(sequence)}, 로짓까지 나누면 {gib(loss)}다. 모델의 계획은 블록의 행렬과 "
        "출력층을 나누고, 로짓은 카드마다 온전히 모은다"
    )


def _no_checkpoints(rows: Rows) -> tuple[str, str]:
    found = rows["405b-x16384"]
    start, compiled, columns = (found[name]["peak"] for name in ("base", "layout_compiled", "layout_columns"))
    program = BASES["405b-x16384"]
    in_flight, layers = META.pipeline - 1, 8
    gathered = 2 * 2 * program.length * load_config(program.model_id).hidden_size
    without = (found[name]["fits"] for name in ("base", "layout_interleaved", "layout_compiled"))
    return TRUE if any(without) else UNKNOWN, (
        f"같은 배열을 PyTorch에 있는 것만으로 하면 둘째 스테이지에 {gib(start)}가 들어 80 GB 카드에 들어가지 않고, "
        f"블록을 컴파일해도 {gib(compiled)}다. 그 가운데 {gib(in_flight * layers * gathered)}는 시퀀스 병렬이 어텐션과 "
        f"MLP에 넣으려고 모은 입력이다(붙드는 마이크로 배치 {in_flight} × {layers}층 × {gathered / 2**20:.0f} MiB). "
        f"열로 나눈 곱과 어텐션의 결과만 남기고 나머지를 다시 계산하면 {gib(columns)}로 들어가지만, 그것도 "
        "체크포인팅이다. 논문은 쓰지 않을 텐서를 미리 놓았다고 적었고, 그 코드는 공개되지 않았다"
    )


_LLAMA_FACTORY = "[LLaMA-Factory README](https://github.com/hiyouga/LLaMA-Factory#hardware-requirement)"
CLAIMS = (
    Claim(
        "7B를 학습하려면 112 GB가 든다",
        "[stanford_alpaca #322](https://github.com/tatsu-lab/stanford_alpaca/issues/322)의 셈법", (), _sixteen,
    ),
    Claim(
        "8x, 2x, x÷2 GB: 전체(bf16), LoRA, QLoRA", _LLAMA_FACTORY,
        (("8b", "base"), ("8b-lora", "base"), ("8b-lora", "nf4_checkpointed")), _table,
    ),
    Claim(
        "fp8로 학습하면 메모리가 절반이다", "[torchao #1102](https://github.com/pytorch/ao/issues/1102)의 물음",
        (("8b", "base"), ("8b", "float8")), _float8,
    ),
    Claim(
        "MoE는 활성 파라미터만큼만 든다", "[unsloth #3162](https://github.com/unslothai/unsloth/issues/3162)의 물음",
        (("moe-lora", "base"),), _experts,
    ),
    Claim(
        "Muon은 옵티마이저 상태를 절반으로 줄인다", "[Muon is Scalable](https://arxiv.org/abs/2502.16982)",
        (("8b", "base"), ("8b", "muon"), ("8b", "loop")), _muon,
    ),
    Claim(
        "GaLore가 LoRA보다 낫다(메모리)", "[GaLore](https://arxiv.org/abs/2403.03507)",
        (("8b", "galore"), ("8b", "galore_layerwise"), ("8b-lora", "checkpointing")), _galore,
    ),
    Claim(
        "페이지 옵티마이저는 공짜다", "[QLoRA](https://arxiv.org/abs/2305.14314) 3절을 두고 하는 말",
        (("8b", "base"), ("8b", "paged")), _paged,
    ),
    Claim(
        "8비트로 양자화하면 메모리가 절반이다",
        "[transformers 4.50 문서](https://huggingface.co/docs/transformers/v4.50.0/ko/quantization/bitsandbytes)",
        tuple(
            (base, key)
            for base in ("1.3b-lora", "8b-lora")
            for key in ("base", "int8", "checkpointing", "int8_checkpointed", "int8_reentrant")
        ),
        _eight_bits,
    ),
    Claim(
        "QLoRA는 언제나 LoRA보다 덜 든다",
        "[bitsandbytes #1569](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1569)가 묻는 것",
        tuple((b, k) for b in ("1.3b-lora", "8b-lora") for k in ("base", "nf4", "checkpointing", "nf4_checkpointed")),
        _qlora,
    ),
    Claim(
        "FSDP는 DDP의 메모리를 절반으로 줄인다", "실무에서 하는 말",
        (*((base, key) for base in ("1.3b-x2", "8b-x8") for key in ("base", "fsdp2")), ("8b-lora-x2", "base"),
         ("8b-lora-x2", "fsdp2_lora")), _half,
    ),
    Claim(
        "HSDP도 FSDP만큼 적게 든다", "실무에서 하는 말",
        tuple(("8b-x8", key) for key in ("base", "fsdp2", "hsdp")), _hybrid,
    ),
    Claim(
        "텐서 병렬은 모든 것을 N으로 나눈다", "실무에서 하는 말",
        tuple(("8b-x8", key) for key in ("tensor", "sequence", "loss_parallel")), _by_n,
    ),
    Claim(
        "405B를 8K 길이에서 체크포인팅 없이 학습했다",
        "[Llama 3 논문](https://arxiv.org/abs/2407.21783) 3.3.2절",
        tuple(
            ("405b-x16384", key) for key in ("base", "layout_interleaved", "layout_compiled", "layout_columns")
        ), _no_checkpoints,
    ),
)  # fmt: skip


def section(rows: Rows) -> str:
    """The claims that the record can try, as a table; "" where there is none."""
    found = [claim for claim in CLAIMS if all(key in rows.get(base, {}) for base, key in claim.needs)]
    lines = ["| 주장 | 판정 | 계산해 보니 | 출처 |", "|---|---|---|---|"]
    for claim in found:
        verdict, why = claim.tried(rows)
        lines.append(f"| {claim.text} | **{verdict}** | {why}. | {claim.source} |")
    return "\n".join(lines)
