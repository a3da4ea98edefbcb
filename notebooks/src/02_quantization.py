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
# 16비트 가중치를 4비트로 줄이면 모델은 4분의 1이 된다. 그런데 4비트로 쓸 수 있는 **코드**(code)는 16개뿐이다. 수백만 개의 서로 다른 가중치를 값 16개로 바꿔 적고도
# 모델이 멀쩡할 수 있을까? 어떤 방법은 모델을 망가뜨리고 어떤 방법은 살린다. 이 장에서는 여러 방법을 하나씩 만들어 보며 무엇이 그 차이를 만드는지 찾는다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 절댓값 최대, 영점, 분위수, NF4 **양자화**(quantization)를 몇 줄로 구현하고, 저마다 코드를 얼마나 낭비하는지 센다.
# - 스케일과 표까지 모두 넣어 **파라미터당 비트**를 계산한다.
# - 이상치가 왜 문제인지, 블록이 그것을 어떻게 막고 그 대신 무엇을 치르는지 설명한다.
#
# GPU도 네트워크도 필요 없다. 먼저 양자화할 숫자를 만든다. 학습된 가중치는 대개 0을 중심으로 한 종 모양이므로 정규 분포에서 4,096개를 뽑는다. 출력에서 가장 작은 값과 가장 큰 값을 확인한다.

# %%
import torch

from helpers import example_tensor, exercise, quantization_panel, quantize
from helpers.chapters.c2_quantization.code_tables import load_bitsandbytes, nf4_table
from helpers.chapters.c2_quantization.examples import book_numbers
from helpers.chapters.c2_quantization.quantization import double_quantize
from helpers.chapters.c2_quantization.whole_model import int8_linear, outlier_columns, quantize_model
from helpers.small_model import score, train_small_model, with_outlier_channels

x = example_tensor("normal")
print(f"{len(x):,}, {x.min():.2f} ... {x.max():.2f}")

# %% [markdown] lang="ko"
# ## 2.1 자료형의 범위를 그대로 옮기면
#
# int8에는 -128부터 127까지 코드가 256개 있다. 실수를 코드로 옮기는 가장 단순한 방법은 자(ruler)를 하나 정하는 것이다. 코드 1이 뜻하는 크기를 **스케일**(scale)이라 하고,
# 값을 스케일로 나누어 반올림하면 코드가 된다. 코드에 스케일을 다시 곱하면 값이 되돌아온다.
#
# 스케일을 얼마로 할까? 우선 fp32의 범위 전체를 int8의 범위에 맞춰 본다. fp32의 가장 큰 수가 코드 127이 되게 하는 것이다. 쓰인 코드가 몇 종류인지 본다.

# %%
scale = torch.finfo(torch.float32).max / 127
codes = (x / scale).round()
print(f"scale = {scale:.2e}, codes in use: {codes.unique().int().tolist()}")

# %% [markdown] lang="ko"
# 모든 값이 코드 0이 되었다. fp32의 범위(±3.4 × 10³⁸)에 비하면 가중치는 모두 0이나 마찬가지다. 아래 그림에서 위쪽 선은 자료형의 범위, 아래쪽 띠는 코드다. 주황색은 어떤 값도 닿지 못하는 코드다.
# 범위가 훨씬 좁은 8비트 실수(float8_e4m3fn, ±448)에서 출발해도 양 끝의 코드는 거의 다 낭비된다.
#
# ![fp32의 범위를 int8의 범위로 옮기면 코드 256개 가운데 255개, float8의 범위를 옮기면 246개에 어떤 값도 닿지 못한다.](../../image/02_type_range.svg)
#
# `quantize`는 이 장에 나오는 방법들을 모아 둔 함수다. 결과를 출력하면 한 줄로 요약해 준다. 책([출처](../../docs/sources.md))의 예처럼 -17부터 15까지 퍼진 값을 float8의 범위로 옮겨, 낭비된 코드의 수를 그림과 비교한다.

# %%
quantize(book_numbers(), "type_range", source=torch.float8_e4m3fn).wasted_codes, repr(quantize(x, "type_range"))

# %% [markdown] lang="ko"
# 그림은 양 끝의 닿지 못하는 코드만 세어 246개라고 했고, `wasted_codes`는 그 사이에서 아무도 쓰지 않은 코드까지 세어 248개다. 앞으로 **낭비된 코드**라고 하면 뒤쪽을 뜻한다.
#
# > **주장 1.** "자료형의 범위끼리 맞추면 코드가 낭비된다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 낭비 정도가 아니라, fp32에서 출발하면 코드 하나만 남아 정보가 모두 사라진다.
#
# </details>
#
# ## 2.2 절댓값 최대
#
# 자료형이 아니라 **데이터**의 범위에 맞추면 된다. 값들의 절댓값 가운데 가장 큰 것을 코드 127로 보내는 방법이 **절댓값 최대 양자화**(absmax)다. 함수로 적으면 네 줄이다.


