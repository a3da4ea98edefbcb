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
# # 5장. 저장하는 대신 다시 계산하기: 그레이디언트 체크포인팅
#
# 누적(4장)으로 마이크로 배치를 1까지 줄여도 넘치면 더 나눌 것이 없다. 순전파 상태를 버렸다가 필요할 때 다시 계산하면 어떨까?
# 이것이 **그레이디언트 체크포인팅**(gradient checkpointing)이다. 얼마를 아끼고, 그 대신 연산을 얼마나 더 하는가?
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 무엇을 남기고 버릴지 정하고, 저장한 양과 재계산(recomputation)의 양을 센다.
# - 체크포인팅을 층마다, 연산마다 골라서 켠다.
# - 체크포인팅이 줄이지 못하는 것을 알아보고 다음 수를 고른다.
#
# 그레이디언트는 작은 모델을 CPU에서 실제로 계산해 확인하고, 큰 모델의 메모리는 가상 GPU에서 센다. 저장된 출력은 가상 T4에서 얻었다.

# %%
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from helpers import case, exercise, gpu_memory_experiment, guess, guesses, human_bytes, predict_memory, use_gpu

torch.set_num_threads(1)
gpu = use_gpu()
gpu

# %% [markdown] lang="ko"
# ## 5.1 먼저 살려 보기
#
# 3장에서 polyglot-ko-1.3b를 배치 16으로 학습하다가 T4에서 멈추었다. 15.25 GiB가 필요한데 한도는 14.64 GiB였고, 절반쯤이 순전파 상태였다.
# 체크포인팅만 켜면 **최대**는 몇 GiB가 될까? `None` 대신 숫자를 적고 실행한다.

# %%
checkpointed_16 = guess("5.1", None, "GiB")
checkpointed_16

# %% [markdown] lang="ko"
# 설정 하나만 바꾸어 다시 실행한다. 그림에서 최대는 어느 때이고, 그때 순전파 상태는 얼마나 남아 있는가?

# %%
report = gpu_memory_experiment(batch_size=16, gradient_checkpointing=True)
report

# %% [markdown] lang="ko"
# 두 스텝이 모두 끝났다. 껐을 때, 켰을 때, 켜고 배치를 세 배로 키웠을 때를 비교한다. 열은 배치, 체크포인팅, 첫 순전파 뒤의 순전파 상태, 전체 최대, 들어가는지다.

# %%
for batch_size, on in ((16, False), (16, True), (48, True)):
    one = predict_memory(batch_size=batch_size, gradient_checkpointing=on)
    held = one.timeline.at_end(0)["activations"]
    print(batch_size, on, human_bytes(held), human_bytes(one.needed_bytes), one.fits)
checkpointed_16.against(report.needed_bytes)

# %% [markdown] lang="ko"
# 순전파 상태는 8분의 1쯤이 되었는데 최대는 3 GiB쯤 줄었을 뿐이다. 이제 최대는 옵티마이저 스텝에 있다. 그때 순전파 상태는 이미 사라졌고, 그림의 '순전파 상태와 임시 텐서' 2.48 GiB는 AdamW가 잠깐 만드는 임시 텐서다(3장). 가중치, 그레이디언트, 옵티마이저 상태는 그대로다.
# 그래도 배치를 세 배로 키울 자리가 생겼다. 어떻게 이렇게 될까?
#
# ## 5.2 노드 다섯 개와 세 가지 전략
#
# 신경망을 노드가 한 줄로 이어진 계산(사슬, chain)으로 본다. 노드 1은 입력, 마지막 노드는 손실이고 $y_i = f_i(y_{i-1})$이다. 역전파가 그레이디언트 $g_i$를 계산하려면
# 뒤에서 온 $g_{i+1}$과 순전파의 값 $y_i$가 있어야 한다. 순전파의 값을 간직하는 까닭이 이것이다.
#
# `record_chain`은 이 사슬을 **실제로 계산하면서** 어떤 값이 살아 있는지 기록한다. 값 하나를 막 계산하고 재료를 아직 버리지 않은 때를 한 '순간'으로 센다.
# 먼저 **모두 저장**한다. 파랑은 살아 있는 순전파 값, 주황은 살아 있는 그레이디언트, 굵은 테두리는 그 순간에 계산한 것이다.

# %%
from helpers import record_chain

everything = record_chain(5, "everything")
everything

# %% [markdown] lang="ko"
# 순전파에서 쌓이고 역전파에서 줄어든다. 반대쪽 끝은 **되도록 적게 저장**하는 것이다. 입력만 남기고, 필요할 때마다 입력부터 다시 계산한다. 빨강이 다시 계산한 순간, ×2는 그때까지 계산한 횟수다. 같은 노드를 몇 번이나 계산하는가?

# %%
minimum = record_chain(5, "minimum")
minimum

# %% [markdown] lang="ko"
# 저장한 값은 줄었지만 재계산은 노드 수의 제곱에 비례해 늘어난다. 그 사이에 **체크포인트**(checkpoint)가 있다. 노드 3을 하나 남겨 두고, 다시 계산할 때는 가장 가까운 체크포인트에서 출발한다.

# %%
checkpointed = record_chain(5, checkpoints=[3])
checkpointed

# %% [markdown] lang="ko"
# 책은 세 전략을 한 순간에서 비교해 저장한 값이 각각 6개, 4개, 5개라고 한다. 어느 순간일까? 그레이디언트를 계산하는 다섯 순간을 모두 대조한다. 열은 위의 세 전략이다.

# %%
runs = (everything, minimum, checkpointed)
for node in (5, 4, 3, 2, 1):
    print(f"g{node}", [run.stored[run.moment("backward", node)] for run in runs])

# %% [markdown] lang="ko"
# **g4를 막 계산한 순간**뿐이고, 그림의 제목을 보면 각 전략의 최대이기도 하다.
#
# ![g4를 계산한 순간의 세 전략. 모두 저장하면 6개, 되도록 적게 저장하면 4개, 노드 3을 체크포인트로 두면 5개가 저장되어 있다.](../../image/05_three_strategies.svg)
#
# 입력 y1, 갓 계산한 g4, 그 재료인 g5와 y4는 어느 전략에나 있다. '모두 저장'은 여기에 y2와 y3을, 체크포인트는 y3만 더 들고 있다.
#
# > **주장 1.** "체크포인팅은 모델의 파라미터와 상태를 저장해 두었다가 이전 상태를 불러오는 것이다" (출처: logbe1, 2024)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 저장하고 다시 계산하는 것은 순전파의 중간값이다. 디스크에 남기는 '체크포인트 파일'과 이름만 같다. "역전파 중에 가중치를 저장한다"는 설명(출처: daje, 2023)도 틀리다.
#
# </details>
#
# ## 5.3 체크포인트는 몇 개가 좋을까
#
# 노드 N개를 s개의 구간(segment)으로 나누고 구간마다 첫 노드를 남긴다. 체크포인트가 s개, 한 구간을 다시 계산할 때 N/s개가 필요하므로 최대는 s + N/s에 가깝다.
# 노드가 1,024개라면 몇 구간으로 나눌 때 최대가 가장 낮을까?

