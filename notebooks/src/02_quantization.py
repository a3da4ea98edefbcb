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
# # 2장. 양자화: 숫자를 몇 개의 코드로
#
# 16비트 가중치를 4비트로 줄이면 모델은 4분의 1이 된다. 그런데 4비트로 쓸 수 있는 **코드**(code)는 16개뿐이다. 수십억 개의 가중치를 값 16개로 바꿔 적고도 모델이 멀쩡할 수 있을까?
# 어떤 방법은 모델을 망가뜨리고 어떤 방법은 살린다. 이 장에서는 여러 방법을 하나씩 만들어 보며 무엇이 그 차이를 만드는지 찾는다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 절댓값 최대, 영점, 분위수, NF4, MXFP4, NVFP4 **양자화**(quantization)를 구별하고, 스케일까지 넣어 **파라미터당 비트**를 계산한다.
# - 이상치가 큰 모델의 어디에 있는지, 왜 문제인지, 블록과 LLM.int8과 SmoothQuant가 그것을 어떻게 다루는지 설명한다.
# - 8비트 옵티마이저의 상태가 왜 8비트로 버티는지 설명한다.
#
# 먼저 양자화할 숫자를 만든다. 학습된 가중치는 대개 0을 중심으로 한 종 모양이므로 정규 분포에서 4,096개를 뽑는다.

# %%
import torch

from helpers import case, example_tensor, exercise, guess, guesses, quantization_panel, quantize
from helpers.chapters.c2_quantization.cases import stored
from helpers.chapters.c2_quantization.charts import draw_errors, draw_outliers, draw_state
from helpers.chapters.c2_quantization.code_tables import load_bitsandbytes
from helpers.chapters.c2_quantization.quantization import double_quantize
from helpers.chapters.c2_quantization.tables import table
from helpers.chapters.c2_quantization.whole_model import (
    int8_linear,
    int8_model,
    outlier_columns,
    quantize_model,
)  # fmt: skip
from helpers.small_model import adam_state, score, train_small_model, with_outlier_channels

x = example_tensor("normal")
print(f"{len(x):,}, {x.min():.2f} ... {x.max():.2f}")

# %% [markdown] lang="ko"
# ## 2.1 값 4,096개를 코드 16개로
#
# 이 값들을 4비트 코드로 바꾸었다가 되돌리면 얼마나 달라질까? **상대 오차**(오차 벡터의 길이 ÷ 원래 벡터의 길이)를 %로 예상한다. `None` 대신 숫자를 적고 실행한다.

# %%
four_bits = guess("2.1", None, "%")
four_bits

# %% [markdown] lang="ko"
# 가장 단순한 방법으로 바꾼다. 위는 값의 히스토그램, 가운데 눈금은 코드가 뜻하는 값, 아래는 코드마다 그것을 쓰는 값의 수다. 그림을 본 다음 **4를 3이나 8로 바꾸어** 다시 실행한다.

# %%
q = quantize(x, "absmax", bits=4)
q

# %% [markdown] lang="ko"
# 값은 가장 가까운 눈금으로 옮겨 간다. 눈금의 간격이 곧 오차다. 예상과 비교한다.

# %%
four_bits.against(quantize(x, "absmax", bits=4).relative_error)

# %% [markdown] lang="ko"
# 비트를 하나씩 줄이면 오차는 얼마씩 늘어날까? 2비트부터 8비트까지 그린다. 세로축은 한 칸이 10배다.

# %%
draw_errors(quantize(x, "absmax", bits=bits) for bits in range(2, 9))

# %% [markdown] lang="ko"
# 거의 곧은 선이다. 비트가 하나 줄 때마다 눈금의 수가 절반이 되고, 간격도 오차도 두 배쯤 된다. 이 장의 나머지는 **같은 비트로 이 선보다 아래로 내려가는 방법**을 찾는 이야기다.
#
# ## 2.2 자의 눈금을 정하는 법: 절댓값 최대
#
# 실수를 코드로 옮기는 일은 자(ruler)를 하나 정하는 것이다. 코드 1이 뜻하는 크기를 **스케일**(scale)이라 한다. 값을 스케일로 나누어 반올림하면 코드가 되고, 코드에 스케일을 다시 곱하면 값이 되돌아온다. 되돌리는 일을 **역양자화**(dequantize)라 한다.
#
# 스케일은 얼마로 할까? 먼저 떠오르는 것은 두 자료형의 가장 큰 수끼리 맞추는 것이다. 그런데 이런 말이 있다.
#
# > **주장 1.** "자료형의 범위끼리 맞추면 코드가 낭비된다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 낭비 정도가 아니라, fp32에서 출발하면 코드 하나만 남아 정보가 모두 사라진다(아래 셀). 범위가 훨씬 좁은 float8_e4m3fn(±448)에서 출발해도 양 끝의 코드는 거의 다 낭비된다(아래 그림).
#
# </details>
#
# fp32의 가장 큰 수가 int8의 코드 127이 되게 해 본다. 값 4,096개가 쓰는 코드를 모두 출력한다. 몇 종류일까?

# %%
scale = torch.finfo(torch.float32).max / 127
codes = (x / scale).round()
print(f"{scale:.1e} {codes.unique().int().tolist()}")

# %% [markdown] lang="ko"
# 모든 값이 코드 0이 되었다. 아래 그림은 책의 예처럼 -17부터 15까지 퍼진 값 24개로 그린 것이다. 위쪽 선은 자료형의 범위, 아래쪽 띠는 코드다. 주황색은 어떤 값도 닿지 못하는 코드다.
#
# ![fp32의 범위를 int8의 범위로 옮기면 코드 256개 가운데 255개, float8의 범위를 옮기면 246개에 어떤 값도 닿지 못한다.](../../image/02_type_range.svg)
#
# 자료형이 아니라 **데이터**의 범위에 맞추면 된다. 값들의 절댓값 가운데 가장 큰 것을 가장 큰 코드(b비트라면 $2^{b-1}-1$)로 보낸다. 이것이 **절댓값 최대 양자화**(absmax)다. 2.1절의 방법이 이것이다.
#
# **연습 2-1.** 절댓값 최대 양자화를 구현하라. 값 `x`와 비트 수를 받아 코드와 스케일을 돌려준다. 막히면 `exercise("2-1").hint()`, 그래도 막히면 `exercise("2-1").solution()`을 실행한다.


# %%
def absmax(x, bits):
    return ...


exercise("2-1").check(absmax)

