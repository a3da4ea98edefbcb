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
# SFT는 되는데 DPO나 GRPO로 바꾸면 죽는다. 선호 학습과 강화 학습에서는 SFT에 없던 것, 곧 모델 하나가 더 있거나 모델이 만든 답이 카드에 함께 있다.
# 이 장은 TRL의 `SFTTrainer`, `DPOTrainer`, `GRPOTrainer`를 **고치지 않고** 가상 GPU에서 실행해 무엇이 언제 더 있는지 센다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - SFT에서 DPO로 갈 때 더해지는 것을 바이트까지 말하고, 두 배가 되는 것을 가려낸다.
# - 기준 모델(reference model)을 카드에서 치우거나 줄이는 길을 안다.
# - 로짓을 통째로 만드는 코드에서 DPO가 SFT의 몇 배를 쓰는지 계산한다.
# - GRPO의 한 스텝을 단계로 나누고, 설정 하나가 어느 단계의 최대를 옮기는지 안다.
# - 답을 만드는 엔진(vLLM)이 같은 카드에 있을 때 언제, 왜 죽는지 설명하고, 엔진의 몫을 계산한다.
# - T4 한 장에서 DPO와 GRPO를 하려면 무엇을 적어야 하는지 안다.
#
# 급하면 죽는 때마다 고칠 줄을 모은 표(12.10절)부터 본다. T4에서 쓸 스크립트는 12.9절, DPO는 12.1~12.5절, GRPO는 12.6절, vLLM은 12.7절이다.
#
# 이 장의 GPU 수치는 모두 가상 GPU에서 센 것이다(진짜 H100과의 차이는 12.11절에 있다). vLLM만은 실행하지 않고, 그 몫만큼의 빈 블록을 카드에 잡아 둔다(12.7절). `attempt`와 `compare`는 11장에서 쓴 것이고, `texts`, `pairs`, `prompts`는 길이를 정해 만든 데이터다.

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
# DPO([Rafailov 외, 2023](https://arxiv.org/abs/2305.18290))는 같은 질문에 대한 좋은 답과 나쁜 답을 한 쌍으로 준다. 좋은 답의 확률은 올리고 나쁜 답의 확률은 내리되, 처음 모델에서 너무 멀어지지 않게 한다. 그래서 처음 모델, 곧 **기준 모델**의 확률도 필요하다.
#
# $$\mathcal{L} = -\log \sigma\Big(\beta\,\big[\log\pi_\theta(y_w|x) - \log\pi_{\text{ref}}(y_w|x) - \log\pi_\theta(y_l|x) + \log\pi_{\text{ref}}(y_l|x)\big]\Big)$$
#
# $x$는 질문(프롬프트), $y_w$는 좋은 답, $y_l$은 나쁜 답이다. $\pi_\theta$는 학습하는 모델(**정책**, policy), $\pi_{\text{ref}}$는 기준 모델이고, $\sigma$는 시그모이드, $\beta$는 차이에 곱하는 수다. 메모리를 정하는 것은 식에 있는 **로그 확률 넷**이다. 로그 확률 하나는 답의 토큰마다 로짓에 `log_softmax`를 하고 그 자리에 실제로 있는 토큰의 값을 골라(`gather`) 더한 것이다. SFT의 손실은 그런 로그 확률 하나를 토큰의 수로 나누고 부호를 바꾼 것이다.
#
# 쌍 하나는 카드에서 **문장** 둘이다. 문장은 모델에 들어가는 토큰열 하나이고, 쌍에서는 질문에 좋은 답을 이은 것과 나쁜 답을 이은 것이다. 질문은 두 문장에 다 들어간다. TRL은 배치의 문장을 모두 묶어 한 번에 순전파한다. SFT의 글 하나는 문장 하나다.
#
# 파라미터가 12.4억 개인 Llama-3.2-1B를 RTX 4090(쓸 수 있는 메모리 23.16 GiB)에서 학습한다. `fp16=True`와 `QUIET`(기록과 저장을 끈다) 말고는 TRL의 기본값 그대로다. 기본값에서 TRL은 가중치를 fp32로 읽고, 체크포인팅을 켜고, bf16으로 계산한다. T4에는 bf16 연산 장치가 없으므로(1장) 이 장의 프로그램은 모두 fp16으로 계산한다.
#
# SFT는 길이 512인 글 4개, DPO는 질문 256토큰에 답 256토큰인 쌍이다. DPO를 배치(쌍의 수) 4, 2, 1로 줄이면 **몇에서** 들어갈까? `none`은 1로도 들어가지 않는다는 뜻이다.

# %%
dpo_fits = guess("12.1", None, ("4", "2", "1", "none"))
dpo_fits

# %% [markdown] lang="ko"
# `sft`와 `dpo`는 TRL을 쓰는 여느 스크립트와 같다. 토크나이저와 데이터만 여기서 만든 것이다. 메모리를 정하는 것은 글자가 아니라 길이다. 옵티마이저 상태는 첫 갱신에서 생기므로(3장) 두 스텝을 학습한다. `dpo`의 `reference`는 12.3절에서 쓴다.


# %%
def sft(batch, peft_config=None, **options):
    arguments = SFTConfig(folder, per_device_train_batch_size=batch, max_steps=2, fp16=True, **QUIET, **options)
    data = {"train_dataset": texts(512), "processing_class": tokenizer()}
    SFTTrainer(billion, arguments, peft_config=peft_config, **data).train()


def dpo(batch, peft_config=None, reference=None, **options):
    arguments = DPOConfig(folder, per_device_train_batch_size=batch, max_steps=2, fp16=True, **QUIET, **options)
    data = {"train_dataset": pairs(256, 256), "processing_class": tokenizer()}
    own = reference() if reference else None
    DPOTrainer(billion, own, args=arguments, peft_config=peft_config, **data).train()


programs = {"SFT 4": partial(sft, 4)} | {f"DPO {n}": partial(dpo, n) for n in (4, 2, 1)}
compare(programs, "RTX 4090", ram=False)

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
dpo_fits.against("none")

# %% [markdown] lang="ko"
# 'OOM' 뒤에 적힌 것은 마지막에 달라고 한 크기와 그것을 부른 함수다. 죽은 줄의 GPU 최대는 카드가 찬 높이일 뿐, 필요한 양이 아니다(그래서 배치를 줄였는데도 줄지 않는다). 배치를 1로 줄여도 죽으니, 배치에 비례하지 않는 것이 자리를 거의 다 채운 듯하다. 12.2절에서 확인한다.
#
# ## 12.2 두 배가 되는 것과 되지 않는 것
#
# > **주장 1.** "DPO는 모델을 두 번 올리니 메모리가 두 배다" ([LlamaFactory #798](https://github.com/hiyouga/LlamaFactory/issues/798). ["SFT에 파라미터의 16~20배가 든다면 DPO에는 32~40배가 드는가"](https://github.com/hiyouga/LlamaFactory/issues/1250)라고 물은 사람이 있다)
#
# 죽지 않는 카드(A100 80 GB)에서 최대를 바이트로 잰다. 쌍 4개는 문장 8개이므로 SFT도 배치 8로 맞춘다. `precomputed`는 기준 모델의 로그 확률을 학습 **전에** 모두 계산해 두고 기준 모델을 올리지 않는 것이다. 세 값이 서로 얼마나 다를지 먼저 생각한다.

# %%
ways = {
    "SFT 8": partial(sft, 8),
    "DPO 4, precomputed": partial(dpo, 4, precompute_ref_log_probs=True),
    "DPO 4": partial(dpo, 4),
}
maximum = {name: attempt(program, "A100-80GB").gpu for name, program in ways.items()}
for name, nbytes in maximum.items():
    print(f"{name:19} {nbytes:>14,} {human_bytes(nbytes):>10}")

# %% [markdown] lang="ko"
# 한 줄씩 뺀다. 첫 줄은 문장의 수가 같고 기준 모델도 없을 때 DPO가 SFT보다 더 쓰는 것, 둘째 줄은 기준 모델을 올려서 더 쓰는 것이다. 셋째 줄은 파라미터 수의 4배, 곧 fp32 가중치 한 벌이다.

# %%
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.models.configs import load_config

count = count_parameters(build_model(load_config(billion), torch.float32))
print(f"{maximum['DPO 4, precomputed'] - maximum['SFT 8']:,}")
print(f"{maximum['DPO 4'] - maximum['DPO 4, precomputed']:,}")
print(f"{4 * count:,}")

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 여기서는 24.08 / 19.48, 1.24배였다. 네 벌(가중치, 그레이디언트, AdamW의 두 상태)에 가중치 한 벌이 더해졌을 뿐이다. 두 배가 되는 것은 문장의 수에 비례하는 것, 곧 순전파 상태와 로짓이다. 그것이 대부분인 학습이라면 두 배에 가깝고, 로짓을 통째로 만드는 코드는 12.4절에서 따로 센다.
#
# 위에서는 문장의 수를 맞추려고 SFT의 배치를 8로 했다. 배치를 그대로 두고 SFT를 DPO로 바꾸면 문장이 두 배다.
#
# </details>
#
# - **이 크기에서는, 기준 모델이 없으면 쌍 4개의 DPO와 글 8개의 SFT가 512바이트 차이다.** 할당자가 주는 가장 작은 블록 하나다(3장). DPO의 손실에 드는 것은 최대의 아래에 가려진다(아래의 표).
# - **기준 모델은 가중치 한 벌이다.** 한 바이트도 다르지 않다. 순전파만 하므로 그레이디언트도 옵티마이저 상태도 없다.
# - SFT의 배치를 4에서 8로 늘려도 최대는 거의 그대로다(12.1절의 19.43 GiB와 19.48 GiB). TRL은 체크포인팅을 켜 두고 로짓을 조각으로 만들기 때문에(12.4절), 이 크기에서는 문장의 수와 상관없는 것이 최대를 정한다. 그것이 무엇인지 나누어 본다.

