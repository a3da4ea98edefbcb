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
# # 6장. GPU가 여러 개라면: 데이터 병렬과 ZeRO
#
# 5장까지는 GPU 하나로 버텼다. 체크포인팅으로 순전파 상태를 줄여도 파라미터, 그레이디언트, 옵티마이저 상태는 그대로 남았다. GPU가 네 개 있으면 네 배 빨라질까? 네 배 큰 모델을 학습할 수 있을까? 둘은 다른 질문이고, 답도 다르다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - **데이터 병렬**(data parallelism)이 무엇을 나누고 무엇을 중복하는지 설명한다.
# - **ZeRO**의 단계마다 GPU 하나가 무엇을 들고 있어야 하고 얼마나 주고받는지 계산하고, ZeRO-1을 직접 쓴다.
# - 내 모델을 **FSDP2**(`fully_shard`)로 나누고, 여러 서버에서는 HSDP로, 누적할 때는 언제 통신할지 정한다.
#
# 앞부분에서는 **진짜 프로세스** 두 개와 네 개를 띄우고 PyTorch의 분산 엔진을 그대로 쓴다. GPU가 그만큼 있으면 GPU에서(통신 라이브러리는 nccl), 없으면 CPU에서(gloo) 돈다.
# 뒷부분에서는 빌리기 어려운 GPU 64개, 4,096개를 가상 GPU에서 센다. 저장된 출력은 GPU가 없는 컴퓨터에서 얻었다. (GPU 두 개라면 Kaggle의 T4 두 장을 돈 들이지 않고 쓸 수 있다.)
#
# 함께 학습하는 프로세스 하나하나를 **rank**라 하고 0부터 번호를 붙인다. rank의 수가 **world size**다. 보통 GPU 하나에 rank 하나를 둔다. `run_ranks(함수, rank 수)`는 그만큼 프로세스를 띄우고 `init_process_group`으로 묶어
# 저마다 함수를 실행하게 한 다음, 돌려준 값을 rank 순서로 모아 온다.
#
# 가장 작은 실행이다. rank마다 자기 번호에 1을 더한 수를 내고, **all-reduce**로 모두 더한다. 출력은 rank마다 (번호, world size, 합)이다. 네 rank가 모두 같은 합을 얻었을까? 4를 다른 수로도 바꾸어 실행한다.

# %%
from helpers import run_ranks
from helpers.chapters.c6_distributed.ranks import add_up

run_ranks(add_up, 4)

# %% [markdown] lang="ko"
# 1 + 2 + 3 + 4 = 10을 네 rank가 모두 갖고 있다. 이렇게 모든 rank가 함께 부르는 통신을 **집합 통신**(collective)이라고 한다. 이 장에는 네 가지가 나온다.
#
# | 집합 통신 | 하는 일 |
# |---|---|
# | all-reduce | 모두의 텐서를 더해(또는 평균해) 모두에게 준다 |
# | reduce-scatter | 더한 결과를 조각내어 rank마다 자기 조각만 준다 |
# | all-gather | rank마다 가진 조각을 모아 모두에게 전체를 준다 |
# | broadcast | 한 rank의 텐서를 모두에게 준다 |
#
# reduce-scatter 다음에 all-gather를 하면 all-reduce와 같다.
#
# ## 6.1 데이터 병렬: 배치를 나눈다
#
# 2장에서 쓴 작은 언어 모델에 나라 64곳의 수도를 가르친다(층은 네 개로 늘렸다). 데이터 병렬에서는 rank마다 **모델 전체**를 갖고 배치를 나누어 맡는다. 각 rank가 실행하는 함수는 다음과 같다.
# GPU 하나로 학습하는 코드와 다른 줄이 어디인지 찾는다.

# %%
import inspect

from helpers.chapters.c6_distributed.ranks import data_parallel

print(inspect.getsource(data_parallel))

# %% [markdown] lang="ko"
# 다른 곳은 자기 몫의 행을 고르는 줄(`share_of`)과 모델을 `DistributedDataParallel`(DDP)로 감싸는 줄뿐이다(`Collectives`, `mean_over_ranks`, `seconds`는 재려고 넣었다).
# DDP는 만들 때 rank 0의 파라미터를 모두에게 보내고, 역전파를 하면서 그레이디언트를 rank끼리 평균한다. 한 가지를 더 적었다. `gradient_as_bucket_view=True`다. DDP는 보낼 그레이디언트를 묶음(bucket)에 담는데, 기본값(`False`)에서는 그 묶음이 그레이디언트와 **따로 한 벌 더** 있다. 이 인자를 켜면 묶음이 곧 그레이디언트다. 메모리가 모자라면 켜 둘 만하다.
#
# rank 두 개, 네 개로 학습하고, 프로세스 하나에서 문장 64개를 한 배치로 학습한 것과 비교한다. 열은 스텝, 프로세스 하나, rank 둘, rank 넷의 손실이다.

# %%
from helpers.ranks.training import one_process

alone = one_process()
runs = {n: run_ranks(data_parallel, n) for n in (2, 4)}
for step, losses in enumerate(zip(alone.losses, runs[2][0].losses, runs[4][0].losses, strict=True)):
    print(step, *(f"{loss:10.4f}" for loss in losses))

# %% [markdown] lang="ko"
# 같다. 마지막 스텝의 그레이디언트 22만여 개도 모두 비교한다. 더하는 순서가 달라 생기는 fp64의 반올림 오차만 있는지, 곧 차이가 10⁻¹²을 넘지 않는지 본다.

# %%
import torch

for n, ranks in runs.items():
    same = [torch.allclose(run.gradients, alone.gradients, rtol=0, atol=1e-12) for run in ranks]
    print(n, len(alone.gradients), same)

