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
# # 8장. LoRA와 QLoRA
#
# GPU가 하나뿐이라면 학습할 파라미터를 줄이면 어떨까? 6장처럼 나누어 줄 GPU가 없으니, 나눌 것 자체를 없애는 것이다. 파라미터 대부분을 얼려 두면 그레이디언트도 옵티마이저 상태도 생기지 않는다.
# 그런데 그렇게 조금만 학습해도 배울 수 있을까? 무엇이 줄고 무엇이 그대로일까?
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - **LoRA**(low-rank adaptation)를 열 줄 남짓한 모듈로 만들고, 학습하는 파라미터의 수를 손으로 센다.
# - 전체 미세 조정(full fine-tuning), LoRA, **QLoRA**의 메모리를 종류별로 비교하고, LoRA가 **줄이지 못하는 것**이 무엇인지 안다.
# - 덧붙인 모듈, 곧 어댑터(adapter)를 합치고, 떼고, 저장하고, 갈아 끼운다.
# - 내 GPU에서 학습할 수 있는 가장 큰 모델을 찾는다.
#
# 작은 모델은 CPU에서 실제로 학습하고, 큰 모델의 메모리는 3장의 가상 GPU에서 센다. 저장된 출력은 가상 T4의 것이다. 출력에서 GPU의 이름을 확인한다.

# %%
import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

from helpers import (
    count_parameters,
    exercise,
    gpu_memory_sweep,
    human_bytes,
    load_model_and_tokenizer,
    lora_panel,
    make_dummy_dataset,
    predict_memory,
    use_gpu,
)  # fmt: skip
from helpers.chapters.c8_lora.fine_tuning import (
    FRANCE,
    PARIS,
    TASKS,
    Runs,
    complete,
    dequantized_model,
    fine_tune,
    known,
    picture_of_update,
    pretrained_model,
    quantized_model,
    share_of_singular_values,
    small_tokenizer,
    updates,
    with_rank,
)  # fmt: skip
from virtual_gpu.step.largest import LargestModels
from helpers.chapters.c8_lora.lora import load_adapter, merge, storage_table, trainable_parameters, unmerge
from peft import LoraConfig, PeftModel, get_peft_model

gpu = use_gpu()
gpu

# %% [markdown] lang="ko"
# ## 8.1 W는 두고 BA를 더한다
#
# 선형층의 가중치 W는 d × d 행렬이다. 미세 조정은 여기에 변화량 ΔW를 더하는 일이다. LoRA(Hu 외, 2021)는 ΔW를 좁은 행렬 둘의 곱으로 한정한다. B는 d × r, A는 r × d이고 r은 d보다 훨씬 작다.
#
# $$W' = W + \frac{\alpha}{r} BA$$
#
# W는 얼려 두고(freeze) A와 B만 학습한다. 이렇게 만든 ΔW는 **rank**(계수, 서로 독립인 행의 수)가 r을 넘지 못한다. 6장의 프로세스 번호 rank와는 이름만 같다. d = 100, r = 4일 때 학습하는 수가 몇 개로 줄어드는지 센다.

# %%
d, r = 100, 4
print(f"{d * d:,} -> {d * r + r * d:,} ({(d * r + r * d) / (d * d):.0%})")

# %% [markdown] lang="ko"
# 10,000개가 800개가 되었다. d가 커질수록 비율은 2r/d로 더 작아진다.
#
# > **주장 1.** "LoRA는 소수의 파라미터를 더해 그것만 학습한다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 다만 **더한다**는 말에 주의한다. 원래의 가중치는 하나도 사라지지 않는다. 줄어드는 것은 모델이 아니라 **학습할 것**이다.
#
# </details>
#
# ## 8.2 미세 조정의 변화량은 정말 rank가 낮을까
#
# 믿기 전에 재어 본다. 2층짜리 작은 GPT-NeoX(polyglot-ko와 같은 계열)를 준비했다. "프랑스의 수도는 파리이다."와 같은 문장 32개로 사전 학습한 모델이다. 거꾸로 물으면 어떻게 되는지 본다.

# %%
base = pretrained_model()
print(f"{count_parameters(base):,} parameters, {known(base, 'capital')}/32, {known(base, 'country')}/32")
print(complete(base, FRANCE), "/", complete(base, PARIS))

# %% [markdown] lang="ko"
# 수도는 모두 알지만, 거꾸로 물으면 하나도 모른다. 그래서 **새 과제**는 거꾸로 묻기다. "파리는 프랑스의 수도이다." 먼저 모든 파라미터를 학습하는 **전체 미세 조정**을 한다.
# 출력은 학습하는 파라미터의 수, 새 과제와 옛 과제에서 맞히는 답의 수다.

# %%
full = fine_tune(pretrained_model(), "full", lr=2e-3)
print(f"{full.trainable:,}, {full.learned}/32, {full.kept}/32")
print(complete(full.model, PARIS))

# %% [markdown] lang="ko"
# 새 과제를 다 배웠다. 옛 과제는 다 잊었는데, 이것은 8.6절에서 다시 본다. 이제 선형층마다 변화량 ΔW의 **특잇값**(singular value)을 구한다. 특잇값의 제곱을 큰 것부터 더해 갈 때 처음 k개가 전체의 얼마를 담는지 그린다.
# 회색은 같은 크기의 무작위 행렬이다. 두 선이 얼마나 벌어지는지 본다.

# %%
change = updates(base, full.model)["gpt_neox.layers.1.attention.dense"]
share_of_singular_values(change)