# %%
from helpers.chapters.c12_two_models.moments import parts_at_peak

parts_at_peak(partial(sft, 8), "A100-80GB")

# %% [markdown] lang="ko"
# 네 벌(9.21 + 4.60 + 4.60 GiB)에 임시 텐서가 1.04 GiB 더 있다. 크기로 보아 거의 다 임베딩의 그레이디언트다(128,256 × 2,048 × 4바이트 = 0.98 GiB). 임베딩과 출력층이 가중치를 함께 쓰는 모델이라, 역전파의 끝에서 둘의 그레이디언트를 더하기 전에 둘이 함께 있다.
#
# DPO 4의 24.08 GiB는 여기에 기준 모델 4.60 GiB를 더한 것이고, RTX 4090의 23.16 GiB로는 0.92 GiB 모자란다. 거의 모두가 배치와 상관없으니 2와 1에서도 죽었다.
#
# ## 12.3 기준 모델을 치우는 두 길
#
# 손실을 바꾸지 않고 치우는 길이 둘 있다.
#
# 하나는 위의 `precompute_ref_log_probs=True`다. 기준 모델은 학습하는 동안 변하지 않으므로, 쌍마다 로그 확률 두 수(좋은 답과 나쁜 답)만 적어 두면 된다. 19.48 GiB였으니 RTX 4090에 배치 4로도 들어간다. 데이터를 한 번 더 훑는 시간이 들고, 스트리밍 데이터셋은 받지 않는다. LLaMA-Factory에는 이 설정이 없으니([#4810](https://github.com/hiyouga/LlamaFactory/issues/4810)은 '하지 않음'으로 닫혔다) 거기서는 LoRA 쪽을 고른다.
#
# 다른 하나는 LoRA다. 어댑터를 끄면(`disable_adapter`) 남는 것이 처음 모델이므로 가중치를 한 벌만 둔다. TRL은 `peft_config`를 받으면 스스로 그렇게 한다. T4에서 LoRA SFT 8개와 LoRA DPO 4쌍을 비교한다. 기준 모델을 더 부르는 만큼 얼마나 늘까?

# %%
from peft import LoraConfig

extra = guess("12.3", None, "MiB")
extra

# %% [markdown] lang="ko"
# 앞의 두 줄의 차이를 예상과 비교한다. 셋째 줄은 같은 DPO에서 가중치를 fp16으로 읽은 것이고, 넷째 줄은 거기에 `ref_model`을 손수 만들어(fp16) 준 것이다. 마지막 줄은 LoRA 없이 RTX 4090에서 전체를 학습하며 기준 모델만 fp16으로 읽는다.

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
extra.against(max(0, lora_peak["DPO 4, LoRA"] - lora_peak["SFT 8, LoRA"]))

# %% [markdown] lang="ko"
# 늘지 않았다. 기준 모델의 순전파는 `no_grad`라 층을 지날 때마다 버리고, 남는 것은 토큰마다 로그 확률 하나다.
#
# 셋째 줄은 2.5 GiB 남짓 적다. TRL은 시키지 않으면 **LoRA에서도 얼린 가중치를 fp32로 읽는다.** fp16으로 읽으면 가중치가 2.30 GiB(파라미터 수 × 2바이트), 체크포인팅이 남기는 층의 입력이 0.25 GiB(16층 × 8문장 × 512 × 2,048 × 2바이트) 준다. 어댑터는 peft가 fp32로 만들므로 손실 스케일링도 그대로 된다.
#
# 마지막 줄은 기준 모델을 **치우지 않고 절반으로 줄이는** 길이다. 24.08 GiB에서 fp16 한 벌 2.30 GiB가 빠진 21.78 GiB라 배치 4로 들어간다. 기준 모델은 학습하지 않으므로 fp16으로 읽어도 손실 스케일링과 부딪치지 않는다. 그 로그 확률이 fp32로 읽은 것과 얼마나 다른지는 재지 않았다.
#
# > **주장 2.** "LoRA면 어떻게 시작하든 기준 모델은 공짜다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** `peft_config`만 주면 메모리로는 그렇고, 시간은 순전파 한 번이 더 든다. 두 가지 예외가 있다.
#
# - `ref_model`을 손수 만들어 주면 TRL은 그것을 올린다. 위의 넷째 줄이 셋째 줄보다 6.19 − 3.89 = 2.30 GiB, 곧 fp16 한 벌만큼 많다.
# - 이미 학습한 어댑터에서 이어서 하면 기준은 '어댑터가 없는 모델'이 아니라 '처음의 어댑터'다. TRL은 `PeftModel`을 받으면 어댑터를 한 벌 복사해(`ref`) 두고, 가중치는 여전히 한 벌이다(어댑터 하나만큼은 더 든다).
#
# </details>
#
# ## 12.4 로짓을 통째로 만들면
#
# A800 80 GB 한 장에서 LoRA rank 8로 4B 모델을 학습하는 사람의 신고다. SFT는 배치 4가 되는데 DPO는 배치 2에서 OOM이고, DPO에는 SFT의 두 배보다 훨씬 더 드는 것 같다고 한다([LlamaFactory #10175](https://github.com/hiyouga/LlamaFactory/issues/10175)). LoRA이니 기준 모델의 가중치는 없고, 12.3절에서는 늘지도 않았다. 무엇이 다를까?
#
# LLaMA-Factory의 소스(2026년 8월의 `train/dpo/trainer.py`)를 보면 TRL 1.16과 두 가지가 다르다. 로짓을 **모두** 만들어 fp32로 바꾼 뒤 `log_softmax`를 부르고, 그 로짓의 평균을 지표로 적으려고 손실 함수가 끝날 때까지 **붙들고 있다**. 기준 모델의 로짓도 그동안 만든다.
#
# 이 순서를 짧게 쓴다. 학습은 12.3절처럼 T4에서 LoRA로 하고, 실제로 그러듯이 체크포인팅을 켠다. 순전파와 역전파 한 번이고, 어댑터의 옵티마이저 상태는 없다(작아서 뺐다).
#
# 배치를 하나 늘릴 때 느는 메모리는 DPO가 SFT의 몇 배일까?

# %%
times = guess("12.4", None, "times")
times

# %% [markdown] lang="ko"
# `scores`는 로짓과 토큰마다의 로그 확률을, 두 함수는 순전파와 역전파를 맡는다. DPO의 손실은 로그 확률의 차이를 더하는 것으로 줄였다. 그 뒤의 계산은 토큰마다 수 하나라 메모리에는 거의 보이지 않는다.
#
# 마지막 토큰의 로짓은 맞힐 다음 토큰이 없어 잘라 낸다. `kept`가 붙든 로짓이고, 손실을 다 계산하면 놓는다. 가중치를 뺀 것이 얼마나 느는지 보려고 배치를 바꾸어 실행한다.

# %%
from peft import get_peft_model


def loaded(name=billion, **options):
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float16", device_map="cuda", **options)
    model.gradient_checkpointing_enable()
    return get_peft_model(model, lora).train()


def scores(model, ids):
    logits = model(ids, use_cache=False).logits.float()
    return logits, logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])


def whole_sft(batch, length=512):
    model, ids = loaded(), torch.ones(batch, length, dtype=torch.int64).cuda()
    model(ids, labels=ids, use_cache=False).loss.backward()


def whole_dpo(batch, length=512, load=loaded):
    model, ids = load(), torch.ones(2 * batch, length, dtype=torch.int64).cuda()
    kept, policy = scores(model, ids)
    with torch.no_grad(), model.disable_adapter():
        reference = scores(model, ids)[1]
    del kept
    (policy - reference).sum().backward()


whole = {f"SFT {n}": partial(whole_sft, n) for n in (1, 4)}
whole |= {f"DPO {n}": partial(whole_dpo, n) for n in (1, 4)}
most = {name: attempt(program, "T4").gpu for name, program in whole.items()}
print(*(f"{name} {human_bytes(nbytes)}" for name, nbytes in most.items()), sep="\n")
times.against((most["DPO 4"] - most["DPO 1"]) / (most["SFT 4"] - most["SFT 1"]))

