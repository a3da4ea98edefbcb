# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="ko"
# # 12장. 한 메모리에 모델 둘: DPO와 GRPO
#
# SFT는 되는데 DPO나 GRPO로 바꾸면 죽는다. 카드에 무엇이 더 있고, **언제** 있을까?
# 이 장은 TRL의 `SFTTrainer`, `DPOTrainer`, `GRPOTrainer`를 고치지 않고 가상 GPU에서 실행해 센다(진짜 H100과의 차이는 12.11절). 수는 TRL 1.16, transformers 5.23의 것이다. 이 TRL은 체크포인팅을 켜고 SFT, DPO, GRPO의 로짓을 조각으로 나누어 계산한다. 내 것은 몇인지 `trl.__version__`부터 확인한다(옛 버전은 12.4절).
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - DPO와 GRPO에서 더해지는 것을 바이트까지 말하고, 그것을 치우거나 줄인다.
# - GRPO의 한 스텝을 단계로 나누어, 설정 하나가 어느 단계를 낮추는지 안다.
# - 답을 만드는 엔진(vLLM)의 몫을 계산하고, T4 한 장에서 쓸 스크립트를 적는다.
#
# 급하면 죽는 때마다 고칠 줄을 모은 표(12.10절)와 T4에서 쓸 스크립트(12.9절)부터 본다. DPO는 12.1~12.5절, GRPO는 12.6절, vLLM은 12.7절이다.

# %%
from functools import partial
from tempfile import mkdtemp

import torch

from helpers import case, exercise, guess, guesses, human_bytes
from helpers.chapters.c11_outside.tried import attempt, compare
from helpers.chapters.c12_two_models.made import QUIET, length_of, pairs, prompts, texts, tokenizer
from virtual_gpu.cards import card
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

torch.set_num_threads(1)
folder = mkdtemp()
billion, small = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B"

# %% [markdown] lang="ko"
# ## 12.1 SFT에서 DPO로 바꾸면
#
# > **주장 1.** "DPO는 모델을 두 번 올리니 메모리가 두 배다" ([LlamaFactory #798](https://github.com/hiyouga/LlamaFactory/issues/798))
#
# SFT(supervised fine-tuning)는 정답인 글을 따라 쓰게 하는 학습이다. DPO(direct preference optimization)는 **선호 학습**이다. 좋은 답의 확률은 올리고 나쁜 답의 확률은 내린다. 얼마나 오르내렸는지는 처음 모델의 확률과 비교해 잰다. 그래서 처음 모델이 있어야 한다.
#
# DPO의 데이터는 **쌍**이다. 질문(프롬프트) 하나에 좋은 답과 나쁜 답이 있다. 카드에서는 질문에 답을 하나씩 이은 **문장** 둘이고, 학습하는 모델(**정책**, policy) 옆에 처음 모델(**기준 모델**, reference model)이 하나 더 있다.
#
# Qwen3-0.6B를 TRL의 기본값으로 학습한다. SFT는 길이 512인 글 8개(글 하나가 문장 하나다), DPO는 질문 256토큰에 답 256토큰인 쌍 4개다. `DPOConfig`의 배치는 **쌍의 수**라서, SFT에서 8이었다면 4로 적어야 문장의 수가 같다. DPO의 최대는 SFT의 **몇 배**일까?

# %%
doubled = guess("12.1", None, "times")
doubled

# %% [markdown] lang="ko"
# 두 프로그램은 TRL을 쓰는 여느 스크립트와 같다. 토크나이저와 데이터만 여기서 만든 것이다(메모리를 정하는 것은 글자가 아니라 길이다). 옵티마이저 상태는 첫 갱신에서 생기므로(3장) 두 스텝을 학습한다. T4에는 bf16 연산 장치가 없으므로(1장) 모두 fp16으로 계산한다.


# %%
def sft(batch, peft_config=None, model=billion, **options):
    options = {"max_steps": 2, "fp16": True, **QUIET, **options}
    arguments = SFTConfig(folder, per_device_train_batch_size=batch, **options)
    data = {"train_dataset": texts(512), "processing_class": tokenizer()}
    SFTTrainer(model, arguments, peft_config=peft_config, **data).train()


def dpo(batch, peft_config=None, reference=None, model=billion, **options):
    options = {"max_steps": 2, "fp16": True, **QUIET, **options}
    arguments = DPOConfig(folder, per_device_train_batch_size=batch, **options)
    data = {"train_dataset": pairs(256, 256), "processing_class": tokenizer()}
    own = reference() if reference else None
    DPOTrainer(model, own, args=arguments, peft_config=peft_config, **data).train()


# %% [markdown] lang="ko"
# 막대 하나가 한 프로그램의 **최대일 때**이고, 칸 안의 수는 GiB다.

# %%
from helpers.chapters.c12_two_models.moments import parts_beside, parts_of_each
from helpers.chapters.c12_two_models.pictures import draw_parts

size = 4  # pairs
both = {
    f"SFT {2 * size}": partial(sft, 2 * size, model=small),
    f"DPO {size}": partial(dpo, size, model=small),
}
bars = parts_of_each(both, "RTX 4090")
draw_parts(bars)

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
at_most = [one.total for one in bars.values()]
doubled.against(at_most[1] / at_most[0])

# %% [markdown] lang="ko"
# <details><summary>주장 1의 판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 여기서는 1.23배다. 두 배가 된 것은 파라미터 한 칸(2.22 → 4.44 GiB)뿐이다. 기준 모델은 학습하지 않으므로 그레이디언트도 옵티마이저 상태도 없다. 전체 미세 조정이면 fp32 네 벌이 다섯 벌이 되니 글이 짧으면 어느 모델이든 5/4, 1.25배쯤이다. 두 배를 넘는 일도 있지만(12.4절) 거기에는 두 번째 모델이 없다. 느는 것은 문장과 로짓이다. (**문장의 수를 같게** 맞춘 비교다. 배치를 SFT와 똑같이 두어도 짧은 글의 전체 미세 조정에서는 거의 보이지 않는다. 아래에서 해 본다.)
#
# </details>
#
# **바꾸어 본다.** 위의 셀에서 `size`를 1로, 또 8로 바꾸어 다시 실행한다. 눈에 띄게 달라지는 칸이 있는가? 그것을 보고 다음을 예상한다.
#
# <details><summary>답</summary>
#
# 거의 없다. 1로 줄이면 임시 텐서만 30 MiB쯤 준다. 임시 텐서의 대부분(0.58 GiB)이 배치와 상관없는 임베딩의 그레이디언트이기 때문이다(다음 실험 뒤에 까닭이 있다). 8로 늘려도 DPO는 11.85 GiB로, 처음 그림의 DPO 4(11.73 GiB)보다 0.12 GiB 많을 뿐이고 처음 그림의 SFT 8(9.51 GiB)의 1.25배다. (막대의 이름도 SFT 16, DPO 8로 바뀐다.)
#
# </details>
#
# 이제 두 배 큰 모델이다. 파라미터가 12.4억 개인 Llama-3.2-1B를 같은 RTX 4090(쓸 수 있는 메모리 23.16 GiB)에서 학습한다. fp32 가중치 한 벌이 4.60 GiB다. SFT는 배치 4로 학습된다. DPO의 배치를 4, 2, 1로 줄이면 배치가 **몇일 때부터** 들어갈까? `none`은 1로도 들어가지 않는다는 뜻이다.

# %%
dpo_fits = guess("12.1, 1B", None, ("4", "2", "1", "none"))
dpo_fits

# %% [markdown] lang="ko"
# 결과의 'OOM' 뒤에는 마지막에 달라고 한 크기와 그것을 부른 함수가 있다(11장).

# %%
programs = {"SFT 4": partial(sft, 4)} | {f"DPO {n}": partial(dpo, n) for n in (4, 2, 1)}
compare(programs, "RTX 4090", ram=False)

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
dpo_fits.against("none")

# %% [markdown] lang="ko"
# 가중치 두 벌, 그레이디언트 한 벌, AdamW의 상태 두 벌이면 다섯 벌, 23.02 GiB다. 이것만이면 한도보다 0.14 GiB 적다. 그런데 역전파의 끝에 **임베딩의 그레이디언트**(128,256 × 2,048 × 4바이트 = 0.98 GiB)가 잠깐 더 있다. 임베딩과 출력층이 가중치를 함께 써서, 둘에서 온 그레이디언트를 더하기 전에 둘이 함께 있다. 모두 24.00 GiB이고 배치와 상관없으니, 배치를 줄여도 들어가지 않는다.
#
# - **내 모델이라면** 짧은 글에서 파라미터 × 16바이트(SFT)가 × 20바이트(DPO)가 된다. 가중치를 함께 쓰는 모델이면 어휘 × 차원 × 4바이트를 더한다. 글이 길면 순전파 상태를 따로 더한다(3장).
# - **한 스텝만 돌려 보고 믿지 않는다.** 셋 다 둘째 스텝의 역전파에서 죽었다. 첫 역전파는 세 벌과 임베딩의 그레이디언트(14.8 GiB)뿐이고, 옵티마이저 상태는 첫 갱신에서 생긴다. (표에는 스텝이 적혀 있지 않다. 위 셀의 `dpo`에 `max_steps=1`을 주어 확인한다. 끝까지 간다.)
# - `LlamaMLP.forward`는 체크포인팅이 층을 재계산하던 중이라 찍힌 이름이다. 죽은 줄의 최대는 필요한 양이 아니다.
#
# ## 12.2 두 배가 되는 것과 되지 않는 것
#
# DPO에 더해진 것은 정말 가중치 한 벌뿐일까? 죽지 않는 카드(A100 80 GB)에서 Llama-3.2-1B로 바이트까지 센다. `precomputed`는 기준 모델의 로그 확률을 미리 계산해 두고 기준 모델을 올리지 않은 것이다(12.3절). 마지막 세 줄은 기준 모델이 없을 때 DPO가 SFT보다 더 쓰는 것, 기준 모델을 올려서 더 쓰는 것, 파라미터 수 × 4바이트다.

# %%
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.models.configs import load_config

ways = {
    "SFT 8": partial(sft, 8),
    "DPO 4, precomputed": partial(dpo, 4, precompute_ref_log_probs=True),
    "DPO 4": partial(dpo, 4),
}
maximum = {name: attempt(program, "A100-80GB").gpu for name, program in ways.items()}
for name, nbytes in maximum.items():
    print(f"{name:19} {nbytes:>14,} {human_bytes(nbytes):>10}")
count = count_parameters(build_model(load_config(billion), torch.float32))
more = {
    "precomputed − SFT": maximum["DPO 4, precomputed"] - maximum["SFT 8"],
    "DPO − precomputed": maximum["DPO 4"] - maximum["DPO 4, precomputed"],
    "parameters × 4": 4 * count,
}
for name, nbytes in more.items():
    print(f"{name:19} {nbytes:>14,}")

# %% [markdown] lang="ko"
# **기준 모델은 가중치 한 벌이다.** 한 바이트도 다르지 않다. 그것을 빼면 DPO와 SFT는 512바이트, 할당자가 주는 가장 작은 블록 하나(3장)가 다르다. 배치 4라면 RTX 4090에서 모자란 것은 **적어도** 24.08 − 23.16 = 0.92 GiB다(12.1절의 24.00 GiB에 배치를 따라가는 임시 텐서와 작업 공간이 더해졌다. 들어가야 하는 것은 할당보다 많은 예약이다).
#
# ## 12.3 기준 모델을 치우는 두 길
#
# 기준 모델은 무엇에 쓰일까? DPO([Rafailov 외, 2023](https://arxiv.org/abs/2305.18290))의 손실이다.
#
# $$\mathcal{L} = -\log \sigma\Big(\beta\,\big[\log\pi_\theta(y_w|x) - \log\pi_{\text{ref}}(y_w|x) - \log\pi_\theta(y_l|x) + \log\pi_{\text{ref}}(y_l|x)\big]\Big)$$
#
# $x$는 질문, $y_w$와 $y_l$은 좋은 답과 나쁜 답, $\pi_\theta$는 정책, $\pi_{\text{ref}}$는 기준 모델이다. $\sigma$는 시그모이드, $\beta$는 차이에 곱하는 수다. 기준 모델이 내는 것은 쌍마다 **로그 확률 두 수**뿐이다. 그래서 치울 수 있다.
#
# - **미리 계산한다.** `precompute_ref_log_probs=True`면 학습 전에 두 수를 모두 적어 두고 기준 모델을 올리지 않는다. 12.2절의 19.48 GiB이니 RTX 4090에 들어간다. 기준 모델의 순전파를 학습 전에 몰아서 하는 것이라 한 에폭이면 횟수가 같고, 여러 에폭이면 오히려 준다. 스트리밍(`IterableDataset`)과 이미지 데이터에는 쓸 수 없다.
# - **LoRA로 학습한다.** 어댑터를 끄면(`disable_adapter`) 남는 것이 처음 모델이다. TRL은 `peft_config`를 받으면 스스로 그렇게 한다.
#
# T4에서 LoRA SFT 8개와 LoRA DPO 4쌍을 비교한다. 기준 모델을 더 부르는 만큼 얼마나 늘까?