# %% [markdown] lang="ko"
# 변화량은 무작위 행렬보다 앞쪽에 훨씬 몰려 있지만, 특잇값 몇 개로 끝나지도 않는다. 그렇다면 뒤쪽을 잘라 내면 모델이 망가질까? 선형층의 ΔW를 모두 **가장 가까운 rank r 행렬**로 바꾸어 넣고(임베딩, 정규화, 출력층의 변화는 그대로 둔다), 새 과제를 몇 개나 맞히는지 센다. 왼쪽 열이 r이다.

# %%
for rank in (1, 2, 4, 8, 16, 64):
    print(rank, known(with_rank(base, full.model, rank), "country"))

# %% [markdown] lang="ko"
# 꽤 많은 몫을 버리고도 r = 4면 32개를 모두 맞힌다. 64차원이 다 필요하지는 않았던 것이다. LoRA는 이 관찰을 뒤집어, 처음부터 **rank r 안에서만** 찾는다.
#
# ## 8.3 LoRA를 직접 만들기
#
# 선형층을 감싸는 모듈 하나면 된다. 아래가 전부다.


# %%
class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(r, base.in_features, dtype=base.weight.dtype))
        self.B = nn.Parameter(torch.zeros(base.out_features, r, dtype=base.weight.dtype))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.A.T @ self.B.T) * self.scale


# %% [markdown] lang="ko"
# A는 무작위 값, B는 0에서 시작한다. 까닭을 보려고 세 가지로 시작해 본다. B만 0인 것, 둘 다 0인 것, 둘 다 무작위인 것이다. 열은 처음 출력이 원래 층과 다른 정도, A의 그레이디언트 크기, B의 그레이디언트 크기다.

# %%
torch.manual_seed(0)
linear, x = nn.Linear(64, 64).double(), torch.randn(10, 64).double()
for start in ("B = 0", "A = B = 0", "random"):
    layer = LoRALinear(linear)
    if start != "B = 0":
        nn.init.zeros_(layer.A) if "A" in start else nn.init.normal_(layer.B)
    layer(x).square().sum().backward()
    moved = (layer(x) - linear(x)).norm()
    print(f"{start:10} {moved:8.2f} {layer.A.grad.norm():8.2f} {layer.B.grad.norm():8.2f}")

# %% [markdown] lang="ko"
# - B만 0이면 처음 출력은 원래 모델과 **똑같고**, B에 그레이디언트가 흐르므로 첫 스텝부터 움직인다. A는 B가 0을 벗어난 다음에 움직인다.
# - 둘 다 0이면 둘 다 그레이디언트가 0이라 영영 움직이지 않는다.
# - 둘 다 무작위면 학습을 시작하기도 전에 모델이 망가져 있다.
#
# ### peft와 비교
#
# 실제로는 Hugging Face의 `peft`를 쓴다. 같은 층에 같은 A, B를 넣고 출력과 그레이디언트가 같은지 확인한다.

# %%
theirs = get_peft_model(nn.Sequential(linear), LoraConfig(r=8, lora_alpha=16, target_modules=["0"]))
ours, wrapped = LoRALinear(linear), theirs.base_model.model[0]
nn.init.normal_(ours.B)
wrapped.lora_A.default.weight.data.copy_(ours.A.data)
wrapped.lora_B.default.weight.data.copy_(ours.B.data)
for model in (ours, theirs):
    model(x).square().sum().backward()
print(torch.allclose(ours(x), theirs(x)))
print(torch.allclose(ours.A.grad, wrapped.lora_A.default.weight.grad))
print(torch.allclose(ours.B.grad, wrapped.lora_B.default.weight.grad))

# %% [markdown] lang="ko"
# 출력도 그레이디언트도 같다. 이제부터 `peft`를 쓴다.
#
# ## 8.4 13억 모델에 붙이기
#
# 3장의 polyglot-ko-1.3b에 r = 8인 LoRA를 붙인다. 대상은 어텐션의 `query_key_value` 24개다. 가상 GPU이므로 가중치는 내려받지 않는다. 학습하는 파라미터의 비율과, 손으로 센 값이 맞는지 본다.

# %%
model, _ = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b", peft="lora", lora_rank=8)
trained, total = count_parameters(model, trainable_only=True), count_parameters(model)
print(f"{trained:,} / {total:,} ({trained / total:.3%})")
print(f"{24 * 8 * (2048 + 3 * 2048):,}")

# %% [markdown] lang="ko"
# 13억 개 가운데 157만 개(**0.118%**), 천 개에 하나꼴로 학습한다. 손으로 센 값(층 24개 × r × (입력 2048 + 출력 6144))과도 같다. rank와 대상을 바꾸면 얼마나 달라질까? `all-linear`는 출력층을 뺀 모든 선형층이다.

# %%
del model
for targets in ("attention", "all-linear"):
    for rank in (8, 64):
        trained, total = trainable_parameters("polyglot-ko-1.3b", "lora", rank, targets)
        print(f"{targets:10} r={rank:<3} {trained:12,} {trained / total:8.3%}")

# %% [markdown] lang="ko"
# > **주장 2.** "파라미터의 1% 미만만 학습한다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** r = 8이라면 맞지만, 모든 선형층에 붙이고 r을 64로 올리면 3.6%가 된다. 1%는 LoRA의 성질이 아니라 **rank와 대상 층을 고른 결과**다.
#
# </details>
#
# ## 8.5 메모리는 어디에서 줄까
#
# 3장에서 메모리가 부족했던 바로 그 실험이다. 배치 크기 16, 길이 256으로 전체 미세 조정(`None`), LoRA, QLoRA를 차례로 실행한다. QLoRA는 얼려 둔 가중치를 4비트(NF4)로 저장한 LoRA다(8.9절). 그레이디언트와 옵티마이저 상태의 열을 먼저 본다.

