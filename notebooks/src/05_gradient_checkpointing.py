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
# 4장의 누적으로 배치를 1까지 줄여도 들어가지 않으면 더 나눌 것이 없다. 순전파 상태를 아예 저장하지 않으면 어떨까? 버린 값은 필요할 때 다시 계산하면 된다.
# 이것이 **그레이디언트 체크포인팅**(gradient checkpointing)이다. 메모리를 아끼는 대신 연산을 더 한다. 얼마를 아끼고 얼마를 더 하는지 글마다 말이 다르다.
# 20% 느려진다고도 하고 33%라고도 하며, 오히려 빨라진다는 글도 있다. 이 장에서는 그 말들을 하나씩 실행해 본다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 노드 n개짜리 계산에서 무엇을 남기고 무엇을 버릴지 정하고, 저장한 수와 재계산(recomputation) 횟수를 센다.
# - PyTorch와 transformers에서 체크포인팅을 켜고, 그레이디언트가 그대로인지 확인한다.
# - 4장의 누적과 이 장의 체크포인팅 가운데 무엇을 먼저 쓸지 판단한다.
#
# 그레이디언트가 같은지는 작은 모델을 CPU에서 실제로 계산해 확인하고(이렇게 작은 모델은 스레드 하나가 빠르다), 메모리는 3장의 가상 GPU에서 센다. 저장된 출력은 가상 T4의 것이다. 출력에서 GPU의 이름을 확인한다.

# %%
from functools import partial

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from helpers import (
    both_levers,
    checkpointing_memory_panel,
    checkpointing_panel,
    compare_steps,
    enable_checkpointing,
    exercise,
    gpu_memory_experiment,
    gpu_memory_sweep,
    human_bytes,
    largest_fitting,
    make_dummy_dataset,
    predict_memory,
    record_chain,
    sweep_segments,
    training_flops,
    use_gpu,
)  # fmt: skip

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
gpu = use_gpu()
gpu

# %% [markdown] lang="ko"
# ## 5.1 먼저 살려 보기
#
# 3장에서 polyglot-ko-1.3b는 T4에서 배치 크기 16으로 학습하다가 두 번째 스텝에서 멈추었다. 설정 하나만 바꾸어 다시 실행한다.

# %%
report = gpu_memory_experiment(batch_size=16, gradient_checkpointing=True)

# %% [markdown] lang="ko"
# 두 스텝이 모두 끝났다. 그림에서 보라색 순전파 상태가 얼마나 남았는지 본다. 3장의 그림에서는 두 번째 순전파의 보라색이 한도에 닿았다.

# %%
report

# %% [markdown] lang="ko"
# 최대는 이제 순전파나 역전파가 아니라 옵티마이저 스텝에 있다. 순전파 상태는 더는 문제가 아니라는 뜻이다. 어떻게 줄였을까? 노드 다섯 개로 따라가 본다.
#
# ## 5.2 노드 다섯 개와 세 가지 전략
#
# 신경망을 한 줄로 이어진 노드로 본다. 노드 1은 입력, 마지막 노드는 손실이고 $y_i = f_i(y_{i-1})$이다. 역전파는 끝에서부터 거꾸로 그레이디언트 $g_i$를 계산하는데,
# 여기에는 두 가지 재료가 필요하다. 뒤에서 온 $g_{i+1}$과 순전파의 값 $y_i$다. 순전파의 값을 간직하는 까닭이 이것이다.
#
# `record_chain`은 이런 사슬을 숫자로 **실제로 계산하면서** 순간마다 어떤 값이 살아 있는지 기록한다. 값 하나를 막 계산했고 그 재료를 아직 놓지 않은 때가 한 순간이다.
# 먼저 순전파의 값을 **모두 저장**한다. 파랑은 살아 있는 순전파 값, 주황은 살아 있는 그레이디언트, 굵은 테두리는 그 순간에 계산한 것이다.

# %%
everything = record_chain(5, "everything")
everything

# %% [markdown] lang="ko"
# 순전파가 진행될수록 하나씩 쌓이고 역전파가 진행될수록 하나씩 줄어든다. 3장의 그림에서 보라색이 산처럼 올라갔다 내려온 까닭이다.
#
# 반대쪽 끝에는 **되도록 적게 저장**하는 전략이 있다. 입력만 남기고 모두 버린 다음, 필요할 때마다 입력부터 다시 계산한다. 빨강이 다시 계산한 순간이다.

# %%
minimum = record_chain(5, "minimum")
minimum

# %% [markdown] lang="ko"
# 저장한 값은 줄었지만 같은 노드를 몇 번씩 계산한다. 동그라미 위의 ×2가 그때까지 계산한 횟수다. 노드가 n개면 재계산은 n²에 비례해 늘어난다.
#
# 그 사이에 **체크포인트**(checkpoint)가 있다. 중간의 노드 3을 하나 남겨 두고, 다시 계산할 때는 가장 가까운 체크포인트에서 출발한다.

# %%
checkpointed = record_chain(5, checkpoints=[3])
checkpointed

# %% [markdown] lang="ko"
# 책은 세 전략을 한 순간에서 비교해 저장한 값이 각각 6개, 4개, 5개라고 한다. 어느 순간일까? 그레이디언트를 하나씩 계산하는 다섯 순간을 모두 대조한다.
# 열은 차례로 모두 저장, 되도록 적게 저장, 체크포인트 3이다.

# %%
runs = (everything, minimum, checkpointed)
for node in (5, 4, 3, 2, 1):
    print(f"g{node}", [run.stored[run.moment("backward", node)] for run in runs])

# %% [markdown] lang="ko"
# 6, 4, 5가 함께 나오는 곳은 **g4를 막 계산한 순간**뿐이다. 세 그림의 제목을 보면 이 값은 각 전략의 최대이기도 하다. 이 순간에 무엇이 살아 있는지 나란히 놓아 본다.
#
# ![g4를 계산한 순간의 세 전략. 모두 저장하면 6개, 되도록 적게 저장하면 4개, 노드 3을 체크포인트로 두면 5개가 저장되어 있다.](../../image/05_three_strategies.svg)
#
# 입력 y1, 갓 계산한 g4, 그 재료인 g5와 y4는 어느 전략에나 있으므로 4보다 적을 수는 없다. '모두 저장'은 여기에 y2와 y3을, 체크포인트는 y3만 더 들고 있다.
# (가중치의 그레이디언트는 어느 전략에서나 똑같이 생기므로 세지 않았다.)
#
# 다시 계산해도 결과는 같을까? 세 실행의 그레이디언트가 서로 같은지, 그리고 PyTorch의 autograd가 계산한 값과 같은지 본다.

# %%
from helpers.chapters.c5_checkpointing.chain import Chain

autograd = torch.tensor(Chain(5).autograd(), dtype=torch.float64)
print(everything.gradients == minimum.gradients == checkpointed.gradients)
torch.allclose(torch.tensor(everything.gradients, dtype=torch.float64), autograd, rtol=1e-12, atol=0)