# %%
from peft import LoraConfig

extra = guess("12.3", None, "MiB")
extra

# %% [markdown] lang="ko"
# 셋째 줄은 같은 DPO에서 가중치를 fp16으로 읽은 것이고, 넷째 줄은 거기에 `ref_model`을 손수 만들어 준 것이다. 다섯째 줄은 LoRA 없이 RTX 4090에서 전체를 학습하며 기준 모델만 fp16으로 읽은 것이고, 끝의 한 줄은 둘째 줄에서 첫째 줄을 뺀 바이트다.

# %%
from transformers import AutoModelForCausalLM

lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
half = {"model_init_kwargs": {"dtype": "float16"}}
in_half = partial(AutoModelForCausalLM.from_pretrained, billion, dtype="float16")
on_t4 = {
    "SFT 8, LoRA": partial(sft, 8, lora),
    "DPO 4, LoRA": partial(dpo, 4, lora),
    "DPO 4, LoRA, fp16": partial(dpo, 4, lora, **half),
    "DPO 4, LoRA, fp16, ref_model": partial(dpo, 4, lora, in_half, **half),
}
lora_peak = {name: attempt(program, "T4").gpu for name, program in on_t4.items()}
for name, nbytes in lora_peak.items():
    print(f"T4, {name:28} {human_bytes(nbytes):>10}")
full = attempt(partial(dpo, 4, reference=in_half), "RTX 4090")
print(f"RTX 4090, {'DPO 4, fp16 ref_model':22} {human_bytes(full.gpu):>10}, {full.result}")
difference = lora_peak["DPO 4, LoRA"] - lora_peak["SFT 8, LoRA"]
print(f"DPO − SFT {difference:,} bytes")
extra.against(max(0, difference))

# %% [markdown] lang="ko"
# 늘지 않았다(−512바이트는 12.2절에서처럼 가장 작은 블록 하나다). 기준 모델의 순전파는 `no_grad`라 중간값을 층을 지날 때마다 버린다. 그래서 최대는 여전히 정책의 학습에 있다.
#
# - TRL은 시키지 않으면 **LoRA에서도 얼린 가중치를 fp32로 읽는다.** 셋째 줄처럼 `"dtype": "float16"`을 적으면 6.43 GiB가 3.89 GiB로 준다. 모델을 손수 읽었다면 `model_init_kwargs`는 무시되니 `from_pretrained(…, dtype=…)`에 적는다.
# - 다섯째 줄은 기준 모델을 치우지 않고 **절반으로** 줄인다. 24.08 GiB가 21.78 GiB가 되어 배치 4로 들어간다. (로그 확률이 fp32와 얼마나 다른지는 재지 않았다.)
#
# > **주장 2.** "LoRA면 기준 모델은 공짜다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** `peft_config`만 주면 메모리로는 그렇고, 시간은 순전파 한 번이 더 든다. 두 가지 예외가 있다.
#
# - `ref_model`을 손수 만들어 주면 TRL은 그것을 올린다. 넷째 줄이 셋째 줄보다 6.19 − 3.89 = 2.30 GiB, 곧 fp16 한 벌만큼 많다.
# - 이미 학습한 어댑터에서 이어서 하면 기준은 '어댑터가 없는 모델'이 아니라 '처음의 어댑터'다. TRL은 어댑터만 한 벌 복사해 둔다.
#
# </details>
#
# ## 12.4 로짓을 통째로 만들면
#
# A800 80 GB에서 4B 모델을 LoRA로 학습하는데, SFT는 배치 4가 되고 DPO는 배치 2에서 OOM이라는 신고가 있다([LlamaFactory #10175](https://github.com/hiyouga/LlamaFactory/issues/10175)). LoRA이니 기준 모델의 가중치는 없다. 무엇이 다를까?
#
# LLaMA-Factory(2026년 8월의 `train/dpo/trainer.py`)는 TRL 1.16과 달리 로짓을 **모두** 만들어 fp32로 바꾼다. 또 그 로짓의 평균을 지표로 적으려고 손실을 다 계산할 때까지 **붙들고 있다**. 그 순서를 짧게 쓴 것이 `whole_loss`다. `scores`는 로짓과 토큰마다의 로그 확률을 내고, `kept`가 붙든 로짓이다.
#
# 체크포인팅을 켜고 T4에서 LoRA로 순전파와 역전파를 한 번 한다. 배치를 하나 늘릴 때 느는 메모리는 DPO가 SFT의 **몇 배**일까?

# %%
times = guess("12.4", None, "times")
times

# %% [markdown] lang="ko"
# 손실은 로그 확률의 차이를 모두 더하는 것으로 간단히 했다. 그 뒤의 계산은 토큰마다 수 하나라 메모리에는 거의 보이지 않는다.

# %%
from peft import get_peft_model


def loaded(name=billion, **options):
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float16", device_map="cuda", **options)
    model.gradient_checkpointing_enable()
    return get_peft_model(model, lora).train()


def scores(model, ids):
    logits = model(ids, use_cache=False).logits.float()
    return logits, logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])


def whole_loss(model, ids):
    kept, policy = scores(model, ids)
    with torch.no_grad(), model.disable_adapter():
        reference = scores(model, ids)[1]
    del kept
    return (policy - reference).sum()


def whole_dpo(batch, length=512, load=loaded, loss=whole_loss):
    model, ids = load(), torch.ones(2 * batch, length, dtype=torch.int64).cuda()
    loss(model, ids).backward()


def whole_sft(batch, length=512):
    model, ids = loaded(), torch.ones(batch, length, dtype=torch.int64).cuda()
    model(ids, labels=ids, use_cache=False).loss.backward()


whole = {f"SFT {n}": partial(whole_sft, n) for n in (1, 4)}
whole |= {f"DPO {n}": partial(whole_dpo, n) for n in (1, 4)}
most = {name: attempt(program, "T4").gpu for name, program in whole.items()}
print(*(f"{name} {human_bytes(nbytes)}" for name, nbytes in most.items()), sep="\n")
times.against((most["DPO 4"] - most["DPO 1"]) / (most["SFT 4"] - most["SFT 1"]))

# %% [markdown] lang="ko"
# 문장이 두 배인데 메모리는 **세 배가 넘게** 는다. 한 스텝에서 큰 텐서만 골라, 무엇과 함께 있는지 시간을 따라 위에서 아래로 그린다. 한 줄이 한 순간이고, 굵은 줄이 최대다. 좁은 칸은 fp32로 바꾸기 전의 fp16 로짓이다.

# %%
from helpers.chapters.c12_two_models.moments import moments_of_each
from helpers.chapters.c12_two_models.pictures import draw_moments

draw_moments(moments_of_each({"SFT 4": whole["SFT 4"], "DPO 4": whole["DPO 4"]}, "T4"))

# %% [markdown] lang="ko"
# 한 칸은 문장의 수 × 길이 × 어휘 × 4바이트다. SFT 4는 4 × 512 × 128,256 × 4 = 0.98 GiB, DPO 4는 문장이 여덟이라 1.96 GiB다. SFT의 최대에는 그것이 **셋**(2.5 + 3 × 0.98 = 5.4 GiB), DPO의 최대에는 **다섯**(2.6 + 5 × 1.96 = 12.4 GiB) 있다. 그래서 배치를 하나 늘릴 때 느는 것이 2 × 5 / 3 = 3.3배다.
#
# DPO의 최대는 역전파가 아니라 **기준 모델의 `log_softmax`** 에서 나온다. 노란 칸의 **사본**은 코드에 보이지 않는다. SFT에 없는 것은 transformers의 손실이 로짓을 자르지 않고 `labels`를 한 칸 밀기 때문이다. `logits[:, :-1]`은 문장마다 끝이 잘려 메모리에 띄엄띄엄 놓이는데, CUDA의 `log_softmax`는 이어진 텐서를 받아야 해서 잠깐 복사한다(PyTorch의 `SoftMax.cu`).
#
# **연습 12-1.** 굵은 줄의 다섯 칸 가운데 그 순간에 꼭 있어야 하는 것은 어느 것인가? `whole_loss`를 고쳐 **세 칸**으로 줄인다. 손실과 그레이디언트는 그대로여야 한다. `check`는 작은 모델에서 값을 비교하고, T4에서 배치 4로 실행해 그림을 그린다. 고치는 길은 하나가 아니다. 막히면 `exercise("12-1").hint()`를 실행한다.


# %%
def lean_loss(model, ids):
    return ...


exercise("12-1").check(lean_loss)

# %% [markdown] lang="ko"
# <details><summary>푼 다음에</summary>
#
# 이 **순서에서** 꼭 있어야 하는 것은 셋이다. 정책의 `log_softmax`(역전파가 쓴다), 기준 로짓과 기준 `log_softmax`(지금 계산하는 것). 정책의 로짓은 지표 때문에, 사본은 자른 순서 때문에 있다. 순전파를 더 줄여도 최대는 그대로다. **역전파가 세 칸**(`log_softmax` 하나와 그레이디언트 둘)이기 때문이다.
#
# **순서만 바꾸어도 된다.** 기준 모델을 먼저 부르면 로그 확률만 남고 그 로짓은 사라진다. 정책의 로짓은 그다음에 만들므로 8.50 GiB, 세 칸이다. 순서를 그대로 두면 두 군데를 고쳐야 한다. 기준 모델을 부르기 전에 정책의 로짓을 놓으면 네 칸(10.45 GiB)이고, `log_softmax`를 먼저 부르고 자르면 사본도 빠져 세 칸(8.51 GiB)이다. 세 가지를 12.11절에서 그린다.
#
# </details>
#
# 쓰는 도구마다 할 일이 다르다.
#
# - **TRL 1.16**은 로짓을 조각으로 나누어 만들므로 할 일이 없다. 그보다 오래되었으면 `pip install -U "trl>=1.16"`으로 올린다(1.9는 1.16보다 일곱 버전 앞이고, 로짓을 통째로 만들었다). axolotl 0.18은 TRL 1.8에 고정되어 있어 올릴 수 없으니 `rl: dpo`라면 `sequence_len`이나 `micro_batch_size`를 줄인다. Llama-3.2-1B에서 얼마나 차이 나는지는 [레버 한 장](../../docs/levers.md)의 DPO 표에 있다.
# - **LLaMA-Factory**에서 바꿀 설정은 `cutoff_len`이다. 순서는 소스에서 고쳐야 한다.
#
# ### 사건 12-A: SFT는 4가 되는데 DPO는 2도 안 된다
#
# 이 절의 처음에 본 신고로 돌아간다. 같은 데이터와 설정에서 **SFT는 배치 4가 되고, DPO는 배치 2가 안 되고, 배치 1은 된다**고 했는데(배치 1도 누적이 64보다 작을 때만 된다고 적혀 있다. 누적 횟수는 여기서 다루지 않는다), 글의 길이를 적지 않았다. 모델은 Qwen3-4B이고 문장의 길이가 모두 같다고 하자. 세 가지가 모두 사실이 되는 길이를 하나 찾는다.
#
# 위의 두 함수를 bf16, rank 8, 80 GB 카드(쓸 수 있는 것은 78.85 GiB)로 옮긴 것을 `run(way=…, batch=…, length=…)`으로 다섯 번까지 실행한다(`way`는 `"sft"`나 `"dpo"`). 첫 번째는 적어 두었으니, 남은 네 번을 어디에 쓸지 먼저 정한다. 아무 길이나 넣어도 우연히 맞을 수 있다. 먼저 **맞는 길이의 범위**를 계산해 적고, 그 가운데 하나를 `check`에 넣는다.

