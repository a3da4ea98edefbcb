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
# # 3장. GPU 메모리에는 무엇이 들어 있을까
#
# 13억 파라미터 모델의 가중치는 2.7 GB쯤이다. T4의 메모리는 16 GB나 되는데, 이 모델을 배치 크기 16으로 학습하면 메모리가 부족하다는 오류가 난다.
# 나머지는 무엇이 차지했을까? 이 장에서는 그 모델을 학습하면서 바이트를 하나하나 센다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 학습에 필요한 메모리를 **파라미터**(parameter), **그레이디언트**(gradient), **옵티마이저 상태**(optimizer state), **순전파 상태**(activation)로 나누어 계산한다.
# - 메모리가 가장 많이 필요한 순간이 순전파인지, 역전파인지, 옵티마이저 스텝인지 짚는다.
# - "CUDA out of memory"를 만났을 때 무엇부터 줄여야 하는지 판단한다.
#
# GPU도 네트워크도 없어도 된다. GPU가 있으면 그 GPU에서 측정하고, 없으면 0장에서 쓴 **가상 GPU**에서 같은 코드를 실행한다. 가상 GPU는 진짜 GPU가 멈출 것으로 예측되는 곳에서 같은 `torch.OutOfMemoryError`를 낸다. 예측이 진짜 GPU와 얼마나 다른지는 9장에서 본다.
# 저장된 출력은 가상 T4의 것이다.
#
# 먼저 쓸 GPU를 고른다. 이름을 주지 않으면 진짜 GPU가 있는지 찾아보고, 없으면 가상 T4를 쓴다. 출력에서 GPU의 이름과 쓸 수 있는 메모리를 확인한다.

# %%
import torch

from helpers import (
    cleanup,
    count_parameters,
    estimate_memory_of_gradients,
    estimate_memory_of_optimizer,
    exercise,
    gpu_memory_experiment,
    gpu_memory_sweep,
    human_bytes,
    load_model_and_tokenizer,
    make_dummy_dataset,
    memory_panel,
    predict_memory,
    print_gpu_utilization,
    use_gpu,
)  # fmt: skip

gpu = use_gpu()
gpu

# %% [markdown] lang="ko"
# ## 3.1 먼저 터뜨려 보기
#
# 한국어 언어 모델 polyglot-ko-1.3b를 배치 크기 16으로 학습한다. 더미 데이터(길이 256토큰)로 옵티마이저 스텝을 두 번 밟을 뿐이다.
# 출력에서 두 가지를 본다. 첫째, 첫 스텝은 무사히 끝났다. 둘째, 그런데도 오류가 났다.

# %%
report = gpu_memory_experiment(batch_size=16)

# %% [markdown] lang="ko"
# 첫 스텝이 끝났을 때는 9.941 GB였는데 다음 스텝에서 한도를 넘었다. 오류는 잡혀서 보고서가 되었고, 마지막 줄을 보면 메모리는 모두 되돌아왔다.
#
# 보고서는 스스로 그림을 그린다. 위쪽 막대는 메모리를 가장 많이 쓴 순간의 구성이고, 빨간 선은 GPU의 한도, 점선 상자는 끝까지 가려면 더 필요한 몫이다.
# 아래쪽은 시간에 따른 변화다. 두 번째 순전파에서 보라색이 빨간 선에 닿는 곳을 찾는다.

# %%
report

# %% [markdown] lang="ko"
# 이 장은 색깔을 하나씩 따라간다. 파라미터(파랑), 옵티마이저 상태(초록), 그레이디언트(주황), 순전파 상태(보라)를 하나씩 메모리에 올려 본다.
#
# ## 3.2 파라미터
#
# 모델을 불러온다. 가상 GPU에서는 가중치 없이 구조만 만든다. `print_gpu_utilization`은 지금 텐서들이 차지하는 메모리(`torch.cuda.memory_allocated`)를 출력한다.

# %%
model, tokenizer = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b")
print_gpu_utilization()

# %% [markdown] lang="ko"
# 이 숫자는 계산으로도 나온다. 모델의 크기는 **파라미터 수 × 파라미터 하나의 바이트**다. 이 모델은 16비트 부동소수점(fp16)으로 저장되어 있으므로 하나에 2바이트다.

# %%
n = count_parameters(model)
print(f"{n:,} x 2 = {n * 2:,} bytes = {n * 2 / 1024**3:.3f} GiB = {n * 2 / 1e9:.3f} GB")

