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
# SFT는 들어가는데 DPO로 바꾸면 죽는다. GRPO는 같은 모델, 같은 배치인데도 죽고, 죽는 자리도 그때그때 다르다. 선호 학습과 강화 학습은 모델을 하나 더, 또는 모델이 만든 답을 카드에 함께 올린다.
# 이 장은 TRL의 `SFTTrainer`, `DPOTrainer`, `GRPOTrainer`를 **고치지 않고** 가상 GPU에서 실행해 무엇이 언제 더 있는지 센다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - SFT에서 DPO로 갈 때 두 배가 되는 것과 되지 않는 것을 바이트까지 말한다.
# - 기준 모델(reference model)을 카드에서 치우는 두 가지 길을 안다.
# - GRPO의 한 스텝을 단계로 나누고, 설정 하나가 어느 단계의 최대를 옮기는지 안다.
# - 답을 만드는 엔진(vLLM)이 같은 카드에 있을 때 언제, 왜 죽는지 설명하고 고친다.
#
# 이 장의 GPU 수치는 모두 가상 GPU에서 센 것이다. vLLM만은 실행하지 않는다. 그것이 카드에서 차지하는 몫을 블록 하나로 올린다(12.6절).

# %%
from functools import partial
from tempfile import mkdtemp

import torch

from helpers import case, exercise, guess, guesses, human_bytes
from helpers.chapters.c11_outside.tried import attempt, compare
from helpers.chapters.c12_two_models.made import QUIET, length_of, pairs, prompts, texts, tokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

torch.set_num_threads(1)
folder = mkdtemp()
billion, small = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B"

# %% [markdown] lang="ko"
# ## 12.1 SFT는 되는데 DPO는 죽는다
#
# DPO는 같은 질문에 대한 좋은 답과 나쁜 답을 한 쌍으로 준다. 좋은 답의 확률은 올리고 나쁜 답의 확률은 내리되, 처음 모델에서 너무 멀어지지 않게 한다. 그래서 처음 모델, 곧 **기준 모델**의 확률도 필요하다.
# "SFT는 되는데 DPO는 OOM"이라는 신고가 많다([LlamaFactory #4810](https://github.com/hiyouga/LlamaFactory/issues/4810)).
#
# Llama-3.2-1B를 RTX 4090에서 학습한다. 뒤에서 T4와 비교하려고 혼합 정밀도만 fp16으로 정하고(TRL의 기본값은 bf16이다), 메모리를 정하는 나머지는 TRL의 기본값 그대로다. TRL은 이름만 받으면 가중치를 fp32로 읽고, 체크포인팅을 켠다. SFT는 길이 512인 글 4개, DPO는 프롬프트 256에 답 256인 쌍이다. DPO를 배치 4, 2, 1로 줄이면 **몇에서** 들어갈까?

# %%
dpo_fits = guess("12.1", None, ("4", "2", "1", "none"))
dpo_fits

# %% [markdown] lang="ko"
# `sft`와 `dpo`는 TRL을 쓰는 여느 스크립트와 같다. 토크나이저와 데이터만 여기서 만든 것이다. 메모리를 정하는 것은 글자가 아니라 길이다. 두 스텝을 학습한다.


# %%
def sft(batch, peft_config=None, **options):
    arguments = SFTConfig(folder, per_device_train_batch_size=batch, max_steps=2, fp16=True, **QUIET, **options)
    data = {"train_dataset": texts(512), "processing_class": tokenizer()}
    SFTTrainer(billion, arguments, peft_config=peft_config, **data).train()


def dpo(batch, peft_config=None, **options):
    arguments = DPOConfig(folder, per_device_train_batch_size=batch, max_steps=2, fp16=True, **QUIET, **options)
    data = {"train_dataset": pairs(256, 256), "processing_class": tokenizer()}
    DPOTrainer(billion, args=arguments, peft_config=peft_config, **data).train()


programs = {"SFT 4": partial(sft, 4)} | {f"DPO {n}": partial(dpo, n) for n in (4, 1)}
compare(programs, "RTX 4090")

# %% [markdown] lang="ko"
# 배치를 1로 줄여도 죽는다. 모자라는 것은 배치에 비례하는 것이 아니다.