# %% [markdown] lang="ko"
# > **주장 1.** "체크포인팅은 모델의 파라미터와 상태를 저장해 두었다가 이전 상태를 불러오는 것이다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 저장하고 다시 계산하는 것은 순전파의 중간값이다. 파라미터와 옵티마이저 상태는 건드리지 않는다.
# 학습을 이어서 하려고 디스크에 남기는 '체크포인트 파일'과 이름만 같다. "역전파 중에 가중치를 저장한다"는 설명도 같은 까닭으로 틀리다.
#
# </details>
#
# ### 직접 바꿔 보기
#
# 패널에서 노드의 수와 전략을 바꾸며 순간을 하나씩 넘겨 본다. 아래 그림은 처음 모습이다.
#
# ![노드 12개를 구간 3개로 나눈 실행. 체크포인트는 노드 1, 5, 9이고 최대 7개를 저장하며 8번 다시 계산한다.](../../image/05_three_segments.svg)
#
# 이렇게 해 본다.
#
# - '순간'을 처음부터 끝까지 옮기며 파란 점이 쌓이고 사라지는 것을 본다.
# - 구간 수를 1부터 12까지 바꾸며 최대가 가장 낮은 곳을 찾는다.
# - 같은 최대를 예산으로 주고 '예산 안에서 재계산 최소'를 고르면 재계산을 몇 번이나 아끼는지 본다.

# %%
checkpointing_panel()

# %% [markdown] lang="ko"
# ## 5.3 체크포인트는 몇 개가 좋을까: √N
#
# 노드 N개를 s개의 구간(segment)으로 나누고 구간마다 첫 노드를 남긴다. 체크포인트가 s개, 한 구간을 되살릴 때 N/s개가 필요하므로 최대는 s + N/s에 가깝다.
# s가 작으면 구간이 길고, s가 크면 체크포인트가 많다. N = 1024에서 s를 바꾸어 가며 실제로 실행해 최소를 찾는다.

# %%
sweep = sweep_segments(1024)
sweep

# %% [markdown] lang="ko"
# 실행이 찾은 최소는 s = √N이다. 이때 최대는 2√N, 재계산은 순전파 한 번이 채 되지 않는다. 다른 N에서도 Chen 외(2016)가 계산한 값과 같은지 확인한다.
# 열은 차례로 N, 실행이 찾은 구간 수, 그때의 최대, 2√N, 그리고 재계산 횟수를 N으로 나눈 값이다.

# %%
for nodes in (16, 100, 256, 1024, 4096):
    segments, peak, again = sweep_segments(nodes).best
    print(f"{nodes:5} {segments:4} {peak:5} {2 * nodes**0.5:7.1f} {again / nodes:7.3f}")

# %% [markdown] lang="ko"
# N이 256배가 되어도 저장은 16배만 늘고, 재계산은 순전파 한 번을 넘지 않는다. 순전파를 한 번 더 하는 대가로 메모리를 N에서 2√N으로 줄인 것이다.
#
# 여러 번 다시 계산해도 괜찮다면 더 줄일 수 있다. 저장할 수 있는 값의 수, 곧 **예산**(budget)을 정해 주면 재계산이 가장 적은 일정(schedule)이 정해진다. 이항 계수로 적은 식이 있고(revolve, Griewank와 Walther, 2000), 여기서는 같은 답을 동적 계획법으로 찾는다.
# N = 1024에서 예산을 줄여 가며 실행한다. 첫 줄은 √N 방법과 예산이 같다.

# %%
for budget in (64, 32, 16, 8, 4):
    print(record_chain(1024, budget=budget))

# %% [markdown] lang="ko"
# 예산이 64개일 때는 √N 방법(991번)보다 나을 것이 거의 없다. 그러나 예산을 4분의 1로 줄여도 재계산은 두 배 반이면 된다. 끝까지 줄인 4개에서는 n²에 비례하는 재계산이 기다린다. 이 일정을 찾는 것이 연습 문제 5-3이다.
#
# 한편 '층 열 개에서 다섯 개만 저장한다'는 예를 드는 글도 있다. 열 개를 모두 저장한 것과 다섯 구간, 세 구간으로 나눈 것을 비교한다.

# %%
for segments in (10, 5, 3):
    print(record_chain(10, segments=segments))

# %% [markdown] lang="ko"
# > **주장 2.** "층 10개 가운데 5개만 저장한다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 그렇게 나눌 수 있고 이 크기에서는 좋은 선택이다. 세 구간(√10에 가깝다)과 최대가 같고 재계산은 더 적다.
# 다만 다섯이라는 수를 라이브러리가 골라 주지는 않는다. 기본값은 다음 절에서 보듯 층마다 입력을 하나씩, 곧 열 개를 모두 남기는 것이다.
#
# </details>
#
# ## 5.4 PyTorch가 저장하는 것
#
# 이제 진짜 신경망이다. autograd가 역전파에 쓰려고 간직하는 텐서를 `saved_tensors_hooks`로 엿본다. 트랜스포머 블록 하나에 (배치 8, 길이 64, 너비 64) 입력을 넣고, 저장되는 텐서의 수와 모양을 차례로 출력한다.

# %%
from helpers.small_model import Block

torch.manual_seed(0)
blocks = nn.Sequential(*[Block(width=64, heads=4) for _ in range(9)])
x = torch.randn(8, 64, 64)


def shapes_saved(function):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        function(x)
    return shapes


shapes = shapes_saved(blocks[0])
print(len(shapes), *shapes)

# %% [markdown] lang="ko"
# 모양이 (배치, 길이, 너비)이거나 그것을 편 (512, 64)인 순전파 상태가 여럿이고, 너비가 네 배인 MLP의 중간값도 두 개 있다. (64, 192) 같은 가중치도 섞여 있지만 이미 있는 것을 가리킬 뿐이니 메모리가 더 들지는 않는다. 같은 블록을 `checkpoint`로 감싸면 무엇이 남는지 본다.

# %%
shapes_saved(lambda x: checkpoint(blocks[0], x, use_reentrant=False))

# %% [markdown] lang="ko"
# 입력 하나뿐이다. 나머지는 버리고, 역전파가 이 블록에 오면 입력에서 다시 계산한다.
#
# 블록 아홉 개를 잇고 여러 방법으로 감싸 비교한다. `compare_steps`는 같은 가중치와 같은 난수 시드로 순전파와 역전파를 하고, 순전파 뒤에 남은 바이트와 최대, 그리고 첫 줄과의 그레이디언트 차이를 센다.
# `whole`은 전체를 한 번에, `thirds`는 `checkpoint_sequential`로 세 구간, `each`는 블록마다 감싼 것이다. 남은 것과 최대를 함께 본다.