# %% [markdown] lang="ko"
# 배치가 하나 늘 때마다 SFT는 0.77 GiB((5.43 − 3.12) / 3), DPO는 2.51 GiB((12.41 − 4.87) / 3)가 는다. **3.3배**다.
#
# 체크포인팅을 켰으므로 층에는 거의 남지 않는다. 느는 것은 로짓이다. 몇 벌이 언제 함께 있을까? 한 스텝에서 큰 텐서만 골라, 무엇과 함께 있는지 위에서 아래로 시간을 따라 그린다. 한 줄이 한 순간이고, 굵은 줄이 최대다. 좁은 칸은 fp32로 바꾸기 전의 fp16 로짓이다.

# %%
from helpers.chapters.c12_two_models.moments import moments_of_each
from helpers.chapters.c12_two_models.pictures import draw_moments

draw_moments(moments_of_each({"SFT 4": partial(whole_sft, 4), "DPO 4": partial(whole_dpo, 4)}, "T4"))

# %% [markdown] lang="ko"
# DPO 4의 최대는 역전파가 아니라 **기준 모델의 `log_softmax`** 에서 나온다. 그때 색칠한 칸이 다섯이고, SFT의 최대(역전파)에는 셋이다.
#
# | | SFT, 글 하나 | DPO, 쌍 하나 |
# |---|---|---|
# | 문장의 수 | 1 | 2 |
# | fp32 로짓 한 벌 | 512 × 128,256 × 4바이트 = 0.24 GiB | 0.49 GiB |
# | 최대일 때 함께 있는 것 | `log_softmax`의 결과와 그레이디언트 둘(3장) | 정책의 로짓과 `log_softmax`, 기준 모델의 로짓과 `log_softmax`, 그 입력의 사본 |
# | 모두 몇 벌 | 3 | 5 |
#
# 문장이 둘이라 두 배, 거기에 두 벌이 더 있어 5 / 3배, 곱하면 3.33배다. 잰 것이 3.27배로 조금 작은 것은 층의 입력은 두 배만 늘기 때문이다.
#
# 노란 칸의 **사본**은 코드에 보이지 않는다. `logits[:, :-1]`은 문장마다 끝이 잘려 메모리에 띄엄띄엄 놓이는데, CUDA의 `log_softmax`는 이어진 텐서를 받아야 해서 잠깐 복사한다(PyTorch의 `SoftMax.cu`). LLaMA-Factory도 이렇게 자른다(`train/trainer_utils.py`의 `get_batch_logps`).
#
# 고칠 데도 그림에 있다. 다섯 벌 가운데 둘은 없어도 되는 것이다. 어느 칸이고, `whole_dpo`와 `scores`의 어느 줄을 어떻게 고치면 하나씩 빠질까? 두 줄을 짚은 다음에 아래를 읽는다. 하나만 고친 것과 둘 다 고친 것을 그린다.


# %%
def dense(model, ids):
    logits = model(ids, use_cache=False).logits.float()
    return logits, logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])


def early_dpo(batch, length=512, scores=scores):
    model, ids = loaded(), torch.ones(2 * batch, length, dtype=torch.int64).cuda()
    policy = scores(model, ids)[1]
    with torch.no_grad(), model.disable_adapter():
        reference = scores(model, ids)[1]
    (policy - reference).sum().backward()


shown = {"DPO 4, early": partial(early_dpo, 4), "DPO 4, early, dense": partial(early_dpo, 4, scores=dense)}
draw_moments(moments_of_each(shown, "T4"))

# %% [markdown] lang="ko"
# `whole_dpo`도 LLaMA-Factory처럼 역전파 전에 로짓을 놓는다. 그때는 이미 최대가 지났다. **기준 모델을 부르기 전에** 놓으면(`early_dpo`) 주황색 칸이 빠져 네 벌, 10.45 GiB다. `log_softmax`를 **먼저 부르고 자르면**(`dense`) 노란 칸도 빠져 세 벌, 8.51 GiB다. 이제 벌 수가 SFT와 같으니 로짓은 문장의 수만큼, 곧 두 배다.
#
# 쓰는 도구마다 할 일이 다르다.
#
# - **TRL 1.16**은 로짓을 통째로 만들지 않으므로 할 일이 없다. 토큰 4,096개 × 어휘 32,768개짜리 타일로 나누어 로그 확률만 남긴다(소스의 `trl/kernels/chunked_logprob.py`).
# - **옛 TRL**이라면 이 장의 DPO와 GRPO보다 더 든다. 1.9(2026년 7월)에서는 아직 통째로 만들었다(`selective_log_softmax`). `pip show trl`로 버전을 보고 `pip install -U "trl>=1.16"`으로 올린다.
# - **LLaMA-Factory**에서 바꿀 설정은 `cutoff_len`이다. 로짓을 일찍 놓으려면 위처럼 소스를 고쳐야 한다. `log_softmax`를 나누어 계산하자는 제안이 2026년 8월에 올라왔다([#10720](https://github.com/hiyouga/LlamaFactory/pull/10720)).
#
# 손실을 바꾸는 길도 있다. SimPO([Meng 외, 2024](https://arxiv.org/abs/2405.14734))와 ORPO([Hong 외, 2024](https://arxiv.org/abs/2403.07691))는 식에 기준 모델이 없다. 12.2절의 한 벌이 줄고, 로짓을 통째로 만들면 다섯 벌이 세 벌이 된다(LLaMA-Factory의 `pref_loss: simpo`나 `orpo`). 배우는 것도 다르다.
#
# ### 사건 12-A: SFT는 4가 되는데 DPO는 2도 안 된다
#
# 이 절의 처음에 본 신고(#10175)로 돌아간다. 같은 데이터와 설정에서 **SFT는 배치 4가 되고, DPO는 배치 2가 안 되고, 배치 1은 된다**고 했다. 모델은 4B라고만, 글의 길이는 아예 적지 않았다(배치 1은 누적이 64번보다 적을 때만 되고 128번이면 OOM이라는데, 그 까닭은 여기서 설명하지 못한다). Qwen3-4B이고 문장의 길이가 모두 같다고 하고, 세 가지가 모두 사실일 길이의 범위를 어림해 그 안의 하나를 적는다.
#
# 위의 두 함수를 bf16, rank 8, 80 GB 카드(쓸 수 있는 것은 78.85 GiB)로 옮긴 것을 `run(way="sft"나 "dpo", batch=…, length=…)`으로 다섯 번까지 실행한다. 첫 번째는 아래에 적어 두었으니, 남은 네 번을 어디에 쓸지 먼저 정한다.

# %%
case("12-A").run(way="sft", batch=4, length=4096)

# %% [markdown] lang="ko"
# 길이(토큰의 수)를 적는다. `check`는 세 가지를 차례로 실행해 보고, 처음으로 어긋나는 것을 알려 준다.

# %%
length = ...
case("12-A").check(length)

# %% [markdown] lang="ko"
# <details><summary>찾은 다음에</summary>
#
# 신고에 없던 길이가 범위로 나온다. 횟수를 제한하지 않고 한 토큰까지 좁혀 보니 **5,804토큰에서 9,207토큰까지**다. 5,804부터 DPO 2가 죽고, 9,208부터 SFT 4가 죽는다(DPO 1은 11,605까지 된다). 문장 하나의 fp32 로짓을 단위로 12.4절의 표를 쓰면 SFT 4는 4 × 3 = 12, DPO 1은 2 × 5 = 10, DPO 2는 4 × 5 = 20이다. DPO 2만 SFT 4보다 크므로, SFT가 4까지 되는데 DPO는 2도 안 되는 것은 이상한 일이 아니다.
#
# </details>
#
# ## 12.5 T4에서 8B를 DPO로
#
# Colab의 T4에서 4비트로 읽은 8B 모델이 DPO의 배치 1로도 죽었다는 신고([unsloth #682](https://github.com/unslothai/unsloth/issues/682))가 있다. 같은 일을 TRL로 한다. 8B를 4비트로 읽고(QLoRA, 8.9절) 배치 1로 학습한다. 문장은 1,024토큰씩이다.
#
# 함정이 하나 있다. TRL 1.16은 4비트나 8비트로 읽은 모델이면 **어댑터를 bf16으로 바꾼다**. 그런데 `fp16=True`의 손실 스케일링은 bf16 그레이디언트를 받지 못해 첫 갱신에서 멈춘다. 그래서 Trainer를 만든 **뒤에** 어댑터를 fp32로 되돌린다.
#
# <details><summary>그때 나오는 오류</summary>
#
# `NotImplementedError: "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16'`다([Soup #558](https://github.com/MakazhanAlpamys/Soup/issues/558)). SFT와 GRPO의 Trainer도 같다. 가상 GPU는 메모리만 세므로 되돌리지 않아도 지나간다.
#
# </details>
#
# LoRA라 기준 모델은 없고 로짓도 통째로 만들지 않는다. 14.64 GiB 가운데 얼마나 쓸까? 최대일 때 무엇이 얼마나 있는지를 큰 것부터 적는다. 마지막 줄이 그 합이다.

# %%
from transformers import BitsAndBytesConfig

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


parts_at_peak(dpo_8b, "T4")

