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
# # 4장. 배치를 나누어 넣기: 그레이디언트 누적
#
# 3장에서 배치 크기 16은 T4에 들어가지 않았다. 4씩 네 번 나누어 넣고 그레이디언트를 모은 다음 한 번만 갱신하면 어떨까? 이것이 **그레이디언트 누적**(gradient accumulation)이다.
# 흔히 배치 4의 메모리로 배치 16의 학습을 한다고 말한다. 결과가 정말 같을까? 메모리는 정말 배치 4만큼일까? 그리고 어떤 때 틀릴까?
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 누적하는 학습 루프를 손으로 쓰고, 그레이디언트가 큰 배치와 같은지 확인한다.
# - 누적에서 소리 없이 나는 여섯 가지 실수를 알아보고 바로잡는다.
# - 내 GPU에서 배치를 몇으로 나눌지 고른다.
#
# 그레이디언트가 같은지는 작은 모델을 CPU에서 실제로 학습해 확인하고, 메모리는 3장의 가상 GPU에서 센다. 저장된 출력은 가상 T4의 것이다. 출력에서 GPU의 이름을 확인한다.

# %%
import copy
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers import accumulation_panel, exercise, gpu_memory_experiment, gpu_memory_sweep, use_gpu
from helpers.chapters.c4_accumulation.accumulation import capital_samples, difference, gradient, small_gpt2
from helpers.chapters.c4_accumulation.pictures import draw_gradients, draw_losses
from helpers.small_model import SmallLanguageModel, sentences

torch.set_num_threads(1)
gpu = use_gpu()
gpu

# %% [markdown] lang="ko"
# ## 4.1 네 번 나누어도 그레이디언트는 같다
#
# "프랑스의 수도는 파리이다." 같은 문장 64개를 준비했다. 2장의 작은 GPT가 한 글자씩 읽고 다음 글자를 예측한다. 손실은 답(수도와 '이다.')의 글자에서만 계산한다. 우선 답이 똑같이 여섯 글자인 문장 16개만 쓴다.
# 왜 길이를 맞추었는지는 4.4절에서 알게 된다. 출력은 문장 수와 글자 수다.

# %%
inputs, labels = sentences()
rows = ((labels >= 0).sum(1) == 6).nonzero().flatten()[:16]
inputs[rows].shape

# %% [markdown] lang="ko"
# 배치의 손실은 배치에 든 모든 답 글자의 평균이다. 숫자는 fp64로 계산한다. 학습하기 전의 손실을 본다.

# %%
torch.manual_seed(0)
model = SmallLanguageModel().double()


def mean_loss(rows):
    return cross_entropy(model(inputs[rows]).flatten(0, 1), labels[rows].flatten())


mean_loss(rows).item()

# %% [markdown] lang="ko"
# 먼저 배치 16을 한 번에 넣고 그레이디언트를 한 줄로 이어 둔다. 출력은 그 길이다.

# %%
model.zero_grad()
mean_loss(rows).backward()
whole = gradient(model)
whole.shape

# %% [markdown] lang="ko"
# 파라미터 12만여 개의 그레이디언트다. 이제 배치를 4개씩 나눈 **마이크로 배치**(micro-batch) 네 개를 차례로 넣는다. `backward()`는 `grad`를 덮어쓰지 않고 **더한다.** 누적은 이 성질을 그대로 쓴다. 지우지 않고 네 번 부르면 된다.
# 네 평균을 더하면 네 배가 되므로 손실을 4로 나눈다. 한 번에 넣은 것과 같은지 본다.

# %%
model.zero_grad()
for micro_batch in rows.split(4):
    loss = mean_loss(micro_batch) / 4
    loss.backward()
print(difference(gradient(model), whole) < 1e-12)

# %% [markdown] lang="ko"
# 두 그레이디언트의 차이를 길이의 비율로 재면 10⁻¹²보다 작다. 마이크로 배치가 저마다 얼마를 보태는지, 출력층의 편향 여덟 개의 그레이디언트를 그린다. 색칠한 네 조각을 쌓은 것(점)이 큰 배치의 값(가로줄)과 만나는지 확인한다.

# %%
parts = []
for micro_batch in rows.split(4):
    model.zero_grad()
    (mean_loss(micro_batch) / 4).backward()
    parts.append(model.head.bias.grad[10:18].tolist())
model.zero_grad()
mean_loss(rows).backward()
draw_gradients(parts, model.head.bias.grad[10:18].tolist())

