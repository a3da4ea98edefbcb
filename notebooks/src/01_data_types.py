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
# # 1장. 숫자는 몇 바이트일까
#
# 모델은 숫자의 모음이다. 그러니 모델의 크기는 숫자의 개수와 숫자 하나의 크기로 정해진다. 숫자 하나를 32비트에서 16비트로, 다시 8비트로 줄이면 메모리는 절반씩 줄어든다. 그 대신 무엇을 잃을까?
# 이 장에서는 숫자를 비트로 뜯어보고, 잃는 것이 언제 문제가 되는지 하나씩 실행해 본다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - fp32, fp16, bf16, fp8의 비트를 부호, 지수, 가수로 나누고, 거기서 **범위**와 **촘촘함**(정밀도, precision)을 계산한다.
# - 넘침(overflow, 오버플로), 밑넘침(underflow, 언더플로), 흡수(swamping)라는 세 가지 사고를 알아보고 처방을 고른다.
# - 파라미터(parameter) 수만 보고 모델이 어느 GPU에 들어가는지 어림한다.
#
# GPU도 네트워크도 필요 없다. 먼저 필요한 이름을 불러온다. 출력은 이 장에서 다룰 형식의 목록이다.

# %%
import torch

from helpers import case, exercise, guess, guesses, number_panel
from helpers.chapters.c1_numbers.formats import FORMATS, stochastic_round_to_bf16
from helpers.chapters.c1_numbers.pictures import draw_layouts, draw_number, draw_spacing
from helpers.chapters.c1_numbers.tables import FormatTable, ModelSizes

list(FORMATS)

# %% [markdown] lang="ko"
# ## 1.1 비트를 뜯어보기
#
# 하나 맞혀 보자. fp16에 정수 2049를 저장했다가 다시 읽으면 무엇이 나올까? `None` 대신 `"2048"`, `"2049"`, `"2050"` 가운데 하나를 적고 실행한다. 틀려도 잃는 것은 없다.

# %%
stored = guess("1.1", None, ("2048", "2049", "2050"))
stored

# %% [markdown] lang="ko"
# 2049를 형식마다 담아 본다. 줄마다 칸 하나가 비트 하나이고, 오른쪽이 실제로 저장된 값이다. 그림을 본 다음 2049를 아무 수로나 바꾸어 다시 실행한다. 0.1은 어느 형식에 정확히 담길까?

# %%
print(stored.against(f"{FORMATS['fp16'].round(2049):.0f}"))
draw_number(2049)

# %% [markdown] lang="ko"
# fp16에는 2049라는 수가 없다. 왜 없는지는 비트에 적혀 있다.
#
# 컴퓨터는 **부동소수점**(floating point) 수를 세 토막으로 저장한다. **부호**(sign) 1비트, 크기의 자릿수를 나타내는 **지수**(exponent), 나머지 자세한 값을 담는 **가수**(mantissa)다.
# 값은 다음과 같이 정해진다. 편향(bias)은 음의 지수도 0 이상의 정수로 저장하려고 더해 둔 수다. 지수가 e비트라면 $2^{e-1}-1$이다(fp16은 15, fp32는 127).
#
# $$(-1)^{\text{부호}} \times 1.\text{가수}_2 \times 2^{\,\text{지수} - \text{편향}}$$
#
# 같은 16비트라도 fp16과 bf16은 비트를 다르게 나눈다. 초록색(지수)과 파란색(가수)의 길이를 비교한다.

# %%
draw_layouts()

# %% [markdown] lang="ko"
# bf16의 비트 배치는 fp32의 앞 16비트와 같다. (값을 바꿀 때는 자르지 않고 반올림한다.) tf32는 메모리에 저장하는 형식이 아니라, GPU의 텐서 코어가 fp32를 곱하기 직전에 잠깐 쓰는 형식이다.
#
# 8비트 실수 **fp8**은 두 가지다. e4m3은 가수가 한 비트 많아 가중치와 순전파 상태(activation)에, e5m2는 지수가 한 비트 많아 그레이디언트(gradient)에 쓰라고 제안되었다(Micikevicius 외, 2022). 4비트 실수 **fp4**(e2m1)의 크기는 0, 0.5, 1, 1.5, 2, 3, 4, 6의 여덟 가지뿐이다. 그래서 반드시 스케일과 함께 쓴다. 그 방법이 2장의 MXFP4와 NVFP4다.
#
# 정말 이렇게 나누는지 PyTorch가 저장한 비트와 맞추어 보자. 0.15625(= 1.25 × 2⁻³)를 fp16으로 저장하고 그 비트를 들여다본다. `.view(torch.int16)`은 값을 바꾸지 않고 같은 16비트를 정수로 읽는다. fp16의 편향은 15이므로 저장된 지수는 12 = 01100₂이어야 한다.