# %%
case("12-A").run(way="sft", batch=4, length=4096)

# %% [markdown] lang="ko"
# 길이를 적는다. `check`는 세 가지를 차례로 실행해 보고, 처음으로 어긋나는 것을 알려 준다.

# %%
length = ...  # tokens
case("12-A").check(length)

# %% [markdown] lang="ko"
# 두 번이면 되는 방법은 12.11절에 있다. 찾은 다음에 본다.
#
# ## 12.5 T4에서 8B를 DPO로
#
# Colab의 T4에서 4비트로 읽은 8B가 DPO의 배치 1로도 죽었다는 신고가 있다([unsloth #682](https://github.com/unslothai/unsloth/issues/682)). TRL이라면 될까? Llama-3.1-8B를 4비트로 읽고(QLoRA, 8.9절) 1,024토큰짜리 문장 둘로 학습한다. 쓸 수 있는 것은 14.64 GiB다.
#
# 함정이 하나 있다. TRL 1.16은 4비트로 읽은 모델이면 **어댑터를 bf16으로 바꾸는데**, `fp16=True`의 손실 스케일링은 bf16 그레이디언트를 받지 못해 첫 갱신에서 멈춘다([Soup #558](https://github.com/MakazhanAlpamys/Soup/issues/558)). 그래서 Trainer를 만든 **뒤에** 어댑터를 fp32로 되돌린다.
#
# 둘째 열은 3.12절의 한 줄(`with_line`의 `lambda`)을 적은 것이다. 마스크가 없으면 transformers는 키와 값을 늘리지 않고 넘기는데, T4에서는 그것이 길이 × 길이 행렬을 만드는 커널로 간다. 한 줄을 적으면 먼저 헤드 수만큼 늘려 그 커널을 피한다. (여기서는 두 답의 길이가 같아 마스크가 없다. 길이가 다르면 이 행렬은 처음부터 생기지 않는다.)

# %%
from transformers import BitsAndBytesConfig
from transformers.integrations import sdpa_attention

four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float16")


def dpo_8b():
    arguments = DPOConfig(
        folder, per_device_train_batch_size=1, max_steps=2, fp16=True, **QUIET,
        model_init_kwargs={"dtype": "float16", "quantization_config": four_bits},
    )  # fmt: skip
    data = {"train_dataset": pairs(512, 512), "processing_class": tokenizer()}
    trainer = DPOTrainer("meta-llama/Llama-3.1-8B", args=arguments, peft_config=lora, **data)
    for weight in trainer.model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    trainer.train()


def with_line(program, *arguments):
    shipped = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False
    try:
        program(*arguments)
    finally:
        sdpa_attention.use_gqa_in_sdpa = shipped


parts_beside(parts_of_each({"as it is": dpo_8b, "with the line": partial(with_line, dpo_8b)}, "T4"))

# %% [markdown] lang="ko"
# 된다. T4의 절반쯤이고, 대부분은 4비트 가중치와 fp16 그대로인 임베딩, 출력층이다.
#
# 한 줄이 없앤 행렬은 넷, 모두 1 GiB다(하나가 문장 2 × 헤드 32 × 1,024 × 1,024 × 4바이트 = 0.25 GiB). 그런데 최대는 0.60 GiB만 줄었다. **가장 높은 순간을 깎으면 그다음으로 높은 순간이 최대가 되기** 때문이다. 이제 최대는 같은 층의 MLP를 역전파할 때다(할당 기록에서 찾은 것이고 여기에 그리지는 않는다). 거기에는 14,336차원의 중간값(하나에 56 MiB)들과 4비트에서 되돌린 행렬(하나에 112 MiB)이 함께 있다.
#
# 같은 1,024토큰을 12.4절처럼 로짓을 통째로 만들어도 들어가기는 한다(11.23 GiB, 갱신 없이). 2,048토큰이면 죽는다(12.11절). 그러니 1,024토큰이라면 로짓만으로는 신고를 설명하지 못한다. 더 긴 글이었는지 다른 까닭이었는지는 여기서 가리지 않는다. TRL에서 한 줄을 적은 2,048토큰은 실행하지 않았지만 어림할 수 있다. 파라미터, 옵티마이저 상태, 작업 공간을 뺀 1.06 GiB가 모두 두 배가 되어도 8.25 GiB다.
#
# ## 12.6 GRPO의 한 스텝
#
# GRPO(group relative policy optimization, [Shao 외, 2024](https://arxiv.org/abs/2402.03300))는 질문 하나에 답 여러 개를 **스스로 만들고**, 점수를 매겨, 평균보다 나은 답의 확률을 올린다. PPO는 답이 얼마나 좋을지 어림하는 **가치 모델**(value model)도 함께 학습한다. GRPO는 그 어림 대신 같은 질문에 만든 답들의 평균 점수를 쓰므로 그 모델이 없다. 한 스텝이 여러 단계다.
#
# | 단계 | 가중치 말고 더 있는 것(첫 스텝) |
# |---|---|
# | **롤아웃**(rollout): 답을 만든다 | 가중치의 16비트 사본(`autocast`, 3장), KV 캐시(11.3절의 식. fp32 가중치를 `autocast`로 계산하면 키는 fp32인 cos, sin을 곱해 fp32가 되고 값은 16비트라 (4 + 2) ÷ (2 + 2) = 1.5배) |
# | **기준 모델**: 기준 로그 확률 | 기준 모델의 순전파. `beta`가 0(TRL의 기본값)이면 이 단계가 없다(vLLM을 쓰면 정책이 이 자리에 온다, 12.7절) |
# | **손실까지**: 정책의 순전파 | 16비트 사본, 순전파 상태 |
# | **역전파** | 순전파 상태, 재계산하는 층 하나, 쌓이는 그레이디언트 |
# | **갱신** | 그레이디언트 한 벌, 옵티마이저 상태 |
#
# 여기의 `beta`는 12.3절의 $\beta$와 쓰임이 다르다. 정책이 기준 모델에서 멀어진 만큼(KL 발산) 손실에 더하는 벌의 계수다. 0이면 비교할 것이 없으니 기준 모델을 올리지 않는다.
#
# 점수는 함수로 매긴다. **보상 모델**(reward model)을 쓰거나 `beta`를 켜서 기준 모델을 올리면 그 가중치가 **모든 단계에** 더 있다(LoRA라면 기준 모델은 어댑터를 끄는 것이라 0이다).
#
# Qwen3-0.6B 전체를 RTX 4090에서 두 스텝 학습한다. 256토큰짜리 질문 하나에 8토큰짜리 답 8개를 만든다. **둘째 스텝**에서 가장 높은 단계는 어디일까? (`loss`는 손실까지, `step`은 갱신이다.)

# %%
highest = guess("12.6", None, ("rollout", "loss", "backward", "step"))
highest

# %% [markdown] lang="ko"
# `phases_of`는 Trainer의 메서드를 그대로 부르면서 앞뒤에서 `torch.cuda`의 눈금만 읽어 `found`에 담는다. 도형 하나가 단계 하나다. 왼쪽 변의 높이가 단계의 처음, 꼭대기가 최대, 오른쪽 변의 높이가 끝에 할당된 양이다. (`grpo`의 `for`는 12.5절의 것이고, 뒤의 QLoRA에만 쓰인다.)

# %%
from helpers.chapters.c12_two_models.phases import compare_steps, phases_of, steps_of
from helpers.chapters.c12_two_models.pictures import draw_steps


def grpo(
    found, completion=8, batch=8, answers=8, rollout=None, prompt=256, model=small, peft_config=None,
    **options,
):  # fmt: skip
    options = {"gradient_accumulation_steps": answers // batch, "max_steps": 2, "fp16": True, **QUIET, **options}
    arguments = GRPOConfig(
        folder, per_device_train_batch_size=batch, num_generations=answers, max_completion_length=completion,
        **options,
    )  # fmt: skip
    data = {"train_dataset": prompts(prompt), "processing_class": tokenizer(), "peft_config": peft_config}
    trainer = GRPOTrainer(model, length_of, args=arguments, rollout_func=rollout, **data)
    for weight in trainer.model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    with phases_of(trainer, found):
        trainer.train()


two = steps_of(grpo, "RTX 4090")
draw_steps(two)

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
second = two.phases[4:]
highest.against(max(second, key=lambda one: one.peak).name)

# %% [markdown] lang="ko"
# 최대는 둘째 스텝의 역전파다. 그 끝에 그레이디언트 한 벌 말고도, 12.1절처럼 임베딩의 그레이디언트(151,936 × 1,024 × 4바이트 = 0.58 GiB)가 잠깐 더 있다.
#
# 두 롤아웃도 비교한다. 하는 일은 같은데 둘째가 4.45 GiB 높다. 첫 갱신에서 생긴 옵티마이저 상태가 **그 뒤로 늘 남아 있기** 때문이다. 답을 만드는 동안에는 쓰지도 않는다. 둘째 스텝부터는 앞의 표에서 갱신을 뺀 모든 줄에 옵티마이저 상태를 더해서 읽는다. 그렇게 식으로 계산한 둘째 스텝을 칸으로 나누어 그린다(갱신은 그리지 않는다. 임시 텐서와 임베딩의 그레이디언트 둘째 벌을 뺀 **하한**이다).

# %%
from helpers.chapters.c12_two_models.floor import Grpo
from helpers.chapters.c12_two_models.pictures import draw_blocks

rtx = card("RTX 4090")
draw_blocks(Grpo(small, completion=8).floor(rtx.memory_bytes), rtx.capacity_bytes)

# %% [markdown] lang="ko"
# 파란색과 초록색은 어느 단계에나 있고, 나머지가 번갈아 온다. 3장에서 역전파까지 남던 16비트 사본은 여기서는 체크포인팅 때문에 순전파와 함께 사라지고, 그 자리에 그레이디언트가 온다. 롤아웃의 사본이 더 넓은 것은 출력층의 것까지 있어서다(손실은 출력층을 조각으로 나누어 계산한다).
#
# ### 어떤 설정이 어느 단계를 옮기나
#
# > **주장 3.** "전체 미세 조정에서 GRPO가 OOM이면, 배치를 반으로 줄이고 두 번 누적하면 최대가 준다"
#
# 답의 길이를 512와 4,096으로 늘린다. 가상 GPU에서 하나씩 만들면 오래 걸리므로, 답을 만들지 않고 TRL의 `rollout_func`으로 건넨다(그래서 롤아웃 열에는 KV 캐시가 없다). `batch 4`는 답 8개를 4개씩 두 번에 나누어 학습하고, `beta`는 기준 모델을 올린다. 표의 칸은 두 스텝 가운데 큰 값이다. 판정을 먼저 고르고 실행한다.


# %%
def given(prompts, trainer, length=512, shorter=0):
    ids = trainer.processing_class(prompts)["input_ids"]
    answers = [[1] * (length - shorter * i) for i in range(len(prompts))]
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}


longer = partial(grpo, completion=512, rollout=given)
longest = partial(grpo, completion=4096, rollout=partial(given, length=4096))
base, far = (steps_of(one, "RTX 4090") for one in (longer, longest))
settings = {
    "512": base,
    "512, batch 4": partial(longer, batch=4),
    "512, beta": partial(longer, beta=0.04),
    "4,096": far,
    "4,096, batch 4": partial(longest, batch=4),
}
compare_steps(settings, "RTX 4090")

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.**
#
# - 답이 512토큰이면 9.53 GiB가 10.28 GiB로 **오히려 올랐다.** 두 번에 나누어 누적하면 첫 번째의 그레이디언트 한 벌이 남아 두 번째의 순전파와 겹친다(4장).
# - 답이 4,096토큰이면 순전파 상태가 최대를 정하므로 14.08 GiB가 12.90 GiB로 준다.
# - 더해지는 것은 언제나 그레이디언트 한 벌(파라미터 × 4바이트, 2.22 GiB)이고, 손실까지의 열에서 빠지는 것은 512토큰이면 0.50 GiB, 4,096토큰이면 2.56 GiB다.
# - 최대를 정하는 것은 이 열만이 아니다. **나누기 전의 가장 높은 칸**(둘 다 역전파)과 **나눈 뒤의 가장 높은 칸**(512토큰은 손실까지, 4,096토큰은 역전파)을 비교해, 나눈 뒤가 낮을 때만 누적한다.
#
# LoRA라면 남는 그레이디언트가 작아 짧은 답에서도 준다(다음 표에서 한 줄을 적은 4B: 10.48 → 9.31 GiB).
#
# </details>
#
# - **늘 있는 것**을 바꾸면 모든 단계가 움직인다. 롤아웃의 6.68 GiB는 가중치와 AdamW의 두 상태, 세 벌이고, `beta`를 켜면 모든 단계에 한 벌(2.22 GiB)이 더해진다.
# - **배치**를 나누는 것은 손실과 역전파를 옮긴다(`beta`를 켰다면 기준 모델의 순전파도). 롤아웃은 그대로다. 4개씩 두 번이어도 한꺼번에 만드는 답은 8개다(이 표에는 KV 캐시가 없어 보이지 않는다).
#
# ### T4에서는
#
# 답은 여전히 512토큰이다. `uneven`은 길이를 463토큰에서 512토큰까지 7토큰씩 다르게 준 것이고, `line`은 3.12절의 한 줄을 적은 것이다. LoRA는 12.3절처럼 가중치를 fp16으로, QLoRA는 4비트로 읽는다.