# %% [markdown] lang="ko"
# 조각 하나하나는 큰 배치와 다르고 부호가 반대인 것도 있다. 그래도 합은 모두 만난다.
#
# 그런데 왜 '10⁻¹²보다 작다'고만 하고 '같다'고 하지 않을까? 컴퓨터의 덧셈은 순서가 바뀌면 끝자리가 달라지기 때문이다. 1장에서 본 반올림이다. 괄호만 옮긴 두 식의 값을 비교한다.

# %%
print((0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3))

# %% [markdown] lang="ko"
# 큰 배치는 16개를 한꺼번에 더하고, 누적은 4개씩 더한 것을 다시 더한다. 자료형마다 얼마나 어긋나는지 잰다. 정확한 숫자는 CPU에 따라 조금 다르다.

# %% tags=["nbval-ignore-output"]
exact = model
for dtype in (torch.float64, torch.float32, torch.bfloat16):
    model = copy.deepcopy(exact).to(dtype)
    model.zero_grad()
    mean_loss(rows).backward()
    whole_in_dtype = gradient(model).double()
    model.zero_grad()
    for micro_batch in rows.split(4):
        (mean_loss(micro_batch) / 4).backward()
    print(dtype, f"{difference(gradient(model).double(), whole_in_dtype):.0e}")
model = exact

# %% [markdown] lang="ko"
# 차이는 그 자료형의 반올림 크기(fp64 10⁻¹⁶, fp32 10⁻⁷, bf16 10⁻³)와 같은 자릿수다. 누적이 틀린 것이 아니라 어느 쪽도 정확하지 않은 것이다.
#
# ## 4.2 학습 곡선도 같다
#
# 한 스텝이 같다면 학습 전체도 같아야 한다. 문장 16개를 60번 보며 세 가지로 학습한다. 배치 16, 마이크로 배치 4를 네 번 누적한 것, 그리고 누적 없는 배치 4다. 아래가 누적하는 학습 루프의 전부다. 열은 이름, 옵티마이저 스텝의 수, 처음과 마지막 손실이다.


