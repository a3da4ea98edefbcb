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
# 3장에서 배치 크기 16은 T4에 들어가지 않았다. 4개씩 네 번 나누어 넣고 그레이디언트를 모은 다음 한 번만 갱신하면 어떨까? 이것이 **그레이디언트 누적**(gradient accumulation)이다.
# 흔히 배치 4의 메모리로 배치 16의 학습을 한다고 말한다. 결과가 정말 같을까? 메모리는 정말 배치 4만큼일까? 그리고 어떤 때 틀릴까?
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 유효 배치 크기를 계산하고, 내 GPU에서 배치를 몇으로 나눌지 고른다.
# - 누적이 줄여 주는 메모리와 줄여 주지 않는 메모리를 구별한다.
# - 누적에서 오류 없이 지나가는 여섯 가지 실수를 증상으로 알아보고 고친다.
# - 그대로 베껴 쓸 루프를 갖는다. PyTorch와 `Trainer`로 하나씩이고, Accelerate는 더 읽을거리에 있다.
#
# 그레이디언트가 같은지는 작은 모델을 CPU에서 실제로 학습해 확인하고, 메모리는 3장의 가상 GPU에서 센다. 저장된 출력은 가상 T4에서 얻었다. 출력에서 GPU의 이름을 확인한다.

# %%
import copy
import math
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers import case, exercise, gpu_memory_experiment, gpu_memory_sweep, guess, guesses, use_gpu
from helpers.chapters.c4_accumulation.accumulation import capital_samples, difference, gradient, moved, small_gpt2
from helpers.chapters.c4_accumulation.tables import table
from helpers.small_model import SmallLanguageModel, sentences

torch.set_num_threads(1)
gpu = use_gpu()
gpu

# %% [markdown] lang="ko"
# 먼저 짐작부터 한다. polyglot-ko-1.3b를 `Trainer`의 기본값인 융합(fused) AdamW로, 배치 4로 학습하면 T4에서 9.95 GiB가 든다. 배치 4를 네 번 누적하면 몇 GiB가 들까? `None` 대신 숫자를 적고 실행한다. 결과는 4.3절에 나온다.

# %%
four_by_four = guess("4.3", None, "GiB")
four_by_four

# %% [markdown] lang="ko"
# ## 4.1 나누어 더한 그레이디언트
#
# ### 유효 배치 크기
#
# 옵티마이저가 한 번 움직일 때 그 그레이디언트에 들어간 샘플의 수를 **유효 배치 크기**(effective batch size)라고 한다.
#
# **유효 배치 크기 = 마이크로 배치 × 누적 횟수 × 데이터 병렬 GPU 수**
#
# **마이크로 배치**(micro-batch)는 한 번에 GPU 하나에 넣는 샘플의 수다. `Trainer`에서는 차례로 `per_device_train_batch_size`, `gradient_accumulation_steps`, 프로세스의 수다. 모델을 쪼개 맡은 GPU(텐서 병렬, 파이프라인 병렬)는 세지 않는다.
#
# 출력은 유효 배치 크기와, 샘플 1,000개를 한 번 볼 때의 옵티마이저 스텝 수다. 숫자를 바꾸어 본다. GPU가 두 개로 늘었을 때 유효 배치를 16으로 지키려면 무엇을 바꾸어야 하는가?

# %%
micro_batch, accumulation, ranks = 4, 4, 1
effective = micro_batch * accumulation * ranks
print(effective, math.ceil(1000 / effective))

# %% [markdown] lang="ko"
# 누적 횟수를 2로 줄이면 된다. 그대로 두면 유효 배치는 두 배가 되고 갱신은 절반으로 준다. 학습률을 그대로 두었다면 같은 학습이 아니다. GPU 수를 바꾸고 나서 결과가 달라졌다면 이것부터 확인한다.
#
# ### 네 번 나누어 더하기
#
# "프랑스의 수도는 파리이다." 같은 문장 64개를 준비했다. 2장의 작은 GPT가 한 글자씩 읽고 다음 글자를 예측한다. 손실은 답(수도와 '이다.')의 글자에서만 계산한다. 우선 답이 똑같이 여섯 글자인 문장 16개만 쓴다.
# 왜 길이를 맞추었는지는 4.4절에서 알게 된다. 출력은 문장 수와 글자 수다.

# %%
inputs, labels = sentences()
rows = ((labels >= 0).sum(1) == 6).nonzero().flatten()[:16]
inputs[rows].shape

# %% [markdown] lang="ko"
# 배치의 손실은 배치에 든 모든 답 글자의 평균이다. 끝자리까지 비교하려고 fp64로 계산한다.

# %%
torch.manual_seed(0)
model = SmallLanguageModel().double()


def mean_loss(rows):
    return cross_entropy(model(inputs[rows]).flatten(0, 1), labels[rows].flatten())


round(mean_loss(rows).item(), 6)

# %% [markdown] lang="ko"
# 먼저 배치 16을 한 번에 넣고, 그레이디언트를 모두 이어 벡터 하나로 만든다(`whole`). 다음에는 4개짜리 마이크로 배치 네 개를 차례로 넣는다. `backward()`는 `grad`를 덮어쓰지 않고 **더한다.** 누적은 이 성질을 그대로 쓴다. 지우지 않고 네 번 부르면 된다.
# 네 평균을 더하면 네 배가 되므로 손실을 4로 나눈다. 출력은 그레이디언트의 원소 수와, 둘이 같은지다.

# %%
model.zero_grad()
mean_loss(rows).backward()
whole = gradient(model)

model.zero_grad()
for micro_batch in rows.split(4):
    loss = mean_loss(micro_batch) / 4
    loss.backward()
print(len(whole), difference(gradient(model), whole) < 1e-12)

# %% [markdown] lang="ko"
# `difference`는 두 벡터의 차이를 상대 노름(1.5절)으로 잰다. 0이면 같고, 1이면 기준이 되는 벡터의 크기만큼 다르다. 여기서는 10⁻¹²보다 작다.
#
# 마이크로 배치는 저마다 얼마를 보탤까? 출력층의 편향 여덟 개의 그레이디언트를 그린다. 색칠한 네 조각을 쌓은 것(점)이 큰 배치의 값(가로줄)과 만나는지 확인한다.

# %%
from helpers.chapters.c4_accumulation.pictures import draw_gradients, draw_losses

parts = []
for micro_batch in rows.split(4):
    model.zero_grad()
    (mean_loss(micro_batch) / 4).backward()
    parts.append(model.head.bias.grad[10:18].tolist())
model.zero_grad()
mean_loss(rows).backward()
draw_gradients(parts, model.head.bias.grad[10:18].tolist())

# %% [markdown] lang="ko"
# 조각 하나하나는 큰 배치와 다르고 부호가 반대인 것도 있다. 그래도 합은 모두 만난다. '같다'가 아니라 '10⁻¹²보다 작다'인 것은 덧셈의 순서가 달라 끝자리가 다르기 때문이다(1장의 반올림. 자료형마다 얼마인지는 4.10절).
#
# ## 4.2 학습 곡선
#
# 문장 16개를 60번 보며 세 가지로 학습한다. 배치 16, 마이크로 배치 4를 네 번 누적한 것(4 × 4), 누적 없는 배치 4다. 학습률은 모두 같고, 보는 문장의 수도 같다. 마지막 손실이 가장 낮은 것은 어느 것일까?