# %% [markdown] lang="ko"
# 같은 바이트가 두 가지 숫자로 나왔다. 1장에서 본 GB와 GiB의 차이다. 책의 함수는 1024³으로 나눈 값에 "GB"를 붙여 출력하고,
# 이 강의의 `print_gpu_utilization`도 책과 비교할 수 있도록 그 형식을 따른다. 그 밖의 곳에서는 GiB라고 쓴다. `nvidia-smi`와 PyTorch의 오류 메시지도 1024를 기준으로 센다.
#
# > **주장 1.** "모델 크기 = 파라미터 수 × 바이트"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 출력된 2.482가 계산한 2.481보다 조금 큰 것은 작은 버퍼와, 메모리를 나누어 주는 할당자가 큰 덩어리에서 잘라 내지 않고 붙여 준 자투리 때문이다(3.10절).
#
# </details>
#
# ### 책의 출력은 왜 2.599일까
#
# 책의 노트북은 같은 모델을 불러온 뒤 2.599 GB를 출력했다. 2024년의 transformers는 GPT-NeoX의 층마다 파라미터가 아닌 **버퍼**를 저장했다. 인과 마스크(2048 × 2048, 1바이트)와
# 회전 위치 인코딩의 cos, sin 표(2048 × 64, 4바이트)다. 24개 층에서 그 몫을 계산해 더해 본다.

# %%
layers, positions, rotary = 24, 2048, 64
buffers = layers * (positions**2 * 1 + 2 * positions * rotary * 4)
print(f"{(n * 2 + buffers) / 1024**3:.3f}")

# %% [markdown] lang="ko"
# 책의 값과 0.001 차이로 맞는다. 그때의 transformers(4.40.1)를 설치해 그대로 실행하는 비교는 저장소의 `benchmarks/book.py`에 있다.
#
# 한편 책이 소개하는 허브의 메모리 계산기는 이 모델을 2.37 GB라고 했다. 계산기는 언어 모델의 출력층(`lm_head`)이 없는 본체만 세기 때문이다. 본체의 파라미터만 세어 확인한다.

# %%
body = count_parameters(model.base_model)
print(f"{body * 2 / 1024**3:.3f}, {1 - body / n:.1%}")

# %% [markdown] lang="ko"
# > **주장 2.** "계산기의 값은 대부분 거의 정확하다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 출력층이 임베딩과 가중치를 공유하는 모델이라면 맞다. polyglot-ko처럼 출력층이 따로 있으면 그만큼(여기서는 4.6%) 모자라고,
# 무엇보다 가중치 말고는 아무것도 알려 주지 않는다.
#
# </details>
#
# ## 3.3 그레이디언트
#
# 배치 하나로 순전파와 역전파를 한다. `with gpu:` 블록은 그 GPU에서 실행하라는 뜻이다. 단계마다 메모리를 출력한다. 언제 늘고 언제 줄어드는지 본다.

# %%
dataset = make_dummy_dataset()
batch = gpu.place(dataset[:4])
with gpu:
    loss = model(**batch, use_cache=False).loss
print_gpu_utilization()
with gpu:
    loss.backward()
print_gpu_utilization()

# %% [markdown] lang="ko"
# 순전파가 끝나자 1.7 GiB쯤 늘었다. 역전파에 쓰려고 간직한 중간 결과, 곧 **순전파 상태**(activation)다. 역전파가 끝나면 이것은 사라지고 **그레이디언트**(gradient)가 남는다.
# 그레이디언트는 파라미터마다 하나씩, 같은 자료형으로 생긴다. 그래서 크기도 파라미터와 같아야 한다. 두 값을 비교한다.

# %%
human_bytes(estimate_memory_of_gradients(model)), human_bytes(n * 2)

# %% [markdown] lang="ko"
# ## 3.4 옵티마이저 상태
#
# AdamW는 파라미터마다 그레이디언트의 이동 평균(momentum)과 제곱의 이동 평균(variance)을 기억한다. 이것이 **옵티마이저 상태**(optimizer state)다.
# 옵티마이저를 만드는 순간이 아니라 **첫 스텝을 실행하는 순간**에 생긴다는 점을 눈여겨본다.

# %%
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
print_gpu_utilization()
optimizer.step()
print_gpu_utilization()
human_bytes(estimate_memory_of_optimizer(optimizer))

# %% [markdown] lang="ko"
# `foreach=True`는 GPU에서 AdamW의 기본값이다(CPU에서는 아니므로 적어 주었다). 이 값이 메모리에 무슨 일을 하는지는 3.7절에서 본다.
#
# ## 3.5 N, 2N, 4N
#
# 파라미터의 크기를 N이라 하면 그레이디언트가 N, 옵티마이저 상태가 2N이다. 합은 4N이고, 여기에 순전파 상태가 더해진다.
# 지금 메모리에 있는 것이 4N과 얼마나 다른지 계산한다.