# %% [markdown] lang="ko"
# T4의 절반 남짓이다.
#
# - **파라미터** 5.80 GiB는 4비트 가중치 3.66 GiB(69.8억 × 0.5625바이트, 2장), 4비트로 바꾸지 않는 임베딩과 출력층 1.96 GiB(8.9절과 달리 `prepare_model_for_kbit_training`을 부르지 않아 fp16 그대로다), 어댑터 0.16 GiB(4,194만 × 4바이트)다. 나머지는 할당자가 나누지 않은 자투리다(3장).
# - **임시 텐서**는 거의 다 어텐션이다. 문장의 길이가 같아 마스크가 없으니 T4는 math 커널로 간다(3.12절). 재계산하는 층 하나에 문장 2 × 헤드 32 × 1,024 × 1,024 × 4바이트 = 0.25 GiB짜리 행렬이 넷 있다. 3.12절의 한 줄을 Trainer보다 먼저 적으면 생기지 않는다.
# - **역전파를 위해 저장한 텐서**는 체크포인팅이 남긴 층의 입력이다. 32층 × 문장 2 × 1,024 × 4,096 × 2바이트 = 0.5 GiB.
# - 어댑터의 **옵티마이저 상태**는 0.31 GiB이고 그레이디언트는 아직 거의 없다. 역전파가 막 시작된 때다.
#
# 12.4절처럼 로짓을 통째로 만들면 같은 8B가 1,024토큰에서는 11.23 GiB로 끝나고 2,048토큰에서는 죽는다(12.11절). #682가 바로 이것 때문에 죽었는지는 확인하지 못했다.
#
# ## 12.6 GRPO의 한 스텝
#
# GRPO([Shao 외, 2024](https://arxiv.org/abs/2402.03300))는 질문 하나에 답 G개를 **스스로 만들고**, 점수를 매겨, 평균보다 나은 답의 확률을 올린다. 한 스텝이 여러 단계다. 가중치는 늘 있고, 옵티마이저 상태는 첫 갱신 뒤로 늘 있다. 단계마다 더 있는 것은 이렇다.
#
# 1. **롤아웃**(rollout): `generate`로 답을 만든다. 가중치의 16비트 사본(`autocast`, 3장)과 KV 캐시(11.3절).
# 2. **기준 모델**: 만든 답의 기준 로그 확률. 기준 모델의 가중치(이것도 늘 있다)와 순전파 한 번. `beta`는 기준 모델에서 멀어질 때 주는 벌점의 세기이고, TRL의 기본값인 0이면 이 단계가 없다.
# 3. **손실까지**: 학습하는 모델의 순전파. 16비트 사본과 역전파를 위해 남기는 것.
# 4. **역전파**: 남긴 것과 재계산하는 층 하나, 쌓이는 그레이디언트.
# 5. **갱신**: 그레이디언트 한 벌과 옵티마이저 상태.
#
# 여기서는 점수를 함수로 매긴다(`length_of`, 길수록 높다). 답에 점수를 매기도록 따로 학습한 **보상 모델**(reward model)을 쓴다면 그 가중치가 늘 더 있다. PPO에서 답의 값을 어림하던 비평 모델(critic)은 없다. 답들의 평균이 그 일을 한다.
#
# Qwen3-0.6B 전체를 RTX 4090에서 두 스텝 학습한다. 256토큰짜리 질문 하나에 8토큰짜리 답 8개를 만든다.
#
# 답은 언제나 `max_completion_length`까지 간다. 가상 GPU의 텐서에는 값이 없어 문장을 끝내는 토큰이 뽑히지 않기 때문이다. **둘째 스텝**에서 가장 높은 단계는 어디일까? (`loss`는 3의 손실까지, `step`은 5의 갱신이다.)

# %%
highest = guess("12.6", None, ("rollout", "loss", "backward", "step"))
highest

# %% [markdown] lang="ko"
# `phases_of`는 Trainer의 메서드를 그대로 부르면서 앞뒤에서 `torch.cuda`의 눈금만 읽는다. 읽은 것은 `found`라는 목록에 담기고, `steps_of`가 그 목록을 만들어 건네며 프로그램을 가상 GPU에서 실행한다. `float()`는 4비트로 읽었을 때 TRL이 bf16으로 바꾼 어댑터를 되돌리는 줄이고(12.5절), 여기서는 바꾸는 것이 없다. 그림에는 단계마다 도형이 하나씩 있다. 왼쪽 변의 높이가 단계의 처음, 꼭대기가 최대, 오른쪽 변의 높이가 끝에 할당된 양이다.

# %%
from helpers.chapters.c12_two_models.phases import phases_of, steps_of
from helpers.chapters.c12_two_models.pictures import draw_steps


def grpo(found, completion=8, batch=8, rollout=None, prompt=256, model=small, peft_config=None, **options):
    arguments = GRPOConfig(
        folder, per_device_train_batch_size=batch, num_generations=8, gradient_accumulation_steps=8 // batch,
        max_completion_length=completion, max_steps=2, fp16=True, **QUIET, **options,
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
# 최대는 둘째 스텝의 역전파다. 옵티마이저 상태와 그레이디언트는 갱신 때에도 다 있지만, 역전파의 끝에는 12.2절에서 본 임베딩의 그레이디언트(151,936 × 1,024 × 4바이트 = 0.58 GiB)가 잠깐 더 있다.
#
# 첫 스텝과 둘째 스텝의 롤아웃도 비교한다. 하는 일은 같은데 둘째가 AdamW의 상태 두 벌(2 × 2.22 GiB)만큼 높다. 첫 갱신에서 생긴 상태가 **그 뒤로 늘 남아 있기** 때문이다. 답을 만드는 동안에는 쓰지도 않는다.
#
# ### 어떤 설정이 어느 단계를 옮기나
#
# > **주장 3.** "전체 미세 조정에서 GRPO가 OOM이면, 배치를 반으로 줄이고 두 번 누적하면 최대가 준다"
#
# 답을 길이 512로 늘리고 설정을 바꾸어 본다. 여기부터는 (가상 GPU에서 512토큰을 하나씩 만들면 오래 걸려) 답을 `generate`로 만들지 않고, TRL의 `rollout_func`으로 길이 512인 답을 건넨다. 그래서 롤아웃 열에는 KV 캐시가 없고 나머지 열은 그대로 TRL이다. `batch 4`는 답 8개를 4개씩 두 번에 나누어 학습한다. `beta`는 기준 모델을 올린다. 마지막 두 줄은 답의 길이가 4,096이다.
#
# 표의 칸은 두 스텝 가운데 큰 값이다. 배치만 다른 줄이 세 쌍 있다. 배치를 줄인 효과를 쌍마다 비교하고, 판정을 먼저 고른다.

# %%
from helpers.chapters.c12_two_models.engine import Engine
from helpers.chapters.c12_two_models.phases import compare_steps


def given(prompts, trainer, length=512, shorter=0):
    ids = trainer.processing_class(prompts)["input_ids"]
    answers = [[1] * (length - shorter * i) for i in range(len(prompts))]
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}


longer = partial(grpo, completion=512, rollout=given)
longest = partial(grpo, completion=4096, rollout=partial(given, length=4096))
base, far = (steps_of(one, "RTX 4090") for one in (longer, longest))
settings = {
    "as it is": base,
    "batch 4": partial(longer, batch=4),
    "beta": partial(longer, beta=0.04),
    "no checkpoints": partial(longer, gradient_checkpointing=False),
    "no checkpoints, batch 4": partial(longer, gradient_checkpointing=False, batch=4),
    "4,096": far,
    "4,096, batch 4": partial(longest, batch=4),
}
compare_steps(settings, "RTX 4090")

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 답이 512토큰이고 체크포인팅을 켠 전체 미세 조정에서는 틀리다. 배치를 4로 줄였더니 최대가 9.53 GiB에서 10.28 GiB로 **오히려 올랐다.** 두 번에 나누어 누적하면 첫 번째의 그레이디언트 한 벌이 남아 두 번째의 순전파와 겹치기 때문이다(4장).
#
# 순전파 상태가 최대를 정하면 준다. 체크포인팅을 끄면 21.69 GiB가 17.17 GiB로, 답이 4,096토큰이면 체크포인팅을 켜고도 14.08 GiB가 12.90 GiB로 준다. LoRA라면 남는 그레이디언트가 어댑터의 것뿐이라 짧은 답에서도 준다(아래 T4의 표에서 11.76 GiB가 9.94 GiB로).
#
# </details>
#
# - **롤아웃**의 6.68 GiB는 늘 있는 것, 곧 fp32 가중치와 AdamW의 두 상태다. 한 벌이 2.22 GiB이고 세 벌이다. 이것을 낮추는 것은 배치가 아니라 LoRA나 옵티마이저다(체크포인팅은 TRL이 이미 켠다).
# - `beta`를 켜면 전체를 학습할 때 모든 단계에 그 한 벌(8.90 − 6.68)이 더해진다. LoRA라면 어댑터를 끈다(12.3절).
# - **체크포인팅**을 끄면 손실과 역전파가 크게 오르고, 롤아웃은 그대로다.
# - 답을 8토큰에서 512토큰으로 늘려도 역전파의 최대는 9.50 GiB에서 9.53 GiB가 되었을 뿐이다. 짧은 답에서는 네 벌이 최대를 정한다. 4,096토큰이면 14.08 GiB다. 체크포인팅이 남긴 층의 입력만 28층 × 답 8개 × (256 + 4,096)토큰 × 1,024 × 4바이트 = 3.72 GiB라, 긴 답에서는 순전파 상태가 정한다.
# - `generate`로 만든다면 롤아웃에는 답의 수와 길이에 비례하는 KV 캐시(11.3절)가 더 있다.
#
# ### T4에서는
#
# T4에서 같은 학습을 한다. 16 GB로 될까? 지금까지는 답 8개의 길이가 모두 512였다. 진짜 답은 길이가 제각각이므로 둘째 줄에는 463토큰에서 512토큰까지 7토큰씩 다르게 준다. 아래의 세 줄은 12.3절처럼 가중치를 fp16으로 읽고 LoRA만 학습한다. 마지막 줄은 배치를 4로 줄여 두 번 누적한 것이다.

