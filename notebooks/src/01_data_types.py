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
# - fp32, fp16, bf16, fp8의 비트를 부호, 지수, 가수로 나누고, 거기서 **범위**와 **촘촘함**을 계산한다.
# - 넘침(overflow), 밑넘침(underflow), 흡수라는 세 가지 사고를 알아보고 처방을 고른다.
# - 파라미터(parameter) 수만 보고 모델이 어느 GPU에 들어가는지 어림한다.
#
# GPU도 네트워크도 필요 없다. 먼저 필요한 이름을 불러온다. 출력은 이 장에서 다룰 형식의 목록이다.

# %%
import torch

from helpers import exercise, number_panel
from helpers.chapters.c1_numbers.formats import (
    FORMATS,
    FormatTable,
    ModelSizes,
    draw_layouts,
    draw_number,
    draw_spacing,
    stochastic_round_to_bf16,
)  # fmt: skip

list(FORMATS)

# %% [markdown] lang="ko"
# ## 1.1 비트를 뜯어보기
#
# 컴퓨터는 **부동소수점**(floating point) 수를 세 토막으로 저장한다. **부호**(sign) 1비트, 크기의 자릿수를 나타내는 **지수**(exponent), 나머지 자세한 값을 담는 **가수**(mantissa)다.
# 값은 다음과 같이 정해진다. 편향(bias)은 형식마다 정해진 수로, 음의 지수도 0 이상의 정수로 저장하려고 더해 둔 것이다.
#
# $$(-1)^{\text{부호}} \times 1.\text{가수}_2 \times 2^{\,\text{지수} - \text{편향}}$$
#
# 같은 16비트라도 fp16과 bf16은 비트를 다르게 나눈다. 초록색(지수)과 파란색(가수)의 길이를 비교한다.

# %%
draw_layouts([FORMATS[name] for name in ("fp32", "tf32", "fp16", "bf16", "fp8 e4m3", "fp8 e5m2")])

# %% [markdown] lang="ko"
# bf16의 비트 배치는 fp32의 앞 16비트와 같다. (값을 바꿀 때는 자르지 않고 반올림한다.) tf32는 메모리에 저장하는 형식이 아니라, GPU의 텐서 코어가 fp32를 곱하기 직전에 잠깐 쓰는 형식이다.
#
# 정말 이렇게 나누는지 PyTorch가 저장한 비트에서 확인한다. 0.15625(= 1.25 × 2⁻³)를 fp16으로 저장하고 그 비트를 들여다본다. fp16의 편향은 15이므로 저장된 지수는 12 = 01100₂이어야 한다.

# %%
pattern = torch.tensor(0.15625, dtype=torch.float16).view(torch.int16).item()
f"{pattern:016b}", FORMATS["fp16"].parts(0.15625)

# %% [markdown] lang="ko"
# 두 결과가 같다. 이제 0.1을 모든 형식에 담아 본다. 오른쪽 숫자가 실제로 저장된 값이다.

# %%
draw_number(0.1)

# %% [markdown] lang="ko"
# 0.1은 2진수로 쓰면 끝없이 이어지는 소수라서 어느 형식에도 정확히 담기지 않는다(fp64에 '오차 없음'이라고 나온 것은 파이썬이 읽은 0.1 자체가 이미 fp64이기 때문이다).
# 가수가 짧을수록 오차가 커진다.
#
# ## 1.2 범위는 지수가, 촘촘함은 가수가 정한다
#
# 형식마다 담을 수 있는 가장 큰 수와 가장 작은 수, 그리고 1과 그다음 수 사이의 간격(machine epsilon)을 계산한다. fp16과 bf16의 줄을 비교한다.

# %%
FormatTable()

# %% [markdown] lang="ko"
# fp16의 가장 큰 수는 65504다. bf16의 가장 큰 수는 fp32와 거의 같지만, 1 다음의 수가 1.0078이다. 그 사이에는 아무것도 없다.
#
# '정규 수(normal)'는 가수를 다 쓰는 수다. 그보다 작은 수는 앞자리의 1을 포기하고 더 작은 값까지 버틴다. 이것을 **비정규 수**(subnormal)라 하고, 작아질수록 유효한 자리가 줄어든다.
#
# 수직선 전체에서 이웃한 두 수의 간격을 그린다. 가로는 수의 크기, 세로는 그다음 수까지의 간격이고 두 축 모두 10의 거듭제곱이다. 선의 **길이**가 범위, **높이**가 성김이다.

# %%
draw_spacing()