# %%
def absmax(x, bits=8):
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().max() / largest
    codes = (x / scale).round()
    return codes, scale


# %% [markdown] lang="ko"
# 책의 예를 넣어 본다. 값이 -17부터 15까지이므로 절댓값 최대는 17이다. 코드의 최솟값과 최댓값을 확인한다.

# %%
codes, scale = absmax(book_numbers())
print(f"scale = 17/127 = {scale:.4f}, codes {codes.min():.0f} ... {codes.max():.0f}")

# %% [markdown] lang="ko"
# -17은 -127이 되고 15는 112가 되었다. 0은 0 그대로다. 0을 중심으로 양쪽이 똑같은 자를 쓰므로 **대칭**(symmetric) 양자화라고 한다.
#
# ![-17부터 15까지의 값을 절댓값 최대로 옮기면 코드 256개 가운데 16개에만 닿지 못한다. 아래 1개, 위 15개다.](../../image/02_absmax.svg)
#
# 되돌린 값은 얼마나 다를까? 반올림이므로 오차는 **반 칸**, 곧 스케일의 절반을 넘을 수 없다. 처음의 정규 분포 값 4,096개로 가장 큰 오차를 반 칸으로 나누어 1과 비교한다.

# %%
codes, scale = absmax(x)
error = (codes * scale - x).abs().max()
print(f"{error / (scale / 2):.2f}")

# %% [markdown] lang="ko"
# 오차가 반 칸을 넘지 않았다. 이제 같은 일을 하는 `quantize`의 결과를 그림으로 본다. 위는 값의 히스토그램, 가운데 눈금은 코드가 뜻하는 값, 아래는 코드마다 그것을 쓰는 값의 수다. 주황색이 어디에 몰려 있는지 본다.

# %%
quantize(x, "absmax", bits=8)

# %% [markdown] lang="ko"
# **상대 오차**는 오차 벡터의 길이를 원래 벡터의 길이로 나눈 것이다. 1%도 되지 않는다. 그러나 코드 256개 가운데 44개는 쓰이지 않았다. 종 모양의 꼬리에는 값이 드물기 때문이다. 값을 백만 개로 늘려도 낭비되는지, 값이 고르게 퍼져 있으면 어떤지 센다.

# %%
quantize(example_tensor("normal", 1_000_000)).wasted_codes, quantize(torch.linspace(-1, 1, 100_000)).wasted_codes

# %% [markdown] lang="ko"
# > **주장 2.** "절댓값 최대로 하면 낭비되는 코드가 없다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 닿을 수 있는 범위는 넓어졌지만, 정규 분포 값 백만 개로도 꼬리의 코드 25개를 아무도 쓰지 않는다. -128은 대칭이라서 늘 버려진다.
# 값이 고르게 퍼져 있을 때만 그 하나를 뺀 모두가 쓰인다.
#
# </details>
#
# ## 2.3 한쪽으로 치우친 값: 영점
#
# ReLU를 지난 값은 음수가 없다. 대칭 양자화는 음수 쪽 코드를 통째로 버린다. **영점 양자화**(zero point)는 가장 작은 값과 가장 큰 값을 양 끝 코드에 맞추고, 0이 몇 번 코드인지(영점)를 따로 기억한다.
# 0을 정확히 나타내려고 영점은 정수로 반올림한다.


# %%
def zero_point(x, bits=8):
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    zero = (-low / scale).round()
    return (x / scale).round() + zero, scale, zero


# %% [markdown] lang="ko"
# 책의 값(-17 … 15)에서 코드의 끝과 영점을 본다. 이번에는 코드를 0부터 255까지로 센다.

# %%
codes, scale, zero = zero_point(book_numbers())
print(f"codes {codes.min():.0f} ... {codes.max():.0f}, zero point {zero:.0f}")

# %% [markdown] lang="ko"
# 양 끝의 코드가 모두 쓰였고, 값 0은 영점이 가리키는 코드가 된다. 되돌릴 때는 코드에서 영점을 뺀 다음 스케일을 곱한다.
#
# 두 방법을 양쪽으로 퍼진 값과 한쪽으로 치우친 값에 적용한다. 차이가 잘 보이도록 4비트를 쓴다. 낭비된 코드와 상대 오차를 비교한다.