# %%
uneven = partial(grpo, completion=512, rollout=partial(given, shorter=7))
models = {
    "0.6B, full": longer,
    "0.6B, full, uneven": uneven,
    "0.6B, LoRA": partial(longer, peft_config=lora, **half),
    "4B, LoRA": partial(longer, model="Qwen/Qwen3-4B", peft_config=lora, **half),
    "4B, LoRA, batch 4": partial(longer, model="Qwen/Qwen3-4B", peft_config=lora, batch=4, **half),
}
compare_steps(models, "T4")

# %% [markdown] lang="ko"
# 0.6B는 전체를 학습해도 들어가고, LoRA라면 4B도 들어간다. 두 가지가 이 값을 바꾼다.
#
# **길이가 같은 스텝.** 첫 두 줄을 비교한다.
#
# - 짧은 답은 패딩으로 채우므로 텐서의 모양은 같은데, 10.37 GiB가 9.54 GiB로 줄었다. 어텐션의 커널이 다르기 때문이다. 길이가 모두 같으면 패딩이 없어 마스크도 없고, 그러면 그룹 쿼리 모델은 T4에서 길이 × 길이 행렬을 만드는 math 커널로 간다(3.12절). 하나라도 짧으면 마스크가 있고, math를 피한다.
# - 그러니 T4에서 가장 많이 쓰는 것은 질문의 길이가 같고 답이 **모두** `max_completion_length`에서 잘린 스텝이다. 잘 되던 학습이 그런 스텝에서 죽을 수 있으므로, 들어가는지는 길이가 같은 줄로 따진다.
# - 3.12절의 한 줄을 적으면 길이가 같아도 math를 피한다. 0.6B는 9.53 GiB, 4B는 10.48 GiB이고, 8B도 4비트로 읽으면 9.65 GiB로 들어간다(12.11절에서 잰다).
#
# **한 번에 만드는 답의 수.** TRL은 배치 × `steps_per_generation`개를 한꺼번에 만든다. `steps_per_generation`을 적지 않으면 누적 횟수가 그 값이다.
#
# - 4B에서 답 8개의 캐시는 2 × 36층 × 8헤드 × 128 × 2바이트 × 768토큰 × 8개 = 0.84 GiB다(11.3절의 식). 배치 8에 누적도 8이면 64개라 6.75 GiB이고, 7.88 GiB와 더하면 14.63 GiB다. 한도 14.64 GiB에 남는 것이 없다. `steps_per_generation=1`을 적으면 누적을 늘려도 한 번에 8개씩 만든다.
# - 그 수는 `num_generations`(G)의 배수여야 한다. G가 8인데 배치를 4로 줄이고 `steps_per_generation=1`을 적으면 `generation_batch_size (4) must be divisible by num_generations (8)`로 멈춘다. 8개보다 적게 만들려면 **`num_generations`도 함께 줄인다.**
#
# ## 12.7 엔진이 같은 카드에 있을 때
#
# `generate`는 느려서, 답은 대개 vLLM 같은 엔진으로 만든다. 학습과 같은 카드에 두는 것이 TRL의 `use_vllm=True`와 `vllm_mode="colocate"`다.
#
# 엔진은 **시작할 때** 카드의 `gpu_memory_utilization`만큼을 가중치와 KV 캐시의 자리로 잡는다([vLLM 문서, Engine Arguments](https://docs.vllm.ai/en/latest/configuration/engine_args/)). 모델이 작아도 그렇다. 가중치를 올리고 남는 자리는 KV 캐시가 된다. TRL 1.16의 기본값은 0.3이다(`vllm_gpu_memory_utilization`). 그만큼 비어 있지 않으면 시작하지도 않는다(`Free memory on device … is less than desired GPU memory utilization`, [vllm #20305](https://github.com/vllm-project/vllm/issues/20305)).
#
# 엔진에는 얼마가 필요할까? 두 가지를 나누어 센다.
#
# - **시작하는 데**: 16비트 가중치 한 벌과, 가장 긴 글 하나의 KV 캐시. vLLM은 이것만 따진다(소스의 `kv_cache_utils.py`).
# - **답을 모두 한꺼번에 만드는 데**: 가중치와 답 8개의 KV 캐시. 답의 수는 여기서도 배치 × `steps_per_generation`이다(카드가 하나일 때의 `max_num_seqs`). 캐시가 이보다 적으면 죽지 않고 느려진다. 들어가지 못한 답은 기다리고, 만들던 답도 버렸다가 다시 만든다([vLLM 문서, Preemption](https://docs.vllm.ai/en/latest/configuration/optimization/#preemption)).
#
# vLLM이 계산에 쓰는 자리와 CUDA 그래프(커널 호출을 녹화해 두는 것)도 몫에서 나오지만 넣지 않았다.

# %%
from helpers.chapters.c11_outside.cache import kv_bytes

config = load_config(small)
weights = 2 * count_parameters(build_model(config, torch.float16))
one, eight = (weights + kv_bytes(config, 256 + 512, n) for n in (1, 8))
print(f"weights {human_bytes(weights)}")
print(f"with a cache for one of 768 tokens {human_bytes(one)}, for eight {human_bytes(eight)}")
for name in ("RTX 4090", "T4"):
    print(f"{name}: one {one / card(name).memory_bytes:.3f}, eight {eight / card(name).memory_bytes:.3f}")
longest_text, left = config.max_position_embeddings, int(0.3 * card("T4").memory_bytes) - weights
print(f"a cache for one of {longest_text:,} tokens {human_bytes(kv_bytes(config, longest_text))}")
print(f"0.3 of a T4 without the weights {human_bytes(left)}")

# %% [markdown] lang="ko"
# 답 8개를 한꺼번에 만드는 몫은 RTX 4090의 7.5%, T4의 12%다. 실제로는 그보다 더 준다.
#
# 길이를 적지 않으면 '가장 긴 글'은 모델이 받을 수 있는 40,960토큰이다. 그 캐시 4.38 GiB는 T4에서 TRL의 기본값 0.3 가운데 가중치를 빼고 남는 3.31 GiB보다 커서 vLLM이 시작하지 않는다(`To serve at least one request with the model's max seq len …`, [vllm #34076](https://github.com/vllm-project/vllm/issues/34076)). `vllm_max_model_length=768`처럼 실제로 쓸 길이를 적는다.
#
# 재우는 길도 있다. 1단계 잠(sleep level 1)은 가중치를 RAM으로 옮기고 KV 캐시를 버리며, 2단계는 둘 다 버린다([vLLM 문서, Sleep Mode](https://docs.vllm.ai/en/latest/features/sleep_mode/)). TRL은 `vllm_enable_sleep_mode=True`이면 답을 만들고 나면 매번 2단계로 재운다.
#
# `Engine`은 vLLM이 아니라 **그 몫만큼의 블록**이다. 첫 답을 만들 때 잡고, 재우면 돌려준다. 12.6절의 학습(RTX 4090, Qwen3-0.6B 전체, 512토큰짜리 답 8개)에 엔진의 몫을 0.6으로 두고 재우지 않는다. 두 스텝 가운데 어디에서 죽을까, 끝까지 갈까(`never`)?

# %%
dies = guess("12.7", None, ("step 1", "step 2", "never"))
dies

# %% [markdown] lang="ko"
# 몫은 쓸 수 있는 23.16 GiB가 아니라 카드 전체의 크기에 곱한다. 그 크기와 0.6을 곱한 것을 먼저 적고 실행한다.

# %%
total = card("RTX 4090").memory_bytes
print(human_bytes(total), human_bytes(int(0.6 * total)))
awake = steps_of(partial(grpo, completion=512, rollout=Engine(0.6, 512, sleeps=False)), "RTX 4090")
draw_steps(awake)

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
dies.against(f"step {awake.last}" if awake.outcome.died else "never")