# %%
dpo_fits.against("none")

# %% [markdown] lang="ko"
# ## 12.2 두 배가 되는 것과 되지 않는 것
#
# 죽지 않는 카드(A100 80 GB)에서 최대를 바이트로 잰다. 쌍 4개는 문장 8개이므로 SFT도 배치 8로 맞춘다. `precomputed`는 기준 모델의 로그 확률을 학습 **전에** 모두 계산해 두고 기준 모델을 올리지 않는 것이다. 네 값이 서로 얼마나 다를지 먼저 생각한다.

# %%
ways = {
    "SFT 4": partial(sft, 4),
    "SFT 8": partial(sft, 8),
    "DPO 4, precomputed": partial(dpo, 4, precompute_ref_log_probs=True),
    "DPO 4": partial(dpo, 4),
}
peak = {name: attempt(program, "A100-80GB").gpu for name, program in ways.items()}
for name, most in peak.items():
    print(f"{name:19} {most:>14,} {human_bytes(most):>10}")

# %% [markdown] lang="ko"
# 차이를 두 가지로 나눈다. 첫 줄은 쌍이 문장 둘이라는 것을 빼고 DPO라서 더 드는 것, 둘째 줄은 기준 모델을 올려서 더 드는 것, 셋째 줄은 파라미터 수의 4배다.

# %%
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.models.configs import load_config

count = count_parameters(build_model(load_config(billion), torch.float32))
print(f"{peak['DPO 4, precomputed'] - peak['SFT 8']:,}")
print(f"{peak['DPO 4'] - peak['DPO 4, precomputed']:,}")
print(f"{4 * count:,}")

# %% [markdown] lang="ko"
# - **기준 모델이 없으면 쌍 4개의 DPO와 글 8개의 SFT는 512바이트 차이다.** 이 최대에서는 DPO라는 손실의 값이 보이지 않는다(가중치가 얼어 있는 12.3절에서 다시 본다).
# - **기준 모델은 가중치 한 벌이다.** 한 바이트도 다르지 않다. 순전파만 하므로 그레이디언트도 옵티마이저 상태도 없다.
# - SFT의 배치를 4에서 8로 늘려도 최대는 거의 그대로다. TRL은 체크포인팅을 켜 두고 로짓을 조각으로 만들기 때문에(12.4절), 이 크기에서는 가중치, 그레이디언트, 옵티마이저 상태가 최대를 정한다.
#
# 그러니 전체를 학습할 때 DPO가 SFT보다 더 드는 것은 네 벌(가중치, 그레이디언트, AdamW의 두 상태)에 더해진 한 벌, 곧 4분의 1쯤이다.
#
# > **주장 1.** "DPO는 SFT의 두 배를 쓴다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 12.2절의 전체 학습에서는 24.08 / 19.43, 1.24배였다. 배치를 쌍으로 셀 때 순전파 상태가 두 배가 되고, 기준 모델을 두면 가중치 한 벌이 더해진다. 그레이디언트와 옵티마이저 상태는 그대로다. 순전파 상태와 로짓이 메모리의 거의 전부인 학습(긴 글, 체크포인팅 없음)이라야 두 배에 가까워진다. 이 장에서 재지는 않았다.
#
# </details>
#
# ## 12.3 기준 모델을 치우는 두 길
#
# 하나는 위의 `precompute_ref_log_probs=True`다. 기준 모델은 학습하는 동안 변하지 않으므로, 쌍마다 로그 확률 두 수(좋은 답과 나쁜 답)만 적어 두면 된다. 데이터를 한 번 더 훑는 시간이 든다.
#
# 다른 하나는 LoRA다. 어댑터를 끄면(`disable_adapter`) 남는 것이 처음 모델이므로 가중치를 한 벌만 둔다. TRL은 `peft_config`를 받으면 스스로 그렇게 한다. T4에서 LoRA SFT 8개와 LoRA DPO 4쌍을 비교한다. 기준 모델을 더 부르는 만큼 얼마나 늘까?

# %%
from peft import LoraConfig

extra = guess("12.3", None, "MiB")
extra

# %% [markdown] lang="ko"
# 최대를 뺀다.