# %%
four_b = partial(longer, model="Qwen/Qwen3-4B", peft_config=lora, **half)
in_four_bits = {"model_init_kwargs": {"dtype": "float16", "quantization_config": four_bits}}
eight_b = partial(longer, model="Qwen/Qwen3-8B", peft_config=lora, **in_four_bits)
models = {
    "0.6B, full": longer,
    "0.6B, full, uneven": partial(grpo, completion=512, rollout=partial(given, shorter=7)),
    "0.6B, full, line": partial(with_line, longer),
    "4B, LoRA": four_b,
    "4B, LoRA, line": partial(with_line, four_b),
    "4B, LoRA, line, batch 4": partial(with_line, partial(four_b, batch=4)),
    "8B, QLoRA, line": partial(with_line, eight_b),
}
compare_steps(models, "T4")

# %% [markdown] lang="ko"
# 0.6B는 전체를, 4B는 LoRA로, 8B는 QLoRA로 들어간다. (여기에도 KV 캐시가 없다. 셋 다 12.11절에서 `generate`로 만들어 확인한다.)
#
# **잘 되다가 어떤 스텝만 죽는다면** 첫 두 줄을 본다. 답의 길이가 하나라도 다르면 9.54 GiB인데, 모두 같으면 10.37 GiB다. 길이가 모두 같으면 패딩이 없어 마스크도 없고, T4의 어텐션이 길이 × 길이 행렬을 만든다(3.12절). 질문의 길이가 같고 답이 **모두** `max_completion_length`에서 잘린 스텝이 그렇다. 한 줄을 적으면 사라진다.
#
# ### 롤아웃에서 죽는다면
#
# 한꺼번에 만드는 답의 수를 줄인다. TRL은 배치 × `steps_per_generation`개를 한꺼번에 만들고, 적지 않으면 누적 횟수가 그 값이다. 그래서 누적만 늘려도 KV 캐시가 는다. `steps_per_generation=1`을 적으면 늘지 않는다. 그러면 롤아웃의 최대도 늘 낮아질까?
#
# 이번에는 답을 **정말로** 만든다. 질문 766토큰에 답 2토큰이라, 다 만들었을 때의 KV 캐시는 앞과 같은 768토큰이다. RTX 4090에서 0.6B 전체를 배치 8로 학습하고, 누적을 두 번과 네 번으로 한다. `one`이 `steps_per_generation=1`이다.

# %%
made = partial(grpo, completion=2, prompt=766)
ways = {}
for times_over in (2, 4):
    ways[f"8 × {times_over}"] = partial(made, gradient_accumulation_steps=times_over)
    ways[f"8 × {times_over}, one"] = partial(ways[f"8 × {times_over}"], steps_per_generation=1)
compare_steps(ways, "RTX 4090")

# %% [markdown] lang="ko"
# 답이 16개에서 32개가 되면 롤아웃이 3.13 GiB 는다. 11.3절의 식으로는 1.31 GiB인데, 키가 fp32로 남아 1.97 GiB이고 나머지는 긴 질문을 읽는 임시 텐서다.
#
# 누적 네 번은 13.74 GiB가 11.35 GiB로 내려가지만, 두 번은 10.61 GiB가 11.35 GiB로 **올라간다.** 한꺼번에 만들면 롤아웃은 스텝의 처음에 한 번이다. 마이크로 배치마다 만들면(`one`) 둘째 롤아웃이 앞의 마이크로 배치가 남긴 그레이디언트 한 벌(2.22 GiB)과 겹친다. 주장 3과 같은 까닭이고, 남는 그레이디언트가 작은 LoRA라면 걱정할 것이 없다.
#
# 한꺼번에 만드는 수는 `num_generations`의 배수여야 한다. 거꾸로 `num_generations`만 줄이면 한꺼번에 만드는 수는 그대로다.
#
# ## 12.7 엔진이 같은 카드에 있을 때
#
# `generate`는 느려서, 답은 대개 vLLM 같은 엔진으로 만든다. 학습과 같은 카드에 두는 것이 TRL의 `use_vllm=True`와 `vllm_mode="colocate"`다. 엔진은 **시작할 때** 카드의 `gpu_memory_utilization`(TRL에서는 `vllm_gpu_memory_utilization`, 기본값 0.3)만큼을 가중치, 순전파의 임시 텐서, KV 캐시의 자리로 잡는다([vLLM 문서](https://docs.vllm.ai/en/latest/configuration/engine_args/)). 모델이 작아도 그렇다.
#
# 아래에 적은 것은 TRL의 설정 그대로다. 가상 GPU에 vLLM은 없어도 된다. TRL의 코드는 그대로 실행하고, 엔진은 **그 몫만큼의 블록**으로 둔다. 답은 `max_completion_length`를 꽉 채운 것(여기서는 512토큰)으로 친다. 이 블록은 `GRPOTrainer`를 만들 때 잡고, 재우면 돌려준다. `use_vllm=True`를 적은 내 스크립트도 `virtual-gpu run --gpu T4 train.py`로 이렇게 돌려 볼 수 있다. 12.6절의 '512' 줄에 몫 0.6인 엔진을 두고 재우지 않는다. 두 스텝 가운데 어디에서 죽을까, 끝까지 갈까(`never`)?

# %%
dies = guess("12.7", None, ("step 1", "step 2", "never"))
dies

# %% [markdown] lang="ko"
# 몫은 쓸 수 있는 23.16 GiB가 아니라 카드 전체의 크기에 곱한다.


# %%
def beside(share, sleeps=False):
    engine = {"vllm_gpu_memory_utilization": share, "vllm_enable_sleep_mode": sleeps}
    return partial(grpo, completion=512, use_vllm=True, vllm_max_model_length=768, **engine)


total = card("RTX 4090").memory_bytes
print("engine", human_bytes(int(0.6 * total)), "of", human_bytes(total))
awake = steps_of(beside(0.6), "RTX 4090")
draw_steps(awake)

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
dies.against(f"step {awake.last}" if awake.outcome.died else "never")

# %% [markdown] lang="ko"
# 첫 스텝은 끝까지 갔고, 죽은 것은 **둘째 스텝의 역전파**다. 첫 갱신은 8.90 + 14.19 = 23.09 GiB로 한도에서 0.07 GiB만 남기고 지나갔다. 진짜 카드라면 여기서 죽기 쉽다. 첫 갱신에서 생긴 옵티마이저 상태가 이제 있는데, 할 일 없는 엔진이 자리를 그대로 쥐고 있다. 그 역전파에는 9.53 + 14.19 = 23.72 GiB가 있어야 한다(8.90과 9.53은 12.6절 표의 '512' 줄).
#
# 그림과 아래 표들에 '기준 모델'로 적힌 단계는 여기서는 정책 자신이다(`beta`가 0이라 기준 모델은 없다). vLLM으로 답을 만들면 TRL은 정책의 로그 확률을 그레이디언트 없이 한 번 더 계산해, 엔진이 계산한 확률과 다른 만큼 손실을 고친다(`vllm_importance_sampling_correction`, 기본값 `True`). 역전파를 위해 남기는 것이 없는 순전파라 손실까지보다 낮다.
#
# (`ChunkedLogProbFunction`은 TRL이 로짓을 조각으로 나누어 계산하는 함수다. 그림의 높이는 할당이다. 한도보다 낮은 데서 죽은 것은 할당자의 예약이 이미 한도까지 찼기 때문이다.)
#
# 학습하는 동안 엔진을 재울 수도 있다. `vllm_enable_sleep_mode=True`면 TRL은 답을 만들고 나면 매번 재우고, 엔진은 그동안 가중치와 KV 캐시의 자리를 돌려준다.
#
# **연습 12-2.** 늘 있는 것 `held`(가중치와 옵티마이저 상태), 학습 스텝이 더 쓰는 것 `step`, 엔진의 자리 `engine`이 바이트로 주어진다. `sleeps`가 참이면 학습하는 동안 엔진을 재운다. 최대는 몇 바이트인가?


# %%
def peak(held, step, engine, sleeps):
    return ...


exercise("12-2").check(peak)

# %% [markdown] lang="ko"
# > **주장 4.** "엔진을 재우면 학습과 부딪치지 않는다"
#
# 몫을 바꾸어 실행한다. 마지막 열이 죽은 단계다(`patched_step`은 옵티마이저의 `step`을 감싼 것이고, `sync_weights`는 엔진을 깨워 가중치를 건네는 것이다). 판정을 먼저 고른다.

# %%
shares = {
    "0.1, awake": beside(0.1),
    "0.65, awake": beside(0.65),
    "0.8, awake": beside(0.8),
    "0.6, asleep": beside(0.6, sleeps=True),
    "0.8, asleep": beside(0.8, sleeps=True),
}
compare_steps(shares, "RTX 4090")

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 학습하는 동안은 그렇다. 그러나 답을 만드는 동안에는 가중치와 옵티마이저 상태(6.68 GiB)가 엔진과 함께 있다. 0.6은 6.68 + 14.19 = 20.87 GiB라 되지만, 0.8은 6.68 + 18.92 = 25.60 GiB라 **둘째 스텝의 롤아웃**에서 죽었다(그 줄의 다른 칸은 첫 스텝의 것이다).
#
# </details>
#
# **재우지 않으면 더하고, 재우면 번갈아 쓴다.** 재우지 않는 엔진은 몫이 클수록 일찍 죽는다.
#
# ### 몫을 얼마로 적을까
#
# 아래 끝은 엔진에 필요한 것, 위 끝은 학습이 남기는 것이다.
#
# 1. **아래 끝**: 답을 **모두 한꺼번에** 만드는 데 드는 가중치와 KV 캐시를 카드의 크기로 나눈다. 엔진의 순전파에 드는 것은 세지 않았으니 이보다 커야 한다. (이보다 작아도 답 하나의 캐시가 들어가면 시작은 하지만, 나누어 만드느라 느리다. 12.11절)
# 2. **위 끝**: 쓸 수 있는 메모리에서 **롤아웃을 뺀 단계들의** 최대를 빼고 카드의 크기로 나눈다(`generate`의 롤아웃은 엔진이 대신한다).
# 3. **위 끝이 더 크면** 그 사이에서 고른다. 여유 5%를 두려면 위 끝을 구할 때 쓸 수 있는 메모리를 1.05로 나눈다.
# 4. **아니면 재운다.** 그때의 위 끝은 (쓸 수 있는 메모리 − 롤아웃 때 남아 있는 것) ÷ 카드의 크기다. 남아 있는 것은 가중치와 옵티마이저 상태다. 누적하면서 `steps_per_generation=1`을 적었다면 그레이디언트 한 벌도 더한다(12.6절).
#
# 위의 RTX 4090이라면 재우지 않을 때 (23.16 − 9.53) ÷ 23.65 = 0.576…, 재울 때 (23.16 − 6.68) ÷ 23.65 = 0.696…이다. 위 끝이니 올리지 않고 버려 0.57과 0.69다. 그래서 0.6은 재워야만 되었고, 0.8은 재워도 죽었다.
#
# 적는 자리는 이렇다. `GRPOConfig(…, use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=몫, vllm_max_model_length=질문과 답의 길이)`. 재우려면 `vllm_enable_sleep_mode=True`를 더한다.
#
# 12.6절의 0.6B를 T4에서 학습한다면 아래 끝은 이렇다.