# %% [markdown] lang="ko"
# 수학으로도 그렇다. 여기서 쓴 손실은 **행 수**로 나눈 평균이라, 행 수가 같은 몫의 평균을 다시 평균하면 전체의 평균이다. 몫이 다르면 그렇지 않다(연습 6-1). 토큰 수로 나누는 손실이라면 행 수가 같아도 4장의 '평균의 평균'이 된다. `Trainer`의 `average_tokens_across_devices`가 이를 바로잡는다.
#
# 그러면 rank마다 무엇을 갖고 있을까? 프로세스 하나가 문장 64개로 학습할 때는 파라미터, 그레이디언트, 옵티마이저 상태를 모두 6.83 MiB 들고 있다. rank가 네 개면 rank 하나는 몇 MiB일까? `None` 대신 숫자를 적고 실행한다.

# %%
from helpers import guess, human_bytes

each_of_four = guess("6.1", None, "MiB")
each_of_four

# %% [markdown] lang="ko"
# 학습이 끝난 뒤 rank마다 직접 센 바이트를 그린다. 무엇이 나뉘고 무엇이 나뉘지 않았는가?

# %%
from helpers.chapters.c6_distributed.drawings import draw_data_parallel

draw_data_parallel(runs[4])

# %% [markdown] lang="ko"
# 배치는 넷으로 나뉘었지만 모델은 나뉘지 않았다. rank 하나의 행 수와 가진 바이트를 rank가 하나, 둘, 넷일 때 차례로 출력한다.

# %%
print({run.rows: human_bytes(sum(run.held.values())) for run in (alone, *runs[2], *runs[4])})
each_of_four.against(sum(runs[4][0].held.values()))

# %% [markdown] lang="ko"
# 네 rank가 같은 것을 네 벌 갖고 있다(fp64라서 파라미터 하나에 8 + 8 + 16 = 32바이트다. 묶음을 따로 두는 기본값이라면 8바이트가 더 든다).
#
# > **주장 1.** "데이터 병렬은 모든 GPU에 모델 전체를 중복해서 저장한다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **맞다.** 파라미터, 그레이디언트, 옵티마이저 상태가 모두 그렇다. GPU 하나에 들어가지 않는 모델은 데이터 병렬만으로는 학습할 수 없다.
# 다만 순전파 상태는 행 수에 비례하므로 나뉜다.
#
# </details>
#
# ### 네 배 빨라질까
#
# rank 하나의 일은 1/4로 줄었다. 그러면 네 배 빨라질까? 코어 몇 개를 나누어 쓰는 이 컴퓨터의 시계로는 알 수 없다. GPU에서 어떨지는 오가는 양에서 짐작한다. 마지막 스텝에 rank 둘일 때와 넷일 때 오간 원소를 비교한다.

# %%
runs[2][0].sent, runs[4][0].sent

# %% [markdown] lang="ko"
# rank가 둘이든 넷이든 파라미터 수만큼 all-reduce한다. 앞으로 파라미터 수를 Ψ라고 쓴다. 계산은 rank를 늘리면 줄어들지만 통신은 줄지 않는다.
#
# T4 네 개로 polyglot-ko-1.3b를 학습한다고 하고 **제조사가 밝힌 최고 속도**로 셈해 본다(측정이 아니고, 메모리가 되는지도 따지지 않는다). T4는 fp16으로 초당 65조 번 연산하고, PCIe 3.0 x16은 한 방향으로 초당 15.75 GB를 보낸다.
# 학습의 연산은 토큰 하나, 파라미터 하나에 약 6번이다(순전파 2, 역전파 4). all-reduce를 고리(ring) 방식으로 하면 GPU마다 2Ψ × (N − 1)/N개를 보내고, fp16이므로 하나가 2바이트다. 열은 GPU 하나가 한 스텝에 처리하는 토큰 수, GPU 네 개가 같은 시간에
# 처리하는 양이 하나의 몇 배인지(통신을 계산과 겹치지 못할 때, 역전파와 완전히 겹칠 때)다. 그레이디언트는 역전파에서 나오므로 겹칠 수 있는 것은 계산의 3분의 2인 역전파뿐이다.

# %%
psi, n = 1_331_810_304, 4
communication = 2 * psi * 2 * (n - 1) / n / 15.75e9
for tokens in (1024, 4096, 16384):
    computation = 6 * psi * tokens / 65e12
    apart = computation + communication
    together = computation / 3 + max(2 * computation / 3, communication)
    print(f"{tokens:6}{n * computation / apart:6.1f}{n * computation / together:6.1f}")

# %% [markdown] lang="ko"
# > **주장 2.** "4개의 GPU로 4배 가까이 빨라진다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 한 스텝에 처리하는 토큰이 많고 통신이 빨라서 all-reduce가 역전파와 겹쳐 가려질 때 그렇다. 배치가 작거나 연결이 느리면 4배에 한참 못 미친다.
# 게다가 빨라지는 것은 같은 시간에 처리하는 데이터의 양이다. 한 스텝의 배치가 4배가 되므로 스텝 수와 학습률을 다시 정해야 한다.
#
# </details>
#
# DDP는 역전파가 끝나기를 기다리지 않고, 그레이디언트를 25 MiB쯤씩 묶어(bucket) 구해지는 대로 보낸다. 계산과 통신을 겹치려는 것이다.
#
# **연습 6-1.** rank마다 행 수가 다르면 DDP의 평균은 전체 배치의 평균이 아니다. rank마다 자기 행에서 구한 평균 그레이디언트(여기서는 숫자 하나)의 목록 `means`와 행 수의 목록 `rows`를 받아,
# 전체 배치의 평균 그레이디언트를 돌려주는 함수를 완성하라. 막히면 `exercise("6-1").hint()`, 그래도 막히면 `exercise("6-1").solution()`을 실행한다.

# %%
from helpers import exercise


def whole_gradient(means, rows):
    return ...


exercise("6-1").check(whole_gradient)