# %%
for distribution in ("normal", "one_sided"):
    for method in ("absmax", "zero_point"):
        q = quantize(example_tensor(distribution), method, bits=4)
        print(f"{distribution:10} {method:11} {q.wasted_codes:2}/16 {q.relative_error:6.1%}")

# %% [markdown] lang="ko"
# 한쪽으로 치우친 값에서는 코드 절반을 되찾아 오차가 절반 이하가 된다. 양쪽으로 퍼진 값에서는 이득이 작다. 그 대신 영점을 기억해야 하고, 행렬곱에서 영점을 빼는 계산이 더해진다.
# 그래서 **가중치에는 대칭, 활성화 함수를 지난 값에는 영점**을 쓰는 일이 많다.
#
# ## 2.4 이상치 하나
#
# 절댓값 최대에는 약점이 있다. 자의 길이를 **가장 큰 값 하나**가 정한다. 4,096개 가운데 하나만 100으로 바꾸고 8비트로 양자화한다. 눈금과 주황색을 본다.

# %%
y = x.clone()
y[0] = 100
spoiled = quantize(y)
spoiled

# %% [markdown] lang="ko"
# 코드 256개 가운데 11개만 쓰였다. 이렇게 나머지와 동떨어지게 큰 값을 **이상치**(outlier)라고 한다. 이상치를 뺀 나머지 4,095개의 상대 오차가 몇 배가 되었는지 계산한다.


# %%
def error_of_the_others(q):
    difference = (q.dequantize() - q.original)[1:]
    return float(difference.norm() / q.original[1:].norm())


before, after = error_of_the_others(quantize(x)), error_of_the_others(spoiled)
print(f"{before:.2%} -> {after:.1%}, x{after / before:.0f}")

# %% [markdown] lang="ko"
# > **주장 3.** "이상치 하나가 모두를 망친다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 값 하나 때문에 나머지 모두의 오차가 0.80%에서 22.7%로, 28배가 되었다.
#
# </details>
#
# 큰 언어 모델에는 이런 값이 실제로 있다. LLM.int8 논문(Dettmers 외, 2022)은 67억 파라미터부터 모든 층의 몇몇 채널에서 순전파 상태(층이 계산해 낸 중간값)가 다른 채널의 20배까지 커진다고 보고했다.
#
# ## 2.5 블록
#
# 피해를 가두려면 자를 여러 개 쓰면 된다. 값을 K개씩 **블록**(block)으로 나누고 블록마다 스케일을 따로 둔다. 아래는 값 9개를 4비트로, 한 번은 통째로, 한 번은 3개씩 나누어 양자화한 것이다.
# 주황색은 0이 아닌데 0이 되어 버린 값이다.
#
# ![값 9개에 이상치 9가 하나 있다. 스케일이 하나면 네 값이 0이 되고, 블록 3으로 나누면 이상치와 같은 블록의 -0.2만 0이 된다.](../../image/02_outlier_and_blocks.svg)
#
# 이상치와 한 블록에 든 값만 피해를 본다. 파이썬으로는 텐서의 모양을 (블록 수, K)로 바꾸고 줄마다 절댓값 최대를 구하면 끝이다.


# %%
def blockwise_absmax(x, block_size, bits=8):
    rows = x.reshape(-1, block_size)
    scales = rows.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (rows / scales).round().reshape(x.shape), scales


# %% [markdown] lang="ko"
# `quantize`에서는 블록의 크기를 `block_size`로 준다. 두 함수가 내놓은 코드가 모두 같은지 확인한다.

# %%
codes, scales = blockwise_absmax(y, 64)
bool((codes == quantize(y, block_size=64).codes).all()), tuple(scales.shape)

# %% [markdown] lang="ko"
# 공짜는 아니다. 스케일 하나는 fp32이므로 32비트이고, 블록의 값 K개가 이를 나누어 부담한다. 코드가 b비트라면 **파라미터당 비트 = b + 32 / K**다. 이상치가 있는 y를 K를 줄여 가며 8비트로 양자화한다.
# 열은 K, 낭비된 코드, 이상치를 뺀 값들의 상대 오차, 스케일이 차지하는 바이트, 파라미터당 비트다.

# %%
for size in (4096, 1024, 256, 64, 16, 4):
    q = quantize(y, bits=8, block_size=size)
    print(f"{size:5} {q.wasted_codes:4} {error_of_the_others(q):6.1%} {q.groups * 4:6,} B {q.bits_per_parameter:6.2f}")