# %%
best_segments = guess("5.3", None)
best_segments

# %% [markdown] lang="ko"
# 구간의 수를 바꾸어 가며 실제로 실행해 최소를 찾는다.

# %%
from helpers import sweep_segments

sweep = sweep_segments(1024)
sweep

# %% [markdown] lang="ko"
# 노드의 수를 바꾸면 어떻게 될까? 열은 차례로 N, 실행이 찾은 구간 수, 그때의 최대, 재계산 횟수를 N으로 나눈 값이다.

# %%
for nodes in (16, 64, 256, 1024):
    segments, peak, again = sweep_segments(nodes).best
    print(f"{nodes:5} {segments:4} {peak:5} {again / nodes:7.3f}")
best_segments.against(sweep.best[0])

# %% [markdown] lang="ko"
# 최소는 s = √N에 있고 그때의 최대는 2√N이다(Chen 외, 2016). 재계산이 순전파 한 번에 못 미치는데도, N이 64배가 되어도 저장은 8배만 는다.
#
# 여러 번 다시 계산해도 괜찮다면 더 줄일 수 있다. 저장할 수 있는 값의 수, 곧 **예산**(budget)을 정하면 재계산이 가장 적은 일정(schedule)이 있다(revolve, Griewank와 Walther, 2000).
# 길이 l인 사슬을 값을 k개까지만 두고 되돌리는 데 드는 계산을 C(l, k)라 하자. m걸음을 계산해 거기에 값을 남기고(m번), 줄어든 자리로 뒤쪽을 되돌린 다음(C(l − m, k − 1)), 자리를 돌려받아 앞쪽을 되돌린다(C(m, k)). 이 셋의 합이 가장 작은 m을 고르면 된다. 끝은 C(1, k) = 0과 C(l, 1) = l(l − 1)/2이고, k에는 사슬의 첫 값도 들어 있다. 아래 셀의 예산은 그레이디언트 둘과 막 계산한 값 하나까지 센 것이라 k보다 3 크고, 재계산은 C(1023, 예산 − 3)에서 첫 순전파의 1,022번을 뺀 것이다.
# 예산을 반으로 줄일 때마다 재계산은 몇 배가 되는가? 첫 줄은 √N 방법과 예산이 같다.

# %%
for budget in (64, 32, 16, 8):
    print(record_chain(1024, budget=budget))

# %% [markdown] lang="ko"
# 같은 64개로 991번이던 재계산이 961번이면 되고, 예산을 16까지 줄여도 그 두 배 반이면 된다. 16에서 8로 줄일 때는 한 번에 두 배를 넘는다. 패널에서 노드의 수와 전략을 바꾸며 순간을 하나씩 넘긴다.
#
# ![노드 12개를 구간 3개로 나눈 실행. 체크포인트는 노드 1, 5, 9이고 최대 7개를 저장하며 8번 다시 계산한다.](../../image/05_three_segments.svg)
#
# - 노드를 10개로, 구간을 10개, 5개, 3개로 바꾼다. 최대가 가장 낮은 것은 어느 것이고, 5개와 3개는 무엇이 다른가?
# - 같은 최대를 예산으로 주고 '예산 안에서 재계산 최소'를 고르면 재계산을 몇 번이나 아끼는가?

# %%
from helpers import checkpointing_panel

checkpointing_panel()

# %% [markdown] lang="ko"
# > **주장 2.** "층 10개 가운데 5개만 저장한다" (출처: logbe1, 2024)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 그렇게 나눌 수 있고, 세 구간과 최대가 같으면서 재계산은 더 적다. 다만 다섯이라는 수를 라이브러리가 골라 주지는 않는다. 기본값은 층마다 입력을 하나씩, 곧 열 개를 모두 남기는 것이다(5.4절).
#
# </details>
#
# **연습 5-1.** (퍼즐) 재계산이 가장 적은 일정을 찾아라. `split(start, end, slots)`은 노드 `start`가 보관되어 있고 `end`부터 `start`까지의 그레이디언트가 필요할 때,
# 다음에 보관할 노드의 번호(`start` < 번호 ≤ `end`)를 돌려준다. `slots`는 보관할 수 있는 노드의 수로 `start`도 센 것이며, 2 이상일 때만 불린다.
# 한가운데를 고르는 `(start + end + 1) // 2`에서 시작하고, 위의 C(l, k)로 고쳐 나간다. 막히면 `exercise("5-1").hint()`, 그래도 막히면 `exercise("5-1").solution()`을 실행한다.


# %%
def split(start, end, slots):
    return ...


exercise("5-1").check(split)

# %% [markdown] lang="ko"
# ## 5.4 PyTorch가 저장하는 것
#
# 이제 진짜 신경망이다. `saved_tensors_hooks(pack, unpack)`은 autograd가 텐서를 저장할 때 `pack`을, 역전파에서 꺼낼 때 `unpack`을 부른다. `pack`에서 모양만 적고 그대로 돌려주면 무엇이 저장되는지 엿볼 수 있다.
# 트랜스포머 블록 하나에 (배치 8, 길이 64, 너비 64) 입력을 넣고, 저장되는 텐서의 수와 가장 큰 것 여섯을 출력한다.

# %%
from helpers.small_model import Block

torch.manual_seed(0)
blocks = nn.Sequential(*[Block(width=64, heads=4) for _ in range(9)])
x = torch.randn(8, 64, 64)


def shapes_saved(function):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        function(x)
    return sorted(shapes, key=lambda shape: -torch.Size(shape).numel())


shapes = shapes_saved(blocks[0])
print(len(shapes), *shapes[:6])

# %% [markdown] lang="ko"
# 너비가 네 배인 MLP의 중간값 둘이 가장 크다. 같은 블록을 `checkpoint`로 감싸면 무엇이 남을까?

# %%
each = partial(checkpoint, use_reentrant=False)
shapes_saved(partial(each, blocks[0]))