# %% [markdown] lang="ko"
# ## 6.2 ZeRO: 중복을 없앤다
#
# 데이터 병렬은 모두가 같은 것을 갖고 있어서 낭비다. **ZeRO**(Zero Redundancy Optimizer; Rajbhandari 외, 2020)는 데이터 병렬을 그대로 두고
# **저장만** 나눈다. 필요할 때 모으고, 쓰고 나면 버린다. 무엇까지 나누느냐에 따라 단계(stage)가 있다. Ψ는 파라미터 수, N은 rank 수다. 16비트로 계산하고 옵티마이저가 fp32 가중치와 momentum, variance를 갖는
# 혼합 정밀도(파라미터 하나에 2 + 2 + 12바이트)일 때다.
#
# | 단계 | 나누는 것 | rank 하나의 바이트 | PyTorch |
# |---|---|---|---|
# | 0 | 없음 | 16Ψ | `DistributedDataParallel` |
# | 1 | 옵티마이저 상태 | 4Ψ + 12Ψ/N | `ZeroRedundancyOptimizer` |
# | 2 | + 그레이디언트 | 2Ψ + 14Ψ/N | `fully_shard(reshard_after_forward=False)` |
# | 3 | + 파라미터 | 16Ψ/N | `fully_shard(reshard_after_forward=True)` |
#
# `fully_shard`는 FSDP2라고 부르는 PyTorch의 엔진이다. 표의 12바이트는 16비트 파라미터를 나누고 fp32 사본을 옵티마이저가 갖는 방식이고, 이 절의 실험이 그렇다. FSDP2를 `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`으로 쓰면 나누어 갖는 조각 자체가 fp32여서 4 + 4 + 8바이트가 된다. 합은 같다.
#
# 실험에는 transformers의 GPT-NeoX를 쓴다. polyglot-ko와 구조가 같고 크기만 줄였다(2층, 은닉층 64, 헤드 4개). 이것을 네 단계로 나누어 rank 둘과 넷에서 학습한다. 먼저 네 단계가 정말 같은 학습인지 본다. fp64로 세 스텝을 실행했을 때의 손실이다.

# %%
from helpers.chapters.c6_distributed.ranks import zero

zeros = {(n, stage): run_ranks(zero, n, stage) for n in (2, 4) for stage in range(4)}
for (n, stage), ranks in zeros.items():
    same = torch.allclose(ranks[0].gradients, zeros[2, 0][0].gradients, rtol=0, atol=1e-9)
    print(n, stage, *(f"{loss:.6f}" for loss in ranks[0].losses), same)

# %% [markdown] lang="ko"
# 모두 같다. 이제 혼합 정밀도로 학습하면서 rank마다 가진 텐서의 저장 공간을 센다. 스텝이 끝났을 때 세고, 2단계에서 순전파와 역전파 사이에만 있는 것을 더했다.
# 열은 N, 단계, 논문의 식, 그리고 rank마다 센 값이고, 단위는 **파라미터 하나에 몇 바이트**다. 식과 다른 줄을 찾는다.
#
# 그 전에, Ψ개의 파라미터를 rank 네 개가 3단계로 나누면 rank 하나에 파라미터 하나당 몇 바이트가 남을까? 표의 식에서 셈해 적는다.

# %%
per_parameter = guess("6.2", None, "bytes")
per_parameter

# %% [markdown] lang="ko"
# 이제 센 값이다.

# %%
from virtual_gpu.shards.layout import Layout
from virtual_gpu.shards.ledger import paper_bytes

for (n, stage), ranks in zeros.items():
    psi = ranks[0].parameters
    formula = paper_bytes(psi, Layout(n, stage))
    print(n, stage, f"{formula / psi:6.2f} |", *(f"{run.total / psi:6.2f}" for run in ranks))

per_parameter.against(zeros[4, 3][0].total / psi)

# %% [markdown] lang="ko"
# 0단계와 3단계는 식과 정확히 같다. 1단계와 2단계가 다른 까닭을 종류별로 나누어 본다. rank 네 개일 때이고, 단위는 역시 파라미터 하나에 몇 바이트다.

# %%
for stage in (1, 2):
    for rank, run in enumerate(zeros[4, stage]):
        print(stage, rank, {kind: round(nbytes / psi, 3) for kind, nbytes in run.held.items()})

# %% [markdown] lang="ko"
# - **1단계.** 옵티마이저 상태가 12/4 = 3바이트씩이어야 하는데 rank마다 다르다. `ZeroRedundancyOptimizer`는 텐서를 자르지 않고 통째로 나누어 주기 때문이다. 임베딩과 출력층처럼 큰 텐서를 받은 rank가 더 갖는다.
#   rank가 둘일 때는 마침 똑같이 나뉘었다.
# - **2단계.** `gathered`는 순전파에서 모아 역전파까지 두는 파라미터 전체(2Ψ)다. 논문의 2단계에서는 이것이 전부지만, FSDP2는 자기 조각(2Ψ/N)을 따로 갖고 있다가 옵티마이저 스텝에 쓴다. 그만큼 더 든다.
#   역전파가 끝나면 모은 것을 버린다.
#
# **연습 6-2.** ZeRO의 단계, 파라미터 수, GPU 수를 받아 GPU 하나가 갖는 모델의 바이트를 돌려주는 함수를 완성하라. 혼합 정밀도(파라미터 하나에 16바이트)이고, 논문의 식을 따른다.


# %%
def bytes_per_rank(stage, parameters, n):
    return ...


exercise("6-2").check(bytes_per_rank)

# %% [markdown] lang="ko"
# ## 6.3 무엇이 오가는가
#
# 나누어 가지면 모아야 한다. 한 스텝에 오간 원소를 집합 통신별로 세어 Ψ로 나눈다. 마지막 열은 합인데, all-reduce는 reduce-scatter와 all-gather를 이은 것이므로 두 번으로 친다.

# %%
for stage in range(4):
    run = zeros[4, stage][0]
    print(stage, {name: count / psi for name, count in run.sent.items()}, run.travelled / psi)

# %% [markdown] lang="ko"
# - **0단계**: 그레이디언트의 all-reduce. 2Ψ.
# - **1단계**: DDP의 all-reduce를 그대로 하고, 저마다 갱신한 파라미터를 broadcast한다. 3Ψ. 논문의 방법은 reduce-scatter와 all-gather로 2Ψ에 맞추는데, PyTorch의 구현은 그렇게 하지 않는다.
# - **2단계**: 파라미터를 한 번 모으고(all-gather), 그레이디언트를 자기 조각만 받는다(reduce-scatter). 2Ψ.
# - **3단계**: 순전파에서 모은 파라미터를 버렸으므로 역전파에서 다시 모은다. 3Ψ.
#
# ### 누가 무엇을 계산하는가
#
# 파라미터를 나누어 가졌으니 계산도 나누어 할까? rank 하나가 한 스텝에 계산한 행렬곱의 연산 수(FLOPs)를 센다. 줄은 rank의 수, 열은 0단계부터 3단계까지다.