# %% [markdown] lang="ko"
# 블록이 작을수록 오차와 낭비가 줄고 비트는 늘어난다. K = 4에서는 파라미터당 16비트이므로 양자화하지 않은 fp16과 같다. 흔히 쓰는 K = 64는 0.5비트를 더 쓰고 오차를 8분의 1로 줄인다.
# (여기서 낭비된 코드는 모든 블록을 통틀어 한 번도 쓰이지 않은 코드다.)
#
# > **주장 4.** "블록은 이상치의 피해를 가둔다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 다만 공짜가 아니다. 이상치와 같은 블록의 값은 여전히 망가지고, 스케일이 32 / K비트를 더한다.
#
# </details>
#
# ### 텐서, 채널, 블록
#
# 가중치 행렬에서는 행(출력 채널) 하나를 블록으로 삼기도 한다. 행마다 크기가 다른 행렬을 만들어 **텐서 전체, 채널마다, 블록마다** 스케일을 하나씩 두고 4비트로 양자화한다. 그 행렬을 전치한 것도 양자화한다. 열은 설정, 상대 오차, 전치했을 때의 상대 오차, 파라미터당 비트다.

# %%
w = example_tensor("normal").reshape(64, 64) * torch.logspace(-1, 1, 64)[:, None]
for setting in ({}, {"per_channel": True}, {"block_size": 32}):
    q, transposed = quantize(w, bits=4, **setting), quantize(w.T, bits=4, **setting)
    print(f"{setting!s:24} {q.relative_error:6.1%} {transposed.relative_error:6.1%} {q.bits_per_parameter:6.2f}")

# %% [markdown] lang="ko"
# 크기가 비슷한 값끼리 묶인 쪽이 더 정확하다. 전치하면 한 행에 큰 값과 작은 값이 섞여 이득이 줄어든다. 자를 몇 개 쓰느냐뿐 아니라 **무엇을 한 자로 재느냐**가 중요하다.
#
# ## 2.6 분위수: 코드를 고르게 나누어 주기
#
# 지금까지는 눈금의 간격이 같았다. 값이 몰린 곳에 눈금을 더 촘촘히 놓을 수도 있다. 값을 크기 순서로 세워 똑같은 수로 나누고, 무리마다 코드를 하나씩 준다. 이것이 **분위수 양자화**(quantile)다.
# 코드가 뜻하는 값은 무리의 평균으로 한다.


# %%
def quantile(x, bits=4):
    shares = x.sort().values.chunk(2**bits)
    table = torch.stack([share.mean() for share in shares])
    edges = torch.stack([share[0] for share in shares[1:]])
    return torch.bucketize(x, edges, right=True), table


# %% [markdown] lang="ko"
# 코드마다 몇 개의 값이 쓰는지 센다. 그리고 절댓값 최대와 비교한 그림을 본다.

# %%
codes, table = quantile(x)
print(torch.bincount(codes).tolist())

# %% [markdown] lang="ko"
# 4,096개를 16으로 나눈 256개씩 정확히 나뉘었다. 그림에서 막대의 자리는 코드가 뜻하는 값, 높이는 그 코드를 쓰는 값의 수다.
#
# ![같은 값을 4비트로 양자화했다. 절댓값 최대는 코드의 간격이 같고 쓰는 값의 수가 다르며 코드 2개를 낭비한다. 분위수는 쓰는 값의 수가 256개씩 같고 간격이 다르다.](../../image/02_quantiles.svg)
#
# 낭비가 없으니 더 정확할까? 세 가지 분포에서 절댓값 최대와 비교한다. 열은 분포, 방법, 낭비된 코드, 상대 오차, 가장 큰 오차다.

# %%
for distribution in ("normal", "outliers", "one_sided"):
    for method in ("absmax", "quantile"):
        q = quantize(example_tensor(distribution), method, bits=4)
        print(f"{distribution:10} {method:9} {q.wasted_codes:2}/16 {q.relative_error:6.1%} {q.largest_error:7.2f}")

# %% [markdown] lang="ko"
# 세 가지를 알 수 있다.
#
# - 정규 분포에서는 낭비가 없는데도 오차가 절댓값 최대와 비슷하다. **코드를 고르게 쓰는 것과 오차를 줄이는 것은 다른 목표다.** 분위수는 드문 값에 코드를 적게 주므로 가장 큰 오차가 훨씬 크다.
# - 이상치가 있으면 나머지를 지켜 내므로 전체 오차가 절반 이하가 된다. 그 대신 이상치 자신을 크게 틀린다.
# - ReLU를 지난 값은 절반이 0이다. 똑같은 값은 나눌 수 없으므로 코드 절반이 다시 낭비된다.
#
# 대가도 있다. 눈금의 간격이 저마다 다르므로 코드마다 뜻하는 값을 **표**로 기억해야 하고, 표를 만들려면 모든 값을 정렬해야 한다. 블록마다 표를 두면 어떻게 되는지 파라미터당 비트를 본다. 8비트의 표는 값이 256개다.