# %%
lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
eight, four = (attempt(partial(train, n, lora)).gpu for train, n in ((sft, 8), (dpo, 4)))
print(human_bytes(eight), human_bytes(four), f"{four - eight:+,}")

# %% [markdown] lang="ko"
# 늘지 않았다. 기준 모델의 순전파는 `no_grad`라 층을 지날 때마다 버리고, 남는 것은 토큰마다 로그 확률 하나다.

# %%
extra.against(max(0, four - eight))

# %% [markdown] lang="ko"
# > **주장 2.** "LoRA면 기준 모델은 공짜다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 메모리로는 그렇고, 시간은 순전파 한 번이 더 든다. 두 가지 예외가 있다. `ref_model`을 손수 만들어 주면 TRL은 그것을 올린다. 그리고 이미 학습한 어댑터에서 이어서 하면 기준은 '어댑터가 없는 모델'이 아니라 '처음의 어댑터'다. TRL은 `PeftModel`을 받으면 어댑터를 한 벌 복사해(`ref`) 두고, 가중치는 여전히 한 벌이다.
#
# </details>
#
# ### 사건 12-A: 배치 1에서도 죽는다
#
# "SFT를 하던 설정 그대로 DPO로 바꾸었더니 OOM이다. 배치를 1로 줄여도 마찬가지다." 12.1절의 학습이다. **가중치 전체를** 학습하면서 배치 4로 끝까지 가게 하라. `run`이 받는 것은 `batch`와 `reference`("copy", "precompute", "adapter")다.

# %%
case("12-A").run(batch=1)

# %% [markdown] lang="ko"
# 찾은 설정을 사전으로 적는다.

# %%
answer = ...
case("12-A").check(answer)

# %% [markdown] lang="ko"
# ## 12.4 로짓을 통째로 만들면
#
# "LoRA로 4B 모델을 학습한다. SFT는 배치 4가 되는데 DPO는 2도 OOM이다. 두 배가 넘는다"([LlamaFactory #10175](https://github.com/hiyouga/LlamaFactory/issues/10175)). 12.2절과 다르다. 무엇이 다를 수 있을까? (그 신고의 원인을 확인한 것은 아니다.)
#
# 로그 확률을 구하는 가장 흔한 코드는 로짓을 모두 만들어 fp32로 바꾸고 `log_softmax`를 부른다. 쌍 1, 2, 4개를 그렇게 해 본다. T4에 올린 fp16 모델이고, 옵티마이저도 체크포인팅도 없다.

# %%
from transformers import AutoModelForCausalLM


def whole_logits(batch, length=512):
    model = AutoModelForCausalLM.from_pretrained(billion, dtype="float16", device_map="cuda")
    ids = torch.ones(2 * batch, length, dtype=torch.int64).cuda()
    logits = model(ids, use_cache=False).logits[:, :-1].float()
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    logps.sum().backward()


compare({f"{n} pairs": partial(whole_logits, n) for n in (1, 2, 4)})

# %% [markdown] lang="ko"
# 어휘가 128,256개라서 쌍 하나의 fp32 로짓이 2 × 511 × 128,256 × 4바이트다. 0.49 GiB다. fp16 로짓(0.24 GiB), fp32 로짓, `log_softmax`의 결과, 그 그레이디언트가 함께 있으면 쌍 하나에 1.7 GiB다. 표에서 쌍 하나에 느는 것은 4.9 GiB(12.12 − 7.22)이고, 나머지는 거의 다 체크포인팅을 켜지 않아 층에 남은 순전파 상태다. 쌍 4개는 그 순전파 상태만으로 카드가 차서 첫 fp16 로짓(1002 MiB)을 만들다 죽었다. 로짓은 문장 수에 비례하므로 쌍으로 세면 SFT의 두 배이고, 기준 모델의 로짓도 같은 크기로 잠깐 생긴다.
#
# TRL 1.16은 로짓을 통째로 만들지 않는다. 마지막 은닉 상태와 출력층을 토큰 4,096개 × 단어 32,768개짜리 타일로 곱해 토큰마다 로그 확률만 남기고, 역전파에서 다시 곱한다(소스의 `trl/kernels/chunked_logprob.py`). 12.3절의 T4에서 쌍 4개가 들어간 데에는 이 덕도 있다(LoRA와 체크포인팅도 켜져 있었다). 옛 TRL이나 로짓을 통째로 만드는 다른 도구라면 이 몫이 고스란히 더 든다. 답의 로그 확률만 필요하므로 프롬프트의 로짓은 만들지 않아도 된다.
#
# **연습 12-1.** 로짓을 통째로 만드는 DPO에서, 로짓은 한 벌에 몇 바이트인가? 위와 달리 마지막 토큰도 빼지 않고 문장마다 `length`개로 센다. `each`는 수 하나의 바이트다. `reference`가 참이면 학습하는 모델(정책, policy)의 로짓과 기준 모델의 로짓이 함께 있다. 막히면 `exercise("12-1").hint()`를 실행한다.