# %%
for n in (2, 4):
    print(n, [f"{zeros[n, stage][0].flops:,}" for stage in range(4)])

# %% [markdown] lang="ko"
# 단계가 달라도 계산은 같다. rank 수를 두 배로 늘리면 절반이 되는 것은 행이 절반이기 때문이다.
#
# > **주장 3.** "ZeRO에서는 각 GPU가 모델의 자기 부분만 계산한다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 모든 rank가 모든 층을 계산한다. 나누어 가진 것은 저장뿐이고, 계산은 데이터 병렬과 똑같이 행으로 나눈다. 자기 부분만 계산하는 것은
# 파이프라인 병렬과 텐서 병렬이다.
#
# </details>
#
# ### ZeRO-1을 직접 쓴다
#
# rank를 리스트로 흉내 낸다. `weights[r]`와 `gradients[r]`는 rank r이 가진 가중치와 그레이디언트다(1차원, 길이는 rank 수의 배수). `momentum[r]`은 rank r이 맡은 **조각**의 모멘텀이다. 집합 통신은 두 가지만 있으면 된다.

# %%
from helpers.chapters.c6_distributed import lists

print(inspect.getsource(lists.reduce_scatter))
print(inspect.getsource(lists.all_gather))

# %% [markdown] lang="ko"
# **연습 6-3.** DDP로 평균한 그레이디언트로 SGD(모멘텀 0.9, `momentum = 0.9 * momentum + 그레이디언트`, `가중치 -= lr * momentum`)를 한 것과 같은 결과가 나오도록 ZeRO-1의 한 스텝을 완성하라. 새 가중치의 리스트와 새 모멘텀의 리스트를 돌려준다. rank마다 모멘텀을 자기 조각만 가져야 한다.


# %%
def zero_1_step(weights, gradients, momentum, lr):
    return ...


exercise("6-3").check(zero_1_step)

# %% [markdown] lang="ko"
# ## 6.4 빌릴 수 없는 GPU 64개로 실험하기
#
# ZeRO 논문(Rajbhandari 외, 2020)에서 가장 유명한 것은 그림 1이다. 75억 파라미터 모델을 GPU 64개로 학습할 때 GPU 하나에 필요한 메모리가 120 GB에서 1.9 GB까지 줄어든다.
# 64개는 어떻게 셀까? 두 가지를 합치면 된다.
#
# - PyTorch에는 **fake**라는 process group(함께 통신하는 rank의 묶음)이 있다. rank가 64개 있는 것처럼 대답하지만 아무것도 보내지 않는다. FSDP2는 진짜로 여기고 64조각을 내어 자기 것만 남기고, 모으고, 보낸다.
# - 그 rank의 텐서는 **가상 GPU**에 둔다. 모양만 있고 값이 없으므로 모델이 아무리 커도 된다.
#
# `shard_ledger`는 처음, 가운데, 마지막 rank에서 이렇게 한 스텝을 실행하고 텐서의 저장 공간을 종류별로 센다. 깊은 모델은 층을 둘, 셋, 넷만 두고 실행해
# 바이트가 정확히 한 층씩 늘어나는지 확인한 다음 전체 깊이의 값을 구한다. 표의 둘째 열은 논문의 식이 주는 값이다. rank의 열과 얼마나 다른지 본다.

# %%
from helpers import shard_ledger

shard_ledger("ZeRO-7.5B", 64, stage=3)

# %% [markdown] lang="ko"
# 모델의 모양은 밝혀져 있지 않아 GPT-2를 36층, 은닉층 4096으로 키웠고, 파라미터가 74.6억 개라서 논문보다 0.5% 작다. 단위는 논문을 따라 GB(10⁹바이트)다. 세 rank 모두 식과 0.002 GB 안에서 같다.
#
# > **주장 4.** "GPU 64개면 메모리가 1/60 수준으로 줄어든다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 파라미터, 그레이디언트, 옵티마이저 상태의 합은 16Ψ에서 16Ψ/64로 줄어든다(네 단계를 모두 그린 것은 6.10절에 있다).
# 그러나 GPU 메모리에는 다른 것도 있다. 6.5절에서 그것까지 센다.
#
# </details>

# %% [markdown] lang="ko"
# ## 6.5 ZeRO가 나누지 않는 것
#
# 지금까지는 모델 상태만 세었다. 학습에는 순전파 상태도 필요하고(3장), FSDP2는 조각을 모아 두었다가 쓰고 버린다. `rank_step`은 rank 하나에서 배치 하나로 순전파와 역전파를 실행해
# 가장 많이 든 순간의 구성을 보여 준다. Llama-3.1-70B를 H100 64개에 3단계로 나누고, GPU마다 길이 4096인 샘플 하나를 넣는다. GPU마다 실제로 필요한 메모리는 몇 GiB일까? 모델 상태만 세면 16Ψ/64 = 16.4 GiB다.

# %%
whole_step = guess("6.5", None, "GiB")
whole_step

# %% [markdown] lang="ko"
# 이제 실행한다. 분홍색이 얼마나 되는가?

# %%
from helpers import rank_step

step = rank_step("Llama-3.1-70B", 64, sequence_length=4096)
step

# %% [markdown] lang="ko"
# 예상은 얼마나 맞았나?

# %%
whole_step.against(step.total)

# %% [markdown] lang="ko"
# 모델 상태는 16.43 GiB인데 순전파 상태와 임시 텐서가 126.48 GiB, 여덟 배 가까이다. GPU마다 자기 샘플을 계산하므로 순전파 상태는 저마다 자기 것이고, ZeRO는 이것을 나누지 않는다. 이것을 줄이는 방법은 5장의 체크포인팅이다.