# %%
def train(batch_size, accumulation, epochs=60):
    torch.manual_seed(0)
    model = SmallLanguageModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, total = [], 0.0
    for _ in range(epochs):
        for i, batch in enumerate(rows.split(batch_size)):
            logits = model(inputs[batch])
            loss = cross_entropy(logits.flatten(0, 1), labels[batch].flatten()) / accumulation
            loss.backward()
            total += loss.item()
            if (i + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(total)
                total = 0.0
    return losses


runs = {"16": (16, train(16, 1)), "4 x 4": (16, train(4, 4)), "4": (4, train(4, 1))}
for name, (_, losses) in runs.items():
    print(f"{name:6} {len(losses):4} {losses[0]:.3f} {losses[-1]:.3f}")

# %% [markdown] lang="ko"
# 16과 4 × 4는 소수 셋째 자리까지 같다. 가로축을 학습한 샘플 수로 놓고 그린다. 주황색 점(4 × 4)이 파란 선(16) 위에 있는지 본다.

# %%
draw_losses(runs)

# %% [markdown] lang="ko"
# 초록색(배치 4)은 다르다. 같은 수의 문장을 보고도 네 배 자주 갱신했기 때문에 손실이 더 빨리 내려갔다.
#
# > **주장 1.** "누적하면 큰 배치와 같은 효과를 얻는다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 반올림을 빼면 그레이디언트도 학습 곡선도 같다. 조건은 4.4절에 있다.
#
# </details>
#
# > **주장 2.** "배치가 크면 더 빠르고 더 잘 수렴한다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 갱신 한 번만 보면 큰 배치가 낫다. 그러나 본 샘플의 수가 같다면 위의 그림처럼 작은 배치가 앞설 수 있다.
# 배치가 커지면 학습률도 그에 맞게 키워야 하고, 어디까지 도움이 되는지는 과제마다 다르다.
#
# </details>
#
# 큰 배치가 주는 것은 **더 정확한 그레이디언트**다. 64개 문장 전체의 그레이디언트를 정답으로 놓고, 무작위로 B개를 뽑아 구한 것이 얼마나 벗어나는지 32번씩 재어 평균한다(제곱평균제곱근). 열은 B, 그 값, 그 값에 √B를 곱한 것이다.


# %%
def gradient_of(rows):
    model.zero_grad()
    mean_loss(rows).backward()
    return gradient(model)


everything, generator = gradient_of(torch.arange(64)), torch.Generator().manual_seed(0)
for count in (1, 4, 16, 64):
    draws = [torch.randint(64, (count,), generator=generator) for _ in range(32)]
    error = sum(difference(gradient_of(draw), everything) ** 2 for draw in draws) / 32
    print(f"{count:2} {error**0.5:.2f} {(error * count) ** 0.5:.1f}")

# %% [markdown] lang="ko"
# 배치가 네 배가 되면 오차는 절반쯤이 된다. √B를 곱한 값이 거의 일정하다는 것이 그 뜻이다.
#
# > **주장 3.** "그레이디언트의 추정이 더 정확해진다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 오차는 √B에 반비례한다. 배치를 네 배로 키워야 절반으로 줄어드니, 갈수록 비싸진다.
#
# </details>
#
# ## 4.3 메모리: 정말 배치 4만큼일까
#
# 이제 polyglot-ko-1.3b다. 배치 16, 누적 없는 배치 4, 배치 4를 네 번 누적한 것(4 × 4)을 실행한다. '첫 스텝 직후'와 '최대'를 본다.

# %%
table = gpu_memory_sweep(batch_size=[16, 4])
table.append(gpu_memory_experiment(batch_size=4, gradient_accumulation_steps=4))
table

# %% [markdown] lang="ko"
# 16은 들어가지 않고 4 × 4는 들어간다. 그리고 4 × 4의 숫자는 4와 모두 같다. 책이 배치 4와 4 × 4에서 똑같이 10.586 GB를 출력한 것도 이 때문이다.
#
# 그런데 왜 같을까? 4와 4 × 4의 단계별 기록에서 순전파와 역전파의 최대를 비교한다. 먼저 배치 4다.

# %%
table[1].phases()

# %% [markdown] lang="ko"
# 다음은 4 × 4다. 스텝마다 순전파와 역전파가 네 번씩 있다. 둘째 마이크로 배치부터 시작하는 높이를 본다.

# %%
table[2].phases()

# %% [markdown] lang="ko"
# 둘째 마이크로 배치부터는 순전파가 2.5 GiB쯤 높은 곳에서 시작한다. 앞의 마이크로 배치가 남긴 **그레이디언트가 그대로 있기 때문이다.** 누적 없는 학습에서는 그레이디언트가 생길 때 순전파 상태가 사라지므로 둘이 겹치지 않는다. 누적에서는 겹친다.
# 그런데도 전체 최대가 같은 것은 이 설정에서 최대가 **옵티마이저 스텝**의 임시 텐서(3.7절)에 있기 때문이다. 우연히 같은 것이다. 임시 텐서를 만들지 않는 융합(fused) AdamW로 바꾸어 본다.

# %%
fused = gpu_memory_sweep(batch_size=4, gradient_accumulation_steps=[1, 4], optimizer="adamw_fused")
fused

# %% [markdown] lang="ko"
# 마이크로 배치 8을 두 번 누적한 것도 비교한다.

# %%
gpu_memory_sweep(batch_size=8, gradient_accumulation_steps=[1, 2])

# %% [markdown] lang="ko"
# 융합 AdamW에서는 1.94 GiB, 마이크로 배치 8에서는 1.42 GiB를 누적하는 쪽이 더 쓴다. 누적하면 그레이디언트를 들고 있는 채로 순전파와 역전파를 하기 때문이다.
#
# > **주장 4.** "4 × 4의 메모리는 배치 4와 같다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 최대가 옵티마이저 스텝에 있을 때만 그렇다. 아니라면 더 들고, 많게는 그레이디언트의 크기(N)에 가까워진다.
#
# </details>
#
# > **주장 5.** "누적은 메모리를 절약한다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 배치 16에 견주면 그렇다. 배치 4에 견주면 줄어드는 것이 없고, 위에서 보았듯 늘기도 한다. 무엇과 비교하는지가 빠진 말이다.
#
# </details>
#
# 지금까지의 최대는 foreach AdamW의 것이다. transformers `Trainer`의 기본값은 융합 AdamW이므로, 실제로 만나는 것은 대개 늘어나는 쪽이다.
#
# 누적으로도 안 되는 모델이 있다. Llama-3.2-1B를 길이 6144로, T4보다 큰 L4에서 학습하려 한다. 배치를 1까지 줄이면 얼마가 필요할까?

# %%
long_text = {"model_id": "Llama-3.2-1B", "optimizer": "adamw_8bit"}
gpu_memory_sweep(gpu="L4", batch_size=[4, 2, 1], sequence_length=6144, **long_text)

# %% [markdown] lang="ko"
# > **주장 6.** "누적이 늘 OOM을 막아 주지는 않는다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 누적은 배치를 샘플 하나까지만 나눈다. 샘플 하나가 넘치면 더 나눌 것이 없다. 그때 쓰는 것이 5장의 체크포인팅이다.
#
# </details>
#
# 같은 샘플 하나가 GPU에 따라 다른 메모리를 쓰기도 한다. 길이를 절반인 3072로 줄이고 T4와 L4를 나란히 놓는다. 한도가 아니라 **필요한 크기**를 비교한다.

# %%
gpu_memory_sweep(gpu=["T4", "L4"], batch_size=1, sequence_length=3072, **long_text)

# %% [markdown] lang="ko"
# 같은 모델, 같은 길이인데 T4가 두 배 넘게 쓴다. 어텐션을 계산하는 커널이 다르기 때문이다. T4에서는 FlashAttention이 돌지 않고, 메모리를 아끼는 다른 융합 커널도 Llama나 Qwen 같은 **그룹 쿼리**(GQA) 어텐션을 받지 않는다. 남는 것은 길이 × 길이 크기의 점수 행렬을 저장하는 `math` 커널뿐이다. T4에서 GQA 모델의 긴 글이 넘친다면 배치보다 이것이 먼저다(3.9절).
#
# ## 4.4 여섯 가지 실수와 두 가지 성질
#
# 누적은 잘못 써도 오류가 나지 않는다. 손실은 내려가고, 결과만 조금 나쁘다. 하나씩 틀려 보고 바로잡는다. 차이는 한 번에 계산한 큰 배치의 그레이디언트와 견주어 잰다. 0이면 같고, 1이면 그 길이만큼 다르다는 뜻이다.
#
# ### 나누기를 잊는다, 지우는 곳을 틀린다
#
# 첫째, 손실을 4로 나누지 않는다. 둘째, `zero_grad()`를 마이크로 배치마다 부른다. 출력은 큰 배치와의 차이, 그리고 큰 배치의 몇 배 길이인지다.


# %%
def accumulate(micro_batches, scale=1 / 4, zero_every_time=False):
    model.zero_grad()
    for micro_batch in micro_batches:
        if zero_every_time:
            model.zero_grad()
        (mean_loss(micro_batch) * scale).backward()
    return gradient(model)


for name, mistake in {"undivided": {"scale": 1}, "zeroed": {"zero_every_time": True}}.items():
    wrong = accumulate(rows.split(4), **mistake)
    print(f"{name:10} {difference(wrong, whole):.2f} {wrong.norm() / whole.norm():.2f}")

# %% [markdown] lang="ko"
# 나누지 않으면 그레이디언트가 정확히 네 배다. SGD라면 학습률이 네 배가 된 것과 같다. AdamW라면 어떨까? 같은 그레이디언트와 네 배인 그레이디언트로 다섯 스텝을 가서, 두 모델이 움직인 거리의 비율을 본다.


# %%
def moved(optimizer_class, factor, **settings):
    weight = nn.Parameter(torch.zeros(100, dtype=torch.float64))
    optimizer = optimizer_class([weight], lr=1e-3, **settings)
    for step in range(5):
        weight.grad = whole[100 * step : 100 * step + 100] * factor
        optimizer.step()
    return weight.detach().norm()


for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
    print(optimizer_class.__name__, f"{moved(optimizer_class, 4) / moved(optimizer_class, 1):.3f}")

# %% [markdown] lang="ko"
# AdamW는 그레이디언트를 제 크기로 나누어 쓰므로 네 배가 되어도 거의 똑같이 움직인다. 그래서 이 실수는 AdamW에서 **눈에 띄지 않는다.** 그러다가 그레이디언트 클리핑을 켜거나 옵티마이저를 바꾸는 순간 드러난다.
# 지우는 곳을 틀리면 마지막 마이크로 배치의 4분의 1만 남는다. 넷 가운데 셋은 계산해 놓고 버린다. AdamW라면 그 크기마저 상관없으니, 그냥 배치 4로 네 배 느리게 학습하는 것과 같다.
#
# ### 길이가 다른 샘플: 평균의 평균
#
# 이번에는 길이가 제각각인 문장 16개를 짧은 것부터 놓는다. 비슷한 길이끼리 묶는 것은 패딩(padding, 길이를 맞추려고 채우는 토큰)을 아끼려고 흔히 하는 일이다. 마이크로 배치마다 답의 글자 수가 몇인지 본다.

# %%
by_length = (labels >= 0).sum(1).argsort(stable=True)[::4]
[int((labels[micro_batch] >= 0).sum()) for micro_batch in by_length.split(4)]

# %% [markdown] lang="ko"
# 마이크로 배치마다 평균을 내어 4로 나누면, 글자가 적은 마이크로 배치의 글자 하나가 더 큰 몫을 갖는다. 큰 배치에서는 모든 글자의 몫이 같다. 차이를 잰 다음, 합을 구해 **전체 글자 수**로 나누어 바로잡는다.

# %%
whole_by_length = gradient_of(by_length)
mean_of_means = accumulate(by_length.split(4))
model.zero_grad()
count = (labels[by_length] >= 0).sum()
for micro_batch in by_length.split(4):
    logits = model(inputs[micro_batch]).flatten(0, 1)
    (cross_entropy(logits, labels[micro_batch].flatten(), reduction="sum") / count).backward()
by_token = gradient(model)
print(f"{difference(mean_of_means, whole_by_length):.3f} {difference(by_token, whole_by_length):.3f}")

# %% [markdown] lang="ko"
# transformers의 `Trainer`에도 이 오류가 있었다. 2024년 10월에 고쳐졌고(transformers #34191), 나중에 다른 모습으로 되돌아오기도 했다(#35438, #37766). 지금의 `Trainer`는 스텝 전체의 토큰 수(`num_items_in_batch`)를 세어 모델에 넘긴다. 모델이나 손실 함수가 그 수를 받지 않으면 다시 평균의 평균이 되므로, 손실을 직접 쓴다면 확인한다.
#
# ### 덜 찬 마지막 묶음
#
# 마이크로 배치가 열 개이고 네 번씩 누적하면 마지막에 둘이 남는다. 세 가지 처리가 있다. 버리거나, 4로 나누거나, 실제 수인 2로 나눈다. 남은 둘을 4로 나누면 그 스텝의 그레이디언트가 어떻게 되는지 본다.

# %%
left_over = rows[:8]
wrong, right = accumulate(left_over.split(4), 1 / 4), accumulate(left_over.split(4), 1 / 2)
print(f"{wrong.norm() / gradient_of(left_over).norm():.2f} {difference(right, gradient_of(left_over)):.2f}")

# %% [markdown] lang="ko"
# 4로 나누면 절반이 된다. 버리면 데이터의 끝이 한 번도 학습되지 않고, 4.2절의 루프처럼 `(i + 1) % accumulation`으로만 세면 **다음 에폭(epoch)의 첫 묶음에 섞인다.** 이 강의의 `train_model`은 남은 것을 실제 샘플 수로 나누어 한 스텝을 더 한다.
#
# ### 클리핑과 학습률 일정은 스텝마다
#
# **그레이디언트 클리핑**(clipping)은 그레이디언트의 길이가 한도를 넘으면 줄이는 일이다. 다 모은 뒤에 해야 한다. 루프 안에 두면 어떻게 되는지, 한도 1에서 비교한다. 출력은 마이크로 배치마다 줄이기 전의 길이, 그리고 마지막에 남은 길이와 옳은 것과의 차이다.

# %%
model.zero_grad()
mean_loss(rows).backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
once = gradient(model)

model.zero_grad()
lengths = []
for micro_batch in rows.split(4):
    (mean_loss(micro_batch) / 4).backward()
    lengths.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
print(*(f"{float(length):.2f}" for length in lengths))
print(f"{gradient(model).norm():.2f} {difference(gradient(model), once):.2f}")

# %% [markdown] lang="ko"
# 길이는 맞는데 방향이 다르다. `grad`에는 지금까지의 합이 들어 있으므로, 먼저 들어온 조각은 여러 번 줄어들고 마지막 조각이 가장 큰 몫을 갖는다. 길이만 보아서는 알 수 없는 실수다.
#
# **학습률 일정**도 마찬가지다. 10스텝에 걸쳐 0으로 내리는 일정을 마이크로 배치마다 한 칸씩 움직이면 어떻게 되는지, 옵티마이저 스텝마다 쓰인 학습률을 출력한다. 첫 줄이 옳은 것이고, 마지막 줄은 PyTorch의 경고다.


# %%
def rates(every_micro_batch, steps=10, accumulation=4):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    used = []
    for micro_step in range(steps * accumulation):
        if (micro_step + 1) % accumulation == 0:
            used.append(round(optimizer.param_groups[0]["lr"], 1))
            optimizer.step()
        if every_micro_batch or (micro_step + 1) % accumulation == 0:
            schedule.step()
    return used


print(*rates(every_micro_batch=False))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(*rates(every_micro_batch=True))
print(str(caught[0].message).split(". ")[0])

# %% [markdown] lang="ko"
# 둘째 줄은 네 배 빨리 끝나서, 열 스텝 가운데 여덟 스텝이 학습률 0으로 지나갔다. 여섯 가지 실수 가운데 이것만은 PyTorch가 경고를 한 줄 낸다. 옵티마이저가 한 번도 움직이기 전에 일정이 움직였기 때문이다.
#
# ### 배치 정규화와 드롭아웃
#
# 마지막 둘은 루프의 실수가 아니라 모델의 성질이다. **배치 정규화**(batch normalization)는 배치의 평균과 분산을 쓴다. 마이크로 배치로 나누면 그 값이 달라진다. 입력 16개를 한 번에 넣은 것과 넷으로 나눈 것의 차이를, 층 정규화와 나란히 잰다.

# %%
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=generator).double(), torch.randn(16, 1, generator=generator).double()


