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
# GPU가 하나뿐이라면 학습할 파라미터를 줄이면 어떨까? 파라미터 대부분을 얼려 두면 그레이디언트도 옵티마이저 상태도 생기지 않는다.
# 그런데 그렇게 조금만 학습해도 배울 수 있을까? 무엇이 줄고 무엇이 그대로일까?
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - **LoRA**(low-rank adaptation)를 열 줄 남짓한 모듈로 만들고, 학습하는 파라미터의 수를 손으로 센다.
# - 전체 미세 조정(full fine-tuning), LoRA, **QLoRA**의 메모리를 종류별로 비교하고, LoRA가 **줄이지 못하는 것**이 무엇인지 안다.
# - LoRA가 배우지 않을 때 학습률, α/r, 얼린 층, 체크포인팅 가운데 무엇이 문제인지 가려낸다.
# - 덧붙인 모듈, 곧 어댑터(adapter)를 합치고, 떼고, 저장한다.
# - T4 하나로 QLoRA 학습을 시작할 수 있는 프로그램을 가져간다.
#
# 작은 모델은 CPU에서 실제로 학습하고, 큰 모델의 메모리는 3장의 가상 GPU에서 센다. 저장된 출력은 가상 T4에서 얻었다.

# %%
import copy
import tempfile
from itertools import product
from pathlib import Path

import torch
from torch import nn

from helpers import case, count_parameters, exercise, guess, guesses, human_bytes, predict_memory, use_gpu
from helpers.chapters.c8_lora.tables import Table

gpu = use_gpu()
gpu

# %% [markdown] lang="ko"
# ## 8.1 W는 두고 BA를 더한다
#
# 선형층의 가중치 W는 out × in 행렬이다. 미세 조정은 여기에 변화량 ΔW를 더하는 일이다. LoRA(Hu 외, 2021)는 ΔW를 좁은 행렬 둘의 곱으로 한정한다. B는 out × r, A는 r × in이고 r은 out이나 in보다 훨씬 작다.
#
# $$W' = W + \frac{\alpha}{r} BA$$
#
# W는 얼려 두고(freeze) A와 B만 학습한다. 이렇게 만든 ΔW는 **rank**(계수, 서로 독립인 행의 수)가 r을 넘지 못한다. 6장의 프로세스 번호 rank와는 이름만 같다.
#
# 6144 × 2048인 W에 r = 8로 붙이면 학습하는 수는 W의 몇 %일까? `None` 대신 숫자를 적고 실행한다.

# %%
trained_share = guess("8.1", None, "%")
trained_share

# %% [markdown] lang="ko"
# W의 원소 수와, A와 B를 합한 원소 수다.

# %%
out, into, r = 6144, 2048, 8
print(f"{out * into:,} -> {out * r + r * into:,}")
trained_share.against((out * r + r * into) / (out * into))

# %% [markdown] lang="ko"
# 0.5%다. r을 16, 64로 바꾸어 다시 실행해 보자. 비율은 r에 비례하고, W가 클수록 작아진다.
#
# > **주장 1.** "LoRA는 소수의 파라미터를 더해 그것만 학습한다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 다만 **더한다**는 말에 주의한다. 원래의 가중치는 하나도 사라지지 않는다. 줄어드는 것은 모델이 아니라 **학습할 것**이다.
#
# </details>
#
# ## 8.2 미세 조정의 변화량은 정말 rank가 낮을까
#
# 믿기 전에 재어 본다. 2층짜리 작은 GPT-NeoX(polyglot-ko와 같은 계열)를 준비했다. "프랑스의 수도는 파리이다."와 같은 문장 32개로 사전 학습한 모델이다. 거꾸로 물으면 무엇이라고 대답할까?

# %%
from helpers.chapters.c8_lora.fine_tuning import (
    FRANCE,
    PARIS,
    complete,
    fine_tune,
    known,
    pretrained_model,
    share_of_singular_values,
    updates,
    with_rank,
)  # fmt: skip

base = pretrained_model()
print(f"{count_parameters(base):,} parameters, {known(base, 'capital')}/32, {known(base, 'country')}/32")
print(complete(base, FRANCE), "/", complete(base, PARIS))

# %% [markdown] lang="ko"
# 수도는 모두 알지만, 거꾸로 물으면 하나도 모른다. 그래서 **새 과제**는 거꾸로 묻기다. "파리는 프랑스의 수도이다." 먼저 모든 파라미터를 학습하는 **전체 미세 조정**을 학습률 0.002로 한다.
# 출력은 학습하는 파라미터의 수, 새 과제와 옛 과제에서 맞힌 답의 수다.

# %%
full = fine_tune(pretrained_model(), "full", lr=2e-3)
print(f"{full.trainable:,}, {full.learned}/32, {full.kept}/32")
print(complete(full.model, PARIS))

# %% [markdown] lang="ko"
# 새 과제를 다 배웠다. 옛 과제는 다 잊었는데, 이것은 8.6절에서 다시 본다. 이제 선형층 하나(둘째 층의 `attention.dense`)에서 변화량 ΔW의 **특잇값**(singular value)을 구한다. 특잇값의 제곱을 큰 것부터 더해 갈 때 처음 k개가 전체의 얼마를 담는지 그린다.
# 회색은 같은 크기의 무작위 행렬이다. 두 선은 얼마나 벌어지는가?

# %%
change = updates(base, full.model)["gpt_neox.layers.1.attention.dense"]
share_of_singular_values(change)

# %% [markdown] lang="ko"
# 변화량은 무작위 행렬보다 앞쪽에 훨씬 몰려 있지만, 특잇값 몇 개로 끝나지도 않는다. 그렇다면 뒤쪽을 잘라 내면 모델이 망가질까? 선형층의 ΔW를 모두 **가장 가까운 rank r 행렬**로 바꾸어 넣고(임베딩, 정규화, 출력층의 변화는 그대로 둔다), 새 과제를 몇 개나 맞히는지 센다.

# %%
Table("rank, new task", [(r, known(with_rank(base, full.model, r), "country")) for r in (1, 2, 4, 8, 16, 64)])

# %% [markdown] lang="ko"
# 꽤 많은 부분을 버리고도 r = 4면 28개, r = 8이면 32개를 모두 맞힌다. LoRA는 이 관찰을 뒤집어, 처음부터 **rank r 안에서만** 찾는다.
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
# A는 무작위 값, B는 0에서 시작한다. 왜 하나만 0일까? 세 가지로 시작해 본다. B만 0인 것, 둘 다 0인 것, 둘 다 무작위인 것이다. 열은 처음 출력이 원래 층과 다른 정도, A의 그레이디언트 크기, B의 그레이디언트 크기다.

# %%
torch.manual_seed(0)
linear, x = nn.Linear(64, 64).double(), torch.randn(10, 64).double()
rows = []
for start in ("B = 0", "A = B = 0", "random"):
    layer = LoRALinear(linear)
    if start != "B = 0":
        nn.init.zeros_(layer.A) if "A" in start else nn.init.normal_(layer.B)
    layer(x).square().sum().backward()
    sizes = (layer(x) - linear(x)).norm(), layer.A.grad.norm(), layer.B.grad.norm()
    rows.append([start, *(f"{size:,.1f}" for size in sizes)])
Table("start, change of output, gradient of A, gradient of B", rows)

# %% [markdown] lang="ko"
# - B만 0이면 처음 출력은 원래 모델과 **똑같고**, B에 그레이디언트가 흐르므로 첫 스텝부터 움직인다. A는 B가 0을 벗어난 다음에 움직인다.
# - 둘 다 0이면 둘 다 그레이디언트가 0이라 영영 움직이지 않는다.
# - 둘 다 무작위면 학습을 시작하기도 전에 출력이 원래 모델과 달라진다.
#
# ### peft와 비교
#
# 실제로는 Hugging Face의 `peft`를 쓴다. 같은 층에 같은 A, B를 넣으면 출력과 그레이디언트도 같을까?

# %%
from peft import LoraConfig, get_peft_model

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
# 3장의 polyglot-ko-1.3b에 r = 8인 LoRA를 붙인다. 대상은 어텐션의 `query_key_value` 24개다. 가상 GPU이므로 가중치는 내려받지 않는다. 아래 줄은 학습하는 파라미터를 손으로 센 것이다. 위와 같은가?

# %%
from helpers import load_model_and_tokenizer

adapted, _ = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b", peft="lora", lora_rank=8)
trained, total = count_parameters(adapted, trainable_only=True), count_parameters(adapted)
print(f"{trained:,} / {total:,} ({trained / total:.3%})")
print(f"{24 * 8 * (2048 + 3 * 2048):,}")
del adapted

# %% [markdown] lang="ko"
# 13억 개 가운데 157만 개(**0.118%**), 천 개에 하나꼴로 학습한다. 손으로 센 값(층 24개 × r × (입력 2048 + 출력 6144))과도 같다.
#
# > **주장 2.** "파라미터의 1% 미만만 학습한다"
#
# rank와 대상을 바꾸면 얼마나 달라질까? `all-linear`는 출력층을 뺀 모든 선형층이다.