# %%
from virtual_gpu.models.kv_cache import kv_bytes

config = load_config(small)
weights = 2 * count_parameters(build_model(config, torch.float16))
needed = weights + kv_bytes(config, 256 + 512, 8)
size_of_t4 = card("T4").memory_bytes
print(f"weights {human_bytes(weights)}, with a cache for 8 × 768 tokens {human_bytes(needed)}")
print(f"of {human_bytes(size_of_t4)}: {needed / size_of_t4:.3f}")

# %% [markdown] lang="ko"
# 0.120은 답 8개를 한꺼번에 만들 때의 하한이다. 가중치는 16비트로 **한 벌 더** 있다. 12.6절의 4B가 T4에서 엔진과 함께 있지 못하는 까닭이다. 40.2억 × 2바이트인 가중치 7.49 GiB가 두 벌이면 14.98 GiB로 이미 카드를 넘고, 답을 만드는 동안에는 재울 수도 없다. (TRL에서 16비트로 읽을 때다. 가중치 한 벌을 함께 쓰는 Unsloth와 4비트로 읽은 정책은 12.11절의 끝에 있다.)
#
# 블록은 **몫 그대로다.** 진짜 엔진에는 몫 밖에 CUDA 그래프가 더 있다. 엔진이 시작하지 않을 때 볼 것과 진짜 엔진이 다른 점은 12.11절의 끝에 있다. 여기서 vLLM과 함께 카드에서 돌려 본 것은 없다.
#
# ### 사건 12-B: 몫은 기본값인데 잘 되다가 죽는다
#
# 두어 스텝은 잘 되다가 죽고, 몫을 0.9에서 0.7로 줄여도 셋째 스텝에서 죽는다는 신고가 있다([trl #2927](https://github.com/huggingface/trl/issues/2927)). 비슷한 증상을 T4에서 일으킨다. 학습은 12.6절의 '0.6B, full', 몫은 TRL의 기본값인 0.3이고, 재우지 않는다(`vllm_max_model_length=768`은 적은 것으로 친다).
#
# 왜 첫 스텝은 되었을까? 실행하기 전에 세 수를 계산해 적는다. 0.3은 몇 GiB 모자라는가? 들어가는 몫의 위 끝은 소수 둘째 자리까지 얼마인가(올리지 않고 버린다)? 3.12절의 한 줄을 적으면 위 끝은 얼마가 되는가? (쓸 수 있는 것은 14.64 GiB, 카드의 크기는 14.74 GiB다.) 그다음 0.05 단위로 끝까지 가는 **가장 큰 몫**을 `run(fraction=…)`으로 확인한다.

# %%
case("12-B").run(fraction=0.3)

# %% [markdown] lang="ko"
# 찾은 몫을 적는다. `check`는 그 몫으로 끝까지 가고 0.05를 더 주면 죽는지 본다.

# %%
fraction = ...
case("12-B").check(fraction)

# %% [markdown] lang="ko"
# <details><summary>찾은 다음에</summary>
#
# - 첫 스텝이 된 것은 옵티마이저 상태가 아직 없었기 때문이다.
# - 모자란 것은 적어도 10.37 + 4.42 − 14.64 = 0.15 GiB다.
# - 위 끝은 (14.64 − 10.37) ÷ 14.74 = 0.289…라 0.28이고, 3.12절의 한 줄을 적으면 0.346…이라 0.34다(0.35면 넘친다). 0.05 단위로는 0.25이고, 실행해도 끝까지 간다.
# - 가상 GPU는 예약까지 세므로 여기서는 들어간 것이 맞다. 그러나 진짜 T4에서 잰 값이 아니고, 이 블록에는 진짜 엔진이 몫 밖에 쓰는 것(12.11절)이 없다. 여유 5%(9장)를 두면 (10.37 + 3.69) × 1.05 = 14.76 GiB로 0.25는 넘치고, 0.2는 (10.37 + 2.95) × 1.05 = 13.99 GiB로 들어간다.
# - 0.12보다 크므로 0.2부터 시도하고, 시작 로그에서 KV 캐시의 크기를 본다(진짜 vLLM으로 확인하지 않았다). 몫 밖의 CUDA 그래프를 가장 큰 1.28 GiB(12.11절)로 치면 10.37 + 2.95 + 1.28 = 14.60 GiB라 남는 것이 거의 없다. 죽으면 재운다.
# - 10.37 GiB는 답의 길이가 모두 같은 스텝의 것이다. 하나라도 다르면 9.54 + 4.42 = 13.96 GiB라 0.3도 들어간다. 그래서 진짜 학습이라면 답이 모두 잘린 스텝에서 갑자기 죽는다(12.6절).
#
# 0.3을 그대로 쓰려면 재운다(`run(fraction=0.3, sleeps=True)`). 3.12절의 한 줄(9.53 GiB)로도 들어가지만, 여유 5%를 두면 14.65 GiB라 간발로 넘친다.
#
# </details>
#
# ## 12.8 직접 바꿔 보기
#
# 패널은 단계마다 **적어도** 얼마가 있어야 하는지를 식으로 계산한다. 임시 텐서는 세지 않으므로 하한이다. 넘치면 들어가지 않고, 들어가도 여유가 있어야 한다(실제가 하한보다 얼마나 높은지는 12.11절). LoRA의 얼린 가중치는 16비트로 읽고 체크포인팅은 켠 것으로 센다. **갱신**은 없다.
#
# ![RTX 4090에서 Qwen3-0.6B 전체를 GRPO로 학습할 때 단계마다의 하한. 세 단계 모두 23.16 GiB 안에 들어간다.](../../image/12_grpo_panel.svg)
#
# - 롤아웃을 '엔진이 늘 있음'으로 바꾸고 몫을 늘린다. 몇에서 어느 단계들이 넘치는가? 더 잘게 늘렸다면 어느 쪽이 먼저였을까? 같은 몫에서 '엔진을 재움'이면?
# - 롤아웃을 '모델이 직접'으로 되돌리고, 모델을 Llama-3.1-8B, 방법을 LoRA로 바꾼다. 기준 모델을 '따로 한 벌'과 '어댑터 끄기'로 비교한다.

# %%
from helpers import grpo_panel

grpo_panel()

# %% [markdown] lang="ko"
# <details><summary>답 (먼저 바꿔 본 다음에 연다)</summary>
#
# - 늘 있으면 역전파가 0.604, 손실이 0.624에서 넘친다. 0.05씩 움직이므로 0.65에서 함께 넘친다(역전파 24.25, 손실 23.76 GiB). 0.6은 하한이 들어가는 것처럼 보이지만 12.7절에서는 죽었다. 그래서 여유가 있어야 한다. 재우면 0.65까지 들어가고 0.7에서 롤아웃만 넘친다.
# - '따로 한 벌'에서는 세 단계 모두 들어가지 않고(롤아웃 31.13, 손실과 역전파 32.13 GiB), '어댑터 끄기'에서는 17.18 GiB까지다. TRL은 LoRA면 늘 뒤의 것이고, 앞의 것은 손수 만든 루프다.
#
# </details>
#
# ## 12.9 T4에서 쓰는 스크립트 둘
#
# 12.6절의 4B와 12.5절의 8B를 여느 스크립트로 쓰면 이렇다. 주석의 수는 이 장에서 실행한 최대이고, 진짜 T4에서는 아직 돌려 보지 않았다.
#
# **GRPO: Qwen3-4B, LoRA**
#
# 4B는 T4에서 엔진과 함께 있지 못하므로(12.7절) 느려도 `generate`로 만든다. `data`와 `reward`는 보기이니 내 것으로 바꾼다.
#
# ```python
# from datasets import Dataset
# from peft import LoraConfig
# from transformers.integrations import sdpa_attention
# from trl import GRPOConfig, GRPOTrainer
#
# question = [{"role": "user", "content": "17 × 23은? 수만 적는다."}]
# data = Dataset.from_list([{"prompt": question, "answer": "391"}] * 64)
#
#
# def reward(completions, answer, **kwargs):  # 답마다 수 하나
#     return [float(right in one[0]["content"]) for one, right in zip(completions, answer)]
#
#
# sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False  # 3.12절의 한 줄
# arguments = GRPOConfig(  # 질문과 답을 더해 768토큰이면 10.48 GiB
#     "out", fp16=True, per_device_train_batch_size=8, num_generations=8, steps_per_generation=1,
#     max_completion_length=512, learning_rate=1e-5, model_init_kwargs={"dtype": "float16"},
#     chat_template_kwargs={"enable_thinking": False},  # 켜 두면 512토큰에서 모두 잘릴 수 있다
# )
# lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
# trainer = GRPOTrainer("Qwen/Qwen3-4B", reward, args=arguments, train_dataset=data, peft_config=lora)
# trainer.train()
# ```
#
# **DPO: Llama-3.1-8B, QLoRA.** 대화 형식의 데이터에는 대화 템플릿이 있는 모델(`-Instruct`)이어야 한다. 크기는 12.5절의 8B와 같다.
#
# ```python
# import torch
# from datasets import Dataset
# from peft import LoraConfig
# from transformers import BitsAndBytesConfig
# from transformers.integrations import sdpa_attention
# from trl import DPOConfig, DPOTrainer
#
# question = [{"role": "user", "content": "17 × 23은? 수만 적는다."}]
# good, bad = ([{"role": "assistant", "content": one}] for one in ("391", "381"))
# data = Dataset.from_list([{"prompt": question, "chosen": good, "rejected": bad}] * 64)  # 보기다
#
# sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False  # 3.12절의 한 줄
# lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
# four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
# arguments = DPOConfig(  # 두 문장이 모두 1,024토큰이면 7.19 GiB
#     "out", fp16=True, per_device_train_batch_size=1, max_length=1024, learning_rate=1e-5,
#     model_init_kwargs={"dtype": "float16", "quantization_config": four_bits},
# )
# trainer = DPOTrainer("meta-llama/Llama-3.1-8B-Instruct", args=arguments, train_dataset=data, peft_config=lora)
# for weight in trainer.model.parameters():
#     if weight.requires_grad:
#         weight.data = weight.data.float()  # TRL이 bf16으로 바꾼 어댑터를 되돌린다
# trainer.train()
# ```
#
# 자기 데이터로 쓰기 전에 볼 것과 SFT로 만든 어댑터에서 이어서 하는 법은 12.11절에 있다.
#
# ### 다른 모델, 다른 카드의 DPO
#
# 위의 수는 이 모델, 이 카드의 것이다. 다른 것은 [9장](09_fit_your_gpu.ipynb)의 플래너에게 묻는다. `objective="dpo"`면 TRL의 `DPOTrainer`로 학습하는 방법을 찾는다. `batch`는 스텝 하나의 **쌍**, `length`는 질문에 답 하나를 이은 문장의 길이다.
#
# T4에서 8B를 1,024토큰, 스텝에 16쌍으로 학습하고 싶다. 12.5절에서 1쌍은 7.19 GiB였고, 그 가운데 쌍의 수를 따라 늘 수 있는 것은 1.06 GiB였다. 플래너는 이 장의 14.64 GiB가 아니라, 카드마다 다른 용량을 나쁜 쪽으로 잡은 **판정 한도** 14.25 GiB(9.4절)로 따진다. 한 번에 **몇 쌍까지** 들어갈까?

# %%
at_once = guess("12.9", None, ("1", "2", "4", "8", "16"))
at_once

# %% [markdown] lang="ko"
# 아래 셀은 15초쯤 걸린다. `lora_rank`와 `lora_targets`는 12.3절의 `lora`와 같게 적었다. `4 × 4`처럼 적힌 것은 한 번에 넣는 쌍의 수 × 누적 횟수이고, '나머지는 16비트'는 4비트로 줄이지 않는 임베딩, 출력층, 정규화를 fp16으로 둔다는 뜻이다(9.12절). ⚠는 3.12절의 한 줄이 있는 것으로 셌다는 주의다. 그다음은 탈락한 계획과 그 까닭이고, 마지막 줄은 네 쌍과 여덟 쌍에서 텐서의 최대다.