# %% [markdown] lang="ko"
# 첫 롤아웃의 16.41 GiB는 가중치 2.22 GiB와 엔진 14.19 GiB다. 첫 스텝은 끝까지 갔다. 죽은 것은 **둘째 스텝의 역전파**다. 첫 갱신에서 생긴 옵티마이저 상태가 이제 있는데, 학습하는 동안 할 일 없는 엔진이 카드의 60%를 그대로 쥐고 있다. 그 역전파에는 9.53 + 14.19 = 23.72 GiB가 있어야 하므로 23.16 GiB를 넘는다(9.53은 12.6절의 표).
#
# 그림의 높이는 할당이다. 한도보다 낮은 데서 죽은 것은 할당자의 예약이 이미 한도까지 찼기 때문이다(3장).
#
# TRL을 만드는 사람들이 처음부터 적어 둔 일이다. vLLM을 넣은 PR의 코드에는, 옵티마이저 상태가 첫 갱신 뒤부터 내내 남으므로 자리를 남겨 두어야 하고 몫은 0.55가 잘 되더라는 주석이 있었다([trl #2600](https://github.com/huggingface/trl/pull/2600)).
#
# **연습 12-1.** 늘 있는 것 `held`(가중치와 옵티마이저 상태), 학습 스텝이 더 쓰는 것 `step`, 엔진의 몫 `engine`이 바이트로 주어진다. `sleeps`가 참이면 학습하는 동안 엔진을 재운다. 최대는 몇 바이트인가?


# %%
def peak(held, step, engine, sleeps):
    return ...


exercise("12-1").check(peak)

# %% [markdown] lang="ko"
# > **주장 4.** "엔진을 재우면 학습과 부딪치지 않는다"
#
# 재우지 않고 몫을 줄이거나 늘린 것과, 재우면서 0.6과 0.8을 준 것을 실행한다. 마지막 열에 어느 스텝의 어느 단계에서 죽었는지가 있다. 판정을 먼저 고른다.

# %%
shares = {
    "0.1, awake": Engine(0.1, 512, sleeps=False),
    "0.3, awake": Engine(0.3, 512, sleeps=False),
    "0.65, awake": Engine(0.65, 512, sleeps=False),
    "0.8, awake": Engine(0.8, 512, sleeps=False),
    "0.6, asleep": Engine(0.6, 512, sleeps=True),
    "0.8, asleep": Engine(0.8, 512, sleeps=True),
}
compare_steps({name: partial(grpo, completion=512, rollout=one) for name, one in shares.items()}, "RTX 4090")

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 학습하는 동안은 그렇다. 엔진과 학습이 같은 자리를 **번갈아** 쓰므로 최대는 늘 있는 것에 둘 가운데 큰 쪽을 더한 것이다. 그러나 답을 만드는 동안에는 가중치와 옵티마이저 상태가 엔진과 함께 있다. 0.6은 6.68 + 14.19 = 20.87 GiB라 되지만, 0.8은 6.68 + 18.92 = 25.60 GiB라 **둘째 스텝의 롤아웃**에서 죽었다(그 줄에서 손실과 역전파의 값이 작은 것은 첫 스텝의 것뿐이라서다).
#
# </details>
#
# - 재우지 않으면 몫이 클수록 일찍 죽는다. 0.6은 둘째 스텝의 역전파, 0.65는 첫 갱신, 0.8은 첫 역전파다.
# - 0.1이면(`vllm_max_model_length`를 적었다면) 재우지 않고도 11.89 GiB로 끝난다. 몫은 카드가 아니라 **가중치, 만들 답의 수와 길이**에 여유를 더해 정한다. 그래도 모자라면 재운다.
# - 깨우기 전에 `empty_cache()`를 부른다. 학습 쪽 할당자가 쥔 빈 덩어리를 드라이버에 돌려주어야 엔진이 쓸 수 있다. TRL도 그렇게 한다(`vllm_generation.py`). 손수 만든 루프라면 이 줄을 빠뜨리지 않는다.
# - TRL에서는 엔진 안에 가중치가 **한 벌 더** 있다(위의 블록에 들어 있다). 12.6절의 4B를 T4에서 엔진과 함께 두지 못하는 까닭이다. 학습 쪽에 늘 있는 7.88 GiB의 거의 모두가 fp16 가중치이니 두 벌이면 14.64 GiB를 넘고, 재워도 답을 만드는 동안에는 두 벌이 함께 있다.
#
# 이 절의 엔진은 몫만큼의 블록일 뿐이라 **적게 잡은 것이다.** 진짜 엔진이 무엇이 다른지는 12.11절의 끝에 적었다. vLLM과 함께 카드에서 돌려 본 것은 없다.
#
# ### 사건 12-B: 몫은 기본값인데 잘 되다가 죽는다
#
# [trl #2927](https://github.com/huggingface/trl/issues/2927)은 두어 스텝은 잘 되다가 죽는다는 신고다. 엔진의 몫을 0.9에서 0.7로 줄이라는 조언을 따랐는데도 셋째 스텝에서 죽었다(카드를 둘 쓴 것도 있어 구성은 다르고, 왜 셋째였는지는 확인하지 못했다).
#
# 같은 증상을 T4에서 일으킨다. 학습은 12.6절의 '0.6B, full'이고, 엔진의 몫은 TRL의 기본값인 0.3이며, 재우지 않는다(`vllm_max_model_length=768`은 적은 것으로 친다).
#
# 재우지 않은 채로 끝까지 가는 **가장 큰 몫**을 0.05 단위로 찾는다. 답 8개를 한꺼번에 만들려면 0.12보다는 커야 한다. 연습 12-1의 식에 12.6절의 표와 T4의 크기(아래의 첫 줄, 쓸 수 있는 것은 14.64 GiB)를 넣어 먼저 예상하고 `run(fraction=…)`으로 확인한다.

# %%
print(human_bytes(card("T4").memory_bytes))
case("12-B").run(fraction=0.3)

# %% [markdown] lang="ko"
# 찾은 몫을 적는다. `check`는 그 몫으로 끝까지 가고 0.05를 더 주면 죽는지 본다.

# %%
fraction = ...
case("12-B").check(fraction)

# %% [markdown] lang="ko"
# <details><summary>찾은 다음에</summary>
#
# - 0.3이면 10.37 + 4.42 = 14.79 GiB라 단편화를 없애도 넘친다. 0.25면 식으로 10.37 + 0.25 × 14.74 = 14.06 GiB라 들어가고, 실행해도 끝까지 간다. 그러나 남는 것이 0.58 GiB이고, 카드에 들어가야 하는 것은 할당이 아니라 그보다 많은 예약이다(3장). 진짜 학습이라면 한 단계 아래인 0.2를 준다.
# - 0.1도 여기서는 끝까지 간다. 그 1.47 GiB는 시작하는 데 드는 1.19 GiB보다 많고, 답 8개를 한꺼번에 만드는 1.77 GiB에는 모자란다. 진짜 엔진이라면 답을 나누어 만들어 느리거나, 계산에 쓰는 자리까지는 되지 않아 시작하지 못한다.
# - 몫을 줄이지 않는 길도 둘 있다. 재우거나(`run(fraction=0.3, sleeps=True)`), 3.12절의 한 줄로 학습 쪽을 줄인다. 식으로는 9.53 + 0.3 × 14.74 = 13.95 GiB다.
#
# </details>
#
# ## 12.8 직접 바꿔 보기
#
# 패널은 단계마다 **적어도** 얼마가 있어야 하는지를 식으로 계산한다. 가중치, 기준 모델, 옵티마이저 상태, 그레이디언트, fp32 가중치의 16비트 사본(autocast), KV 캐시, 층의 입력(체크포인팅을 켠 것으로 센다), 로짓의 타일, 엔진의 몫이다. LoRA의 얼린 가중치는 16비트로 읽은 것으로 센다(12.3절의 `half`). 임시 텐서는 세지 않으므로 하한이다. 하한이 넘치면 들어가지 않고, 하한이 들어가도 여유가 있어야 한다.
#
# 배치가 답의 수보다 작으면 나누어 누적하는 것으로 보고, 남아 있는 그레이디언트를 손실과 역전파에 더한다. **갱신**은 패널에 없다.
#
# ![RTX 4090에서 Qwen3-0.6B 전체를 GRPO로 학습할 때 단계마다의 하한. 세 단계 모두 23.16 GiB 안에 들어간다.](../../image/12_grpo_panel.svg)
#
# - 롤아웃을 '엔진이 늘 있음'으로 바꾸고 몫을 늘린다. 어느 단계가 먼저 넘치는가?
# - 같은 몫에서 '엔진을 재움'으로 바꾼다.
# - 롤아웃을 '모델이 직접'으로 되돌리고, 모델을 Llama-3.1-8B, 방법을 LoRA로 바꾼다. 기준 모델을 '따로 한 벌'과 '어댑터 끄기'로 비교한다.
#
# <details><summary>답 (먼저 바꿔 본 다음에 연다)</summary>
#
# - **엔진이 늘 있음.** 몫 0.65에서 손실과 역전파가 함께 넘친다(23.76, 24.25 GiB). 실제로는 그보다 일찍, 패널에 없는 첫 갱신에서 죽는다(12.7절의 표. 8.90 + 0.65 × 23.65 = 24.27 GiB). 0.6은 하한이 23.07 GiB라 들어가는 것처럼 보이지만 12.7절에서는 죽었다. 그래서 여유가 있어야 한다.
# - **엔진을 재움.** 0.65까지 들어가고 0.7에서 롤아웃만 넘친다(23.22 GiB). 손실과 역전파는 몫과 상관없이 그대로다.
# - **Llama-3.1-8B, LoRA.** 손실과 역전파가 '따로 한 벌'에서는 32.13 GiB라 들어가지 않고, '어댑터 끄기'에서는 17.18 GiB다. '없음'과 같다.
#
# </details>