# %%
pattern = torch.tensor(0.15625, dtype=torch.float16).view(torch.int16).item()
f"{pattern:016b}", FORMATS["fp16"].parts(0.15625)

# %% [markdown] lang="ko"
# 두 결과가 같다. 2049는 2진수로 1.00000000001₂ × 2¹¹이라 가수가 11비트 필요하다. fp16의 가수는 10비트다.
#
# ## 1.2 범위는 지수가, 촘촘함은 가수가 정한다
#
# 형식마다 담을 수 있는 가장 큰 수와 가장 작은 수, 그리고 1과 그다음 수 사이의 간격(machine epsilon)을 계산한다. 표를 보기 전에 두 주장에 먼저 답해 둔다.
#
# > **주장 1.** "fp16은 fp32보다 범위가 좁고 성기다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 가장 큰 수가 3.4 × 10³⁸에서 65504로, 간격이 1.2 × 10⁻⁷에서 9.8 × 10⁻⁴로 바뀐다.
#
# </details>
#
# > **주장 2.** "bf16은 fp32의 범위를 지키는 대신 촘촘함을 잃는다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 지수 8비트가 fp32와 같고, 1 다음의 간격은 7.8 × 10⁻³으로 fp16보다도 8배 성기다.
#
# </details>

# %%
FormatTable()

# %% [markdown] lang="ko"
# int8은 지수가 없는 정수라 간격이 어디서나 1이다. '정규 수(normal)'는 가수를 다 쓰는 수다. 그보다 작은 수는 앞자리의 1을 포기하고 더 작은 값까지 버틴다. 이것을 **비정규 수**(subnormal)라 하고, 작아질수록 유효한 자리가 줄어든다.
#
# 이웃한 두 수의 간격을 그린다. 가로는 수의 크기, 세로는 그다음 수까지의 간격이고 두 축 모두 10의 거듭제곱이다. 선의 **길이**가 범위, **높이**가 성김이다. 세 형식 가운데 어느 선이 가장 짧고, 어느 선이 가장 낮은가?

# %%
draw_spacing(("fp32", "bf16", "fp16"))

# %% [markdown] lang="ko"
# 왼쪽 끝의 평평한 곳만 빼면 모든 선이 같은 기울기로 올라간다. 수가 커지면 간격도 같은 비율로 커진다. 그래서 평평한 곳만 아니면 부동소수점은 크기와 관계없이 **상대 오차**(relative error)가 거의 일정하다. fp16(주황)은 짧고, bf16(파랑)은 fp32(검정)만큼 길지만 더 높다.
#
# 이제 fp8과 fp4까지 넣고, 1e-8부터 1e5까지를 크게 그린다. 왼쪽 끝에서 선이 **평평해지는 곳**을 형식마다 찾는다.

# %%
draw_spacing(("bf16", "fp16", "fp8 e4m3", "fp8 e5m2", "fp4 e2m1"), powers=(-8, 5))

# %% [markdown] lang="ko"
# 평평한 곳이 비정규 수다. 간격이 더 줄지 않으므로 0에 가까울수록 상대 오차가 커진다. 가장 작은 양수는 fp16이 6 × 10⁻⁸, e4m3이 0.002다. 그 절반보다 크면 그 수로 올림되고, 절반 이하면 0이 된다.
#
# **연습 1-1.** 표의 '가장 큰 수'는 비트 수만 알면 나온다. 지수가 e비트, 가수가 m비트일 때 가장 큰 유한한 수를 돌려주는 함수를 완성하라. 지수 비트가 모두 1인 코드는 inf와 nan이 쓰므로 셈에서 뺀다. 편향은 1.1절의 식에 있다. 맞게 썼다면 `largest(5, 10)`은 65504다. 막히면 `exercise("1-1").hint()`, 그래도 막히면 `exercise("1-1").solution()`을 실행한다.


# %%
def largest(e, m):
    return ...


exercise("1-1").check(largest)