# %%
by_method = gpu_memory_sweep(batch_size=16, peft=[None, "lora", "qlora"])
by_method

# %% [markdown] lang="ko"
# 그레이디언트는 2.48 GiB에서 6 MiB로, 옵티마이저 상태는 4.96 GiB에서 12 MiB로 줄었다. 7 GiB가 넘던 것이 거의 사라졌다. 학습하는 파라미터가 0.118%이니 당연하다.
# (그레이디언트는 파라미터당 4바이트다. `peft`는 fp16 모델에서도 어댑터를 fp32로 둔다. 그래서 3.8절에서 본 ε의 문제도 생기지 않는다.) 그림에서 **줄지 않은 것**을 찾는다.

# %%
by_method.chart()

# %% [markdown] lang="ko"
# 보라색, 곧 **순전파 상태**가 남았다. 최대가 된 순간의 보라색만 차례로 꺼내 본다(전체 미세 조정은 한도가 없다고 치고 끝까지 간 값이다).

# %%
for peft in (None, "lora", "qlora"):
    print(peft, human_bytes(predict_memory(batch_size=16, peft=peft).at_peak["activations"]))

# %% [markdown] lang="ko"
# LoRA의 순전파 상태는 전체 미세 조정보다 조금 작을 뿐이다. 어댑터가 층마다 있으니 그레이디언트는 맨 아래층까지 내려가야 하고, 그러려면 중간 결과가 필요하다. 얼린 선형층의 입력만은 저장하지 않아도 되므로 그만큼 줄어든다.
#
# 뜻밖인 것은 QLoRA다. **LoRA보다 더 많이 쓴다.** 파라미터는 절반 아래로 줄었는데 순전파 상태가 오히려 늘었다. 까닭은 8.9절에서 찾는다.
#
# 그렇다면 순전파 상태는 무엇으로 줄일까? 체크포인팅(5장)과 짧은 길이다. 둘을 LoRA에 더해 본다.

# %%
gpu_memory_sweep(batch_size=16, peft="lora", gradient_checkpointing=True, sequence_length=[256, 128])

# %% [markdown] lang="ko"
# 체크포인팅을 켜니 8.89 GiB에서 4.28 GiB로, 길이까지 반으로 줄이니 3.40 GiB로 줄었다. LoRA가 그레이디언트와 옵티마이저 상태를 없애고 나면 남는 것은 **얼린 가중치와 순전파 상태**다. 앞의 것은 QLoRA가, 뒤의 것은 체크포인팅이 맡는다.
#
# ## 8.6 정말 배우는가
#
# 작은 모델로 돌아간다. 8.2절의 새 과제를 LoRA로 배운다. rank를 1, 4, 16으로 바꾸고, 4비트 가중치 위에서도(QLoRA) 학습한다. 모두 fp64로 계산해 어느 CPU에서나 같은 숫자가 나온다(QLoRA도 저장은 bitsandbytes의 4비트 그대로이고 곱셈만 fp64다). 먼저 모델에 어댑터를 붙이는 함수다.


# %%
def with_lora(rank, model=None, **more):
    torch.manual_seed(1)
    config = LoraConfig(r=rank, **{"lora_alpha": 2 * rank, "target_modules": "all-linear", **more})
    return get_peft_model(model or pretrained_model(), config)


# %% [markdown] lang="ko"
# 학습률은 LoRA 0.01, 전체 미세 조정 0.002다(8.2절의 `lr=2e-3`). 어댑터에는 이렇게 더 큰 학습률을 주는 것이 보통이다. 왼쪽 그림에서 손실(loss)이 어디까지 내려가는지, 오른쪽에서 실선(새 과제)과 점선(옛 과제)이 어떻게 엇갈리는지 본다.

# %%
runs = Runs([full])
for rank in (1, 4, 16):
    runs.append(fine_tune(with_lora(rank), f"LoRA r={rank}"))
runs.append(fine_tune(with_lora(16, quantized_model(base)).double(), "QLoRA r=16"))
runs.chart()

# %% [markdown] lang="ko"
# 같은 것을 표로 적는다. 학습하는 파라미터의 수와 새 과제의 점수를 견주어 본다.

# %%
runs

# %% [markdown] lang="ko"
# - **rank가 모자라면 배우지 못한다.** r = 1은 14개에 그쳤고 r = 16은 31개까지 갔다. 서로 상관없는 사실 32개를 외우는 일이라 rank가 용량 노릇을 한다. 다만 학습률이 같을 때의 말이다(바로 아래). 그런데 8.2절에서는 rank 4면 충분하지 않았던가? 까닭은 8.7절에서 찾는다.
# - **이 과제에서 QLoRA는 LoRA만큼 배웠다.** 4비트로 저장한 가중치 위에서도 같은 수를 맞혔다. 양자화 오차가 있어도 어댑터는 그 위에서 학습되기 때문이다.
# - **모두 잊었다.** 옛 과제의 점선은 30스텝이 되기도 전에 바닥에 닿는다. 이 과제에서는 LoRA라고 덜 잊지 않았다. 새 과제가 옛 과제와 정면으로 부딪치는 작은 실험이라 그렇다. 큰 모델에서는 LoRA가 덜 배우고 덜 잊는다는 보고가 있다(Biderman 외, 2024).
#
# > **주장 3.** "전체 미세 조정과 거의 같은 성능"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 여기서 실행한 것만 말하면, r = 16은 전체 미세 조정의 32개에 하나 모자란 31개를 맞혔지만 손실은 더 높고, r = 1은 절반도 못 맞혔다. rank와 대상 층이 과제에 충분할 때에만 맞는 말이다.
#
# </details>
#
# 학습률의 몫은 얼마일까? r = 4는 학습률을 내리고 올려서, r = 16은 내려서 다시 학습해 맞힌 수를 센다. 위의 표(0.01)와 견주어 본다.