# %%
print(f"4N = {4 * n * 2 / 1024**3:.3f}")
print_gpu_utilization()

# %% [markdown] lang="ko"
# 두 값의 차이 0.020 가운데 0.016은 행렬곱 라이브러리인 cuBLAS의 작업 공간(workspace)이고, 나머지는 앞에서 본 자투리다. 행렬곱을 한 번이라도 한 스레드마다 8.125 MiB(PyTorch의 기본값)를 잡아 두는데, 순전파와 역전파가 서로 다른 스레드에서 돌아 두 개(0.016 GB)가 생긴다.
# 책의 노트북이 메모리를 비운 뒤에도 0.016 GB를 출력한 까닭이 이것이다.
#
# 다음 실험을 위해 메모리를 비운다. `cleanup`은 GPU의 텐서를 붙들고 있는 노트북 변수를 모두 지우고 그 이름을 알려 준다. 작업 공간까지 돌려주므로 0이 된다.

# %%
cleanup()
print_gpu_utilization()

# %% [markdown] lang="ko"
# > **주장 3.** "학습에는 적어도 4N이 필요하다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 순수 fp16(또는 bf16)과 AdamW라는 조건에서만 그렇다. 옵티마이저를 바꾸면 N의 몇 배인지가 달라진다.
#
# </details>
#
# 옵티마이저만 바꾸어 본다. `gpu_memory_sweep`은 목록으로 준 설정을 하나씩 실행해 표로 만든다. 옵티마이저 상태 열을 비교한다.

# %%
by_optimizer = gpu_memory_sweep(batch_size=4, optimizer=["adamw", "adamw_8bit", "adafactor", "sgd"])
by_optimizer

# %% [markdown] lang="ko"
# AdamW의 두 상태를 8비트로 줄이면 상태가 2N에서 N으로, 제곱 평균을 행과 열로만 기억하는 Adafactor나 상태가 없는 SGD를 쓰면 0에 가깝게 줄어든다.
# 따라서 2N이면 되는 학습도 있다. 학습하는 파라미터를 줄이는 LoRA는 그보다 더 줄인다(8장).
#
# ## 3.6 배치 크기를 늘리면
#
# 이제 책의 실험이다. `gpu_memory_experiment`는 모델을 불러와 `train_model`로 학습하고, 첫 스텝 직후의 메모리를 책과 같은 형식으로 출력한 뒤 모두 정리한다.

# %%
report = gpu_memory_experiment(batch_size=4)

# %% [markdown] lang="ko"
# `train_model`의 뼈대는 평범한 학습 루프다. 배치마다 순전파, 역전파를 하고 옵티마이저 스텝을 실행한다.
#
# ```python
# for batch in DataLoader(dataset, batch_size):
#     loss = model(**gpu.place(batch)).loss   # 순전파
#     loss.backward()                         # 역전파
#     optimizer.step()                        # 스텝
#     optimizer.zero_grad()
# ```
#
# 한 가지가 책의 루프와 다르다. 책은 `outputs = model(...)`처럼 모델의 출력에 이름을 붙여 둔다. 그러면 **로짓**(logit, 어휘의 단어마다 매긴 점수)이 다음 순전파까지 살아남는다.
# 이 강의의 루프는 transformers의 `Trainer`처럼 손실만 남기고 출력을 버린다. 책처럼 붙들고 있으면(`holds_outputs=True`) 배치 16의 최대가 얼마나 느는지, 로짓의 크기(배치 × 길이 × 어휘 × 2바이트)와 비교한다.

# %%
held = predict_memory(batch_size=16, holds_outputs=True).needed_bytes - predict_memory(batch_size=16).needed_bytes
human_bytes(held), human_bytes(16 * 256 * 30080 * 2)

# %% [markdown] lang="ko"
# 로짓 한 벌만큼 더 든다. 이름 하나가 메모리를 붙든 것이다. 내 학습 루프에 `outputs`라는 이름이 있다면 손실을 꺼낸 뒤 `del outputs`를 적어 볼 만하다.
#
# 배치 크기 4, 8, 16을 차례로 실행한다. 배치를 키워도 변하지 않는 열과 변하는 열을 나누어 본다.

# %%
by_batch = gpu_memory_sweep(batch_size=[4, 8, 16])
by_batch

# %% [markdown] lang="ko"
# 같은 결과를 그림으로 그린다. 막대는 저마다 최대가 된 순간의 구성이다.

# %%
by_batch.chart()