# %% [markdown] lang="ko"
# 이 규칙대로라면 e4m3의 가장 큰 수는 240이다(`largest(4, 3)`). 그런데 표에는 448이다. PyTorch의 이름 `float8_e4m3fn`에 붙은 fn(finite, nan)이 그 차이다. inf를 아예 없애고 맨 위 코드 하나만 nan으로 두어, 지수가 모두 1인 자리에도 수를 담는다. inf가 없으니 넘친 값은 PyTorch 2.13에서는 448이 된다(1.1절의 그림에서 2049가 그랬다).
#
# ## 1.3 사고 하나: 넘침
#
# fp16에서 가장 큰 수는 65504다. 여기에 15나 16을 더하면 무엇이 될까? 답이 서로 다르다. 둘째 줄은 같은 65504를 bf16에서 두 배로 늘린 것이다.

# %%
top = torch.tensor(65504, dtype=torch.float16)
print(top + 15, top + 16)
print(torch.tensor(65504, dtype=torch.bfloat16) * 2)

# %% [markdown] lang="ko"
# 65504 다음에 수가 하나 더 있었다면 65536이었을 것이다. 그 한가운데인 65520부터 무한대(inf)로 반올림된다. bf16은 버텼다. 65504가 가까운 65536으로 반올림되어 저장되므로 두 배인 131072가 나왔다.
#
# 65504를 넘는 일은 실제로 생긴다. bf16으로 학습한 T5를 fp16으로 돌리면 피드포워드 층의 중간값이 넘쳐 출력이 모두 nan이 된다는 보고가 오래 이어졌다([transformers #4287](https://github.com/huggingface/transformers/issues/4287), [#9295](https://github.com/huggingface/transformers/issues/9295)). 첫 줄은 70000을 두 형식에 담은 것, 둘째 줄은 값이 300인 벡터의 제곱 평균이다. 정규화 층이 계산하는 양이다.

# %%
value = torch.tensor(70000.0)
print(value.half(), value.bfloat16(), value.half() - value.half())
x = torch.full((4,), 300.0, dtype=torch.float16)
print(x.square().mean(), x.float().square().mean())

# %% [markdown] lang="ko"
# 무한대가 한 번 생기면 nan으로 번지기 쉽다(inf - inf = nan). 300은 fp16에 넉넉히 담기지만 그 제곱은 담기지 않는다. 그래서 transformers의 Llama는 정규화와 소프트맥스를 fp32로 바꾸어 계산한다.
#
# ### 직접 바꿔 보기
#
# 숫자를 적거나(0.1, 1e-8, 1/3, 2**-14), 손잡이로 자릿수를 끌거나, 단추를 누른다. 그림의 비트를 누르면 그 비트가 뒤집히고, 그렇게 만든 수가 숫자 칸에 들어간다. 아래 그림은 처음 모습이다.
#
# ![0.1을 fp64부터 fp8, fp4, int8까지 담았을 때의 비트와 저장된 값, 오차](../../image/01_one_tenth.svg)
#
# - 65504와 65520을 번갈아 누른다. fp16의 비트는 어떻게 달라지는가?
# - 2049를 담지 못하는 형식은 몇 가지인가?
# - -0.0은 0과 비트가 어떻게 다른가?
# - 1을 적고 fp16의 지수 비트를 하나씩 눌러 본다. 어느 비트가 수를 가장 크게 바꾸는가? bf16의 같은 자리를 누르면?

# %%
number_panel()

# %% [markdown] lang="ko"
# ## 1.4 사고 둘: 밑넘침과 손실 스케일링
#
# 학습에서는 손실(loss)을 가중치로 미분한 값, 곧 그레이디언트로 가중치를 고친다. 이 값은 대개 아주 작다. fp16의 가장 작은 양수는 6 × 10⁻⁸이다. 그레이디언트가 10⁻⁸이어야 할 때 무엇이 저장될까?

# %%
w = torch.ones(1, dtype=torch.float16, requires_grad=True)
(w * 1e-8).sum().backward()
w.grad

# %% [markdown] lang="ko"
# 그레이디언트가 0이므로 이 가중치는 움직이지 않는다. 처방은 **손실 스케일링**(loss scaling)이다. 손실에 큰 수를 곱하면 연쇄 법칙에 따라 그레이디언트도 모두 그만큼 커진다.
# 역전파(backward)가 끝난 뒤 fp32로 바꾸어 같은 수로 나누면 원래 값이 된다. PyTorch의 `GradScaler`가 이 일을 한다. 2의 거듭제곱을 곱한 그레이디언트와, 나누어 되돌린 그레이디언트를 차례로 출력한다.

# %%
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
w.grad = None
scaler.scale((w * 1e-8).sum()).backward()
print(w.grad, w.grad.float() / scaler.get_scale())