# %%
for rank, lr in ((4, 2e-3), (4, 2e-2), (16, 2e-3)):
    print(f"r={rank:2}, lr={lr:g}: {fine_tune(with_lora(rank), lr=lr).learned}")

# %% [markdown] lang="ko"
# 전체 미세 조정의 학습률(0.002)을 그대로 쓰면 r = 16도 다 배우지 못하고, r = 4도 학습률을 키우면 훨씬 많이 배운다. rank를 키우기 전에 학습률부터 올려 볼 일이다. 전체 미세 조정의 열 배쯤에서 시작하라는 것이 요즈음의 권고다(Thinking Machines, "LoRA Without Regret", 2025).
#
# 잊는 것은 같아도 한 가지가 다르다. LoRA의 W는 그대로 있다. 어댑터를 끄고 옛 과제를 다시 물어본다.

# %%
adapted = runs[3].model
with adapted.disable_adapter():
    print(known(adapted, "capital"), complete(adapted, FRANCE))
print(known(adapted, "capital"), complete(adapted, FRANCE))

# %% [markdown] lang="ko"
# 끄면 32개가 모두 돌아온다. 전체 미세 조정에서는 원래 모델을 따로 저장해 두지 않았다면 되찾을 길이 없다.
#
# 학습한 어댑터를 들여다본다. r = 4인 모델의 첫 층 `dense`에서 W의 왼쪽 위 12 × 12와, 거기에 더해지는 B와 A다. 색은 부호, 짙기는 크기다.

# %%
layer = "base_model.model.gpt_neox.layers.0.attention.dense"
picture_of_update(runs[2].model.get_submodule(layer))

# %% [markdown] lang="ko"
# ## 8.7 무엇을 고를까: 대상 층, α, 변형
#
# ### 어느 층에 붙일까
#
# 학습하는 파라미터의 수를 8,192개로 똑같이 두고, 어텐션의 `query_key_value`에만 r = 16으로 붙인 것과 모든 선형층에 r = 4로 붙인 것을 비교한다.

# %%
attention = fine_tune(with_lora(16, target_modules=["query_key_value"]), "query_key_value r=16")
Runs([attention, runs[2]])

# %% [markdown] lang="ko"
# 이 과제에서는 거의 같다. 같은 예산이라면 넓고 얇게 붙이나 좁고 두껍게 붙이나 큰 차이가 없었다. 8.6절의 r = 16(모든 선형층)이 훨씬 나았던 것은 층을 잘 골라서라기보다 파라미터가 네 배인 덕이다.
# QLoRA 논문(Dettmers 외, 2023)은 모든 선형층에 붙여야 전체 미세 조정의 성능에 이른다고 보고했다.
#
# 이제 8.6절에서 남겨 둔 물음이다. 8.2절에서는 선형층의 변화량을 rank 4로 잘라도 32개를 다 맞혔는데, 왜 r = 4인 LoRA는 24개일까? 그때는 임베딩과 **출력층**도 움직였고, LoRA에서는 얼어 있다.
# `modules_to_save`에 적은 층은 어댑터 없이 통째로 학습하고 함께 저장한다. 출력층을 넣어 본다.

# %%
head = fine_tune(with_lora(4, modules_to_save=["lm_head"]), "LoRA r=4 + lm_head")
Runs([runs[2], runs[3], head])

# %% [markdown] lang="ko"
# rank는 4 그대로인데 32개를 모두 맞히고, 손실은 r = 16보다도 훨씬 낮다. 8.6절에서 LoRA의 손실이 내려가다 만 것은 rank보다 **얼린 출력층** 탓이었다. 사전 학습에서 쓰지 않던 글자를 답으로 내야 하는 과제, 이를테면 새 토큰을 넣을 때에는 rank를 키우기 전에 무엇이 얼어 있는지부터 본다.
# 대가도 있다. 이 작은 모델에서는 출력층이 7,232개지만 polyglot-ko-1.3b에서는 6천만 개다(8.9절의 표).
#
# ### α와 r
#
# BA에는 α/r이 곱해진다. α를 고정하고 r을 키우면 어댑터 하나하나의 몫이 작아진다. rsLoRA(Kalajdzievski, 2023)는 r 대신 √r로 나눈다. α = 16일 때 `peft`가 곱하는 값을 비교한다.

# %%
for rank in (1, 4, 16, 64):
    pair = [with_lora(rank, lora_alpha=16, use_rslora=on) for on in (False, True)]
    print(rank, [model.get_submodule(layer).scaling["default"] for model in pair])

# %% [markdown] lang="ko"
# r = 64에서 여덟 배 차이가 난다. 이 장은 α = 2r을 써서 곱하는 값을 2로 고정했다. 이 값이 결과를 바꿀까? r = 16에서 α만 32에서 64로 올려 본다.