# %% [markdown] lang="ko"
# 0은 0 그대로이고 양쪽이 똑같은 자를 쓰므로 **대칭**(symmetric) 양자화라고 한다.
#
# > **주장 2.** "절댓값 최대로 하면 낭비되는 코드가 없다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 닿을 수 있는 범위는 넓어졌지만, 정규 분포 값 백만 개로도 꼬리의 코드 25개를 아무도 쓰지 않는다. 가장 작은 코드 -128은 양쪽이 똑같은 자를 쓰느라 늘 남고, 값이 고르게 퍼져 있을 때만 나머지가 모두 쓰인다.
#
# </details>
#
# 정규 분포 값 4,096개와 백만 개, 고르게 퍼진 값 10만 개에서 아무도 쓰지 않는 코드를 센다.

# %%
for numbers in (x, example_tensor("normal", 1_000_000), torch.linspace(-1, 1, 100_000)):
    print(f"{len(numbers):9,} {quantize(numbers).wasted_codes:3}/256")

# %% [markdown] lang="ko"
# 종 모양의 꼬리에는 값이 드물어서 눈금 일부가 놀고 있다. 그래도 오차는 반올림한 만큼, 곧 **반 칸**(스케일의 절반)을 넘지 않는다.
#
# ## 2.3 한쪽으로 치우친 값: 영점
#
# ReLU를 지난 값은 음수가 없다. 대칭 양자화는 음수 쪽 코드를 통째로 버린다. **영점 양자화**(zero point)는 가장 작은 값과 가장 큰 값을 양 끝 코드에 맞추고, 0이 몇 번 코드인지(영점)를 따로 기억한다. 0을 정확히 나타내려고 영점은 정수로 반올림한다. 정규 분포의 값과 그것을 ReLU에 넣은 값에서 가장 작은 코드, 가장 큰 코드, 영점을 출력한다.


# %%
def zero_point(x, bits=8):
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    zero = (-low / scale).round()
    return (x / scale).round() + zero, scale, zero


for numbers in (x, x.relu()):
    codes, scale, zero = zero_point(numbers)
    print(int(codes.min()), int(codes.max()), int(zero))

# %% [markdown] lang="ko"
# 코드 0부터 255까지 양 끝이 모두 쓰였고, 값 0은 영점인 코드가 되었다. ReLU를 지난 값에서는 가장 작은 값이 0이므로 영점도 0이다. 되돌릴 때는 코드에서 영점을 뺀 다음 스케일을 곱한다.
#
# 두 방법을 양쪽으로 퍼진 값과 한쪽으로 치우친 값에 4비트로 적용한다. 어느 쪽에서 이득이 클까?

# %%
rows = []
for kind in ("normal", "one_sided"):
    for method in ("absmax", "zero_point"):
        q = quantize(example_tensor(kind), method, bits=4)
        rows.append({"distribution": kind, "method": method, "wasted": q.wasted_codes, "error": q.relative_error})
table(rows)

# %% [markdown] lang="ko"
# 한쪽으로 치우친 값에서는 코드 절반을 되찾아 오차가 절반 이하가 된다. 양쪽으로 퍼진 값에서는 이득이 작다. 그 대신 영점을 기억해야 하고, 행렬곱에서 영점을 빼는 계산이 더해진다.
#
# ## 2.4 이상치 하나
#
# 절댓값 최대에는 약점이 있다. 자의 길이를 **가장 큰 값 하나**가 정한다. 값 4,096개 가운데 하나만 100으로 바꾸고 8비트로 양자화한다. 그 하나를 **뺀** 나머지의 상대 오차는 몇 배가 될까?

# %%
times = guess("2.4", None)
times

# %% [markdown] lang="ko"
# > **주장 3.** "이상치 하나가 모두를 망친다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 텐서 전체가 스케일 하나를 함께 쓴다면 그렇다. 값 하나 때문에 나머지 모두의 오차가 0.80%에서 22.7%로, 28배가 되었다.
#
# </details>
#
# 그림에서 눈금과 주황색을 2.1절의 그림과 비교한다.

# %%
y = x.clone()
y[0] = 100
spoiled = quantize(y)
spoiled

# %% [markdown] lang="ko"
# 코드 256개 가운데 11개만 쓰였다. 이렇게 나머지와 동떨어지게 큰 값을 **이상치**(outlier)라고 한다. 이상치를 뺀 4,095개의 상대 오차를 이상치가 없을 때와 비교한다.


# %%
def error_of_the_others(q):
    difference = (q.dequantize() - q.original)[1:]
    return float(difference.norm() / q.original[1:].norm())


before, after = error_of_the_others(quantize(x)), error_of_the_others(spoiled)
print(f"{before:.2%} -> {after:.1%}")
times.against(after / before)

# %% [markdown] lang="ko"
# 대형 언어 모델에는 이런 값이 실제로 있다. 다만 **가중치가 아니라 순전파 상태**(층이 계산해 낸 중간값)에 있다. LLM.int8 논문(Dettmers 외, 2022)은 67억 파라미터부터 모든 층에서 값이 다른 곳의 20배까지 커지는데, 그것이 특징 차원(채널) 여섯 개에 몰려 있다고 보고했다. 2.10절에서 다시 만난다.
#
# ## 2.5 블록
#
# 자 하나를 모두가 함께 써서 생긴 일이다. 값을 K개씩 **블록**(block)으로 나누고 블록마다 스케일을 따로 두면 어떨까?
#
# > **주장 4.** "블록은 이상치의 피해를 가둔다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 다만 공짜가 아니다. 이상치와 같은 블록의 값은 여전히 망가지고(아래 그림), 스케일이 비트를 더 쓴다(이 절의 표).
#
# </details>
#
# 아래는 값 9개를 4비트로, 한 번은 통째로, 한 번은 3개씩 나누어 양자화한 것이다. 주황색은 0이 아닌데 0이 되어 버린 값이다.
#
# ![값 9개에 이상치 9가 하나 있다. 스케일이 하나면 네 값이 0이 되고, 블록 3으로 나누면 이상치와 같은 블록의 -0.2만 0이 된다.](../../image/02_outlier_and_blocks.svg)
#
# 이상치와 한 블록에 든 값만 피해를 본다. 파이썬으로는 텐서의 모양을 (블록 수, K)로 바꾸고 줄마다 절댓값 최대를 구하면 끝이다. `quantize(…, block_size=64)`와 코드가 모두 같은지 확인한다.


# %%
def blockwise_absmax(x, block_size, bits=8):
    rows = x.reshape(-1, block_size)
    scales = rows.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (rows / scales).round().reshape(x.shape), scales


codes, scales = blockwise_absmax(y, 64)
bool((codes == quantize(y, block_size=64).codes).all()), tuple(scales.shape)