# %%
from helpers.chapters.c8_lora.lora import trainable_parameters

rows = []
for targets, rank in product(("attention", "all-linear"), (8, 64)):
    trained, total = trainable_parameters("polyglot-ko-1.3b", "lora", rank, targets)
    rows.append([targets, rank, f"{trained:,}", f"{trained / total:.3%}"])
Table("targets, rank, trainable, share", rows)

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** r = 8이라면 맞지만, 모든 선형층에 붙이고 r을 64로 올리면 3.6%가 된다. 1%는 LoRA의 성질이 아니라 **rank와 대상 층을 고른 결과**다.
#
# </details>
#
# **연습 8-1.** LoRA를 붙일 층들의 모양 `(out, in)`의 목록과 r을 받아, 학습하는 파라미터의 수를 돌려주는 함수를 완성하라. 막히면 `exercise("8-1").hint()`, 그래도 막히면 `exercise("8-1").solution()`을 실행한다.


# %%
def lora_parameters(shapes, r):
    return ...


exercise("8-1").check(lora_parameters)

# %% [markdown] lang="ko"
# ## 8.5 메모리는 어디에서 줄까
#
# 3장에서 메모리가 부족했던 바로 그 실험이다. 배치 크기 16, 길이 256으로 전체 미세 조정(`None`), LoRA, QLoRA를 차례로 실행한다. QLoRA는 얼려 둔 가중치를 4비트(NF4)로 저장한 LoRA다(8.9절). 셋 다 `autocast`는 쓰지 않는다. 전체 미세 조정에는 15.25 GiB가 필요하다. QLoRA는 몇 GiB일까?

# %%
qlora_16 = guess("8.5", None, "GiB")
qlora_16

# %% [markdown] lang="ko"
# 세 방법을 실행한다. 그레이디언트와 옵티마이저 상태의 열은 얼마나 줄었는가?

# %%
from helpers import gpu_memory_sweep

by_method = gpu_memory_sweep(batch_size=16, peft=[None, "lora", "qlora"])
by_method

# %% [markdown] lang="ko"
# 그레이디언트는 2.48 GiB에서 6 MiB로, 옵티마이저 상태는 4.96 GiB에서 12 MiB로 줄었다. 7 GiB가 넘던 것이 거의 사라졌다. 학습하는 파라미터가 0.118%이니 당연하다.
# (그레이디언트는 파라미터당 4바이트다. `peft`는 fp16 모델에서도 어댑터를 fp32로 두므로 3장에서 본 ε의 문제가 생기지 않는다.) QLoRA의 최대는 예상과 얼마나 다른가?

# %%
qlora_16.against(by_method[2].needed_bytes)

# %% [markdown] lang="ko"
# 무엇이 늘어서 그럴까? 그림에서 **줄지 않은 것**을 찾는다.

# %%
by_method.chart()

# %% [markdown] lang="ko"
# 분홍색, 곧 **순전파 상태**가 남았다. 최대가 된 순간의 것만 차례로 꺼낸다(전체 미세 조정은 한도가 없다고 치고 끝까지 간 값이다).

# %%
peaks = {peft: predict_memory(batch_size=16, peft=peft).at_peak for peft in (None, "lora", "qlora")}
Table("method, activations", [(peft, human_bytes(peak["activations"])) for peft, peak in peaks.items()])

# %% [markdown] lang="ko"
# LoRA의 순전파 상태는 전체 미세 조정보다 조금 작을 뿐이다. 어댑터가 층마다 있어 그레이디언트가 맨 아래층까지 내려가려면 중간 결과가 필요하다. 얼린 선형층의 입력만은 저장하지 않아도 되므로 그만큼 줄어든다.
#
# QLoRA는 **LoRA보다 더 많이 쓴다.** 파라미터는 절반 아래로 줄었는데 순전파 상태가 오히려 늘었다. 언제나 그런 것은 아니다. 까닭과, 그렇지 않게 하는 설정은 8.9절의 사건에서 직접 찾는다.
#
# 그렇다면 순전파 상태는 무엇으로 줄일까? 체크포인팅(5장)과 짧은 길이다. 둘을 LoRA에 더해 본다.

# %%
gpu_memory_sweep(batch_size=16, peft="lora", gradient_checkpointing=True, sequence_length=[256, 128])

# %% [markdown] lang="ko"
# 체크포인팅을 켜니 8.89 GiB에서 4.28 GiB로, 길이까지 반으로 줄이니 3.40 GiB로 줄었다. LoRA가 그레이디언트와 옵티마이저 상태를 없애고 나면 남는 것은 **얼린 가중치와 순전파 상태**다. 앞의 것은 QLoRA가, 뒤의 것은 체크포인팅이 맡는다.
#
# ## 8.6 정말 배우는가
#
# 작은 모델로 돌아간다. 8.2절의 새 과제를 이번에는 LoRA로 배운다. 모두 fp64로 계산해 CPU가 달라도 거의 같은 숫자가 나온다. 먼저 모델에 어댑터를 붙이는 함수다.


# %%
def with_lora(rank, model=None, **more):
    torch.manual_seed(1)
    config = LoraConfig(r=rank, **{"lora_alpha": 2 * rank, "target_modules": "all-linear", **more})
    return get_peft_model(model or pretrained_model(), config)


# %% [markdown] lang="ko"
# 모든 선형층에 r = 16으로 붙이고, 나머지는 전체 미세 조정과 똑같이 한다. 학습률도 그대로 0.002다. 전체 미세 조정은 32개를 모두 맞혔다. LoRA는 몇 개를 맞힐까?

# %%
at_the_same_rate = guess("8.6", None)
at_the_same_rate

# %% [markdown] lang="ko"
# 몇 초 걸린다.

# %%
same = fine_tune(with_lora(16), "LoRA r=16", lr=2e-3)
at_the_same_rate.against(same.learned)

# %% [markdown] lang="ko"
# 절반이다. rank 16이 모자란 것일까?
#
# ### 사건 8-A. 배우지 않는 LoRA
#
# Baichuan2-13B를 미세 조정하던 사람의 보고다. 전체 미세 조정을 하면 손실이 0.03까지 내려가는데, 같은 명령에서 LoRA를 켜면 1.2~1.5에서 오르내리기만 하고 결과도 좋지 않다. 학습률은 둘 다 2e-5다.
#
# 우리 모델에서도 비슷한 일이 일어난다. `rank`(α는 따라서 2r이 된다), `alpha`, `lr`을 바꾸어 다섯 번까지 실험할 수 있다. 실험 하나는 몇 초 걸리고, 아래 셀이 첫 번째다. rank를 네 배로 키우면 해결되는가?

# %%
case("8-A").run(rank=64)

# %% [markdown] lang="ko"
# 나아졌지만 파라미터를 네 배로 늘리고도 32개에 못 미친다. **하나만 바꾸어** 30개 이상 맞히게 하라. 답은 `{"alpha": …}`처럼 적는다. 힌트는 `case("8-A").hint()`.

# %%
changes = ...
case("8-A").check(changes)

# %% [markdown] lang="ko"
# ### 학습률은 따로 고른다
#
# rank와 학습률을 함께 바꾸어 모두 학습한다. 30초쯤 걸린다. 32개에 처음 닿는 학습률은 방법마다 얼마인가?

# %%
from helpers.chapters.c8_lora.runs import Rates, Runs

trained = {(16, 2e-3): same}
for rank, lr in [*product((4, 16), (1e-2, 2e-2)), (4, 2e-3)]:
    trained[rank, lr] = fine_tune(with_lora(rank), f"LoRA r={rank}", lr=lr)
more = [fine_tune(pretrained_model(), "full", lr=lr) for lr in (2e-4, 2e-2)]
rates = Rates([full, *more, *trained.values()])
rates.chart()

# %% [markdown] lang="ko"
# 줄(–)은 돌리지 않은 자리다.

# %%
rates

# %% [markdown] lang="ko"
# - 전체 미세 조정은 0.002면 32개를 모두 맞히고, LoRA r = 16은 **그 열 배인 0.02**에서야 모두 맞힌다. (전체 미세 조정은 0.02에서도 다 배웠다. 열 배는 가장 좋은 학습률의 비가 아니라, 돌려 본 자리 가운데 **32개에 처음 닿은 학습률**의 비다. 0.0002와 0.002 사이는 돌리지 않았다.)
# - 사건 8-A의 rank 64는 0.002에서 27개다. rank를 네 배로 키운 것보다 학습률을 다섯 배로 올린 것(31개)이 낫고, 파라미터는 늘지 않는다.
#
# 그렇다면 더 올려도 될까? r = 16을 0.05로 학습해 맞힌 수를 본다.