# %%
for bits, size in ((4, 4096), (4, 64), (8, 4096), (8, 64)):
    print(bits, size, quantize(x, "quantile", bits=bits, block_size=size).bits_per_parameter)

# %% [markdown] lang="ko"
# 블록 64에 8비트 표를 두면 파라미터당 136비트로, 양자화하기 전(fp32)의 네 배가 넘는다.
#
# > **주장 5.** "분위수로 하면 낭비되는 코드가 없지만 계산과 메모리가 더 든다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 같은 값이 많지 않아야 낭비가 없다. 계산과 메모리가 더 드는 것은 맞다. 그리고 낭비가 없다고 오차가 가장 작은 것은 아니다.
#
# </details>
#
# ## 2.7 NF4: 표를 미리 정해 두기
#
# 가중치가 정규 분포를 따른다면 정렬할 필요가 없다. 정규 분포의 분위수를 미리 계산해 모두가 **같은 표**를 쓰면 된다. 이것이 QLoRA(Dettmers 외, 2023)의 **NF4**(4-bit NormalFloat)다.
# 논문의 부록에 있는 정의대로 표를 만든다. 0 위로 8개, 아래로 7개의 분위수를 같은 확률 간격으로 잡고, 0을 더한 다음, 가장 큰 값으로 나누어 -1부터 1까지로 맞춘다. 가장 바깥쪽 확률이 bitsandbytes의 소스에 적힌 0.9677083과 같은지 확인한다.

# %%
offset = 1 - (1 / 32 + 1 / 30) / 2
above = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
below = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
table = torch.cat([above, below, torch.zeros(1)]).sort().values / above.max()
print(f"{offset:.7f}", [round(value, 4) for value in table.tolist()])

# %% [markdown] lang="ko"
# QLoRA를 실제로 구현한 라이브러리 `bitsandbytes`의 표와 비교한다. 값 16개의 차이 가운데 가장 큰 것이 백만분의 1보다 작은지 본다.

# %%
bnb = load_bitsandbytes()
theirs = bnb.functional.get_4bit_type("nf4", device="cpu")
float((table - theirs).abs().max()) < 1e-6, float((torch.tensor(nf4_table()) - theirs).abs().max()) < 1e-6

# %% [markdown] lang="ko"
# 같은 표다. 양자화할 때는 블록을 절댓값 최대로 나누어 -1부터 1까지로 맞춘 다음 표에서 가장 가까운 값을 찾는다. 값 65,536개를 `quantize`와 bitsandbytes로 각각 양자화한다.
# bitsandbytes는 4비트 코드 두 개를 1바이트에 담으므로, 앞의 4비트와 뒤의 4비트를 풀어서 비교한다. 다른 코드가 몇 개인지 센다.

# %%
weight = example_tensor("normal", 65536).reshape(256, 256)
nf4 = quantize(weight, "nf4", block_size=64)
packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).reshape(weight.shape)
print(f"{int((codes != nf4.codes).sum())} of {codes.numel():,} codes differ, {packed.numel():,} bytes")

# %% [markdown] lang="ko"
# 하나도 다르지 않다. 되돌린 값도 같은지, 같은 비트를 쓰는 절댓값 최대보다 얼마나 나은지 본다.

# %%
restored = bnb.functional.dequantize_4bit(packed, state)
print(torch.allclose(restored, nf4.dequantize(), atol=1e-6))
for q in (quantize(weight, "absmax", bits=4, block_size=64), nf4):
    print(f"{q.method:6} {q.relative_error:.1%} {q.bits_per_parameter}")

# %% [markdown] lang="ko"
# 같은 4.5비트로 오차가 더 작다. 그림에서 눈금이 가운데로 몰린 모습과 아래쪽의 코드가 절댓값 최대 때보다 고르게 쓰이는 모습을 본다.

# %%
nf4

# %% [markdown] lang="ko"
# ### 이중 양자화: 스케일을 다시 양자화하기
#
# 4.5비트에서 0.5비트는 스케일의 몫이다. QLoRA는 스케일까지 양자화한다. 스케일들의 평균을 빼고, 256개씩 블록으로 묶어 8비트로 만든다. 이것이 **이중 양자화**(double quantization)다.
# 스케일 하나의 비트를 64로 나누면 파라미터 하나의 몫이 된다. 0.5가 얼마로 주는지 본다.