# %% [markdown] lang="ko"
# 공짜는 아니다. 스케일 하나는 fp32, 곧 32비트이고 블록의 값 K개가 이를 나누어 부담한다. 코드가 b비트, 스케일이 s비트라면
#
# $$\text{파라미터당 비트} = b + \frac{s}{K}$$
#
# 이 식은 이 장 끝까지 쓰인다.
#
# 이상치가 있는 y를 K를 줄여 가며 8비트로 양자화한다. 오차와 비트를 함께 본다면 어느 K를 고르겠는가?

# %%
rows = []
for size in (4096, 1024, 256, 64, 16, 4):
    q = quantize(y, bits=8, block_size=size)
    rows.append({"block_size": size, "others": error_of_the_others(q), "bits_each": q.bits_per_parameter})
table(rows)

# %% [markdown] lang="ko"
# 블록이 작을수록 오차가 줄고 비트는 늘어난다. K = 4에서는 파라미터당 16비트이므로 양자화하지 않은 fp16과 같다. 흔히 쓰는 K = 64는 0.5비트를 더 쓰고 오차를 8분의 1로 줄인다.
#
# ### 텐서, 채널, 블록
#
# 가중치 행렬에서는 행(출력 채널) 하나를 블록으로 삼기도 한다. 행마다 크기가 다른 64 × 64 행렬을 4비트로 양자화하고, 그 행렬을 전치한 것도 양자화한다. 전치했을 때 무엇이 나빠지는가?

# %%
w = example_tensor("normal").reshape(64, 64) * torch.logspace(-1, 1, 64)[:, None]
settings = {"tensor": {}, "channel": {"per_channel": True}, "block 32": {"block_size": 32}}
rows = []
for name, setting in settings.items():
    q, turned = quantize(w, bits=4, **setting), quantize(w.T, bits=4, **setting)
    rows.append({"setting": name, "error": q.relative_error, "transposed": turned.relative_error})
table(rows)

# %% [markdown] lang="ko"
# 크기가 비슷한 값끼리 묶인 쪽이 더 정확하다. 전치하면 한 행에 큰 값과 작은 값이 섞여 이득이 줄어든다. 자를 몇 개 쓰느냐뿐 아니라 **무엇을 한 자로 재느냐**가 중요하다.
#
# ## 2.6 분위수: 코드를 고르게 나누어 주기
#
# 지금까지는 눈금의 간격이 같았다. 값이 몰린 곳에 눈금을 더 촘촘히 놓을 수도 있다. 값을 크기 순서로 세워 똑같은 수로 나누고, 무리마다 코드를 하나씩 준다. 이것이 **분위수 양자화**(quantile)다. 코드가 뜻하는 값은 무리의 평균으로 한다.


# %%
def quantile(x, bits=4):
    shares = x.sort().values.chunk(2**bits)
    meanings = torch.stack([share.mean() for share in shares])
    edges = torch.stack([share[0] for share in shares[1:]])
    return torch.bucketize(x, edges, right=True), meanings


codes, meanings = quantile(x)
print(torch.bincount(codes).tolist())

# %% [markdown] lang="ko"
# 4,096개를 16으로 나눈 256개씩 정확히 나뉘었다. 아래 그림에서 막대의 자리는 코드가 뜻하는 값, 높이는 그 코드를 쓰는 값의 수다.
#
# ![같은 값을 4비트로 양자화했다. 절댓값 최대는 코드의 간격이 같고 쓰는 값의 수가 다르며 코드 2개를 낭비한다. 분위수는 쓰는 값의 수가 256개씩 같고 간격이 다르다.](../../image/02_quantiles.svg)
#
# > **주장 5.** "분위수로 하면 낭비되는 코드가 없지만 계산과 메모리가 더 든다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 같은 값이 많지 않아야 낭비가 없다. 계산과 메모리가 더 드는 것은 맞다. 그리고 낭비가 없다고 오차가 가장 작은 것은 아니다.
#
# </details>
#
# 낭비가 없으니 더 정확할까? 정규 분포(normal), 그 가운데 네 값을 20배로 키운 것(outliers), ReLU를 지난 값(one_sided)에서 4비트 절댓값 최대와 비교한다.

# %%
rows = []
for kind in ("normal", "outliers", "one_sided"):
    for method in ("absmax", "quantile"):
        q = quantize(example_tensor(kind), method, bits=4)
        errors = {"wasted": q.wasted_codes, "error": q.relative_error, "largest": q.largest_error}
        rows.append({"distribution": kind, "method": method, **errors})
table(rows)

# %% [markdown] lang="ko"
# - 정규 분포에서는 낭비가 없는데도 오차가 절댓값 최대와 비슷하다. **코드를 고르게 쓰는 것과 오차를 줄이는 것은 다른 목표다.** 분위수는 드문 값에 코드를 적게 주므로 가장 큰 오차가 훨씬 크다.
# - 이상치가 있으면 나머지를 지켜 내므로 전체 오차가 절반 이하가 된다. 그 대신 이상치 자신을 크게 틀린다.
# - ReLU를 지난 값은 절반이 0이다. 똑같은 값은 나눌 수 없으므로 코드 절반이 다시 낭비된다.
#
# 대가도 있다. 코드마다 뜻하는 값을 **표**로 기억해야 하고, 표를 만들려면 모든 값을 정렬해야 한다. 텐서 전체에 표 하나를 둘 때와 블록 64마다 둘 때의 파라미터당 비트를 출력한다. 8비트의 표는 값이 256개다.

# %%
for bits, size in ((4, 4096), (4, 64), (8, 4096), (8, 64)):
    print(bits, size, quantize(x, "quantile", bits=bits, block_size=size).bits_per_parameter)