# %% [markdown] lang="ko"
# 이번에는 그레이디언트가 살아남았고, 나누면 10⁻⁸에 가까운 값이 되돌아온다(fp16의 오차가 남아 9.9972 × 10⁻⁹이다). 2의 거듭제곱을 곱하는 것은 가수를 건드리지 않고 지수만 옮기는 일이다. 아래 두 줄에서 가수(세 번째)는 같고 지수(두 번째)만 다르다.

# %%
FORMATS["fp32"].parts(3e-8), FORMATS["fp32"].parts(3e-8 * 2**14)

# %% [markdown] lang="ko"
# ### 얼마를 곱할까: 동적 손실 스케일링
#
# 너무 큰 수를 곱하면 이번에는 위로 넘친다. `GradScaler`는 65536에서 시작해 스스로 맞춘다. 그레이디언트에 inf나 nan이 있으면 그 **스텝을 건너뛰고** 곱하는 수를 절반으로 줄인다. 2,000번 연속으로 무사하면 두 배로 늘린다(모두 PyTorch의 기본값이다).
#
# 그레이디언트가 10인 가중치 하나를 학습한다. fp16의 가장 큰 수는 65504다. 처음 몇 스텝을 건너뛸까?

# %%
skipped = guess("1.4", None)
skipped

# %% [markdown] lang="ko"
# 여섯 스텝을 실행하며 곱하는 수와 가중치를 출력한다. 가중치가 1.0에 머무는 줄이 건너뛴 스텝이다.