# %% [markdown] lang="ko"
# 입력 하나뿐이다. 나머지는 버리고, 역전파가 이 블록에 오면 입력에서 다시 계산한다.
#
# 블록 아홉 개를 네 가지로 감싼다. `plain`은 그대로, `whole`은 전체를 한 번에, `thirds`는 `checkpoint_sequential`로 세 구간, `each`는 블록마다 감싼다. **최대**가 가장 낮은 것은 어느 것일까?

# %%
lowest_peak = guess("5.4", None, ("plain", "whole", "thirds", "each"))
lowest_peak

# %% [markdown] lang="ko"
# `compare_steps`는 같은 가중치와 난수 시드로 순전파와 역전파를 하고, 순전파 뒤에 남은 바이트와 최대, 첫 줄보다 늘어난 행렬곱과 어텐션의 연산, 첫 줄과 다른 그레이디언트를 센다.


# %%
from helpers import compare_steps


def run(wrap=lambda block, y: block(y)):
    y = x
    for block in blocks:
        y = wrap(block, y)
    return y.square().mean()


table = compare_steps(
    blocks,
    plain=run,
    whole=lambda: each(blocks, x).square().mean(),
    thirds=lambda: checkpoint_sequential(blocks, 3, x, use_reentrant=False).square().mean(),
    each=lambda: run(each),
)
table

# %% [markdown] lang="ko"
# 예상과 견준다.

# %%
lowest_peak.against(min(table, key=lambda name: table[name].peak_bytes))

# %% [markdown] lang="ko"
# 그레이디언트는 한 비트도 다르지 않다. `each`의 추가 연산이 `whole`보다 적은 까닭은 5.8절에서 본다. 메모리는 눈여겨볼 데가 있다.
#
# - `whole`은 마지막 결과만 남기지만 **최대는 줄지 않았다.** 다시 계산할 때 전부가 한꺼번에 살아난다.
# - `thirds`는 √9 = 3개의 구간이다. (`checkpoint_sequential`은 마지막 구간을 감싸지 않는다.)
# - `each`는 블록마다 입력을 저장하고, 한 번에 블록 하나만 다시 계산한다. **transformers의 기본값이 이것이다.** 블록의 입력이 그 속에서 생기는 값의 16분의 1뿐이라 여기서는 √N보다 낫다.
#
# > **주장 3.** "메모리가 O(N)에서 O(√N)이 된다" (출처: Papa Martino V, 2026)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** √N개의 구간으로 나누었을 때의 이야기다. `each`처럼 층마다 입력을 하나씩 저장하는 라이브러리의 기본값은 여전히 O(N)이고, 비례 상수만 작아진다.
#
# </details>
#
# ## 5.5 `use_reentrant`는 왜 False인가
#
# `checkpoint`에는 옛 구현(`use_reentrant=True`)과 새 구현(`False`)이 있다. 옛 구현은 **입력 가운데 하나라도** `requires_grad=True`여야 그레이디언트를 계산한다. 데이터를 그대로 받는 첫 층에는 그런 입력이 없다.
# 블록 뒤에 학습되는 값 `scale`을 곱해 `backward()`까지 부르고, `scale`과 블록의 가중치가 그레이디언트를 받았는지, 그리고 경고의 첫 문장을 출력한다. 오류가 나는 줄이 있을까?

# %%
import warnings