# %% [markdown] lang="ko"
# 블록 64에 8비트 표를 두면 파라미터당 136비트로, 양자화하기 전(fp32)의 네 배가 넘는다.
#
# ### 직접 바꿔 보기
#
# 분포와 방법, 비트, 스케일을 함께 쓰는 묶음을 바꾸면 그림이 따라 바뀐다. NF4, MXFP4, NVFP4는 다음 두 절에서 설명한다. 아래 그림은 이상치가 있는 값을 블록 64로 나누어 4비트로 양자화한 모습이다.
#
# ![이상치가 있는 값 4,096개의 히스토그램과 4비트 절댓값 최대 코드. 블록 64마다 눈금의 간격이 다르다.](../../image/02_blocks_of_64.svg)
#
# - 분포를 '이상치 네 개'로, 비트를 4로 바꾼다. 블록을 켜고 블록 크기를 줄이면 상대 오차와 비트는 어떻게 되는가?
# - 같은 분포에서 분위수를 고르면 주황색이 사라진다. 그런데도 상대 오차가 블록만큼 작지 않은 까닭은?
# - '한쪽뿐인 분포'에서 절댓값 최대와 영점은 얼마나 다른가?
# - 분포를 '이상치 하나(끌어 보기)'로 바꾸고, 그림의 주황색 손잡이를 끈다. 이상치가 멀어지면 나머지 4,095개에 남는 코드는 몇 개인가? 블록 64를 켜고 다시 끌면?
#
# <details><summary>답 (먼저 바꿔 본 다음에 연다)</summary>
#
# - 블록이 작아지면 상대 오차는 줄고 비트는 늘어난다(2.5절의 표와 같은 방향이다).
# - 코드를 고르게 나누어 주므로 드문 이상치에는 코드가 모자란다. 위의 표에서 가장 큰 오차가 12.26이다.
# - 4비트라면 13.1%와 6.3%다(2.3절의 표). 음수 쪽 코드 8개를 되찾은 것이다.
# - 4비트 텐서 전체에서 20에 두면 코드 16개 가운데 12개가 낭비되고, 이상치가 하나를 가지므로 나머지에게는 3개만 남는다. 상대 오차는 74.4%다. 블록 64에서는 이상치가 든 블록만 나빠져, 32까지 끌어도 14.6%다.
#
# </details>

# %%
quantization_panel()

# %% [markdown] lang="ko"
# ## 2.7 NF4: 표를 미리 정해 두기
#
# 가중치가 정규 분포를 따른다면 정렬할 필요가 없다. 정규 분포의 분위수를 미리 계산해 모두가 **같은 표**를 쓰면 된다. 이것이 QLoRA(Dettmers 외, 2023)의 **NF4**(4-bit NormalFloat)다.
# 논문의 부록에 있는 정의대로 표를 만든다. 0 위로 8개, 아래로 7개의 분위수를 같은 확률 간격으로 잡고, 0을 더한 다음, 가장 큰 값으로 나누어 -1부터 1까지로 맞춘다. 확률 1의 분위수는 무한대이므로, 양 끝에서 1/32(16등분의 반 칸)과 1/30(15등분의 반 칸)의 평균만큼 물러나 시작한다(코드의 offset). 가장 바깥쪽 확률이 bitsandbytes의 소스에 적힌 0.9677083과 같은가?

# %%
offset = 1 - (1 / 32 + 1 / 30) / 2
above = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
below = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
meanings = torch.cat([above, below, torch.zeros(1)]).sort().values / above.max()
print(f"{offset:.7f}", [round(value, 4) for value in meanings.tolist()])

# %% [markdown] lang="ko"
# QLoRA를 구현한 라이브러리 `bitsandbytes`의 표와 비교한다. 값 16개가 모두 백만분의 1 안에서 같을까? 이어서 값 65,536개를 `quantize`와 bitsandbytes로 각각 양자화해 다른 코드를 센다(bitsandbytes는 4비트 코드 두 개를 1바이트에 담는다). 마지막 수는 bitsandbytes가 쓴 바이트다.

# %%
bnb = load_bitsandbytes()
theirs = bnb.functional.get_4bit_type("nf4", device="cpu")
weight = example_tensor("normal", 65536).reshape(256, 256)
nf4 = quantize(weight, "nf4", block_size=64)
packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).reshape(weight.shape)
print(bool((meanings - theirs).abs().max() < 1e-6))
print(f"{int((codes != nf4.codes).sum())} / {codes.numel():,}, {packed.numel():,} B")

# %% [markdown] lang="ko"
# 표는 백만분의 1 안에서 같고, 코드는 하나도 다르지 않다. 양자화할 때는 블록을 절댓값 최대로 나누어 -1부터 1까지로 맞춘 다음 표에서 가장 가까운 값을 찾는다. 오차가 얼마나 작은지는 2.8절에서 다른 형식과 함께 본다.
#
# ### 이중 양자화: 스케일을 다시 양자화하기
#
# 블록 64인 NF4는 4 + 32 / 64 = 4.5비트이고, 그 가운데 0.5비트가 스케일의 것이다. QLoRA는 스케일까지 양자화한다. 스케일들의 평균을 빼고, 256개씩 블록으로 묶어 8비트로 만든다. 이것이 **이중 양자화**(double quantization)다. 스케일의 몫 0.5비트가 얼마로 줄까? `double_quantize`가 이 일을 한다. 마지막 줄은 700억 파라미터 모델에서 아끼는 양이다.

# %%
double = double_quantize(nf4)
print(f"{8 / 64 + 32 / (64 * 256):.3f}")
print(f"{nf4.bits_per_parameter:.3f} -> {double.bits_per_parameter:.3f}")
print(f"{nf4.relative_error:.2%} -> {double.relative_error:.2%}")
print(f"{70e9 * (0.5 - 8 / 64 - 32 / (64 * 256)) / 8 / 1e9:.1f} GB")

# %% [markdown] lang="ko"
# QLoRA 논문의 **0.127비트**다(8 / 64 + 32 / (64 × 256)). 오차는 0.01%포인트 늘었을 뿐이다. 1장에서 NF4를 파라미터당 4.127비트로 센 까닭이 이것이다.
#
# **연습 2-2.** 코드의 비트, 블록 크기, 이중 양자화 여부를 받아 파라미터당 비트를 돌려주는 함수를 완성하라. 스케일은 fp32이고, 이중 양자화의 블록은 256이다. (평균을 적어 두는 32비트는 무시한다.)


# %%
def bits_per_parameter(bits, block_size, double):
    return ...


exercise("2-2").check(bits_per_parameter)

# %% [markdown] lang="ko"
# ## 2.8 MXFP4와 NVFP4: 하드웨어가 곱하는 4비트
#
# NF4의 값은 표에서 찾아 16비트로 되돌린 다음에야 곱할 수 있다. 2024년 이후의 GPU(NVIDIA Blackwell)는 4비트 실수 **fp4**(1장의 e2m1)를 그대로 곱한다. 값의 크기가 0, 0.5, 1, 1.5, 2, 3, 4, 6뿐이므로 블록마다 스케일이 있어야 한다. 스케일을 어떻게 적느냐가 두 형식의 차이다.
#
# | 형식 | 코드 | 스케일 | 블록 K |
# |---|---|---|---|
# | NF4 | 정규 분포의 분위수 16개 | fp32 (이중 양자화하면 8비트) | 64 |
# | MXFP4 (OCP 표준, 2023) | e2m1 | 8비트 지수 하나(E8M0, 2의 거듭제곱) | 32 |
# | NVFP4 (NVIDIA) | e2m1 | 8비트 실수(E4M3), 그리고 텐서마다 fp32 하나 | 16 |
#
# b + s / K로 세면 NVFP4는 파라미터당 몇 비트일까?