# %% tags=["nbval-ignore-output"]
fine_tune(with_lora(16), "LoRA r=16", lr=5e-2).learned

# %% [markdown] lang="ko"
# 32개를 맞히던 것이 절반쯤으로 도로 무너진다. 이렇게 무너지는 학습은 덧셈 순서가 바꾸는 마지막 자리에도 결과가 달라진다. 우리가 돌린 두 CPU에서는 15개와 18개였고, 여러분의 화면에서는 또 다를 수 있다. 학습률을 무작정 올릴 수는 없다.
#
# 어댑터의 학습률은 전체 미세 조정의 열 배쯤에서 찾기 시작한다. "LoRA Without Regret"(Thinking Machines, 2025)도 여러 크기의 모델에서 가장 좋은 학습률의 비율이 열 배쯤이라고 보고했다. 우리의 값은 작은 모델 하나에서 얻은 것이니 위아래로 더 훑는다.
#
# ### rank는 얼마나 필요할까
#
# 이제 학습률을 0.01에 두고 rank를 1, 4, 16으로 바꾼다(full은 8.2절의 0.002 그대로다). 4비트 가중치 위에서도(QLoRA) 학습한다. 저장은 bitsandbytes의 4비트 그대로이고 곱셈만 fp64다. 왼쪽은 손실(loss), 오른쪽은 맞힌 수다. 실선(새 과제)과 점선(옛 과제)은 어떻게 엇갈리는가?

# %%
from helpers.chapters.c8_lora.fine_tuning import quantized_model

runs = Runs([full, fine_tune(with_lora(1), "LoRA r=1"), trained[4, 1e-2], trained[16, 1e-2]])
runs.append(fine_tune(with_lora(16, quantized_model(base)).double(), "QLoRA r=16"))
runs.chart()

# %% [markdown] lang="ko"
# 같은 것을 표로 적는다.

# %%
runs

# %% [markdown] lang="ko"
# - **학습률이 같을 때 rank가 작으면 덜 배웠다.** 8개, 19개, 31개다. 서로 상관없는 사실 32개를 외우는 일이라 rank가 용량 노릇을 한다. 그런데 8.2절에서는 rank 4로 잘라도 28개를 맞히지 않았던가? 까닭은 8.7절에서 찾는다.
# - **이 과제에서 QLoRA는 LoRA와 같은 수를 배웠다.** 양자화 오차가 있어도 어댑터는 그 위에서 학습되기 때문이다. 한 번씩 돌린 결과다.
# - **이 과제에서는 어느 방법이나 거의 다 잊었다.** 점선이 곧바로 바닥으로 내려가고, 남은 것은 많아야 2개다.
#
# LoRA가 덜 잊는다는 보고가 있다(Biderman 외, 2024). 70억 모델에 코드와 수학을 가르친 결과다. 여기서는 옛 과제와 정면으로 부딪치는 문장을 가르치므로 그것을 시험하지 못한다.
#
# > **주장 3.** "전체 미세 조정과 거의 같은 성능" (출처: Hu 외, 2021)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 학습률을 0.02로 고른 r = 16은 전체 미세 조정과 같은 32개를 맞혔다. 학습률을 그대로 두면 절반이고, r = 4는 0.02에서도 27개다. rank, 대상 층, 학습률이 과제에 맞을 때의 말이다.
#
# </details>
#
# ### 어댑터를 끄면
#
# 잊는 것은 같아도 한 가지가 다르다. LoRA의 W는 그대로 있다. 어댑터를 끄고 옛 과제를 다시 물어보면?

# %%
adapted = runs[3].model
with adapted.disable_adapter():
    print(known(adapted, "capital"), complete(adapted, FRANCE))
print(known(adapted, "capital"), complete(adapted, FRANCE))

# %% [markdown] lang="ko"
# 끄면 32개가 모두 돌아온다. 전체 미세 조정에서는 원래 모델을 따로 저장해 두지 않았다면 되찾을 길이 없다.
#
# **어댑터를 끈 모델은 가중치를 한 벌 더 올리지 않고 얻는 기준 모델이다.** DPO나 GRPO는 학습하는 모델을 처음의 모델과 비교하는데, LoRA라면 어댑터를 끄고 한 번 더 계산하면 된다. TRL은 `ref_model` 없이 `peft_config`를 건네면 이렇게 한다([12장](12_two_models.ipynb) 12.3절).
#
# ## 8.7 무엇을 고를까: 대상 층과 α
#
# ### 어느 층에 붙일까
#
# 학습하는 파라미터의 수를 8,192개로 똑같이 두고, 어텐션의 `query_key_value`에만 r = 16으로 붙인 것과 모든 선형층에 r = 4로 붙인 것을 비교한다. 학습률은 0.01이다.

# %%
attention = fine_tune(with_lora(16, target_modules=["query_key_value"]), "query_key_value r=16")
Runs([attention, runs[2]])

# %% [markdown] lang="ko"
# 이 과제, 이 학습률에서는 거의 같다. 8.6절의 r = 16(모든 선형층)이 훨씬 나았던 것은 층을 잘 골라서라기보다 파라미터가 네 배인 덕이다.
# QLoRA 논문(Dettmers 외, 2023)은 모든 선형층에 붙여야 전체 미세 조정의 성능에 이른다고 보고했다.
#
# 이제 남겨 둔 물음이다. 8.2절에서는 선형층의 변화량을 rank 4로 잘라도 28개를 맞혔는데, 왜 r = 4인 LoRA는 19개일까? 절반의 답은 이미 나왔다. 8.6절의 표에서 학습률을 0.02로 올리면 r = 4도 27개다. 그러나 거기까지다. 8.2절에서는 임베딩과 **출력층**도 움직였고, LoRA에서는 얼어 있다. 학습률은 0.01 그대로 두고 출력층만 풀어 본다.
# `modules_to_save`에 적은 층은 어댑터 없이 통째로 학습하고 함께 저장한다. 출력층을 넣어 본다.

# %%
head = fine_tune(with_lora(4, modules_to_save=["lm_head"]), "LoRA r=4 + lm_head")
Runs([runs[2], runs[3], head])

# %% [markdown] lang="ko"
# rank는 4 그대로인데 32개를 모두 맞히고, 손실은 r = 16보다도 훨씬 낮다. 같은 학습률 0.01에서 손실이 내려가다 만 데에는 rank보다 **얼린 출력층**의 몫이 컸다. 내야 할 답이 사전 학습과 크게 달라지는 과제, 이를테면 새 토큰을 넣을 때에는 rank를 키우기 전에 무엇이 얼어 있는지부터 본다.
# 대가도 있다. 이 작은 모델에서는 출력층이 7,360개지만 polyglot-ko-1.3b에서는 6천만 개다(8.9절의 표).
#
# ### α와 r
#
# BA에는 α/r이 곱해진다. α를 고정하고 r을 키우면 곱하는 값이 그만큼 작아진다. rsLoRA(Kalajdzievski, 2023)는 r 대신 √r로 나눈다. α = 16일 때 `peft`가 곱하는 값을 비교한다.

# %%
rows = []
layer = "base_model.model.gpt_neox.layers.0.attention.dense"
for rank in (1, 4, 16, 64):
    pair = [with_lora(rank, lora_alpha=16, use_rslora=on) for on in (False, True)]
    rows.append([rank, *(model.get_submodule(layer).scaling["default"] for model in pair)])
Table("r, alpha / r, alpha / sqrt(r)", rows)

# %% [markdown] lang="ko"
# r = 64에서 여덟 배 차이가 난다. 결과도 달라질까? r = 64, α = 16으로 두 가지를 학습한다.

# %%
rank_64 = [
    fine_tune(with_lora(64, lora_alpha=16, use_rslora=on), f"{'rsLoRA' if on else 'LoRA'} r=64, alpha=16")
    for on in (False, True)
]
Runs([runs[3], *rank_64])

# %% [markdown] lang="ko"
# r을 네 배로 키운 LoRA가 r = 16(α = 32)보다 **덜** 배웠다. 곱하는 값 α/r이 2(32 / 16)에서 0.25(16 / 64)로 작아진 탓이고, √r로 나누어 도로 2로 만들면 모두 맞힌다. 학습률을 키우는 것과 비슷한 효과다. r을 키웠는데 나빠졌다면 rank가 아니라 α/r부터 의심한다. 이 장은 α = 2r로 두어 곱하는 값을 2로 고정했다.
#
# 변형은 많다. DoRA, PiSSA, LoftQ는 8.13절에서 잰다. 이 장은 학습률을 맞춘 기본 LoRA로 간다.
#
# ## 8.8 합치고, 떼고, 저장하기
#
# 학습이 끝나면 BA를 W에 더해 하나의 행렬로 만들 수 있다. 그러면 추론할 때 곱셈이 늘지 않는다.
#
# **연습 8-2.** W(out × in), A(r × in), B(out × r)와 α를 받아, 어댑터를 합친 가중치를 돌려주는 함수를 완성하라.