# %%
def run(wrap):
    y = x
    for block in blocks:
        y = wrap(block, y)
    return y.square().mean()


each = partial(checkpoint, use_reentrant=False)
compare_steps(
    blocks,
    plain=lambda: run(lambda block, y: block(y)),
    whole=lambda: each(blocks, x).square().mean(),
    thirds=lambda: checkpoint_sequential(blocks, 3, x, use_reentrant=False).square().mean(),
    each=lambda: run(each),
)

# %% [markdown] lang="ko"
# 그레이디언트는 한 비트도 다르지 않다. 메모리는 눈여겨볼 데가 있다.
#
# - `whole`은 순전파 뒤에 마지막 결과만 남기지만 **최대는 줄지 않았다.** 되살릴 때 전부를 한꺼번에 되살리기 때문이다. 구간이 하나면 체크포인팅은 소용이 없다.
# - `each`는 블록마다 입력을 저장한다(첫 입력 `x`는 이미 있던 것이라 세지 않았다). 되살리는 것은 한 번에 블록 하나다. **transformers의 기본값이 이것이다.**
# - `thirds`는 √9 = 3개의 구간이다. `checkpoint_sequential`은 마지막 구간을 감싸지 않는다. 곧바로 역전파가 시작되니 버릴 까닭이 없다. 여기서는 `each`가 낫다. 블록의 입력이 그 속에서 생기는 값의 16분의 1밖에 되지 않아서다.
#
# > **주장 3.** "메모리가 O(N)에서 O(√N)이 된다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** √N개의 구간으로 나누었을 때의 이야기다. 라이브러리는 층마다 입력을 저장하므로 여전히 O(N)이고, 비례 상수만 작아진다.
#
# </details>
#
# polyglot-ko의 깊이를 바꾸어 확인한다. 체크포인팅을 켠 채 층이 두 배, 네 배가 될 때 첫 순전파 뒤의 순전파 상태가 몇 배가 되는지 본다.

# %%
import copy

from helpers.chapters.c5_checkpointing.costs import step_timeline
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config


def activations(layers):
    config = copy.deepcopy(load_config("EleutherAI/polyglot-ko-1.3b"))
    config.num_hidden_layers, config.use_cache = layers, False
    model = build_model(config, torch.float16)
    enable_checkpointing(model)
    ids = torch.zeros(16, 256, dtype=torch.int64)
    return step_timeline(model, {"input_ids": ids, "labels": ids}).at_end(0)["activations"]


[human_bytes(activations(layers) - activations(1)) for layers in (5, 9, 17)]

# %% [markdown] lang="ko"
# 층이 하나일 때를 뺀 몫(4, 8, 16개 층)이 정확히 두 배씩 늘어난다. √N이 아니라 N에 비례한다. 그래도 층마다 입력 하나뿐이니 비례 상수가 작다.
#
# ### `use_reentrant`는 왜 False인가
#
# `checkpoint`에는 옛 구현(`use_reentrant=True`)과 새 구현(`False`)이 있다. 옛 구현은 **입력 가운데 하나라도** `requires_grad=True`여야 그레이디언트를 계산한다.
# 모델의 첫 층에 데이터를 그대로 넣으면 그런 입력이 없다. 결과에 그레이디언트가 이어지는지(`requires_grad`) 본다. 차례로 True, 아무것도 적지 않은 것, False다. 붙잡은 경고는 첫 문장만 출력한다.

# %%
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    outputs = [checkpoint(blocks[0], x, use_reentrant=True), checkpoint(blocks[0], x)]
outputs.append(checkpoint(blocks[0], x, use_reentrant=False))
for warning in caught:
    print(str(warning.message).split(". ")[0])
[y.requires_grad for y in outputs]

# %% [markdown] lang="ko"
# 옛 구현에서는 블록의 가중치가 하나도 학습되지 않는다. 오류가 아니라 경고뿐이라 놓치기 쉽다. `backward()`를 부르면 알 수 있을까? 블록 뒤에 학습되는 것이 하나라도 있으면 그렇지도 않다. 학습되는 값 하나를 곱해 `backward()`까지 부르고, 그 값과 블록의 가중치가 그레이디언트를 받았는지 본다.

# %%
scale = torch.ones(1, requires_grad=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    (checkpoint(blocks[0], x, use_reentrant=True) * scale).sum().backward()
scale.grad is not None, any(parameter.grad is not None for parameter in blocks[0].parameters())

# %% [markdown] lang="ko"
# 오류 없이 끝났고, 뒤에 있는 값만 학습되었다. 임베딩을 얼린 LoRA에서 이 일이 그대로 벌어진다. transformers의 `enable_input_require_grads()`가 임베딩의 출력에 `requires_grad`를 켜서 이를 막는다. 새 구현에는 이 문제가 없다.
# 게다가 새 구현은 필요한 것을 되살리고 나면 재계산을 중간에 멈추고(early stop), `torch.autograd.grad`와 이름 붙은 인자도 받는다.
#
# > **주장 4.** "`checkpoint(model, x)`라고 쓰면 된다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 두 가지가 빠졌다. 모델을 통째로 감싸면 최대가 줄지 않는다(위의 `whole`). 그리고 `use_reentrant=False`를 적지 않으면 옛 구현이 쓰여, 평범한 입력이라면 아무것도 학습되지 않는다.
#
# </details>
#
# ## 5.5 무엇을 감쌀까
#
# ### 합성곱 블록과 배치 정규화
#
# 가장 흔한 예제는 합성곱 블록 하나를 감싸는 것이다. 연산별로 고를 수도 있다. `create_selective_checkpoint_contexts`에 연산의 목록을 주면 그 연산의 결과는 저장하고 나머지만 다시 계산한다.
# `selective`는 계산이 비싼 합성곱의 결과만 남기고, 값싼 정규화와 ReLU를 되살린다.

# %%
from torch.utils.checkpoint import create_selective_checkpoint_contexts

torch.manual_seed(0)
conv = nn.Sequential()
for channels in (3, 16):
    conv.extend([nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)])
image = torch.randn(4, 3, 64, 64)
keep_convolutions = partial(create_selective_checkpoint_contexts, [torch.ops.aten.convolution.default])
ways = {
    "plain": lambda: conv(image).square().mean(),
    "checkpoint": lambda: each(conv, image).square().mean(),
    "selective": lambda: each(conv, image, context_fn=keep_convolutions).square().mean(),
}
compare_steps(conv, **ways)

# %% [markdown] lang="ko"
# 드롭아웃이 들어 있는데도 그레이디언트가 같다. `checkpoint`가 순전파 때의 난수 상태를 기억했다가 되살릴 때 되돌려 놓기 때문이다. 이제 연산의 수를 정확히 센다. `FlopCounterMode`는 행렬곱과 합성곱의 부동소수점 연산을 센다.

# %%
from torch.utils.flop_counter import FlopCounterMode