# %%
nvfp4_bits = guess("2.8", None)
nvfp4_bits

# %% [markdown] lang="ko"
# 같은 65,536개를 세 형식과 절댓값 최대로 양자화한다. 절댓값 최대와 NF4는 블록을 256, 64, 32, 16으로 바꾼다. 왼쪽 아래에 있을수록 좋다.

# %%
formats = [quantize(weight, "mxfp4"), quantize(weight, "nvfp4")]
for method in ("absmax", "nf4"):
    for size in (256, 64, 32, 16):
        formats.append(quantize(weight, method, bits=4, block_size=size))
draw_errors(formats)

# %% [markdown] lang="ko"
# 예상과 비교하고, 세 형식의 숫자를 출력한다.

# %%
mxfp4, nvfp4 = formats[:2]
for q in (nf4, mxfp4, nvfp4):
    print(f"{q.method:6} {q.bits_per_parameter:.2f} {q.relative_error:.1%}")
nvfp4_bits.against(nvfp4.bits_per_parameter)

# %% [markdown] lang="ko"
# 정규 분포의 값에서는 같은 비트라면 NF4가 가장 아래에 있다. 2.6절의 분위수는 절댓값 최대보다 나을 것이 없었는데 무엇이 다를까? 2.6절에서는 텐서 전체에 표 하나였고 여기서는 블록마다 스케일이 있다. 또 NF4의 표는 양 끝이 -1과 1이다. 블록에서 절댓값이 가장 큰 값을 그대로 담으므로 드문 값을 크게 틀리지 않는다. NVFP4는 블록이 작아서 같은 4.5비트로 바로 뒤를 따르고, MXFP4는 블록이 그 두 배이고 스케일도 2의 거듭제곱으로만 둘 수 있어 오차가 더 크다(둘 가운데 어느 쪽의 몫이 큰지는 나누어 재지 않았다). 정규 분포에서라면 fp4의 이점은 정확도가 아니라 **되돌리지 않고 곱한다**는 데 있다. 속도는 여기서 재지 않았다. 그 전의 GPU에서는 MXFP4나 NVFP4도 되돌린 다음 곱한다.
#
# ## 2.9 옵티마이저 상태를 8비트로
#
# 양자화하는 것은 가중치만이 아니다. AdamW는 파라미터마다 숫자를 둘(모멘텀과 분산) 기억한다. PyTorch에서는 파라미터와 같은 자료형이므로 fp32라면 8바이트다. **8비트 옵티마이저**는 이것을 2바이트 남짓으로 줄인다(Dettmers 외, 2021, bitsandbytes의 `AdamW8bit`). 두 숫자를 int8로 만들면 될까?
#
# 작은 언어 모델을 이 자리에서 학습해(몇 초) 한 층의 상태를 꺼낸다. 파라미터가 12만 개 남짓인 GPT이고, "프랑스의 수도는 파리이다."와 같은 문장 64개를 외운다. 출력은 분산의 최솟값과 최댓값이다.

# %%
momentum, variance = adam_state()
print(f"{variance.min():.0e} ... {variance.max():.0e}")

# %% [markdown] lang="ko"
# 가장 큰 분산은 가장 작은 분산의 천 배가 넘는다. 아래 그림에서 하늘색은 그 분포이고 가로축은 10의 거듭제곱이다. 아래 두 줄은 8비트 코드 256개의 자리다. **선형**(linear)은 간격이 같은 코드, **동적**(dynamic)은 bitsandbytes가 쓰는 코드다. 어느 쪽이 값이 있는 곳을 덮는가?

# %%
dynamic = bnb.functional.create_dynamic_map(signed=False)
draw_state(variance, {"linear": torch.arange(256) / 255, "dynamic": dynamic})

# %% [markdown] lang="ko"
# 로그 눈금에서 보면, 간격이 같은 선형 코드는 큰 값 쪽에 몰려 있다. 동적 코드는 앞자리의 0이 몇 개인지를 먼저 적고 나머지 비트로 값을 적어, 작은 값에도 코드가 돌아간다(부동소수점과 같은 생각이다). 이제 분산을 블록 256마다 두 방법으로 양자화했다가 되돌려(`stored`), AdamW의 갱신 `모멘텀 / (√분산 + ε)`을 계산한다. 마지막 열이 가장 큰 갱신이다. 오차는 비슷한데 갱신은 얼마나 다른가?


# %%
def update(variance):
    return float((momentum / (variance.sqrt() + 1e-8)).abs().max())


rows = []
for kind in ("fp32", "linear", "dynamic"):
    restored, _ = stored(variance, kind, block_size=256)
    error = float((restored - variance).norm() / variance.norm())
    zeros = float((restored == 0).double().mean())
    rows.append({"method": kind, "error": error, "zeros": zeros, "update": update(restored)})
table(rows)

# %% [markdown] lang="ko"
# 상대 오차는 둘 다 1% 안팎이다. 그런데 선형에서는 분산의 0.3%가 0이 되고, 0으로 나누는 것을 막으려고 더해 둔 ε만 남아 가장 큰 갱신이 1.53에서 2,844.80으로 튄다. **나누는 수는 가장 작은 값이 중요하다.** 오차 하나로 방법을 고르면 안 되는 까닭이다.
#
# 8비트 상태가 버티는 까닭은 둘이다. 동적 코드가 작은 값을 지키고, 블록(256개)이 큰 값의 영향을 가둔다. 비용은 b + s / K = 8 + 32 / 256, 두 상태를 합쳐 파라미터당 약 2.03바이트다. bitsandbytes는 원소가 4,096개보다 적은 텐서의 상태를 fp32로 남겨 둔다(`min_8bit_size`). 작은 텐서가 많은 모델에서 "8비트로 바꾸었는데 그대로"라면 이것부터 확인한다.
#
# ### 사건 2-A. 직접 만든 8비트 Adam
#
# 어느 학습 라이브러리가 8비트 AdamW를 직접 구현했다. 블록마다 스케일을 두었지만, 모멘텀도 분산도 선형 8비트로 적었다. 논문의 처방 가운데 동적 코드가 빠졌다는 이슈가 열렸다. 빠져도 괜찮을까?
#
# `run`은 한 층을 실제로 학습하면서 매 스텝 상태를 8비트로 저장했다가 되돌린다. 아래 첫 실험에서는 발산한다. 바꿀 수 있는 것은 `momentum`과 `variance`(각각 `"fp32"`, `"linear"`, `"dynamic"`), `block_size`다. 다섯 번의 실험으로 **상태가 파라미터당 2.1바이트를 넘지 않으면서 배우는** 설정을 찾는다. 위의 표에서는 분산만 바꾸었다. 모멘텀도 동적 코드로 적어야 할까?