# %%
checkpointed = rank_step("Llama-3.1-70B", 64, sequence_length=4096, gradient_checkpointing=True)
checkpointed

# %% [markdown] lang="ko"
# 이제 들어간다. 그림의 하늘색과 회색은 나누었기 때문에 새로 생긴 것이다.
#
# - **모아 둔 파라미터**(하늘색): 계산하려면 그 층의 파라미터가 온전히 있어야 한다. FSDP2는 계산할 블록 하나를 all-gather로 모으고, 다음 블록을 미리 모으고(prefetch), 쓴 것은 버린다.
# - **통신 버퍼**(회색): all-gather가 받는 자리와 reduce-scatter로 보낼 그레이디언트를 늘어놓는 자리다. cuBLAS의 작업 공간도 여기에 넣었다.
# - 판정의 둘째 값은 여기에 캐싱 할당자의 빈자리와 NCCL의 버퍼를 더한 것이다. NCCL의 버퍼는 할당자 밖에 있어 공개된 보고의 값 하나(그림 맨 아래의 '아마')를 썼다. 그것은 688 MiB뿐이므로, 27.13 GiB와 39.28 GiB의 차이는 거의 다 할당자의 빈자리다.
#
# ### GPU를 늘리면 어디까지 줄어들까
#
# 같은 설정에서 GPU를 8개부터 4,096개까지 늘린다. 막대의 윗부분과 아랫부분을 나누어 본다.

# %%
from virtual_gpu.drawing.shards import draw_gpus
from virtual_gpu.shards.rank_step import steps_by_ranks

steps = steps_by_ranks("meta-llama/Llama-3.1-70B")
draw_gpus(steps)

# %% [markdown] lang="ko"
# 파라미터, 그레이디언트, 옵티마이저 상태는 GPU 수에 반비례해 사라지고, 순전파 상태와 모아 둔 파라미터와 통신 버퍼는 바닥에 남는다.
# 64개일 때와 4,096개일 때의 최대와 바닥을 숫자로 비교한다.

# %%
for step in (steps[3], steps[-1]):
    print(f"{step.layout.ranks:5,} GPUs: {step.total / 2**30:5.1f} GiB, floor {step.floor / 2**30:4.1f} GiB")

# %% [markdown] lang="ko"
# > **주장 5.** "GPU를 많이 쓸수록 GPU당 메모리가 줄어든다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 모델 상태는 그렇다. 그러나 바닥이 있다. GPU를 64배로 늘려도 메모리는 절반으로 줄 뿐이고, 바닥은 오히려 조금 높아진다(패딩, 6.10절).
# 바닥을 낮추려면 GPU를 더 살 것이 아니라 배치와 길이를 줄이거나, 체크포인팅을 켜거나, 층 자체를 쪼개야 한다(7장).
#
# </details>
#
# ### 진짜 카드 8장과 128장에서는
#
# 지금까지는 예측이다. 여러 장의 진짜 카드와 견주면 어떨까? torchtitan(PyTorch 팀의 대형 모델 학습 프로그램)의 개발자들이 2024년 12월에 H100(96 GB) 8장과 128장에서 Llama 3.1 8B를 FSDP2로 학습하고, 할당자의 예약을 GiB로 적어 두었다(카드마다 2 × 8,192토큰, 5.6절의 `products`처럼 일부만 남기는 체크포인팅). torchtitan의 그때 코드를 보고 같은 일을 하도록 다시 쓴 프로그램의 rank 하나를, 지금의 PyTorch로 가상 GPU에서 실행한 값을 옆에 놓는다. 열여섯 배로 늘린 GPU는 메모리를 얼마나 줄였을까?

# %%
from helpers.chapters.c9_planner.measured import published

for row in (row for row in published() if row["source"] == "pytorch/torchtitan"):
    measured, predicted = (row[kind] / 2**30 for kind in ("measured", "predicted"))
    print(f"{row['id'].partition('/')[2]:25} measured {measured:.1f}, predicted {predicted:.2f}")

# %% [markdown] lang="ko"
# 네 값이 모두 1% 안에서 같다. GPU를 열여섯 배로 늘리고도 82.4 GiB가 67.0 GiB로 줄 뿐이다. 줄어든 15.4 GiB 가운데 14.0 GiB는 모델 상태다(80억 × 16바이트의 1/8에서 1/128로). 순전파 상태와 모아 둔 블록은 GPU 수로 나누어지지 않는다. `compile`은 블록마다 `torch.compile`을 한 것으로, 합친 연산의 중간 결과를 남기지 않아 5 GiB쯤 덜 든다(5.6절). 남들이 잰 값이고, 무엇을 어떻게 견주었는지는 [오차의 표](../../docs/errors.md)에 있다.
#
# ### 사건 6-A: GPU를 늘렸는데 메모리가 그대로다
#
# "노드를 늘려 GPU를 8개에서 64개로 늘렸다. ZeRO-3(FSDP)니까 메모리가 GPU 수에 반비례해 줄어야 하는데 거의 그대로다." 이슈에 되풀이해 올라오는 이야기다. 여기서는 Llama-3.1-8B를 A100 80 GB에서 배치 4, 길이 8192로 학습하다가 같은 일을 당했다.
#
# 실험은 다섯 번 할 수 있다. `run`에 `ranks`, `gradient_checkpointing`, `tensor_parallel`, `batch_size`, `sequence_length`를 바꾸어 넣으면 GPU 하나의 구성이 나온다. 배치와 길이를 그대로 두고, **설정 하나만** 바꾸어 들어가게 하라.

# %%
from helpers import case

case("6-A").run(ranks=8)

# %% [markdown] lang="ko"
# 실험한 다음 바꿀 설정 하나를 `{"이름": 값}`으로 적는다.

# %%
changes = ...
case("6-A").check(changes)