# %%
w = torch.ones(1, requires_grad=True)
optimizer, scaler = torch.optim.SGD([w], lr=0.01), torch.amp.GradScaler("cpu")
weights = []
for _ in range(6):
    optimizer.zero_grad()
    used = scaler.get_scale()
    scaler.scale((w.half() * 10).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    weights.append(round(w.item(), 2))
    print(f"{used:7.0f} {weights[-1]}")
skipped.against(weights.count(1.0))

# %% [markdown] lang="ko"
# 65536 × 10은 넘치고, 4096 × 10 = 40960에서 처음으로 담겼다. fp16 학습의 처음 몇 스텝에서 손실이 그대로라면(여기서는 네 번) 대개 고장이 아니라 이 과정이다. 클리핑(clipping)처럼 그레이디언트의 크기를 쓰는 일은 `scaler.unscale_(optimizer)`로 되돌린 다음에 해야 한다.
#
# > **주장 3.** "fp16의 좁은 범위가 학습을 망치고, bf16이 이를 줄인다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 손실 스케일링이 없으면 위에서 본 대로 아래로 사라진다. 있으면 그레이디언트는 살아남는다. 그러나 순전파의 값이 넘치는 것은 스케일링으로 막지 못한다(T5). bf16은 같은 값을 그냥 담으므로(아래 셀) 손실 스케일링이 필요 없다. 대신 GPU에 bf16 연산 장치가 있어야 한다. NVIDIA에서는 A100의 세대(Ampere)부터 있고, T4의 세대(Turing)에는 없다.
#
# </details>
#
# bf16으로 같은 그레이디언트 10⁻⁸을 계산한다. 손실 스케일링 없이도 남을까?

# %%
w = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
(w * 1e-8).sum().backward()
w.grad

# %% [markdown] lang="ko"
# 남는다. 그렇다면 내 GPU에는 bf16 연산 장치가 있을까? PyTorch에 두 가지로 물어본다. 이 강의의 출력은 GPU가 없는 컴퓨터의 것이다.

# %% tags=["nbval-ignore-output"]
torch.cuda.is_bf16_supported(), torch.cuda.is_bf16_supported(including_emulation=False)

# %% [markdown] lang="ko"
# T4에서는 첫째가 **True**, 둘째가 False다. 첫째는 bf16 텐서를 만들 수 있는지만 보기 때문이다(PyTorch 2.13의 `torch/cuda/__init__.py`, Colab의 T4에서 True가 나왔다는 보고는 [Soup #387](https://github.com/MakazhanAlpamys/Soup/issues/387)). T4에서는 라이브러리가 bf16을 fp32로 바꾸어 계산한다(에뮬레이션). 오류 없이 돌아가지만 16비트 연산 장치의 속도를 기대할 수는 없다. T4에서 16비트로 계산하려면 fp16과 `GradScaler`를 쓴다.
#
# ### fp8: 텐서마다 스케일
#
# 8비트에서는 이 문제가 훨씬 빨리 온다. 표준 편차가 0.001인 그레이디언트 만 개를 fp8에 담는다. 가장 큰 값이 형식의 가장 큰 수가 되도록 **텐서마다 스케일을 곱한 것**과 그냥 담은 것을 비교한다. 열은 형식, 스케일을 곱했는지, 오차(차이 벡터의 길이 ÷ 원래 벡터의 길이), 0이 된 값의 비율이다.

# %%
generator = torch.Generator().manual_seed(0)
gradient = 1e-3 * torch.randn(10_000, dtype=torch.float64, generator=generator)
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    for scaled in (False, True):
        scale = torch.finfo(dtype).max / gradient.abs().max() if scaled else 1.0
        kept = (gradient * scale).to(dtype).double() / scale
        error = (kept - gradient).norm() / gradient.norm()
        print(f"{dtype!s:20} {scaled!s:5} {error:6.1%} {(kept == 0).double().mean():6.1%}")

# %% [markdown] lang="ko"
# 스케일이 없으면 e4m3은 셋 가운데 둘을 0으로 만든다. 지수가 한 비트 많은 e5m2는 버틴다. 그레이디언트에 e5m2가 제안된 까닭이다. 스케일이 있으면 거꾸로 가수가 많은 e4m3이 두 배 정확하다. 그래서 더 작은 묶음마다 스케일을 두는 방법에서는 모두 e4m3을 쓰기도 한다(DeepSeek-V3, 2024: 순전파 상태는 128개마다, 가중치는 128 × 128마다).
#
# fp8 연산 장치는 NVIDIA에서 Ada와 Hopper 세대부터 있고 T4와 A100에는 없다. 그리고 fp8 학습은 대개 **곱하기 직전에만** fp8로 바꾼다. 가중치는 높은 정밀도로 그대로 남으므로 메모리가 절반이 되지 않는다([torchao #1102](https://github.com/pytorch/ao/issues/1102)).
#
# ### 사건 1-A. Attempting to unscale FP16 gradients
#
# V100(32 GB, bf16 없음)에서 83억 파라미터 모델을 LoRA로 미세 조정한다. LoRA는 원래 가중치를 얼리고 작은 행렬(어댑터)만 학습하는 방법이다(8장). 모델을 fp16으로 불러오고 `fp16=True`로 학습을 시작하자마자 이 오류로 멈췄다.
#
# `run`은 같은 일을 작은 층에서 실제로 학습해 본다. 바꿀 수 있는 것은 얼린 가중치의 형식 `frozen`, 학습하는 어댑터의 형식 `adapter`(둘 다 `"fp16"`이나 `"fp32"`), 손실 스케일링을 쓰는지 `scaler`다. 실험은 다섯 번까지 할 수 있고, 아래 셀이 첫 번째다. **오류 없이 배우면서 32 GB에 들어가는** 설정을 찾아 적는다. 힌트는 `case("1-A").hint()`.

# %%
case("1-A").run(frozen="fp16", adapter="fp16", scaler=True)

# %% [markdown] lang="ko"
# 오류가 그대로 난다. `GradScaler`는 커진 그레이디언트를 제자리에서 나누는데, 그레이디언트의 형식은 그 가중치의 것이다. 셀을 더 만들어 실험하거나 위 셀을 고쳐 다시 실행한다. 답은 `{"frozen": …, "adapter": …, "scaler": …}`처럼 적는다.

# %%
setting = ...
case("1-A").check(setting)

# %% [markdown] lang="ko"
# ## 1.5 사고 셋: 흡수
#
# 2048에 1을 더한다. 두 번째 숫자는 2048에서 이웃한 두 수의 간격이다.

# %%
torch.tensor(2048.0, dtype=torch.float16) + 1, FORMATS["fp16"].spacing(2048)

# %% [markdown] lang="ko"
# 그대로 2048이다. 2048부터는 간격이 2이므로 더한 1이 **흡수**(swamping)되었다. 큰 수가 작은 수를 삼킨 것이다.
#
# 작은 수를 여러 번 더하면 이 오차가 쌓인다. 0.001을 10,000번 더하면 10이 되어야 한다. bf16에서는 얼마가 나올까? 세 형식의 합을 차례로 출력한다.

# %%
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    total, step = torch.tensor(0.0, dtype=dtype), torch.tensor(0.001, dtype=dtype)
    for _ in range(10_000):
        total += step
    print(f"{dtype!s:15} {total.item():.4f}")

# %% [markdown] lang="ko"
# fp16과 bf16은 어느 순간부터 아무리 더해도 늘지 않는다. 합이 커져서 간격의 절반이 0.001보다 커지면 더한 값이 모두 흡수되기 때문이다. fp32도 0.0004만큼 어긋났다. 덧셈마다 생긴 반올림 오차가 쌓인 것이다.
# 그래서 GPU의 행렬곱은 입력이 16비트라도 합은 기본으로 fp32로 모은다. (긴 합을 여러 몫으로 나누어 계산한 뒤 그 몫들을 16비트로 더하는 것은 허용되어 있다. `torch.backends.cuda.matmul`의 `allow_fp16_reduced_precision_reduction`과 `allow_bf16_reduced_precision_reduction`을 `False`로 두면 꺼진다. PyTorch 문서의 Numerical accuracy에 있다.)
#
# ### 두 결과가 "같다"는 것은 어떻게 재나
#
# 입력을 16비트로 반올림하면 행렬곱의 결과는 얼마나 달라질까? 가장 큰 차이를 재면 될까? 같은 행렬곱을 입력만 100배로 키워 두 번 계산한다. 열은 입력의 배율, 형식, 가장 큰 차이, **상대 노름**(relative norm: 차이 벡터의 길이 ÷ 정답 벡터의 길이)이다.

# %%
generator = torch.Generator().manual_seed(0)
a, b = (torch.randn(256, 256, dtype=torch.float64, generator=generator) for _ in range(2))
for factor in (1, 100):
    exact = (a * factor) @ b
    for dtype in (torch.bfloat16, torch.float16):
        difference = (a * factor).to(dtype).double() @ b.to(dtype).double() - exact
        relative = difference.norm() / exact.norm()
        print(f"x{factor:<4} {dtype!s:15} {difference.abs().max():8.2f} {relative:.1e}")

# %% [markdown] lang="ko"
# 가장 큰 차이는 입력을 따라 100배 안팎으로 커졌지만(bf16은 0.21에서 18.36) 상대 노름은 그대로다. 상대 노름은 형식의 촘촘함만 보여 준다. bf16이 fp16의 약 8배인 것도 가수 세 비트의 차이와 맞는다. 이 강의에서 두 계산을 비교할 때 쓰는 자다.
#
# **연습 1-2.** n + 1을 담지 못하는 가장 작은 양의 정수 n은 fp16과 bf16에서 각각 얼마인가? `{"fp16": …, "bf16": …}`처럼 답한다.

# %%
numbers = ...
exercise("1-2").check(numbers)

# %% [markdown] lang="ko"
# ### 가중치의 갱신도 흡수된다
#
# 모델 전체를 bf16으로 두고 미세 조정한다고 하자. 표준 편차가 0.02인 가중치 100만 개를 AdamW로 한 스텝 갱신한다. 학습률은 흔히 쓰는 1e-5다. 가중치 가운데 몇 %가 움직일까?

# %%
moved = guess("1.5", None, "%")
moved

# %% [markdown] lang="ko"
# AdamW의 첫 스텝은 그레이디언트의 크기와 관계없이 모든 가중치를 거의 학습률만큼 옮기려 한다. 실제로 값이 달라진 가중치의 비율을 센다.

# %%
generator = torch.Generator().manual_seed(0)
before = (torch.randn(1_000_000, dtype=torch.float64, generator=generator) * 0.02).bfloat16()
w = before.clone().requires_grad_()
w.grad = torch.ones_like(w)
torch.optim.AdamW([w], lr=1e-5).step()
moved.against((w != before).double().mean())

# %% [markdown] lang="ko"
# 대부분이 제자리에 남는다. 0.02 근처에서 bf16의 간격은 1.2 × 10⁻⁴(1 다음의 간격 0.0078125 × 2⁻⁶)이어서 10⁻⁵은 반올림에서 사라진다. 움직인 것은 크기가 2⁻⁸(약 0.004)보다 작은 가중치다. 그보다 크면 간격의 절반이 10⁻⁵보다 커서 흡수된다. 오류도 경고도 없고 손실이 조금은 내려간다. 그래서 찾기 어렵다.
#
# 처방을 비교한다. 값이 1인 bf16 가중치 1,000개에 0.001씩 1,000번 더한다. 결과는 2여야 한다.
#
# 1. bf16 가중치에 그대로 더한다.
# 2. **fp32 주 가중치**(master weights)에 더하고, 쓸 때만 bf16으로 바꾼다. 가중치마다 메모리를 4바이트 더 쓴다.
# 3. **확률적 반올림**(stochastic rounding): 올림과 내림을 확률로 정해 평균을 지킨다. 메모리를 더 쓰지 않는다.
#
# 세 방법으로 얻은 가중치의 평균을 차례로 출력한다.

# %%
plain = torch.ones(1000, dtype=torch.bfloat16)
master = torch.ones(1000)
stochastic = torch.ones(1000, dtype=torch.bfloat16)
generator = torch.Generator().manual_seed(0)
for _ in range(1000):
    plain += 0.001
    master += 0.001
    stochastic = stochastic_round_to_bf16(stochastic.float() + 0.001, generator)
print([round(w.double().mean().item(), 2) for w in (plain, master.bfloat16(), stochastic)])

# %% [markdown] lang="ko"
# 그대로 더하면 1에서 한 발짝도 움직이지 않는다. 주 가중치와 확률적 반올림은 2에 닿는다. 확률적 반올림은 가중치 하나하나는 흔들리지만 평균은 맞는다.
# 비트에서 하는 일은 간단하다. fp32의 32비트를 `view(torch.int32)`로 읽고, bf16에 담기지 않는 아래 16비트에 무작위 수를 더한 뒤, 그 자리를 `&`로 지우고 `view(torch.float32)`로 되돌린다.
#
# **연습 1-3.** 확률적 반올림을 직접 만들어라. fp32 텐서 `x`와, 모양이 같고 0부터 65535까지의 정수가 든 `noise`(int32)를 받아, bf16에 담기는 값을 돌려준다.


# %%
def stochastic_round(x, noise):
    return ...


exercise("1-3").check(stochastic_round)

# %% [markdown] lang="ko"
# ### 사건 1-B. bf16으로 바꾸었더니 배우지 않는다
#
# 메모리를 아끼려고 모델의 가중치를 fp32에서 bf16으로 바꾸었다. 다른 설정은 그대로인데 손실이 거의 내려가지 않는다. 오류는 없다.
#
# `run`이 바꿀 수 있는 것은 `weights`(`"bf16"`, `"fp32"`), fp32 주 가중치를 두는지 `master`, 갱신한 값을 저장하는 방법 `rounding`(`"nearest"`, `"stochastic"`), `learning_rate`다. 다섯 번의 실험으로 **학습률 1e-5에서 파라미터당 2바이트만으로** 배우는 설정을 찾는다. 답은 `{"weights": …, "rounding": …}`처럼 적는다.

# %%
case("1-B").run(weights="bf16", learning_rate=1e-5)

# %% [markdown] lang="ko"
# 움직인 가중치의 비율이 실마리다. 손실이 처음의 10분의 1 아래로 내려가면 배운 것으로 친다.

# %%
setting = ...
case("1-B").check(setting)

# %% [markdown] lang="ko"
# ## 1.6 비트에서 바이트로
#
# **크기 = 파라미터 수 × 숫자 하나의 바이트**다. 10억(1B) 파라미터를 fp16으로 담으면 2 GB, 70억이면 14 GB다.
#
# > **주장 4.** "1024³은 10⁹에 가까우므로 10⁹ × 2바이트는 2 GB다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** GB는 10⁹바이트이므로 어림할 것 없이 정확히 2 GB다. GiB로 세면 1.863이라 7% 차이가 난다. PyTorch의 오류 메시지는 GiB나 MiB로, nvidia-smi는 MiB로 보여 준다. 70억 파라미터의 14 GB를 14 GiB로 읽으면, 13.039 GiB를 올리고 T4(0장의 14.64 GiB)에 남는 1.6 GiB가 0.64 GiB로 보인다(아래 셀).
#
# </details>
#
# 같은 바이트를 두 단위로 적는다.

# %%
for billions in (1, 7):
    nbytes = billions * 10**9 * 2
    print(f"{billions}B: {nbytes / 10**9:.0f} GB = {nbytes / 1024**3:.3f} GiB")

# %% [markdown] lang="ko"
# 이제 실제 모델을 4비트로 줄인다. NF4는 2장에서 다루는 4비트 형식으로, 부가 정보까지 합쳐 파라미터당 4.127비트다. 파라미터가 80억인 Llama-3.1-8B의 가중치는 NF4로 몇 GB일까?

# %%
four_bit = guess("1.6", None, "GB")
four_bit

# %% [markdown] lang="ko"
# 모델의 구조를 만들어 파라미터를 세고 표로 만든다. ✓는 T4 한 장에 가중치가 들어간다는 표시다. ✗가 ✓로 바뀌는 곳을 찾는다.

# %%
sizes = ModelSizes((
    "EleutherAI/polyglot-ko-1.3b", "EleutherAI/polyglot-ko-5.8b", "EleutherAI/polyglot-ko-12.8b",
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B",
))  # fmt: skip
sizes

# %% [markdown] lang="ko"
# 예상과 비교한다. 80억 × 4.127비트보다 큰 까닭은 무엇일까?

# %%
print(f"{sizes.counts['meta-llama/Llama-3.1-8B'][0] * 4.127 / 8 / 1e9:.1f} GB")
four_bit.against(sizes.nbytes("meta-llama/Llama-3.1-8B", "NF4"))

# %% [markdown] lang="ko"
# int8과 NF4로 줄어드는 것은 선형층의 가중치뿐이다. 임베딩과 출력층은 16비트로 남는다. Llama-3.1-8B에서는 128,256 × 4,096 × 2, 곧 10.5억 개다. 하나에 16 - 4.127비트씩, 모두 1.6 GB가 더 들어 4.1이 5.7이 된다. 어휘가 큰 모델일수록 이 몫이 크다. 그래서 '파라미터 수 × 0.5바이트'로 잡으면 모자란다.
#
# 이 표는 **가중치만** 센 것이다. 학습된 모델을 쓰기만 한다면(추론, inference) 여기에 글의 길이에 따라 늘어나는 키와 값의 캐시를 더하면 된다. 학습에는 그레이디언트, 옵티마이저 상태(optimizer state), 순전파 상태가 더 필요하다. 3장에서 그것을 센다.
#
# 형식은 시간도 바꾼다. 행렬곱 한 번에 걸리는 시간을 잰다. 값은 컴퓨터마다 다르다. 저장된 출력은 CPU에서 쟀고, 16비트 연산 장치가 없는 CPU에서는 16비트가 오히려 느릴 수 있다. T4에서 실행한다면 fp16과 bf16의 차이를 확인한다. 이 강의는 T4에서 재지 않았다.

# %% tags=["nbval-ignore-output"]
import time

device, side = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 512)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    a = torch.ones(side, side, dtype=dtype, device=device)
    (a @ a).sum().item()
    start = time.perf_counter()
    for _ in range(5):
        (a @ a).sum().item()
    print(f"{dtype!s:15} {(time.perf_counter() - start) / 5 * 1e3:.2f} ms")