# %%
case("2-A").run(momentum="linear", variance="linear", block_size=256)

# %% [markdown] lang="ko"
# 답은 `{"momentum": …, "variance": …, "block_size": …}`처럼 적는다. 힌트는 `case("2-A").hint()`.

# %%
setting = ...
case("2-A").check(setting)

# %% [markdown] lang="ko"
# ## 2.10 LLM.int8: 이상치가 있는 열만 따로
#
# 지금까지는 저장하는 값만 양자화했다. 곱셈까지 int8로 하려면 가중치와 **순전파 상태를 모두** 양자화해야 한다(W8A8). 여기서 2.4절의 이상치가 문제가 된다. LLM.int8은 절댓값이 6 이상인 값이 있는 **열**(채널)을 골라내어 그 열만 16비트로 곱하고, 나머지는 int8로 곱한 뒤 더한다.
#
# 입력 64행 × 128열에서 열 두 개를 20배로 키워 이상치를 만든다. 먼저 이상치가 있는 열을 찾는다.

# %%
inputs = example_tensor("normal", 64 * 128).reshape(64, 128)
inputs[:, [3, 70]] *= 20
layer = example_tensor("normal", 64 * 128, seed=9).reshape(64, 128)
outliers = outlier_columns(inputs, threshold=6.0)
print(outliers.tolist())

# %% [markdown] lang="ko"
# 이제 손으로 곱한다. 나머지 열은 입력의 행(토큰)마다, 가중치의 행(출력 채널)마다 스케일을 하나씩 두고 int8로 만든다. 정수끼리 곱한 다음 두 스케일을 곱하면 원래의 크기로 돌아온다. 골라낸 열에서는 int8 가중치를 되돌려 곱한다. 어느 열이 이상치인지는 입력이 들어와야 알 수 있으므로, 16비트 가중치를 미리 남겨 둘 수 없다. 출력은 이렇게 계산한 행렬곱의 상대 오차다.

# %%
kept = torch.ones(128, dtype=torch.bool)
kept[outliers] = False
a, b = quantize(inputs[:, kept], per_channel=True), quantize(layer, per_channel=True)
product = (a.codes.int() @ b.codes[:, kept].int().T) * a.scales[:, None] * b.scales
product = product + inputs[:, outliers] @ b.dequantize()[:, outliers].T
exact = inputs @ layer.T
print(f"{(product - exact).norm() / exact.norm():.1%}")

# %% [markdown] lang="ko"
# 같은 일을 하는 함수 `int8_linear`로, 열을 나누지 않은 int8과 비교한다. 문턱이 6.0인 줄은 위의 출력과 같아야 한다. 나누지 않으면 오차는 몇 배인가?

# %%
rows = []
for threshold in (None, 6.0):
    error = (int8_linear(inputs, layer, threshold) - exact).norm() / exact.norm()
    rows.append({"threshold": threshold, "error": float(error)})
table(rows)

# %% [markdown] lang="ko"
# 128개 열 가운데 두 개만 16비트로 곱했을 뿐인데 오차가 3분의 1 아래로 줄었다. 가중치는 여전히 int8로만 저장된다. 그 대가로 행렬곱이 둘로 나뉘고 입력마다 이상치를 찾아야 한다.
#
# ## 2.11 모델은 얼마나 나빠질까
#
# 2.9절에서 학습한 언어 모델을 양자화해 본다. `score`는 수도를 적는 글자들의 손실(loss)과, 64개 가운데 맞히는 수도의 수를 돌려준다.

# %%
model = train_small_model()
loss, known = score(model)
print(f"{sum(p.numel() for p in model.parameters()):,} / {loss:.2f} / {known}")
print(model.complete())

# %% [markdown] lang="ko"
# 모두 외웠다. 이제부터의 비교는 **외운 것이 남아 있는가**만 잰다. 처음 보는 글에 얼마나 나빠지는지는 이 모델로 알 수 없다.
#
# `quantize_model`은 임베딩과 출력층을 뺀 모든 선형층의 가중치를 양자화했다가 되돌려 넣은 모델을 만든다(QLoRA도 그렇다). 비트를 줄여 간다. 몇 비트에서 무너질까?


# %%
def compare(model, settings):
    rows = []
    for setting in settings:
        quantized = quantize_model(model, **setting)
        loss, known = score(quantized.model)
        bits, error = quantized.bits_per_parameter, quantized.relative_error
        name = " ".join(str(value) if key in ("method", "bits") else f"{key}={value}" for key, value in setting.items())
        rows.append({"setting": name, "bits_each": bits, "error": error, "loss": loss, "capitals": known})
    return table(rows)


compare(model, [{"method": "absmax", "bits": bits} for bits in (8, 4, 3, 2)])

# %% [markdown] lang="ko"
# 8비트와 4비트에서는 수도를 하나도 틀리지 않는다. 3비트에서 하나를 틀리고 2비트에서는 무너진다. 4비트의 오차 13.6%는 2.1절의 정규 분포(14.42%)와 비슷하다. 가중치에 이상치가 없어서 스케일 하나로도 견딘다.
#
# ### 순전파 상태에 이상치가 있는 모델
#
# 큰 모델처럼 **채널 여섯 개의 순전파 상태**를 키운다. `with_outlier_channels`는 정규화 층의 출력 채널을 키우고, 그 채널과 곱해지는 가중치를 그만큼 줄인다. 상쇄되므로 **똑같은 함수**를 계산한다. 배율을 키워 가며 세 방법의 손실을 그린다. int8은 가중치와 순전파 상태를 모두 int8로, LLM.int8은 이상치 열만 16비트로, NF4는 가중치만 4비트로 한 것이다. 어느 것이 이상치에 가장 약할까?

# %%
rows = []
for factor in (1, 20, 50, 100, 200):
    wild = with_outlier_channels(model, factor, channels=6)
    weights_only = quantize_model(wild, method="nf4", block_size=64).model
    losses = {"int8": score(int8_model(wild))[0], "NF4": score(weights_only)[0]}
    rows.append({"factor": factor, **losses, "LLM.int8": score(int8_model(wild, threshold=6.0))[0]})
draw_outliers(rows)