# %% [markdown] lang="ko"
# 모든 선이 같은 기울기로 올라간다. 수가 커지면 간격도 같은 비율로 커진다. 그래서 부동소수점은 크기와 관계없이 **상대 오차**(relative error)가 거의 일정하다.
# fp16의 선(주황)은 bf16의 선(파랑)보다 낮지만 훨씬 짧다.
#
# > **주장 1.** "fp16은 fp32보다 범위가 좁고 성기다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 가장 큰 수가 3.4 × 10³⁸에서 65504로, 간격이 1.2 × 10⁻⁷에서 9.8 × 10⁻⁴로 바뀐다.
#
# </details>
#
# > **주장 2.** "bf16은 fp32의 범위를 지키는 대신 촘촘함을 잃는다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 지수 8비트가 fp32와 같고, 1 다음의 간격은 7.8 × 10⁻³으로 fp16보다도 8배 성기다.
#
# </details>
#
# ## 1.3 사고 하나: 넘침
#
# fp16에 담을 수 있는 가장 큰 수를 두 배로 늘려 본다. 같은 계산을 bf16으로도 한다.

# %%
for dtype in (torch.float16, torch.bfloat16):
    print(f"{dtype!s:15}", torch.tensor(65504, dtype=dtype) * 2)

# %% [markdown] lang="ko"
# fp16에서는 무한대(inf)가 되었고 bf16은 버텼다. bf16에서는 65504가 가까운 65536으로 반올림되어 저장되므로 두 배인 131072가 나왔다.
#
# 65504를 넘는 일은 드물지 않다. exp(12)만 되어도 fp16의 범위를 벗어나고, T5처럼 bf16으로 학습한 모델은 fp16으로 돌리면 층의 출력이 넘치기도 한다. 무한대가 한 번 생기면 그 뒤의 계산은 nan으로 번지기 쉽다.

# %%
x = torch.tensor([12.0, 11.0], dtype=torch.float16)
print(x.exp(), x.exp() / x.exp().sum())
print((x - x.max()).exp() / (x - x.max()).exp().sum())

# %% [markdown] lang="ko"
# 첫 줄은 [inf / inf = nan, 유한한 수 / inf = 0]으로 망가졌다. 둘째 줄은 가장 큰 값을 먼저 빼서 exp의 입력을 0 이하로 만든 것이다. 모든 라이브러리의 소프트맥스가 이렇게 계산한다.
#
# ## 1.4 사고 둘: 밑넘침과 손실 스케일링
#
# 학습에서는 손실을 가중치로 미분한 값, 곧 그레이디언트(gradient)로 가중치를 고친다. 이 값은 대개 아주 작다. fp16의 가장 작은 양수(6 × 10⁻⁸)의 절반보다 작으면 0이 된다. 그레이디언트가 10⁻⁸이 되게 해서 저장된 값을 본다.

# %%
w = torch.ones(1, dtype=torch.float16, requires_grad=True)
(w * 1e-8).sum().backward()
w.grad

# %% [markdown] lang="ko"
# 그레이디언트가 0이므로 이 가중치는 영영 움직이지 않는다. 처방은 **손실 스케일링**(loss scaling)이다. 손실에 큰 수를 곱하면 연쇄 법칙에 따라 그레이디언트도 모두 그만큼 커진다.
# 역전파(backward)가 끝난 뒤 fp32로 바꾸어 같은 수로 나누면 원래 값이 된다. PyTorch의 `GradScaler`가 이 일을 한다. 2의 거듭제곱을 곱한 그레이디언트와 나눈 그레이디언트를 차례로 본다.

# %%
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
w.grad = None
scaler.scale((w * 1e-8).sum()).backward()
print(w.grad, w.grad.float() / scaler.get_scale())

# %% [markdown] lang="ko"
# 이번에는 그레이디언트가 살아남았고, 나누면 10⁻⁸이 되돌아온다. 2의 거듭제곱을 곱하는 것은 가수를 건드리지 않고 지수만 옮기는 일이다. 실제 비트로 확인한다. 가수(세 번째)가 같고 지수(두 번째)만 다르다.

# %%
FORMATS["fp32"].parts(3e-8), FORMATS["fp32"].parts(3e-8 * 2**14)