# %%
def merged_weight(W, A, B, alpha):
    return ...


exercise("8-2").check(merged_weight)

# %% [markdown] lang="ko"
# 합치기 전과 후의 출력은 얼마나 다를까? 다시 떼고 어댑터를 끄면 원래 모델의 출력이 나올까? 차이가 10⁻¹²보다 작으면 True다.

# %%
from helpers.chapters.c8_lora.fine_tuning import small_tokenizer
from helpers.chapters.c8_lora.lora import load_adapter, merge, unmerge

ids = small_tokenizer()("\n" + complete(full.model, PARIS), return_tensors="pt").input_ids
before = adapted(input_ids=ids).logits
merge(adapted)
print("merged:", torch.allclose(adapted(input_ids=ids).logits, before, rtol=0, atol=1e-12))
unmerge(adapted)
with adapted.disable_adapter():
    original = adapted(input_ids=ids).logits
print("unmerged:", torch.allclose(original, base(input_ids=ids).logits, rtol=0, atol=1e-12))

# %% [markdown] lang="ko"
# fp64의 반올림 오차 안에서 같다. 이제 저장한다. `save_pretrained`는 어댑터만 적는다. 원래 모델을 저장한 것과 크기를 비교한다.

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
# ### QLoRA의 어댑터는 어디에 합칠까
#
# QLoRA의 W는 4비트다. 합칠 곳이 셋 있다. 4비트인 채로 합치거나(더한 다음 다시 4비트로 반올림한다), 학습에 쓰지 않은 **원래의** 16비트 가중치에 합치거나, 4비트를 도로 푼(역양자화, dequantize) 가중치에 합친다. 세 경우에 출력이 학습한 모델과 얼마나 다른가?

# %%
import warnings

from helpers.chapters.c8_lora.fine_tuning import dequantized_model
from peft import PeftModel

qlora = runs[4].model
qlora.save_pretrained(folder / "qlora")
learned = qlora(input_ids=ids).logits

in_4_bits = copy.deepcopy(qlora).float()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    in_4_bits.merge_adapter()
print(caught[0].message)
print(f"4 bits {(in_4_bits(input_ids=ids).logits - learned).norm() / learned.norm():.1%}")

# %% [markdown] lang="ko"
# 이제 나머지 둘이다. 합친 것을 fp64 그대로, bf16으로, fp16으로 저장했을 때를 나란히 적는다.

# %%
for name, weights in {"original": pretrained_model(), "dequantized": dequantized_model(base)}.items():
    merged = PeftModel.from_pretrained(weights, folder / "qlora").merge_and_unload()
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        rounded = copy.deepcopy(merged).to(dtype).double()
        error = (rounded(input_ids=ids).logits - learned).norm() / learned.norm()
        print(f"{name:11} {dtype!s:15} {error:.2%}")

# %% [markdown] lang="ko"
# 4비트에 다시 합치면 5%쯤 어긋난다. `peft`도 경고한다. 배운 ΔW가 양자화 간격보다 잘아서 반올림에 묻히거나 튄다([peft #2321](https://github.com/huggingface/peft/issues/2321), [transformers #31293](https://github.com/huggingface/transformers/issues/31293)).
# 원래 가중치에 합쳐도 양자화 오차만큼 어긋난다. 어댑터는 **4비트를 푼 가중치** 위에서 배웠기 때문이다. 거기에 합치면 배운 그대로이고, 그다음 16비트로 반올림하는 오차는 bf16에서 0.3%, fp16에서 0.03%다.
#
# 실제로는 4비트로 불러온 모델에서 `model.dequantize()`를 부른 다음 어댑터를 올려 합친다.
#
# %% [markdown] lang="ko"
# ## 8.9 QLoRA: 얼린 가중치를 4비트로
#
# 얼린 가중치는 읽기만 한다. 그렇다면 16비트로 둘 까닭이 없다. QLoRA(Dettmers 외, 2023)는 이것을 2장의 **NF4와 이중 양자화**로 저장하고, 곱할 때마다 16비트로 되돌려 쓰고 버린다.
# polyglot-ko-1.3b의 파라미터가 무엇으로 저장되는지 종류별로 센다. 마지막 열은 파라미터 하나의 바이트다.

# %%
from helpers.chapters.c8_lora.lora import storage_table

in_4_bits, _ = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b", peft="qlora", quiet=True)
storage_table(in_4_bits)

# %% [markdown] lang="ko"
# 4비트 선형층은 파라미터 하나에 0.516바이트다. 코드가 0.5바이트, 2장에서 계산한 이중 양자화의 0.127비트가 0.016바이트다.
#
# 그런데 **4비트가 아닌 것**이 눈에 띈다. 임베딩과 출력층은 양자화하지 않고, `prepare_model_for_kbit_training`이 fp16이던 것을 모두 **fp32로 올린다**. 학습을 안정시키려는 것이지만, 이 모델에서는 파라미터의 9%인 임베딩과 출력층이 470 MiB나 되어, 4비트로 줄인 나머지 91%(594 MiB)의 8할에 이른다.
#
# ### 사건 8-B. 4비트로 줄였는데 더 쓴다
#
# 80억 모델(Ministral 8B)을 길이 4096, 배치 1로 학습하던 사람의 보고다. bf16 모델에 LoRA를 붙이면 72.8 GB, 4비트로 불러와 `prepare_model_for_kbit_training`을 부르면 81.1 GB, 부르지 않으면 63.1 GB다.
#
# 같은 모델도 같은 코드도 아니지만, Llama-3.1-8B를 배치 4, 길이 512로 A100-80GB에서 학습해도 LoRA보다 QLoRA가 더 쓴다. `peft`, `precision`, `gradient_checkpointing`, `lora_rank`, `optimizer`를 바꾸어 다섯 번까지 실험할 수 있다. `run`이 돌려주는 보고서의 `.needed_bytes`가 최대, `.at_peak`이 그때의 종류별 바이트다. 먼저 QLoRA와 LoRA를 나란히 놓는다. 무엇이 줄고 무엇이 늘었는가?

# %%
peaks = {peft: case("8-B").run(peft=peft) for peft in ("lora", "qlora")}
rows = [(kind, *(human_bytes(report.at_peak[kind]) for report in peaks.values())) for kind in peaks["lora"].at_peak]
Table("kind, LoRA, QLoRA", [*rows, ("peak", *(human_bytes(report.needed_bytes) for report in peaks.values()))])

# %% [markdown] lang="ko"
# 실험은 세 번 남았다. QLoRA인 채로 **설정 하나만 바꾸어, 재계산 없이** LoRA보다 적게 쓰게 하라. `precision`의 값은 `"auto"`, `"autocast_bf16"`, `"autocast_fp16"`이다. 힌트는 `case("8-B").hint()`.

# %%
changes = ...
case("8-B").check(changes)

# %% [markdown] lang="ko"
# 8.5절에서 순전파 상태가 늘어난 것도 같은 까닭이다. 임베딩이 fp32를 내놓으니 층 사이를 흐르는 값이 모두 fp32가 되고, 크기도 두 배가 된다. 정말 그런지는 `autocast`를 켜서 어텐션과 어댑터에 들어가는 값을 16비트로 바꾸어 보면 안다. (4비트 층의 출력은 그대로 fp32다. bitsandbytes의 `Linear4bit`가 출력을 입력의 자료형으로 되돌리기 때문이다.)
# polyglot-ko-1.3b에서 LoRA와 QLoRA의 최대 메모리를, `autocast`를 끄고(`auto`) 켜고(`autocast_fp16`) 비교한다. `Trainer`로 학습한다면 대개 뒤의 것이다. QLoRA가 LoRA보다 많이 쓰는 줄과, 절반 이하로 쓰는 줄은 어느 것인가?

# %%
rows = []
for checkpointing, batch, precision in product((False, True), (1, 16), ("auto", "autocast_fp16")):
    setting = {"batch_size": batch, "gradient_checkpointing": checkpointing, "precision": precision}
    lora, qlora = (predict_memory(**setting, peft=peft).needed_bytes for peft in ("lora", "qlora"))
    rows.append([checkpointing, batch, precision, human_bytes(lora), human_bytes(qlora), f"{qlora / lora:.0%}"])
Table("checkpointing, batch, precision, LoRA, QLoRA, QLoRA / LoRA", rows)

# %% [markdown] lang="ko"
# 체크포인팅 없는 배치 16에서 `autocast`를 켜니 130%가 86%가 되었다. LoRA는 층 정규화의 입력을 fp32로 바꾸어 들고 있어 8.89 GiB에서 9.62 GiB로 오히려 늘었다. 체크포인팅을 켜면 LoRA는 거의 같고, QLoRA는 0.1 GiB쯤 늘어 배치 1의 46%가 51%가 된다. 체크포인팅 없이 QLoRA를 쓴다면 혼합 정밀도를 함께 켜야 한다. 체크포인팅을 켰다면 메모리로는 얻는 것이 없고 조금 잃는다.
#
# 같은 비교를 80억 파라미터 모델로 한다. 체크포인팅과 `autocast`를 켰고, T4에 들어가지 않아도 끝까지 세었다.