# %% [markdown] lang="ko"
# - **int8**은 논문이 보고한 20배에서는 잘 버티다가 50배부터 나빠지고 200배에서는 무너진다. 층이 둘뿐인 모델이라 그럴 수 있다. 수십 층짜리 모델에서는 재지 않았다.
# - **LLM.int8**은 200배에서도 손실이 처음의 두 배 남짓에 그친다.
# - **NF4**는 순전파 상태를 양자화하지 않는데도 나빠지고, 20배와 50배에서는 셋 가운데 가장 약하다. 같은 함수를 만들려고 우리가 줄여 놓은 가중치가 블록 안의 다른 값에 눌리고, 그 오차가 큰 입력과 곱해지기 때문이다. 50배부터 선이 눕는 것은 줄인 가중치가 모두 0으로 반올림되어 더 나빠질 것이 없기 때문일 것이다. 이렇게 만든 모델에서 생긴 일이고, 실제 모델에서도 NF4가 int8보다 약하다는 뜻은 아니다. 입력이 큰 채널의 가중치일수록 조심해야 한다는 것, 이것이 **AWQ**(Lin 외, 2023)의 생각이다.
#
# ### 사건 2-B. int8로 바꾸었더니 헛소리를 한다
#
# Llama 계열 모델을 W8A8(가중치도 순전파 상태도 int8)로 바꾸어 서비스하려는데 정상적인 글이 나오지 않는다. 퍼플렉시티(perplexity)는 두 배가 넘게 뛰었다. 여기에 조건을 하나 붙인다. 속도 때문에 16비트로 따로 곱하는 열은 둘 수 없다.
#
# `run`은 이상치가 100배인 작은 모델로 같은 일을 한다. 바꿀 수 있는 것은 `activations`(`"tensor"`, `"token"`: 스케일을 텐서마다, 토큰마다), `weights`(`"tensor"`, `"channel"`), `threshold`(LLM.int8의 문턱), 그리고 `smooth`(0보다 크고 1 이하)다. `smooth`는 **SmoothQuant**(Xiao 외, 2022)로, 순전파 상태의 이상치를 채널마다 나누고 가중치에 곱해 **어려움을 두 쪽이 나누어 맡게** 한다. 수도 64개를 모두 맞히면서 16비트로 곱하는 열이 없는 설정을 찾는다.

# %%
case("2-B").run(activations="tensor", weights="tensor")

# %% [markdown] lang="ko"
# 답은 `{"activations": …, "weights": …, "smooth": …}`처럼 적는다. 힌트는 `case("2-B").hint()`.

# %%
setting = ...
case("2-B").check(setting)

# %% [markdown] lang="ko"
# ### 이상치를 가중치로 옮기면
#
# SmoothQuant를 지나치게 하면 어떻게 될까? 순전파 상태에는 이상치가 하나도 없고 **모두** 가중치에 있는 모델을 만든다. 실제 모델의 가중치는 이렇지 않다. 블록이 하는 일을 보려고 만든 인공 모델이다. 채널 하나를 20배로 옮기고 4비트 절댓값 최대(텐서 전체)로 양자화하면 수도 64개 가운데 몇 개를 맞힐까?

# %%
capitals = guess("2.11", None)
capitals

# %% [markdown] lang="ko"
# 8비트와 4비트를 비교한다.

# %%
wild = with_outlier_channels(model, factor=20, where="weights")
compare(wild, [{"method": "absmax", "bits": 8}, {"method": "absmax", "bits": 4}])

# %% [markdown] lang="ko"
# 예상과 비교하면?

# %%
capitals.against(score(quantize_model(wild, method="absmax", bits=4).model)[1])

# %% [markdown] lang="ko"
# 8비트는 견디지만 4비트는 완전히 무너졌다. 계산하는 함수는 같고 숫자를 담는 방법만 다르다. 무엇이 이 모델을 구할까? `block_size`는 블록 크기, `per_channel`은 채널(행)마다 스케일을 둔 것이다.

# %%
settings = [{"method": "absmax", "bits": 4, "per_channel": True}, {"method": "mxfp4"}, {"method": "nvfp4"}]
for method in ("absmax", "nf4"):
    for size in (256, 64, 16):
        settings.append({"method": method, "bits": 4, "block_size": size})
compare(wild, settings)

# %% [markdown] lang="ko"
# - 같은 4비트인데 블록 크기에 따라 모델이 멀쩡하기도 하고 망가지기도 한다. 블록이 클 때는 거의 모든 블록에 이상치가 들어 있기 때문이다. 이상치가 **열**에 있으므로 행마다 스케일을 두어도 모든 행에 이상치가 하나씩 들어 있다.
# - 같은 비트라면 NF4가 절댓값 최대보다 낫다. 4.5비트짜리 셋 가운데서는 블록이 16인 NVFP4가 가장 잘 견딘다(64개). 절댓값 최대와 NF4는 블록을 16으로 줄여 6비트를 써야 64개를 맞힌다.
#
# ### 가중치의 오차와 모델의 손실은 다르다
#
# > **주장 6.** "비트가 적을수록 모델이 나빠진다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 같은 방법 안에서는 그렇다. 그러나 위의 인공 모델에서 4.25비트의 MXFP4(수도 63개)는 4.50비트의 절댓값 최대(36개)보다 나았고, 4.04비트의 분위수(50개, 아래 표)도 그랬다. 비트의 수보다 코드를 어디에 놓고 무엇을 한 블록으로 묶느냐가 더 중요할 수 있다.
#
# </details>
#
# 텐서 전체를 절댓값 최대로 양자화한 모델과 분위수로 양자화한 모델을 비교한다. 가중치의 오차가 큰 쪽이 손실도 클까?

# %%
compare(wild, [{"method": "absmax", "bits": 4}, {"method": "quantile", "bits": 4}])

# %% [markdown] lang="ko"
# 거꾸로다. 분위수는 가중치의 오차가 두 배인데 손실은 훨씬 낮다. 오차가 **어디에** 있느냐가 다르기 때문이다(2.13절에서 잰다). 양자화 방법은 가중치의 오차가 아니라 **모델의 손실**로 비교해야 한다.
#
# **연습 2-3.** 예산은 파라미터당 4.6비트다. 가중치에 이상치가 있는 이 모델이 수도 64개를 모두 맞히게 하는 설정을 찾아라. 위의 표에 답이 나온 NVFP4는 쓰지 않는다. 쓸 수 있는 것은 `method`, `bits`, `block_size`, `per_channel`, `double`(이중 양자화)이다. 예를 들면 `{"method": "absmax", "bits": 4, "block_size": 64}`처럼 쓴다.