# %%
def dpo_logits(pairs, length, vocabulary, each, reference):
    return ...


exercise("12-1").check(dpo_logits)

# %% [markdown] lang="ko"
# ## 12.5 GRPO의 한 스텝
#
# GRPO는 질문 하나에 답 G개를 **스스로 만들고**, 점수를 매겨, 평균보다 나은 답의 확률을 올린다. 한 스텝이 여러 단계다.
#
# 1. **롤아웃**(rollout): 답을 만든다. `generate`로 G개. 가중치와 KV 캐시(11.3절)가 있다.
# 2. **기준 모델**: 만든 답의 기준 로그 확률. `beta`가 0이면 없다. TRL의 기본값이 0이다.
# 3. **손실까지**: 학습하는 모델의 순전파.
# 4. **역전파**와 **갱신**.
#
# 강화 학습의 다른 방법인 PPO에는 답이 얼마나 좋을지 예상하는 **가치 모델**(value model)이 하나 더 있는데, GRPO에는 없다. Qwen3-0.6B 전체를 RTX 4090에서 두 스텝 학습한다. 프롬프트 256, 답 8개다. 답의 길이는 16으로 고정된다. 가상 GPU의 텐서에는 값이 없어 문장을 끝내는 토큰이 뽑히지 않기 때문이다. **둘째 스텝**에서 가장 높은 단계는 어디일까?

# %%
highest = guess("12.5", None, ("rollout", "loss", "backward", "step"))
highest

# %% [markdown] lang="ko"
# `phases_of`는 Trainer의 메서드를 그대로 부르면서 앞뒤에서 `torch.cuda`의 눈금만 읽는다. 기둥의 왼쪽 끝이 단계의 처음, 꼭대기가 최대, 오른쪽 끝이 단계의 끝이다.

# %%
from helpers.chapters.c12_two_models.phases import phases_of, steps_of
from helpers.chapters.c12_two_models.pictures import draw_steps


def grpo(found, completion=16, batch=8, rollout=None, prompt=256, **options):
    arguments = GRPOConfig(
        folder, per_device_train_batch_size=batch, num_generations=8, gradient_accumulation_steps=8 // batch,
        max_completion_length=completion, max_steps=2, fp16=True, **QUIET, **options,
    )  # fmt: skip
    data = {"train_dataset": prompts(prompt), "processing_class": tokenizer()}
    trainer = GRPOTrainer(small, length_of, args=arguments, rollout_func=rollout, **data)
    with phases_of(trainer, found):
        trainer.train()


draw_steps(steps_of(grpo, "RTX 4090"))

# %% [markdown] lang="ko"
# 첫 스텝과 둘째 스텝의 롤아웃을 견준다. 하는 일은 같은데 둘째가 훨씬 높다. 첫 갱신에서 생긴 AdamW의 상태가 **그 뒤로 늘 남아 있기** 때문이다. 답을 만드는 동안에는 쓰지도 않는다. 최대는 모든 그레이디언트가 생기는 둘째 스텝의 역전파다.

# %%
highest.against("backward")