# %%
rows = []
for batch in (1, 16):
    setting = {"model_id": "Llama-3.1-8B", "gradient_checkpointing": True, "precision": "autocast_fp16"}
    lora, qlora = (predict_memory(batch_size=batch, **setting, peft=peft).needed_bytes for peft in ("lora", "qlora"))
    rows.append([batch, human_bytes(lora), human_bytes(qlora), f"{qlora / lora:.0%}"])
Table("batch, LoRA, QLoRA, QLoRA / LoRA", rows)

# %% [markdown] lang="ko"
# > **주장 4.** "QLoRA는 메모리를 절반 이하로"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** **가중치**만 보면 맞다(2.49 → 1.05 GiB). 최대 메모리로는 위의 열 경우 가운데 절반 이하가 된 것이 하나(`autocast`를 끄고 체크포인팅을 켠 배치 1)뿐이고, `autocast`와 체크포인팅 없는 배치 16에서는 오히려 **늘었다**.
# 작은 배치와 체크포인팅으로 순전파 상태부터 줄여 놓아야 4비트의 효과가 드러난다. Llama-3.1-8B도 57%에 그친다. 어휘가 커서 fp32가 된 임베딩과 출력층이 크기 때문이다.
#
# </details>
#
# **연습 8-3.** Llama-3.1-8B를 배치 4, 길이 512로 T4에서 학습하려 한다. 파라미터를 2천만 개 이상 학습하면서 T4에 들어가는 설정을 찾아라.
# 바꿀 수 있는 것은 `peft`, `lora_rank`, `lora_targets`, `gradient_checkpointing`, `optimizer`다. 예를 들면 `{"peft": "lora", "lora_rank": 16}`처럼 쓴다.

# %%
changes = ...
exercise("8-3").check(changes)

# %% [markdown] lang="ko"
# ## 8.10 T4에서 바로 돌리는 프로그램
#
# 이 장에서 고른 것을 파일 하나(`examples/qlora_t4.py`)에 모았다. 이 강의와 상관없이 그대로 쓸 수 있다. 계산 자료형, 체크포인팅의 `use_reentrant`, 학습률, 대상 층이 보이는가?

# %%
from helpers.chapters.c8_lora.recipe import RECIPE, rehearse, train_small, write_text

print(RECIPE.read_text())

# %% [markdown] lang="ko"
# T4라면 이 파일을 가져다 이렇게 실행한다. CUDA용 PyTorch가 있는 곳에서 `pip install transformers peft accelerate datasets bitsandbytes`를 먼저 한다(Colab에는 bitsandbytes가 들어 있지 않다). 가중치 몇 GB를 내려받는다.
#
# ```sh
# python qlora_t4.py --model Qwen/Qwen3-4B --text my_text.txt
# ```
#
# - 자료형은 카드에 묻는다. 계산 능력 8.0(암페어, Ampere)부터 bf16, T4(7.5)에서는 fp16이다. `fp16=True`면 `Trainer`가 손실 스케일링을 켠다.
# - `bnb_4bit_compute_dtype`은 4비트를 풀어 곱할 자료형이다. 적지 않으면 fp32라 GPU의 16비트 행렬 연산 장치(텐서 코어)를 쓰지 못한다.
# - 페이지 옵티마이저(8.13절)는 쓰지 않았다. 8.5절에서 보았듯이 어댑터의 상태는 작다.
# - 학습률 2e-4는 QLoRA 논문이 130억 모델까지 쓴 값이다. 8.6절처럼 몇 배씩 바꾸어 보고 고른다.
#
# 정말 배우는 프로그램일까? 작은 모델의 폴더를 주고 파일은 **고치지 않은 그대로** 실행한다. 명령의 값만 작은 모델에 맞춘다(`--length 24 --batch 16 --accumulate 2 --steps 40 --lr 1e-2`). 그러니 이것은 프로그램이 배우는지를 보는 것이지, 학습률 2e-4가 좋은지를 보는 것이 아니다. 짧게 대답하는 문장 32개를 가르친다. GPU가 없으면 CPU에서 fp32로 돌고, 4비트는 진짜 bitsandbytes다. 32개 가운데 몇 개를 맞히게 되는가?

# %% tags=["nbval-skip"]
text = write_text(folder)
adapter = train_small(folder, text)
again = PeftModel.from_pretrained(pretrained_model().float(), adapter)
print(sorted(path.name for path in adapter.iterdir()))
print(known(again, "short"), complete(again, FRANCE))

# %% [markdown] lang="ko"
# 모두 배웠다(CPU에 따라 한둘을 틀리기도 한다). 폴더에는 어댑터와 설정, 그리고 peft가 쓴 설명 파일이 있다. 이번에는 같은 파일을 **가상 T4**에서, polyglot-ko-1.3b와 길이 512로, 누적 없이(`--accumulate 1`) 두 스텝 실행한다. `virtual-gpu run --gpu T4 qlora_t4.py …`가 하는 일이다. 무엇이 가장 많은가?

# %% tags=["nbval-skip"]
report = rehearse("polyglot-ko-1.3b", "T4", folder, text)
print(report["status"], human_bytes(report["allocated"]), human_bytes(report["reserved"]))
Table("kind, at the peak", [(kind, human_bytes(size)) for kind, size in report["at_peak"].items()])

# %% [markdown] lang="ko"
# 파라미터가 1.09 GiB로 가장 많고, 모두 합쳐도 T4의 9분의 1이다. 더 큰 모델은 얼마나 들까? 위의 실행처럼 누적 없이 예측한다. 프로그램의 기본값대로 누적하면 어댑터의 그레이디언트만큼 조금 더 든다. Qwen과 Llama는 그룹 쿼리 모델이라 T4에서 math 어텐션으로 계산하는 것까지 셈에 들어 있다(3장).

# %%
recipe = {"peft": "qlora", "lora_rank": 16, "lora_targets": "all-linear", "lora_dropout": 0.0}
recipe |= {"gradient_checkpointing": True, "precision": "autocast_fp16", "optimizer": "adamw_fused"}
rows = []
for name in ("polyglot-ko-1.3b", "Qwen3-4B", "Llama-3.1-8B"):
    found = predict_memory(batch_size=1, sequence_length=512, model_id=name, **recipe)
    rows.append([name, human_bytes(found.needed_bytes), found.fits])
Table("model, peak, fits a T4", rows)

# %% [markdown] lang="ko"
# 1.3b의 예측은 프로그램을 통째로 실행해 센 값과 소수 둘째 자리까지 같다(1.59 GiB). 세 모델 모두 T4에 들어간다. 시간은 재지 않았다.
#
# ## 8.11 직접 바꿔 보기
#
# 설정을 바꾸면 학습하는 파라미터의 수와 메모리를 바로 예측해 그린다. 아래 그림은 처음 모습이다.
#
# ![polyglot-ko-1.3b를 배치 16, LoRA로 학습할 때의 메모리. 최대 8.89 GiB로 T4의 한도 14.64 GiB 안에 들어간다.](../../image/08_lora_batch_16_on_a_t4.svg)
#
# 이렇게 해 보자.
#
# - 방법을 QLoRA로 바꾼다. 파란색이 주는데 최대는 왜 늘어날까? 그 상태에서 체크포인팅을 켠다.
# - 모든 선형층에 붙이고 rank를 8에서 512까지 올린다. 어디서부터 메모리가 눈에 띄게 늘어나는가?
# - 모델을 Llama-3.1-8B로 바꾸고 T4에 들어가게 해 본다.

# %%
from helpers import lora_panel

lora_panel()

# %% [markdown] lang="ko"
# ## 8.12 기억할 것
#
# | | 전체 미세 조정 | LoRA | QLoRA |
# |---|---|---|---|
# | 가중치 | N(모든 파라미터의 바이트, 3장) | N + 어댑터 | 선형층은 파라미터당 0.516바이트, 나머지는 fp32 |
# | 그레이디언트, 옵티마이저 상태 | 3N(AdamW) | 어댑터만큼 | 어댑터만큼 |
# | 순전파 상태 | 그대로 | 거의 그대로 | `autocast` 없이는 늘어난다(fp32로 흐른다) |
# | 학습률 | 기준 | 열 배쯤에서 찾기 시작한다 | LoRA와 같다 |
# | 저장하는 것 | 모델 전체 | 어댑터 | 어댑터 |
# | 합칠 곳 | – | 원래 가중치 | 4비트를 푼 16비트 가중치 |
# | 원래 모델로 돌아가기 | 따로 저장해 두어야 | 어댑터를 끄면 된다 | 어댑터를 끄면 된다 |
#
# - 학습하는 파라미터는 **r × (in + out)을 붙인 층만큼** 더한 것이다.
# - LoRA 다음에 줄일 것은 **얼린 가중치**와 **순전파 상태**다. 앞의 것은 QLoRA가, 뒤의 것은 체크포인팅이 줄인다. 함께 쓴다.
# - 배우지 않는다면 **학습률, α/r, 얼린 출력층, 체크포인팅의 `use_reentrant`**(8.13절) 차례로 확인한다. rank는 그다음이다.
# - QLoRA가 LoRA보다 많이 쓴다면 **fp32로 올라간 것**을 의심한다.
#
# 내 예상은 얼마나 맞았을까?