# %%
setting = ...
exercise("2-3").check(setting)

# %% [markdown] lang="ko"
# ## 2.12 기억할 것
#
# | 방법 | 코드의 간격 | 코드 말고 저장하는 것 | 좋은 곳 | 약점 |
# |---|---|---|---|---|
# | 절댓값 최대 | 같다 | 스케일 | 0을 중심으로 퍼진 가중치 | 이상치, 치우친 값 |
# | 영점 | 같다 | 스케일, 영점 | 한쪽으로 치우친 값 | 이상치, 더해지는 계산 |
# | 분위수 | 값의 밀도를 따른다 | 표 | 코드를 고르게 쓰고 싶을 때 | 정렬, 표, 드문 값의 큰 오차 |
# | NF4 | 정규 분포의 밀도를 따른다 | 스케일(표는 모두 같다) | 정규 분포를 닮은 가중치 | 되돌려야 곱할 수 있다 |
# | MXFP4, NVFP4 | 클수록 넓다(실수) | 8비트 스케일 | 하드웨어가 바로 곱한다 | 새 GPU에서만 |
# | 동적 코드 | 0에 가까울수록 촘촘하다 | 스케일(표는 모두 같다) | 옵티마이저 상태 | 큰 값 쪽은 성기다 |
#
# - 균일한 눈금에서 오차는 **반 칸**을 넘지 않는다. 칸의 크기는 가장 큰 값이 정한다.
# - **파라미터당 비트 = b + s / K.** NF4 4.5(이중 양자화하면 4.127), MXFP4 4.25, NVFP4 4.5.
# - 큰 모델의 이상치는 **순전파 상태의 몇몇 채널**에 있다. 블록으로 **가두거나**, 열로 **골라내거나**(LLM.int8), 가중치와 **나누어 맡긴다**(SmoothQuant).
# - 오차 하나로 고르지 않는다. 가중치는 **모델의 손실**로, 옵티마이저 상태는 **갱신**으로 판단한다.
#
# 이 장의 예상은 몇 개나 맞았을까?

# %%
guesses()

# %% [markdown] lang="ko"
# 4비트 가중치로 학습하는 QLoRA는 8장에서 다시 만난다.
#
# 이제 숫자 하나의 크기를 안다. 그렇다면 학습하는 동안 GPU에는 어떤 숫자가 얼마나 들어 있을까? [3장](03_memory_decomposition.ipynb)에서 바이트를 하나하나 센다.

# %% [markdown] lang="ko"
# ## 2.13 더 읽을거리
#
# ### 분위수의 오차는 어디에 있나
#
# 2.11절에서 분위수로 양자화한 모델은 가중치의 오차가 두 배인데 손실은 낮았다. 한 층에서 이상치가 있는 첫째 열과 나머지 열의 오차 벡터 길이를 나누어 재고, 그 열의 입력에 정규화 층이 곱하는 수(정규화의 가중치)가 얼마나 큰지도 출력한다.

# %%
layer, norm = wild.blocks[0].up.weight, wild.blocks[0].norm_2.weight.abs()
for method in ("absmax", "quantile"):
    difference = quantize(layer, method, bits=4).dequantize() - layer
    print(f"{method:9} {difference[:, 0].norm():6.2f} {difference[:, 1:].norm():6.2f}")
print(f"{norm[0]:.3f} {norm[1:].mean():.3f}")

# %% [markdown] lang="ko"
# 분위수의 오차는 첫째 열에 몰려 있고, 그 열의 정규화 가중치는 다른 채널의 20분의 1 정도다. 큰 오차가 작은 값과 곱해져 출력에 덜 나타난다.
#
# ### 이 이름은 이 장의 무엇인가
#
# 모델 저장소에서 만나는 이름들이다. WxAy는 가중치 x비트, 순전파 상태 y비트라는 뜻이다. 표의 이름들은 대개 셋 가운데 하나를 정한 것이다. **코드를 어디에 놓나, 몇 개를 한 블록으로 묶나, 무엇을 보고 반올림하나.** 4비트 가중치 가운데 AWQ와 GGUF Q4_K는 영점(또는 최솟값)을 두고, NF4와 GGUF Q4_0은 두지 않는다. 순전파 상태를 8비트로 만들 때는 토큰마다 대칭으로 하는 일이 많다.
#
# | 이름 | 코드 | 블록 | 파라미터당 비트 | 이 장의 어디 |
# |---|---|---|---|---|
# | LLM.int8 (bitsandbytes `load_in_8bit`) | int8, 대칭 | 채널 | 약 8 | 2.10 |
# | W8A8, SmoothQuant | int8, 대칭 | 토큰과 채널 | 약 8 | 사건 2-B |
# | NF4, QLoRA (`load_in_4bit`) | 정규 분포의 분위수 | 64 | 4.5, 이중 양자화하면 4.127 | 2.7 |
# | GPTQ (W4A16) | 정수, 대칭 또는 영점 | 흔히 128 | 4 + (스케일 + 영점) / 128 | 2.5. 남은 가중치로 오차를 메우며 차례로 반올림한다 |
# | AWQ (W4A16) | 정수, 영점 | 흔히 128 | 4 + (스케일 + 영점) / 128 | 2.11. 입력이 큰 채널을 키워 지킨다 |
# | GGUF Q4_0 | 정수, 대칭 | 32 | 4 + 16 / 32 = 4.5 | 2.5 |
# | GGUF Q4_K | 정수, 최솟값 | 32, 다시 8개씩 묶음 | 4 + (6 + 6) / 32 + (16 + 16) / 256 = 4.5 | 2.3, 2.7(스케일의 스케일) |
# | GGUF Q4_K_M | Q4_K와 Q6_K를 층마다 섞음 | 층마다 다름 | 4.5보다 크다 | |
# | MXFP4 (gpt-oss) | e2m1 | 32 | 4 + 8 / 32 = 4.25 | 2.8 |
# | NVFP4 | e2m1 | 16 | 4 + 8 / 16 = 4.5 | 2.8 |
# | fp8 (W8A8, DeepSeek-V3) | e4m3 | 128 또는 128 × 128 | 약 8 | 1장 |
# | AdamW8bit | 동적 코드 | 256 | 상태마다 8.125 | 2.9 |
#
# GGUF의 숫자는 llama.cpp의 [k-quants](https://github.com/ggml-org/llama.cpp/pull/1684)와 `ggml-common.h`의 구조체에서 센 것이다. 파일의 크기는 임베딩과 출력층을 몇 비트로 두느냐에 따라 더 커진다(1.6절).