# %% [markdown] lang="ko"
# > **주장 3.** "GRPO는 가치 모델이 없으니 PPO보다 메모리가 적게 든다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 가치 모델을 정책과 같은 크기로 전체 학습한다면 PPO에는 그 네 벌(가중치, 그레이디언트, 두 상태)이 더 있다. 가치 모델을 작게 하거나, 몸통을 나누어 쓰거나, LoRA로 학습하면 그 차이는 작다. 반대로 GRPO는 질문마다 답을 G개 만들므로 KV 캐시와 순전파 상태가 커질 수 있다. 이 장은 PPO를 실행하지 않았다.
#
# </details>
#
# ### 어떤 설정이 어느 단계를 옮기나
#
# 답을 길이 512로 늘리고 한 가지씩 바꾼다. 여기부터는 답을 `generate`로 만들지 않고, TRL의 `rollout_func`으로 길이 512인 답을 건넨다. 그래서 롤아웃 열에는 KV 캐시가 없고 나머지 열은 그대로 TRL이다. `batch 2`는 답 8개를 2개씩 네 번에 나누어 학습한다. `beta`는 기준 모델을 올린다. 열마다 어느 줄이 가장 높은지 찾는다.

# %%
from helpers.chapters.c12_two_models.engine import Engine
from helpers.chapters.c12_two_models.phases import compare_steps


def given(prompts, trainer):
    ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": [[1] * 512] * len(prompts), "logprobs": None}


longer = partial(grpo, completion=512, rollout=given)
rows = {
    "as it is": longer,
    "batch 2": partial(longer, batch=2),
    "beta": partial(longer, beta=0.04),
    "no checkpoints": partial(longer, gradient_checkpointing=False),
}
compare_steps(rows, "RTX 4090")

# %% [markdown] lang="ko"
# - **학습 배치**(`per_device_train_batch_size`)를 2로 줄였더니 손실과 역전파가 **오히려 올랐다.** 네 번에 나누어 누적하는 동안 앞의 그레이디언트 한 벌이 남아 있어, 다음 순전파와 겹치기 때문이다(4장). 체크포인팅을 켠 전체 학습에서는 배치가 줄여 주는 것보다 이것이 크다. 순전파 상태가 최대를 정할 때(체크포인팅 없음, 긴 답)라야 배치가 듣는다. 만드는 답의 수는 배치와 누적 횟수의 곱이다(여기서는 8 × 1과 2 × 4로 둘 다 8이다). `num_generations`는 그 가운데 몇 개가 같은 질문의 답인지 정하고, 곱은 그 배수라야 한다.
# - **`beta`**를 켜면 전체를 학습할 때 모든 단계에 가중치 한 벌이 더해진다. LoRA라면 어댑터를 끈다(12.3절).
# - **체크포인팅**을 끄면 손실과 역전파가 크게 오르고, 롤아웃은 그대로다.
# - 롤아웃을 낮추는 것은 답의 수와 길이, 그리고 KV 캐시의 종류다(11.4절).
#
# ## 12.6 엔진이 같은 카드에 있을 때
#
# `generate`는 느려서, 답은 대개 vLLM 같은 엔진으로 만든다. 학습과 같은 카드에 두는 것이 TRL의 `vllm_mode="colocate"`다. 엔진은 **시작할 때** 카드의 `gpu_memory_utilization`만큼을 가중치와 KV 캐시의 자리로 잡는다([vLLM 문서, Engine Arguments](https://docs.vllm.ai/en/v0.8.1/serving/engine_args.html)). 모델이 작아도 그렇다. 남는 자리는 KV 캐시가 된다. 그 문서에서 기본값은 0.9이고, TRL은 0.3이다(TRL 1.16의 `vllm_gpu_memory_utilization`).
#
# 재우는 길도 있다. 1단계 잠(sleep level 1)은 가중치를 RAM으로 옮기고 KV 캐시를 버리며, 2단계는 둘 다 버린다([vLLM 문서, Sleep Mode](https://docs.vllm.ai/en/latest/features/sleep_mode/)). TRL은 `vllm_enable_sleep_mode=True`이면 답을 만들 때마다 2단계로 재운다.
#
# `Engine`은 vLLM이 아니라 **그 몫만큼의 블록**이다. 답을 만들 때 잡고, 재우면 돌려준다. 엔진의 몫을 0.6으로 두고 재우지 않는다. 어디에서 죽을까?

# %%
dies = guess("12.6", None, ("step 1", "step 2", "never"))
dies