# %%
lowest = guess("4.2", None, ("16", "4 x 4", "4"))
lowest

# %% [markdown] lang="ko"
# 아래가 누적하는 학습 루프의 전부다. 표에서 둘째 열과 마지막 열을 비교한다.


# %%
def train(batch_size, accumulation, epochs=60):
    torch.manual_seed(0)
    model = SmallLanguageModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [0.0]
    for i, batch in enumerate(list(rows.split(batch_size)) * epochs):
        logits = model(inputs[batch]).flatten(0, 1)
        loss = cross_entropy(logits, labels[batch].flatten()) / accumulation
        loss.backward()
        losses[-1] += loss.item()
        if (i + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(0.0)
    return losses[:-1]


runs = {"16": (16, train(16, 1)), "4 x 4": (16, train(4, 4)), "4": (4, train(4, 1))}
print(lowest.against(min(runs, key=lambda name: runs[name][1][-1])))
table([{"split": name, "steps": len(ran), "first": ran[0], "last": ran[-1]} for name, (_, ran) in runs.items()])

# %% [markdown] lang="ko"
# 16과 4 × 4는 소수 셋째 자리까지 같다. 가로축을 학습한 샘플 수로 놓고 그리면 주황색 점(4 × 4)이 파란 선(16)에 겹치는가?

# %%
draw_losses(runs)

# %% [markdown] lang="ko"
# > **주장 1.** "누적하면 큰 배치와 같은 효과를 얻는다" (출처: 책 5장을 정리한 글, transformers 문서)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 반올림 오차를 빼면 그레이디언트도 학습 곡선도 같다. 조건은 4.4절, 4.5절, 4.10절(배치 정규화와 드롭아웃)에 있다.
#
# </details>
#
# 초록색(배치 4)은 혼자 다른 길로 간다. 왜 그런지 이유를 하나 떠올려 본다.
#
# > **주장 2.** "배치가 크면 더 빠르고 더 잘 수렴한다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 갱신 한 번만 보면 큰 배치가 낫다. 그러나 본 샘플의 수가 같다면 위의 그림처럼 작은 배치가 앞설 수 있다. 배치 4는 같은 문장을 보는 동안 네 배 자주 갱신했다. 단, 위의 비교는 같은 학습률로 문장 16개를 외우게 한 것이다.
# 배치를 키울 때는 학습률도 키운다. SGD에서는 배치에 비례해서(Goyal 외, 2017), Adam에서는 흔히 제곱근에 비례해서 키운다. 어느 크기를 넘으면 더 키워도 얻는 것이 없는데, 이것을 **임계 배치 크기**(critical batch size)라고 하고 과제마다 다르다(McCandlish 외, 2018).
#
# </details>
#
# 큰 배치가 주는 것은 무엇일까? 64개 문장 전체의 그레이디언트를 정답으로 놓고, 무작위로 B개를 뽑아(같은 문장이 또 뽑힐 수 있으므로 B가 64라도 0이 아니다) 구한 것이 얼마나 벗어나는지 16번씩 재어 평균한다(제곱평균제곱근).


# %%
def gradient_of(rows):
    model.zero_grad()
    mean_loss(rows).backward()
    return gradient(model)


everything, generator = gradient_of(torch.arange(64)), torch.Generator().manual_seed(0)
lines = []
for count in (1, 4, 16, 64):
    draws = [torch.randint(64, (count,), generator=generator) for _ in range(16)]
    error = (sum(difference(gradient_of(draw), everything) ** 2 for draw in draws) / 16) ** 0.5
    lines.append({"count": count, "error": error, "times_root": error * count**0.5})
table(lines)

# %% [markdown] lang="ko"
# 첫 열이 네 배가 될 때 둘째 열이 어떻게 변하는지, 셋째 열은 거의 일정한지 읽는다.
#
# > **주장 3.** "그레이디언트의 추정이 더 정확해진다" (출처: daje, 2023)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 오차는 √B에 반비례한다. 배치를 네 배로 키워야 절반으로 줄어드니, 키울수록 얻는 것에 견주어 비싸진다.
#
# </details>
#
# ## 4.3 메모리: 정말 배치 4만큼일까
#
# polyglot-ko-1.3b로 배치 16, 누적 없는 배치 4, 배치 4를 네 번 누적한 것(4 × 4)을 실행한다. '첫 스텝 직후'와 '최대'를 비교한다.

# %%
by_split = gpu_memory_sweep(batch_size=[16, 4])
by_split.append(gpu_memory_experiment(batch_size=4, gradient_accumulation_steps=4))
by_split

# %% [markdown] lang="ko"
# 배치 16은 들어가지 않고 4 × 4는 들어간다. 그리고 4 × 4의 숫자는 누적 없는 배치 4의 숫자와 모두 같다. 책의 출력도 그렇다. 책은 스텝 직후의 값만 출력하므로(3.7절) 그 사이의 차이는 보이지 않는다.
#
# '4 × 4의 메모리는 배치 4와 같다'고 말해도 될까? 맞다, 조건부로 맞다, 틀리다 가운데 하나를 골라 두고 나아간다. 4 × 4의 단계별 기록을 펼친다. 한 스텝에 순전파와 역전파가 네 번씩 있다. 둘째 순전파는 첫째와 같은 높이에서 시작하는가?

# %%
by_split[2].phases()

# %% [markdown] lang="ko"
# 둘째 순전파는 2.48 GiB가 아니라 4.98 GiB에서 시작한다. 앞의 마이크로 배치가 남긴 **그레이디언트가 그대로 있기 때문이다.** 누적이 없으면 그레이디언트가 생길 때 순전파 상태가 사라지고, 스텝이 끝나면 `zero_grad()`가 그레이디언트를 0으로 채우는 대신 아예 없앤다(`set_to_none=True`가 기본값이다). 그래서 둘이 거의 겹치지 않는다. 누적에서는 겹친다.
#
# 이 표의 최대는 어느 단계에 있는가? **옵티마이저 스텝**이다. foreach AdamW가 만드는 임시 텐서(3.7절) 때문이다. 임시 텐서를 만들지 않는 융합 AdamW로 바꾸면 무엇이 드러날까?

# %%
fused = gpu_memory_sweep(batch_size=4, gradient_accumulation_steps=[1, 4], optimizer="adamw_fused")
fused

# %% [markdown] lang="ko"
# 이 장의 처음에 적은 예상과 견준다.

# %%
four_by_four.against(fused[1].needed_bytes)

# %% [markdown] lang="ko"
# 1.94 GiB가 더 든다. 마이크로 배치가 8이면 foreach AdamW에서도 그럴까?

# %%
gpu_memory_sweep(batch_size=8, gradient_accumulation_steps=[1, 2])

# %% [markdown] lang="ko"
# 그렇다. 8에서는 최대가 스텝에서 역전파로 옮겨 가 12.42 GiB가 13.84 GiB로 늘었고, 판정도 '빠듯하다'로 바뀌었다.
#
# > **주장 4.** "4 × 4의 메모리는 배치 4와 같다" (출처: 책의 노트북 출력)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 최대가 옵티마이저 스텝에 있을 때만 그렇다. 아니라면 그레이디언트를 들고 있는 채로 순전파와 역전파를 하느라 더 들고, 많게는 그레이디언트의 크기(N)만큼 더 든다. `Trainer`의 기본값은 융합 AdamW이므로 실제로 만나는 것은 대개 늘어나는 쪽이다.
#
# </details>
#
# > **주장 5.** "누적은 메모리를 절약한다" (출처: daje, 2023)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 배치 16에 견주면 그렇다. 배치 4에 견주면 줄어드는 것이 없고, 위에서 보았듯 늘기도 한다. 무엇과 비교하는지가 빠진 말이다.
#
# </details>
#
# ### 줄어드는 것과 줄어들지 않는 것
#
# 최대인 순간에 무엇이 얼마나 있는지, 배치 16과 4 × 4를 종류별로 나란히 놓는다. 둘 다 융합 AdamW다. 네 줄 가운데 몇 줄이 줄어드는가?

# %%
from helpers import human_bytes, predict_memory

once = predict_memory(batch_size=16, optimizer="adamw_fused").at_peak
split = predict_memory(batch_size=4, gradient_accumulation_steps=4, optimizer="adamw_fused").at_peak
kinds = ("parameters", "optimizer", "gradients", "activations")
table([{"kind": kind, "16 x 1": human_bytes(once[kind]), "4 x 4": human_bytes(split[kind])} for kind in kinds])

# %% [markdown] lang="ko"
# 한 줄뿐이다. 누적은 **순전파 상태만** 줄인다. 파라미터와 옵티마이저 상태는 그대로고, 그레이디언트는 오히려 최대인 순간에도 자리를 지킨다. 파라미터와 옵티마이저 상태만으로 GPU가 찬다면 누적으로는 해결할 수 없다. 그때는 8비트 옵티마이저(3장), LoRA(8장), 여러 GPU(6장)를 찾는다.
#
# 이제 **내 배치를 몇으로 할지** 정할 수 있다.
#
# 1. 유효 배치 크기를 정한다. 참고하는 코드나 논문의 값에서 시작한다.
# 2. **누적을 켠 채로** 들어가는 가장 큰 마이크로 배치를 찾는다.
# 3. 누적 횟수 = 유효 배치 크기 ÷ (마이크로 배치 × GPU 수).
#
# 둘째에서 누적을 끄고 찾으면 얼마나 틀릴까? 융합 AdamW에서 누적이 없을 때와 두 번 누적할 때, 들어가는 가장 큰 마이크로 배치를 찾는다.

# %%
from helpers import largest_fitting

lines = []
for steps in (1, 2):
    largest = largest_fitting("batch_size", gradient_accumulation_steps=steps, optimizer="adamw_fused")
    lines.append({"accumulation": steps, "fits": largest})
table(lines)

# %% [markdown] lang="ko"
# 누적을 켜자 들어가는 샘플 수가 줄었다. (3.10절에서 배치 13이 넘친 것은 스텝에 임시 텐서를 만드는 foreach AdamW였다.) 한 번 켜면 횟수를 더 늘려도 이 수는 줄지 않을까? 사건 4-A가 그 질문이다. 경계에 있는 크기는 단편화(3.10절) 때문에 실제 GPU에서 넘칠 수 있으니 한두 개 적게 잡는다.
#
# **연습 4-1.** polyglot-ko-1.3b를 길이 512로 T4에서 학습한다(옵티마이저는 `predict_memory`의 기본값인 foreach AdamW다). 유효 배치가 32가 되게 `batch_size`와 `gradient_accumulation_steps`를 정하라. 들어가는 것 가운데 가장 적게 나누어야 한다. 예를 들면 `{"batch_size": 32}`처럼 쓴다. 막히면 `exercise("4-1").hint()`, 그래도 막히면 `exercise("4-1").solution()`을 실행한다.

# %%
changes = ...
exercise("4-1").check(changes)

# %% [markdown] lang="ko"
# ### 사건 4-A. 누적을 켰더니 OOM
#
# 누적이 1이면 잘 돌아가던 7B 모델의 학습이 2로 바꾸자 메모리 부족으로 멈추었다는 신고가 있다(TPU와 JAX에서다). 마이크로 배치는 그대로였다. 같은 일이 T4에서도 일어난다. polyglot-ko-1.3b, 융합 AdamW, 마이크로 배치 12에서 누적 1은 들어가고 2는 넘친다.
#
# 64번 누적하려던 참이라고 하자. **배치 12 × 64는 몇 GiB가 필요한가?** 실험은 다섯 번, 누적은 4번까지만 해 볼 수 있다. `case("4-A").run(gradient_accumulation_steps=2)`처럼 실행하면 보고서가 나온다. `batch_size`도 바꿀 수 있다. 답은 GiB로 적는다.

# %%
needed = ...
case("4-A").check(needed)

# %% [markdown] lang="ko"
# ### 샘플 하나가 넘칠 때
#
# Llama-3.2-1B를 길이 6144로, T4보다 큰 L4에서 학습하려 한다. 옵티마이저는 8비트 AdamW다. 배치를 1까지 줄이면 들어갈까?

# %%
predict_memory(gpu="L4", model_id="Llama-3.2-1B", optimizer="adamw_8bit", batch_size=1, sequence_length=6144)

# %% [markdown] lang="ko"
# > **주장 6.** "누적이 늘 OOM을 막아 주지는 않는다" (출처: daje, 2023)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 누적은 배치를 샘플 하나까지만 나눈다. 샘플 하나가 넘치면 배치로는 더 나눌 것이 없다. 그때는 다른 것을 나눈다. 위의 예에서 8.8 GiB는 로짓 크기의 fp32 텐서 세 벌이므로(3 × 6144 × 128256 × 4바이트) 손실을 토큰 조각으로 나누는 것이 먼저고(3.11절), 그다음이 5장의 체크포인팅이다.
#
# </details>
#
# T4에서 Llama나 Qwen의 긴 글이 넘친다면 어텐션 커널부터 의심한다(3.12절).
#
# ## 4.4 여섯 가지 실수
#
# 누적은 잘못 써도 오류가 나지 않는다. 손실은 내려가고, 결과만 조금 나쁘다. 아래 표에 흔한 실수 여섯 가지와 증상이 있다. 마지막 열은 비어 있다. 하나씩 틀려 보고 잰 값으로 채운다. '크기'는 옳은 그레이디언트의 몇 배인지, '차이'는 옳은 것과 얼마나 다른지다(0이면 같다).

# %%
from helpers.chapters.c4_accumulation.mistakes import Mistakes, compared

mistakes = Mistakes()
mistakes

# %% [markdown] lang="ko"
# ### 나누기를 잊는다, 지우는 곳을 틀린다
#
# 첫째, 손실을 4로 나누지 않는다. 둘째, `zero_grad()`를 마이크로 배치마다 부른다.


# %%
def accumulate(micro_batches, scale=1 / 4, zero_every_time=False):
    model.zero_grad()
    for micro_batch in micro_batches:
        if zero_every_time:
            model.zero_grad()
        (mean_loss(micro_batch) * scale).backward()
    return gradient(model)


mistakes["undivided"] = compared(accumulate(rows.split(4), scale=1), whole)
mistakes["zeroed"] = compared(accumulate(rows.split(4), zero_every_time=True), whole)
print(mistakes["undivided"], mistakes["zeroed"], sep="\n")

# %% [markdown] lang="ko"
# 나누지 않으면 그레이디언트가 네 배다. SGD라면 학습률이 네 배가 된 것과 같다. AdamW라면 어떨까? 네 배인 그레이디언트로 다섯 스텝을 가면, 원래 그레이디언트로 갈 때의 몇 배를 움직일까?

# %%
adamw_moves = guess("4.4", None)
adamw_moves

# %% [markdown] lang="ko"
# 두 옵티마이저로 가 보고, 움직인 거리의 비율을 출력한다.


# %%
def distance(optimizer_class, factor):
    weight = nn.Parameter(torch.zeros(100, dtype=torch.float64))
    optimizer = optimizer_class([weight], lr=1e-3)
    for step in range(5):
        weight.grad = whole[100 * step : 100 * step + 100] * factor
        optimizer.step()
    return float(weight.detach().norm())


ratios = {one.__name__: distance(one, 4) / distance(one, 1) for one in (torch.optim.SGD, torch.optim.AdamW)}
print({name: round(ratio, 3) for name, ratio in ratios.items()})
adamw_moves.against(ratios["AdamW"])

# %% [markdown] lang="ko"
# AdamW는 그레이디언트를 제 크기로 나누어 쓰므로 네 배가 되어도 거의 똑같이 움직인다. 그래서 이 실수는 AdamW에서 **눈에 띄지 않는다.** 그러다가 그레이디언트 클리핑을 켜거나 옵티마이저를 바꾸는 순간 드러난다.
# 지우는 곳을 틀리면 마지막 마이크로 배치의 4분의 1만 남는다(그 마이크로 배치의 그레이디언트가 큰 배치의 1.2배라서 크기가 0.25가 아니라 0.30배다). 넷 가운데 셋은 계산해 놓고 버린다. AdamW라면 그 크기마저 상관없으니, 그냥 배치 4로 네 배 느리게 학습하는 것과 같다.
#
# ### 길이가 다른 샘플: 평균의 평균
#
# 이번에는 길이가 제각각인 문장 16개를 짧은 것부터 놓는다. 비슷한 길이끼리 묶는 것은 패딩(padding, 길이를 맞추려고 채우는 토큰)을 아끼려고 흔히 하는 일이다. 마이크로 배치마다 답의 글자는 몇 개일까?

# %%
by_length = (labels >= 0).sum(1).argsort(stable=True)[::4]
[int((labels[micro_batch] >= 0).sum()) for micro_batch in by_length.split(4)]

# %% [markdown] lang="ko"
# 마이크로 배치마다 평균을 내어 4로 나누면, 첫 마이크로 배치의 글자 하나는 1/20 ÷ 4, 마지막 마이크로 배치의 글자 하나는 1/31 ÷ 4만큼 들어간다. 큰 배치에서는 어느 글자나 1/101이다. 평균의 평균은 **글자가 적은 마이크로 배치를 더 무겁게** 센다.
#
# 옵티마이저 스텝 하나에 들어가는 마이크로 배치들을 **묶음**이라고 하자. 고치려면 평균 대신 합을 구해 **묶음 전체의 글자 수**로 나눈다(여기서는 글자 하나가 토큰 하나다). (합₁ + 합₂ + 합₃ + 합₄) ÷ 101이다. 평균의 평균과 토큰 수로 나눈 것을 각각 큰 배치와 비교한다.

# %%
whole_by_length = gradient_of(by_length)
mistakes["mean_of_means"] = compared(accumulate(by_length.split(4)), whole_by_length)
model.zero_grad()
count = (labels[by_length] >= 0).sum()
for micro_batch in by_length.split(4):
    logits = model(inputs[micro_batch]).flatten(0, 1)
    (cross_entropy(logits, labels[micro_batch].flatten(), reduction="sum") / count).backward()
print(mistakes["mean_of_means"], compared(gradient(model), whole_by_length), sep="\n")

# %% [markdown] lang="ko"
# 이 네 마이크로 배치에서는 7%쯤 어긋난다. 대화와 문서가 섞인 데이터처럼 길이의 차이가 크면 더 어긋날 수 있다.
#
# transformers의 `Trainer`도 2024년 10월까지 이랬다. Unsloth가 알렸고 [transformers #34191](https://github.com/huggingface/transformers/issues/34191)에서 고쳐졌으며, 나중에 다른 모습으로 되돌아오기도 했다([#35438](https://github.com/huggingface/transformers/issues/35438), [#37766](https://github.com/huggingface/transformers/issues/37766)). 지금의 `Trainer`는 스텝 전체의 토큰 수(`num_items_in_batch`)를 세어 모델에 넘긴다. 모델이 그 수를 쓰지 않을 때 어떻게 되는지는 4.6절에서 해 본다.
#
# **연습 4-2.** 마이크로 배치마다 답의 토큰 수가 다르다. 토큰 수의 목록을 받아, 마이크로 배치마다 **평균 손실에 곱할 수**의 목록을 돌려주는 함수를 완성하라. 곱해서 더하면 큰 배치의 손실이 되어야 한다.


# %%
def factors(token_counts):
    return ...


exercise("4-2").check(factors)

# %% [markdown] lang="ko"
# ### 덜 찬 마지막 묶음
#
# 마이크로 배치가 열 개이고 네 번씩 누적하면 마지막에 둘이 남는다. 세 가지 처리가 있다. 버리거나, 4로 나누거나, 실제 수인 2로 나눈다. 남은 둘을 4로 나눈 것과 2로 나눈 것을, 남은 여덟 문장을 한 번에 넣은 것과 비교한다.

# %%
left_over = rows[:8]
mistakes["left_over"] = compared(accumulate(left_over.split(4), 1 / 4), gradient_of(left_over))
print(mistakes["left_over"], compared(accumulate(left_over.split(4), 1 / 2), gradient_of(left_over)), sep="\n")

# %% [markdown] lang="ko"
# 4로 나누면 절반이 된다. 버리면 에폭마다 그만큼을 학습하지 않고(섞지 않으면 늘 같은 문장이다), 4.2절의 루프처럼 `(i + 1) % accumulation`으로만 세면 **다음 에폭(epoch)의 첫 묶음에 섞인다.**
#
# `Trainer`에서도 2025년까지 에폭의 마지막 스텝만 손실과 노름이 절반으로 찍히는 일이 있었다([transformers #38837](https://github.com/huggingface/transformers/issues/38837), [#39659](https://github.com/huggingface/transformers/issues/39659)에서 고쳤다).
#
# **연습 4-3.** 샘플 수, 마이크로 배치 크기, 누적 횟수를 받아 한 에폭의 옵티마이저 스텝 수를 돌려주는 함수를 완성하라. 덜 찬 마이크로 배치와 덜 찬 묶음도 버리지 않는다. 학습률 일정의 길이를 정할 때 쓰는 수다.


# %%
def optimizer_steps(samples, micro_batch, accumulation):
    return ...


exercise("4-3").check(optimizer_steps)

# %% [markdown] lang="ko"
# ### 클리핑은 스텝마다
#
# **그레이디언트 클리핑**(clipping)은 그레이디언트의 크기(노름)가 한도를 넘으면 한도까지 줄이는 일이다. 다 모은 뒤 한 번 하는 것과 루프 안에서 마이크로 배치마다 하는 것을, 한도 1에서 비교한다. 첫 줄은 루프 안에서 줄이기 직전의 노름 네 개다.

# %%
model.zero_grad()
mean_loss(rows).backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
once = gradient(model)

model.zero_grad()
norms = []
for micro_batch in rows.split(4):
    (mean_loss(micro_batch) / 4).backward()
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
mistakes["clipped_inside"] = compared(gradient(model), once)
print(*(f"{norm:.2f}" for norm in norms))
print(mistakes["clipped_inside"])

# %% [markdown] lang="ko"
# 크기는 맞는데 방향이 다르다. `grad`에는 지금까지의 합이 들어 있으므로, 먼저 들어온 조각은 여러 번 줄어들고 마지막 조각은 가장 덜 줄어든다. 노름만 보아서는 알 수 없는 실수다. 2019년 transformers의 공식 예제도 마이크로 배치마다 클리핑했다([#1563](https://github.com/huggingface/transformers/issues/1563)).
#
# fp16으로 학습한다면 순서가 하나 더 있다. 손실 스케일링(1장)을 푸는 `scaler.unscale_(optimizer)`도 다 모은 뒤 클리핑 직전에 **한 번만** 부른다. 두 번 부르면 오류가 난다([accelerate #641](https://github.com/huggingface/accelerate/issues/641)).
#
# ### 학습률 일정도 스텝마다
#
# 10스텝에 걸쳐 0으로 내리는 일정을 마이크로 배치마다 한 칸씩 움직이면 어떻게 될까? 옵티마이저 스텝마다 쓰인 학습률을 출력한다. 첫 줄이 옳은 것이고, 마지막 줄은 PyTorch의 경고다.


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
    wrong = rates(every_micro_batch=True)
print(*wrong)
print(str(caught[0].message).split(". ")[0])

# %% [markdown] lang="ko"
# 둘째 줄은 네 배 빨리 끝나서, 열 스텝 가운데 여덟 스텝이 학습률 0으로 지나갔다. 여섯 가지 실수 가운데 이것만은 PyTorch가 경고를 한 줄 낸다. 옵티마이저가 한 번도 움직이기 전에 일정이 움직였기 때문이다. 마지막 칸을 채우고 표를 다시 펼친다. 학습률 열 개를 벡터로 보고 쟀다.

# %%
mistakes["scheduled_inside"] = compared(torch.tensor(wrong), torch.tensor(rates(every_micro_batch=False)))
mistakes

# %% [markdown] lang="ko"
# 크기가 거의 1배인 줄이 둘 있다. 평균의 평균과 루프 안 클리핑은 노름을 지켜보아도 드러나지 않는다.
#
# ### 사건 4-B. 배치 16과 곡선이 다르다
#
# 누군가 4 × 4로 누적하는 루프를 보내왔다. 손실은 잘 내려가는데, 같은 데이터로 배치 16을 한 번에 넣은 것과 곡선이 다르다고 한다. 루프에는 위의 실수 가운데 **둘**이 들어 있다(학습률 일정은 아니다). 코드는 볼 수 없고, 마지막 스텝의 그레이디언트를 옳은 것과 비교할 수만 있다.
#
# 실험은 다섯 번이다. `case("4-B").run()`에서 `lengths="mixed"`(길이가 다른 문장), `micro_batches=6`(마지막 묶음이 둘), `max_norm=1.0`(클리핑)을 바꿀 수 있다. 답은 표의 이름 둘을 `{"...", "..."}`처럼 적는다.

# %%
guilty = ...
case("4-B").check(guilty)

# %% [markdown] lang="ko"
# ## 4.5 bf16으로 여러 번 더하면
#
# 지금까지는 fp64로 더했다. 가중치를 bf16으로 불러와 그대로 학습하면 `grad`도 bf16이고, 누적은 bf16끼리의 덧셈이 된다. bf16에서 0에 1을 1,000번 더하면 얼마가 될까? bf16의 유효 숫자가 몇 비트인지 떠올린다.

# %%
thousand_ones = guess("4.5", None)
thousand_ones

# %% [markdown] lang="ko"
# 하나씩 더해 본다.

# %%
total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(1000):
    total += 1
thousand_ones.against(total.item())

# %% [markdown] lang="ko"
# 256에서 멈춘다. bf16은 유효 숫자가 8비트라, 256 다음의 수가 258이기 때문이다. 256 + 1은 257이 아니라 다시 256으로 반올림된다. 1장의 **흡수**(swamping)다. 합이 커지면 작은 것을 아무리 더해도 변하지 않는다.
#
# 그레이디언트에서도 그럴까? 문장 64개의 그레이디언트를 하나씩 구해 두고, 섞어 가며 1,024번 더한다(가중치는 그대로 둔다). 합을 정확히 더한 것과 비교한다. 이름의 앞은 그레이디언트의 자료형, 뒤는 더하는 곳의 자료형이다. 두 축은 모두 로그이고, 10⁻⁶보다 작은 오차는 10⁻⁶에 그린다. 출력된 숫자는 bf16끼리 더한 줄이다.

# %%
from helpers.chapters.c4_accumulation.precision import draw_lost, sum_errors

singles = [gradient_of(torch.tensor([row])) for row in range(64)]
ways = {"bf16 + bf16": (torch.bfloat16, torch.bfloat16), "fp16 + fp16": (torch.float16, torch.float16)}
ways["bf16 + fp32"] = (torch.bfloat16, torch.float32)
errors = {name: sum_errors(singles, (4, 16, 64, 256, 1024), *dtypes) for name, dtypes in ways.items()}
print({count: f"{error:.1%}" for count, error in errors["bf16 + bf16"].items()})
draw_lost(errors)

# %% [markdown] lang="ko"
# 이 모델에서는 누적이 수십 번이면 1% 안쪽이다. 256번에서는 3%, 1,024번에서는 35%가 어긋났다. 파이프라인 병렬(7장)처럼 마이크로 배치가 아주 많은 학습에서 문제가 될 수 있다. 그림에서 가수가 3비트 더 긴 fp16은 훨씬 아래에 있고, 그레이디언트는 bf16이어도 **더하는 곳만 fp32이면** 더하면서 생기는 오차가 사라진다(그레이디언트마다 한 번씩 한 bf16 반올림은 남는다).
#
# 그래서 Megatron은 bf16으로 학습할 때 fp32로 된 누적용 그레이디언트 `main_grad`를 따로 둔다([Megatron-LM #502](https://github.com/NVIDIA/Megatron-LM/issues/502)). DeepSpeed에서는 `"data_types": {"grad_accum_dtype": "fp32"}`로 고른다([DeepSpeed #1800](https://github.com/deepspeedai/DeepSpeed/issues/1800)에서 요청되었다). PyTorch로는 파라미터마다 훅(hook) 하나면 된다(4.10절).
#
# 대가는 메모리다. 파라미터마다 2바이트이던 그레이디언트가 4바이트가 된다. 가중치를 fp32로 두는 혼합 정밀도(`Trainer`에서 fp32로 불러온 모델에 `bf16=True`)라면 `grad`가 처음부터 fp32이므로 이 문제가 없다. transformers 5는 체크포인트의 자료형 그대로 불러오므로(`dtype="auto"`가 기본값이다) bf16 체크포인트라면 `dtype=torch.float32`를 적어야 그렇게 된다.

# %% [markdown] lang="ko"
# ## 4.6 베껴 쓸 루프
#
# 실수 여섯 가지를 모두 피한 루프다.
#
# 한 스텝에 들어갈 마이크로 배치를 **먼저 모은다.** 그러면 토큰 수를 미리 셀 수 있고, 덜 찬 마지막 묶음도 실제 토큰 수로 나누어진다. `[:, :-1]`과 `[:, 1:]`은 한 칸 뒤의 글자를 맞히게 하려고 transformers의 모델이 안에서 하는 일을 밖에서 한 것이다.


# %%
def train_step(model, optimizer, schedule, micro_batches, max_norm=1.0):
    tokens = sum((one["labels"][:, 1:] >= 0).sum() for one in micro_batches)
    for one in micro_batches:
        inputs = {name: value for name, value in one.items() if name != "labels"}
        logits = model(**inputs).logits[:, :-1].flatten(0, 1).float()
        loss = cross_entropy(logits, one["labels"][:, 1:].flatten(), reduction="sum")
        (loss / tokens).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return norm.item()


# %% [markdown] lang="ko"
# 모델이 GPU에 있다면 루프 안의 첫 줄에 `one = {name: value.to(model.device) for name, value in one.items()}`를 넣는다. `micro_batches`는 두 번 훑으므로 제너레이터가 아니라 목록이어야 한다.
#
# `.float()`가 없으면 fp16에서는 손실의 합이 65504를 넘어 inf가 될 수 있다(1장). T4에서 fp32 가중치를 fp16 `autocast`로 학습한다면 다음 줄이 달라진다(여기서는 실행하지 않는다).
#
# ```python
# scaler = torch.amp.GradScaler("cuda")  # 학습을 시작할 때 한 번
#
# with torch.autocast("cuda", torch.float16):
#     logits = model(**inputs).logits[:, :-1].flatten(0, 1).float()
# scaler.scale(loss / tokens).backward()
#
# scaler.unscale_(optimizer)  # 클리핑 바로 앞
# norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
# scaler.step(optimizer)
# scaler.update()
# ```
#
# 드롭아웃이 없는 작은 GPT-2를 길이가 다른 문장 16개로 세 스텝 학습한다. `while` 두 줄이 `DataLoader`에서 누적 횟수만큼씩 꺼내 넘긴다. 첫 줄은 16을 한 번에 넣을 때, 둘째 줄은 4 × 4일 때의 그레이디언트 노름이다. 마지막 수는 두 모델이 움직인 것의 차이다(움직인 거리에 견준 비율).

# %%
from itertools import islice

samples = capital_samples(by_length)


def recipe(micro_batch, accumulation, steps=3):
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    batches = iter(torch.utils.data.DataLoader(samples * steps, batch_size=micro_batch))
    while group := list(islice(batches, accumulation)):
        print(f"{train_step(model, optimizer, schedule, group):.3f}", end=" ")
    return moved(model)


by_recipe = recipe(16, 1)
print()
by_four = recipe(4, 4)
print(f"\n{difference(by_four, by_recipe):.4f}")

# %% [markdown] lang="ko"
# 소수 넷째 자리까지 같다. 문장의 수가 나누어떨어지지 않으면 마지막 `group`이 작을 뿐이고, 나누는 수는 그 묶음의 토큰 수다. `samples[:14] * steps`로 바꾸어 확인해 보라.
#
# ### Trainer
#
# `Trainer`에 4 × 4로 맡긴다. `train_with_trainer`는 받은 인자로 `TrainingArguments`를 만들어 CPU에서 조용히 학습할 뿐이다. 클리핑(노름 1)과 0까지 내려가는 학습률 일정은 `Trainer`의 기본값이라 적지 않았다. 손으로 쓴 루프와 얼마나 다를까?

# %%
from helpers.trainers import train_with_trainer

settings = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "optim": "adamw_torch",
}
four_by_four_trained = train_with_trainer(small_gpt2(), samples, **settings)
print(f"{difference(moved(four_by_four_trained), by_recipe):.4f}")