for arguments in ({"use_reentrant": True}, {}, {"use_reentrant": False}):
    scale = torch.ones(1, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (checkpoint(blocks[0], x, **arguments) * scale).sum().backward()
    learns = [any(p.grad is not None for p in group) for group in ([scale], blocks[0].parameters())]
    print(arguments, *learns, *(str(warning.message).split(". ")[0] for warning in caught), sep=" | ")

# %% [markdown] lang="ko"
# 오류 없이 끝났고, 옛 구현에서는 뒤에 있는 값만 학습되었다. 아무것도 적지 않아도 옛 구현이다. 알려 주는 것은 경고뿐이라 로그에 묻히기 쉽다.
# 임베딩을 얼린 LoRA에서 이 일이 그대로 벌어진다([transformers #26221](https://github.com/huggingface/transformers/issues/26221)). `enable_input_require_grads()`가 임베딩의 출력에 `requires_grad`를 켜서 막아 준다(8장). 새 구현에는 이 문제가 없다.
#
# > **주장 4.** "`checkpoint(model, x)`라고 쓰면 된다" (출처: daje, 2023)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 두 가지가 빠졌다. 모델을 통째로 감싸면 최대가 줄지 않는다(5.4절의 `whole`). 그리고 `use_reentrant=False`를 적지 않으면 옛 구현이 쓰여, 평범한 입력이라면 감싼 것이 학습되지 않는다.
#
# </details>
#
# ### 사건 5-A: `True`는 줄이는데 `False`는 못 줄인다
#
# 2025년 PyTorch에 올라온 보고다. "체크포인팅 없이는 60.9 GB, `use_reentrant=False`로 켜면 60.8 GB로 그대로인데, `use_reentrant=True`로 켜면 12.8 GB다. `False`가 고장 난 것 아닌가?"
#
# 블록 아홉 개 뒤에 학습되는 출력층을 붙여 같은 상황을 만들었다. `run`이 받는 것은 `use_reentrant`, `wrap`("none", "whole", "each"), `input_requires_grad`이고, 실험은 다섯 번까지다.
# **모든 파라미터가 그레이디언트를 받으면서** 최대가 감싸지 않았을 때의 절반 아래인 설정을 사전으로 답하라. 돌려받은 것의 `.gradients`도 들여다볼 수 있다.

# %%
print(case("5-A").run(use_reentrant=True, wrap="whole"))
answer = ...
case("5-A").check(answer)

# %% [markdown] lang="ko"
# ## 5.6 무엇을 남길까: 선택적 체크포인팅
#
# 입력만 남기고 다 버리는 것이 최선일까? 행렬곱의 결과는 다시 만들기 비싸고, 정규화와 GELU는 행렬곱이 없어 FLOPs로는 거저나 다름없다(GPU에서는 읽고 쓰는 시간이 든다).
# `create_selective_checkpoint_contexts`에 연산의 목록을 주면 그 결과는 저장하고 나머지만 다시 계산한다(selective activation checkpointing).
#
# `products`는 행렬곱과 어텐션의 결과를 모두, `linears`는 선형층의 결과만, `attention`은 어텐션의 결과만 남긴다. 추가 연산이 0인데 메모리가 주는 줄이 있는가?

# %%
from torch.utils.checkpoint import create_selective_checkpoint_contexts

aten = torch.ops.aten
linears, attention = aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default


def keep(*operations):
    return partial(each, context_fn=partial(create_selective_checkpoint_contexts, list(operations)))


table = compare_steps(
    blocks,
    plain=run,
    products=lambda: run(keep(linears, attention)),
    linears=lambda: run(keep(linears)),
    attention=lambda: run(keep(attention)),
    each=lambda: run(each),
)
table

# %% [markdown] lang="ko"
# 그림에서는 왼쪽 아래일수록 좋다. 선이 지나는 점은 **이 다섯 가운데** 메모리와 추가 연산 둘 다에서 더 나은 것이 없는 선택이다. 블록 안의 결과를 하나씩 고르면 선보다 아래로 갈 수도 있다(연습 5-2).

# %%
table.chart()

# %% [markdown] lang="ko"
# `products`는 **추가 연산 없이** 18.14 MiB를 12.45 MiB로 줄였다. 버린 정규화, GELU, 덧셈의 결과는 다시 만드는 데 행렬곱이 들지 않는다. 반대쪽의 `attention`은 `each`에 1.2 MiB를 보태고 추가 연산을 23.3%에서 18.6%로 줄인다.
# (행렬곱 가운데 어텐션의 것만 다시 계산한다는 점에서 `linears`는 Korthikanti 외(2022)의 선택과 가깝다. 논문은 정규화와 GELU의 중간값은 남기고 어텐션 속만 버렸다. 그때 큰 자리를 차지하던 s × s 행렬은 융합 커널이 처음부터 저장하지 않는다.)
#
# > **주장 5.** "계산이 비싼 층보다 순전파 상태가 큰 층을 골라 체크포인팅하라" (출처: Papa Martino V, 2026)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다. 다만 층보다 연산을 두고 하는 말이다.** 트랜스포머의 블록은 모두 같아 층으로는 고를 것이 없고, 블록 안의 연산은 비용이 다르다. `products`는 비싼 결과만 남겨 추가 연산 없이 메모리를 줄였다. 시간이 아니라 FLOPs로 센 것이다.
#
# </details>
#
# **연습 5-2.** (메모리 골프) 아홉 블록에서 순전파 뒤에 남는 바이트를 **6 MiB 이하**로 하면서 추가 연산을 가장 적게 하라. `keep_result(block, result)`는 블록의 번호(0~8)와 결과의 이름("query_key_value", "attention", "projection", "up", "down")을 받아, 그 결과를 남기려면 True를 돌려준다.
# 알려진 가장 좋은 기록과 견주어 준다.


# %%
def keep_result(block, result):
    return ...


exercise("5-2").check(keep_result)

# %% [markdown] lang="ko"
# ### transformers에서: 몇 층마다
#
# transformers 5.23의 `activation_checkpointing_enable`은 `every_n_layers`를 받아 n층에 하나씩만 감싼다. 앞의 연산 목록은 `context_fn`으로 넘긴다. 목록의 `addmm`은 편향이 있는 선형층이다. Llama처럼 편향이 없는 모델에서는 `aten.mm.default`를 적는다. 적지 않으면 오류 없이 어텐션의 결과만 남는다. 가상 T4의 polyglot-ko-1.3b, 배치 8에서 비교한다. 최대가 더 줄지 않는 것은 어느 줄부터인가?

# %%
from helpers.chapters.c5_checkpointing.costs import compare_checkpointing

kernels = ("efficient", "flash")
products = [linears, *(getattr(aten, f"_scaled_dot_product_{kernel}_attention").default for kernel in kernels)]
ways = {f"every {n}": {"every_n_layers": n} for n in (4, 2, 1)}
ways["products"] = {"context_fn": partial(create_selective_checkpoint_contexts, products)}
compare_checkpointing("polyglot-ko-1.3b", 8, {"off": None, **ways})

# %% [markdown] lang="ko"
# 기본값인 `every 1`은 `every 2`와 최대가 같은데 추가 연산은 두 배다. 최대를 정하는 것이 이미 가중치, 그레이디언트, 옵티마이저 상태라 더 버려도 얻는 것이 없다. `products`는 네 층에 하나보다 메모리가 적은데 추가 연산이 없다. 내 모델과 카드에서 남는 메모리만큼 무엇을 남길지는 플래너가 고른다(9.12절의 `selective=True`).
#
# ### 컴파일러에 맡기기: 메모리 예산
#
# `torch.compile(model)`은 순전파와 역전파를 미리 그래프로 만들어 한꺼번에 최적화한다. 그대로 두어도 다시 만들기 싼 것(정규화, 활성 함수)은 남기지 않는다. 컴파일하기 전에 메모리 예산 `torch._functorch.config.activation_memory_budget`을 1(기본값)보다 낮추면 행렬곱의 결과처럼 비싼 것까지 버린다(이름이 `_`로 시작하는 모듈이라 버전이 바뀌면 달라질 수 있다). 다만 예산은 **예산 1일 때 저장하는 양에 대한 비율**이지 최대의 비율이 아니다.
#
# 예산을 낮출수록 최대도 낮아질까? 작은 Llama(32층, 배치 2 × 1,024토큰, fp32)의 순전파와 역전파를 GTX 1650에서 잰 [기록](https://github.com/siddddd17/ackaudit/tree/main/results/measured_backward)이 있다(PyTorch 2.14, 옵티마이저 없음). 최대를 MB(10⁶바이트)로 적었다. 백엔드(backend)는 컴파일의 뒷단이다.
#
# | 백엔드 | 컴파일 안 함 | 예산 1 | 0.15 | 0.05 |
# |---|---:|---:|---:|---:|
# | `aot_eager`(연산을 합치지 않고 그래프대로 실행한다) | 1,643 | 1,336 | 496 | 1,367 |
# | `inductor`(연산을 합친다, 기본값) | 1,643 | 재지 않음 | 605 | 1,126 |
#
# 0.05에서는 도로 늘어난다. 잰 사람이 메모리의 기록을 따라가 보니, 역전파가 앞부분에서 여러 층의 것을 잇달아 다시 계산해 그 중간 결과가 한꺼번에 남아 있었다([이슈](https://github.com/pytorch/pytorch/issues/197838)의 표는 가중치와 그레이디언트를 뺀 값이라 숫자가 더 작다). 그러니 가장 낮은 값을 적지 말고 0.5, 0.3, 0.15처럼 몇 값을 `virtual-gpu run`(9.10절)으로 실행해 견주어 고른다.
#
# `virtual-gpu run`은 PyTorch 2.13부터 컴파일까지 한다. 위와 같은 사람이 2.14로 잰 20건(32층과 16층, 하나는 컴파일하지 않은 것)을 2.13으로 예측하니 모두 0.3% 안에서 맞았다([오차의 표](../../docs/errors.md)). 컴파일한 학습 스텝 하나를 다른 사람의 카드가 남긴 기록과 요청 하나하나까지 견주었다. 순전파의 할당과 반환은 크기도 차례도 모두 같고, 스텝 전체로는 카드의 4,324건 가운데 4,276건이 짝이 맞는다. 나머지는 역전파의 작은 버퍼다(`benchmarks/README.md`). 카드의 PyTorch가 2.6이라, 그래프를 끊는 자리와 그레이디언트의 스트라이드를 그 버전에 맞추고 견준 것이다. Llama-3.1-8B의 LoRA처럼 큰 모델에서 얼마나 주는지는 [레버 한 장](../../docs/levers.md)의 '순전파 상태'에 있다.
#
# **드롭아웃이 있으면 예산을 1보다 낮추지 않는다.** 역전파가 난수를 새로 뽑아, 오류도 경고도 없이 그레이디언트가 틀릴 수 있다([pytorch #190758](https://github.com/pytorch/pytorch/issues/190758), 2026년 7월에 알려졌고 이 강의가 쓰는 2.13의 코드에는 그대로 있다). `checkpoint`는 난수 상태를 되돌리므로(5.7절) 이 문제가 없다. LoRA라면 `lora_dropout=0`인지 먼저 본다.
#
# ### 버리는 대신 옮기기: 오프로드
#
# 값을 CPU 메모리로 옮겨 두었다가 되가져올 수도 있다(activation offload). PyTorch의 `save_on_cpu()`가 5.4절의 훅 두 개로 하는 일이다.
# 여기서는 CPU가 GPU 노릇을 하므로 NumPy 배열에 CPU 메모리 노릇을 맡긴다. `offload`는 저장되는 것을 모두 옮기고, `each_offload`는 블록마다 감싸고 그 입력만 옮긴다. 먼저 출력하는 것은 둘이 순전파 한 번에 옮긴 양이다.


# %%
moved = []


def to_host(tensor):
    moved.append(tensor.nbytes)
    return tensor.detach().numpy().copy()


def offloaded(*wrap):
    with torch.autograd.graph.saved_tensors_hooks(to_host, lambda array: torch.from_numpy(array).clone()):
        return run(*wrap)


for wrap in ((), (each,)):
    moved.clear()
    offloaded(*wrap)
    print(human_bytes(sum(moved)))
compare_steps(blocks, plain=run, offload=offloaded, each_offload=lambda: offloaded(each))

# %% [markdown] lang="ko"
# 순전파가 끝나면 GPU에는 손실 하나만 남는다. `offload`는 다시 계산하지 않는 대신 21 MiB를 버스로 내보냈다가 들여오고, 그만큼의 RAM을 쓴다. 남아 있던 18 MiB보다 많은 것은 훅이 가중치까지 복사하고, 두 연산이 함께 저장하는 텐서는 두 번 복사하기 때문이다. 블록의 입력만 옮기는 `each_offload`는 그 17분의 1이면 된다. 그러나 여기서는 최대가 옮기지 않은 `each`(5.4절의 4.10 MiB)보다 오히려 조금 높다. 이 작은 모델의 최대는 파라미터의 그레이디언트가 거의 다 쌓인 역전파의 끝에 있고, 그때는 다른 블록의 입력이 이미 없어 옮겨도 줄 것이 없다. 되가져온 입력 한 벌만 더해진다. 층이 많고 글이 길어 입력이 큰 자리를 차지할 때 듣는다. 시간은 여기서 재지 않았다.
#
# 실제로도 입력만 옮기는 것이 보통이고, 시퀀스가 아주 길어 그것만으로도 넘칠 때 쓴다. transformers 5.17부터 있는 `offload=True`(켜는 법은 5.7절)는 문서에 따르면 복사가 계산과 같은 스트림에서 이루어져 스텝이 느려진다. TRL의 `activation_offloading=True`는 따로 둔 스트림에서 계산과 겹쳐 복사한다.
#
# ## 5.7 내 코드에서 켜기
#
# | 무엇으로 학습하나 | 켜는 법 |
# |---|---|
# | transformers 모델 | `model.activation_checkpointing_enable()` (5.23 전에는 `gradient_checkpointing_enable()`). Accelerate라면 `prepare` 전에 |
# | 내 모델 | 반복되는 블록을 `checkpoint(block, x, use_reentrant=False)`로 |
# | `Trainer` | `TrainingArguments(activation_checkpointing=True)` (5.23 전에는 `gradient_checkpointing=True`). `every_n_layers`, `offload`는 `activation_checkpointing_kwargs`로 |
# | FSDP | `accelerate config`의 `fsdp_activation_checkpointing: true` |
#
# ResNet처럼 지원하지 않는 모델은 오류를 내니 블록을 직접 감싼다.
#
# 학습 결과는 정말 같을까? 드롭아웃이 있는 작은 GPT-2를 bf16 `autocast`와 `GradScaler`를 쓴 내 루프, 네 번 누적하는 Accelerate와 `Trainer`로 학습하고, 끈 것과 켠 것의 마지막 가중치가 가장 많이 다른 곳의 차이를 출력한다.

# %%
from helpers.chapters.c5_checkpointing.trainings import TRAININGS, small_gpt
from helpers.trainers import largest_difference

for name, train in TRAININGS.items():
    off, on = (train(small_gpt(checkpointing)) for checkpointing in (False, True))
    print(f"{name:10} {largest_difference(off, on)}")

# %% [markdown] lang="ko"
# 셋 다 한 비트도 다르지 않다. 그래도 감싼 함수는 **두 번 실행된다.** 드롭아웃과 배치 정규화가 든 합성곱 블록을 감싸고, 한 스텝에 배치 정규화가 이동 평균을 갱신한 횟수를 먼저 출력한다. `wrong`은 `preserve_rng_state=False`로 난수 상태를 되돌리지 않은 것이다. 그레이디언트가 다른 줄은 어느 것인가?

# %%
conv = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1))
image = torch.randn(4, 3, 64, 64)
each(conv, image).square().mean().backward()
print(int(conv[1].num_batches_tracked))
compare_steps(
    conv,
    plain=lambda: conv(image).square().mean(),
    checkpoint=lambda: each(conv, image).square().mean(),
    wrong=lambda: each(conv, image, preserve_rng_state=False).square().mean(),
)