# %% [markdown] lang="ko"
# > **주장 3.** "fp16의 좁은 범위가 학습을 망치고, bf16이 이를 줄인다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** fp16은 위로 넘치고 아래로 사라졌으며, bf16은 같은 값을 담는다. 그래서 bf16 학습에는 손실 스케일링이 필요 없다. 다만 GPU에 bf16 연산 장치가 있어야 한다. NVIDIA에서는 A100의 세대(Ampere)부터 있고, T4의 세대(Turing)에는 없다.
#
# </details>
#
# bf16으로 같은 그레이디언트를 계산한다. 10⁻⁸에 가까운 값이 나오면 된다.

# %%
w = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
(w * 1e-8).sum().backward()
w.grad

# %% [markdown] lang="ko"
# ## 1.5 사고 셋: 흡수
#
# 2048에 1을 더한다. fp16에서 무슨 일이 생기는지 본다.

# %%
torch.tensor(2048.0, dtype=torch.float16) + 1, FORMATS["fp16"].spacing(2048)

# %% [markdown] lang="ko"
# 그대로 2048이다. 2048부터는 이웃한 수의 간격이 2이므로 2049는 존재하지 않는다. 더한 1이 **흡수**된 것이다.
#
# 작은 수를 여러 번 더하면 이 오차가 쌓인다. 0.001을 10,000번 더하면 10이 되어야 한다. 형식마다 어디에서 멈추는지 본다.

# %%
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    total, step = torch.tensor(0.0, dtype=dtype), torch.tensor(0.001, dtype=dtype)
    for _ in range(10_000):
        total += step
    print(f"{dtype!s:15} {total.item():.4f}")

# %% [markdown] lang="ko"
# fp16과 bf16은 어느 순간부터 아무리 더해도 늘지 않는다. 합이 커져서 간격의 절반이 0.001보다 커지면 더한 값이 모두 흡수되기 때문이다. bf16은 0.5도 넘지 못했다.
# 그래서 GPU의 행렬곱은 입력이 16비트라도 합은 fp32로 모은다.
#
# 같은 일이 가중치를 갱신할 때도 일어난다. 값이 1인 bf16 가중치 1,000개에 0.001씩 1,000번 더한다. 결과는 2여야 한다. 세 가지 방법을 비교한다.
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
# 그대로 더하면 1에서 한 발짝도 움직이지 않는다. 1과 그다음 수의 간격이 0.0078이므로 0.001은 번번이 흡수된다. 주 가중치와 확률적 반올림은 2에 닿는다.
# 확률적 반올림은 가중치 하나하나는 흔들리지만 평균은 맞는다. 비트에서 하는 일은 간단하다. bf16에 담기지 않는 아래 16비트에 무작위 수를 더한 뒤 그 자리를 잘라 낸다.
#
# ## 1.6 비트에서 바이트로
#
# **크기 = 파라미터 수 × 숫자 하나의 바이트**다. 10억(1B) 파라미터를 fp16으로 담으면 2 GB, 70억이면 14 GB다. 다만 PyTorch와 nvidia-smi는 바이트를 1024의 거듭제곱(MiB, GiB)으로 보여 준다. 두 단위의 차이를 확인한다.

# %%
for billions in (1, 7):
    nbytes = billions * 10**9 * 2
    print(f"{billions}B: {nbytes / 10**9:.0f} GB = {nbytes / 1024**3:.3f} GiB")

# %% [markdown] lang="ko"
# > **주장 4.** "1024³은 10⁹에 가까우므로 10⁹ × 2바이트는 2 GB다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** GB(10⁹바이트)로 세면 가깝고 말고 할 것 없이 정확히 2 GB다. GiB로 세면 1.863이라 7% 차이가 난다. 16 GB짜리 GPU에서는 1 GB가 넘는 차이다.
#
# </details>
#
# 실제 모델로 표를 만든다. 파라미터 수는 모델의 구조를 만들어 센 것이고, ✓는 T4 한 장에 가중치가 들어간다는 표시다. NF4는 2장에서 다루는 4비트 형식으로, 부가 정보까지 합쳐 파라미터당 4.127비트다. 다만 int8과 NF4로 줄어드는 것은 선형층의 가중치뿐이다. 임베딩과 출력층은 16비트로 남는다. ✗가 ✓로 바뀌는 곳을 찾는다.

# %%
ModelSizes((
    "EleutherAI/polyglot-ko-1.3b", "EleutherAI/polyglot-ko-5.8b", "EleutherAI/polyglot-ko-12.8b",
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B",
))  # fmt: skip