# %% [markdown] lang="ko"
# > **주장 4.** "배치 크기를 늘려도 모델, 그레이디언트, 옵티마이저 상태는 그대로다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 세 열은 바이트까지 같다. 변하는 것은 순전파 상태뿐이다.
#
# </details>
#
# 그런데 표에는 이상한 점이 있다. '첫 스텝 직후'는 배치를 4배로 키워도 9.94 GiB 그대로라서 T4에 넉넉히 들어갈 것 같다. 왜 메모리가 부족했을까?
#
# ## 3.7 출력된 숫자가 감추는 것: 최대 메모리
#
# `memory_allocated`는 **부른 순간**의 값이다. 책의 코드는 그것을 스텝 직후에 한 번 부른다. 그때는 순전파 상태가 이미 사라진 뒤다. GPU가 감당해야 하는 것은 그 사이의 **최댓값**, 곧 최대 메모리(peak memory, `max_memory_allocated`)다.
# 배치 4의 단계별 기록을 본다. 여섯 줄은 두 스텝의 순전파, 역전파, 스텝이다.

# %%
report.phases()

# %% [markdown] lang="ko"
# 세 가지가 보인다.
#
# 1. **두 번째 순전파와 역전파는 첫 번째보다 약 5 GiB 높다.** 옵티마이저 상태가 첫 스텝에서 생기므로, 두 번째 순전파부터는 그것을 깔고 시작한다. 한 스텝만 돌려 보고 안심하면 안 되는 까닭이다.
# 2. **배치가 작을 때의 최대는 스텝 안에 있다.** AdamW의 `foreach` 구현은 파라미터를 하나씩 갱신하지 않고 모두 모아 한 번에 갱신한다. 그래서 임시 텐서도 파라미터 전체의 크기(N)로 생긴다.
# 3. **스텝이 끝나면 흔적이 없다.** 그래서 책이 출력한 값에는 나타나지 않는다.
#
# 2번은 바로 고칠 수 있다. 융합(fused) 구현은 임시 텐서 없이 커널 하나로 갱신한다. 최대 메모리가 얼마나 줄어드는지 마지막 값을 본다.

# %%
fused = gpu_memory_experiment(batch_size=4, optimizer="adamw_fused")
human_bytes(report.peak_bytes - fused.peak_bytes)

# %% [markdown] lang="ko"
# 출력된 줄은 아까와 똑같은데 최대 메모리는 옵션 하나로 2.48 GiB, 곧 N만큼 줄었다. transformers의 `Trainer`는 이미 이것을 기본값으로 쓴다(`optim="adamw_torch_fused"`).
#
# 정말 그런지 `Trainer`에게 시켜 본다. 아래 셀에는 이 강의의 함수가 하나도 없다. 모델을 불러와 `Trainer`로 두 스텝 학습하는, 어디서나 볼 수 있는 코드다. `with virtual_gpu.cuda("T4")` 안에서는 어떤 프로그램이든 T4를 찾아 쓰고, 가중치는 내려받지 않는다.

# %% tags=["nbval-ignore-output"]
from tempfile import mkdtemp

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import virtual_gpu

with virtual_gpu.cuda("T4"):
    model = AutoModelForCausalLM.from_pretrained("EleutherAI/polyglot-ko-1.3b", dtype="float16")
    texts = [{"input_ids": [1] * 256, "labels": [1] * 256}] * 8
    arguments = TrainingArguments(mkdtemp(), per_device_train_batch_size=4, max_steps=2, report_to="none")
    Trainer(model, arguments, train_dataset=texts).train()
    trainer_peak = torch.cuda.max_memory_allocated()
    del model

# %% [markdown] lang="ko"
# 최대 메모리 둘을 나란히 본다. 앞은 융합 구현을 쓴 이 강의의 실험, 뒤는 방금 실행한 `Trainer`다.

# %%
human_bytes(fused.peak_bytes), human_bytes(trainer_peak)

# %% [markdown] lang="ko"
# 강의의 실험과 남의 프로그램이 같은 값을 말한다. 여러분의 파일도 그대로 실행할 수 있다. 터미널에서 `virtual-gpu run --gpu T4 train.py`라고 쓴다(9장).
#
# 배치 16에서는 사정이 다르다. 최대는 순전파 상태가 가득 찬 채 역전파가 시작되는 순간에 있다. 한도가 없는 GPU라고 치고 끝까지 가 보면 얼마나 필요한지 `predict_memory`가 알려 준다.
# 몇 개 층만 실행해 보고, 깊이에 비례한다는 것을 확인한 다음 전체 깊이의 값을 구하므로 빠르다.

# %%
predict_memory(batch_size=16)