# %% [markdown] lang="ko"
# - **난수.** `checkpoint`는 순전파 때의 난수 상태를 기억했다가 되돌린다. 그래서 드롭아웃이 있어도 그레이디언트가 같다. 이것을 끄면 틀린다. (추가 연산이 50%인 것은 첫 층이라서다. 입력의 그레이디언트를 구하지 않으니 역전파의 곱셈이 순전파와 같은 양이고, 한 번을 더하면 2가 3이 된다.)
# - **부수 효과**(side effect). 배치 정규화의 이동 평균이 한 스텝에 두 번 갱신되어, 평가할 때 쓰는 값이 달라진다. 정규화 층을 감싸지 않거나 모멘텀 m을 1 − √(1 − m)으로 바꾼다.
#
# > **주장 6.** "DeepSpeed 설정에 `"gradient_checkpointing": True`를 넣으면 켜진다" (출처: Papa Martino V, 2026)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 소스로 확인했다. DeepSpeed 0.19.8에서 설정을 읽는 코드(`runtime/config.py`)에는 그런 키를 찾는 곳이 없다. `activation_checkpointing` 절은 직접 감싼 함수가 어떻게 저장할지를 정할 뿐이다.
#
# </details>
#
# ### 사건 5-B: 책이 출력한 10.29 GB
#
# 책의 노트북은 체크포인팅을 켠 배치 16에서 **첫 스텝 직후**에 10.29 GB를 출력했다. 체크포인팅이 없는 배치 4의 10.586 GB보다도 적다. 체크포인팅이 이 수를 줄인 것일까?
#
# `run`은 `use_cache`, `gradient_checkpointing`, `batch_size`를 받아 스텝 직후의 값과 최대를 돌려준다. 책의 루프처럼 변수 `outputs`가 모델의 출력을 붙들고 있다.
# 책이 체크포인팅을 켰을 때 **스텝 직후의 값을 바꾼 설정의 이름**과, 체크포인팅 자신이 줄인 것("printed" 또는 "peak")을 짝으로 답하라.