# %% [markdown] lang="ko"
# 이 표는 **가중치만** 센 것이다. 학습된 모델을 쓰기만 한다면(추론, inference) 여기에 조금만 더하면 된다. 학습에는 그레이디언트, 옵티마이저 상태(optimizer state), 순전파 상태(activation)가 더 필요하다. 3장에서 그것을 센다.
#
# 형식은 시간도 바꾼다. 이 컴퓨터에서 512 × 512 행렬곱 한 번에 걸리는 시간을 잰다. 값은 컴퓨터마다 다르다. GPU에서는 대개 16비트가 빠르다. CPU에서는 16비트 연산 장치가 없으면 오히려 느리다.

# %% tags=["nbval-ignore-output"]
import time

device = "cuda" if torch.cuda.is_available() else "cpu"
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    a = torch.ones(512, 512, dtype=dtype, device=device)
    (a @ a).sum().item()
    start = time.perf_counter()
    for _ in range(5):
        (a @ a).sum().item()
    print(f"{dtype!s:15} {(time.perf_counter() - start) / 5 * 1e3:.2f} ms")

# %% [markdown] lang="ko"
# ## 1.7 직접 바꿔 보기
#
# 숫자를 적거나(0.1, 1e-8, 1/3, 2**-14), 손잡이로 자릿수를 끌거나, 단추를 누른다. 아래 그림은 처음 모습이다.
#
# ![0.1을 fp64부터 fp8, int8까지 담았을 때의 비트와 저장된 값, 오차](../../image/01_one_tenth.svg)
#
# 이렇게 해 본다.
#
# - 65504와 65520을 번갈아 누른다. fp16에서 무엇이 달라지는가? 두 수의 한가운데는 어디인가?
# - 2049를 담지 못하는 형식을 찾는다.
# - -0.0은 0과 비트가 어떻게 다른가?

# %%
number_panel()

# %% [markdown] lang="ko"
# ## 1.8 연습 문제
#
# 답을 채우고 실행하면 맞았는지, 틀렸다면 얼마나 틀렸는지 알려 준다. 막히면 `exercise("1-1").hint()`, 그래도 막히면 `exercise("1-1").solution()`을 실행한다.
#
# **1-1.** 지수 비트 수 e와 가수 비트 수 m을 받아 그 형식의 가장 큰 유한한 수를 돌려주는 함수를 완성하라. 지수가 모두 1인 자리는 inf와 nan이 쓴다.


# %%
def largest(e, m):
    return ...


exercise("1-1").check(largest)

# %% [markdown] lang="ko"
# **1-2.** n + 1을 담지 못하는 가장 작은 양의 정수 n은 fp16과 bf16에서 각각 얼마인가? `{"fp16": …, "bf16": …}`처럼 답한다.

# %%
numbers = ...
exercise("1-2").check(numbers)

# %% [markdown] lang="ko"
# **1-3.** 메모리의 바이트 수와 파라미터 하나의 비트 수를 받아, 가중치만 담을 때 들어가는 가장 많은 파라미터 수를 돌려주는 함수를 완성하라.


# %%
def most_parameters(capacity_bytes, bits):
    return ...


exercise("1-3").check(most_parameters)

# %% [markdown] lang="ko"
# ## 1.9 기억할 것
#
# | 형식 | 부호 + 지수 + 가수 | 가장 큰 수 | 1과 그다음 수의 간격 | 조심할 것 | 처방 |
# |---|---|---|---|---|---|
# | fp32 | 1 + 8 + 23 | 3.4 × 10³⁸ | 1.2 × 10⁻⁷ | 파라미터마다 4바이트 | 16비트 |
# | fp16 | 1 + 5 + 10 | 65504 | 9.8 × 10⁻⁴ | 넘침, 밑넘침 | 손실 스케일링 |
# | bf16 | 1 + 8 + 7 | 3.4 × 10³⁸ | 7.8 × 10⁻³ | 흡수 | fp32 주 가중치, 확률적 반올림 |
#
# - 지수가 **범위**를, 가수가 **촘촘함**을 정한다. fp16은 촘촘하고 좁다. bf16은 성기고 넓다.
# - fp16의 한계는 65504와 6 × 10⁻⁸이다. 손실 스케일링은 지수만 옮겨 아래쪽 한계를 피한다.
# - 작은 갱신은 16비트 가중치에 흡수된다.
# - **가중치의 크기 = 파라미터 수 × 바이트.** 10억(1B) 파라미터는 fp16으로 2 GB다.
#
# 8비트로는 256가지, 4비트로는 16가지 값밖에 적지 못한다. 그것으로 모델을 담을 수 있을까? [2장](02_quantization.ipynb)에서 답한다.