flops = {}
for name, way in ways.items():
    with FlopCounterMode(display=False) as counter:
        way().backward()
    flops[name] = counter.get_total_flops()
{name: f"{count:,} ({count / flops['plain'] - 1:+.1%})" for name, count in flops.items()}

# %% [markdown] lang="ko"
# > **주장 5.** "계산이 비싼 합성곱보다 순전파 상태가 큰 층을 골라 체크포인팅하라"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 합성곱의 결과만 남긴 `selective`는 세어지는 연산이 하나도 늘지 않았다. 그런데도 순전파 뒤에 남은 메모리는 절반 넘게 줄었고, 최대는 전체를 감쌌을 때와 같다.
#
# </details>
#
# 감쌀 때 조심할 것이 셋 있다. 첫째, **난수**다. `preserve_rng_state=False`로 조금 빠르게 할 수 있지만, 드롭아웃이 있으면 되살린 값이 처음과 달라 그레이디언트가 틀린다. 그레이디언트의 차이를 본다.

# %%
compare_steps(
    conv,
    plain=ways["plain"],
    wrong=lambda: each(conv, image, preserve_rng_state=False).square().mean(),
)

# %% [markdown] lang="ko"
# 둘째, **부수 효과**(side effect)다. 감싼 함수는 두 번 실행된다. 배치 정규화는 실행될 때마다 이동 평균을 갱신하므로 한 스텝에 두 번 갱신된다. 학습 스텝 한 번 뒤의 갱신 횟수를 센다.

# %%
for name in ("plain", "checkpoint"):
    conv[1].reset_running_stats()
    ways[name]().backward()
    print(name, int(conv[1].num_batches_tracked))

# %% [markdown] lang="ko"
# 그레이디언트는 같지만 평가할 때 쓰는 이동 평균이 달라진다. 목록에 값을 더하거나 출력하는 코드도 마찬가지로 두 번 실행된다.
#
# 셋째, **실행할 때마다 다른 함수**다. 되살린 텐서의 모양이 처음과 다르면 새 구현이 알아채고 오류를 낸다. 처음에는 32열, 되살릴 때는 16열을 고르는 함수를 감싼다.

# %%
widths, linear = iter([32, 16]), nn.Linear(64, 64)
try:
    each(lambda x: linear(x)[..., : next(widths)].square(), x).sum().backward()
except RuntimeError as error:
    print(type(error).__name__, *str(error).splitlines()[:4], sep="\n")

# %% [markdown] lang="ko"
# 함수가 멀쩡해도 이 오류를 만날 수 있다. PyTorch 2.12까지는 감싼 함수 안에서 난 오류(OOM도)가 체크포인팅의 훅을 켜진 채로 두고, 노트북은 마지막 오류를 붙들고 있다. 그래서 다음 학습이 엉뚱한 오류, 흔히 `CheckpointError`로 죽는다. 2.11, 2.12, 2.13의 코드로 해 보니 2.13에서는 고쳐져 있었다. `cleanup()`을 부르거나 커널을 다시 시작하면 풀린다. 이 강의의 `train_model`은 오류가 나도 뒤를 치우고 끝난다.
#
# 파라미터가 없는 모듈을 감싸는 것은 오류가 아니지만 얻는 것이 없다. ReLU 하나에서 저장되는 텐서의 모양과, 감싼 결과의 `requires_grad`를 본다. 입력에 `requires_grad`가 없으면 결과에도 없고, 저장되는 것도 없다.

# %%
shapes_saved(nn.ReLU()), each(nn.ReLU(), x).requires_grad

# %% [markdown] lang="ko"
# ### 선형층 열 개를 몇 구간으로 나눌까
#
# `checkpoint_sequential(layers, 2, x)`는 차례로 이어진 층을 두 구간으로 나눈다. 흔히 나오는 예대로 선형층 열 개를 쓰고, 구간 수를 바꾸어 본다.

# %%
layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(10)])
data = torch.randn(1024, 256)
segments = {
    f"segments_{s}": lambda s=s: checkpoint_sequential(layers, s, data, use_reentrant=False).square().mean()
    for s in (2, 3, 5, 10)
}
compare_steps(layers, plain=lambda: layers(data).square().mean(), **segments)

# %% [markdown] lang="ko"
# 남은 바이트는 다섯 구간에서 가장 적다. 앞의 네 구간은 입력만 남고, 감싸지 않는 마지막 구간은 두 층의 중간값까지 남는다. 두 구간이면 마지막 구간이 길고, 열 구간이면 남겨야 할 입력이 많다.
#
# 구간의 수가 0이거나 층의 수보다 많으면 어떻게 될까? PyTorch의 오류와 `record_chain`의 오류를 나란히 본다.


# %%
def message(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except (ValueError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"


for bad in (0, 20):
    print(message(checkpoint_sequential, layers, bad, data, use_reentrant=False))
    print(message(record_chain, 10, segments=bad))

# %% [markdown] lang="ko"
# PyTorch의 오류만 보고는 무엇이 틀렸는지 알기 어렵다.
#
# ### 무거운 층 하나만, 학습할 때만
#
# 메모리를 많이 쓰는 층 하나만 감쌀 수도 있다. 아래 모듈은 너비를 32배로 늘리는 가운데 층만, 그것도 학습할 때만 감싼다. 추론할 때는 역전파가 없으니 저장할 것도 다시 계산할 것도 없다. 출력은 이런 모듈 넷의 파라미터 수다.


# %%
class HeavyMiddle(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.save = nn.Linear(64, 64), nn.Linear(64, 64), False
        self.heavy = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64))

    def forward(self, x):
        x = self.first(x)
        x = each(self.heavy, x) if self.save and self.training else self.heavy(x)
        return self.last(x)


stack = nn.Sequential(*[HeavyMiddle() for _ in range(4)])
sum(p.numel() for p in stack.parameters())

# %% [markdown] lang="ko"
# 넷을 이어 비교하고, 첫 모듈의 가운데 층이 실행된 횟수도 센다. 첫째 수는 감싸지 않은 스텝과 감싼 스텝을 한 번씩 하고 난 횟수, 둘째 수는 추론까지 하고 난 횟수다.

# %%
calls = []
hook = stack[0].heavy.register_forward_pre_hook(lambda *_: calls.append(1))


def step(save):
    for module in stack:
        module.save = save
    return stack(x).square().mean()


table = compare_steps(stack.train(), plain=lambda: step(False), heavy=lambda: step(True))
trained = len(calls)
stack.eval()(x)
hook.remove()
print(trained, len(calls))
table

# %% [markdown] lang="ko"
# 학습에서는 1 + 2 = 3번, 추론에서는 한 번 더해 4번이다. 가벼운 층의 결과는 그대로 저장했는데도 남은 바이트의 대부분이 사라졌다.
#
# ## 5.6 transformers에서
#
# 한 줄이면 된다. 5.23부터는 `model.activation_checkpointing_enable()`, 그 전에는 `model.gradient_checkpointing_enable()`이라고 쓴다. 둘 다 `{"use_reentrant": False}`를 받는다.
# 이 강의의 `enable_checkpointing(model)`은 있는 쪽을 부른다. 작은 GPT-2를 만들어 비교한다(`set_checkpointing`은 켜거나 끄고 그 모델을 돌려준다). GPT-2에는 드롭아웃이 있다.


# %%
from transformers import GPT2Config, GPT2LMHeadModel

from virtual_gpu.step.run import set_checkpointing


def small_gpt(checkpointing=False):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).train()
    return set_checkpointing(model, checkpointing)