# %% [markdown] lang="ko"
# 실행한다.

# %%
awake = steps_of(partial(grpo, completion=512, rollout=Engine(0.6, 512, sleeps=False)), "RTX 4090")
draw_steps(awake)

# %% [markdown] lang="ko"
# 첫 스텝은 끝까지 갔다. 죽은 것은 **둘째 스텝의 역전파**다. 첫 갱신에서 생긴 옵티마이저 상태가 이제 있는데, 학습하는 동안 할 일 없는 엔진이 카드의 60%를 그대로 쥐고 있다.

# %%
dies.against("step 2")

# %% [markdown] lang="ko"
# 몫을 0.3으로 줄인 것과, 재우면서 0.6과 0.8을 준 것을 실행한다. 마지막 열에 어느 스텝의 어느 단계에서 죽었는지가 있다.

# %%
shares = {
    "0.3, awake": Engine(0.3, 512, sleeps=False),
    "0.6, asleep": Engine(0.6, 512, sleeps=True),
    "0.8, asleep": Engine(0.8, 512, sleeps=True),
}
compare_steps({name: partial(grpo, completion=512, rollout=one) for name, one in shares.items()}, "RTX 4090")

# %% [markdown] lang="ko"
# - 재우면 엔진과 학습이 같은 자리를 **번갈아** 쓴다. 최대는 더한 것이 아니라 큰 쪽이다.
# - 그래도 0.8은 **둘째 스텝의 롤아웃**에서 죽었다(손실과 역전파의 값이 작은 것은 첫 스텝의 것뿐이라서다). 첫 답을 만들 때에는 없던 옵티마이저 상태가 이제 있기 때문이다. "몇 스텝은 잘 되다가 OOM"이라는 [trl #2927](https://github.com/huggingface/trl/issues/2927)의 증상과 같은 꼴이다(그 신고의 원인을 확인한 것은 아니다).
# - 깨우기 전에 `empty_cache()`를 부른다. 학습이 쥐고 있는 빈 덩어리를 드라이버에 돌려주어야 엔진이 쓸 수 있다. 재울 수 있는 vLLM은 메모리를 따로 둔 풀(`CuMemAllocator`)에서 잡으므로, 학습 쪽 할당자가 쥔 빈 덩어리를 쓰지 못한다. TRL도 깨우기 전에 그렇게 한다(`vllm_generation.py`). 단계마다 텐서의 크기가 달라 빈 자리가 조각나므로(3장의 단편화), 손수 만든 루프라면 이 줄을 빠뜨리지 않는다.
#
# 가중치는 엔진 안에 한 벌이 더 있다. 그 한 벌도 몫에 들어 있으므로 위의 블록에 이미 세어졌다. 1단계 잠이면 그 가중치만큼의 RAM이 든다(11.8절).
#
# **연습 12-2.** 늘 있는 것 `held`(가중치와 옵티마이저 상태), 학습 스텝이 더 쓰는 것 `step`, 엔진의 몫 `engine`이 바이트로 주어진다. `sleeps`가 참이면 학습하는 동안 엔진을 재운다. 최대는 몇 바이트인가?


# %%
def peak(held, step, engine, sleeps):
    return ...


exercise("12-2").check(peak)

# %% [markdown] lang="ko"
# ### 사건 12-B: 엔진을 줄일 수는 없다
#
# "GRPO를 vLLM과 같은 카드에서 돌리면 OOM이다. 몫을 줄이라는데, 우리 답은 길어서 엔진이 카드의 60%보다 적으면 느려서 못 쓴다." 12.6절과 같은 학습이다. 60%로 끝나는 설정은 이미 보았다. 이번에는 엔진에 줄 수 있는 **가장 큰 몫**을 0.05 단위로 찾는다. 연습 12-2의 식에 12.6절의 표에서 읽은 값을 넣어 먼저 예상하고 `run`으로 확인한다. `check`는 0.6 이상이면서 끝까지 가는 설정을 받는다. `run`이 받는 것은 `fraction`(기본값 0.6), `sleeps`, `batch`(한 번에 학습하는 답의 수)다.

# %%
case("12-B").run(batch=2)