# %% [markdown] lang="ko"
# 길이가 달라도 같다. `Trainer`가 토큰 수로 나누어 주기 때문이다.
#
# 그런데 이것은 **모델이 `num_items_in_batch`를 받아 쓸 때**의 이야기다. `Trainer`는 `forward`에 `**kwargs`가 있으면 모델이 알아서 나눈다고 믿고 손실을 나누지 않는다. 손실을 직접 쓴 모델이 그 수를 받기만 하고 쓰지 않으면 어떻게 될까? SGD로 한 스텝, 누적 1과 4에서 움직인 거리의 비율이다.


# %%
class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small_gpt2()

    def forward(self, input_ids, labels, **kwargs):
        logits = self.inner(input_ids=input_ids).logits[:, :-1].flatten(0, 1)
        return {"loss": cross_entropy(logits, labels[:, 1:].flatten())}


plain = {"max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0}
at_once = train_with_trainer(OwnLoss(), samples, per_device_train_batch_size=16, **plain)
split = train_with_trainer(OwnLoss(), samples, **{**settings, **plain})
print(f"{moved(split.inner).norm() / moved(at_once.inner).norm():.1f}")

# %% [markdown] lang="ko"
# 네 배다. 첫째 실수가 라이브러리 속에서 되살아난 것이다. 비슷한 신고가 되풀이되었다([transformers #37197](https://github.com/huggingface/transformers/issues/37197)의 Gemma 3, [#37766](https://github.com/huggingface/transformers/issues/37766)). 확인하는 방법은 간단하다. **누적을 1에서 4로 바꾸었을 때 로그의 손실과 `grad_norm`이 네 배가 되면** 이 경우다. 합을 `num_items_in_batch`로 나누거나, 같은 일을 하는 `compute_loss_func`를 `Trainer`에 준다. `**kwargs`만 없애면 평균의 평균이 된다.
#
# Accelerate의 `accumulate`는 평균의 평균을 내고 덜 찬 마지막 묶음도 꽉 찬 듯 나눈다. 여러 GPU에서는 누적하는 동안 그레이디언트를 한 번만 보내야 한다. 두 가지 모두 4.10절에서 실행한다.
#
# ## 4.7 시간과 연산
#
# 누적하면 느려질까? 먼저 센다. 행렬곱의 부동소수점 연산(FLOPs)을 배치 16을 나누는 세 가지 방법에서 비교한다. 어느 방법이 연산을 더 하는가?

# %%
from helpers import training_flops

lines = []
for size in (16, 4, 1):
    flops = 16 // size * training_flops(batch_size=size, sequence_length=256).total
    lines.append({"split": f"{size} x {16 // size}", "tflop": flops / 1e12})
table(lines)

# %% [markdown] lang="ko"
# > **주장 7.** "누적은 순전파와 역전파를 더 해야 한다" (출처: 책 5장을 정리한 글, transformers 문서)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 부르는 횟수는 늘지만 샘플 16개를 한 번씩 계산하는 연산은 그대로다. 옵티마이저 스텝은 배치 4를 그냥 쓸 때의 4분의 1로 준다.
#
# </details>
#
# 연산이 같으면 시간도 같을까? 작은 행렬은 장치를 다 쓰지 못한다. 이 노트북을 실행한 컴퓨터에서 잰다. GPU가 있으면 GPU, 없으면 CPU다. 블록 네 개짜리 모델로 샘플 16개를 여러 가지로 나누어, 옵티마이저 스텝까지 포함한 한 스텝의 시간(중앙값)과 초당 샘플 수를 낸다.

# %% tags=["nbval-ignore-output"]
import statistics
import time

device = "cuda" if torch.cuda.is_available() else "cpu"
timed = SmallLanguageModel(width=256, depth=4).to(device)
optimizer = torch.optim.AdamW(timed.parameters())
samples_on_device = inputs[rows].to(device)
lines = []
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
    lines.append({"split": f"{size} x {16 // size}", "milliseconds": seconds * 1e3, "samples": 16 / seconds})
table(lines)

# %% [markdown] lang="ko"
# 저장된 출력에서는 16 × 1과 8 × 2가 초당 21개로 같고, 거기서부터 떨어져 1 × 16은 12개다. 마이크로 배치가 작아질수록 초당 샘플 수가 떨어진다면 장치가 놀고 있다는 뜻이다. 어느 크기부터 더 키워도 오르지 않는다면 거기가 마이크로 배치의 알맞은 크기이고, 그보다 큰 배치는 누적으로 만들어도 손해가 없다.
#
# > **주장 8.** "누적하면 느려진다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 연산은 그대로다. 마이크로 배치가 장치를 채우지 못할 만큼 작을 때만 느려지고, 얼마나 느려지는지는 컴퓨터마다 다르다. 저장된 출력은 CPU에서 잰 시간이다.
#
# </details>
#
# 진짜 GPU에서는 어떨까? H100 한 장에서 polyglot-ko-1.3b를 길이 256으로 학습하며 스텝 하나의 시간을 잰 기록이 저장소에 있다. 마지막 줄은 4 × 4, 곧 배치 16이다.

# %%
from helpers.card_times import h100_steps

h100_steps("bf16 batch 1", "bf16 batch 8", "bf16 batch 16", "bf16 4 x 4 accumulated")

# %% [markdown] lang="ko"
# 배치 1과 8의 스텝이 거의 같은 시간이 걸린다. 배치 1은 그만큼 GPU를 놀렸다는 뜻이다. 그래서 4 × 4는 16을 한 번에 하는 것보다 가장 짧은 시간으로 2.8배, 중앙값으로 3.3배 걸렸다. H100에서 이 모델은 마이크로 배치 16까지도 키울수록 샘플 하나의 시간이 준다. 느린 카드일수록 더 작은 배치로도 꽉 차지만, T4에서 잰 기록은 없다. 여섯 번 재어 가장 짧은 것과 중앙값이고, 둘이 20% 가까이 벌어지기도 하니 그보다 작은 차이는 뜻이 없다.

# %% [markdown] lang="ko"
# ## 4.8 직접 바꿔 보기
#
# **언제 쓸까?** 원하는 배치가 들어가지 않을 때만 쓴다. 들어간다면 나눌 이유가 없다. 나눌 때는 들어가는 가장 큰 마이크로 배치를 고른다. 4.2절에서 보았듯 배치를 키우는 것 자체가 목적은 아니다.
#
# 유효 배치 크기를 고정하고 마이크로 배치를 바꾸면 메모리와 횟수가 어떻게 달라지는지 그린다. 나누는 방법마다 막대가 하나씩 있고, 위의 줄은 고른 방법이다. 아래 그림은 처음 모습이다.
#
# ![polyglot-ko-1.3b로 배치 16을 나누는 방법들의 메모리. 16 × 1은 15.25 GiB로 T4의 한도를 넘고, 8 × 2는 13.84 GiB로 빠듯하게, 4 × 4는 12.42 GiB로 들어간다.](../../image/04_splits_of_16.svg)
#
# - 옵티마이저를 adamw_fused로 바꾼다. 어느 막대가 줄고 어느 막대가 그대로인가?
# - 유효 배치 크기를 64로 올린다. 들어가는 막대는 몇 개인가? 마이크로 배치가 같으면 배치가 달라도 메모리가 같은가?

# %%
from helpers import accumulation_panel

accumulation_panel()

# %% [markdown] lang="ko"
# ## 4.9 기억할 것
#
# | 무엇 | 옳게 |
# |---|---|
# | 유효 배치 크기 | 마이크로 배치 × 누적 횟수 × 데이터 병렬 GPU 수 |
# | 손실 | 누적 횟수로, 길이가 다르면 묶음 전체의 토큰 수로 나눈다 |
# | `zero_grad()`, 클리핑, 학습률 일정 | 다 모은 뒤 옵티마이저 스텝마다 한 번 |
# | 덜 찬 마지막 묶음 | 실제 토큰 수로 나누어 한 스텝 더 |
# | bf16 그레이디언트를 수백 번 더할 때 | fp32로 더한다(`main_grad`) |
# | DDP | `no_sync()`로 순전파와 역전파를 모두 감싼다(4.10절) |
# | 배치 정규화 | 누적으로 고칠 수 없다(4.10절) |
#
# - 옳게 나누고 배치 정규화와 드롭아웃이 없으면, 누적한 그레이디언트는 큰 배치의 그레이디언트와 **반올림만큼만** 다르다.
# - 줄어드는 것은 순전파 상태뿐이다. 들고 있는 그레이디언트가 다음 마이크로 배치와 **겹친다**.
# - 연산은 늘지 않는다. 누적을 켠 채로 들어가는 가장 큰 마이크로 배치로 나눈다.
# - 누적 횟수를 바꾸었을 때 손실과 `grad_norm`이 따라 변하면 어딘가에서 잘못 나누고 있는 것이다.
#
# 이 장에서 예상한 것과 결과다.

# %%
guesses()

# %% [markdown] lang="ko"
# 샘플 하나도 들어가지 않으면 더 나눌 수 없다. 그렇다면 순전파 상태를 아예 저장하지 않으면 어떨까? [5장](05_gradient_checkpointing.ipynb)에서 답한다.

# %% [markdown] lang="ko"
# ## 4.10 더 읽을거리
#
# ### 끝자리는 왜 다른가
#
# 4.1절에서 왜 '10⁻¹²보다 작다'고만 하고 '같다'고 하지 않았을까? 컴퓨터의 덧셈은 순서가 바뀌면 끝자리가 달라지기 때문이다(1장의 반올림). 큰 배치는 16개를 한꺼번에 더하고, 누적은 4개씩 더한 것을 다시 더한다. 자료형마다 얼마나 어긋날까? 정확한 숫자는 CPU에 따라 조금 다르다.

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
# 차이는 그 자료형의 반올림 크기(fp64 10⁻¹⁶, fp32 10⁻⁷, bf16 10⁻³)와 같은 자릿수다. 누적이 틀린 것이 아니라 어느 쪽도 정확하지 않은 것이다. 다만 bf16으로 수백 번 더하면 이야기가 달라진다(4.5절).
#
# ### Accelerate
#
# `accumulate` 블록 안에서는 마지막 마이크로 배치에서만 옵티마이저와 학습률 일정이 움직인다. `backward`는 손실을 누적 횟수로 나눈다. 이것은 **평균의 평균**이므로, 길이가 다르면 합을 전체 토큰 수로 나눈 다음 누적 횟수를 미리 곱해 둔다. 클리핑은 `sync_gradients`가 참일 때만 한다. 손실을 평균 그대로 쓴 것과 토큰 수로 나눈 것이 손으로 쓴 루프와 얼마나 다른지 출력한다.

# %%
from accelerate import Accelerator


def with_accelerate(count_tokens, steps=3):
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=4), small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    loader = torch.utils.data.DataLoader(samples * steps, batch_size=4)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    tokens = sum((sample["labels"][1:] >= 0).sum() for sample in samples)
    for one in loader:
        with accelerator.accumulate(model):
            counted = {"num_items_in_batch": tokens} if count_tokens else {}
            accelerator.backward(model(**one, **counted).loss * (4 if count_tokens else 1))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return moved(model)