def gradient_by(net, size, seed=0):
    torch.manual_seed(seed)
    net.zero_grad()
    for part, target in zip(x.split(size), y.split(size), strict=True):
        ((net(part) - target).square().mean() * size / 16).backward()
    return gradient(net)


def net_with(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), layer, nn.ReLU(), copy.deepcopy(layer), nn.Linear(32, 1)).double()


for layer in (nn.BatchNorm1d(32), nn.LayerNorm(32)):
    net = net_with(layer)
    print(f"{type(layer).__name__:12} {difference(gradient_by(net, 4), gradient_by(net, 16)):.2f}")

# %% [markdown] lang="ko"
# 배치 정규화는 나누면 다른 함수가 된다. 누적으로는 고칠 수 없다. 언어 모델은 샘플마다 따로 계산하는 층 정규화나 RMSNorm을 쓰므로 걱정할 것이 없다.
#
# **드롭아웃**(dropout)은 무작위로 값을 끈다. 나누면 난수를 뽑는 순서가 달라져 다른 값이 꺼진다. 틀린 것일까? 누적과 큰 배치의 차이를, 시드만 다른 두 큰 배치의 차이와 비교한다. 마지막 수는 시드 2,000개로 평균한 누적과 큰 배치의 차이다.

# %%
net = net_with(nn.Dropout(0.2))
print(f"{difference(gradient_by(net, 4), gradient_by(net, 16)):.2f}", end=" ")
print(f"{difference(gradient_by(net, 16, seed=1), gradient_by(net, 16)):.2f}", end=" ")
mean_4, mean_16 = (sum(gradient_by(net, size, seed) for seed in range(2000)) / 2000 for size in (4, 16))
print(f"{difference(mean_4, mean_16):.2f}")