# %%
Runs([runs[3], fine_tune(with_lora(16, lora_alpha=64), "LoRA r=16, alpha=64")])

# %% [markdown] lang="ko"
# 곱하는 값이 2에서 4가 되자 남은 하나까지 맞혔다. α를 키우는 것은 어댑터의 학습률을 키우는 것과 비슷하다. r을 키웠는데 나아지지 않는다면 rank가 아니라 α/r이 작아진 탓은 아닌지 먼저 의심한다.
#
# ### DoRA
#
# DoRA(Liu 외, 2024)는 가중치를 방향과 크기로 나누어 방향만 LoRA로 배우고, 출력 하나마다 크기를 하나씩 더 배운다. `use_dora=True`만 적으면 된다. 파라미터가 얼마나 늘고 결과가 어떻게 달라지는지 본다.

# %%
dora = fine_tune(with_lora(16, use_dora=True), "DoRA r=16")
Runs([runs[3], dora])

# %% [markdown] lang="ko"
# 늘어난 1,152개는 선형층의 출력 수를 모두 더한 것이다. 이 과제에서는 나아지지 않았다. 순전파마다 W + BA의 크기를 구하므로 계산도 더 든다. 변형은 많다. 기본 LoRA부터 시작해도 잃을 것이 적다.
#
# ## 8.8 합치고, 떼고, 갈아 끼우기
#
# 학습이 끝나면 BA를 W에 더해 하나의 행렬로 만들 수 있다. 그러면 추론할 때 곱셈이 늘지 않는다. 합치기 전과 후의 출력이 얼마나 다른지, 다시 떼고 어댑터를 끄면 원래 모델의 출력이 나오는지 본다. 차이가 10⁻¹²보다 작으면 True다.

# %%
ids = small_tokenizer()("\n" + complete(full.model, PARIS), return_tensors="pt").input_ids
before = adapted(input_ids=ids).logits
merge(adapted)
print("merged:", torch.allclose(adapted(input_ids=ids).logits, before, rtol=0, atol=1e-12))
unmerge(adapted)
with adapted.disable_adapter():
    original = adapted(input_ids=ids).logits
print("unmerged:", torch.allclose(original, base(input_ids=ids).logits, rtol=0, atol=1e-12))

# %% [markdown] lang="ko"
# fp64의 반올림 오차 안에서 같다. 16비트라면 합칠 때의 반올림이 더 크다. 그리고 4비트 가중치에 그대로 합치면 다시 4비트로 반올림해야 한다. QLoRA로 배운 어댑터를 어디에 합칠지는 저장한 다음에 잰다.
#
# 같은 어댑터를 두 번 합치면 BA가 두 번 더해진다. `merge`는 이를 막는다. 오류 메시지를 읽어 본다.

# %% tags=["raises-exception"]
twice = copy.deepcopy(runs[2].model)
merge(twice)
merge(twice)

# %% [markdown] lang="ko"
# 이제 저장한다. `save_pretrained`는 어댑터만 적는다. 원래 모델을 저장한 것과 크기를 비교한다.

# %%
from transformers import utils

utils.logging.disable_progress_bar()
folder = Path(tempfile.mkdtemp())
base.save_pretrained(folder / "base")
runs[2].model.save_pretrained(folder / "country")
for name in ("base/model.safetensors", "country/adapter_model.safetensors"):
    print(f"{name:36} {human_bytes((folder / name).stat().st_size)}")

# %% [markdown] lang="ko"
# 이 작은 모델에서는 14분의 1쯤이다. polyglot-ko-1.3b라면 가중치가 2.48 GiB, r = 8 어댑터가 fp32로 6 MiB다. 모델 하나에 과제마다 어댑터를 두고 갈아 끼우는 까닭이다.
#
# QLoRA로 배운 어댑터도 저장했다가 16비트 가중치에 합칠 수 있다. 어느 가중치에 합칠까? 원래 가중치와, 4비트로 줄였다가 도로 푼(역양자화, dequantize) 가중치에 합쳐, 출력이 학습한 모델과 얼마나 다른지 잰다.

# %%
qlora = runs[4].model
qlora.save_pretrained(folder / "qlora")
learned = qlora(input_ids=ids).logits
for name, weights in {"original": pretrained_model(), "dequantized": dequantized_model(base)}.items():
    logits = PeftModel.from_pretrained(weights, folder / "qlora").merge_and_unload()(input_ids=ids).logits
    print(f"{name:11} {(logits - learned).norm() / learned.norm():.1%}")

# %% [markdown] lang="ko"
# 어댑터는 **4비트를 푼 가중치** 위에서 배웠으니 거기에 합쳐야 배운 그대로다. 원래 가중치에 합치면 양자화 오차만큼 어긋난다. 실제로는 4비트로 불러온 모델에서 `model.dequantize()`를 부른 다음 어댑터를 합친다.
#
# 짧게 대답하는("프랑스의 수도는 파리.") 어댑터를 하나 더 학습해 저장하고, 한 모델에 둘을 올려 갈아 끼운다. 어댑터마다 대답이 어떻게 달라지는지 본다.

# %%
short = fine_tune(with_lora(4), "short", task="short", steps=40)
short.model.save_pretrained(folder / "short")
one = PeftModel.from_pretrained(pretrained_model(), folder / "country", adapter_name="country")
load_adapter(one, folder / "short", "short")
for name in ("country", "short"):
    one.set_adapter(name)
    print(f"{name:8} {complete(one, PARIS)} / {complete(one, FRANCE)}")