dataset = make_dummy_dataset(size=16, sequence_length=64, vocab_size=512)
batch, gpt = dataset[:4], small_gpt()


def loss(checkpointing):
    return set_checkpointing(gpt, checkpointing)(**batch, use_cache=False).loss


compare_steps(gpt, plain=lambda: loss(False), checkpoint=lambda: loss(True))

# %% [markdown] lang="ko"
# `use_cache=False`는 생성할 때 쓰는 키-값 캐시를 끈다. 학습에는 쓸모가 없는데도 켜져 있으면 층마다 키와 값을 붙들고 있다. 체크포인팅과는 함께 쓸 수 없어서, 둘 다 켜면 transformers가 경고하고 캐시를 끈다.
# 체크포인팅을 끄고 한 번, 켜고 한 번, 64토큰을 넣은 뒤 캐시에 든 토큰의 수를 센다.

# %%
for checkpointing in (False, True):
    cache = small_gpt(checkpointing)(**batch, use_cache=True).past_key_values
    print(checkpointing, cache.get_seq_length() if cache is not None else 0)

# %% [markdown] lang="ko"
# ### 내가 쓴 학습 루프, 자동 혼합 정밀도, GradScaler
#
# 학습 루프는 아무것도 달라지지 않는다. 순전파를 `autocast`로 감싸면 되살릴 때도 같은 자료형으로 계산한다. CPU에서 bf16으로 실제로 학습해, 마지막 가중치가 체크포인팅 없이 학습한 것과 얼마나 다른지 본다.
# `GradScaler`는 1.4절의 손실 스케일링이다.


# %%
from helpers.trainers import largest_difference


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for rows in torch.arange(16).split(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**dataset[rows.tolist()], use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


largest_difference(train(small_gpt()), train(small_gpt(checkpointing=True)))

# %% [markdown] lang="ko"
# 가중치가 한 비트도 다르지 않다. CPU에서 볼 수 없는 것도 있다. fp16의 그레이디언트가 넘쳐 스텝을 건너뛰는 일과, 텐서 코어의 속도다. fp16 autocast의 **메모리**는 가상 GPU에서 볼 수 있다. A100-40GB에서 최대가 어떻게 달라지는지 본다. 옵티마이저 스텝의 임시 텐서가 최대를 가리지 않도록 융합 AdamW를 쓴다.

# %%
big = use_gpu("A100-40GB")
gpu_memory_sweep(
    batch_size=16, precision="mixed_fp16", optimizer="adamw_fused", gradient_checkpointing=[False, True], gpu=big
)

# %% [markdown] lang="ko"
# 최대가 25.83 GiB에서 19.98 GiB로 줄었다. 남은 것은 거의 모두 fp32 가중치와 그레이디언트, 옵티마이저 상태(합쳐서 19.84 GiB)이고, 이것은 체크포인팅이 줄이지 않는다.
#
# ### Trainer와 Accelerate
#
# `Trainer`에서는 인자 하나다(`gradient_checkpointing=True`, 5.23부터는 `activation_checkpointing=True`). 배치 1을 네 번 누적하면서, 4장의 `train_with_trainer`에 이 인자를 더한다. 끈 것과 켠 것의 최종 가중치가 얼마나 다른지 본다.

# %%
from helpers.trainers import train_with_trainer

settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 3}
off = train_with_trainer(small_gpt(), dataset, **settings)
on = train_with_trainer(small_gpt(), dataset, **settings, gradient_checkpointing=True)
largest_difference(off, on)

# %% [markdown] lang="ko"
# Accelerate로 학습한다면 모델에서 한 줄로 켠다. 나머지는 4장의 누적 루프 그대로다. 역시 가중치의 차이를 본다.

# %%
from accelerate import Accelerator


def train_with_accelerate(model):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(dataset, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch, use_cache=False).loss)
            optimizer.step()
            optimizer.zero_grad()
    return model


largest_difference(train_with_accelerate(small_gpt()), train_with_accelerate(small_gpt(checkpointing=True)))

# %% [markdown] lang="ko"
# ### DeepSpeed ZeRO-3와 함께
#
# ZeRO-3는 파라미터, 그레이디언트, 옵티마이저 상태를 여러 GPU에 나눈다(6장). 순전파 상태는 나누지 않으므로 체크포인팅과 함께 쓰는 일이 많다. 어떤 글은 DeepSpeed 설정에 키 하나를 넣으면 된다고 한다.
#
# > **주장 6.** "DeepSpeed 설정에 `"gradient_checkpointing": True`를 넣으면 켜진다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 이것은 실행이 아니라 소스로 확인한 것이다. DeepSpeed 0.19.8에서 설정을 읽는 코드(`runtime/config.py`)에는 그런 키를 찾는 곳이 없다.
# 비슷한 이름의 `activation_checkpointing` 절은 `deepspeed.checkpointing.checkpoint`로 직접 감싼 함수가 어떻게 저장할지를 정할 뿐이다. 모델에서 켜거나 `Trainer`의 인자로 켠다.
#
# </details>
#
# 파라미터를 나누면서 체크포인팅을 켰을 때의 메모리는 6.9절에서 센다.
#
# ### 지원하지 않는 모델
#
# 모든 모델이 한 줄로 되지는 않는다. transformers의 ResNet이 그렇다. 오류가 무엇이라고 말하는지 본다.

# %%
from transformers import ResNetConfig, ResNetForImageClassification

message(enable_checkpointing, ResNetForImageClassification(ResNetConfig()))

# %% [markdown] lang="ko"
# 이럴 때는 반복되는 블록의 `forward`를 직접 감싼다. `checkpoint_modules(model, kind)`는 그 종류의 모듈을 찾아 하나하나 `checkpoint`로 바꾸어 준다. 다음 절에서 쓴다.
#
# ## 5.7 얼마나 줄고, 얼마나 느려질까
#
# ### 책이 출력한 10.29 GB
#
# 책은 체크포인팅을 켠 배치 16에서 스텝 직후에 10.29 GB를 출력했다. 체크포인팅이 없는 배치 4의 10.586 GB보다도 적다. 그런데 책의 루프는 키-값 캐시를 켠 채 학습하고, 체크포인팅을 켜면 캐시는 저절로 꺼진다. 메모리를 줄인 것은 둘 가운데 어느 쪽일까? 한도가 없는 가상 GPU에서 캐시와 체크포인팅을 켜고 끄며 같은 줄을 비교한다. 열은 차례로 캐시, 체크포인팅, 배치 16의 스텝 직후 메모리다.