# %%
print(case("5-B").run(use_cache=True, gradient_checkpointing=False))
answer = ...
case("5-B").check(answer)

# %% [markdown] lang="ko"
# ## 5.8 얼마나 줄고, 얼마나 느려질까
#
# "70% 확보", "33% 추가 연산", "20% 느려진다" 같은 말을 시험한다. 이미지 모델 둘(ResNet-50은 512 × 512, ViT-Base는 768 × 768 이미지 8장)과 언어 모델 둘(배치 8, 길이 1024)을 AdamW로 두 스텝 학습한다.
# 융합 어텐션 커널이 있는 A100에서 센다. (T4에서 그룹 쿼리를 쓰는 Llama는 s × s 행렬을 저장하는 커널로 떨어져, 체크포인팅이 더 잘 듣는 것처럼 보인다. 3장의 'T4의 함정'이다.) 70%가 맞는 열은 어느 것인가?

# %%
from helpers.chapters.c5_checkpointing.costs import savings

savings("ResNet-50", "ViT-Base", "Llama-3.2-1B", "polyglot-ko-1.3b")

# %% [markdown] lang="ko"
# '줄어든 비율'이 두 열인 것에 주의한다. 앞의 것은 순전파 뒤의 순전파 상태, 뒤의 것은 GPU가 감당해야 하는 최대다.
#
# 마지막 열도 모델마다 다르다. 감싸지 않은 곳(어휘가 큰 출력층)은 다시 계산하지 않고, 새 구현은 필요한 것을 다 다시 계산하면 거기서 멈춘다(조기 중단, early stop). 블록의 마지막 행렬곱은 결과가 버려질 뿐이라 건너뛴다. 아홉 블록에서 조기 중단을 끄면(`to_the_end`) 추가 연산이 몇 %가 될까?

# %%
from torch.utils.checkpoint import set_checkpoint_early_stop


def to_the_end(block, y):
    with set_checkpoint_early_stop(False):
        return each(block, y)


compare_steps(blocks, plain=run, each=lambda: run(each), to_the_end=lambda: run(to_the_end))

# %% [markdown] lang="ko"
# 23.3%가 32.6%가 되었다. 이제 앞의 세 말과, 시간에 관한 네 말을 판정한다.
#
# > **주장 7.** "메모리를 70% 확보한다" · **주장 9.** "약 33%의 추가 연산이 든다" (출처: 둘 다 Papa Martino V, 2026) · **주장 8.** "ResNet 같은 이미지 모델에도 쓸 수 있다" (출처: logbe1, 2024)
#
# <details><summary>판정 (셋을 하나씩 맞다, 조건부로 맞다, 틀리다 가운데 고른다)</summary>
#
# 셋 다 **조건부로 맞다.**
#
# - 7: 순전파 상태는 64%에서 93%까지 줄지만, GPU가 감당해야 하는 전체 최대는 40%에서 76%까지 준다. 순전파 상태가 최대를 만들고 있을 때만 줄어든다. 최대가 옵티마이저 스텝에 있다면 5.6절의 `every 2`와 `every 1`처럼 더 버려도 그대로다.
# - 8: 줄었다. 다만 ResNet은 직접 감싸야 하고 배치 정규화를 살펴야 한다(5.7절). 같은 글이 드는 EfficientNet과 강화 학습은 실행해 보지 않았다.
# - 9: 역전파가 순전파의 두 배이고 순전파를 모두 다시 하면 3이 4가 되니 33%다. 감싸지 않은 곳과 조기 중단 때문에 네 모델에서는 19.6%에서 32.7% 사이였다.
#
# </details>
#
# > **주장 10.** "약 20% 느려진다" (출처: transformers 4.48 문서를 정리한 글) · **주장 11.** "훈련 속도가 빨라진다" (출처: logbe1, 2024) · **주장 12.** "배치를 키울 수 있어 시간을 되찾는다" · **주장 13.** "텐서 코어 덕분에 재계산이 값싸다" (출처: 둘 다 Papa Martino V, 2026)
#
# <details><summary>판정 (하나씩 맞다, 조건부로 맞다, 틀리다, 재지 못했다 가운데 고른다)</summary>
#
# 11은 **틀리다.** 같은 배치라면 연산은 늘거나(층마다 감쌀 때) 기껏해야 그대로이고(5.6절의 products), 줄지는 않는다. 13은 **여기서는 재지 못했다.** 텐서 코어는 순전파와 역전파도 함께 빠르게 하니, 늘어나는 비율까지 줄일 까닭은 없다. 10과 12의 답은 아래의 표에서 읽는다.
#
# </details>
#
# 10과 12는 시간을 재어야 안다. H100 한 장에서 polyglot-ko-1.3b의 스텝 하나를 잰 기록이 저장소에 있다. `checkpointed`가 체크포인팅을 켠 것이다(길이를 적지 않은 줄은 256).