# %%
from helpers import plan_training

eight = plan_training(
    "meta-llama/Llama-3.1-8B", gpu="T4", objective="dpo", length=1024, batch=16,
    methods="qlora", lora_rank=16, lora_targets="all-linear",
)  # fmt: skip
print(eight)
print(eight.why())
print(*(human_bytes(plan.tensors_bytes) for plan in (eight.best, eight.refused[eight.best.recipe])))

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
at_once.against(str(eight.best.micro_batch))

# %% [markdown] lang="ko"
# 한 번에 네 쌍이면 들어가고 여덟 쌍이면 넘친다. 12.5절의 수로 셈하면 (14.25 − 6.13) ÷ 1.06 = 7.7, 곧 일곱 쌍까지다. 그 안에서 16을 나누는 가장 큰 수가 4다. 플래너는 이 셈과 세 가지가 다르다. 4비트 가중치를 이중 양자화까지 해서(2장) 조금 작고, 두 답의 길이가 다른 것으로 보아 패딩을 가리는 마스크를 세고, 할당자가 못 쓰는 자리까지 센다(9.4절). 여덟 쌍의 텐서는 14.01 GiB로 한도 아래다. 넘치게 한 것은 텐서가 아니라 못 쓰는 자리 15.32 − 14.01 = 1.31 GiB다.
#
# `eight.best.save("my_plan")`은 이 계획의 `train.py`를 쓴다. 한 줄에 `prompt`, `chosen`, `rejected`가 있는 JSONL을 `python train.py --pairs my_pairs.jsonl`로 준다. 어댑터를 fp32로 되돌리는 줄도 들어 있다. 플래너는 문장 전체를 답으로 세지만 TRL은 답의 로짓만 만드니, 한 번에 넣는 답이 모두 4,096토큰보다 적으면 로짓의 조각(9.2절)이 작아져 조금 덜 든다.
#
# **설정 파일이 있으면** 그 파일에 묻는다. `trl dpo --config` 파일, `rl: dpo`인 axolotl 파일, `stage: dpo`인 LLaMA-Factory 파일을 읽는다. (axolotl과 LLaMA-Factory의 것은 12.4절처럼 로짓을 통째로 둔 것으로 세는데, 계산 순서는 도구마다 제 것을 따른다. 전체 미세 조정이면 LLaMA-Factory의 기준 모델은 16비트다.) 12.1절의 `DPO 4`를 파일로 적으면 어느 줄을 바꾸라고 할까? 12.3절에서 본 것 가운데 하나다.
#
# 범위로 나오는 수는 12.2절의 할당이 아니라, 예약에 CUDA 컨텍스트까지 더해 카드 전체의 메모리와 견준 것이다(9.4절). '손실 나누기'는 TRL이 로짓을 조각으로 나누는 것이고, '패딩 있음'은 마이크로 배치에 패딩이 있을 수 있다는 뜻이다. 그래서 마스크가 있을 때와, 길이가 모두 같아 마스크가 없을 때를 따로 재어 '마이크로 배치에 패딩이 있으면'으로 시작하는 줄에 나란히 적고, 큰 쪽으로 판정한다. 여기서는 길이가 모두 같은 쪽이 조금 크고, 범위는 그쪽의 것이다.

# %%
from pathlib import Path

from virtual_gpu.plan.start import start_from

Path(folder, "dpo.yaml").write_text("""\
model_name_or_path: meta-llama/Llama-3.2-1B
loss_type: sigmoid
fp16: true
max_length: 512
per_device_train_batch_size: 4
""")
found = start_from(f"{folder}/dpo.yaml", "RTX 4090")
print(str(found).split("\n", 1)[1])

# %% [markdown] lang="ko"
# 배치를 줄이고 누적하는 것은 해 볼 것도 없다. 늘 있는 다섯 벌만 23.02 GiB(12.1절)라 RTX 4090의 판정 한도 22.80 GiB(9.6절)를 넘는다. 그래서 기준 모델을 카드에서 치우는 한 줄을 골랐다. 배우는 것은 반올림 말고는 같다.
#
# 터미널에서는 `virtual-gpu fit --from dpo.yaml --gpu "RTX 4090"`이다. SFT와 DPO의 파일은 키가 거의 같아서, `loss_type: sigmoid`처럼 DPO에만 있는 것이 없으면 SFT로 읽는다. 그때는 `--objective dpo`를 준다. `beta`처럼 GRPO와 KTO에도 있는 키만 있으면 무엇인지 되묻는다. 여러 GPU에 나누어 DPO를 한다면 `plan_training(…, gpus=2, objective="dpo")`이 FSDP2(6.2절)로 나눈 계획까지 찾는다. 설정 파일에 `fsdp`가 적혀 있으면 `--from`도 나누어 센다. `deepspeed`라면 어댑터를 학습할 때만 센다.
#
# **GRPO도 플래너에 묻는다.** `plan_training(…, objective="grpo")`, 터미널에서는 `virtual-gpu fit --objective grpo`다. `batch`는 옵티마이저 스텝 하나에 쓰는 답의 수(`generations`의 배수), `length`는 질문에 답 하나를 이은 길이, `completion_length`는 그 가운데 답의 길이다(적지 않으면 절반). 12.6절에서 답이 512토큰, 4,096토큰인 표는 답을 건네받아 롤아웃에 KV 캐시가 없었다. 플래너는 `generate`가 만드는 KV 캐시까지 세어, 롤아웃부터 갱신까지 가운데 가장 높은 단계로 판정한다. 계획의 `generation_bytes`가 답을 만들 때, `training_bytes`가 나머지 단계의 텐서 최대다.
#
# 답을 같은 카드의 vLLM이 만든다면 `vllm="colocate"`를 적는다. 플래너는 엔진을 깨워 두는 것과 재우는 것을 다 찾고, 적을 몫까지 정한다. 사건 12-B처럼 T4에서 0.6B 전체를 학습한다면 이렇다(20초쯤 걸린다). 계획마다 몫과 판정 한도를, 끝에는 탈락한 것을 적는다.

# %%
beside_it = plan_training(
    small, "T4", methods="full", objective="grpo", vllm="colocate", batch=8, length=768, completion_length=512
)
print(beside_it)
for plan in beside_it:
    print(human_bytes(plan.request.limit_bytes), plan.engine.line(plan.request))
print(beside_it.why())

# %% [markdown] lang="ko"
# 계획의 GiB는 학습에, 엔진의 가중치와 질문 하나에 만드는 답(여기서는 8개)의 KV 캐시를 더한 것이다. 재우는 계획은 학습할 때와 답을 만들 때 가운데 큰 쪽이다. 엔진이 그 밖에 **얼마를** 더 쓰는지는 범위로만 안다. 그래서 로그(12.11절)에서 가장 컸던 것으로 친다. 깨워 두면 그만큼을 판정 한도에서 먼저 빼서 한도가 14.25 GiB(9.4절)가 아니라 10.52 GiB다. 재우면 학습하는 동안에는 CUDA 그래프만 남는다고 보아 12.99 GiB이고, 나머지는 답을 만들 때의 크기에 더한다. `1 × 8`은 한 번에 학습하는 답의 수 × 누적 횟수이고, 계획은 모두 3.12절의 한 줄을 적은 것이다.
#
# 앞의 둘은 사건 12-B의 학습을 그대로 두고 엔진만 재우는 것이다(둘째가 체크포인팅까지 같다). 재우지 않는 것은 넷째뿐인데, 옵티마이저가 8비트다. 사건에서 끝까지 간 몫 0.25도, 여유를 두고 고른 0.2도 여기에는 없다. 한 줄을 적고 깨워 두면 11.90 GiB라 **빠듯하다**고 한다. 블록만으로는 들어가도, 로그에서 본 가장 큰 엔진과 함께라면 들어간다고 할 수 없다는 뜻이다.
#
# 0.081은 **시작하는** 데 드는 몫이라 가중치와 답 하나의 캐시만 센다. 그래서 12.7절의 0.120보다 작다. QLoRA, 파라미터가 150억 개를 넘는 모델, 다른 GPU의 서버(`vllm_mode="server"`)는 세지 않는다.
#
# 터미널에서는 `virtual-gpu fit --model Qwen/Qwen3-0.6B --gpu T4 --methods full --objective grpo --vllm colocate --batch 8 --length 768 --completion-length 512`다. `trl grpo --config` 파일이 있으면 `virtual-gpu fit --from grpo.yaml --length 768`로 묻는다. 엔진의 줄까지 포함해 무엇을 바꿀지 답한다.
#
# **여러 카드에 나누어** GRPO를 하면 학습하는 것만 나뉜다. 엔진은 카드마다 통째로 하나씩 있다(`vllm_tensor_parallel_size`의 기본값 1). Qwen3-8B 전체를 H100 여덟 장에서 ZeRO-3(FSDP2, 6.2절)로 나누어 학습할 때 카드 한 장이 엔진 말고 쓰는 양을 잰다. 카드마다 8개씩 학습하고, `beta`만 0과 0.04로 바꾼다. `print`가 적는 이름은 6장의 것이고, `scoring`은 손실보다 먼저 로그 확률을 계산하는 단계다.

# %%
from helpers import rank_step

for beta in (0.0, 0.04):
    split = rank_step(
        "Qwen/Qwen3-8B", 8, objective="grpo", beta=beta, batch_size=8, sequence_length=2048, completion_length=1024,
        gradient_checkpointing=True,
    )  # fmt: skip
    print(split)
    print(split.phase, {part: human_bytes(nbytes) for part, nbytes in split.at_peak.items()})

# %% [markdown] lang="ko"
# `beta` 하나로 22.71 GiB가 48.65 GiB가 되었고, 최대는 역전파에서 기준 모델의 로그 확률을 계산하는 단계로 옮겨 갔다. 정책은 블록 하나씩 모았다가 놓는데, 기준 모델은 TRL이 블록마다가 아니라 **모델 전체를 한 묶음**으로 해서 나눈다(1.16의 `prepare_fsdp`). 그래서 순전파를 한 번 하려고 8B를 모두 모은다. 여덟 장에서 받은 한 덩어리와 거기서 떼어 낸 파라미터가 15.26 GiB씩 함께 있고, 카드를 늘려도 줄지 않는다. (`communication`의 나머지 0.06 GiB는 cuBLAS의 작업 공간이고, `gathered` 16.42 GiB의 나머지 1.16 GiB는 정책의 출력층이다. accelerate는 마지막 묶음을 순전파가 끝나도 모은 채로 둔다.) DPO의 기준 모델도 그렇게 나뉜다. 그러니 나누어 학습한다면 `beta`가 꼭 필요한지부터 정한다. TRL의 기본값은 0이다.
#
# 플래너는 이렇게 나눈 계획도 찾는다. `plan_training("Qwen/Qwen3-8B", "8 x H100", objective="grpo", vllm="colocate", …)`이다. 엔진을 깨우고 가중치를 건네는 것까지 세는데, TRL은 파라미터를 하나씩 모아서 건넨다. LoRA도 나눈다(기준 모델은 어댑터를 끈 정책이라 따로 없다). 나눈 모델이 `generate`로 답을 만드는 것은 세지 않는다. 토큰 하나마다 모든 층을 다시 모아야 하고, 실행해 보지 않았다. `fsdp`를 적은 `trl grpo` 파일은 `fit --from`이 읽는다.
#
# ## 12.10 기억할 것

# %%
guesses()