# %% [markdown] lang="ko"
# 어댑터는 **그것을 학습한 모델에만** 맞는다. 모양이 다른 모델에 올리면 `load_adapter`가 막는다. (모양까지 같은 다른 모델은 가려낼 수 없으니, 어느 모델의 어댑터인지 적어 둔다.) 너비가 다른 모델을 만들어 올리고 오류 메시지를 읽는다.

# %% tags=["raises-exception"]
other = with_lora(4, pretrained_model(width=32))
load_adapter(other, folder / "country", "country")

# %% [markdown] lang="ko"
# ## 8.9 QLoRA: 얼린 가중치를 4비트로
#
# 얼린 가중치는 읽기만 한다. 그렇다면 16비트로 둘 까닭이 없다. QLoRA(Dettmers 외, 2023)는 이것을 2장의 **NF4와 이중 양자화**로 저장하고, 곱할 때마다 16비트로 되돌려 쓰고 버린다.
# polyglot-ko-1.3b의 파라미터가 무엇으로 저장되는지 종류별로 센다. 마지막 열은 파라미터 하나의 바이트다.

# %%
model, _ = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b", peft="qlora", quiet=True)
storage_table(model)

# %% [markdown] lang="ko"
# 4비트 선형층은 파라미터 하나에 0.516바이트다. 코드가 0.5바이트, 2장에서 계산한 이중 양자화의 0.127비트가 0.016바이트다.
#
# 그런데 **4비트가 아닌 것**이 눈에 띈다. 임베딩과 출력층은 양자화하지 않고, `prepare_model_for_kbit_training`이 fp16이던 것을 모두 **fp32로 올린다**. 학습을 안정시키려는 것이지만, 이 모델에서는 파라미터의 9%인 임베딩과 출력층이 470 MiB를 써서, 4비트로 줄인 나머지 91%(594 MiB)에 가깝다.
#
# 8.5절에서 순전파 상태가 늘어난 까닭도 여기에 있다. 임베딩이 fp32를 내놓으니 층 사이를 흐르는 값이 모두 fp32가 되고, 크기도 두 배가 된다. 정말 그런지는 `autocast`로 선형층의 출력을 fp16으로 되돌려 보면 안다(`Trainer`의 `fp16=True`, `bf16=True`가 하는 일이다).
# 순전파가 끝난 뒤의 순전파 상태를 네 경우에 센다.

# %%
del model
dataset = make_dummy_dataset()
for peft in ("lora", "qlora"):
    model, _ = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b", peft=peft, quiet=True)
    for dtype in (None, torch.float16):
        batch, before = gpu.place(dataset[:16]), gpu.memory_allocated()
        with gpu, gpu.autocast(dtype):
            loss = model.train()(**batch, use_cache=False).loss
        print(f"{peft:5} {dtype!s:13} {human_bytes(gpu.memory_allocated() - before)}")
        del loss

# %% [markdown] lang="ko"
# `autocast`를 켜면 QLoRA의 순전파 상태가 LoRA와 비슷해진다. QLoRA를 쓸 때 혼합 정밀도를 함께 켜는 데에는 이런 까닭도 있다.
#
# 이제 `autocast` 없이, LoRA와 QLoRA의 최대 메모리를 비교한다. 열은 체크포인팅, 배치 크기, LoRA, QLoRA, QLoRA / LoRA다.

# %%
del model
for checkpointing in (False, True):
    for batch in (1, 16):
        setting = {"batch_size": batch, "gradient_checkpointing": checkpointing}
        lora, qlora = (predict_memory(**setting, peft=peft).needed_bytes for peft in ("lora", "qlora"))
        print(f"{checkpointing!s:5} {batch:2} {human_bytes(lora)} {human_bytes(qlora)} {qlora / lora:.0%}")

# %% [markdown] lang="ko"
# 같은 비교를 80억 파라미터 모델로 한다. 체크포인팅을 켰고, T4에 들어가지 않아도 끝까지 세었다.

# %%
for batch in (1, 16):
    setting = {"batch_size": batch, "model_id": "Llama-3.1-8B", "gradient_checkpointing": True}
    lora, qlora = (predict_memory(**setting, peft=peft).needed_bytes for peft in ("lora", "qlora"))
    print(f"{batch:2} {human_bytes(lora)} {human_bytes(qlora)} {qlora / lora:.0%}")

# %% [markdown] lang="ko"
# > **주장 4.** "QLoRA는 메모리를 절반 이하로"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** **가중치**만 보면 맞다(2.49 → 1.05 GiB). 최대 메모리로는 위의 여섯 경우 가운데 절반 이하가 된 것이 하나뿐이고(배치 1, 체크포인팅), 체크포인팅 없는 배치 16에서는 오히려 **늘었다**.
# 작은 배치와 체크포인팅으로 순전파 상태부터 줄여 놓아야 4비트의 효과가 드러난다. Llama-3.1-8B는 어휘가 커서 fp32가 된 임베딩과 출력층이 크다.
#
# </details>
#
# ### 진짜 4비트로 한 스텝
#
# 지금까지 바이트는 가상 GPU에서 세었다. 이번에는 진짜 bitsandbytes다. 작은 모델을 fp32로 저장했다가 4비트로 불러와 준비하고 어댑터를 붙인다. 실제로 쓰는 코드와 같다. GPU가 있으면 GPU에서, 없으면 CPU에서 돈다. `bnb_4bit_compute_dtype`은 4비트를 풀어 곱할 자료형이다. 기본값 fp32는 GPU에서 느리니 T4에서는 fp16, 암페어(Ampere)부터는 bf16을 적는다. 이 모델에서 무엇이 4비트인지 표로 확인한다.