# %%
small = quantize(nf4.scales - nf4.scales.mean(), "absmax", bits=8, block_size=256)
print(32 / 64, small.bits_per_parameter / 64, 8 / 64 + 32 / (64 * 256))

# %% [markdown] lang="ko"
# QLoRA 논문의 **0.127비트**다(8/64 + 32/(64 × 256)). `double_quantize`는 이것을 한 번에 한다. 오차가 얼마나 나빠졌는지 본다. 비트가 아주 조금 더 많은 것은 텐서마다 하나 두는 평균(32비트) 때문이다.

# %%
double = double_quantize(nf4)
print(f"{nf4.relative_error:.2%} -> {double.relative_error:.2%}")
print(f"{nf4.bits_per_parameter:.4f} -> {double.bits_per_parameter:.4f}")

# %% [markdown] lang="ko"
# 파라미터당 0.37비트를 아끼고 오차는 0.01%포인트 늘었다. 700억 파라미터 모델이라면 얼마를 아끼는지 계산한다.

# %%
print(f"{70e9 * (32 / 64 - small.bits_per_parameter / 64) / 8 / 1e9:.1f} GB")

# %% [markdown] lang="ko"
# ## 2.8 LLM.int8: 이상치가 있는 열만 따로
#
# 블록 말고도 이상치를 다루는 방법이 있다. 큰 모델의 순전파 상태에서는 이상치가 **몇 개의 열**(채널)에 모여 있다. LLM.int8(Dettmers 외, 2022)은 절댓값이 6 이상인 값이 있는 열을 골라내어 그 열만 16비트로 곱하고, 나머지는 int8로 곱한 뒤 더한다.
#
# 입력 64행 × 128열에서 열 두 개를 20배로 키워 이상치를 만든다. 먼저 이상치가 있는 열을 찾는다.

# %%
inputs = example_tensor("normal", 64 * 128).reshape(64, 128)
inputs[:, [3, 70]] *= 20
layer = example_tensor("normal", 64 * 128, seed=9).reshape(64, 128)
outliers = outlier_columns(inputs, threshold=6.0)
print(outliers.tolist())

# %% [markdown] lang="ko"
# 나머지 열은 입력의 행마다, 가중치의 행마다 스케일을 하나씩 두고 int8로 만든다. 정수끼리 곱한 다음 두 스케일을 곱하면 원래의 크기로 돌아온다. 골라낸 열은 원래대로 곱해 더한다.

# %%
kept = torch.ones(128, dtype=torch.bool)
kept[outliers] = False
a, b = quantize(inputs[:, kept], per_channel=True), quantize(layer[:, kept], per_channel=True)
product = (a.codes.int() @ b.codes.int().T) * a.scales[:, None] * b.scales
product = product + inputs[:, outliers] @ layer[:, outliers].T

# %% [markdown] lang="ko"
# 열을 나누지 않은 int8과 비교한다. `int8_linear`가 같은 일을 하는 함수다. 열을 나눈 값은 위에서 손으로 계산한 것과 같아야 한다. 출력의 상대 오차를 본다.

# %%
exact = inputs @ layer.T
print("same:", torch.allclose(int8_linear(inputs, layer, threshold=6.0), product, rtol=1e-4, atol=1e-4))
for threshold in (None, 6.0):
    error = (int8_linear(inputs, layer, threshold) - exact).norm() / exact.norm()
    print(f"threshold {threshold}: {error:.1%}")

# %% [markdown] lang="ko"
# 128개 열 가운데 두 개만 16비트로 두었을 뿐인데 오차가 8분의 1로 줄었다. 그 대가로 행렬곱이 둘로 나뉘어 느려질 수 있고, 그 두 열의 가중치는 16비트로도 가지고 있어야 한다.
#
# ## 2.9 모델은 얼마나 나빠질까
#
# 히스토그램의 오차는 모델의 오차가 아니다. 작은 언어 모델을 이 자리에서 학습해 양자화해 본다. 파라미터가 12만 개 남짓인 GPT이고, "프랑스의 수도는 파리이다."와 같은 문장 64개를 외운다. 몇 초 걸린다.
# `score`는 수도를 적는 글자들의 손실(loss)과, 64개 가운데 맞히는 수도의 수를 돌려준다. 파라미터 수와 점수, 모델이 이어 쓴 문장을 본다.

# %%
model = train_small_model()
loss, known = score(model)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, loss {loss:.2f}, {known}/64")
print(model.complete())