# %% [markdown] lang="ko"
# 어느 단계에서 죽었는지는 traceback에 있는 이름으로 안다.
#
# | traceback에 있는 이름 | 단계 |
# |---|---|
# | `backward`(그 아래에 `recompute_fn`, `forward`가 있어도) | 역전파 |
# | 첫 `step` | 갱신(옵티마이저 상태가 생긴다) |
# | DPO: `create_model_from_path` | 정책이나 기준 모델을 올리는 중 |
# | DPO: `_precompute_ref_logps` | 학습 전의 미리 계산(`precompute_ref_batch_size`를 줄인다) |
# | DPO: `_compute_loss` 아래의 `outputs = model(…)` | 정책의 순전파 |
# | DPO: `_compute_loss` 아래의 `ref_outputs = …` | 기준 모델의 순전파 |
# | DPO: `log_softmax`, `cross_entropy` | 통째로 만든 로짓 |
# | GRPO: `_generate_single_turn` | 롤아웃(그 아래가 `sync_weights`면 vLLM 엔진을 깨우는 때) |
# | GRPO: `_compute_loss` | 손실까지 |
# | GRPO: `_compute_loss` 없이 `_get_per_token_logps_and_entropies` | `beta`가 0이 아니면 기준 모델. vLLM을 쓰거나 누적 횟수가 `steps_per_generation` × `num_iterations`의 배수가 아니면 정책일 수도 있다 |
#
# 그다음 고칠 줄을 찾는다.
#
# | 언제 죽나 | 원인 | 고치는 줄 |
# |---|---|---|
# | **DPO**: SFT의 배치를 그대로 옮기자마자 | 짧은 글의 전체 미세 조정이면 기준 모델 한 벌. LoRA, 긴 글, 통째로 만든 로짓이면 쌍마다 문장이 둘 | 앞의 것이면 다음 줄로 간다(배치를 줄여도 거의 그대로다, 12.1절). 뒤의 것이면 배치를 반으로 줄이고 누적을 두 배로 한다 |
# | **DPO**: 배치를 줄여도 | 기준 모델 한 벌 | `precompute_ref_log_probs=True`, LoRA(`peft_config`), fp16으로 읽은 `ref_model`, 8비트 옵티마이저(2.9절) |
# | **DPO**: 손실에서 | 통째로 만든 로짓 | TRL 1.16, `max_length`(LLaMA-Factory는 `cutoff_len`), 배치 |
# | **GRPO**: 기준 모델(`beta`가 0이 아닐 때), 또는 `beta`를 켠 뒤 어느 단계든 | 기준 모델 한 벌이 모든 단계에 있다 | `beta=0`(TRL의 기본값. 기준 모델에서 멀어져도 벌이 없다), LoRA(어댑터를 끄는 것이라 0) |
# | **GRPO**: 롤아웃 | KV 캐시, 남아 있는 옵티마이저 상태 | 누적을 줄이거나, LoRA와 `steps_per_generation=1`(전체 미세 조정이면 12.6절의 표), 배치(와 `num_generations`), `max_completion_length` |
# | **GRPO**: 손실, 역전파, 갱신 | 짧은 답의 전체 미세 조정이면 가중치, 그레이디언트, 옵티마이저 상태 | LoRA, 8비트 옵티마이저(2.9절). 누적하고 있다면 누적을 없앤다(12.6절) |
# | **GRPO**: 손실, 역전파 | 긴 답이나 LoRA면 순전파 상태, 옛 TRL이면 통째로 만든 로짓 | `max_completion_length`, 배치를 줄이고 누적 |
# | **엔진**이 시작하지 않는다 | 몫만큼 비어 있지 않거나, 몫에 가장 긴 글의 캐시가 들어가지 않는다 | `Free memory on device …`이면 몫을 줄인다. `To serve at least one request …`이면 `vllm_max_model_length`를 적고, 모자라면 몫을 **늘린다**(12.11절) |
# | **엔진**을 재우지 않음: 정책의 로그 확률('기준 모델'), 손실, 역전파, 갱신(몫이 클수록 일찍. 둘째 스텝에서 죽기도 한다) | 쥐고 있는 엔진. 첫 갱신부터는 옵티마이저 상태도 | `vllm_gpu_memory_utilization`을 줄인다(12.7절). 모자라면 `vllm_enable_sleep_mode=True` |
# | **엔진**을 재움: 둘째 롤아웃(`cumem_allocator`, 가상 GPU에서는 `sync_weights`) | 깨어난 엔진과 옵티마이저 상태 | 몫을 줄인다, LoRA |
# | **T4**: 어떤 스텝만 | 길이가 모두 같아 생긴 어텐션의 행렬 | 3.12절의 한 줄(12.9절의 스크립트에 있다) |
# | **T4**: `_amp_foreach_non_finite…` | bf16이 된 어댑터(4비트, 8비트), 손수 bf16으로 읽은 파라미터 | Trainer를 만든 뒤 fp32로(12.5절) |
# | **T4**: LoRA인데도 모자란다 | fp32로 읽은 얼린 가중치 | `model_init_kwargs={"dtype": "float16"}`, 손수 읽었다면 `from_pretrained(…, dtype=…)` |
#
# - DPO에 더해지는 것은 전체 미세 조정이면 **가중치 한 벌**(LoRA나 미리 계산이면 0), 배치 수를 그대로 두면 **두 배의 문장**, 로짓을 통째로 만드는 도구라면 기준 모델의 로짓까지다.
# - 최대는 단계마다 따로 있다. **가장 높은 단계를 먼저 찾고**, 그것을 낮추는 줄만 바꾼다.
# - 엔진은 **재우지 않으면 더하고, 재우면 번갈아 쓴다.**
#
# 오류 메시지에서 거꾸로 찾아가는 길은 [10장](10_oom_clinic.ipynb)에 있다.

# %% [markdown] lang="ko"
# ## 12.11 더 읽을거리
#
# 진짜 카드에서는 · 자기 데이터로 쓰기 전에 · SFT로 만든 어댑터에서 이어서 · 8B에서 로짓을 통째로 · 기준 모델이 없는 손실 · 사건 12-A를 두 번에 · 연습 12-1의 그림 · T4에서 `generate` · 오류의 크기에서 길이로 · 패널의 하한 · 엔진이 시작하지 않을 때 · 진짜 엔진
#
# ### 진짜 카드에서는
#
# 12.1~12.3절의 프로그램 가운데 다섯은 H100 한 장에서도 그대로 돌려 보았다(Llama-3.2-1B, 가중치는 무작위. 12.3절에서는 둘째 줄만 돌렸다). 이 예측은 같은 카드의 다른 기록을 보고 규칙 몇 가지를 고친 뒤에 다시 계산한 것이라 시험이 아니라 확인이다. 12.4절은 카드에서 확인하지 않았다(로짓을 통째로 만드는 정책 쪽의 순전파와 역전파만은 H100에서도 최대가 바이트까지 같았다. `benchmarks/README.md`의 'pairs' 세 줄이다).

# %%
from helpers.chapters.c12_two_models.on_card import beside_h100, on_h100

beside_h100()

# %% [markdown] lang="ko"
# 12.2절의 뺄셈 둘을 카드에서 잰 최대로 다시 한다.

# %%
runs = on_h100()
both, alone, single = (runs[name].peak[0] for name in ("DPO 4", "DPO 4, precomputed", "SFT 8"))
print(f"{both - alone:,} {alone - single:,}")

# %% [markdown] lang="ko"
# 다섯 가지 모두 최대가 바이트까지 같고, 예약의 차이는 0.31%까지다. 기준 모델은 그 파라미터의 4배인 4,943,257,600바이트이고, 그것을 빼면 쌍 4개의 DPO와 글 8개의 SFT는 카드에서도 512바이트가 다르다.
#
# <details><summary>최대가 12.2절, 12.3절의 값과 다른 까닭</summary>
#
# 카드가 다르다. cuBLAS의 작업 공간(3장)이 A100은 8,519,680바이트, H100은 33,554,432바이트이고, 순전파와 역전파의 스레드에 하나씩 둘이 있다. 12.3절은 T4라 작업 공간도 어텐션의 커널도 다르다.
#
# </details>
#
# 다른 모델로 더 돌려 본 것도 있다. TRL 1.16에 딸린 세 스크립트를 Qwen3-0.6B로, 고치지 않고 NVIDIA H100에서 세 스텝 학습하며 모든 할당을 기록했다. 예측은 카드에서 실행하기 전에 적어 두었다. 다만 그때 도구가 세지 못하던 행렬곱 `addmm(…, out_dtype=…)`의 몫은 나중에 따로 더한 값이다(기록은 `benchmarks/README.md`, 2026년 11월 23일).
#
# | 스크립트(전체 미세 조정, bf16으로 계산) | 설정 | 예측한 최대 | 잰 최대 |
# |---|---|---|---|
# | `trl.scripts.sft` | 배치 4, 길이 1024까지 | 9.53 GiB | 9.535 GiB |
# | `trl.scripts.dpo` | 쌍 2, 길이 1024까지 | 11.76 GiB | 11.758 GiB |
# | `trl.scripts.grpo` | 답 8개, 길이 64까지 | 9.56 GiB | 9.548 GiB |
#
# 셋 다 차이가 0.2% 안이다. 12.2절의 셈도 여기서 다시 할 수 있다. 글 4개와 쌍 2개는 문장의 수가 같고, 잰 값의 차이 11.758 − 9.535 = 2.223 GiB는 Qwen3-0.6B의 fp32 가중치 한 벌(12.6절의 2.22 GiB)이다. 진짜 카드에서도 DPO가 더 쓴 것은 기준 모델이었다.
#
# T4에서 잰 것은 없고, vLLM과 함께 돌린 것도 없다.
#
# ### 자기 데이터로 쓰기 전에
#
# 12.9절의 스크립트를 옮겨 쓸 때 볼 것이다.
#
# - `data`의 열은 GRPO가 `prompt`(와 `reward`가 받는 것), DPO가 `prompt`, `chosen`, `rejected`다.
# - GRPO에는 질문을 자르는 설정이 없다. 긴 질문은 `data`에서 먼저 거른다.
# - GRPO의 배치를 4로 줄이면 누적은 2, `steps_per_generation=2`로 적는다. 한꺼번에 만드는 답이 `num_generations`의 배수여야 한다.
# - 8B를 GRPO로 학습하려면 첫째 스크립트에서 모델을 `"Qwen/Qwen3-8B"`로 바꾸고, 둘째 스크립트의 `import torch`, `BitsAndBytesConfig`를 가져오는 줄, `four_bits = …` 줄을 옮겨 온다. `model_init_kwargs`에 `"quantization_config": four_bits`를 더하고, `trainer.train()` 앞에 `for`부터의 세 줄을 넣는다(12.6절의 9.65 GiB).
# - Ampere부터(L4, A100, RTX 30)는 `fp16=True`를 빼고 dtype을 모두 `bfloat16`으로 적는다. 3.12절의 한 줄은 필요 없다. `for`부터의 세 줄은 없어도 멈추지 않지만 4비트라면 **남겨 둔다.** 어댑터가 bf16이면 학습률 1e-5의 걸음이 크기 0.004가 넘는 가중치에서 반올림되어 사라진다(1.5절).
# - Llama는 Hub에서 먼저 사용 허락을 받아야 한다.
# - bf16으로 학습한 모델을 fp16으로 계산하면 수가 넘칠 수 있다. 처음 몇 스텝의 손실이 `nan`인지 본다.
# - DPO와 GRPO의 학습률은 적지 않으면 1e-6이다. LoRA라면 그 열 배쯤에서 시작한다(8장).
#
# ### SFT로 만든 어댑터에서 이어서 하려면
#
# 12.9절의 둘째 스크립트에서 `arguments`의 `model_init_kwargs`를 빼고 `trainer = …` 줄을 아래로 바꾼다. `peft_config`를 함께 주면 `ValueError`다. TRL은 처음의 어댑터를 `ref`라는 이름으로 복사해 얼려 두고 기준으로 쓴다. `processing_class`를 적지 않으면 어댑터가 아니라 바탕 모델의 토크나이저를 읽는다.
#
# ```python
# from peft import PeftModel
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# name = "meta-llama/Llama-3.1-8B-Instruct"  # SFT를 한 모델
# base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16, quantization_config=four_bits)
# model = PeftModel.from_pretrained(base, "sft-out", is_trainable=True)
# words = AutoTokenizer.from_pretrained("sft-out")  # SFT에서 쓴 대화 템플릿까지. 저장하지 않았으면 name
# trainer = DPOTrainer(model, args=arguments, train_dataset=data, processing_class=words)
# ```
#
# 그 아래의 `for`는 이렇게 바꾼다. `ref`는 bf16으로 바뀌기 전의 사본이라, 거기서 되돌려야 반올림된 자릿수까지 돌아온다. `.float()`만으로는 정책이 첫 스텝부터 기준과 조금 다르다.
#
# ```python
# for name, weight in trainer.model.named_parameters():
#     if weight.requires_grad:
#         weight.data = trainer.model.get_parameter(name.replace(".default.", ".ref.")).data.clone()
# ```
#
# ### 8B에서 로짓을 통째로 만들면
#
# 12.4절의 `whole_dpo`를 12.5절의 8B로, 길이 1,024와 2,048에서 실행한다. 갱신은 없다.