# %%
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

device = "cuda" if torch.cuda.is_available() else "cpu"
pretrained_model().float().save_pretrained(folder / "base")
nf4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float16 if device == "cuda" else torch.float32,
)
model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=nf4, device_map={"": device})
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = with_lora(16, model)
storage_table(model)

# %% [markdown] lang="ko"
# 층이 작아서 코드 표와 같은 고정된 몫이 도드라져 파라미터당 0.605바이트가 되었다.
#
# QLoRA 논문의 나머지 한 조각은 **페이지 옵티마이저**(`PagedAdamW8bit`)다. 먼저 그 바탕인 8비트 AdamW(`AdamW8bit`)로 몇 스텝 학습하고, 손실과 상태의 자료형을 본다.

# %%
import bitsandbytes as bnb

optimizer = bnb.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _ in range(4):
    loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.1f}")
{p.numel(): optimizer.state[p]["state1"].dtype for p in model.parameters() if p.requires_grad}

# %% [markdown] lang="ko"
# 4비트 가중치를 지나 어댑터까지 그레이디언트가 흘러 손실이 내려간다. 상태를 보면 원소가 4,096개 이상인 텐서만 8비트(uint8)이고 더 작은 것은 fp32다. bitsandbytes의 기본값이다.
#
# 페이지 옵티마이저는 GPU 메모리가 모자라는 순간 옵티마이저 상태를 CPU 메모리로 옮겨 둔다. CUDA의 통합 메모리 기능이라 **CUDA에서만** 동작한다(CPU에서는 경고를 내고 보통의 8비트로 돌아간다).
# 그런데 LoRA에서 옵티마이저 상태를 줄이는 것이 얼마나 도움이 될까? 최대 메모리의 차이를 본다.

# %%
gpu_memory_sweep(batch_size=4, peft="qlora", optimizer=["adamw", "adamw_8bit"])

# %% [markdown] lang="ko"
# 12 MiB가 3 MiB로 줄었지만 최대 메모리는 거의 그대로다. 어댑터가 작으면 8비트 상태도, 페이지 옵티마이저도 바꾸는 것이 거의 없다. 효과가 큰 것은 rank가 크거나 전체 미세 조정을 할 때다.
#
# ## 8.10 내 GPU에 들어가는 가장 큰 모델
#
# 이 강의에 들어 있는 모델을 큰 것부터 차례로 예측해, GPU마다 방법마다 들어가는 가장 큰 것을 찾는다. 배치 1, 길이 512, 체크포인팅, 융합 AdamW이고, 가중치는 저장된 자료형(16비트) 그대로다. 칸에는 파라미터의 수와 최대 메모리가 있다. 이 장에서 가장 오래 걸리는 셀이다.

# %%
LargestModels(
    ("T4", "L4", "A100-80GB", "H200"),
    sequence_length=512,
    gradient_checkpointing=True,
    optimizer="adamw_fused",
)

# %% [markdown] lang="ko"
# 같은 GPU에서 LoRA는 전체 미세 조정보다 네 배에서 다섯 배, QLoRA는 다섯 배에서 열네 배 큰 모델을 다룬다. H200에서 LoRA와 QLoRA의 답이 같은 것은 이 목록에 720억 다음이 4,050억이기 때문이다.
# 단편화로 못 쓰는 자리까지 따져서 들어가는 것만 골랐지만(3장), 최대가 한도에 바짝 붙은 칸(H200의 LoRA)에는 여유가 없다. T4에는 bf16 연산 장치가 없으므로 bf16 모델을 실제로 학습할 때는 fp16으로 바꾸어야 한다(1장). 그런데 순수 fp16에 합치지 않은 AdamW는 첫 스텝에서 무너지고(3.8절), 혼합 정밀도라면 가중치와 그레이디언트가 두 배로 든다. T4의 '전체 미세 조정' 칸은 **들어가는** 크기이지 그대로 학습되는 크기가 아니다.
#
# > **주장 5.** "LLM 전체 미세 조정은 GPU 하나에 들어가지 않는다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 어느 모델, 어느 GPU냐에 달렸다. 17억 모델은 T4 하나에, 140억 모델은 H200 하나에 들어간다(순수 16비트일 때다. 3.8절의 혼합 정밀도라면 두 배가 든다). 80억 모델에는 61 GiB가 들어 A100-80GB가 있어야 한다.
#
# </details>
#
# ## 8.11 Trainer로 하기
#
# 실제 작업은 대개 `Trainer`로 한다. 이 강의가 만든 문장으로 `datasets` 데이터를 만들고, 짧게 대답하는 어댑터를 학습한다. 내려받는 것은 없다. 먼저 데이터를 만들고 한 줄을 본다.

# %%
from datasets import Dataset, disable_progress_bars

disable_progress_bars()
tokenizer = small_tokenizer()
dataset = Dataset.from_list([{"text": f"\n{start}{end}\n"} for start, end in TASKS["short"]])
dataset = dataset.map(lambda row: tokenizer(row["text"]), remove_columns="text")
print(len(dataset), repr(tokenizer.decode(dataset[0]["input_ids"])))