# %% [markdown] lang="ko"
# 모두 외웠다. `quantize_model`은 임베딩과 출력층을 뺀 모든 선형층의 가중치를 양자화했다가 되돌려 넣은 모델을 만든다(QLoRA도 이 두 곳은 양자화하지 않는다). 열은 설정(방법, 비트), 파라미터당 비트, 가중치의 상대 오차, 손실, 맞힌 수도의 수다.


# %%
def compare(model, settings):
    for setting in settings:
        quantized = quantize_model(model, **setting)
        loss, known = score(quantized.model)
        numbers = f"{quantized.bits_per_parameter:5.2f} {quantized.relative_error:6.1%} {loss:5.2f} {known:3}"
        print(f"{', '.join(map(str, setting.values())):16} {numbers}")


compare(model, [{"method": "absmax", "bits": bits} for bits in (8, 4, 3, 2)])

# %% [markdown] lang="ko"
# 8비트와 4비트는 아무것도 잃지 않는다. 3비트에서 하나를 틀리고 2비트에서는 무너진다. 이 모델의 가중치에는 이상치가 없어서 텐서 전체에 스케일 하나만 두어도 4비트까지 견딘다.
#
# ### 이상치가 있는 모델
#
# 큰 모델의 사정은 다르다. 큰 모델에서 이상치는 가중치가 아니라 **순전파 상태**에 있다(2.8절). 여기서는 보기 쉽게 그것을 가중치로 옮겨 놓은 인공 모델을 만든다. `with_outlier_channels`는 **똑같은 함수를 계산하면서** 이상치가 있는 모델을 만든다. 정규화 층의 출력 채널 하나를 20분의 1로 줄이고, 그 채널을 읽는 가중치의 열을 20배로 키운다.
# 곱하면 상쇄되므로 손실이 같아야 한다. 그런데 4비트로 양자화하면 어떻게 되는지 본다.

# %%
wild = with_outlier_channels(model, where="weights")
print(f"loss {score(wild)[0]:.2f}")
compare(wild, [{"method": "absmax", "bits": 8}, {"method": "absmax", "bits": 4}])

# %% [markdown] lang="ko"
# 8비트는 여전히 견디지만 4비트는 완전히 무너졌다. 계산하는 함수는 같고 숫자를 담는 방법만 다르다. 무엇이 이 모델을 구하는지 찾는다. 블록의 크기, 채널, 그리고 NF4를 비교한다. 설정의 셋째 자리는 블록 크기이고, `True`는 채널(행)마다 스케일을 둔 것이다.

# %%
blocks = [{"method": "absmax", "bits": 4, "block_size": size} for size in (256, 64, 16)]
nf4_blocks = [{"method": "nf4", "bits": 4, "block_size": size} for size in (256, 64, 16)]
compare(wild, [*blocks, {"method": "absmax", "bits": 4, "per_channel": True}, *nf4_blocks])

# %% [markdown] lang="ko"
# - 같은 4비트인데 블록 크기에 따라 모델이 멀쩡하기도 하고 망가지기도 한다. 블록이 클 때는 거의 모든 블록에 이상치가 들어 있기 때문이다. 이상치가 **열**에 있으므로 행마다 스케일을 두어도 모든 행이 이상치를 하나씩 가진다.
# - 같은 비트라면 NF4가 절댓값 최대보다 낫다. 이상치에 눌려 작아진 값들이 있는 가운데에 눈금이 더 촘촘하기 때문이다.
#
# ### 가중치의 오차와 모델의 손실은 다르다
#
# 하나만 더 본다. 텐서 전체를 절댓값 최대로 양자화한 모델과 분위수로 양자화한 모델에서 가중치의 오차와 손실을 비교한다.

# %%
compare(wild, [{"method": "absmax", "bits": 4}, {"method": "quantile", "bits": 4}])