# %% [markdown] lang="ko"
# 필요한 양이 T4의 한도를 조금 넘을 뿐이다. 배치 크기를 유지하면서 이것을 줄이는 방법이 4장의 **그레이디언트 누적**과 5장의 **그레이디언트 체크포인팅**이다. 효과만 미리 본다.

# %%
rescue = gpu_memory_sweep(batch_size=16, gradient_checkpointing=[False, True])
rescue.append(gpu_memory_experiment(batch_size=4, gradient_accumulation_steps=4))
rescue

# %% [markdown] lang="ko"
# ## 3.8 들어가는 것과 학습되는 것은 다르다
#
# 지금까지는 책을 따라 순수 fp16 가중치를 AdamW로 학습했다. **메모리 실험으로는 옳지만 이대로 학습하면 안 된다.**
# AdamW는 분모가 0이 되지 않도록 ε = 10⁻⁸을 더한다. 이 수를 fp16과 bf16에 담아 본다.

# %%
torch.tensor(1e-8, dtype=torch.float16), torch.tensor(1e-8, dtype=torch.bfloat16)

# %% [markdown] lang="ko"
# fp16에서는 0이 되었다. 작은 모델을 CPU에서 실제로 학습해, 가중치가 몇 번째 스텝까지 유한한지 센다. 자료형과 ε만 바꾼다.