# %% [markdown] lang="ko"
# 누적과 큰 배치는 시드가 다른 두 큰 배치만큼 다르고, 평균은 같아진다. 값은 달라도 **분포는 같다.** 드롭아웃이 있으면 누적한 결과를 비트까지 맞추려 하지 말아야 한다.
#
# ## 4.5 Trainer와 Accelerate
#
# 직접 쓴 루프를 라이브러리와 비교한다. 드롭아웃이 없는 작은 GPT-2를 길이가 다른 문장 16개로 세 스텝 학습한다. 먼저 손으로 쓴 루프다. 16개를 한 번에 넣는다.

# %%
from helpers.trainers import largest_difference, train_with_trainer

samples = capital_samples(by_length)
batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def train_by_hand(steps=3):
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


by_hand = train_by_hand()
f"{largest_difference(by_hand, small_gpt2()):.3f}"

# %% [markdown] lang="ko"
# 가중치가 0.003까지 움직였다. 이제 `Trainer`에 16을 한 번에, 그리고 4 × 4로 맡긴다. `train_with_trainer`는 받은 인자로 `TrainingArguments`를 만들어 CPU에서 조용히 학습할 뿐이다. 손으로 쓴 루프와 맞추려고 기본값 가운데 둘을 끈다. 학습률 일정과, 기본으로 켜져 있는 클리핑이다. 두 결과가 손으로 쓴 루프와 같은지 본다.