# %%
guesses()

# %% [markdown] lang="ko"
# 이제 누적, 체크포인팅, 여러 GPU, LoRA, 4비트까지 도구가 모두 모였다. 내 모델과 내 GPU라면 무엇을 골라야 할까? [9장](09_fit_your_gpu.ipynb)에서 답한다.

# %% [markdown] lang="ko"
# ## 8.13 더 읽을거리
#
# 아홉 가지다. 들어가는 가장 큰 모델, 체크포인팅 때문에 배우지 않는 어댑터, 8비트로 불러와도 줄지 않는 메모리, 학습한 어댑터의 그림, DoRA의 메모리, PiSSA와 LoftQ, 어댑터 갈아 끼우기, 두 번 합치기, 페이지 옵티마이저. 필요한 것만 읽는다.
#
# ### 내 GPU에 들어가는 가장 큰 모델
#
# 이 강의에 들어 있는 모델을 큰 것부터 차례로 예측해, GPU마다 방법마다 들어가는 가장 큰 것을 찾는다. 배치 1, 길이 512, 체크포인팅, 융합 AdamW이고, 가중치는 저장된 자료형(16비트) 그대로다. T4 하나에서 QLoRA로 다룰 수 있는 가장 큰 모델의 파라미터는 몇 B일까? (1 B는 10억 개다.)

# %%
largest_on_t4 = guess("8.13", None, "B")
largest_on_t4

# %% [markdown] lang="ko"
# Colab에서 고를 수 있는 T4, L4, A100-80GB에 들어가는 모델을 찾는다. 칸에는 파라미터의 수와 최대 메모리가 있다. 이 장에서 가장 오래 걸리는 셀이다.

# %%
from helpers.chapters.c8_lora.tables import largest_models

largest = largest_models(
    "T4", "L4", "A100-80GB", sequence_length=512, gradient_checkpointing=True, optimizer="adamw_fused"
)
largest

# %% [markdown] lang="ko"
# T4의 QLoRA 칸을 예상과 비교한다.

# %%
largest_on_t4.against(largest.found["T4"][2][1] / 1e9)

# %% [markdown] lang="ko"
# 같은 GPU에서 LoRA는 전체 미세 조정보다 네 배에서 다섯 배 가까이(A100에서는 3.9배), QLoRA는 여덟 배에서 열네 배까지 큰 모델을 다룬다. 목록에 있는 모델만 보았다. A100의 QLoRA 칸은 45.48 GiB만 쓰니, 목록에 알맞은 모델이 있었다면 더 컸을 것이다.
#
# 표를 읽을 때 넷을 조심한다.
#
# - **T4의 전체 미세 조정 칸은 들어가는 크기이지 학습되는 크기가 아니다.** T4에는 bf16 연산 장치가 없어 fp16을 써야 한다(1장). 순수 fp16이면 이 표의 융합 AdamW는 끝까지 가지만, 상태가 fp16에 저장되어 학습률이 뜻대로 듣지 않는다(융합하지 않으면 첫 스텝에서 무너진다, 3.16절). 혼합 정밀도로 바꾸면 가중치, 그레이디언트, 옵티마이저 상태가 모두 두 배로 든다(3.8절). LoRA와 QLoRA의 어댑터는 fp32라 이 문제가 없다.
# - **불러올 때 드는 CPU 메모리는 세지 않았다.** 무료 Colab의 CPU 메모리는 12.67 GiB다(화면에는 12.7 GB). 148억 모델의 16비트 가중치 파일은 그 두 배가 넘는다. 디스크와 CPU 메모리가 먼저 모자랄 수 있다.
# - **Qwen3.5는 층 넷 가운데 셋이 선형 어텐션이다**([모델 카드](https://huggingface.co/Qwen/Qwen3.5-9B). 토큰끼리 모두 견주는 대신 크기가 고정된 상태를 토큰마다 갱신한다). 여기서는 그 층을 transformers의 PyTorch 구현으로 셌다. flash-linear-attention을 설치하면 다른 커널이 돌아 순전파 상태가 달라진다. 어댑터가 붙는 `q_proj`와 `v_proj`도 나머지 한 층에만 있다. 이름에 35B-A3B가 붙은 모델은 전문가 혼합(MoE, 7장)이다. 토큰 하나가 쓰는 파라미터는 3B쯤이지만 카드에는 35B를 모두 둔다.
# - 최대가 한도에 바짝 붙은 칸에는 여유가 없다. 더구나 표는 `autocast` 없이 센 것이다. `Trainer`처럼 fp16 혼합 정밀도로 학습하면 출력층의 fp16 사본이 더 생긴다. T4에 꽉 찬 Qwen3-14B의 QLoRA를 셋으로 세어 본다. 마지막은 손실을 나누어 계산한다(9.12절).

# %%
more = {"table": {}, "autocast": {"precision": "autocast_fp16"}}
more["autocast, loss in tiles"] = {"precision": "autocast_fp16", "fused_lm_head": True}
rows = []
for name, settings in more.items():
    qlora = {"peft": "qlora", "gradient_checkpointing": True, "optimizer": "adamw_fused"} | settings
    found = predict_memory(batch_size=1, sequence_length=512, model_id="Qwen/Qwen3-14B", gpu="T4", **qlora)
    rows.append([name, human_bytes(found.needed_bytes), found.fits])
Table("Qwen3-14B on a T4, peak, fits", rows)

# %% [markdown] lang="ko"
# 칸에 있던 모델이 혼합 정밀도에서는 넘치고, 손실을 나누면 다시 들어간다. 어휘가 큰 모델일수록 차이가 크다. (9.12절에는 같은 모델이 조금 더 크게 나온다. 여기는 텐서의 최대이고, 거기는 할당자가 못 쓰는 자리와 누적까지 센 필요한 메모리다.)
#
# > **주장 5.** "LLM을 GPU 하나로 전체 미세 조정하기는 어려워졌다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 어느 모델, 어느 GPU냐에 달렸다. 17억 모델은 T4 하나에 들어가지만 순수 fp16이라 제대로 배우지 못하고, 90억 모델은 순수 bf16으로 A100-80GB 하나에 들어간다(67 GiB. 3.8절의 혼합 정밀도라면 두 배쯤 들어 들어가지 않는다). 700억급(Qwen2.5-72B)은 전체 미세 조정의 어느 칸에도 없고, A100-80GB의 QLoRA 칸에만 있다.
#
# </details>
#
# ### 체크포인팅을 켰더니 배우지 않는다
#
# 배우지 않는 까닭이 하나 더 있다. 체크포인팅의 옛 구현(`use_reentrant=True`)은 블록의 입력이 `requires_grad=True`일 때에만 역전파한다(5.5절). LoRA에서는 임베딩이 얼어 있으니 첫 블록의 입력은 `requires_grad=False`다.
# `enable_input_require_grads()`는 임베딩의 출력에 `requires_grad`를 켠다. 끄고 켤 때, 학습할 텐서 가운데 그레이디언트를 받은 것의 수는 어떻게 다른가? 출력층도 함께 학습하게 했다.

# %%
from helpers.chapters.c8_lora.lora import reached

rows = [(on, *reached(with_lora(4, modules_to_save=["lm_head"]), ids, input_grads=on)) for on in (False, True)]
Table("enable_input_require_grads, reached, trainable, warning", rows)

# %% [markdown] lang="ko"
# 끄면 출력층 하나만 그레이디언트를 받고 **어댑터의 텐서 16개는 하나도 받지 못한다.** 오류가 아니라 경고 한 줄이다. 출력층은 배우므로 손실이 조금 내려가 알아채기 어렵고, 어댑터의 B는 처음의 0 그대로 저장된다([open-unlearning #178](https://github.com/locuslab/open-unlearning/issues/178)이 이렇게 발견했다). 출력층까지 얼렸다면 학습할 것이 없어 `element 0 of tensors does not require grad` 오류가 난다([peft #137](https://github.com/huggingface/peft/issues/137)).
#
# transformers 5.23은 체크포인팅을 켤 때 이것도 함께 켠다(`modeling_utils.py`). 그래서 위에서는 일부러 껐다. 체크포인팅을 직접 부르거나 버전이 다르면 빠질 수 있다. `use_reentrant=False`를 적으면 이 문제 자체가 없다. (8비트 가중치만은 예외다. 바로 아래에서 본다.)
#
# ### 8비트로 불러왔는데 줄지 않는다
#
# `BitsAndBytesConfig(load_in_8bit=True)`로 불러오면 선형층의 가중치는 int8, 곧 파라미터 하나에 한 바이트다(2장의 LLM.int8). Llama-3.1-8B에 어댑터를 붙여 T4에서 배치 1, 길이 1024로, 체크포인팅과 `autocast`를 켜고 학습한다. 가중치는 16비트보다 몇 GiB 적을 텐데, 최대도 그만큼 줄까? `reentrant`라고 적은 줄은 체크포인팅만 옛 구현(`use_reentrant=True`)으로 바꾼 것이다.