# %%
from helpers.card_times import h100_steps

h100_steps(
    "bf16 batch 8", "bf16 batch 16", "bf16 batch 16 checkpointed",
    "bf16 batch 4 length 1024", "bf16 batch 4 length 1024 checkpointed",
)  # fmt: skip

# %% [markdown] lang="ko"
# - 10("약 20%")은 이 측정에서는 **틀리다.** 가장 짧은 것끼리 견주어도 배치 16은 44%, 길이 1024는 70% 더 걸렸다. 연산이 늘어난 것(3분의 1 안팎)보다 크다. 중앙값은 들쭉날쭉해 믿을 자리가 하나쯤이다.
# - 12는 **조건부로 맞다.** 체크포인팅 없이 배치 8(샘플 하나에 7.97 ms)이 한계인 카드라면, 켜고 16으로 키워(7.52 ms) 시간을 되찾는다. 배치 8이 H100을 놀리고 있었기 때문이다. 배치 16이 그냥 들어가는 카드(5.23 ms)라면 되찾지 못한다.
#
# ## 5.9 다음에 넘치는 것: 로짓
#
# 체크포인팅을 켜고 나면 무엇이 남을까? 어휘가 128,256개인 Llama-3.2-1B를 배치 8, 길이 1024로 학습하면, 토큰마다 어휘 전체에 점수를 매긴 **로짓**(logits)이 8 × 1024 × 128,256개다.
# 최대가 된 순간의 순전파 상태와 임시 텐서 가운데 몇 %가 여기에서 왔을까?

# %%
logits_share = guess("5.9", None, "%")
logits_share

# %% [markdown] lang="ko"
# 체크포인팅을 켠 채, 어휘만 16분의 1로 줄인 모델과 비교한다. 열은 어휘의 크기, 최대가 되는 때, 그 순간의 순전파 상태와 임시 텐서, fp32 로짓 하나의 크기다. 로짓 몇 개어치가 한꺼번에 살아 있는가?

# %%
from virtual_gpu.models.configs import load_config