# %%
from helpers.chapters.c5_checkpointing.costs import printed_after_step

for use_cache, checkpointing in ((True, False), (False, False), (False, True)):
    print(use_cache, checkpointing, human_bytes(printed_after_step(use_cache, checkpointing)[0]))

# %% [markdown] lang="ko"
# 오늘날의 라이브러리에서 스텝 직후의 값은 캐시를 끄는 것만으로 0.75 GiB가 줄고, 체크포인팅은 여기에 **아무것도 더하지 않는다.** 그 순간에는 순전파 상태가 어차피 사라지고 없기 때문이다(3.7절). 캐시만 남아 있는 것은 책의 루프에서 변수 `outputs`가 `past_key_values`를 다음 순전파까지 붙들고 있어서다. 체크포인팅이 줄이는 것은 **최대**다. 끈 것과 켠 것의 최대를 차례로 출력한다. 줄의 끝에 붙은 수는 첫 순전파 뒤의 순전파 상태다.

# %%
gpu = use_gpu("T4")
pair = [predict_memory(batch_size=16, gradient_checkpointing=on) for on in (False, True)]
for one in pair:
    print(one.verdict, human_bytes(one.timeline.at_end(0)["activations"]))

# %% [markdown] lang="ko"
# 순전파 상태는 크게 줄었는데 전체 최대는 그만큼 줄지 않았다. 옵티마이저 스텝이 새 최대가 되었기 때문이다.
#
# 들어가는 가장 큰 배치와 가장 긴 시퀀스는 어떻게 달라질까? 배치는 길이 256에서, 길이는 배치 4에서 64의 배수로 찾는다. 열은 체크포인팅, 배치, 길이다.

# %%
for on in (False, True):
    batch_size = largest_fitting("batch_size", gradient_checkpointing=on)
    length = largest_fitting("sequence_length", multiple=64, batch_size=4, gradient_checkpointing=on)
    print(on, batch_size, length)

# %% [markdown] lang="ko"
# 배치는 네 배 넘게 늘었고, 길이 2048은 메모리가 아니라 이 모델의 위치 인코딩이 정한 끝이다.
#
# ### 메모리를 70% 확보할 수 있을까
#
# 언어 모델 셋과 이미지 모델 둘로 시험한다. 언어 모델은 배치 8에 길이 1024, ResNet-50은 512 × 512, ViT-Base는 768 × 768 이미지 8장이다. 옵티마이저는 모두 AdamW이고, 언어 모델은 저장된 자료형, 이미지 모델은 fp32다.
# 한도가 없는 가상 T4에서 두 스텝을 실행해, 순전파 상태만 보았을 때와 전체 최대를 보았을 때의 비율을 견준다. 먼저 이미지 모델을 준비한다. 값이 없는 `meta` 장치에 만들어 두면 가상 GPU로 옮길 수 있다.

# %%
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

from helpers.chapters.c5_checkpointing.costs import SavingTable, checkpoint_modules
from virtual_gpu.step.flops import count_flops


def resnet(checkpointing):
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig()).train()
    return checkpoint_modules(model, ResNetBottleNeckLayer) if checkpointing else model


def vit(checkpointing):
    with torch.device("meta"):
        model = ViTForImageClassification(ViTConfig(image_size=768)).train()
    return set_checkpointing(model, checkpointing)


def images(size):
    pixels = torch.empty(8, 3, size, size, device="meta")
    return {"pixel_values": pixels, "labels": torch.zeros(8, dtype=torch.long)}


vision = {"ResNet-50": (resnet, images(512)), "ViT-Base": (vit, images(768))}
{name: tuple(inputs["pixel_values"].shape) for name, (_, inputs) in vision.items()}

# %% [markdown] lang="ko"
# 모델마다 체크포인팅을 끄고 한 번, 켜고 한 번 실행한다. '순전파 상태'는 첫 순전파가 끝났을 때의 값이다. 언어 모델은 융합 어텐션 커널이 있는 A100에서 실행한다. T4였다면 Llama의 순전파 상태가 두 배쯤이고(4.3절), 체크포인팅이 그만큼 더 잘 듣는 것처럼 보인다.

# %%
languages = [
    {"model_id": name, "batch_size": 8, "sequence_length": 1024}
    for name in ("gpt2-large", "Llama-3.2-1B", "polyglot-ko-1.3b")
]
table = SavingTable()
for name, (make, inputs) in vision.items():
    table[name] = [step_timeline(make(on), inputs) for on in (False, True)]
for setting in languages:
    reports = [predict_memory(**setting, gradient_checkpointing=on, gpu="A100-80GB") for on in (False, True)]
    table[setting["model_id"]] = [report.timeline for report in reports]
table

# %% [markdown] lang="ko"
# > **주장 7.** "메모리를 70% 확보한다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 순전파 상태만 보면 다섯 모델 모두 60% 넘게 줄고, 언어 모델은 74%에서 93%까지다. 그러나 GPU가 버텨야 하는 전체 최대에서는 40%에서 76%까지 모델마다 다르다.
# 배치나 길이가 작으면 0%일 수도 있다. 순전파 상태가 최대를 만들고 있을 때만 줄어든다.
#
# </details>
#
# > **주장 8.** "ResNet 같은 이미지 모델에도 쓸 수 있다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 위 표의 ResNet과 ViT에서 줄었다. 다만 ResNet은 직접 감싸야 하고, 그 안의 배치 정규화는 한 스텝에 두 번 갱신된다(5.5절). 정규화 층을 감싸지 않거나, 모멘텀 m을 1 − √(1 − m)으로 바꾼다. 같은 글이 함께 드는 EfficientNet과 강화 학습은 실행해 보지 않았다.
#
# </details>
#
# ### 연산은 얼마나 늘어날까
#
# 순전파를 1이라 하면 역전파는 2쯤 된다. 순전파를 통째로 한 번 더 하면 3이 4가 되니 33%가 늘어난다. 실제로는 얼마인지 다섯 모델에서 센다.


# %%
def extra(plain, more):
    return f"{more.total / plain.total - 1:.1%}"


for name, (make, inputs) in vision.items():
    pair = (count_flops(make(on), inputs) for on in (False, True))
    print(name, extra(*pair))
for setting in languages:
    pair = (training_flops(**setting, gradient_checkpointing=on) for on in (False, True))
    print(setting["model_id"], extra(*pair))