print(*(f"{difference(with_accelerate(count_tokens), by_recipe):.2f}" for count_tokens in (False, True)))

# %% [markdown] lang="ko"
# 평균 그대로 쓰면 세 스텝 만에 움직인 거리의 22%가 어긋난다. 길이가 다른 데이터에 Accelerate를 쓴다면 토큰 수를 직접 세어야 한다(Accelerate의 문서도 이렇게 하라고 적는다).
#
# 덜 찬 마지막 묶음은 어떨까? 그레이디언트가 늘 1인 모델에 마이크로 배치 여섯 개를 넷씩 누적한다. 옵티마이저가 움직인 두 번의 그레이디언트를 출력한다. 둘 다 1이어야 한다.

# %%
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
one_weight = nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(one_weight.parameters(), lr=0.0)
loader = torch.utils.data.DataLoader(torch.ones(24, 1), batch_size=4)
one_weight, optimizer, loader = accelerator.prepare(one_weight, optimizer, loader)
for ones in loader:
    with accelerator.accumulate(one_weight):
        accelerator.backward(one_weight(ones).mean())
        if accelerator.sync_gradients:
            print(one_weight.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()

# %% [markdown] lang="ko"
# 마지막은 절반이다. 4.4절의 실수가 이 버전(1.15)의 Accelerate에 그대로 있다. 마이크로 배치의 수가 누적 횟수로 나누어떨어지게 하거나, 위의 `train_step`처럼 묶음을 먼저 모은다.
#
# ### GPU가 여러 개라면
#
# 데이터 병렬(6장)에서는 DDP가 `backward()`마다 GPU들의 그레이디언트를 평균한다(all-reduce). 가짜 rank 네 개 가운데 하나에서, 네 번 누적하는 동안 all-reduce에 넘긴 바이트를 센다.

# %%
from contextlib import nullcontext

from helpers.chapters.c4_accumulation.communication import all_reduced_bytes


def ddp_loss(ddp, part):
    return cross_entropy(ddp(inputs[part]).flatten(0, 1), labels[part].flatten()) / 4


def every_time(ddp, part, last):
    ddp_loss(ddp, part).backward()


all_reduced_bytes(model, every_time, rows.split(4))

# %% [markdown] lang="ko"
# 그레이디언트 전체를 네 번 보냈다. 누적한다면 마지막에 한 번이면 된다. `no_sync()`가 앞의 것을 건너뛰게 한다. `backward()`만 감싸는 것과 순전파까지 감싸는 것, 어느 쪽이 옳을까?


# %%
def around_backward(ddp, part, last):
    loss = ddp_loss(ddp, part)
    with nullcontext() if last else ddp.no_sync():
        loss.backward()


def around_both(ddp, part, last):
    with nullcontext() if last else ddp.no_sync():
        ddp_loss(ddp, part).backward()


for micro_step in (around_backward, around_both):
    print(f"{micro_step.__name__:16}", all_reduced_bytes(model, micro_step, rows.split(4)))

# %% [markdown] lang="ko"
# `backward()`만 감싸면 **아무것도 달라지지 않는다.** DDP는 순전파에서 통신할지 말지를 정하기 때문이다. 순전파까지 감싸야 네 번이 한 번이 된다. 오류는 나지 않고 느려질 뿐이라 알아채기 어렵다. `Trainer`와 `accumulate`는 이것을 알아서 해 준다.
#
# FSDP2에는 `set_requires_gradient_sync(False)`가 있다. 다만 그동안 나누지 않은 그레이디언트를 통째로 들고 있어야 하므로 통신을 아끼는 대신 메모리를 쓴다.
#
# GPU마다 토큰 수가 다르면 평균의 평균이 한 번 더 생긴다. `Trainer`는 `average_tokens_across_devices=True`(기본값)로 모든 GPU의 토큰을 세어 나눈다.
#
# ### 배치 정규화와 드롭아웃
#
# 배치 정규화와 드롭아웃은 루프의 실수가 아니라 모델의 성질이다. **배치 정규화**(batch normalization)는 배치의 평균과 분산을 쓴다. 마이크로 배치로 나누면 그 값이 달라진다. 입력 16개를 한 번에 넣은 것과 넷으로 나눈 것의 차이를, 층 정규화와 나란히 잰다.

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
# **드롭아웃**(dropout)은 무작위로 값을 끈다. 나누면 난수를 뽑는 순서가 달라져 다른 값이 꺼진다. 틀린 것일까? 출력의 첫 수는 누적과 큰 배치의 차이, 둘째 수는 시드만 다른 두 큰 배치의 차이, 마지막 수는 시드 500개로 평균한 누적과 큰 배치의 차이다.

# %%
net = net_with(nn.Dropout(0.2))
print(f"{difference(gradient_by(net, 4), gradient_by(net, 16)):.2f}", end=" ")
print(f"{difference(gradient_by(net, 16, seed=1), gradient_by(net, 16)):.2f}", end=" ")
mean_4, mean_16 = (sum(gradient_by(net, size, seed) for seed in range(500)) / 500 for size in (4, 16))
print(f"{difference(mean_4, mean_16):.2f}")

# %% [markdown] lang="ko"
# 누적과 큰 배치는 시드가 다른 두 큰 배치만큼 다르고, 여러 시드로 평균하면 가까워진다. 값은 달라도 **평균은 같은 곳으로 모인다.** 드롭아웃이 있으면 누적한 결과를 비트까지 맞추려 하지 말아야 한다.
#
# ### fp32로 더하는 훅
#
# 4.5절의 `main_grad`를 PyTorch의 훅(hook, 정해진 때에 불리는 함수)으로 만든다. 마이크로 배치를 하나 넣고 `grad`와 `main_grad`를 출력한다.


# %%
def into_main_grad(parameter):
    parameter.main_grad += parameter.grad
    parameter.grad = None


half = SmallLanguageModel().bfloat16()
for parameter in half.parameters():
    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    parameter.register_post_accumulate_grad_hook(into_main_grad)
half(inputs[rows]).float().square().mean().backward()
print(half.head.bias.grad, half.head.bias.main_grad.dtype)

# %% [markdown] lang="ko"
# `grad`는 비어 있고 합은 fp32로 쌓였다. 옵티마이저도 `main_grad`를 읽도록 고쳐야 한다.
#
# ### 그레이디언트를 들고 있지 않는 방법
#
# 그레이디언트가 생기는 대로 그 파라미터를 갱신하고 버리면(optimizer in backward, LOMO) 그레이디언트를 들고 있지 않아도 된다. 다 모으기 전에 버리는 셈이니 **누적과는 함께 쓸 수 없다**(LOMO의 저자들도 그렇게 답한다. [OpenLMLab/LOMO #4](https://github.com/OpenLMLab/LOMO/issues/4)).