# %%
def finite_steps(dtype, eps, steps=20):
    torch.manual_seed(0)
    x, y = torch.randn(256, 32), torch.randn(256, 1)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=eps)
    for step in range(steps):
        torch.nn.functional.mse_loss(net(x.to(dtype)), y.to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not all(p.isfinite().all() for p in net.parameters()):
            return step
    return steps


# %% [markdown] lang="ko"
# 20이면 끝까지 멀쩡한 것이고, 0이면 첫 스텝에서 이미 nan이나 inf가 된 것이다. 어느 줄이 20이 아닌지 본다.

# %%
for dtype, eps in [(torch.float16, 1e-8), (torch.float16, 1e-4), (torch.bfloat16, 1e-8), (torch.float32, 1e-8)]:
    print(f"{dtype!s:15} eps={eps:g}: {finite_steps(dtype, eps)}")

# %% [markdown] lang="ko"
# 순수 fp16은 곧바로 무너진다. 학습이 되게 하려면 셋 가운데 하나를 고른다.
#
# - **fp32 가중치를 두는 혼합 정밀도**(mixed precision): 가장 안전하고, 메모리는 두 배다.
# - **bf16**: fp32와 같은 범위를 가지므로 ε이 살아남는다. T4에는 bf16 연산 장치가 없다는 점에 주의한다(1장).
# - 그래도 fp16만 써야 한다면 ε을 10⁻⁴쯤으로 키운다.
#
# ### 파라미터 하나에 16바이트
#
# 혼합 정밀도에서는 파라미터 하나에 몇 바이트가 들까? ZeRO 논문(Rajbhandari 외, 2020)은 fp16 가중치 2 + fp16 그레이디언트 2 + fp32 가중치, momentum, variance 각 4로 **16바이트**라고 센다.
# PyTorch의 `autocast`는 다르게 나눈다. fp32 가중치 4 + fp32 그레이디언트 4 + 상태 8이다. 합은 마찬가지로 16이다. A100-40GB에서 순수 fp16의 8바이트와 비교한다. 첫 줄이 파라미터 하나의 바이트다.

# %%
by_precision = gpu_memory_sweep(batch_size=1, precision=["fp16", "mixed_fp16"], gpu=use_gpu("A100-40GB"))
print([(r.parameters_bytes + r.gradients_bytes + r.optimizer_bytes) / n for r in by_precision])
by_precision

# %% [markdown] lang="ko"
# 정확히 8과 16이다. 그래서 제대로 된 혼합 정밀도로는 배치 크기 1이라도 T4에 들어가지 않는다. 얼마나 모자라는지 본다.

# %%
gpu = use_gpu()
predict_memory(batch_size=1, precision="mixed_fp16")

# %% [markdown] lang="ko"
# 위의 표에서 파라미터, 그레이디언트, 옵티마이저 상태만 더해도 T4의 한도를 넘는다. 그러니 배치나 순전파 상태만 줄여서는 안 된다. 상태를 여러 GPU로 나누거나([6장](06_distributed_zero.ipynb)), 학습할 파라미터를 줄이거나([8장](08_lora.ipynb)), 3.5절의 8비트 AdamW와 5장의 체크포인팅을 함께 써야 한다. 그 조합은 [처방 한 장](../../docs/cheat_sheet.md)에 있다.
#
# ## 3.9 순전파 상태의 크기
#
# 순전파 상태는 무엇에 따라 커질까? 책은 배치 크기, 시퀀스 길이(sequence length), 은닉층 크기(hidden size)를 든다. 빠진 것이 있다. **층의 수**, 그리고 **어텐션 헤드의 수와 어텐션을 계산하는 방법**이다.
# Korthikanti 외(2022)의 식 (1)은 16비트 학습에서 트랜스포머(transformer) 한 층의 순전파 상태를 다음과 같이 센다. s는 시퀀스 길이, b는 배치 크기, h는 은닉층 크기, a는 헤드 수다.
#
# $$sbh\left(34 + 5\,\frac{as}{h}\right)\ \text{바이트}$$
#
# 어텐션을 책의 시절처럼 그대로(eager) 계산하면서 길이를 바꾸어 본다. 첫 순전파가 끝난 뒤의 순전파 상태에서 fp32 로짓 한 벌(손실의 역전파에 쓰려고 남겨 둔 것)을 빼고, 층 수와 sbh로 나눈 값이 괄호 안의 수와 같은지 본다.


# %%
def per_sbh(length, attention, b=4, h=2048, layers=24, vocabulary=30080):
    timeline = predict_memory(batch_size=b, sequence_length=length, attention=attention).timeline
    logits = length * b * vocabulary * 4
    return (timeline.at_end(0)["activations"] - logits) / (layers * length * b * h)


# %% [markdown] lang="ko"
# sdpa는 어텐션을 커널 하나로 계산하는 PyTorch의 `scaled_dot_product_attention`이다. 열은 차례로 길이, 식의 값(a = 16), eager로 잰 값, sdpa로 잰 값이다.

# %%
for length in (256, 512, 1024, 2048):
    formula = 34 + 5 * 16 * length / 2048
    print(f"{length:5} {formula:8.1f} {per_sbh(length, 'eager'):8.1f} {per_sbh(length, 'sdpa'):8.1f}")

# %% [markdown] lang="ko"
# eager의 값은 식과 11% 안에서 맞는다. 어디가 다른지도 알 수 있다. 길이 256과 512의 값을 잇는 직선에서 as/h의 계수(식에서는 5)와 절편(식에서는 34)을 구한다.

# %%
coefficient = (per_sbh(512, "eager") - per_sbh(256, "eager")) / (16 * 256 / 2048)
round(coefficient, 2), round(per_sbh(256, "eager") - coefficient * 16 * 256 / 2048, 2)

# %% [markdown] lang="ko"
# - 식의 5는 소프트맥스 출력 2, 드롭아웃(dropout) 마스크 1, 드롭아웃 출력 2다. transformers의 eager는 소프트맥스를 fp32로 계산해 4, 이를 fp16으로 바꾼 것이 2, 합해서 6이다.
# - 식의 34에는 드롭아웃 마스크 두 개(2)가 들어 있지만 이 모델은 드롭아웃을 쓰지 않는다. 또 GPT-NeoX는 어텐션과 MLP가 같은 입력을 나란히 읽으므로 층 정규화(layer normalization)의 입력(2)을 한 번만 저장한다.
#   34에서 4를 빼면 30이고, 나머지 0.17은 층 정규화의 통계와 회전 인코딩 같은 자잘한 것이다.
#
# sdpa의 값은 길이가 늘어도 그대로다. 길이의 **제곱**으로 늘던 항이 통째로 사라졌다. 융합된 어텐션 커널은 s × s 행렬을 저장하지 않고 역전파에서 다시 계산한다. 그래서 **융합 커널이 골라졌을 때만** 이렇다.
# 오늘날의 transformers는 sdpa가 기본값이고 polyglot-ko는 T4에서도 융합 커널을 쓰므로, 순전파 상태는 길이에 **비례**해서만 늘어난다. T4에서 Llama나 Qwen처럼 그룹 쿼리(GQA)를 쓰는 모델은 그렇지 않다(4.3절). 배치 4에서 길이를 512, 1024, 2048로 늘리며 두 방법의 최대 메모리를 비교한다.

# %%
gpu_memory_sweep(batch_size=4, sequence_length=[512, 1024, 2048], attention=["eager", "sdpa"]).chart()

# %% [markdown] lang="ko"
# ## 3.10 allocated, reserved, 그리고 nvidia-smi
#
# 같은 순간에도 어디서 보느냐에 따라 숫자가 다르다.
#
# | 어디서 | 무엇을 세는가 |
# |---|---|
# | `torch.cuda.memory_allocated()` | 살아 있는 텐서와 작업 공간. 512바이트 단위로 올림한다. |
# | `torch.cuda.memory_reserved()` | 위의 것에, PyTorch가 다시 쓰려고 돌려주지 않은 캐시를 더한 것 |
# | `nvidia-smi` | 위의 것에, CUDA 컨텍스트(드라이버와 커널 코드)와 다른 프로세스를 더한 것 |
#
# 컨텍스트는 PyTorch가 쓸 수 없는 몫이다. 가상 GPU의 한도는 카드의 메모리에서 이 몫을 뺀 값이다. 카드마다 공개된 메시지에서 읽은 값이며, 출처는 `virtual_gpu/cards.json`에 있다.

# %%
from virtual_gpu.cards import CATALOG

t4 = CATALOG["T4"]
human_bytes(t4.memory_bytes), human_bytes(t4.capacity_bytes), human_bytes(t4.memory_bytes - t4.capacity_bytes)

# %% [markdown] lang="ko"
# `reserved`가 `allocated`보다 큰 것은 PyTorch가 텐서를 만들 때마다 드라이버에 메모리를 요청하지 않기 때문이다. **캐싱 할당자**(caching allocator)가 큰 덩어리(세그먼트, segment)를 받아 잘라 쓰고, 텐서가 사라져도 돌려주지 않고 두었다가 다시 쓴다. 규칙은 다음과 같다.
#
# - 1 MiB까지는 2 MiB짜리 세그먼트를, 10 MiB까지는 20 MiB짜리 세그먼트를 받아 잘라 쓴다. 그보다 크면 2 MiB의 배수로 딱 맞게 받는다.
# - 빈자리 가운데 들어갈 수 있는 가장 작은 것을 고른다. 이웃한 빈자리는 하나로 합친다.
# - 자리가 없으면 통째로 빈 세그먼트를 모두 돌려주고 다시 한번 청한다. 그래도 없으면 OOM이다.
#
# 가상 GPU도 이 규칙을 따른다. T4에서 배치를 13으로 한다. 오류 메시지의 "is reserved by PyTorch but unallocated"와 그림 위의 판정을 읽는다.

# %%
gpu_memory_experiment(batch_size=13, gpu="T4")

# %% [markdown] lang="ko"
# 텐서를 모두 합쳐도 13.91 GiB라서 한도 14.64 GiB보다 작다. 그런데도 OOM이 났다. 빈자리의 합은 넉넉하지만 여러 세그먼트에 흩어져 있어서 큰 텐서 하나를 놓을 곳이 없다. 이것이 **단편화**(fragmentation)다.
#
# 오류 메시지는 `PYTORCH_ALLOC_CONF=expandable_segments:True`를 권한다. 세그먼트를 크기가 정해진 여러 개로 두지 않고, 하나를 페이지 단위로 늘였다 줄였다 하는 설정이다. 같은 배치 13을 그 설정으로 다시 실행한다.

# %%
from virtual_gpu.counting.gpu import VirtualGPU

gpu_memory_experiment(batch_size=13, gpu=VirtualGPU(t4, expandable_segments=True))

# %% [markdown] lang="ko"
# 들어간다. 판정의 '예약'이 할당자가 드라이버에서 받은 최댓값이다. 다른 배치에서는 어떤지 세 값을 나란히 본다. 텐서의 최대, 한도가 없을 때의 예약, 설정을 켰을 때의 예약이다.

# %%
for batch_size in (4, 8, 12, 16):
    trace = predict_memory(batch_size=batch_size, gpu="T4").timeline.trace
    peaks = trace.peak_bytes, trace.reserved_peak(), trace.reserved_peak(expandable_segments=True)
    print(batch_size, *map(human_bytes, peaks), sep="   ")

# %% [markdown] lang="ko"
# > **주장 5.** "OOM이 나면 `expandable_segments:True`부터 켠다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 단편화로 못 쓰는 자리를 크게 줄이므로 아슬아슬하게 넘칠 때는 이것만으로 들어간다(배치 13). 텐서 자체가 한도보다 크면 소용없다(배치 16).
#
# </details>
#
# 진짜 GPU에서는 PyTorch가 GPU를 쓰기 전에 환경 변수로 정한다. 노트북이라면 런타임을 다시 시작하고, `import torch`보다 먼저 `%env PYTORCH_ALLOC_CONF=expandable_segments:True`를 실행한다(예전 PyTorch에서는 이름이 `PYTORCH_CUDA_ALLOC_CONF`다).
#
# 판정의 끝에 붙은 두 범위는 모르는 것의 크기다. 앞의 것은 카드의 용량(드라이버와 ECC 설정에 따라 다르다), 뒤의 것은 예약에 CUDA 컨텍스트와 규칙으로 알 수 없는 커널의 임시 메모리를 더한 값이다. 두 범위가 겹치면 들어갈 수도 아닐 수도 있으므로 판정이 "빠듯하게"로 바뀐다.
#
# ## 3.11 직접 바꿔 보기
#
# 설정을 바꾸면 필요한 메모리를 바로 예측해 그린다. **실행** 단추는 실험을 실제로 실행한다. 진짜 GPU를 쓰고 있다면 그 GPU에서, 아니면 고른 가상 GPU에서 돈다. 아래 그림은 처음 모습이다.
#
# ![배치 4로 학습할 때의 메모리 구성과 시간에 따른 변화. 최대 12.42 GiB로 T4의 한도 14.64 GiB 안에 들어간다.](../../image/03_batch_4_on_a_t4.svg)
#
# 이렇게 해 본다.
#
# - 배치 크기를 하나씩 올리면서 최대가 되는 때가 스텝에서 역전파로 옮겨 가는 곳을 찾는다.
# - 그 상태에서 체크포인팅을 켠다. 배치가 작을 때 켜면 왜 아무것도 줄지 않을까?
# - 모델을 Llama-3.1-8B로 바꾸고, 들어가는 GPU를 찾는다.

# %%
memory_panel()

# %% [markdown] lang="ko"
# ## 3.12 연습 문제
#
# 답을 채우고 실행하면 맞았는지, 틀렸다면 얼마나 틀렸는지 알려 준다. 막히면 `exercise("3-1").hint()`, 그래도 막히면 `exercise("3-1").solution()`을 실행한다.
#
# **3-1.** 파라미터 수와 혼합 정밀도 여부를 받아, AdamW로 학습할 때 파라미터, 그레이디언트, 옵티마이저 상태가 차지하는 바이트의 합을 돌려주는 함수를 완성하라.


# %%
def bytes_of_training(parameters, mixed):
    return ...


exercise("3-1").check(bytes_of_training)

# %% [markdown] lang="ko"
# **3-2.** 시퀀스 길이가 512일 때 T4에 들어가는 가장 큰 배치 크기는 얼마인가? (다른 설정은 기본값이다.) `predict_memory(batch_size=…, sequence_length=512, gpu="T4")`로 찾는다.

# %%
largest_batch = ...
exercise("3-2").check(largest_batch)

# %% [markdown] lang="ko"
# **3-3.** 예산은 8 GiB다. 배치 크기 8, 길이 256을 유지하고 Adam 계열 옵티마이저를 쓰면서, 설정을 되도록 적게 바꾸어 최대 메모리를 예산 안으로 넣어라.
# 바꿀 수 있는 것은 `optimizer`, `gradient_checkpointing`, `precision`, `attention`이다. 예를 들면 `{"optimizer": "adamw_fused"}`처럼 쓴다.

# %%
changes = ...
exercise("3-3").check(changes)

# %% [markdown] lang="ko"
# ## 3.13 기억할 것
#
# | 무엇 | 크기 | 언제 메모리에 있는가 | 줄이는 방법 |
# |---|---|---|---|
# | 파라미터 | 파라미터 수 × 바이트 (N) | 늘 | 양자화(2장), ZeRO-3(6장), QLoRA(8장) |
# | 그레이디언트 | N | 역전파부터 `zero_grad`까지 | ZeRO-2(6장), LoRA(8장) |
# | 옵티마이저 상태 | AdamW라면 2N, 혼합 정밀도에서는 8바이트 × 파라미터 수 | 첫 스텝부터 늘 | 8비트 AdamW, ZeRO-1(6장), LoRA(8장) |
# | 순전파 상태 | 층 수 × sbh × 몇십 바이트(이 모델은 약 34. 모델마다 다르다), 융합 어텐션이 아니면 길이의 제곱 항이 더해짐 | 순전파부터 역전파까지 | 작은 배치와 누적(4장), 체크포인팅(5장) |
# | 임시 텐서 | `foreach` AdamW라면 N | 스텝 안에서만 | `fused=True` |
#
# - 보아야 하는 것은 스텝 직후의 값이 아니라 **두 번째 스텝까지의 최댓값**이다.
# - 최대가 **스텝**에 있으면 옵티마이저를, **역전파의 시작**에 있으면 순전파 상태를 줄인다.
# - 메모리에 들어간다고 학습이 되는 것은 아니다. 순수 fp16과 AdamW의 조합은 첫 스텝에서 무너진다.
#
# 배치 16이 들어가지 않는다면 4씩 네 번 나누어 넣으면 어떨까? 결과가 정말 같을까? [4장](04_gradient_accumulation.ipynb)에서 답한다.