# %%
ways = {"16 bits": {"peft": "lora"}, "8 bits": {"peft": "lora", "load_in_8bit": True}, "4 bits": {"peft": "qlora"}}
setting = {"model_id": "Llama-3.1-8B", "precision": "autocast_fp16", "gradient_checkpointing": True, "gpu": "T4"}
setting |= {"batch_size": 1, "sequence_length": 1024, "lora_targets": "all-linear"}
rows = []
for (name, way), reentrant in product(ways.items(), (False, True)):
    found = predict_memory(**setting, **way, use_reentrant=reentrant)
    sizes = [found.parameters_bytes, found.needed_bytes, found.needed_bytes - found.parameters_bytes]
    rows.append([name, "reentrant" if reentrant else "", *map(human_bytes, sizes), found.fits])
Table("weights, checkpointing, parameters, peak, the rest, fits", rows)

# %% [markdown] lang="ko"
# 8비트에서 가중치는 15.04 GiB에서 10.50 GiB로 줄었다. 절반이 아닌 것은 8.9절처럼 임베딩과 출력층을 fp32로 올렸기 때문이다. 그런데 최대는 0.3 GiB만 줄었다. 가중치 말고 나머지가 1.91 GiB에서 6.14 GiB로 늘었다는 뜻이다. 그 가운데 1.2 GiB쯤은 4비트에서도 똑같이 늘고, 나머지 3 GiB가 8비트만의 것이다.
#
# 얼린 선형층은 입력을 저장하지 않아도 된다(8.5절). 그런데 bitsandbytes의 8비트 곱셈(`MatMul8bitLt`)은 입력을 들고 있다. 그것도 PyTorch가 아는 방법(`ctx.save_for_backward`, 3장)으로 저장하지 않고 `ctx.tensors`라는 파이썬 속성에 담아 둔다. 체크포인팅의 새 구현은 `save_for_backward`로 저장한 것만 버릴 수 있으므로, **8비트 선형층마다 입력이 역전파까지 남는다.** 옛 구현은 첫 순전파를 `no_grad`로 하므로 `ctx`가 남지 않고 입력도 함께 사라진다. 최대가 3 GiB 줄어 T4의 한도(14.64 GiB) 안에 들어간다. 바로 위와도, 5.5절과도 반대로 여기서는 `use_reentrant=True`가 답이다. 16비트와 4비트는 어느 구현이든 같다.
#
# - transformers 5의 `Trainer`와 TRL은 새 구현이 기본값이다. `TrainingArguments`(TRL은 `SFTConfig`)에 `gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}`를 적는다. axolotl과 LLaMA-Factory의 SFT는 적지 않으면 옛 구현이다.
# - 내 루프에서는 `model.gradient_checkpointing_enable({"use_reentrant": True})` 다음에 `model.enable_input_require_grads()`를 부른다. transformers 5.23은 앞의 줄에서 뒤의 것까지 켜지만, 다른 버전이라면 빠질 수 있다.
# - 4비트가 3 GiB 넘게 덜 드니, 꼭 8비트여야 하는 것이 아니면 4비트를 쓴다.
# - 입력이 남는다는 것은 bitsandbytes 0.50.2의 `MatMul8bitLt`를 CPU에서 실행해도 보인다. 체크포인팅 없는 8비트 LoRA는 polyglot-ko-1.3b에서 예측한 최대가 H100에서 잰 값과 0.01% 안에서 같았다. 체크포인팅을 켠 위의 표는 예측이고, 실제 GPU에서는 재지 못했다.
#
# ### 학습한 어댑터를 들여다보면
#
# r = 4인 모델의 첫 층 `dense`에서 W의 왼쪽 위 12 × 12와, 거기에 더해지는 B와 A다. 색은 부호, 짙기는 크기다. W와 W + BA를 견주면 어느 칸이 달라졌는가?

# %%
from helpers.chapters.c8_lora.fine_tuning import picture_of_update

picture_of_update(runs[2].model.get_submodule(layer))

# %% [markdown] lang="ko"
# 짙은 칸은 대개 그대로이고, 옅은 칸 가운데 부호까지 바뀐 것이 여럿이다. 144칸을 하나하나 고친 것처럼 보이지만, 더해진 행은 모두 A의 네 행을 섞어 만든 것이다. 배운 수는 12 × 4 + 4 × 12 = 96개뿐이고, 행렬이 클수록 144와 96 같은 차이가 더 벌어진다.
#
# ### DoRA는 메모리를 얼마나 더 쓸까
#
# DoRA(Liu 외, 2024)는 가중치를 방향과 크기로 나누어 방향만 LoRA로 배우고, 출력 하나마다 크기를 하나씩 더 배운다. `use_dora=True`만 적으면 된다.
# 파라미터는 붙인 층의 출력 수만큼만 늘어난다. polyglot-ko-1.3b의 `query_key_value` 24개라면 147,456개, 전체의 0.01%다. 그렇다면 메모리도 조금만 늘까? 배치 8로, 순전파가 끝난 뒤의 순전파 상태를 센다. 드롭아웃(dropout)은 `peft`의 기본값 0과, 이 강의가 써 온 0.05다.

# %%
from helpers import make_dummy_dataset
from virtual_gpu.models.adapters import add_adapters

dataset, rows = make_dummy_dataset(), []
for dora, dropout in product((False, True), (0.0, 0.05)):
    model, _ = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b", quiet=True)
    model = add_adapters(model, 8, use_dora=dora, lora_dropout=dropout)
    batch, held = gpu.place(dataset[:8]), gpu.memory_allocated()
    with gpu:
        loss = model.train()(**batch, use_cache=False).loss
    count = f"{count_parameters(model, trainable_only=True):,}"
    rows.append(["DoRA" if dora else "LoRA", dropout, count, human_bytes(gpu.memory_allocated() - held)])
    del model, loss
Table("method, dropout, trainable, activations", rows)

# %% [markdown] lang="ko"
# 드롭아웃 없이도 2.66 GiB에서 4.34 GiB로, 드롭아웃을 켜면 2.74 GiB에서 6.07 GiB로 늘었다. `peft`의 DoRA(`tuners/lora/dora.py`)는 BA를 W와 같은 크기로 펼쳐 크기를 구하고, 출력 크기의 중간값도 더 저장한다. 드롭아웃이 있으면 W의 곱셈까지 한 번 더 한다. 학습하는 파라미터가 적다는 말은 메모리를 두고 한 말이 아니다. DoRA로 학습한 결과가 더 나은지는 이 장에서 재지 않았다.
#
# ### 시작점을 바꾸는 변형: PiSSA와 LoftQ
#
# LoRA는 BA = 0에서 시작한다. QLoRA라면 그 시작점은 이미 **양자화 오차만큼 원래 모델에서 어긋나 있다.** 두 변형은 A와 B의 시작값으로 이 오차를 줄인다.
#
# - **LoftQ**(Li 외, 2023): 4비트로 줄이며 생긴 오차 W − Q에 가장 가까운 rank r 행렬을 BA로 삼는다.
# - **PiSSA**(Meng 외, 2024): W에서 특잇값이 큰 r개를 BA로 떼어 내고, **남은 것**을 4비트로 줄인다(QPiSSA).
#
# 작은 모델의 한 층(256 × 64)과, 무작위 값으로 채운 512 × 512 행렬에서 시작할 때의 상대 오차를 잰다. r = 16이다.

# %%
from helpers.chapters.c8_lora.fine_tuning import nf4


def nearest(W, r=16):
    u, s, v = torch.linalg.svd(W, full_matrices=False)
    return u[:, :r] * s[:r] @ v[:r]


rows = []
for W in (base.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.detach(), torch.randn(512, 512).double()):
    starts = nf4(W), nf4(W) + nearest(W - nf4(W)), nearest(W) + nf4(W - nearest(W))
    rows.append([tuple(W.shape), *(f"{(start - W).norm() / W.norm():.1%}" for start in starts)])
Table("W, QLoRA, LoftQ, QPiSSA", rows)