# %% [markdown] lang="ko"
# **연습 6-4.** Llama-3.1-70B를 H200으로 전체 미세 조정하려고 한다. 3단계, GPU마다 배치 1, 길이 4096, 체크포인팅이다. GPU가 적어도 몇 개 있어야 하는가? H200 여덟 개짜리 서버 한 대로 될까?
# 먼저 6-2의 함수로 어림하고, `rank_step("Llama-3.1-70B", GPU 수, batch_size=1, sequence_length=4096, gradient_checkpointing=True, gpu="H200")`으로 확인한다.

# %%
smallest = ...
exercise("6-4").check(smallest)

# %% [markdown] lang="ko"
# ## 6.6 내 코드에 FSDP2를 넣으면
#
# 3단계를 내 모델에 쓰려면 몇 줄이 필요할까? 네 줄이다. 블록마다 `fully_shard`를 부르고, 마지막에 모델 전체에 한 번 더 부른다. 블록마다 부르는 까닭은 모으는 단위가 블록이 되게 하려는 것이다. 모델 전체에만 부르면 모든 파라미터를 한꺼번에 모은다.

# %%
from helpers.chapters.c6_distributed.ranks import fsdp2, shard_model

print(inspect.getsource(shard_model))

# %% [markdown] lang="ko"
# - `mesh`는 GPU의 배열이다. 한 줄로 늘어놓으면 모두가 조각을 나눈다.
# - `MixedPrecisionPolicy`는 저장은 fp32 조각으로, 모아서 계산할 때는 `param_dtype`(bf16)으로, 그레이디언트를 더할 때는 `reduce_dtype`(fp32)으로 하라는 뜻이다. 그래서 파라미터 하나에 4 + 4 + 8 = 16바이트를 나누어 갖는다. T4에는 bf16 연산 장치가 없으므로 `torch.float16`과 손실 스케일링을 쓴다.
# - 옵티마이저는 `fully_shard`를 부른 **다음에** 만든다. 먼저 만들면 조각이 아니라 원래 파라미터를 붙들고 있게 된다.
#
# 6.2절의 모델로 rank 네 개에서 한 스텝을 실행한다. 출력은 파라미터 수, rank 하나가 가진 바이트를 파라미터 수로 나눈 것, 오간 원소의 수를 파라미터 수로 나눈 것이다. 3단계의 식으로는 얼마여야 하는가?

# %%
count = zeros[4, 3][0].parameters


def per_parameter_of(run):
    return [{name: round(n / count, 2) for name, n in counts.items()} for counts in (run.held, run.sent)]


sharded = run_ranks(fsdp2, 4)[0]
print(count, *per_parameter_of(sharded))

# %% [markdown] lang="ko"
# 가진 것은 (4 + 4 + 8)/4 = 4바이트로 식과 같다. all-gather가 2가 아니라 1.44인 것은 마지막에 감싼 묶음(임베딩과 출력층)을 FSDP2가 순전파 뒤에 버리지 않기 때문이다. 역전파가 그것부터 쓰므로 버렸다가 바로 다시 모으는 셈이 된다. (6.3절에서는 그 묶음도 버리게 했다.)
#
# ### HSDP: 서버 안에서만 나눈다
#
# 서버가 여럿이면 서버 사이의 연결이 서버 안의 연결보다 훨씬 느리다. **HSDP**(hybrid sharded data parallel)는 서버 안의 GPU끼리만 조각을 나누고 서버끼리는 같은 조각을 갖는다. 코드는 그대로 두고 `mesh`만 2차원으로 바꾼다. rank 네 개를 2 × 2로 놓는다. 앞의 수는 복제(replicate), 뒤의 수는 나누기(shard)다. 가진 것과 오간 것이 앞의 출력과 어떻게 다를까?

# %%
per_parameter_of(run_ranks(fsdp2, 4, 2)[0])

# %% [markdown] lang="ko"
# 둘이서만 나누니 가진 것이 두 배, (4 + 4 + 8)/2 = 8바이트다. all-gather와 reduce-scatter는 둘 사이에서만 일어나고, 서버 사이를 건너는 것은 **자기 조각의 all-reduce**뿐이다. 0.5Ψ개를 all-reduce하니 6.3절의 셈으로는 Ψ다. 네 rank가 모두 조각을 나누는 1차원 mesh라면 2.44Ψ가 모두 서버 사이를 건널 수 있다. 메모리를 더 쓰고 느린 연결을 덜 쓴다.
#
# ### 누적할 때는 언제 통신할까
#
# 4장의 누적을 함께 쓰면 마이크로 배치마다 그레이디언트를 보낼 것인가, 마지막에 한 번만 보낼 것인가를 정해야 한다. DDP에서는 `no_sync()`, FSDP2에서는 `set_requires_gradient_sync(False)`로 미룬다. 마이크로 배치 네 개로 두 가지를 실행한다. 첫째 열은 마이크로 배치마다 보내는지, 둘째 열은 reduce-scatter로 오간 원소(Ψ의 배수), 셋째 열은 마이크로 배치 사이에 남아 있는 **나누지 않은 그레이디언트**(파라미터 하나에 몇 바이트)다.

# %%
for sync_each in (True, False):
    run = run_ranks(fsdp2, 4, 1, 4, sync_each)[0]
    print(sync_each, run.sent["reduce_scatter_base"] / count, run.unsharded / count)

# %% [markdown] lang="ko"
# 미루면 reduce-scatter는 1/4로 줄지만(파라미터를 모으는 all-gather는 마이크로 배치마다 그대로다), 나누지 않은 그레이디언트를 rank마다 한 벌씩(fp32라서 4바이트) 들고 있어야 한다. ZeRO-2와 3이 없앤 바로 그것이다. DDP에서는 어차피 한 벌을 들고 있으므로 미루는 데 메모리가 더 들지 않는다.
#
# ### 사건 6-B: 누적을 켰더니 OOM
#
# "FSDP로 잘 돌던 학습에 누적을 켰다. 배치는 그대로인데 메모리가 부족하다." accelerate는 누적할 때 통신을 미루는 것이 기본값이고, 이 때문에 `sync_each_batch`라는 설정이 생겼다. Llama-3.1-8B(80.3억 파라미터)를 GPU 8개에서 6.6절의 `MixedPrecisionPolicy`(더할 때 fp32)로 학습한다면, 통신을 미루는 것만으로 GPU마다 **몇 GiB**가 더 들까?
#
# 작은 모델로 다섯 번 실험할 수 있다. `ranks`(2나 4), `micro_batches`, `sync_each`를 바꾼다.