# %% [markdown] lang="ko"
# 답을 2개씩 나누어 학습해도 둘째 스텝에서 죽는다. 찾은 설정을 사전으로 적는다.

# %%
answer = ...
case("12-B").check(answer)

# %% [markdown] lang="ko"
# ## 12.7 직접 바꿔 보기
#
# 패널은 단계마다 **적어도** 얼마가 있어야 하는지를 식으로 계산한다. 가중치, 기준 모델, 옵티마이저 상태, 그레이디언트, fp32 가중치의 16비트 사본(autocast), KV 캐시, 층의 입력(체크포인팅을 켠 것으로 센다), 로짓의 타일, 엔진의 몫이다. 임시 텐서는 세지 않으므로 하한이다. 하한이 넘치면 들어가지 않고, 하한이 들어가도 여유가 있어야 한다.
#
# ![RTX 4090에서 Qwen3-0.6B 전체를 GRPO로 학습할 때 단계마다의 하한. 세 단계 모두 23.16 GiB 안에 들어간다.](../../image/12_grpo_panel.svg)
#
# - 롤아웃을 '엔진이 늘 있음'으로 바꾸고 몫을 늘린다. 어느 단계가 먼저 넘치는가?
# - 같은 몫에서 '엔진을 재움'으로 바꾼다.
# - 모델을 Llama-3.1-8B, 방법을 LoRA로 바꾼다. 기준 모델을 '따로 한 벌'과 '어댑터 끄기'로 비교한다.

# %%
from helpers import grpo_panel

grpo_panel()

# %% [markdown] lang="ko"
# 하한이 얼마나 가까운지 확인한다. 12.5절의 `as it is`와 같은 설정에서 둘째 스텝에 잰 것을 하한으로 나눈다.

# %%
from helpers.chapters.c12_two_models.floor import Grpo
from virtual_gpu.cards import card

floor = Grpo(small).floor(card("RTX 4090").memory_bytes)
measured = steps_of(longer, "RTX 4090").peaks()
for phase in ("loss", "backward"):
    print(f"{phase:9} {measured[phase] / sum(floor[phase].values()):.3f}")

# %% [markdown] lang="ko"
# 1보다 크고 1에 가깝다. 나머지는 임시 텐서처럼 하한이 세지 않은 것이다. 롤아웃의 하한은 여기서 확인하지 않았다.
#
# ## 12.8 기억할 것
#
# 이 장에서 적은 예상과 결과다.

# %%
guesses()

# %% [markdown] lang="ko"
# | 언제 죽나 | 원인이 되는 것 | 고치는 줄 |
# |---|---|---|
# | 배치를 줄여도 DPO가 죽는다 | 기준 모델 한 벌 | `precompute_ref_log_probs=True`, LoRA(`peft_config`) |
# | DPO의 손실에서 죽는다 | 통째로 만든 로짓 | 로짓을 조각으로 만드는 손실(TRL 1.16의 기본값), 배치 |
# | GRPO의 롤아웃에서 | KV 캐시, 남아 있는 옵티마이저 상태 | 한 번에 만드는 답의 수(배치 × 누적), `max_completion_length`, LoRA |
# | GRPO의 역전파에서 | 쥐고 있는 엔진, 체크포인팅을 껐다면 순전파 상태 | `vllm_enable_sleep_mode=True`, `gradient_checkpointing=True` |
# | 둘째 스텝의 롤아웃 | 첫 갱신에서 생긴 옵티마이저 상태 | `vllm_gpu_memory_utilization`을 줄인다 |
#
# - DPO가 SFT보다 더 드는 것은 **문장이 쌍이라는 것과 가중치 한 벌**이다. 네 벌이 다 두 배가 되지는 않는다.
# - 최대는 단계마다 따로 있다. 설정 하나는 한두 단계만 옮긴다. 가장 높은 단계를 먼저 찾는다.
# - 재우면 번갈아 쓰고, 재우지 않으면 더한다.
#
# KV 캐시와 `generate`는 [11장](11_outside_training.ipynb)에, LoRA는 [8장](08_lora.ipynb)에, 오류 메시지에서 거꾸로 찾아가는 길은 [10장](10_oom_clinic.ipynb)에 있다.