# %%
from helpers import grpo_panel

grpo_panel()

# %% [markdown] lang="ko"
# ## 12.9 T4에서 쓰는 스크립트 둘
#
# 12.6절의 '4B, LoRA'와 12.5절의 8B를 여느 스크립트로 쓰면 이렇다. 둘 다 맨 위에 3.12절의 한 줄이 있고, 주석의 수는 이 장에서 실행한 최대다. 진짜 T4에서는 아직 돌려 보지 않았다. bf16으로 학습한 모델을 fp16으로 계산하면 수가 넘칠 수 있으니, 처음 몇 스텝의 손실이 `nan`인지 본다.
#
# - `data`의 열은 GRPO가 `prompt`, DPO가 `prompt`, `chosen`, `rejected`다.
# - `reward(completions, **kwargs)`는 답마다 수 하나인 목록을 돌려준다.
# - Qwen3는 생각부터 적으므로 512토큰이면 답이 모두 잘릴 수 있다. 대화 형식이면 `chat_template_kwargs={"enable_thinking": False}`로 끈다.
# - Qwen3-8B를 GRPO로 학습하려면 첫째 스크립트의 `model_init_kwargs`에 둘째의 `four_bits`를 더하고, `train()` 앞에 `for`부터의 세 줄을 넣는다(9.65 GiB, 12.11절).
#
# - TRL의 학습률은 적지 않으면 1e-6이다. LoRA라면 그 열 배쯤에서 시작한다(8장).
#
# **GRPO: Qwen3-4B, LoRA**
#
# ```python
# from peft import LoraConfig
# from transformers.integrations import sdpa_attention
# from trl import GRPOConfig, GRPOTrainer
#
# sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False  # T4: math 커널을 피한다
# # 질문과 답을 더해 768토큰이면 10.48 GiB다. 질문을 자르는 설정은 없으니 긴 질문은 data에서 먼저 거른다
# # 배치 × steps_per_generation은 num_generations의 배수여야 한다: 배치를 4로 줄이면 누적 2, steps_per_generation=2로
# arguments = GRPOConfig(
#     "out", fp16=True, per_device_train_batch_size=8, num_generations=8, steps_per_generation=1,
#     max_completion_length=512, learning_rate=1e-5, model_init_kwargs={"dtype": "float16"},
# )
# lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
# GRPOTrainer("Qwen/Qwen3-4B", reward, args=arguments, train_dataset=data, peft_config=lora).train()
# ```
#
# **DPO: Llama-3.1-8B, QLoRA**
#
# ```python
# import torch
# from peft import LoraConfig
# from transformers import BitsAndBytesConfig
# from transformers.integrations import sdpa_attention
# from trl import DPOConfig, DPOTrainer
#
# sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False  # T4: math 커널을 피한다
# lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
# four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
# arguments = DPOConfig(  # 7.19 GiB다(맨 위의 줄이 없으면 7.79 GiB)
#     "out", fp16=True, per_device_train_batch_size=1, max_length=1024, learning_rate=1e-5,
#     model_init_kwargs={"dtype": "float16", "quantization_config": four_bits},
# )
# trainer = DPOTrainer("meta-llama/Llama-3.1-8B", args=arguments, train_dataset=data, peft_config=lora)
# for weight in trainer.model.parameters():
#     if weight.requires_grad:
#         weight.data = weight.data.float()  # TRL이 bf16으로 바꾼 어댑터를 되돌린다
# trainer.train()
# ```
#
# ## 12.10 기억할 것
#
# 이 장에서 적은 예상과 결과다.

# %%
guesses()

# %% [markdown] lang="ko"
# 어느 단계에서 죽었는지는 traceback에 있는 함수의 이름으로 안다.
#
# - 바로 `_generate`면 롤아웃, `_compute_loss`면 손실까지, `backward`면 역전파, 옵티마이저의 `step`이면 갱신이다.
# - `_compute_loss` 없이 `_get_per_token_logps_and_entropies`가 있으면 기준 모델이다(vLLM이면 정책의 로그 확률을 한 번 더 계산하는 것일 수도 있다).
# - `cumem_allocator`면 깨어나는 엔진이다.
#
# | 언제 죽나 | 원인이 되는 것 | 고치는 줄 |
# |---|---|---|
# | **DPO**: 배치를 줄여도 | 기준 모델 한 벌 | `precompute_ref_log_probs=True`, LoRA(`peft_config`), fp16으로 읽은 `ref_model` |
# | **DPO**: 손실에서 | 통째로 만든 로짓 | 로짓을 조각으로 만드는 손실(TRL 1.16의 기본값), 배치, `max_length`(LLaMA-Factory는 `cutoff_len`). 손수 쓴 손실이라면 12.4절의 두 줄 |
# | **GRPO**(엔진 없음): 롤아웃 | KV 캐시, 남아 있는 옵티마이저 상태 | 한 번에 만드는 답의 수(`steps_per_generation`, 더 줄이려면 배치와 `num_generations`), `max_completion_length`, LoRA |
# | **GRPO**(엔진 없음): 손실과 역전파 | 짧은 답의 전체 미세 조정이면 네 벌, 긴 답이나 LoRA면 순전파 상태 | 네 벌이면 LoRA나 8비트 옵티마이저(2.9절). 순전파 상태면 `max_completion_length`, 배치를 줄이고 누적. 짧은 답의 전체 미세 조정에서 누적하면 오히려 늘 수 있다(12.6절) |
# | **GRPO**(엔진 없음): 첫 갱신 | 전체 미세 조정의 옵티마이저 상태 | LoRA나 8비트 옵티마이저 |
# | **엔진**이 시작하지 않는다: `Free memory on device …` | 몫만큼 비어 있지 않다 | `vllm_gpu_memory_utilization`을 줄인다 |
# | **엔진**이 시작하지 않는다: `To serve at least one request …` | 가장 긴 글의 KV 캐시 | `vllm_max_model_length`를 적는다 |
# | **엔진**을 재우지 않음: 첫 역전파나 첫 갱신, 둘째 스텝의 손실과 역전파 | 첫 갱신에서 생기는 옵티마이저 상태와 쥐고 있는 엔진 | 몫을 줄인다(답을 한꺼번에 만들려면 가중치 + 답의 KV 캐시 + 여유는 준다). 모자라면 `vllm_enable_sleep_mode=True` |
# | **엔진**을 재움: 둘째 스텝의 롤아웃(`cumem_allocator`) | 첫 갱신에서 생긴 옵티마이저 상태와 깨어난 엔진 | 몫을 줄이고 `vllm_max_model_length`를 적는다. LoRA |
# | **T4**: 어떤 스텝만 | 길이가 모두 같아 math 커널로 간 어텐션 | 3.12절의 한 줄 |
# | **T4**: `_amp_foreach_non_finite…` 오류로 멈춘다 | TRL이 bf16으로 바꾼 어댑터(4비트, 8비트) | Trainer를 만든 뒤에 fp32로 되돌린다(12.5절) |
# | LoRA인데도 모자란다 | fp32로 읽은 얼린 가중치 | `model_init_kwargs={"dtype": "float16"}`(T4) |
#
# - DPO가 SFT보다 더 드는 것은 **문장이 쌍이라는 것과 가중치 한 벌**이다. 네 벌이 다 두 배가 되지는 않는다. 로짓을 통째로 만들고 붙들면 쌍 하나가 글 하나의 두 배를 넘는다.
# - 최대는 단계마다 따로 있다. 늘 있는 것(가중치, 옵티마이저 상태, 기준 모델, 재우지 않은 엔진)을 바꾸면 모든 단계가 움직이고, KV 캐시는 롤아웃만, 배치를 나누는 것과 체크포인팅은 손실과 역전파만 옮긴다. 가장 높은 단계를 먼저 찾는다.
# - 재우면 번갈아 쓰고, 재우지 않으면 더한다.
# - T4에서는 `fp16=True`, `peft_config`, `"dtype": "float16"`을 함께 적는다. 이 장은 메모리만 세고 시간은 재지 않았으니, 몇 스텝을 먼저 돌려 보고 정한다.
#
# KV 캐시와 `generate`는 [11장](11_outside_training.ipynb)에, LoRA는 [8장](08_lora.ipynb)에, 오류 메시지에서 거꾸로 찾아가는 길은 [10장](10_oom_clinic.ipynb)에 있다.