# %%
case("6-B").run(ranks=4, sync_each=False).unsharded

# %% [markdown] lang="ko"
# GiB로 적는다.

# %%
extra_gib = ...
case("6-B").check(extra_gib)

# %% [markdown] lang="ko"
# ## 6.7 무엇을 쓸까
#
# 파라미터, 그레이디언트, 옵티마이저 상태에 순전파 상태까지 GPU 하나에 들어가면 DDP가 가장 단순하다. 파라미터는 들어가는데 옵티마이저 상태가 넘치면 ZeRO-2(`reshard_after_forward=False`), 파라미터도
# 들어가지 않으면 FSDP2나 ZeRO-3를 쓴다. 모든 GPU를 합쳐도 모자라면 오프로드가 남는데, 옵티마이저 스텝을 CPU가 하므로 느리다. 런처로 시작하는 법은 6.10절에 있다.
#
# ## 6.8 직접 바꿔 보기
#
# 모델, GPU의 종류와 수, ZeRO의 단계, 텐서 병렬, 배치와 길이를 바꾸면 GPU 하나의 메모리와 한 스텝에 보내는 양이 따라 바뀐다. 아래 그림은 처음 모습이다.
#
# ![Llama-3.1-70B를 H100 64개에 3단계로 나누어 배치 1, 길이 4096, 체크포인팅으로 학습할 때 GPU 하나의 메모리 구성. 최대 27.13 GiB로 한도 78.51 GiB 안에 들어간다.](../../image/06_zero_panel.svg)
#
# 이렇게 해 본다.
#
# - 단계를 3에서 2, 1, 0으로 내린다. 어느 단계부터 들어가지 않는가? 보내는 양은 어떻게 달라지는가?
# - 체크포인팅을 끄고, 들어가게 만드는 방법을 찾는다. GPU 수를 늘려서 될까?
# - 모델을 Llama-3.1-405B로 바꾸고, 들어가는 가장 적은 GPU 수를 찾는다.

# %%
from helpers import zero_panel

zero_panel()

# %% [markdown] lang="ko"
# ## 6.9 기억할 것
#
# 예상이 얼마나 맞았는지 돌아본다.

# %%
from helpers import guesses

guesses()

# %% [markdown] lang="ko"
# | 방법 | 나누는 것 | 나누지 않는 것 | 주고받는 것 |
# |---|---|---|---|
# | 데이터 병렬 (DDP) | 배치, 따라서 순전파 상태 | 모델 전체: 16Ψ | 그레이디언트 all-reduce, 2Ψ |
# | ZeRO-1 (`ZeroRedundancyOptimizer`) | 옵티마이저 상태: 4Ψ + 12Ψ/N, 텐서 통째로 | 계산, 순전파 상태 | 3Ψ (논문은 2Ψ) |
# | ZeRO-2 (FSDP2, `reshard_after_forward=False`) | + 그레이디언트: 2Ψ + 14Ψ/N, 자기 조각 2Ψ/N 더 | 계산, 순전파 상태 | 2Ψ |
# | ZeRO-3 (FSDP2, `reshard_after_forward=True`) | + 파라미터: 16Ψ/N | 계산, 순전파 상태 | 3Ψ |
#
# - GPU 네 개로 네 배 빨라지려면 통신이 계산과 겹쳐 가려져야 한다. 네 배 큰 모델을 학습하려면 데이터 병렬만으로는 안 되고 ZeRO가 있어야 한다.
# - ZeRO는 순전파 상태를 나누지 않는다. GPU를 늘려도 순전파 상태, 모아 둔 블록, 통신 버퍼는 바닥에 남는다.
# - FSDP2는 네 줄이다. 서버가 여럿이면 2차원 mesh로 서버 안에서만 나눈다(HSDP). 누적할 때 통신을 미루면 나누지 않은 그레이디언트가 한 벌 남는다.
#
# 나누어 가져도 계산은 모두가 다 한다. 층 하나를 모으는 것조차 벅차거나 순전파 상태가 바닥에 남는다면 모델 자체를 쪼개야 한다. [7장](07_split_model.ipynb)에서 쪼갠다.

# %% [markdown] lang="ko"
# ## 6.10 더 읽을거리
#
# ### 런처로 돌리기
#
# 노트북 밖에서는 스크립트를 파일로 두고 **런처**(launcher)로 시작한다. 런처는 컴퓨터(노드, node)마다 프로세스를 띄우고 자기 번호(`RANK`)와 전체 수(`WORLD_SIZE`)를 환경 변수로 알려 준다.
# PyTorch의 `torchrun`과, 설정 파일에 적힌 엔진(DDP, FSDP2, DeepSpeed)까지 골라 주는 `accelerate launch`가 있다.
#
# `examples/train_distributed.py`를 rank 두 개로 돌린다. 어느 컴퓨터에서나 같도록 GPU는 숨긴다. `--fully-shard`는 FSDP2로 나누라는 뜻이다. 요청한 엔진과 실제로 쓰인 엔진이 같은지, rank마다 무엇을 몇 바이트 들고 있는가?

# %% tags=["nbval-ignore-output"]
import os
import subprocess
import sys
from pathlib import Path

import helpers

course = Path(helpers.__file__).parents[1]
script = [course / "examples/train_distributed.py", "--model", "gpt2", "--layers", "2", "--length", "64"]
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
settings = {
    "env": os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(course)},
    "capture_output": True,
    "text": True,
}
print(subprocess.run([*torchrun, *script, "--fully-shard"], **settings).stdout)