# %% [markdown] lang="ko"
# 다섯 모델 가운데 33%를 넘는 것은 없고, 많이 모자라는 것도 있다. 두 가지 때문이다.
#
# 1. **감싸지 않은 곳은 다시 계산하지 않는다.** 어휘가 128,256개인 Llama-3.2-1B는 출력층의 몫이 커서 가장 적게 늘었다.
# 2. **재계산은 필요한 데까지만 한다.** 블록의 마지막 행렬곱은 결과가 버려질 뿐이니 early stop이 건너뛴다. 다만 GPT-2는 그 뒤에 드롭아웃이 있어 끝까지 가야 한다.
#
# 2번의 몫이 얼마인지 early stop을 켠 것과 끈 것을 비교해 확인한다. 모델은 polyglot-ko-1.3b다.

# %%
from torch.utils.checkpoint import set_checkpoint_early_stop

from virtual_gpu.step.flops import flops_of_config

config = load_config("polyglot-ko-1.3b")
plain, stopped = (flops_of_config(config, 8, 1024, on) for on in (False, True))
with set_checkpoint_early_stop(False):
    print(extra(plain, stopped), extra(plain, flops_of_config(config, 8, 1024, True)))

# %% [markdown] lang="ko"
# > **주장 9.** "약 33%의 추가 연산이 든다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 역전파가 순전파의 두 배이고 순전파를 모두 다시 할 때의 값이다. 다섯 모델에서는 20%에서 33% 사이였다. 5.5절의 작은 합성곱 블록은 35%였는데,
# 첫 층이 이미지의 그레이디언트를 계산하지 않아 역전파가 두 배에 못 미쳐서다.
#
# </details>
#
# 시간은 어떨까? 이 노트북을 실행한 컴퓨터에서 잰다. GPU가 있으면 GPU, 없으면 CPU다. 첫 줄은 블록 아홉 개의 순전파와 역전파에 걸린 시간의 중앙값이다. 체크포인팅을 껐을 때, 켰을 때, 그리고 그 비율이다.
# 둘째 줄은 샘플 하나에 걸린 시간으로, 체크포인팅 없이 배치 8일 때와 체크포인팅을 켜고 배치를 32로 키웠을 때다. 값은 컴퓨터마다 다르다.

# %% tags=["nbval-ignore-output"]
import statistics
import time

device = "cuda" if torch.cuda.is_available() else "cpu"
timed, timed_x = copy.deepcopy(blocks).to(device), x.to(device)


def seconds(wrap, repeats=7):
    times = []
    for _ in range(repeats):
        start, y = time.perf_counter(), timed_x
        for block in timed:
            y = wrap(block, y)
        y.square().mean().backward()
        y.sum().item()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


without, with_checkpoints = seconds(lambda block, y: block(y)), seconds(each)
print(f"{device}: {without * 1e3:.1f} ms, {with_checkpoints * 1e3:.1f} ms, x{with_checkpoints / without:.2f}")
small_batch, timed_x = seconds(lambda block, y: block(y)), timed_x.repeat(4, 1, 1)
print(f"{small_batch / 8 * 1e3:.2f} ms, {seconds(each) / 32 * 1e3:.2f} ms")

# %% [markdown] lang="ko"
# > **주장 10.** "약 20% 느려진다", "20~30% 느려진다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 연산이 20~33% 늘어나니 연산이 시간을 정하는 곳에서는 그쯤 된다. 모델과 라이브러리의 버전, 장치에 따라 다르므로 자기 GPU에서 재어 보아야 안다. 여기에 저장된 시간은 CPU의 것이다.
#
# </details>
#
# > **주장 11.** "훈련 속도가 빨라진다", "불필요한 계산을 피한다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 같은 배치라면 연산은 늘 늘어난다. 줄어드는 것은 메모리다.
#
# </details>
#
# > **주장 12.** "배치를 키울 수 있어 시간을 되찾는다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 배치를 키워도 샘플마다 드는 추가 연산은 그대로다. 작은 배치가 GPU를 놀리고 있었을 때만 그만큼을 되찾는다. 위의 둘째 줄에서 뒤의 수가 더 작다면 그런 경우다.
#
# </details>
#
# > **주장 13.** "텐서 코어 덕분에 재계산이 값싸다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **여기서는 재지 못했다.** 재계산하는 행렬곱은 순전파와 같은 행렬곱이므로 빨라지기는 한다. 그러나 순전파와 역전파도 함께 빨라지니 늘어나는 비율까지 줄어들 까닭은 없다. 이 강의를 만든 컴퓨터에는 GPU가 없어 시간을 재지 못했다.
#
# </details>
#
# ## 5.8 두 지렛대를 함께
#
# 4장의 누적과 이 장의 체크포인팅을 함께 놓고 고른다. GPU는 T4, 모델은 polyglot-ko-1.3b, 목표는 배치 16이다. 만들 수 있는 모든 조합을 나열한다. 옵티마이저는 `Trainer`의 기본값인 융합 AdamW다. 추가 연산은 체크포인팅 없이 한 번에 처리할 때와 비교한 것이다. 들어가는 것 가운데 추가 연산이 없는 줄을 찾는다.

# %%
both_levers(16, optimizer="adamw_fused")

# %% [markdown] lang="ko"
# 배치 16을 4장처럼 나누는 것으로 충분하다. **나눌 수 있으면 먼저 나누고**, 마이크로 배치 1도 들어가지 않을 때 체크포인팅을 켠다. 나누는 데는 추가 연산이 없기 때문이다. 마이크로 배치가 작아질수록 체크포인팅이 줄이는 메모리는 적어지는데 추가 연산은 그대로다.
# (마이크로 배치가 너무 작으면 GPU가 논다. 그 손해는 4장에서 잰 처리량으로 판단한다.)
#
# 시퀀스가 길면 사정이 달라진다. L4에서 Llama-3.2-1B를 길이 6144, 8비트 AdamW로 배치 2를 만드는 조합이다. 체크포인팅을 끈 줄이 들어가는지 본다.

# %%
both_levers(2, gpu="L4", model_id="Llama-3.2-1B", sequence_length=6144, optimizer="adamw_8bit")

# %% [markdown] lang="ko"
# 이번에는 샘플 하나도 그냥은 들어가지 않는다. 더 나눌 수 없으니 체크포인팅만 남는다.
#
# > **주장 14.** "분산 학습을 하려면 꼭 필요하다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 그냥 들어가는 모델에는 필요 없고, 켜면 연산만 늘어난다.
#
# </details>
#
# > **주장 15.** "대부분은 기본 설정으로도 좋다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 층마다 감싸는 기본 설정은 좋은 출발점이다. 더 나아가려면 5.5절의 `selective`처럼 연산을 늘리지 않고 줄이는 방법도 있다.
#
# </details>
#
# ### 직접 바꿔 보기
#
# 패널에서 모델과 GPU, 배치를 바꾸면 체크포인팅을 끈 것과 켠 것을 나란히 그린다. 아래 그림은 처음 모습이다.
#
# ![polyglot-ko-1.3b, 배치 16. 체크포인팅 없이는 15.25 GiB로 T4의 한도를 넘고, 켜면 12.42 GiB로 들어간다.](../../image/05_with_and_without.svg)
#
# 이렇게 해 본다.
#
# - 배치를 4로 줄인다. 체크포인팅을 켜도 왜 최대가 줄지 않을까?
# - 길이를 1024로 늘리고 들어가는 가장 큰 배치를 찾는다.