# %%
settings = {
    "max_steps": 3,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "optim": "adamw_torch",
}
at_once = train_with_trainer(small_gpt2(), samples, per_device_train_batch_size=16, **settings)
four_by_four = train_with_trainer(
    small_gpt2(), samples, per_device_train_batch_size=4, gradient_accumulation_steps=4, **settings
)
[largest_difference(trained, by_hand) < 1e-9 for trained in (at_once, four_by_four)]

# %% [markdown] lang="ko"
# 길이가 달라도 같다. `Trainer`가 토큰 수로 나누어 주기 때문이다. (문장을 섞는 순서가 달라도 한 스텝이 16개 전부이므로 합은 같다.)
#
# Accelerate의 `accumulate` 블록 안에서는 마지막 마이크로 배치에서만 옵티마이저가 움직인다. 그리고 `backward`가 손실을 누적 횟수로 나눈다. 그런데 그것은 **평균의 평균**이다. 그대로 쓴 것과, 모델에 전체 토큰 수를 알려 준 것을 비교한다.
# 모델이 이미 전체로 나누었으므로 Accelerate가 나누는 4는 미리 곱해 둔다. 출력은 세 스텝 동안 움직인 것에 견주어 손으로 쓴 루프와 얼마나 다른지다.

# %%
from accelerate import Accelerator