# %% [markdown] lang="ko"
# ## 12.11 더 읽을거리: 진짜 카드에서는
#
# 12.1~12.3절의 프로그램 가운데 다섯은 H100 한 장에서도 그대로 돌려 보았다(Llama-3.2-1B, 가중치는 무작위. 12.3절에서는 둘째 줄만 돌렸다). 이 예측은 미리 적어 둔 것이 아니라, 같은 카드의 다른 기록을 보고 규칙 몇 가지를 고친 뒤에 다시 계산한 것이다. 12.4절은 카드에서 확인하지 않았다(로짓을 통째로 만드는 정책 쪽의 순전파와 역전파만은 H100에서도 최대가 바이트까지 같았다. `benchmarks/README.md`의 'pairs' 세 줄이다).

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
# 다른 모델로 더 돌려 본 것도 있다. TRL 1.16에 딸린 세 스크립트를 Qwen3-0.6B로, 고치지 않고 NVIDIA H100에서 세 스텝 학습하며 모든 할당을 기록했다. 예측은 카드에서 실행하기 전에 적어 두었고 그 뒤로 고치지 않았다(TRL의 행렬곱 `addmm(…, out_dtype=…)`을 세는 규칙은 그때 도구에 없어 따로 더했다. 기록은 `benchmarks/README.md`, 2026년 11월 23일).
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
# ### 8B에서 로짓을 통째로 만들면
#
# 12.4절의 `whole_dpo`를 12.5절의 8B로, 길이 1,024와 2,048에서 실행한다. 갱신은 없다.

# %%
load = partial(loaded, "meta-llama/Llama-3.1-8B", quantization_config=four_bits)
compare({f"whole logits, {n:,}": partial(whole_dpo, 1, n, load=load) for n in (1024, 2048)}, "T4", ram=False)

# %% [markdown] lang="ko"
# 1,024토큰은 11.23 GiB로 끝나고 2,048토큰은 죽는다. 할당된 13.44 GiB에 마지막 요청 1.00 GiB를 더해도 14.64 GiB보다 작으니, 여기서 죽은 것은 빈자리가 나뉘어 있어서다(단편화). 그러나 단편화를 없애도 뒤에서 넘친다. 그 1 GiB는 12.5절에서 본 어텐션의 행렬인데, 그것이 없어도 로짓 다섯 벌(1.96 GiB씩)과 4비트 모델(3.66 + 1.96 GiB)만으로 15.42 GiB다.
#
# ### T4에서 한 줄과 `generate`
#
# 12.6절에서 남긴 물음이 셋이다. 3.12절의 한 줄을 적으면 길이가 같아도 math를 피할까? 4B는 답을 `generate`로 만들어도 들어갈까? 4비트로 읽으면 8B도 될까? 512토큰을 하나씩 만들면 오래 걸리므로, 질문을 760토큰으로 늘리고 답은 8토큰만 만든다. 다 만들었을 때의 KV 캐시는 똑같이 768토큰이고, 긴 질문을 한꺼번에 읽으므로 롤아웃이 더 쓸 수는 있어도 덜 쓰지는 않는다. 다만 손실과 역전파는 답 8토큰의 것이라, 512토큰짜리 답을 건네받은 것(`given`)도 나란히 실행한다. 마지막으로 12.5절의 DPO를 같은 줄과 함께 다시 실행한다.

# %%
from transformers.integrations import sdpa_attention

four_b = {"model": "Qwen/Qwen3-4B", "peft_config": lora, **half}
in_four_bits = {"model_init_kwargs": {"dtype": "float16", "quantization_config": four_bits}}
eight_b = {"model": "Qwen/Qwen3-8B", "peft_config": lora, **in_four_bits}
with_line = {
    "0.6B, full, given": longer,
    "4B, LoRA, given": partial(longer, **four_b),
    "4B, LoRA, generate": partial(grpo, prompt=760, **four_b),
    "8B, QLoRA, given": partial(longer, **eight_b),
    "8B, QLoRA, generate": partial(grpo, prompt=760, **eight_b),
}
as_shipped = sdpa_attention.use_gqa_in_sdpa
sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False
try:
    found = compare_steps(with_line, "T4")
    print("DPO, 8B, QLoRA:", human_bytes(attempt(dpo_8b, "T4").gpu))
finally:
    sdpa_attention.use_gqa_in_sdpa = as_shipped
found

# %% [markdown] lang="ko"
# - 0.6B는 9.53 GiB다. 길이가 같아도 math를 피했다. 12.5절의 DPO도 7.79 GiB가 7.19 GiB로 줄었다.
# - 4B를 `generate`로 만들면 롤아웃이 7.88 GiB에서 9.56 GiB로 오르지만 역전파의 10.48 GiB보다 낮다. 최대는 답을 건네받은 줄과 같다. (512토큰을 다 만든 것도 한 번 실행해 보았다. 이 컴퓨터로 5분 남짓 걸렸고, 최대는 같은 10.48 GiB였다.)
# - 8B는 4비트라 fp16으로 읽은 4B보다도 적고, 최대는 어느 쪽이나 9.65 GiB다.
#
# ### 오류의 크기에서 길이로
#
# **연습 12-2.** 로짓을 통째로 만드는 DPO에서, 로짓은 모두 몇 바이트인가? 마지막 토큰도 빼지 않고 문장마다 `length`개로 센다. `each`는 수 하나의 바이트다. 정책의 로짓이 한 벌 있고, `reference`가 참이면 기준 모델의 로짓도 한 벌 함께 있다. 막히면 `exercise("12-2").hint()`를 실행한다.


# %%
def dpo_logits(pairs, length, vocabulary, each, reference):
    return ...


exercise("12-2").check(dpo_logits)

# %% [markdown] lang="ko"
# 이 식을 거꾸로도 쓴다. 같은 모델과 설정으로 SFT는 한 장에 들어가는데 DPO는 32 GB 카드 여덟 장에서 배치 1로도 죽었다는 신고([LlamaFactory #6800](https://github.com/hiyouga/LlamaFactory/issues/6800))의 메시지다.
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
# 4.64 × 2³⁰ / (152,064 × 4) = 8,191이다. 쌍 하나는 문장 둘이므로 하나에 4,096토큰쯤이다. 그런데 DPO의 손실에 왜 `cross_entropy`가 있을까? 그 무렵(2025년 1월)의 LLaMA-Factory는 `labels`까지 모델에 건네서, DPO가 쓰지 않는 SFT 손실을 순전파마다 계산했다. 지금은 `labels`를 빼고 부른다. (그 사람의 데이터를 본 것은 아니다.)
#
# </details>
#
# ### 패널의 하한은 얼마나 가까운가
#
# 하한이 얼마나 가까운지 확인한다. 12.6절의 학습, 곧 `generate`로 8토큰짜리 답을 만든 것과 길이 512, 4,096인 답을 건네받은 것에서 잰 최대를 하한으로 나눈다. 패널에서 고를 수 있는 가장 긴 8,192토큰도 실행한다.

# %%
from helpers.chapters.c12_two_models.floor import Grpo

farthest = steps_of(partial(grpo, completion=8192, rollout=partial(given, length=8192)), "RTX 4090")
for completion, steps in ((8, two), (512, base), (4096, far), (8192, farthest)):
    floor, peaks = Grpo(small, completion=completion).floor(total), steps.peaks()
    print(f"{completion:5}", *(f"{phase} {peaks[phase] / sum(floor[phase].values()):.3f}" for phase in floor))

# %% [markdown] lang="ko"
# 답을 건네받은 롤아웃 말고는 모두 1보다 크다(하한은 `generate`를 전제로 KV 캐시와 16비트 사본을 세는데, 건네받으면 둘 다 없다). 짧은 답에서는 1에 가깝고, **길수록 멀어진다.** 역전파가 512토큰에서 1.073배, 4,096토큰에서 1.324배, 8,192토큰에서 1.448배다. 재계산하는 층의 임시 텐서처럼 하한이 세지 않는 것이 길이를 따라 늘기 때문이다. 긴 답이라면 패널의 하한이 들어가도 실행해 본다.
#
# ### 진짜 엔진은 무엇이 다른가
#
# 12.7절의 블록에 없는 것들이다.
#
# - 잠들어도 얼마간 남는다([vllm #28714](https://github.com/vllm-project/vllm/issues/28714)의 로그에서 1.19 GiB).
# - 몫 안에 가중치와 가장 긴 글의 캐시가 들어가는지 이 블록은 따지지 않는다.
# - 첫 답이 아니라 `GRPOTrainer`를 만들 때 몫을 잡는다. 재우는 엔진도 먼저 몫을 다 잡고 나서 잔다.
# - 정책이 4비트면 TRL은 엔진도 4비트로 만들고(`quantization="bitsandbytes"`), 8비트면 거절한다. TRL의 소스(`vllm_generation.py`)를 읽은 것이고, 돌려 보지 않았다.
# - 깨우다가 모자라면 PyTorch의 메시지가 아니라 `CUDA Error: out of memory at …/cumem_allocator.cpp`가 나온다([vllm #13941](https://github.com/vllm-project/vllm/issues/13941)).
# - Unsloth는 엔진과 학습이 가중치 한 벌을 함께 쓴다고 적는다([Long-context GRPO](https://unsloth.ai/blog/grpo)의 표에서 Llama-3.1-8B의 추론 몫이 TRL은 16 GB, Unsloth는 0 GB다. 여기서 재지는 않았다).
# - 진짜 vLLM으로 만들면 TRL은 정책의 로그 확률을 그레이디언트 없이 한 번 더 계산한다(`vllm_importance_sampling_correction`의 기본값).