# %% [markdown] lang="ko"
# 너비 64에서 rank 16은 4분의 1이나 되므로 오차가 눈에 띄게 준다. 너비 512에서는 9.2%가 8.7%가 될 뿐이다. 다만 첫째는 학습한 가중치이고 둘째는 특잇값에 큰 차이가 없는 무작위 행렬이라, 너비만의 차이는 아니다. 큰 모델에서 이득은 rank와 W의 모양에 달렸다. 두 논문은 학습이 더 빨리, 더 낮게 수렴한다고 보고했고, 이 장에서는 시작할 때의 오차만 쟀다.
#
# | 변형 | 무엇을 바꾸나 | 학습할 때의 메모리 | `peft`에서 | 언제, 무엇에 주의 |
# |---|---|---|---|---|
# | LoRA | A는 무작위, B는 0 | 기준 | 기본값 | 여기서 시작한다 |
# | rsLoRA | α/√r을 곱한다 | 같다 | `use_rslora=True` | rank를 크게 잡을 때 |
# | LoRA+ | B의 학습률을 A보다 크게 | 같다 | `create_loraplus_optimizer` | 학습률을 하나 더 골라야 한다 |
# | PiSSA | BA는 W의 큰 특잇값 r개, W에는 나머지 | 같다(시작할 때 SVD) | `init_lora_weights="pissa"`, 빠른 근사는 `"pissa_niter_16"` | W가 바뀌므로 어댑터만 저장하면 원래 모델에 맞지 않는다. `path_initial_model_for_weight_conversion`으로 바꾸어 저장한다 |
# | LoftQ | BA는 양자화 오차의 근사 | 같다 | `init_lora_weights="loftq"`, 4비트 모델에는 `replace_lora_weights_loftq` | 2~4비트. `peft` 0.21.2의 `loftq_init`은 CUDA나 XPU가 있어야 하고, α/r로 나누지 않으므로 α = r이라야 오차가 준다 |
# | DoRA | 크기를 따로 배운다 | **순전파 상태가 는다** | `use_dora=True` | 드롭아웃을 0으로 둔다 |
#
# ### 갈아 끼우기
#
# 짧게 대답하는("프랑스의 수도는 파리.") 어댑터를 하나 더 학습해 저장하고, 한 모델에 둘을 올려 갈아 끼운다. 어댑터마다 파리와 프랑스에 무엇이라고 대답하는가?

# %%
short = fine_tune(with_lora(4), "short", task="short", steps=40)
short.model.save_pretrained(folder / "short")
one = PeftModel.from_pretrained(pretrained_model(), folder / "country", adapter_name="country")
load_adapter(one, folder / "short", "short")
for name in ("country", "short"):
    one.set_adapter(name)
    print(f"{name:8} {complete(one, PARIS)} / {complete(one, FRANCE)}")

# %% [markdown] lang="ko"
# `country`의 왼쪽과 `short`의 오른쪽이 각자 배운 것이다. 나머지 둘이 엉터리인 것은 고장이 아니다. 어댑터마다 **한 방향으로만** 학습했으니 반대 방향은 배운 적이 없다.
#
# 어댑터는 **그것을 학습한 모델에만** 맞는다. 모양이 다른 모델에 올리면 `load_adapter`가 막는다. (모양까지 같은 다른 모델은 가려낼 수 없으니, 어느 모델의 어댑터인지 적어 둔다.) 너비가 다른 모델에 올려 본다.

# %% tags=["raises-exception"]
other = with_lora(4, pretrained_model(width=32))
load_adapter(other, folder / "country", "country")

# %% [markdown] lang="ko"
# ### 두 번 합치면
#
# 같은 어댑터를 두 번 합치면 BA가 두 번 더해진다. `merge`는 이를 막는다. 다음 오류 메시지는 무엇을 하라고 하는가?

# %% tags=["raises-exception"]
twice = copy.deepcopy(runs[2].model)
merge(twice)
merge(twice)

# %% [markdown] lang="ko"
# ### 페이지 옵티마이저
#
# QLoRA 논문의 나머지 한 조각은 **페이지 옵티마이저**다(bitsandbytes의 `PagedAdamW`, 상태를 8비트로도 줄인 것은 `PagedAdamW8bit`). 옵티마이저 상태를 CUDA의 **관리 메모리**(managed memory, 통합 메모리라고도 한다)에 둔다. 드라이버는 이 메모리를 페이지라는 작은 조각으로 나누어, 자리가 있으면 GPU에, 모자라면 RAM에 둔다. PyTorch의 할당자가 모르는 메모리라 `torch.cuda.memory_allocated()`에는 나오지 않는다. CUDA의 기능이고, RAM으로 넘치는 것은 리눅스에서만 된다(윈도우와 WSL2는 아래). 그런데 LoRA에서 옵티마이저 상태를 줄이는 것이 얼마나 도움이 될까?

# %%
rows = []
for optimizer in ("adamw", "adamw_8bit", "paged_adamw_8bit"):
    report = predict_memory(batch_size=4, peft="qlora", optimizer=optimizer)
    sizes = report.optimizer_bytes, report.paged_bytes, report.needed_bytes
    rows.append([optimizer, *map(human_bytes, sizes)])
Table("optimizer, state, pages, peak", rows)

# %% [markdown] lang="ko"
# 12 MiB가 3 MiB로 줄었지만 최대 메모리는 거의 그대로다. 페이지(pages)는 아예 없다. bitsandbytes는 원소가 10만 개 이상인 파라미터의 상태만 페이지에 두는데, 이 어댑터의 행렬은 그보다 작다. 효과가 큰 것은 rank가 크거나 전체 미세 조정을 할 때다. Llama-3.2-3B의 가중치를 모두, 순수 bf16으로 L4에서 학습한다. `Trainer`처럼 임베딩의 상태는 8비트로 줄이지 않고 fp32로 둔다(`fp32_embedding_state=True`).

# %%
rows = []
for optimizer in ("adamw_fused", "adamw_8bit", "paged_adamw_8bit"):
    report = predict_memory(
        batch_size=1, sequence_length=512, model_id="Llama-3.2-3B", precision="bf16", gpu="L4",
        gradient_checkpointing=True, optimizer=optimizer, fp32_embedding_state=True,
    )  # fmt: skip
    sizes = report.optimizer_bytes, report.paged_bytes, report.needed_bytes
    rows.append([optimizer, *map(human_bytes, sizes), report.fits])
Table("optimizer, state, pages, peak, fits", rows)

# %% [markdown] lang="ko"
# 상태 11.97 GiB가 8비트로 8.27 GiB가 된다. 순수 bf16이면 상태도 bf16이라 4분의 1이 아니라 절반이고, fp32인 임베딩의 몫이 더해진다. 표의 peak는 텐서만의 최대다. 21.73 GiB는 L4의 한도(21.8 GiB)에 조금 못 미치지만, 조각나 못 쓰는 자리(3.10절)까지 더하면 넘어서 들어가지 않는다(마지막 열). 상태의 대부분이 페이지로 가면 PyTorch가 세는 최대는 13.54 GiB다(남은 85 MiB는 거의 다 블록마다의 스케일이다).
#
# 그렇다고 8.19 GiB가 사라진 것은 아니다. L4에서는 대부분이 13.54 GiB 옆에 그대로 있을 것이고, 그렇다면 `nvidia-smi`에는 그만큼 더 나온다(재지 않았다). 카드가 작으면 모자란 만큼이 RAM에 있다가 스텝마다 오간다.
#
# 대가는 얼마일까? 전체 미세 조정에서 남들이 잰 것이 셋 있다.
#
# - `AdamW8bit`를 `PagedAdamW8bit`로(Llama-3-8B, GPU 한 장): 최대 메모리가 46% 줄고 속도는 그대로였다. PyTorch가 센 최대라면 페이지는 빠진 값이다. 임베딩과 출력층의 상태까지 8비트로 줄인 것이라, 임베딩의 상태를 fp32로 두는 `Trainer`에서는 오가는 것이 더 많다([torchtune #990](https://github.com/meta-pytorch/torchtune/pull/990)).
# - 8비트가 아닌 페이지로(같은 글): 임베딩과 출력층의 큰 상태가 오가느라 스텝에 6초 넘게 걸렸다.
# - 융합 AdamW를 `PagedAdamW8bit`로: 메모리가 55%, 초당 토큰이 18% 줄었다. 8비트로 줄인 몫까지 든 값이다([torchao #1213](https://github.com/pytorch/ao/issues/1213)).
#
# 켜는 줄은 `Trainer`에서 `TrainingArguments(optim="paged_adamw_8bit")`, 내 루프에서 `bnb.optim.PagedAdamW8bit(model.parameters())`다. 플래너(9장)는 이 대가 때문에 페이지를 먼저 권하지 않는다. 물을 때 세고, 달리 들어가는 것이 없을 때 알려 준다. 윈도우와 WSL2에서는 관리 메모리가 GPU의 메모리보다 커질 수 없어([CUDA 안내서](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#unified-memory-programming)) 이 방법이 듣지 않는다.