# %% [markdown] lang="ko"
# 저장된 출력에서는 같은 16비트인데 bf16(3.04 ms)은 fp32(6.56 ms)보다 빠르고 fp16(217.18 ms)은 수십 배 느리다. 비트가 줄었다고 빨라지지 않는다. 그 형식을 계산하는 장치가 있는지를 먼저 본다.
#
# ## 1.7 기억할 것
#
# | 형식 | 부호 + 지수 + 가수 | 가장 큰 수 | 1과 그다음 수의 간격 | 조심할 것 | 처방 |
# |---|---|---|---|---|---|
# | fp32 | 1 + 8 + 23 | 3.4 × 10³⁸ | 1.2 × 10⁻⁷ | 파라미터마다 4바이트 | 16비트 |
# | fp16 | 1 + 5 + 10 | 65504 | 9.8 × 10⁻⁴ | 넘침, 밑넘침 | 손실 스케일링 |
# | bf16 | 1 + 8 + 7 | 3.4 × 10³⁸ | 7.8 × 10⁻³ | 흡수 | fp32 주 가중치, 확률적 반올림 |
# | fp8 e4m3fn | 1 + 4 + 3 | 448 | 0.125 | 넘침, 밑넘침 | 텐서나 블록마다 스케일 |
#
# - 지수가 **범위**를, 가수가 **촘촘함**을 정한다. fp16은 촘촘하고 좁다. bf16은 성기고 넓다.
# - fp16의 한계는 65504와 6 × 10⁻⁸이다. 손실 스케일링은 지수만 옮겨 아래쪽 한계를 피하고, 넘치면 스스로 절반으로 줄인다.
# - 작은 갱신은 16비트 가중치에 흡수된다. 학습되는 가중치는 fp32로 두거나 확률적으로 반올림한다.
# - T4에는 bf16 연산 장치가 없다. `is_bf16_supported()`의 True를 믿지 않는다.
# - **가중치의 크기 = 파라미터 수 × 바이트.** 10억(1B) 파라미터는 fp16으로 2 GB다.
#
# 이 장의 예상은 몇 개나 맞았을까?

# %%
guesses()

# %% [markdown] lang="ko"
# 8비트로는 256가지, 4비트로는 16가지 값밖에 적지 못한다. 그것으로 모델을 담을 수 있을까? [2장](02_quantization.ipynb)에서 답한다.