# %%
checkpointing_memory_panel()

# %% [markdown] lang="ko"
# ## 5.9 주장과 결과
#
# 이 장에서 시험한 말을 한데 모은다. 괄호 안은 절이다.
#
# | 글이 말하는 것 | 이 장에서 실행한 것 | 나온 것 | 판정 |
# |---|---|---|---|
# | 파라미터와 상태를 저장하고 이전 상태를 불러온다 | 사슬의 기록(5.2) | 저장하는 것은 순전파 값뿐 | 틀리다 |
# | 역전파 중에 가중치를 저장한다 | 같은 기록 | 가중치는 그대로 | 틀리다 |
# | 층 10개 가운데 5개를 저장한다 | 구간 10, 5, 3개(5.3) | 나누기 나름이다. 기본값은 열 개를 모두 남긴다 | 조건부로 맞다 |
# | O(N)에서 O(√N)으로 | N을 4096까지(5.3), 깊이 4·8·16(5.4) | √N 구간이면 2√N, 라이브러리의 기본은 N에 비례 | 조건부로 맞다 |
# | `checkpoint(model, x)`로 충분하다 | 통째로 감싸기, 옛 구현에 평범한 입력(5.4) | 최대는 그대로, `requires_grad`가 False | 틀리다 |
# | 순전파 상태가 큰 층을 고른다 | 합성곱만 저장(5.5) | 연산은 그대로, 메모리는 줄었다 | 맞다 |
# | DeepSpeed 설정의 키로 켜진다 | 소스를 읽었다(5.6) | 그런 키를 읽는 곳이 없다 | 틀리다 |
# | 메모리 70% 확보 | 다섯 모델(5.7) | 순전파 상태 64~93%, 전체 40~76% | 조건부로 맞다 |
# | 추가 연산 33% | FLOPs를 셈(5.5, 5.7) | 다섯 모델 19.6~32.7%, 합성곱 블록 35.2% | 조건부로 맞다 |
# | 약 20%, 20~30% 느려진다 | FLOPs와 CPU 시간(5.7) | 연산은 20~33%, 시간은 컴퓨터마다 다르다 | 조건부로 맞다 |
# | 빨라진다, 불필요한 계산을 피한다 | 같은 셈 | 늘 더 계산한다 | 틀리다 |
# | 큰 배치로 시간을 되찾는다 | 샘플마다 걸린 시간(5.7) | 샘플마다 드는 연산은 그대로, 시간은 컴퓨터마다 다르다 | 조건부로 맞다 |
# | 텐서 코어가 재계산을 값싸게 한다 | GPU가 없어 재지 못함 | 순전파와 역전파도 함께 빨라진다 | 재지 못했다 |
# | ResNet 같은 이미지 모델에도 쓴다 | ResNet-50, ViT(5.7) | 줄어든다. 직접 감싸야 하고 배치 정규화를 살펴야 한다 | 조건부로 맞다 |
# | 대부분은 기본 설정으로도 좋다 | 기본 설정과 연산별 선택(5.5, 5.7) | 좋은 출발점, 더 나은 선택도 있다 | 맞다 |
# | 분산 학습에는 늘 필요하다 | 조합의 표(5.8) | 들어가면 필요 없다 | 틀리다 |
#
# ## 5.10 연습 문제
#
# 답을 채우고 실행하면 맞았는지, 틀렸다면 얼마나 틀렸는지 알려 준다. 막히면 `exercise("5-1").hint()`, 그래도 막히면 `exercise("5-1").solution()`을 실행한다.
#
# **5-1.** 노드 N개를 s개의 구간(s는 N의 약수, 1 < s < N)으로 나누어 체크포인팅할 때 (최대 저장 수, 재계산 횟수)를 돌려주는 함수를 완성하라. 채점은 `record_chain`을 실제로 실행해서 한다.


# %%
def segments_cost(nodes, segments):
    return ...


exercise("5-1").check(segments_cost)

# %% [markdown] lang="ko"
# **5-2.** T4에서 Llama-3.2-1B를 길이 2048, 8비트 AdamW(`adamw_8bit`)로 학습한다. 한 스텝의 배치가 8이 되도록 `batch_size`, `gradient_accumulation_steps`, `gradient_checkpointing`을 정하라.

# %%
changes = ...
exercise("5-2").check(changes)

# %% [markdown] lang="ko"
# **5-3.** (퍼즐) 저장할 수 있는 값의 수(예산)가 정해져 있을 때 재계산이 가장 적은 일정을 찾아라. 일정은 다음에 보관할 노드를 거듭 고르는 것으로 정해진다. `split(start, end, slots)`은 노드 `start`가 보관되어 있고
# `end`부터 `start`까지의 그레이디언트가 필요할 때, 다음에 보관할 노드의 번호(`start` < 번호 ≤ `end`)를 돌려준다. `slots`는 보관할 수 있는 노드의 수로 `start`도 센 것이며, 2 이상일 때만 불린다.
# 한가운데를 고르는 `(start + end + 1) // 2`에서 시작해 본다.


# %%
def split(start, end, slots):
    return ...


exercise("5-3").check(split)

# %% [markdown] lang="ko"
# ## 5.11 기억할 것
#
# | 전략 | 저장 | 재계산 |
# |---|---|---|
# | 모두 저장 | N에 비례 | 없음 |
# | 입력만 저장 | 일정 | N²에 비례 |
# | √N개의 구간 | 2√N | 순전파 한 번보다 적음 |
# | 층마다(transformers의 기본) | 층의 입력만, N에 비례 | 블록의 순전파 한 번보다 적음 |
# | 연산별 선택 | 비싼 연산의 결과만 | 값싼 연산만 |
#
# - 체크포인팅은 **최대**를 줄인다. 스텝 직후의 값은 달라지지 않는다.
# - `use_reentrant=False`를 적는다. 학습할 때는 `use_cache=False`다.
# - 그레이디언트는 난수까지 되돌리므로 같다. 부수 효과만 두 번 일어난다.
# - 나눌 수 있으면 먼저 누적으로 나눈다. 샘플 하나도 들어가지 않을 때, 또는 마이크로 배치가 너무 작아질 때 체크포인팅을 켠다.
#
# 순전파 상태는 많이 줄었다. 그래도 파라미터, 그레이디언트, 옵티마이저 상태는 그대로다. 모델이 더 크면 이것만으로 GPU 하나를 넘는다. GPU가 여러 개라면 나누어 가질 수 있을까? [6장](06_distributed_zero.ipynb)에서 답한다.