def train_with_accelerate(count_tokens):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(samples * 3, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = (batch["labels"][:, 1:] >= 0).sum()
    for micro_batch in loader:
        with accelerator.accumulate(model):
            if count_tokens:
                loss = model(**micro_batch, num_items_in_batch=total).loss * 4
            else:
                loss = model(**micro_batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return model


def movement(model):
    pairs = zip(model.parameters(), small_gpt2().parameters(), strict=True)
    return torch.cat([(after - before).detach().flatten() for after, before in pairs])


for count_tokens in (False, True):
    print(f"{difference(movement(train_with_accelerate(count_tokens)), movement(by_hand)):.2f}")

# %% [markdown] lang="ko"
# 그대로 쓰면 세 스텝 만에 움직인 거리의 5분의 1쯤 어긋난다. 길이가 다른 데이터에 Accelerate를 쓴다면 토큰 수를 직접 세어야 한다(Accelerate의 문서도 이렇게 하라고 적는다).
#
# ## 4.6 시간과 연산
#
# 누적하면 느려질까? 먼저 센다. 행렬곱의 부동소수점 연산(FLOPs)을 배치 16을 만드는 세 가지 나눗셈에서 비교한다. 열은 마이크로 배치, 횟수, 한 스텝의 연산(TFLOP)이다.

# %%
from helpers import training_flops

for size in (16, 4, 1):
    steps = 16 // size
    print(size, steps, f"{steps * training_flops(batch_size=size, sequence_length=256).total / 1e12:.3f}")

# %% [markdown] lang="ko"
# 똑같다. 샘플 16개를 한 번씩 계산한다는 것은 달라지지 않는다.
#
# > **주장 7.** "누적은 순전파와 역전파를 더 해야 한다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 부르는 횟수는 늘지만 샘플마다 드는 연산은 그대로다. 옵티마이저 스텝은 배치 4를 그냥 쓸 때의 4분의 1로 준다.
#
# </details>
#
# 그런데 연산이 같아도 시간은 다를 수 있다. 작은 행렬은 장치를 다 쓰지 못한다. 이 노트북을 실행한 컴퓨터에서 잰다. GPU가 있으면 GPU, 없으면 CPU다. 블록 네 개짜리 모델로 샘플 16개를 여러 가지로 나누어, 옵티마이저 스텝까지 포함한 한 스텝의 시간(중앙값)과 초당 샘플 수를 출력한다.

# %% tags=["nbval-ignore-output"]
import statistics
import time

device = "cuda" if torch.cuda.is_available() else "cpu"
timed = SmallLanguageModel(width=256, depth=4).to(device)
optimizer = torch.optim.AdamW(timed.parameters())
samples_on_device = inputs[rows].to(device)
for size in (16, 8, 4, 2, 1):
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for micro_batch in samples_on_device.split(size):
            (timed(micro_batch).square().mean() * size / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
        next(timed.parameters()).sum().item()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    print(f"{device} {size:2} x {16 // size:2}: {seconds * 1e3:6.1f} ms, {16 / seconds:6.0f}/s")

# %% [markdown] lang="ko"
# 마이크로 배치가 작아질수록 초당 샘플 수가 떨어진다면 장치가 놀고 있다는 뜻이다. 어느 크기부터 더 키워도 오르지 않는다면 거기가 마이크로 배치의 알맞은 크기이고, 그보다 큰 배치는 누적으로 만들어도 손해가 없다.
#
# > **주장 8.** "누적하면 느려진다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 연산은 그대로다. 마이크로 배치가 장치를 채우지 못할 만큼 작을 때만 느려지고, 얼마나 느려지는지는 컴퓨터마다 다르다. 여기에 저장된 시간은 CPU의 것이다.
#
# </details>
#
# **언제 쓸까?** 원하는 배치가 들어가지 않을 때만 쓴다. 들어간다면 나눌 까닭이 없다. 나눌 때는 **들어가는 가장 큰 마이크로 배치**를 고른다. 그리고 배치를 키우는 것 자체가 목적이 되어서는 안 된다. 4.2절에서 보았듯 같은 데이터라면 배치 4가 더 빨리 배우기도 한다.
#
# ## 4.7 직접 바꿔 보기
#
# 배치의 합계를 고정하고 마이크로 배치를 바꾸면 메모리와 횟수가 어떻게 달라지는지 그린다. 막대는 그 배치를 만드는 모든 나눗셈이고, 위의 줄은 고른 나눗셈이다. 아래 그림은 처음 모습이다.
#
# ![polyglot-ko-1.3b로 배치 16을 만드는 나눗셈들의 메모리. 16 × 1은 15.25 GiB로 T4의 한도를 넘고, 8 × 2는 13.84 GiB, 4 × 4는 12.42 GiB로 들어간다.](../../image/04_splits_of_16.svg)
#
# 이렇게 해 본다.
#
# - 옵티마이저를 adamw_fused로 바꾼다. 어느 막대가 줄고 어느 막대가 그대로인가?
# - 배치를 64로 올린다. 들어가는 막대는 몇 개인가? 마이크로 배치가 같으면 배치가 달라도 메모리가 같은가?
# - 길이를 8192로 올려 이 모델이 받지 못하는 길이를 넣어 본다.

# %%
accumulation_panel()

# %% [markdown] lang="ko"
# ## 4.8 연습 문제
#
# 답을 채우고 실행하면 맞았는지, 틀렸다면 얼마나 틀렸는지 알려 준다. 막히면 `exercise("4-1").hint()`, 그래도 막히면 `exercise("4-1").solution()`을 실행한다.
#
# **4-1.** 마이크로 배치마다 답의 토큰 수가 다르다. 토큰 수의 목록을 받아, 마이크로 배치마다 **평균 손실에 곱할 수**의 목록을 돌려주는 함수를 완성하라. 곱해서 더하면 큰 배치의 손실이 되어야 한다.


# %%
def factors(token_counts):
    return ...


exercise("4-1").check(factors)

# %% [markdown] lang="ko"
# **4-2.** 샘플 수, 마이크로 배치 크기, 누적 횟수를 받아 한 에폭의 옵티마이저 스텝 수를 돌려주는 함수를 완성하라. 덜 찬 마이크로 배치와 덜 찬 묶음도 버리지 않는다.


# %%
def optimizer_steps(samples, micro_batch, accumulation):
    return ...


exercise("4-2").check(optimizer_steps)

# %% [markdown] lang="ko"
# **4-3.** polyglot-ko-1.3b를 길이 512로 T4에서 학습한다. 한 스텝의 배치가 32가 되게 `batch_size`와 `gradient_accumulation_steps`를 정하라. 들어가는 것 가운데 가장 적게 나누어야 한다. 예를 들면 `{"batch_size": 32}`처럼 쓴다.

# %%
changes = ...
exercise("4-3").check(changes)

# %% [markdown] lang="ko"
# ## 4.9 기억할 것
#
# | 무엇 | 옳게 | 틀리면 |
# |---|---|---|
# | 손실 | 누적 횟수로, 길이가 다르면 묶음 전체의 토큰 수로 나눈다 | 그레이디언트가 네 배, 또는 평균의 평균 |
# | `zero_grad()` | 옵티마이저 스텝 뒤에 한 번 | 마지막 마이크로 배치만 남는다 |
# | 덜 찬 마지막 묶음 | 실제 수로 나누어 한 스텝 더 | 절반짜리 스텝, 또는 다음 에폭에 섞임 |
# | 클리핑, 학습률 일정 | 옵티마이저 스텝마다 | 마지막 조각으로 방향이 기울고, 학습률이 일찍 0이 된다 |
# | 배치 정규화 | 누적으로 고칠 수 없다 | 다른 함수가 된다 |
# | 드롭아웃 | 분포가 같다 | 비트까지 같기를 바라지 않는다 |
#
# - 누적한 그레이디언트는 큰 배치의 그레이디언트와 **반올림만큼만** 다르다.
# - 최대 메모리에는 마이크로 배치의 순전파 상태와 **들고 있는 그레이디언트가 겹친다**. 배치 4와 4 × 4가 같은 것은 최대가 옵티마이저 스텝에 있을 때뿐이다.
# - 연산은 늘지 않는다. 들어가는 가장 큰 마이크로 배치로 나눈다.
#
# 샘플 하나도 들어가지 않으면 더 나눌 수 없다. 그렇다면 순전파 상태를 아예 저장하지 않으면 어떨까? [5장](05_gradient_checkpointing.ipynb)에서 답한다.