# %% [markdown] lang="ko"
# 모델에 LoRA를 붙여 `Trainer`에 넘긴다. 전체 미세 조정과 다른 곳은 `with_lora` 한 줄이다. `task_type="CAUSAL_LM"`은 저장된 어댑터가 언어 모델의 것임을 적어 둔다. 출력은 스텝 수와 32개 가운데 맞힌 수다.

# %%
from transformers import DataCollatorForLanguageModeling, PrinterCallback, Trainer, TrainingArguments

model = with_lora(4, pretrained_model().float(), task_type="CAUSAL_LM")
arguments = TrainingArguments(
    folder / "trainer",
    per_device_train_batch_size=32,
    max_steps=60,
    learning_rate=1e-2,
    seed=0,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(model, arguments, DataCollatorForLanguageModeling(tokenizer, mlm=False), dataset)
trainer.remove_callback(PrinterCallback)
state = trainer.train()
print(state.global_step, known(model, "short"))

# %% [markdown] lang="ko"
# 저장하고, 새 모델에 다시 올려 문장을 만든다. 폴더에는 가중치 전체가 아니라 어댑터와 설정만 있다. 짧게 대답하는지 본다.

# %%
model.save_pretrained(folder / "trained")
again = PeftModel.from_pretrained(pretrained_model().float(), folder / "trained")
for start in (FRANCE, TASKS["short"][0][0]):
    tokens = again.generate(**tokenizer("\n" + start, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))

# %% [markdown] lang="ko"
# ## 8.12 직접 바꿔 보기
#
# 설정을 바꾸면 학습하는 파라미터의 수와 메모리를 바로 예측해 그린다. 아래 그림은 처음 모습이다.
#
# ![polyglot-ko-1.3b를 배치 16, LoRA로 학습할 때의 메모리. 최대 8.89 GiB로 T4의 한도 14.64 GiB 안에 들어간다.](../../image/08_lora_batch_16_on_a_t4.svg)
#
# 이렇게 해 본다.
#
# - 방법을 QLoRA로 바꾼다. 파란색이 주는데 최대는 왜 늘어날까? 그 상태에서 체크포인팅을 켠다.
# - 모든 선형층에 붙이고 rank를 8에서 512까지 올린다. 어디서부터 메모리가 눈에 띄게 늘어나는가?
# - 모델을 Llama-3.1-8B로 바꾸고 T4에 들어가게 해 본다.
# - rank에 0이나 9999를, 글자를 넣어 본다.

# %%
lora_panel()

# %% [markdown] lang="ko"
# ## 8.13 연습 문제
#
# 답을 채우고 실행하면 맞았는지, 틀렸다면 얼마나 틀렸는지 알려 준다. 막히면 `exercise("8-1").hint()`, 그래도 막히면 `exercise("8-1").solution()`을 실행한다.
#
# **8-1.** LoRA를 붙일 층들의 모양 `(out, in)`의 목록과 r을 받아, 학습하는 파라미터의 수를 돌려주는 함수를 완성하라.


# %%
def lora_parameters(shapes, r):
    return ...


exercise("8-1").check(lora_parameters)

# %% [markdown] lang="ko"
# **8-2.** W(out × in), A(r × in), B(out × r)와 α를 받아, 어댑터를 합친 가중치를 돌려주는 함수를 완성하라.


# %%
def merged_weight(W, A, B, alpha):
    return ...


exercise("8-2").check(merged_weight)

# %% [markdown] lang="ko"
# **8-3.** Llama-3.1-8B를 배치 4, 길이 512로 T4에서 학습하려 한다. 파라미터를 2천만 개 이상 학습하면서 T4에 들어가는 설정을 찾아라.
# 바꿀 수 있는 것은 `peft`, `lora_rank`, `lora_targets`, `gradient_checkpointing`, `optimizer`다. 예를 들면 `{"peft": "lora", "lora_rank": 16}`처럼 쓴다.

# %%
changes = ...
exercise("8-3").check(changes)

# %% [markdown] lang="ko"
# ## 8.14 기억할 것
#
# | | 전체 미세 조정 | LoRA | QLoRA |
# |---|---|---|---|
# | 가중치 | N | N + 어댑터 | 선형층은 파라미터당 0.516바이트, 나머지는 fp32 |
# | 그레이디언트, 옵티마이저 상태 | 3N(AdamW) | 어댑터만큼 | 어댑터만큼 |
# | 순전파 상태 | 그대로 | 거의 그대로 | 늘어날 수 있다(fp32로 흐른다) |
# | 저장하는 것 | 모델 전체 | 어댑터 | 어댑터 |
# | 원래 모델로 돌아가기 | 따로 저장해 두어야 | 어댑터를 끄면 된다 | 어댑터를 끄면 된다 |
#
# - 학습하는 파라미터는 **r × (in + out)을 붙인 층만큼** 더한 것이다.
# - LoRA 다음에 줄일 것은 **얼린 가중치**와 **순전파 상태**다. 앞의 것은 QLoRA가, 뒤의 것은 체크포인팅이 줄인다. 함께 쓴다.
# - rank가 모자라면 배우지 못한다. 그러나 rank를 키우기 전에 α/r과 **얼린 층**(출력층)부터 확인한다.
# - QLoRA가 LoRA보다 많이 쓴다면 **fp32로 올라간 것**을 의심한다.
#
# 이제 누적, 체크포인팅, 여러 GPU, LoRA, 4비트까지 도구가 모두 모였다. 내 모델과 내 GPU라면 무엇을 골라야 할까? [9장](09_fit_your_gpu.ipynb)에서 답한다.
