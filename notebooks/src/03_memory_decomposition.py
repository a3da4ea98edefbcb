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
# 나머지는 무엇이 차지했을까? 바이트를 하나하나 센다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 학습에 필요한 메모리를 **파라미터**(parameter), **그레이디언트**(gradient), **옵티마이저 상태**(optimizer state), **순전파 상태**(activation)로 나누어 계산한다.
# - "CUDA out of memory" 메시지를 한 줄씩 읽고, 어느 텐서가 모자랐는지와 무엇부터 줄일지를 판단한다.
# - T4에서 Llama나 Qwen이 왜 유난히 메모리를 많이 쓰는지 알고 한 줄로 고친다.
#
# 0장처럼 GPU가 있으면 그 GPU에서 측정하고, 없으면 **가상 T4**에서 같은 코드를 실행한다. 저장된 출력은 가상 T4의 것이다. 예측이 진짜 GPU와 얼마나 다른지는 9장에 있다.
#
# 먼저 쓸 GPU를 고른다. 출력은 GPU의 이름과 쓸 수 있는 메모리다.

# %%
import torch

from helpers import (
    case,
    cleanup,
    count_parameters,
    estimate_memory_of_gradients,
    estimate_memory_of_optimizer,
    exercise,
    gpu_memory_experiment,
    gpu_memory_sweep,
    guess,
    guesses,
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
# 한국어 언어 모델 polyglot-ko-1.3b를 배치 크기 16, 길이 256토큰으로 학습한다. 데이터는 아무 뜻 없는 토큰이고, 옵티마이저 스텝은 두 번 실행한다.
# 0장에서 본 그 오류다. 가중치는 2.48 GiB뿐이다. 한도가 없는 GPU였다면 **순전파 상태**(역전파에 쓰려고 남겨 두는 중간 결과)와 임시 텐서, 곧 그림의 분홍색은 최대인 순간에 몇 GiB였을까? 아래 `None` 대신 숫자를 적고 실행한다.

# %%
batch_16 = guess("3.1", None, "GiB")
batch_16

# %% [markdown] lang="ko"
# 이제 실행한다(GPU의 메모리가 16 GB보다 크면 `gpu="T4"`를 넣는다. 가상 T4에서 실행된다). 첫 스텝은 무사히 끝난다. 그다음에 무슨 일이 생기는가?

# %%
report = gpu_memory_experiment(batch_size=16)

# %% [markdown] lang="ko"
# 첫 스텝이 끝났을 때는 9.941 GB였는데 다음 스텝에서 한도를 넘었다. 오류는 잡혀서 보고서가 되었고, 마지막 줄을 보면 메모리는 모두 되돌아왔다.
# 한도가 없는 GPU였다면 순전파 상태는 얼마였을까? 예상과 견준다.

# %%
without_limit = predict_memory(batch_size=16)
batch_16.against(without_limit.at_peak["activations"])

# %% [markdown] lang="ko"
# 0장에서 본 그림에서는 둘째 순전파의 분홍색이 한도에 **닿기도 전에** 끊겼다. 왜 닿기 전에 멈췄는지는 3.10절에서 밝힌다.
#
# **연습 3-1.** 오류 메시지는 470.00 MiB를 할당하려다 실패했다고 한다. 어떤 텐서일까? 이 실험에 나오는 수는 배치 크기 16, 길이 256, 은닉층 크기 2048, 헤드 16개, MLP의 폭 8192, 어휘 30080이고, 숫자 하나는 2바이트(fp16)나 4바이트(fp32)다.
# 이 가운데 곱해서 470 MiB가 되는 수들을 목록에 적는다. 막히면 `exercise("3-1").hint()`, 그래도 막히면 `exercise("3-1").solution()`을 실행한다.

# %%
sizes = [..., ..., ..., ...]
exercise("3-1").check(sizes)

# %% [markdown] lang="ko"
# 이제 파라미터(파랑), 그레이디언트(주황), 옵티마이저 상태(초록), 순전파 상태(분홍)를 하나씩 메모리에 올린다.
#
# ## 3.2 파라미터
#
# 모델을 불러온다. 가상 GPU에서는 가중치 없이 구조만 만든다. `print_gpu_utilization`은 지금 텐서들이 차지하는 메모리(`torch.cuda.memory_allocated`)를 출력한다.

# %%
model, tokenizer = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b")
print_gpu_utilization()

# %% [markdown] lang="ko"
# > **주장 1.** "모델 크기 = 파라미터 수 × 바이트" (출처: 책 5장을 정리한 글)
#
# 이 모델은 16비트 부동소수점(fp16)으로 저장되어 있으므로 파라미터 하나에 2바이트다. 계산한 값과, 실제로 할당된 메모리가 그보다 몇 바이트나 큰지 출력한다.

# %%
n = count_parameters(model)
print(f"{n:,} x 2 = {n * 2:,} bytes = {n * 2 / 1024**3:.3f} GiB = {n * 2 / 1e9:.3f} GB")
print(f"{gpu.memory_allocated() - n * 2:,} bytes")

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 할당된 메모리가 1 MiB쯤 크다. 작은 버퍼와, 할당자가 큰 덩어리에서 잘라 내지 않고 붙여 준 자투리다(3.10절).
#
# </details>
#
# 같은 바이트가 두 가지 숫자로 나왔다. 1장에서 본 GB와 GiB의 차이다. `print_gpu_utilization`의 "GB"는 책의 형식대로 2³⁰으로 나눈 값이다.
#
# ## 3.3 그레이디언트
#
# 배치 하나로 순전파와 역전파를 한다. `with gpu:` 블록은 그 GPU에서 실행하라는 뜻이고, `use_cache=False`는 글을 생성할 때나 쓰는 키와 값의 캐시를 끈다. 순전파가 끝난 뒤와 역전파가 끝난 뒤의 값에서 파라미터를 빼면 저마다 얼마가 남는가?

# %%
dataset = make_dummy_dataset()
batch = gpu.place(dataset[:4])
with gpu:
    loss = model(**batch, use_cache=False).loss
print_gpu_utilization()
with gpu:
    loss.backward()
print_gpu_utilization()
human_bytes(estimate_memory_of_gradients(model)), human_bytes(n * 2)

# %% [markdown] lang="ko"
# 순전파가 끝나자 1.7 GiB쯤 늘었다. 역전파에 쓰려고 간직한 중간 결과, 곧 **순전파 상태**(activation)다. 역전파가 끝나면 이것은 사라지고 **그레이디언트**(gradient)가 남는다.
# 그레이디언트는 파라미터마다 하나씩, 같은 자료형으로 생긴다. 그래서 마지막 줄의 두 크기가 같다.
#
# ## 3.4 옵티마이저 상태
#
# AdamW는 파라미터마다 그레이디언트의 이동 평균(모멘텀, momentum)과 제곱의 이동 평균(분산, variance)을 기억한다. 이것이 **옵티마이저 상태**(optimizer state)다.
# 상태는 언제 생길까? 옵티마이저를 만든 뒤와 첫 스텝을 실행한 뒤의 메모리를 차례로 출력한다.

# %%
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
print_gpu_utilization()
optimizer.step()
print_gpu_utilization()
human_bytes(estimate_memory_of_optimizer(optimizer))

# %% [markdown] lang="ko"
# 만드는 순간이 아니라 **첫 스텝을 실행하는 순간**에 생긴다. `foreach=True`는 GPU에서 AdamW의 기본값이다(CPU에서는 아니므로 적어 주었다). 이 값이 메모리에 무슨 일을 하는지는 3.7절에서 본다.
#
# ## 3.5 N, 2N, 4N
#
# **저장된 가중치의 바이트**를 N이라 하자. 그레이디언트가 N, AdamW의 상태가 2N이므로 합은 4N이고, 여기에 순전파 상태가 더해진다.
# 지금 메모리에 있는 것은 4N과 얼마나 다른가?

# %%
print(f"4N = {4 * n * 2 / 1024**3:.3f}")
print_gpu_utilization()

# %% [markdown] lang="ko"
# 두 값의 차이 0.020 가운데 0.016은 행렬곱 라이브러리인 cuBLAS의 작업 공간(workspace)이고, 나머지는 앞에서 본 자투리다. 행렬곱을 한 번이라도 실행한 스레드마다 8.125 MiB(T4에서 PyTorch의 기본값. Hopper에서는 더 크다)를 잡아 두는데, 순전파와 역전파가 서로 다른 스레드에서 돌아 두 개가 생긴다.
#
# 다음 실험을 위해 메모리를 비운다. `cleanup`은 GPU의 텐서를 붙들고 있는 노트북 변수를 모두 지우고 그 이름을 알려 준다. 작업 공간까지 돌려주므로 0이 된다.

# %%
cleanup()
print_gpu_utilization()

# %% [markdown] lang="ko"
# > **주장 2.** "학습에는 적어도 4N이 필요하다" (출처: 책 5장을 정리한 글)
#
# 옵티마이저만 바꾸어 본다. `gpu_memory_sweep`은 목록으로 준 설정을 하나씩 실행해 표로 만든다. 어느 열이 달라지는가?

# %%
by_optimizer = gpu_memory_sweep(batch_size=4, optimizer=["adamw", "adamw_8bit", "adafactor", "sgd"])
by_optimizer

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 모든 파라미터를 AdamW로 학습할 때만 그렇다. 그때는 순수 16비트든 PyTorch의 혼합 정밀도든 4N이고, N 자체가 달라진다(3.8절).
# 상태를 8비트로 줄이면 파라미터마다 2바이트, 곧 16비트 가중치라면 2N이 N이 되고(블록마다 스케일을 따로 둔다. Dettmers 외, 2021. `Trainer`는 임베딩의 상태만 fp32로 남긴다), 제곱 평균을 행과 열로만 기억하는 Adafactor나 상태가 없는 SGD는 0에 가깝다. `torch.optim.Muon`은 행렬마다 상태를 하나만 둔다(3.16절에서 여럿을 식으로 견준다).
# 따라서 2N이면 되는 학습도 있다. 학습하는 파라미터를 줄이는 LoRA는 그보다 더 줄인다(8장). 여기서는 메모리만 비교했다. 같은 만큼 배우는지는 재지 않았다.
#
# </details>
#
# ## 3.6 배치 크기를 늘리면
#
# 이제 책의 실험이다. `gpu_memory_experiment`는 모델을 불러와 `train_model`로 학습하고, 첫 스텝 직후의 메모리를 책과 같은 형식으로 출력한 뒤 모두 정리한다.

# %%
report = gpu_memory_experiment(batch_size=4)

# %% [markdown] lang="ko"
# `train_model`의 뼈대는 평범한 학습 루프다.
#
# ```python
# for batch in DataLoader(dataset, batch_size):
#     loss = model(**gpu.place(batch)).loss   # 순전파
#     loss.backward()                         # 역전파
#     optimizer.step()                        # 스텝
#     optimizer.zero_grad()
# ```
#
# > **주장 3.** "배치 크기를 늘려도 모델, 그레이디언트, 옵티마이저 상태는 그대로다" (출처: 책 5장을 정리한 글)
#
# 배치 크기 8과 16을 더 실행해 앞의 4와 나란히 놓는다. 배치를 키워도 변하지 않는 열과 변하는 열을 나눈다.

# %%
by_batch = gpu_memory_sweep(batch_size=[8, 16])
by_batch.insert(0, report)
by_batch

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 세 열은 그대로다. 변한 것은 '최대'와 그때인데, 4와 8에서는 최대마저 같다. (16은 도중에 멈췄으므로 한도가 없을 때의 최대를 적은 것이다.) 까닭은 3.7절에 있다.
#
# </details>
#
# 그런데 표에는 이상한 점이 있다. '첫 스텝 직후'는 배치를 4배로 키워도 9.94 GiB 그대로라서 T4에 넉넉히 들어갈 것 같다. 왜 메모리가 부족했을까?
#
# ## 3.7 출력된 숫자가 감추는 것: 최대 메모리
#
# `memory_allocated`는 **부른 순간**의 값이다. 책의 코드는 그것을 스텝 직후에 한 번 부른다. 그때는 순전파 상태가 이미 사라진 뒤다. GPU가 감당해야 하는 것은 그 사이의 **최댓값**, 곧 최대 메모리(peak memory, `max_memory_allocated`)다.
# 배치 4를 단계별로 나눈다. 여섯 줄은 두 스텝의 순전파, 역전파, 스텝이다. 최대는 어느 줄에 있는가?

# %%
report.phases()

# %% [markdown] lang="ko"
# 1. **두 번째 순전파와 역전파는 첫 번째보다 약 5 GiB 높다.** 옵티마이저 상태가 첫 스텝에서 생기므로, 두 번째 순전파부터는 그것을 깔고 시작한다. 한 스텝만 돌려 보고 안심하면 안 되는 까닭이다.
# 2. **배치가 작을 때의 최대는 스텝 안에 있다.** AdamW의 `foreach` 구현은 파라미터를 하나씩 갱신하지 않고 모두 모아 한 번에 갱신한다. 그래서 임시 텐서도 파라미터 전체의 크기(N)로 생긴다.
#
# 2번의 임시 텐서는 0장에서 `zoom()`으로 열어 보았다. `adam.py`의 `_foreach_sqrt`가 파라미터마다 하나씩 만든 제곱근의 사본이고, 모두 합쳐 N이다.
#
# 이것은 바로 고칠 수 있다. 융합(fused) 구현은 임시 텐서 없이 커널 하나로 갱신한다. 12.42 GiB였던 최대는 얼마가 될까?

# %%
without_temporaries = guess("3.7", None, "GiB")
without_temporaries

# %% [markdown] lang="ko"
# 힌트는 위의 표에 있다. 임시 텐서가 사라지면 어느 줄이 가장 높은가?

# %%
fused = gpu_memory_experiment(batch_size=4, optimizer="adamw_fused")
without_temporaries.against(fused.peak_bytes)

# %% [markdown] lang="ko"
# 출력된 줄은 아까와 똑같은데 최대 메모리는 옵션 하나로 N만큼 줄었다. 임시 텐서가 사라지자 둘째로 높던 역전파가 최대가 되었다. transformers의 `Trainer`는 이미 이것을 기본값으로 쓴다(`optim="adamw_torch_fused"`, 3.16절에서 확인한다).
#
# 내 학습 루프에서 같은 값을 얻으려면 루프 앞에 `torch.cuda.reset_peak_memory_stats()`를, 뒤에 `torch.cuda.max_memory_allocated()`를 적는다.
#
# 배치 16에서는 사정이 다르다. 최대는 순전파 상태가 가득 찬 채 역전파가 시작되는 순간에 있다. 3.1절에서 쓴 `predict_memory`의 그림에서 확인한다. `predict_memory`는 한도가 없는 GPU라고 치고 층 몇 개만 실행한다. 메모리가 층 수에 비례하는지 확인하고, 전체 층의 값을 계산한다.

# %%
without_limit

# %% [markdown] lang="ko"
# 필요한 양이 T4의 한도를 0.61 GiB 넘을 뿐이다. 배치 크기를 유지하면서 이것을 줄이는 방법이 4장의 **그레이디언트 누적**과 5장의 **그레이디언트 체크포인팅**이다. 체크포인팅, 체크포인팅과 융합 AdamW, 누적의 차례로 미리 예측한다. 최대인 때가 어디인지도 읽는다.

# %%
from virtual_gpu.report import MemoryTable

checkpointed = dict(batch_size=16, gradient_checkpointing=True)
ways = (checkpointed, checkpointed | {"optimizer": "adamw_fused"}, dict(batch_size=4, gradient_accumulation_steps=4))
MemoryTable(predict_memory(**way) for way in ways)

# %% [markdown] lang="ko"
# 체크포인팅과 누적은 순전파 상태를 줄였지만 최대는 둘 다 12.42 GiB에서 멈췄다. 최대가 스텝으로 옮겨 가 `foreach`의 임시 텐서가 남았기 때문이다. 융합 구현까지 쓰면 그것도 사라진다. **하나를 줄이면 최대는 다른 곳으로 옮겨 간다.** 무엇을 줄일지는 최대가 지금 어디에 있는지를 보고 정한다.
#
# ## 3.8 들어가는 것과 학습되는 것은 다르다
#
# 지금까지는 책을 따라 순수 fp16 가중치를 AdamW로 학습했다. 메모리 실험으로는 옳다. 그런데 학습도 될까?
# AdamW의 식에는 아주 작은 수가 둘 나온다. 분모가 0이 되지 않도록 더하는 ε = 10⁻⁸, 그리고 제곱의 이동 평균에 더해지는 0.001 × (그레이디언트)²이다. 뒤의 것은 그레이디언트가 0.005라고 하고, 두 수를 fp16과 bf16에 담는다.

# %%
small = torch.tensor([1e-8, 0.001 * 0.005**2])
small.half(), small.bfloat16()

# %% [markdown] lang="ko"
# fp16에서는 둘 다 0이 되었다. AdamW는 √(제곱의 이동 평균) + ε으로 나누는데, 둘 다 0이니 나누는 수도 0이 된다. 정말 무너지는지, 융합 구현이라면 나은지는 3.16절에서 네 가지를 300스텝씩 학습해 본다.
#
# bf16은 두 수를 다 담지만 다른 문제가 있다. 1.5절에서 학습률 10⁻⁵의 갱신은 가중치의 16%만 움직였다. 나머지에서는 **흡수**되어 사라졌다. 그래서 다음 가운데 하나를 고른다.
#
# - **fp32 가중치를 두는 혼합 정밀도**(mixed precision): 가장 안전하고, 메모리는 두 배다.
# - **순수 bf16**: 확률적 반올림이나 Kahan 합으로 작은 갱신을 모으는 옵티마이저와 함께 쓴다(1.5절). T4에는 bf16 연산 장치가 없다는 점에도 주의한다(1장).
# - 학습하는 파라미터만 fp32로 두는 **LoRA**(8장).
#
# ### 파라미터 하나에 16바이트
#
# 혼합 정밀도에서는 파라미터 하나에 몇 바이트가 들까? ZeRO 논문(Rajbhandari 외, 2020)은 fp16 가중치 2 + fp16 그레이디언트 2 + fp32 가중치, 모멘텀, 분산 각 4로 **16바이트**라고 센다.
# PyTorch의 `autocast`는 어떻게 나누는지, 배치 1로 순수 fp16과 비교한다. 앞의 네 열은 파라미터 하나의 바이트, 마지막 열은 첫 순전파가 끝났을 때의 순전파 상태다.

# %%
from helpers.chapters.c3_memory.tables import table

rows = []
for precision in ("fp16", "mixed_fp16"):
    ran = predict_memory(batch_size=1, precision=precision, gpu="A100-40GB")
    kinds = [nbytes / n for nbytes in (ran.parameters_bytes, ran.gradients_bytes, ran.optimizer_bytes)]
    rows.append([precision, *kinds, sum(kinds), human_bytes(ran.timeline.at_end(0)["activations"])])
table("name parameters gradients optimizer together after_forward", rows)

# %% [markdown] lang="ko"
# 나누는 방법은 다르지만 합은 마찬가지로 16이다. 저장된 가중치를 N(4바이트)이라 하면 여기서도 4N이다.
#
# 마지막 열도 눈여겨볼 만하다. 배치가 1뿐인데 혼합 정밀도가 2.4 GiB쯤 더 든다. 대부분 `autocast`가 곱하려고 만든 **fp16 가중치 사본**이다. 역전파에서 다시 쓰려고 남기므로 순전파 상태로 세어진다. 배치를 줄여도 줄지 않는 분홍색이다.
#
# 그래서 제대로 된 혼합 정밀도로는 배치 크기 1이라도 T4에 들어가지 않는다. 얼마나 모자라는가?

# %%
predict_memory(batch_size=1, precision="mixed_fp16")

# %% [markdown] lang="ko"
# 24.84 GiB가 필요하니 10.2 GiB 모자란다. 파라미터, 그레이디언트, 옵티마이저 상태만 더해도 T4의 한도를 넘는다. 배치를 줄여서 될 일이 아니다. 상태를 여러 GPU로 나누거나([6장](06_distributed_zero.ipynb)), 학습할 파라미터를 줄이거나([8장](08_lora.ipynb)), 8비트 AdamW와 체크포인팅을 함께 쓴다. 그 조합은 [처방 한 장](../../docs/cheat_sheet.md)에 있다.
#
# **연습 3-2.** (3-3과 3-4는 3.16절에 있다.) 예산은 8 GiB다. 배치 크기 8, 길이 256을 유지하고 Adam 계열 옵티마이저를 쓰면서, 설정을 **되도록 적게** 바꾸어 최대 메모리를 예산 안으로 넣어라.
# 바꿀 수 있는 것은 `optimizer`, `gradient_checkpointing`, `precision`, `attention`이다. 예를 들면 `{"optimizer": "adamw_fused"}`처럼 쓴다.

# %%
changes = ...
exercise("3-2").check(changes)

# %% [markdown] lang="ko"
# ## 3.9 순전파 상태의 크기
#
# 순전파 상태는 무엇에 따라 커질까? 책은 배치 크기, 시퀀스 길이(sequence length), 은닉층 크기(hidden size)를 든다. 배치 16, 길이 256에는 15.25 GiB가 필요했다. 배치를 4로 줄이고 길이를 1024로 늘리면 얼마일까?

# %%
same_tokens = guess("3.9", None, "GiB")
same_tokens

# %% [markdown] lang="ko"
# 길이를 네 가지로 바꾸고, 어텐션도 두 가지로 계산한다. eager는 점수 행렬(토큰 쌍마다 점수를 적은 길이 × 길이 행렬)을 그대로 만드는 옛 방법이고, sdpa는 어텐션을 커널 하나로 계산하는 PyTorch의 `scaled_dot_product_attention`이다.

# %%
lengths = (256, 512, 1024, 2048)
runs = {
    (length, attention): predict_memory(batch_size=4, sequence_length=length, attention=attention)
    for attention in ("eager", "sdpa")
    for length in lengths
}
same_tokens.against(runs[1024, "sdpa"].needed_bytes)

# %% [markdown] lang="ko"
# 배치 16 × 길이 256과 똑같다. 토큰의 수(4096)가 같기 때문이다. 길이를 더 늘려도, eager로 계산해도 그럴까?

# %%
from helpers.chapters.c3_memory.figures import lengths_chart

lengths_chart(runs)

# %% [markdown] lang="ko"
# - **sdpa**에서는 3N(7.44 GiB) 위에 얹힌 몫이 토큰의 수에 비례한다. 1024에서 15.25 - 7.44 = 7.81, 2048에서 23.04 - 7.44 = 15.60으로 두 배다. 짧은 쪽에서는 최대가 스텝에 있어 평평하다.
# - 4N이 아니라 **3N**인 것은 역전파가 시작될 때 그레이디언트가 아직 없기 때문이다. 앞 스텝의 것은 `zero_grad`가 지웠다.
# - **eager**에서는 거기에 길이의 **제곱**에 비례하는 항이 더해진다. 1024에서 2048로 갈 때 sdpa는 15.25에서 23.04로, eager는 23.49에서 57.53으로 늘었다.
#
# 층 하나가 역전파를 위해 간직하는 텐서를 모두 늘어놓는다. 마지막 열은 바이트를 s(길이) × b(배치) × h(은닉층 크기)로 나눈 것이다. 합은 얼마인가? 6바이트짜리 하나는 무엇일까?

# %%
from helpers.chapters.c3_memory.attention import grouped_heads, kept_by_a_layer

kept_by_a_layer("EleutherAI/polyglot-ko-1.3b")

# %% [markdown] lang="ko"
# 34바이트다. 토큰 하나가 층 하나를 지날 때마다 h의 34배 바이트가 남는다. 6바이트짜리는 `query_key_value`의 출력이다. 쿼리, 키, 값을 한 번에 만든 텐서인데, 값(2바이트)이 그 일부를 가리키는 뷰(view)라서 통째로(6바이트) 붙들려 있다. 논문의 식과는 3.16절에서 맞추어 본다.
#
# ### Llama는 34가 아니라 53
#
# 34는 규칙이 아니라 이 모델의 값이다. 같은 표를 A100의 Llama-3.2-1B로 만든다(T4로 하지 않는 까닭은 3.12절에 있다). 어디가 두꺼워졌는가?

# %%
kept_by_a_layer("meta-llama/Llama-3.2-1B", "A100-40GB")

# %% [markdown] lang="ko"
# 두 군데다. RMSNorm(Llama의 정규화 층)은 fp32로 계산하려고 입력을 4바이트 사본으로 바꾸어 간직하고(층마다 두 번), SwiGLU(두 갈래를 곱하는 MLP)는 폭 8192의 텐서를 둘이 아니라 넷 간직한다. 대신 키와 값은 헤드가 적어 0.5바이트씩이다.
# 두 표에 길이의 제곱 항이 없는 것은 sdpa의 커널이 s × s 행렬을 저장하지 않고 역전파에서 다시 계산하기 때문이다. 이렇게 여러 연산을 커널 하나로 합쳐 중간값을 남기지 않는 것을 **융합 커널**이라 한다. sdpa라면 언제나 그런지는 3.12절에서 시험한다.
#
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
# 컨텍스트는 PyTorch가 쓸 수 없는 몫이다. 그래서 "16 GB"라는 T4에서 PyTorch가 말하는 총량과 정말 쓸 수 있는 양이 다르다. 가상 GPU의 한도는 카드의 메모리에서 이 몫을 뺀 값이고, 카드마다 공개된 메시지에서 읽었다(출처는 `virtual_gpu/cards.json`).
#
# `reserved`가 `allocated`보다 큰 것은 PyTorch가 텐서를 만들 때마다 드라이버에 메모리를 요청하지 않기 때문이다. **캐싱 할당자**(caching allocator)가 큰 덩어리(세그먼트, segment)를 받아 잘라 쓰고, 텐서가 사라져도 돌려주지 않고 두었다가 다시 쓴다. 규칙은 다음과 같다.
#
# - 1 MiB까지는 2 MiB짜리 세그먼트를, 10 MiB까지는 20 MiB짜리 세그먼트를 받아 잘라 쓴다. 그보다 크면 2 MiB의 배수로 딱 맞게 받는다.
# - 빈자리 가운데 들어갈 수 있는 가장 작은 것을 고른다. 이웃한 빈자리는 하나로 합친다.
# - 1 MiB보다 큰 텐서를 놓고 남을 자리가 1 MiB 이하면 자르지 않고 통째로 준다. 이렇게 딸려 간 것이 **자투리**다. 뒤에 나오는 `expandable_segments`를 켜면 이것까지 잘라 쓴다.
# - 자리가 없으면 통째로 빈 세그먼트를 모두 돌려주고 다시 한번 요청한다. 그래도 없으면 OOM이다.
#
# 가상 GPU도 이 규칙을 따른다. T4에서 배치를 13으로 한다. 텐서를 모두 합친 값과 한도 가운데 어느 쪽이 큰가?

# %%
batch_13 = gpu_memory_experiment(batch_size=13, gpu="T4")
batch_13

# %% [markdown] lang="ko"
# 끊길 때까지의 최대는 13.30 GiB이고, 한도가 없어 끝까지 갔더라도 텐서는 모두 13.91 GiB라서 한도 14.64 GiB보다 작다. 그런데도 OOM이 났다. 빈자리의 합은 넉넉하지만 여러 세그먼트에 흩어져 있어서 큰 텐서 하나를 놓을 곳이 없다. 이것이 **단편화**(fragmentation)다. 0장의 배치 16 그림이 한도에 닿기 전에 끊긴 것도 같은 까닭이다. 14.10 GiB에 470 MiB를 더해도 한도보다 작았다.
#
# ### OOM 메시지를 한 줄씩 읽기
#
# `read_oom`은 메시지의 수를 하나씩 떼어 뜻을 붙인다. 여러분이 받은 메시지를 문자열로 넣어도 된다. 요청한 크기와 빈자리 가운데 어느 쪽이 큰가?

# %%
from helpers.chapters.c3_memory.oom import read_oom

read_oom(batch_13.error)

# %% [markdown] lang="ko"
# 요청은 382 MiB인데 빈자리는 1 GiB에 가깝다.
#
# 그 순간을 들여다본다. 왼쪽은 지금 설정, 오른쪽은 곧 켜 볼 `expandable_segments:True`다. 위에서 아래로, 한 줄이 512 MiB다. 색은 텐서가 있는 블록, 옅은 살구색은 예약했지만 비어 있는 자리, 흰 선은 세그먼트의 경계다. 위의 세 막대를 비교한다. 요청이 가장 큰 빈자리에 들어가는가?
#
# 슬라이더는 두 번째 스텝의 요청을 하나씩 지난다. 왼쪽 화살표로 거슬러 올라가며, 빈자리가 잘게 나뉘는 때를 찾는다.

# %%
from helpers import allocator_panel

allocator_panel(batch_size=13)

# %% [markdown] lang="ko"
# 왼쪽의 빈자리를 모두 합치면 요청보다 크지만 가장 큰 하나는 66 MiB다. 세그먼트 442개에 흩어져 있고, 한 세그먼트의 빈자리는 다른 세그먼트의 빈자리와 합쳐지지 않는다. 오른쪽에서도 가장 큰 빈자리는 26 MiB라서 요청이 들어가지 않는다. 그러나 못 쓰는 빈자리가 모두 142 MiB뿐이라 드라이버에 1.29 GiB가 남아 있고, 세그먼트를 끝에서 늘여 요청을 놓는다. (세 막대는 요청을 놓기 직전, 제목의 '예약 13.74 GiB'는 놓은 뒤의 값이다.) **OOM의 순간으로**를 누르면 처음 모습으로 돌아온다.
#
# 메시지가 권하는 `PYTORCH_ALLOC_CONF=expandable_segments:True`는 세그먼트를 크기가 정해진 여러 개로 두지 않고, 하나를 페이지 단위로 늘였다 줄였다 하는 설정이다. 같은 배치 13을 그 설정으로 다시 실행한다.

# %%
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU

gpu_memory_experiment(batch_size=13, gpu=VirtualGPU(CATALOG["T4"], expandable_segments=True))

# %% [markdown] lang="ko"
# 들어간다. 판정의 '예약'이 할당자가 드라이버에서 받은 최댓값이다. 최대가 13.91이 아니라 13.79 GiB인 것은 이 설정에서는 자투리(3.2절)까지 잘라 쓰기 때문이다.
#
# > **주장 4.** "OOM이 나면 `expandable_segments:True`부터 켠다" (PyTorch의 OOM 메시지가 권한다. 메시지에는 '예약했지만 비어 있는 메모리가 크면'이라는 조건이 붙어 있다)
#
# 배치마다 텐서의 최대, 한도가 없을 때의 예약, 설정을 켰을 때의 예약을 나란히 놓는다. 설정을 켜서 한도 14.64 GiB 안으로 들어오는 줄과 그래도 넘는 줄을 가른다.

# %%
rows = []
for batch_size in (4, 8, 12, 13, 16):
    ran = predict_memory(batch_size=batch_size, gpu="T4")
    reserved = [ran.timeline.trace.reserved_peak(expandable_segments=how) for how in (False, True)]
    rows.append([batch_size, *map(human_bytes, [ran.needed_bytes, *reserved])])
table("batch allocated reserved expandable", rows)

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 단편화로 못 쓰는 자리를 크게 줄이므로 아슬아슬하게 넘칠 때는 이것만으로 들어간다(배치 13). 텐서 자체가 한도보다 크면 소용없다(배치 16).
# 배치 12처럼 한도가 없을 때의 예약이 한도를 넘는다고 꼭 OOM이 나는 것은 아니다. 할당자는 OOM을 내기 전에 빈 세그먼트를 돌려준다. 배치 12가 어떤지는 `gpu_memory_experiment(batch_size=12, gpu="T4")`로 확인한다.
#
# </details>
#
# 진짜 GPU에서는 PyTorch가 GPU를 쓰기 전에 환경 변수로 정한다. 노트북이라면 런타임을 다시 시작하고, `import torch`보다 먼저 `%env PYTORCH_ALLOC_CONF=expandable_segments:True`를 실행한다(예전 PyTorch에서는 이름이 `PYTORCH_CUDA_ALLOC_CONF`다).
#
# 판정 끝의 두 범위는 이 예측이 얼마나 불확실한지를 나타낸다. 앞의 것은 카드의 용량(드라이버와 ECC 설정에 따라 다르다), 뒤의 것은 예약에 CUDA 컨텍스트와 커널의 임시 메모리를 더한 값이다. 두 범위가 겹치면 판정이 "빠듯하게"로 바뀐다.
#
# ## 3.11 두 OOM의 범인: 로짓과 손실
#
# 이 장의 두 OOM은 470.00 MiB와 382.00 MiB를 할당하다가 났다. 연습 3-1을 풀었다면 무엇인지 안다. 배치 × 길이 × 어휘 × 4바이트, **로짓**(logit, 어휘의 단어마다 매긴 점수)과 크기가 같은 fp32 텐서다. 손실을 계산하려면 로짓을 fp32로 바꾸고, 같은 크기의 로그 소프트맥스를 만든다. 둘 가운데 어느 것에서 넘쳤는지는 크기만으로 가르지 못한다. (13 × 256 × 30080 × 4 = 381.9 MiB를 할당자가 2 MiB의 배수로 올렸다.)
# 배치 16의 최대에는 이런 것이 몇 벌이나 있을까? 최대인 순간에 메모리에 있던 순전파 상태를 크기별로 센다.

# %%
from helpers.chapters.c3_memory.tables import largest_at_peak

largest_at_peak(without_limit)

# %% [markdown] lang="ko"
# 470 MiB짜리가 **세 벌**, 합해서 1.38 GiB다. `zoom().to_frame()`은 그 순간에 살아 있는 텐서를 한 줄에 하나씩 pandas 표로 준다. 층 밖의 것만 고르면 누가 만들었는지 나온다.

# %%
alive = without_limit.zoom().to_frame()
loss = alive[(alive.category == "activations") & (alive.layer == "")]
loss[["phase", "operation", "shape", "dtype", "nbytes", "line"]]

# %% [markdown] lang="ko"
# 모두 transformers의 손실 코드 한 줄이다. 순전파가 남긴 로그 소프트맥스, 손실이 돌려준 그레이디언트, 그것을 로짓의 그레이디언트로 바꾼 것이다. (64 MiB 48개는 3.9절의 폭 8192인 텐서, 48 MiB 24개는 6바이트짜리다.)
#
# 3만 어휘에서 이렇다. 어휘가 128,256개인 Llama-3.2-1B라면 4,096토큰의 손실 하나에 얼마가 들까? `whole_loss`는 transformers처럼 로짓을 한꺼번에 만들어 fp32로 바꾼다. 출력은 입력 말고 더 드는 메모리와 행렬곱의 양, 그리고 로짓 크기의 fp32 텐서 세 벌의 크기다.

# %%
from helpers.chapters.c3_memory.losses import loss_cost, loss_error, whole_loss

loss_cost(whole_loss), human_bytes(3 * 4096 * 128256 * 4)

# %% [markdown] lang="ko"
# 거의 모두가 그 세 벌이다. 토큰의 손실은 서로 섞이지 않으므로 한꺼번에 만들 까닭이 없다. 토큰을 조각으로 나누어 계산하면 그만큼 줄고, 이미 만들어진 것이 있다.
#
# | 어디서 | 어떻게 켜는가 |
# |---|---|
# | PyTorch 2.13 | `torch.nn.functional.linear_cross_entropy(…, options=torch.nn.LinearCrossEntropyOptions())` |
# | Liger Kernel | transformers의 `TrainingArguments(use_liger_kernel=True)` |
# | TRL | SFT의 기본값이다. 1.16에서는 `loss_type="nll"`, 1.10에서는 `"chunked_nll"`이라고 부른다 |
#
# 가상 GPU는 이런 커널의 속을 보지 못하므로 여기서는 메모리를 재지 않는다. TRL의 것은 커널 밖에서 할당하므로 셀 수 있고, 그 덕에 T4에 들어가는 14B 모델이 9.12절에 있다. 조각으로 나눈 손실을 직접 써서 재는 것은 3.16절에 있다. `Trainer`의 기본값은 여전히 로짓을 한꺼번에 만든다.
#
# ## 3.12 T4의 함정: 그룹 쿼리
#
# > **주장 5.** "sdpa를 쓰면 어텐션의 메모리는 길이에 비례한다"
#
# polyglot-ko에서는 그랬다. 요즘 모델로 바꾸어 보자. Llama-3.2-1B를 배치 1, 길이 2048로 학습하는 데 A100에서는 다음만큼 든다.

# %%
llama = dict(model_id="meta-llama/Llama-3.2-1B", precision="fp16", optimizer="adamw_fused", batch_size=1)
human_bytes(predict_memory(**llama, sequence_length=2048, gpu="A100-40GB").needed_bytes)

# %% [markdown] lang="ko"
# GPU만 T4로 바꾸면 얼마가 필요할까?

# %%
on_t4 = guess("3.12", None, "GiB")
on_t4

# %% [markdown] lang="ko"
# 모델도 길이도 자료형도 같다.

# %%
on_t4.against(predict_memory(**llama, sequence_length=2048, gpu="T4").needed_bytes)

# %% [markdown] lang="ko"
# 어느 텐서가 늘었는지 3.9절의 표를 T4에서 다시 만든다. A100의 표에 없던 줄을 찾는다.

# %%
kept_by_a_layer("meta-llama/Llama-3.2-1B", "T4")

# %% [markdown] lang="ko"
# `self_attn`의 (4, 32, 1024, 1024)가 범인이다. 배치 × 헤드 × **길이 × 길이**의 fp32 확률 행렬이다. 층 하나가 53이 아니라 126이 되었다. 늘어난 73 가운데 64가 이 행렬이고, 나머지는 fp32로 바꾼 쿼리, 키, 값의 사본이다.
#
# Llama는 쿼리 헤드 32개가 키와 값의 헤드 8개를 나누어 쓴다. **그룹 쿼리**(grouped-query attention, GQA)다. 이것을 sdpa에 넘기는 방법은 둘이다. `enable_gqa=True`는 8개를 그대로 넘기고, `repeat_kv`는 부르기 전에 32개로 복사한다. 길이 2048의 어텐션 하나를 두 방법으로 계산해, 선택된 커널과 메모리를 비교한다.

# %%
grouped_heads(length=2048)

# %% [markdown] lang="ko"
# T4에서는 부르는 방법 하나로 역전파까지 남는 것이 24.25 MiB와 576.12 MiB로 갈린다. A100에서는 어느 쪽이든 flash가 선택된다. sdpa는 이름 하나에 커널이 여럿이다. flash는 Ampere(A100, RTX 30)부터 돌고, 그보다 옛 T4에는 메모리를 아끼는 efficient가 있다. 그런데 efficient는 헤드 수가 다르면 받지 않는다. 그러면 남는 것은 점수 행렬을 통째로 만드는 `math`뿐이고, 경고는 나오지 않는다.
#
# | | 어떻게 되는가 |
# |---|---|
# | transformers 4.53까지 | 늘 `repeat_kv`: T4에서도 efficient |
# | transformers 4.54부터 5.23까지 | 어텐션 마스크가 없으면 `enable_gqa=True`: T4에서는 math |
# | PyTorch 2.14부터 | efficient가 그룹 쿼리를 받는다([pytorch #191085](https://github.com/pytorch/pytorch/pull/191085)) |
#
# 길이가 달라 패딩이 있는 배치에는 마스크가 생기므로 `repeat_kv`로 간다. 이 함정은 배치 1이거나 길이를 똑같이 맞춘 배치, 곧 패딩이 없을 때 나타난다.
#
# (버전마다 `transformers/integrations/sdpa_attention.py`를 읽어 확인했다. 진짜 T4에서도 보고되었고, 이것만 고쳐 생성이 1.6~1.8배 빨라졌다는 측정이 있다. [transformers #45776](https://github.com/huggingface/transformers/pull/45776))
#
# 고치는 것은 한 줄이다. `enable_gqa`를 쓸지 정하는 함수가 늘 아니라고 답하게 한다. 내 스크립트라면 `import` 줄과 `lambda`가 있는 줄을 모델을 부르기 전에 적는다. 여기서는 재어 본 뒤 되돌려 놓는다.

# %%
from transformers.integrations import sdpa_attention

as_shipped = sdpa_attention.use_gqa_in_sdpa
sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False
repaired = predict_memory(**llama, sequence_length=2048, gpu="T4")
sdpa_attention.use_gqa_in_sdpa = as_shipped
repaired

# %% [markdown] lang="ko"
# 이제 주장 5를 판정할 수 있다.
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 융합 커널이 선택될 때만 그렇다. 어느 것이 선택되는지는 GPU, 자료형, 헤드의 수와 크기, 마스크, 그리고 두 라이브러리의 버전에 달렸다. 위의 한 줄로 21.77 GiB가 13.39 GiB로 내려와 T4에 들어간다. A100보다 조금 큰 것은 `repeat_kv`가 키와 값을 복사하기 때문이다.
#
# </details>
#
# ## 3.13 직접 바꿔 보기
#
# 설정을 바꾸면 필요한 메모리를 바로 예측해 그린다. **실행** 단추는 실험을 실제로 실행한다. 진짜 GPU를 쓰고 있다면 그 GPU에서, 아니면 고른 가상 GPU에서 돈다. 아래 그림은 처음 모습이다.
#
# ![배치 4로 학습할 때의 메모리 구성과 시간에 따른 변화. 최대 12.42 GiB로 T4의 한도 14.64 GiB 안에 들어간다.](../../image/03_batch_4_on_a_t4.svg)
#
# - 배치 크기를 하나씩 올리면서 최대가 되는 때가 스텝에서 역전파로 옮겨 가는 곳을 찾는다.
# - 그 상태에서 체크포인팅을 켠다. 배치가 작을 때 켜면 왜 아무것도 줄지 않을까?
# - 모델을 Llama-3.1-8B로 바꾸고, 들어가는 GPU를 찾는다.
#
# <details><summary>앞의 두 물음의 답 (먼저 바꿔 본 다음에 연다)</summary>
#
# - 8에서는 12.42 GiB로 아직 스텝이고, 12에서는 13.30 GiB로 이미 넘어갔다(3.10절의 표). 그 사이에 있다.
# - 배치가 작으면 최대가 스텝에 있다. 체크포인팅은 순전파 상태를 줄일 뿐 `foreach`의 임시 텐서는 줄이지 못한다(3.7절).
#
# </details>

# %%
memory_panel()

# %% [markdown] lang="ko"
# ## 3.14 사건 파일
#
# 실제로 보고된 증상을 작은 실험으로 옮겼다. 따옴표 안의 말은 여러 신고를 하나로 엮은 것이다. 실험은 다섯 번까지 하고, 답을 맞히면 원래 스레드를 알려 준다.
#
# ### 사건 3-A. 잘 되다가 죽는다
#
# "작은 GPT-2를 T4에서 배치 32로 학습한다. 처음 몇 스텝은 멀쩡한데 늘 같은 에폭의 중간에서 OOM이 난다. 손실을 `total += loss`로 모으고 있는데 그것 때문인가? 메모리가 새는 것 같다."
# 배치는 그 안의 가장 긴 샘플에 맞춰 채워진다(패딩). `case("3-A").run()`은 한 에폭을 실행해 스텝마다 스텝 뒤의 메모리와 스텝 안의 최대를 보여 준다. `total="item"`은 손실의 값만 모으고, `max_length=…`(기본값 1024)는 샘플을 그 길이에서 자른다.

# %%
case("3-A").run()

# %% [markdown] lang="ko"
# 정말 새고 있는가? 한 에폭을 끝까지 가게 하는 가장 큰 `max_length`를 찾아 적는다. 32의 배수면 된다.

# %%
max_length = ...
case("3-A").check(max_length)

# %% [markdown] lang="ko"
# ### 사건 3-B. 학습은 되는데 평가에서 죽는다
#
# "학습은 배치 8로 문제없이 끝난다. 그런데 `trainer.evaluate()`가 도중에 죽는다. 평가에는 그레이디언트도 옵티마이저도 없는데 왜 학습보다 더 드는가? 배치를 줄여도 똑같다."
# `case("3-B").run()`은 층이 둘인 GPT-2(어휘 50,257)를 가상 T4에 올리고, 진짜 `Trainer.evaluate`로 길이 512인 샘플 128개를 평가한다. `batch_size=…`(기본값 8)와, 지표를 위해 무엇을 모으는지(`keep="logits"`, `"argmax"`, `"nothing"`)를 바꿀 수 있다.

# %%
case("3-B").run()

# %% [markdown] lang="ko"
# 지표를 계산할 것을 남기면서 끝까지 가게 하는 설정을 `{"batch_size": 4}`처럼 적는다.

# %%
changes = ...
case("3-B").check(changes)

# %% [markdown] lang="ko"
# ## 3.15 기억할 것
#
# 이 장에서 적은 예상이 얼마나 맞았는지 모아 본다.

# %%
guesses()

# %% [markdown] lang="ko"
# | 무엇 | 크기 | 언제 메모리에 있는가 | 줄이는 방법 |
# |---|---|---|---|
# | 파라미터 | 파라미터 수 × 저장된 바이트 (N) | 늘 | 양자화(2장), ZeRO-3(6장), QLoRA(8장) |
# | 그레이디언트 | N | 역전파부터 `zero_grad`까지 | ZeRO-2(6장), LoRA(8장) |
# | 옵티마이저 상태 | AdamW라면 2N | 첫 스텝부터 늘 | 8비트 AdamW, ZeRO-1(6장), LoRA(8장) |
# | 순전파 상태 | 층 수 × 토큰 수 × 은닉층 크기 × 바이트(polyglot 34, Llama 53). 융합 커널이 아니면 길이의 제곱 항이 더해짐 | 순전파부터 역전파까지 | 작은 배치와 누적(4장), 체크포인팅(5장), T4라면 3.12절의 한 줄 |
# | 로짓 크기의 fp32 텐서 | 토큰 수 × 어휘 × 4바이트, 많을 때 세 벌 | 순전파의 끝, 역전파의 시작 | 손실 나누기(3.11절) |
# | 임시 텐서 | `foreach` AdamW라면 N | 스텝 안에서만 | `fused=True` |
#
# - 보아야 하는 것은 스텝 직후의 값이 아니라 **최댓값**이다. 길이가 늘 같다면 두 번째 스텝까지, 다르다면 가장 긴 배치까지 보아야 한다.
# - 최대가 **스텝**에 있으면 옵티마이저를, **역전파의 시작**에 있으면 순전파 상태와 로짓을 줄인다.
# - OOM 메시지의 "Tried to allocate"를 배치, 길이, 어휘로 나누어 보면 어느 텐서인지 안다.
# - 메모리에 들어간다고 학습이 되는 것은 아니다. fp16에 담으면 0이 되는 수가 있고, bf16에 더하면 사라지는 갱신이 있다(3.8절).
#
# 배치 16이 들어가지 않는다면 4씩 네 번 나누어 넣으면 어떨까? 결과가 정말 같을까? [4장](04_gradient_accumulation.ipynb)에서 답한다.

# %% [markdown] lang="ko"
# ## 3.16 더 읽을거리
#
# ### 책의 2.599와 계산기의 2.37
#
# 책의 노트북은 모델을 불러온 뒤에 2.482가 아니라 2.599를 출력했다. 2024년의 transformers가 층마다 인과 마스크와 회전 인코딩 표를 **버퍼**로 저장했기 때문이다(`benchmarks/book.py`가 그때의 버전으로 되풀이한다).
#
# > **주장 6.** "허브의 메모리 계산기가 알려 주는 값은 대부분 거의 정확하다" (출처: 책 5장을 정리한 글)
#
# 책이 소개한 계산기는 이 모델을 2.37 GB라고 했다. 언어 모델의 출력층(`lm_head`)이 없는 본체만 세어 같은 수가 나오는지 본다. 뒤의 수는 출력층의 몫이다.

# %%
model, tokenizer = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b")
body = count_parameters(model.base_model)
print(f"{body * 2 / 1024**3:.3f} GiB, lm_head {1 - body / n:.1%}")

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 출력층이 임베딩과 가중치를 공유하는 모델이라면 맞다. polyglot-ko처럼 출력층이 따로 있으면 그만큼(여기서는 4.6%) 모자라고,
# 무엇보다 가중치 말고는 아무것도 알려 주지 않는다.
#
# </details>
#
# ### 이름 하나가 붙드는 것
#
# 실험을 새로 하려고 모델을 다시 불러와 같은 이름 `model`에 담는 일이 많다. 먼저 3.5절까지의 상태를 다시 만든다.

# %%
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
with gpu:
    model(**gpu.place(dataset[:4]), use_cache=False).loss.backward()
optimizer.step()
print_gpu_utilization()

# %% [markdown] lang="ko"
# 여기에서 모델을 한 번 더 불러와 `model`에 담는다. 불러온 뒤의 메모리는 얼마일까? 지금은 9.94, 모델 하나는 2.48이다.

# %%
reloaded = guess("3.16", None, "GiB")
reloaded

# %% [markdown] lang="ko"
# 이름이 새 모델로 옮겨 갔으니 옛 모델은 사라질까?

# %%
model, tokenizer = load_model_and_tokenizer("EleutherAI/polyglot-ko-1.3b")
reloaded.against(gpu.memory_allocated())

# %% [markdown] lang="ko"
# 줄기는커녕 모델 하나만큼 늘었다. 옛 파라미터는 이제 `model`이라는 이름이 아니라 **`optimizer`가 붙들고 있고**, 그레이디언트는 그 파라미터에, 상태는 옵티마이저에 달려 있다. 이름 하나라도 텐서에 닿아 있으면 메모리는 돌아오지 않는다. `del model`만 적거나 `torch.cuda.empty_cache()`를 불러도 마찬가지다. 비우고 나아간다.

# %%
cleanup()

# %% [markdown] lang="ko"
# ### 출력에 붙인 이름
#
# 책은 `outputs = model(...)`처럼 모델의 출력에 이름을 붙여 둔다. 그러면 로짓이 다음 순전파까지 살아남는다. 위에서 본 것과 같은 일이다.
# 그렇게 붙들고 있으면(`holds_outputs=True`) 배치 16의 최대가 얼마나 느는지, 로짓의 크기(배치 × 길이 × 어휘 × 2바이트)와 비교한다.

# %%
held = predict_memory(batch_size=16, holds_outputs=True).needed_bytes - without_limit.needed_bytes
human_bytes(held), human_bytes(16 * 256 * 30080 * 2)

# %% [markdown] lang="ko"
# 로짓 한 벌만큼 더 든다. 내 학습 루프에 `outputs`라는 이름이 있다면 손실을 꺼낸 뒤 `del outputs`를 적어 볼 만하다.
#
# ### `Trainer`도 같은 값인가
#
# 3.7절의 융합 AdamW를 `Trainer`에게 시킨다. 아래 셀에는 이 강의의 함수가 하나도 없다. `with virtual_gpu.cuda("T4")` 안에서는 어떤 프로그램이든 T4를 찾아 쓰고, 가중치는 내려받지 않는다.

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
# 최대 메모리 둘을 나란히 놓는다. 앞은 융합 구현을 쓴 이 강의의 실험, 뒤는 방금 실행한 `Trainer`다.

# %%
human_bytes(fused.peak_bytes), human_bytes(trainer_peak)

# %% [markdown] lang="ko"
# 같은 값이다. 여러분의 파일도 그대로 실행할 수 있다. 터미널에서 `virtual-gpu run --gpu T4 train.py`라고 쓴다(9장).
#
# ### 순수 16비트로 정말 학습해 보면
#
# > **주장 7.** "순수 fp16은 무너지고, 순수 bf16은 안전하다"
#
# 작은 모델을 CPU에서 **실제로** 300스텝 학습해 손실을 모은다. 바꾸는 것은 자료형, 융합 구현(`fused`), 학습률뿐이다.


# %%
def losses_of(dtype, fused, learning_rate, steps=300):
    torch.manual_seed(0)
    x, y = torch.randn(256, 32), torch.randn(256, 1)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    net, x, y = net.to(dtype), x.to(dtype), y.to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, fused=fused)
    losses = []
    for _ in range(steps):
        losses.append(torch.nn.functional.mse_loss(net(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


# %% [markdown] lang="ko"
# 학습률이 다른 두 그림에 네 가지 학습을 겹쳐 그린다. 이름 옆의 수는 300스텝 뒤의 손실이다. `nan`이 된 것과, 처음 높이에서 움직이지 않은 것을 찾는다. (16비트 합의 마지막 자리는 CPU마다 달라서, 튀는 곡선의 모양은 여러분의 화면에서 조금 다를 수 있다.)

# %% tags=["nbval-ignore-output"]
from helpers.chapters.c3_memory.figures import losses_chart

half, brain = torch.float16, torch.bfloat16
settings = {
    "fp32": (torch.float32, True),
    "fp16": (half, False),
    "fp16 fused": (half, True),
    "bf16 fused": (brain, True),
}
trained = {rate: {name: losses_of(*how, rate) for name, how in settings.items()} for rate in (1e-3, 1e-5)}
losses_chart(trained)

# %% [markdown] lang="ko"
# 어느 CPU에서나 같은 것만 표로 옮긴다. `nan_at`은 `nan`이 된 스텝, `doubled`는 손실이 처음의 두 배를 넘은 적이 있는지, `fell`은 300스텝 뒤에 처음보다 몇 % 줄었는지다(튄 학습은 끝값이 CPU마다 달라 적지 않는다).

# %%
import math
from itertools import product

import pandas as pd

rows = []
for rate, name in product(trained, settings):
    losses = trained[rate][name]
    lost = [step for step, loss in enumerate(losses) if math.isnan(loss)]
    jumped = max(losses) > 2 * losses[0]
    fell = "–" if lost or jumped else f"{100 * (1 - losses[-1] / losses[0]):.0f}%"
    rows.append([f"{rate:g}", name, lost[0] if lost else "–", jumped, fell])
pd.DataFrame(rows, columns=["lr", "run", "nan_at", "doubled", "fell"])

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **둘 다 조건부다.** 융합하지 않은 fp16은 첫 스텝에서 `nan`이 되었다. 융합 구현은 커널 안에서 fp32로 계산하므로 ε이 살아남아 끝까지 간다. 그러나 상태는 fp16에 저장되어 제곱의 이동 평균 일부가 0이 되고, 그런 파라미터는 한 스텝에 학습률이 정한 것보다 크게 움직인다. 그래서 10⁻³에서는 손실이 도중에 튀고, 10⁻⁵에서는 오히려 fp32보다 빨리 내려간다. 학습률이 뜻대로 듣지 않는 것이다.
# bf16은 학습률 10⁻³에서는 fp32를 따라가지만, 10⁻⁵에서는 **손실이 처음 값 그대로다.** 오류도 `nan`도 없다. 가중치 대부분이 제자리이고, 손실도 bf16이라 작은 변화는 반올림되어 보이지 않는다. (CPU의 융합 커널로 실행했다. CUDA의 커널에서는 재지 않았다.)
#
# </details>
#
# 왜 그럴까? 1.5절에서 본 **흡수** 때문이다. 작은 갱신을 더해도 가장 가까운 수가 원래 값이면 그대로 남는다. 초기화에서 흔한 크기의 가중치(표준 편차 0.02)를 한 스텝 갱신하고, bf16에서 값이 바뀐 가중치의 비율을 학습률마다 센다.

# %%
torch.manual_seed(0)
for learning_rate in (1e-5, 5e-5, 1e-4, 1e-3):
    weight = torch.nn.Parameter((torch.randn(100_000) * 0.02).bfloat16())
    before, weight.grad = weight.detach().clone(), torch.randn_like(weight)
    torch.optim.AdamW([weight], lr=learning_rate, fused=True).step()
    print(f"{learning_rate:g}  {(weight != before).float().mean():.0%}")

# %% [markdown] lang="ko"
# 학습률 10⁻⁵에서는 여섯 가운데 다섯이 제자리다. 학습률을 올리면 움직이는 가중치가 늘어난다.
#
# ### 상태를 적게 두는 옵티마이저
#
# 자료형을 줄이지 않고(3.5절의 8비트) 기억하는 수를 줄이는 길은 셋이다. 둘 가운데 하나만 기억하거나(Lion과 Muon은 모멘텀만), 분산을 묶어서 기억하거나(Adam-mini는 대체로 출력 뉴런마다 하나, Adafactor는 행과 열마다 하나이고 모멘텀은 두지 않는다), 그레이디언트를 낮은 차원으로 사영(projection)해 그 크기로 기억한다(GaLore, APOLLO). Llama-3.1-8B의 `gate_proj`(m행 n열)에서 저마다 몇 개를 기억하는지 식으로 센다. r은 사영한 뒤의 차원이고, 마지막 열은 파라미터 하나에 몇 개인지다.

# %%
m, n, r = 14_336, 4_096, 128
per_matrix = {
    "AdamW": 2 * m * n,
    "Adam-mini": m * n + m,
    "Lion, Muon": m * n,
    "GaLore, APOLLO": 2 * m * r + r * n,
    "Adafactor": m + n,
}
for name, count in per_matrix.items():
    print(f"{name:15}{count:12,}{count / (m * n):8.4f}")

# %% [markdown] lang="ko"
# GaLore([Zhao 외, 2024](https://arxiv.org/abs/2403.03507))는 그레이디언트의 짧은 쪽을 n에서 r로 줄여 두 상태를 m × r 크기로 두고, 사영하는 행렬 r × n을 따로 둔다. APOLLO([Zhu 외, 2024](https://arxiv.org/abs/2412.05270))는 사영을 무작위로 뽑는다. 논문은 씨앗만 기억하면 된다고 하지만 저자들의 라이브러리(apollo-torch 1.0.3)는 행렬도 들고 있어 두는 수가 GaLore와 같다.
#
# 수가 작아도 최대 메모리가 그만큼 줄지는 않는다. 가중치와 그레이디언트 2N은 그대로 있고, 어떤 것은 임베딩이나 출력층을 AdamW로 남기며(Muon은 둘 다, GaLore와 APOLLO는 임베딩), 상태의 자료형이 다를 수도 있다. bitsandbytes의 Lion은 fp32로 기억해서, bf16 모델이라면 하나만 두어도 줄지 않는다. 스텝 안의 임시 텐서는 오히려 늘기도 한다. 그레이디언트까지 두지 않으려면 생기는 대로 갱신해야 한다(LOMO, 층마다 스텝하는 GaLore). 가상 GPU에서 실행한 최대는 [레버 한 장](../../docs/levers.md)의 '옵티마이저'에 있다. 모두 다른 알고리즘이라 같은 손실에 이르는지는 따로 재야 한다.
#
# ### 진짜 GPU에서 더 들여다보기
#
# 내 프로그램의 할당 기록을 남김없이 보고 싶으면 `torch.cuda.memory._record_memory_history()`로 켜고 `_dump_snapshot("m.pickle")`로 저장해 pytorch.org/memory_viz에 올린다.
#
# 진짜 GPU에서 어느 커널이 골라졌는지 알고 싶으면 `torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)` 안에서 어텐션을 불러 본다. 쓸 수 없으면 까닭을 경고로 알리고 오류를 낸다.
#
# ### 순전파 상태의 식
#
# 3.9절에서는 34가 나왔다. 논문의 식에도 34가 있다. 같은 수일까? Korthikanti 외(2022)의 식 (1)은 16비트 학습에서 트랜스포머(transformer) 한 층의 순전파 상태를 다음과 같이 센다. s는 시퀀스 길이, b는 배치 크기, h는 은닉층 크기, a는 헤드 수다.
#
# $$sbh\left(34 + 5\,\frac{as}{h}\right)\ \text{바이트}$$
#
# 첫 순전파가 끝난 뒤의 순전파 상태에서 fp32 로짓 한 벌(손실의 역전파에 쓰려고 남겨 둔 것)을 빼고, 층 수와 sbh로 나누면 괄호 안의 수가 되어야 한다.


# %%
def per_sbh(length, attention, b=4, h=2048, layers=24, vocabulary=30080):
    logits = length * b * vocabulary * 4
    return (runs[length, attention].timeline.at_end(0)["activations"] - logits) / (layers * length * b * h)


rows = [[s, 34 + 5 * 16 * s / 2048, per_sbh(s, "eager"), per_sbh(s, "sdpa")] for s in lengths]
table("length formula eager sdpa", rows)

# %% [markdown] lang="ko"
# eager의 값은 식과 11% 안에서 맞고, sdpa의 값은 길이가 늘어도 그대로다. 어디가 다른지도 알 수 있다. 길이 256과 512의 eager를 잇는 직선에서 as/h의 계수(식에서는 5)와 절편(식에서는 34)을 구한다.

# %%
coefficient = (per_sbh(512, "eager") - per_sbh(256, "eager")) / (16 * 256 / 2048)
round(coefficient, 2), round(per_sbh(256, "eager") - coefficient * 16 * 256 / 2048, 2)

# %% [markdown] lang="ko"
# - 식의 5는 소프트맥스 출력 2, 드롭아웃(dropout) 마스크 1, 드롭아웃 출력 2다. transformers의 eager는 소프트맥스를 fp32로 계산해 4, 이를 fp16으로 바꾼 것이 2, 합해서 6이다.
# - 식의 34에는 드롭아웃 마스크 두 개(2)가 들어 있지만 이 모델은 드롭아웃을 쓰지 않는다. 또 GPT-NeoX는 어텐션과 MLP가 같은 입력을 나란히 읽으므로 층 정규화(layer normalization)의 입력(2)을 한 번만 저장한다.
#   34에서 4를 빼면 30이고, 나머지는 층 정규화의 통계와 회전 인코딩 같은 자잘한 것이다.
#
# sdpa의 34는 식의 34와 같아 보이지만 **우연**이다. 30에 더해진 4는 3.9절에서 본, 통째로 붙들린 쿼리·키·값의 몫이다.
#
# 같은 34를 이번에는 **누가 붙드는가**로 나눈다. 6번째 층의 텐서를 역전파에서 마지막으로 쓰는 연산으로 묶고 sbh로 나눈다. 어텐션은 34 가운데 얼마인가?

# %%
sbh = 16 * 256 * 2048
layer = alive[(alive.category == "activations") & (alive.layer == "gpt_neox.layers.5")]
(layer.groupby("kept_by").nbytes.sum() / sbh).round(2)

# %% [markdown] lang="ko"
# 12 + 8 + 2 + 12다. `AddmmBackward0`의 12는 선형층의 입력 셋(2 + 2 + 8), `GeluBackward0`의 8은 4h 크기의 입력, `NativeLayerNormBackward0`의 2는 층의 입력, 어텐션의 12는 쿼리·키·값을 만든 행렬 6, 회전한 쿼리와 키 4, 출력 2다.
#
# ### 메모리 골프: 손실 나누기
#
# 코드 골프가 글자를 아끼듯 바이트를 아껴 본다. 3.11절의 손실은 5.88 GiB가 들었다. 토큰을 16조각으로 나누어 한 조각씩 계산하고, 로짓을 남기는 대신 역전파에서 다시 만들면(5장의 체크포인팅) 어떨까?

# %%
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint


def piece(hidden, head, labels):
    return cross_entropy(linear(hidden, head).float(), labels, reduction="sum")


def loss_in_chunks(hidden, head, labels, chunks=16):
    pairs = zip(hidden.chunk(chunks), labels.chunk(chunks), strict=True)
    return sum(checkpoint(piece, h, head, y, use_reentrant=False) for h, y in pairs) / len(labels)


# %% [markdown] lang="ko"
# 두 가지를 확인한다. 진짜 숫자로 CPU에서 계산한 손실과 그레이디언트의 상대 노름(차이의 노름 ÷ 값의 노름), 그리고 비용이다.

# %%
print(loss_error(loss_in_chunks) < 1e-6)
loss_cost(loss_in_chunks)

# %% [markdown] lang="ko"
# 값은 같고 메모리는 4분의 1쯤이다. 대신 행렬곱이 3분의 1 늘었다. 재계산도 아낄 수 있다. 소프트맥스에서 정답 자리만 1을 빼면 손실의 그레이디언트이므로, 역전파를 기다리지 않고 **순전파에서 미리** 구하면 된다. 3.11절의 표에서 앞의 둘이 그렇게 한다.
#
# **연습 3-3.** (메모리 골프) 추가 연산 없이, 1.25 GiB 안에서 같은 손실과 그레이디언트를 내는 `small_loss(hidden, head, labels)`를 써라. 아래의 시작점은 위의 함수다. PyTorch에서 순전파와 역전파를 직접 정하는 방법은 `torch.autograd.Function`이다. 뼈대는 다음과 같고, `Loss.apply(hidden, head, labels)`로 부른다. `backward`는 `forward`의 인자마다 그레이디언트를 하나씩(없으면 `None`) 돌려준다.
#
# ```python
# class Loss(torch.autograd.Function):
#     @staticmethod
#     def forward(ctx, hidden, head, labels):
#         ...
#         ctx.save_for_backward(a, b)  # 역전파에서 쓸 텐서
#         return loss
#
#     @staticmethod
#     def backward(ctx, above):  # above: 손실의 그레이디언트
#         a, b = ctx.saved_tensors
#         return above * a, above * b, None
# ```
#
# 채점은 값, 바이트, 연산의 차례로 한다.

# %%
small_loss = loss_in_chunks
exercise("3-3").check(small_loss)

# %% [markdown] lang="ko"
# ### 연습 문제 하나 더
#
# **연습 3-4.** 시퀀스 길이가 512일 때 T4에 들어가는 가장 큰 배치 크기는 얼마인가? (다른 설정은 기본값이다. 예측의 `.fits`가 `True`이면 들어가는 것으로 본다.) `predict_memory(batch_size=…, sequence_length=512, gpu="T4")`로 찾는다.

# %%
largest_batch = ...
exercise("3-4").check(largest_batch)