# %% [markdown] lang="ko"
# 분위수는 가중치의 오차가 두 배인데 손실은 훨씬 낮다. 오차가 큰 곳이 이상치 열이고, 그 열과 곱해지는 채널의 값은 20분의 1로 작아서 출력에 덜 중요하기 때문이다. 양자화 방법은 **가중치의 오차가 아니라 모델의 손실로** 비교해야 한다.
#
# > **주장 6.** "비트가 적을수록 모델이 나빠진다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 같은 방법 안에서는 그렇다. 그러나 이상치가 있는 모델에서 4.04비트의 분위수(수도 50개)는 4.50비트의 절댓값 최대(36개)보다 나았다.
# 비트의 수보다 코드를 어디에 놓고 무엇을 한 블록으로 묶느냐가 더 중요할 수 있다.
#
# </details>
#
# ## 2.10 직접 바꿔 보기
#
# 분포와 방법, 비트, 스케일을 함께 쓰는 묶음을 바꾸면 그림이 따라 바뀐다. '실제 층의 가중치'는 방금 이상치를 넣은 모델의 층이다. 아래 그림은 이상치가 있는 값을 블록 64로 나누어 4비트로 양자화한 모습이다.
#
# ![이상치가 있는 값 4,096개의 히스토그램과 4비트 절댓값 최대 코드. 블록 64마다 눈금의 간격이 다르다.](../../image/02_blocks_of_64.svg)
#
# 이렇게 해 본다.
#
# - 분포를 '이상치 네 개'로, 비트를 4로 바꾼다. 그런 다음 블록을 켜고 블록 크기를 줄이면서 상대 오차와 비트를 함께 본다.
# - 같은 분포에서 분위수를 골라, 주황색이 사라지는데도 상대 오차가 블록만큼 작지 않은 까닭을 찾는다.
# - '한쪽뿐인 분포'에서 절댓값 최대와 영점을 비교한다.
# - 블록 크기에 0이나 5000을, 비트에 1이나 9를 넣어 본다.

# %%
quantization_panel(wild.blocks[0].up.weight)

# %% [markdown] lang="ko"
# ## 2.11 연습 문제
#
# 답을 채우고 실행하면 맞았는지, 틀렸다면 얼마나 틀렸는지 알려 준다. 막히면 `exercise("2-1").hint()`, 그래도 막히면 `exercise("2-1").solution()`을 실행한다.
#
# **2-1.** 2.2절을 보지 않고 절댓값 최대 양자화를 구현하라. 값 `x`와 비트 수를 받아 코드와 스케일을 돌려준다.


# %%
def absmax_quantize(x, bits):
    return ...


exercise("2-1").check(absmax_quantize)

# %% [markdown] lang="ko"
# **2-2.** 코드의 비트, 블록 크기, 이중 양자화 여부를 받아 파라미터당 비트를 돌려주는 함수를 완성하라. 스케일은 fp32이고, 이중 양자화의 블록은 256이다. (평균을 적어 두는 32비트는 무시한다.)


# %%
def bits_per_parameter(bits, block_size, double):
    return ...


exercise("2-2").check(bits_per_parameter)

# %% [markdown] lang="ko"
# **2-3.** 예산은 파라미터당 5비트다. 이상치가 있는 모델이 수도를 62개 이상 맞히게 하는 설정을 찾아라. 예를 들면 `{"method": "absmax", "bits": 4, "block_size": 64}`처럼 쓴다.

# %%
setting = ...
exercise("2-3").check(setting)

# %% [markdown] lang="ko"
# ## 2.12 기억할 것
#
# | 방법 | 코드의 간격 | 코드 말고 저장하는 것 | 좋은 곳 | 약점 |
# |---|---|---|---|---|
# | 자료형의 범위 | 같다 | 없음 | 없음 | 거의 모든 코드가 낭비된다 |
# | 절댓값 최대 | 같다 | 스케일 | 0을 중심으로 퍼진 가중치 | 이상치, 치우친 값 |
# | 영점 | 같다 | 스케일, 영점 | 한쪽으로 치우친 값 | 이상치, 더해지는 계산 |
# | 분위수 | 값의 밀도를 따른다 | 표 | 코드를 고르게 쓰고 싶을 때 | 정렬, 표, 드문 값의 큰 오차 |
# | NF4 | 정규 분포의 밀도를 따른다 | 스케일(표는 모두 같다) | 정규 분포를 닮은 가중치 | 4비트로 정해져 있다 |
#
# - 균일한 눈금에서 오차는 **반 칸**을 넘지 않는다. 칸의 크기는 가장 큰 값이 정한다.
# - **파라미터당 비트 = b + 32 / K.** 블록 64라면 0.5비트, 이중 양자화를 하면 0.127비트가 더해진다.
# - 이상치를 다루는 길은 둘이다. 블록으로 **가두거나**(NF4), 열로 **골라낸다**(LLM.int8).
# - 가중치의 오차가 아니라 **모델의 손실**로 판단한다.
#
# 4비트 가중치로 학습하는 QLoRA는 8장에서 다시 만난다.
#
# 이제 숫자 하나의 크기를 안다. 그렇다면 학습하는 동안 GPU에는 어떤 숫자가 얼마나 들어 있을까? [3장](03_memory_decomposition.ipynb)에서 바이트를 하나하나 센다.