# %%
load = partial(loaded, "meta-llama/Llama-3.1-8B", quantization_config=four_bits)
compare({f"whole logits, {n:,}": partial(whole_dpo, 1, n, load=load) for n in (1024, 2048)}, "T4", ram=False)

# %% [markdown] lang="ko"
# 1,024토큰은 11.23 GiB로 끝나고 2,048토큰은 죽는다. 할당된 13.44 GiB에 마지막 요청 1.00 GiB를 더해도 14.64 GiB보다 작으니, 여기서 죽은 것은 빈자리가 나뉘어 있어서다(단편화). 그러나 단편화를 없애도 뒤에서 넘친다. 그 1 GiB는 12.5절에서 본 어텐션의 행렬인데, 그것이 없어도 로짓 다섯 벌(5 × 1.957 = 9.78 GiB)과 모델(4비트 선형층 3.66 GiB, fp16인 임베딩과 출력층 1.96 GiB)만으로 15.40 GiB다.
#
# ### 기준 모델이 없는 손실
#
# SimPO([Meng 외, 2024](https://arxiv.org/abs/2405.14734))와 ORPO([Hong 외, 2024](https://arxiv.org/abs/2403.07691))는 손실에 기준 모델이 없다. 전체 미세 조정이면 가중치 한 벌이 준다. TRL의 LoRA라면 줄 것이 없고(12.3절), 로짓을 통째로 만드는 도구라면 12.4절에서 순서를 바꾼 것과 같은 세 칸이다. 배우는 것도 다르니 메모리만 보고 고르지 않는다.
#
# ### 사건 12-A를 두 번에
#
# 가중치를 뺀 나머지는 배치 × 길이에 비례한다. 두 점이면 직선이 정해진다.
#
# 1. 4,096토큰에서 DPO 1과 DPO 2를 실행하면 32.23 GiB와 56.89 GiB다. 쌍 하나가 24.66 GiB이고, 늘 있는 것은 32.23 − 24.66 = 7.57 GiB(거의 다 가중치)다.
# 2. 카드에는 78.85 − 7.57 = 71.28 GiB가 남는다. DPO 2는 4,096 × 71.28 / 49.32 = 5,920토큰쯤부터, SFT 4는 4,096 × 71.28 / (38.35 − 7.57) = 9,485토큰쯤부터 넘친다. 답은 그 사이다.
#
# 한 토큰까지 좁혀 보면 **5,804토큰에서 9,207토큰까지**다. 어림보다 조금 일찍 넘치는 것은 카드에 들어가야 하는 것이 할당이 아니라 그보다 많은 예약이기 때문이다(3장).
#
# ### 연습 12-1의 답을 그리면
#
# 순서를 바꾼 것, 정책의 로짓을 먼저 놓은 것, 거기에 `log_softmax`를 먼저 부르고 자른 것이다.


# %%
def dense(model, ids):
    logits = model(ids, use_cache=False).logits.float()
    return logits, logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])


def early(model, ids, scores=scores):
    policy = scores(model, ids)[1]
    with torch.no_grad(), model.disable_adapter():
        reference = scores(model, ids)[1]
    return (policy - reference).sum()


def first(model, ids):
    with torch.no_grad(), model.disable_adapter():
        reference = scores(model, ids)[1]
    return (scores(model, ids)[1] - reference).sum()


cures = {"reference first": first, "early": early, "early, dense": partial(early, scores=dense)}
draw_moments(moments_of_each({name: partial(whole_dpo, 4, loss=loss) for name, loss in cures.items()}, "T4"))

# %% [markdown] lang="ko"
# LLaMA-Factory에는 `log_softmax`를 나누어 계산하자는 제안도 올라와 있다([#10720](https://github.com/hiyouga/LlamaFactory/pull/10720)).
#
# ### T4에서 `generate`
#
# 12.6절에서는 답을 건네받았다. 세 모델은 답을 `generate`로 만들어도 T4에 들어갈까? 512토큰을 하나씩 만들면 오래 걸리므로, 질문을 760토큰으로 늘리고 답은 8토큰만 만든다. 다 만들었을 때의 KV 캐시는 똑같이 768토큰이고, 긴 질문을 한꺼번에 읽으므로 롤아웃이 더 쓸 수는 있어도 덜 쓰지는 않는다. 손실과 역전파는 답 8토큰의 것이라 12.6절의 줄로 본다.

# %%
lines = {
    "0.6B, full": partial(grpo, completion=8, prompt=760),
    "4B, LoRA, line": partial(with_line, partial(four_b, completion=8, rollout=None, prompt=760)),
    "8B, QLoRA, line": partial(with_line, partial(eight_b, completion=8, rollout=None, prompt=760)),
}
compare_steps(lines, "T4")

# %% [markdown] lang="ko"
# 0.6B의 롤아웃은 9.81 GiB로 오르지만 12.6절에 있는 역전파의 10.37 GiB보다 낮다. 4B의 롤아웃은 9.56 GiB로 올라도 역전파의 10.48 GiB보다 낮다. 8B도 8.44 GiB로 역전파의 9.65 GiB보다 낮다. 셋 다 들어가고 최대는 12.6절과 같다. (4B는 따로 512토큰을 다 만들어 보아도 10.48 GiB였다.)
#
# ### 오류의 크기에서 길이로
#
# 문장 하나의 fp32 로짓은 길이 × 어휘 × 4바이트다. 이 식을 거꾸로도 쓴다. 같은 모델과 설정으로 SFT는 한 장에 들어가는데 DPO는 32 GB 카드 여덟 장에서 배치 1로도 죽었다는 신고([LlamaFactory #6800](https://github.com/hiyouga/LlamaFactory/issues/6800))의 메시지다.
#
# ```
# line 3479, in cross_entropy
# torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 3 has a total capacity of 31.74 GiB
# of which 1.41 GiB is free. […] 23.51 GiB is allocated by PyTorch, and 5.51 GiB is reserved by PyTorch but unallocated.
# ```
#
# 10장의 규칙으로는 무엇을 의심하는가? 그리고 4.64 GiB가 fp32 로짓 한 벌이라면 문장 하나는 몇 토큰이었을까? Qwen2-VL-7B의 어휘는 152,064개다.
#
# <details><summary>답</summary>
#
# 4.64는 1.41 + 5.51보다 작다. 빈자리를 모으면 이 요청은 통과할 수 있으니(10.1절) `expandable_segments:True`를 먼저 해 본다. 켜고도 죽으면 단편화가 아니다.
#
# 4.64 × 2³⁰ / (152,064 × 4)는 8,190쯤이다. 쌍 하나는 문장 둘이므로 하나에 4,096토큰쯤이다. 그런데 DPO의 손실에 왜 `cross_entropy`가 있을까? 그 무렵(2025년 1월)의 LLaMA-Factory는 `labels`까지 모델에 건네서, DPO가 쓰지 않는 SFT 손실을 순전파마다 계산했다. 지금은 `labels`를 빼고 부른다. (그 사람의 데이터를 본 것은 아니다.)
#
# </details>
#
# ### 패널의 하한은 얼마나 가까운가
#
# 하한이 얼마나 가까운지 확인한다. 12.6절의 학습, 곧 `generate`로 8토큰짜리 답을 만든 것(첫 줄)과 길이 512, 4,096인 답을 건네받은 것에서 잰 최대를 하한으로 나눈다. 패널에서 고를 수 있는 가장 긴 8,192토큰도 실행한다.

# %%
farthest = steps_of(partial(grpo, completion=8192, rollout=partial(given, length=8192)), "RTX 4090")
for completion, steps in ((8, two), (512, base), (4096, far), (8192, farthest)):
    floor, peaks = Grpo(small, completion=completion).floor(total), steps.peaks()
    print(f"{completion:5}", *(f"{phase} {peaks[phase] / sum(floor[phase].values()):.3f}" for phase in floor))

# %% [markdown] lang="ko"
# 답을 건네받은 롤아웃 말고는 모두 1보다 크다(하한은 `generate`를 전제로 KV 캐시와 16비트 사본을 세는데, 건네받으면 둘 다 없다). 짧은 답에서는 1에 가깝고, **길수록 멀어진다.** 재계산하는 층의 임시 텐서처럼 하한이 세지 않는 것이 길이를 따라 늘기 때문이다. 긴 답이라면 패널의 하한이 들어가도 실행해 본다.
#
# ### 엔진이 시작하지 않을 때, 캐시가 모자랄 때, 손수 만든 루프
#
# - 몫만큼 비어 있지 않으면 시작하지 않는다(`Free memory on device … is less than desired GPU memory utilization`, [vllm #20305](https://github.com/vllm-project/vllm/issues/20305)). 몫을 줄인다. 같은 셀을 다시 실행했다면 앞의 엔진과 학습이 쥐고 있는 것일 수 있으니 런타임부터 다시 시작한다.
# - `vllm_max_model_length`를 적지 않으면 vLLM은 모델이 받을 수 있는 가장 긴 글(Qwen3-0.6B는 40,960토큰) 하나의 캐시가 들어가는지 따진다. 들어가지 않으면 시작하지 않는다(`To serve at least one request with the model's max seq len …`, [vllm #34076](https://github.com/vllm-project/vllm/issues/34076)). 실제로 쓸 길이(여기서는 768)를 적는다. 길이를 적어도 그렇거나 `No available memory for the cache blocks`가 나오면 가중치와 순전파만으로 몫이 찬 것이니 몫을 늘린다.
# - 캐시가 답의 수보다 작으면 죽지 않고 느려진다. 들어가지 못한 답은 기다린다([Preemption](https://docs.vllm.ai/en/latest/configuration/optimization/#preemption)).
# - 엔진을 깨우기 전에 `empty_cache()`를 부른다. 학습 쪽 할당자가 쥔 빈 덩어리를 돌려주어야 엔진이 쓸 수 있다. TRL은 그렇게 하고, 손수 만든 루프라면 빠뜨리지 않는다.
#
# ### 진짜 엔진은 무엇이 다른가
#
# 12.7절의 블록과 다른 점과, 함께 알아 둘 것이다. 처음 두 줄의 크기는 여러 사람의 시작 로그(`benchmarks/engines.json`)에서 보았다.
#
# - 몫 안에는 가중치와 캐시 말고도 순전파의 임시 텐서와 PyTorch 할당자 밖의 것이 있다. 로그 25개 가운데 23개에서 둘을 더해 0.36~2.48 GiB다. (나머지 둘은 vLLM 0.11이 H100에서 돈 것으로, 순전파의 크기가 적혀 있지 않고 Qwen3-0.6B도 5.69 GiB를 썼다. TRL의 엔진은 한꺼번에 만드는 답의 수만큼만 받는다.) 이 블록은 가중치와 가장 긴 글의 캐시가 들어가는지 따지지 않는다(플래너는 따진다).
# - 몫 밖에 CUDA 그래프가 있다. 로그에서 많게는 1.28 GiB다(vLLM 0.20부터는 그래프가 쓸 것까지 몫 안에 넣어 잡기도 한다).
# - 잠들어도 얼마간 남는다([vllm #28714](https://github.com/vllm-project/vllm/issues/28714)의 로그에서 1.19 GiB다. 여기에는 프로세스의 CUDA 컨텍스트도 들어 있다).
# - `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`와 재우는 것은 함께 쓸 수 없다([vllm #11743](https://github.com/vllm-project/vllm/pull/11743)).
# - 정책이 4비트면 TRL은 엔진도 4비트로 만들고(`quantization="bitsandbytes"`), 8비트면 거절한다. TRL의 소스(`vllm_generation.py`)를 읽은 것이고, 돌려 보지 않았다.
# - 깨우다가 모자라면 PyTorch의 메시지가 아니라 `CUDA Error: out of memory at …/cumem_allocator.cpp`가 나온다([vllm #13941](https://github.com/vllm-project/vllm/issues/13941)).
# - Unsloth는 엔진과 학습이 가중치 한 벌을 함께 쓴다고 적는다([Long-context GRPO](https://unsloth.ai/blog/grpo)의 표에서 Llama-3.1-8B의 추론 몫이 TRL은 16 GB, Unsloth는 0 GB다. 여기서 재지는 않았다).