# %% [markdown] lang="ko"
# fp32로 학습했으니 파라미터 하나에 4 + 4 + 8 = 16바이트이고, rank 두 개가 절반씩 들고 있다. `--fully-shard`를 빼면 DDP가 되어 둘 다 16바이트를 든다(여기서 세지 않는 묶음 한 벌은 따로다). 손실이 그대로인지 직접 빼고 돌려 본다.
#
# 엔진을 설정 파일로 고를 때는 파일대로 되었는지 따로 확인한다. 예를 들어 프로세스 둘을 요청하는 `configs/ddp.yaml`에 `--cpu`를 붙이면 accelerate는 아무 말 없이 프로세스 하나만 띄운다. 그래서 이 스크립트는 설정값이 아니라 **모델이 실제로 무엇이 되었는지**를 보고 엔진의 이름을 적고, `--expect-ranks`로 받은 rank 수와 다르면 멈춘다.
# 이런 경우의 목록과 노드가 여럿일 때의 명령은 [여러 GPU에서 돌리기](../../docs/launching.md)에 있다. 이 저장소의 스크립트를 진짜 GPU 여러 개에서 돌려 본 적은 아직 없다.
#
# ### 고리를 한 걸음씩 돌려 보기
#
# 6.1에서 GPU마다 2Ψ × (N − 1)/N개를 보낸다고 셈했다. 고리 모양의 all-reduce가 왜 그만큼인지는 조각의 움직임을 보면 안다. 벡터를 rank 수만큼의 조각으로 자르고, 걸음마다 모든 rank가 조각 하나를 오른쪽 이웃에게 보낸다.
# 처음 N − 1걸음에는 받은 조각을 자기 것에 더하고(reduce-scatter), 다음 N − 1걸음에는 다 더해진 조각을 받아 적는다(all-gather). 숫자는 rank를 흉내 낸 리스트에서 실제로 더한 값이다. ▶를 누르거나 순간을 옮긴다. 마지막 순간에 모든 rank가 같아지는지, 그때까지 보낸 바이트가 벡터의 몇 배인지 본다.

# %%
from helpers import ring_panel

ring_panel()

# %% [markdown] lang="ko"
# rank가 넷이면 모두 여섯 걸음이고, 걸음마다 벡터의 4분의 1을 보내므로 벡터의 1.5배, 곧 2 × 3/4배를 보낸다. rank를 늘려도 두 배를 넘지 않는다. 대신 걸음 수가 늘어난다.
#
# ### 논문의 그림 1을 모델에서 얻기
#
# 6.4절의 모델로 네 단계를 모두 실행해 그린다. DDP는 그레이디언트를 보내려고 묶음(bucket)에 한 벌 더 담아 두는 것이 기본값인데(`gradient_as_bucket_view=False`), 논문은 이것을 세지 않으므로 여기서는 묶음이 곧 그레이디언트이게 한다. 점선은 논문의 그림 1과 표 1에 적힌 값이다. 막대가 점선을 넘는 곳이 두 군데 있다.

# %%
from virtual_gpu.drawing.shards import draw_stages

ledgers = [shard_ledger("ZeRO-7.5B", 64, stage, gradient_as_bucket_view=True) for stage in range(4)]
draw_stages(ledgers)

# %% [markdown] lang="ko"
# 0단계와 3단계는 모델이 0.5% 작은 만큼만 다르다. 나머지 둘이 다른 까닭은 6.2절과 같다. 2단계에서는 자기 조각 2Ψ/N만큼 더 들고, 1단계에서는 텐서가 통째로 나뉜다.
# `ZeroRedundancyOptimizer`는 가장 큰 텐서부터, 지금까지 가장 적게 받은 rank에게 준다. 그래서 가장 큰 텐서인 임베딩을 받은 rank 0이 남들보다 많이 갖는다(`ledgers[1]`을 출력하면 rank마다 나온다). DDP에서 그레이디언트를 묶어 보내는 부분(reducer)은 값을 읽는 C++ 코드라 값이 없는 텐서로는 돌지 않는다. 그래서 0단계와 1단계는 그것 없이 실행했다.
#
# ### 나눌 행보다 GPU가 많으면
#
# Llama-3.1-405B를 ZeRO-3만으로 GPU 16,384개에 나누면 어떻게 될까? Meta가 이 모델을 학습할 때 쓴 수다. 열은 모델, GPU 수, 센 GB, 식의 GB, 오가는 양(Ψ의 배수)이다.
# GPU가 늘어날 때 센 값과 식이 어디서부터 벌어지는지 본다.

# %%
for model, n in [("70B", 64), ("70B", 1024), ("405B", 64), ("405B", 1024), ("405B", 16384)]:
    ledger = shard_ledger(f"meta-llama/Llama-3.1-{model}", n, look_at=[0])
    held, formula = ledger.largest.total / 1e9, ledger.paper / 1e9
    print(f"{model:5}{n:7,}{held:10.3f}{formula:10.3f}{ledger.travelled / ledger.parameters:8.2f}")

# %% [markdown] lang="ko"
# GPU 1,024개까지는 식과 같다가 16,384개에서 벌어진다. 메모리는 식보다 28% 많고, 오가는 양은 3Ψ가 아니라 3.84Ψ다. **패딩**(padding) 때문이다.
# FSDP2는 텐서마다 첫째 차원(행)을 GPU 수로 자른다. 405B의 MLP에는 53,248행짜리 행렬이 있는데, 16,384로 나누면 3.25행이므로 모두가 4행짜리 자리를 만든다.
# 키 투영(k_proj)은 1,024행뿐이라 GPU 15,360개에는 돌아갈 행이 없다. 그래도 all-gather는 모두가 같은 크기를 내야 하므로 빈 GPU도 한 행짜리 자리를 만든다.
# 나눌 행보다 GPU가 많으면 더는 나누어지지 않고, 오가는 빈자리만 늘어난다. 그래서 아무도 이렇게 하지 않는다. Meta는 텐서 병렬 8 × 파이프라인 16 × 데이터 병렬 128로 배열했고, 데이터 병렬 128개 안에서만 조각을 나누었다. 순전파 뒤에 파라미터를 다시 나누지도 않았다(Llama 3 논문, arXiv 2407.21783, 3.3절). 서버가 여럿일 때는 서버 안에서만 나누는 HSDP도 쓴다(6.6절).