settings = {"batch_size": 8, "sequence_length": 1024, "precision": "bf16", "optimizer": "adamw_fused"}
live = []
for vocabulary in (128_256, 128_256 // 16):
    config = load_config("Llama-3.2-1B")
    config.vocab_size = vocabulary
    one = predict_memory(model_id=config, **settings, gradient_checkpointing=True, gpu="A100-80GB")
    live.append(one.at_peak["activations"])
    print(f"{vocabulary:7,}", one.peak_phase, human_bytes(live[-1]), human_bytes(8 * 1024 * vocabulary * 4))
logits_share.against(1 - live[1] / live[0])

# %% [markdown] lang="ko"
# 그 순간의 순전파 상태와 임시 텐서는 적어도 90%가 로짓에서 왔고(어휘를 줄인 모델에도 로짓의 16분의 1은 남아 있다), 3.91 GiB짜리 세 개쯤이 한꺼번에 살아 있었다. 모델의 층은 아무리 감싸도 이것을 줄이지 못한다.
#
# 로짓도 버렸다가 다시 계산하면 된다. 토큰을 여덟 조각으로 나누고, 출력층과 손실을 조각마다 `checkpoint`로 감싼다. 너비 64, 어휘 16,000, 토큰 1,024개의 출력층에서 최대와 그레이디언트를 비교한다.

# %%
from torch.nn.functional import cross_entropy

head = nn.Linear(64, 16_000)
states, targets = torch.randn(1024, 64, requires_grad=True), torch.randint(16_000, (1024,))


def loss_of(states, targets):
    return cross_entropy(head(states), targets, reduction="sum")


def in_chunks():
    return sum(each(loss_of, *part) for part in zip(states.chunk(8), targets.chunk(8), strict=True)) / 1024


compare_steps(head, whole=lambda: loss_of(states, targets) / 1024, chunks=in_chunks)

# %% [markdown] lang="ko"
# 최대가 7분의 1쯤으로 줄고 그레이디언트는 반올림 오차 안에서 같다. 대가는 출력층의 순전파 한 번이다. 같은 생각을 커널로 만든 것이 Liger Kernel의 fused linear cross-entropy(`Trainer`에서는 `use_liger_kernel=True`)와 Cut Cross-Entropy(Wijmans 외, 2024)다.
#
# 글이 아주 길면 최대가 되는 자리가 차례로 옮겨 간다. 로짓을 없애면 역전파에서 블록의 MLP를 다시 계산할 때가 최대다. MLP는 토큰마다 따로 계산하므로 토큰을 나누어 조각마다 `checkpoint`로 감싸면 된다. 그다음에 큰 것은 블록의 입력이고, 이것은 CPU로 오프로드할 수 있다. Llama-3.1-8B를 RTX 4090에서 QLoRA(가중치를 4비트로 둔 LoRA, 8장)로, 32,768토큰짜리 글 하나로 학습하며 이 셋을 하나씩 켠 값이 [레버 한 장](../../docs/levers.md)의 '긴 글'에 있다. 손실을 조각내는 것만으로는 할당자가 잡는 양이 조금 넘치고, 나머지 둘 가운데 하나를 더하면 들어간다.
#
# ## 5.10 두 가지 방법을 함께
#
# 4장의 누적과 함께 놓고 고른다. T4, polyglot-ko-1.3b, 목표는 배치 16이고 옵티마이저는 `Trainer`의 기본값인 융합 AdamW다. 추가 연산은 체크포인팅 없이 한 번에 처리할 때와 비교한 것이다. 들어가는 것 가운데 추가 연산이 없는 줄은 어느 것인가? (T4마다 조금씩 다른 한도에 걸리는 것은 '빠듯하다'고 적고 고르지 않는다.)

# %%
from helpers import both_levers

both_levers(16, optimizer="adamw_fused")

# %% [markdown] lang="ko"
# 4장처럼 나누는 것으로 충분하다. (체크포인팅을 켠 줄에서 8 × 2가 16 × 1보다 더 드는 것은, 누적하면 둘째 마이크로 배치부터 쌓인 그레이디언트가 함께 있기 때문이다.) **나눌 수 있으면 먼저 나누고**, 마이크로 배치 1도 들어가지 않을 때 체크포인팅을 켠다. 나누는 데는 추가 연산이 없고, 마이크로 배치가 작아질수록 체크포인팅이 줄이는 메모리는 적어지는데 추가 연산은 그대로다. (마이크로 배치가 너무 작으면 GPU가 논다. 그 손해는 4.7절처럼 초당 샘플 수를 재어 판단한다.)
#
# > **주장 14.** "분산 학습을 하려면 꼭 필요하다" (출처: daje, 2023) · **주장 15.** "대부분은 기본 설정으로도 좋다" (출처: logbe1, 2024)
#
# <details><summary>판정 (하나씩 맞다, 조건부로 맞다, 틀리다 가운데 고른다)</summary>
#
# 14는 **틀리다.** 그냥 들어가는 모델에는 필요 없고, 켜면 연산만 늘어난다. 15는 **조건부로 맞다.** 층마다 감싸는 기본 설정은 좋은 출발점이지만, 5.6절에서는 같은 최대를 절반의 추가 연산으로 얻는 설정이 있었다.
#
# </details>
#
# **연습 5-3.** L4에서 Llama-3.2-1B를 길이 4096, 8비트 AdamW(`adamw_8bit`)로 학습한다. 한 스텝의 배치가 4가 되도록 `batch_size`, `gradient_accumulation_steps`, `gradient_checkpointing`을 정하라. 빠듯하지 않게 들어가는 것 가운데 추가 연산이 가장 적고, 같다면 마이크로 배치가 가장 큰 것이 답이다. 풀고 나서 길이를 6144로 늘리면 답이 어떻게 달라지는가?

# %%
changes = ...
exercise("5-3").check(changes)

# %% [markdown] lang="ko"
# 패널은 체크포인팅을 끈 것과 켠 것을 나란히 그린다. 배치를 4로 줄이면 체크포인팅을 켜도 왜 최대가 줄지 않을까?
#
# ![polyglot-ko-1.3b, 배치 16. 체크포인팅 없이는 15.25 GiB로 T4의 한도를 넘고, 켜면 12.42 GiB로 들어간다.](../../image/05_with_and_without.svg)

# %%
from helpers import checkpointing_memory_panel

checkpointing_memory_panel()

# %% [markdown] lang="ko"
# ## 5.11 기억할 것
#
# 이 장에서 적은 예상과 결과다.

# %%
guesses()

# %% [markdown] lang="ko"
# | 방법 | 순전파 뒤 GPU에 남는 것 | 대가 |
# |---|---|---|
# | √N개의 구간 | √N (최대는 2√N) | 순전파 한 번보다 적은 재계산 |
# | 층마다(transformers의 기본) | 층의 입력만, N에 비례 | 위와 같다 |
# | n층에 하나(`every_n_layers`) | 감싸지 않은 층은 그대로 | 그 1/n |
# | 연산별 선택(`context_fn`) | 비싼 연산의 결과만 | 값싼 연산만 |
# | 오프로드 | 거의 없음 | CPU 메모리와 복사하는 시간 |
#
# - 체크포인팅은 **최대**를 줄인다. 다음에 넘치는 것은 로짓이고, 손실을 조각내면 줄어든다.
# - 모델을 통째로가 아니라 블록마다 감싸고 `use_reentrant=False`를 적는다. 학습할 때는 `use_cache=False`다(사건 5-B).
# - 나눌 수 있으면 먼저 누적으로 나눈다. 샘플 하나도 들어가지 않을 때 체크포인팅을 켠다.
#
# 그래도 파라미터, 그레이디언트, 옵티마이저 상태는 그대로다. GPU가 여러 개라면 나누어 가질 수 있을까? [6장](06_distributed_zero.ipynb)에서 답한다.
#
# ## 5.12 더 읽을거리
#
# ### 예산을 정하지 않고: 곡선 전체
#
# 체크포인팅한 블록의 결과마다 길은 셋이다. 남기거나, 다시 계산하거나, RAM으로 보낸다(5.6절). 체크포인팅을 켜고 한 번 실행한 기록에는 무엇을 다시 계산했는지가 모두 있으므로, 남길 것을 바꿀 때마다 다시 실행하지 않아도 그때의 최대와 추가 연산을 셀 수 있다. Qwen3-0.6B를 길이 8,192에서 LoRA로 학습할 때(손실도 5.9절처럼 조각으로 나눈다) 가장 적게 남기는 것부터 모두 남기는 것까지 한 번에 그린다. `attention`은 어텐션의 결과이고, 나머지 이름은 선형층의 입력 × 출력이다(2048x1024가 어텐션의 출력층, 1024x2048이 쿼리, 1024x1024가 키와 값, 1024x3072가 MLP의 앞의 둘). 이름 뒤의 `:1`은 그 결과를 마지막 블록 하나에서만 남긴다는 뜻이다. 주황 점은 그 선택대로 가상 GPU에서 실행해 잰 것이다. 점선은 한계다. 결과를 일부만 남겨도 된다고 느슨하게 풀어 준 문제의 답이라(선형 완화), 어떤 선택도 그 아래로 내려가지 못한다. 곡선은 어디에서 꺾이는가?

# %%
from virtual_gpu import activation_budget

activation_budget(
    "Qwen/Qwen3-0.6B", gpu="A100-40GB", sequence_length=8192, peft="lora", precision="autocast_bf16",
    optimizer="adamw_fused", fused_lm_head=True, measured=2,
)  # fmt: skip

# %% [markdown] lang="ko"
# 2번에서 꺾인다. 어텐션의 결과를 모든 블록에서 남기면, 3.03 − 2.18 = 0.85 GiB로 추가 연산이 +31.7%에서 +11.4%로 준다. 그 뒤로는 7.67 − 3.03 = 4.64 GiB를 더 써도 +3.6%까지만 준다. 글이 길수록 어텐션의 결과 1바이트가 아끼는 연산이 많아, 다른 무엇보다 먼저 남긴다. 모두 남겨도 드는 +3.6%는 거의 다 손실을 나누느라 로짓을 한 번 더 만드는 몫이다. 첫 점이 '모두 다시 계산'이 아닌 것은, 마지막 블록의 것은 역전파가 곧바로 쓰므로 남겨도 최대가 늘지 않기 때문이다.
#
# 실행해 잰 둘(1번과 6번)은 예측과 1바이트도 다르지 않다. 같은 최대에서 다르게 골라 더 줄일 수 있는 연산은 어느 점에서도 스텝의 0.3%를 넘지 않는다. RAM으로 보내는 점(`@cpu`)이 없는 것은, 공개된 속도로 따지면 이 카드에서는 보냈다가 받는 것보다 다시 계산하는 것이 빠르기 때문이다. 내 카드의 한도에 맞는 점을 골라 스크립트까지 쓰는 것은 플래너가 한다(9.12절의 `selective=True`). 터미널에서는 `virtual-gpu fit … --budget 그림.svg`다. 시간은 어느 카드에서도 재지 않았다.
