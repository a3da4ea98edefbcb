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
# # 9장. 내 GPU에 맞추기
#
# **내 모델이 내 GPU에 들어갈까? 들어가지 않는다면 무엇을 바꾸어야 할까?** 정밀도, 누적, 체크포인팅, 여러 GPU, LoRA, QLoRA까지 도구는 다 있다. 문제는 조합이다. 하나를 고르면 다른 것의 효과가 달라진다.
#
# 이 장에서는 조합을 살펴 순위를 매기는 **플래너**(planner)에 묻는다. 들어가는 계획을 순위대로 얻고, 탈락한 까닭을 읽고, 고른 계획을 파일로 내보내 내 프로그램으로 확인한다. 플래너의 숫자는 3장의 가상 GPU에서 센 **예측**이고, 우리가 T4에서 잰 값은 없다. 얼마나 믿을 만한지는 9.9절에서 따진다.
#
# <details><summary>급하면 하나만 한다</summary>
#
# - 오류 메시지가 있다: [10.2절](10_oom_clinic.ipynb)의 진단부터 하고, 9.10절의 표에서 바꿀 것을 찾는다.
# - 설정 파일이 있다: `virtual-gpu fit --from 파일 --gpu T4 --margin 0.05`(9.8절)
# - 스크립트가 있다: `virtual-gpu run --gpu T4 train.py …`(9.10절)
# - 처음부터 고른다: 9.1절의 한 줄에 `margin=0.05`를 더한다.
#
# 명령은 저장소의 폴더에서 `pip install ".[models]" "trl>=1.16"`을 하면 생기고(TRL은 손실 나누기에 쓴다), 설치하지 않으면 `python -m virtual_gpu`라고 쓴다.
#
# </details>
#
# ## 9.1 58억 모델, T4 한 장
#
# 한국어 모델 polyglot-ko-5.8b(가중치만 16비트로 11 GiB)를 무료 T4에서 길이 512, 배치 16으로 학습하고 싶다. 배치 16은 스텝 하나가 배우는 샘플의 수다. 한 번에 넣든, 4장처럼 나누어 누적하든 상관없다.
#
# > **주장 1.** "16 GB 카드에서 58억 모델을 학습하려면 4비트로 줄여야 한다"
#
# 들어가는 것 가운데 학습을 가장 덜 바꾸는 방법은 무엇일까? 전체 미세 조정, LoRA, QLoRA 가운데 하나를 골라 `None` 대신 적는다.

# %%
from helpers import guess, plan_training

method = guess("9.1", None, ("full", "lora", "qlora"))
method

# %% [markdown] lang="ko"
# 플래너에게는 한 줄로 묻는다. 표의 순서가 순위다. 방법마다, 체크포인팅을 끈 것과 켠 것마다 한 줄이고(끈 채로 배치가 한 번에 들어가면 켠 줄은 없다), 마이크로 배치는 들어가는 것 가운데 가장 큰 것이다. **손실 나누기**(로짓을 조각마다 만들어 손실을 구하는 것, 3.11절)는 두 경우에 해 본다. 체크포인팅을 켠 줄에서 배치가 한 번에 들어가지 않을 때와, 켠 줄이든 끈 줄이든 그 줄에 한 샘플도 들어가지 않을 때다. 덕분에 들어가거나 마이크로 배치가 커지면 한 줄을 더한다. 마이크로 배치는 줄마다 다를 수 있다. **판정 한도**는 할당자가 확실히 쓸 수 있는 크기이고(어떻게 정하는지는 9.4절), 필요한 메모리가 그 안이면 들어간다고 적는다. 어느 방법이 첫째인가?

# %%
plans = plan_training("EleutherAI/polyglot-ko-5.8b", gpu="T4", length=512, batch=16)
plans

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
method.against(plans.best.recipe.method)

# %% [markdown] lang="ko"
# 네 줄이 남았다. 주장 1을 판정한다.
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 첫째 계획은 4비트가 아니라 LoRA다. 가중치를 fp16으로 얼려 두고 샘플을 하나씩 16번 누적하면 58억 모델이 T4에 들어간다. 예측이고, 재어 보지는 않았다(9.9절).
#
# </details>
#
# 같은 것을 그림으로 본다. 막대는 메모리를 가장 많이 쓰는 순간의 구성이고, 실선은 **카드의 한도**(3장의 14.64 GiB), 점선은 판정 한도다(둘이 왜 다른지는 9.4절). 파란색(파라미터)과 분홍색(순전파 상태)의 비율이 방법마다 어떻게 다른가?

# %%
plans.chart()

# %% [markdown] lang="ko"
# LoRA의 막대는 8할쯤이 파란색이다. 둘째 줄의 체크포인팅이 메모리를 더 쓰는 것처럼 보이는 것은 마이크로 배치가 8배이기 때문이다. 1 × 16으로 맞추면 12.98 GiB가 11.41 GiB로 준다(9.5절의 끝에서 센다). QLoRA는 가중치가 3분의 1로 줄어, 빈 자리에 샘플을 더 넣은 만큼 분홍색이 늘었다. 맨 아래 흐린 두 막대는 **탈락한 방법**이다. 전체 미세 조정은 상태(파라미터, 그레이디언트, 옵티마이저 상태)만으로도 한도의 몇 배라 그림을 벗어난다.
#
# ## 9.2 직접 바꿔 보기
#
# 모델, GPU, 길이, 배치, 허용할 방법을 정하고 **찾기**를 누른다. 처음 보는 모델이면 10초가 넘게 걸리고, 들어가는 것이 없으면 1, 2분 걸린다. **모델 × GPU 한눈에 보기**를 펼치면 미리 찾아 둔 답이 있다. 길이에는 평균이 아니라 **가장 긴 샘플의 토큰 수**를 넣는다(10.3절).
#
# **손실 나누기**는 로짓을 한꺼번에 만들지 않고 조각마다 만드는 것이다. 로짓만 한 텐서 셋이 있던 자리에 조각 하나(많아야 4,096토큰 × 32,768어휘)만 둔다. 그 대신 조각의 로짓을 역전파에서 한 번 더 계산한다. 어휘가 30,080개인 polyglot-ko에서는 마이크로 배치가 작으면 조금, 151,936개인 Qwen3에서는 크게 준다. 결과는 반올림만 다르다. TRL 1.16의 `SFTTrainer`가 기본으로 하는 일이고, 플래너는 TRL의 그 함수를 실행해 센다. TRL 1.16이 없거나 그 함수로 로짓을 만들 수 없는 구조이면 찾지 않는다.
#
# **CPU 오프로드**를 켜면 전체 미세 조정의 파라미터, 그레이디언트, 옵티마이저 상태를 RAM에 두는 계획도 찾는다(9.6절). T4처럼 bf16 연산 장치가 없는 카드에서는 찾지 않는다.
#
# 패널의 다른 칸은 그대로 두어도 된다. **학습 목표**를 DPO(좋은 답과 나쁜 답의 쌍으로 하는 선호 학습, [12장](12_two_models.ipynb))로 바꾸면 배치는 쌍의 수, 길이는 질문에 답 하나를 이은 문장의 길이다(12.9절). 미리 찾아 둔 답은 SFT의 것이다. **순위 기준**과 **남는 메모리로 재계산 줄이기**는 9.12절에서 다룬다. **RAM**에서 Colab이나 Kaggle을 고르면 그 RAM으로 확실히 모자라는 계획을 뺀다(9.12절의 '긴 글').
#
# **추가 설정**을 펼치면 LoRA의 rank와 대상, 어댑터 없이 통째로 학습할 층(`modules_to_save`, 8.7절), 여러 GPU로 나누는 방식([7장](07_split_model.ipynb))을 정한다. 나누는 것은 전체 미세 조정만이고, GPU가 둘 이상이며 bf16 연산 장치가 있어야 한다. 나눌 수 없는 모델도 있다. 예를 들어 Qwen3-4B, A100-40GB, GPU 4개에서 텐서 병렬 2를 고른다. `device_map`은 T4 두 장에서도 되고, 모델이 카드마다 통째로 들어가지 않을 때만 찾는다.
#
# 한 가지씩 바꾸어 본다. 다음으로 갈 때는 처음 값(9.1절과 같다)으로 되돌린다.
#
# - 길이를 1024로, 2048로 늘린다. 어느 계획부터 사라지는가?
# - GPU를 L4로 바꾼다. 정밀도 열에서 무엇이 바뀌는가?
# - 모델을 Qwen3-4B로 바꾼다. 표 아래에 어떤 주의(⚠)가 붙는가?
# - 전체 미세 조정만 남긴다. 무엇을 바꾸라고 하는가?
# - **내 모델과 내 GPU**를 넣는다.

# %%
from helpers import planner_panel

planner_panel()

# %% [markdown] lang="ko"
# <details><summary>답 (먼저 바꿔 본 다음에 연다)</summary>
#
# - **길이.** 체크포인팅 없는 LoRA가 먼저 사라진다. 길이 1024의 샘플 하나는 512의 샘플 둘과 토큰 수가 같은데, 512의 둘이 이미 넘친다(9.5절). 나머지 셋은 마이크로 배치를 줄이면 된다.
# - **L4.** `mixed_fp16`이 `mixed_bf16`이 된다. T4에 없던 bf16 연산 장치가 있기 때문이다.
# - **Qwen3-4B.** 그룹 쿼리 모델이라 T4에서는 길이 × 길이 행렬을 만드는 커널로 간다는 주의다(3.12절). 계획은 그것을 피하는 한 줄이 있는 것으로 센다. 어휘가 큰 모델이라 **손실 나누기** 열도 생긴다. 둘이 얼마나 줄이는지는 9.12절에 있다.
# - **전체 미세 조정만.** 방법을 LoRA로 바꾸거나 GPU를 A100-40GB로 바꾸라고 한다. A100에서는 순수 bf16을 쓸 수 있어 상태가 파라미터마다 10바이트에서 6바이트로 준다. 대신 ⚠가 붙는다(9.6절).
#
# </details>
#
# 목록에 없는 GPU는 `plan_training(..., gpu="24GiB, 8.6")`처럼 메모리와 계산 능력(compute capability)으로 적는다. 모델과 GPU마다 길이 512, 2048, 8192의 첫째 계획은 [모델과 GPU의 답](../../docs/answers.md)에 모아 두었다.
#
# 오프로드는 네 가지를 센다. 체크포인트를 RAM에 두는 것은 방법과 옵티마이저를 그대로 두고는 달리 들어가지 않을 때만 해 본다(9.12절). 학습 상태(파라미터, 그레이디언트, 옵티마이저 상태)를 RAM에 두는 것(9.6절)은 `cpu_offload=True`로, 페이지 옵티마이저(8.13절)는 `optimizer="paged_adamw_8bit"`처럼 물을 때 센다. 이 둘은 묻지 않아도, 들어가는 것이 없으면 그렇게 바꾸어 보고 들어갈 때 알려 준다. 남길 자리가 없는 결과를 RAM에 두는 것은 `selective=True`일 때 해 본다(9.12절). 7장의 파이프라인 병렬과 전문가 병렬은 `pipeline_parallel=`과 `expert_parallel=`로 물을 때만 찾는다(텐서, 시퀀스, 컨텍스트 병렬은 9.7절). 그 밖의 오프로드와 `torch.compile`은 찾지 않는다. 그런 프로그램은 9.10절처럼 그대로 실행해 본다.
#
# ## 9.3 표 읽기
#
# 9.1절의 첫째는 왜 첫째인가? 순위는 다음 차례로 정한다. 앞의 것이 다르면 뒤의 것은 보지 않는다.
#
# > 학습을 덜 바꾼다 → 추가 연산이 적다 → GPU끼리 보내는 양이 적다 → CPU와 주고받는 양이 적다 → 스텝 시간의 하한이 짧다 → 누적이 적다 → 남는 메모리가 많다
#
# 학습을 바꾸는 정도는 전체 미세 조정, LoRA, QLoRA의 차례다. 같은 방법이면 혼합 정밀도가 순수 bf16보다, AdamW가 8비트 AdamW보다, QLoRA에서는 4비트로 줄이지 않는 가중치를 fp32로 둔 것이 16비트로 둔 것보다 앞선다(9.12절). 표의 마지막 열은 바로 위의 계획과 어디에서 갈렸는지 알려 준다.
#
# `mixed_fp16`은 fp16으로 계산하고 학습할 파라미터는 fp32로 두는 것, `adamw_fused`는 융합 AdamW다(3장). 처음 보는 열은 이렇다.
#
# - **필요한 메모리**: 한도가 이만큼이면 학습이 끝까지 간다. 판정 한도에서 이것을 뺀 것이 **남는 메모리**다.
# - **추가 연산**: 체크포인팅과 손실 나누기가 다시 계산하느라 더 드는 FLOPs다. 체크포인팅이 다시 하는 것은 순전파의 7할쯤이다(5.8절의 조기 중단). 전체 미세 조정의 스텝은 순전파 세 번만큼이라 +23%(9.7절)이고, LoRA의 스텝은 얼린 가중치의 그레이디언트를 구하지 않아 두 번만큼이라 +35%다.
# - **CPU로 보내는 양**: 체크포인트를 RAM에 두거나(9.12절), 옵티마이저 상태의 페이지가 카드에 다 놓이지 않거나(8.13절), 학습 상태를 RAM에 두는(9.6절) 계획이 있을 때만 생기는 열이다. 앞의 둘은 같은 양이 돌아온다. 셋째는 보내는 것이 그레이디언트이고, 카드로 가는 파라미터는 그 두 배쯤이며 이 열에 없다.
# - **스텝 시간의 하한**: **아무리 빨라도** 이보다 빠를 수 없는 시간이다. 제조사가 밝힌 최고 속도로 센다. 계산과 가중치 읽기 가운데 긴 것에 체크포인트가 오가는 시간을 더하고, 페이지와 RAM에 둔 학습 상태는 그보다 오래 걸릴 때만 센다(계산과 겹칠 수 있다).
#
# 첫째 계획을 꺼내 필요한 메모리를 종류별로 본다.

# %%
best = plans.best
best

# %% [markdown] lang="ko"
# 얼린 가중치가 10.98 GiB다. 남은 자리에 순전파 상태가 한 샘플만큼밖에 들어가지 않아 마이크로 배치가 1이 되었다. 그 한 샘플에서 가장 큰 것은 로짓일까, MLP일까, 어텐션일까?
#
# 같은 설정을 실행하고 ▶를 눌러 '순전파 상태와 임시 텐서' 안의 층과 모듈까지 연다. (누적 16번은 같은 일의 되풀이라 두 번만 한다. 번호는 그 텐서를 만든 단계다. 이 막대는 텐서의 최대라 표의 12.98 GiB보다 조금 작다.)

# %%
from helpers import predict_memory
from virtual_gpu.plan.measure import setting_of

setting = setting_of(plans.request, best.recipe, best.micro_batch, accumulation=2)
predict_memory(setting, gpu="T4").zoom()

# %% [markdown] lang="ko"
# **어텐션**이다. 똑같은 27개 층의 합에서 `attention`이 648.84 MiB, `mlp.act`가 432 MiB다. 27로 나누면 층 하나에 24 MiB와 16 MiB다. 층 정규화 둘도 합이 434 MiB로 MLP만큼 크다. autocast가 입력을 fp32로 바꾸어 저장하기 때문이다(첫 층은 저장하는 것이 달라 따로 나온다). 로짓만 한 텐서는 순전파에 하나, 역전파에 둘이 있는데 셋을 더해도 176 MiB다.
#
# ### 시간의 하한
#
# 센 FLOPs를 제조사가 발표한 최대 속도로 나눈다(가중치를 읽는 데 더 오래 걸리면 그 시간이다). T4의 fp16 최대 속도는 NVIDIA의 데이터시트에 65 TFLOP/s로 적혀 있다. 표의 값과 비교한다.

# %%
print(f"{best.flops / 1e12:.1f} TFLOP / 65 TFLOP/s = {best.flops / 65e12:.2f} s")

# %% [markdown] lang="ko"
# 이것은 **예상이 아니라 하한**이다(센 FLOPs에는 커널이 마스크로 건너뛸 수 있는 어텐션의 절반도 들어 있어, 길이가 수천이면 조금 길게 나온다). 최대 속도는 나오지 않고, 4비트를 풀거나 GPU끼리 주고받는 시간도 든다. 그래도 쓸모가 있다. 스텝 하나가 2.96초보다 빠를 수 없다면 1,000스텝은 아무리 빨라도 49분이다. (텐서 코어가 없거나 최대 속도를 찾지 못한 카드에서는 이 칸이 비어 있다.)
#
# 그렇다면 순위의 차례는 실제로 걸리는 시간의 차례이기도 할까?
#
# > **주장 2.** "추가 연산이 없는 계획이 더 빠르다"
#
# 배치 16을 만드는 두 길을 견준다. 체크포인팅을 켜고 한 번에 하는 것과, 추가 연산 없이 4 × 4로 누적하는 것이다. H100에서 polyglot-ko-1.3b를 길이 256으로 전체 미세 조정한 기록이다. bf16은 가중치까지 bf16이라는 뜻이고, 첫 줄은 둘 다 하지 않은 것이다.

# %%
from helpers.card_times import h100_steps

h100_steps("bf16 batch 16", "bf16 batch 16 checkpointed", "bf16 4 x 4 accumulated")

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 마이크로 배치가 같으면 맞다. 한 번에 16이면 83.7 ms, 체크포인팅을 켜면 120.4 ms다. 그런데 추가 연산을 없애려고 마이크로 배치를 줄인 4 × 4는 233.6 ms로 더 느리다(중앙값으로 견주어도 차례는 같다). 4개를 한 번 하는 데 58 ms(233.6 ÷ 4)인데 16개를 한 번에 하면 84 ms다. 일이 4분의 1인데 시간은 7할이니, 마이크로 배치 4로는 H100이 놀고 있는 것이다(4.7절).
#
# 9.1절의 1 × 16도 느리다는 뜻은 아니다. H100의 58 ms 가운데 계산의 하한은 8 ms쯤(8 TFLOP ÷ 초당 989 TFLOP)이고, 나머지의 많은 몫은 CPU가 커널을 내는 것을 기다린 시간일 것이다. T4의 1 × 16은 마이크로 배치 하나의 하한만 0.19초(192.6 ÷ 16 ÷ 65)라 기다릴 일이 적다. 재지 않은 짐작이다.
#
# </details>
#
# 그래서 둘 다 들어가면 스텝의 시간을 재어 보고 고른다. 순위는 취향이라 `prefer`로 바꿀 수 있지만(9.12절), **무엇이 들어가는가**는 취향이 아니다.
#
# ### 한 장에 놓고 보기
#
# 잰 계획을 모두 그림 한 장에 놓는다. 가로는 한 스텝의 연산, 세로는 필요한 메모리, 번호는 표의 순위다. 회색 선은 연산과 메모리가 모두 자기보다 나은 것이 없는 계획을 잇는다. 1은 선 위에 있을까?

# %%
plans.frontier()

# %% [markdown] lang="ko"
# 없다. 연산이 같고 메모리를 1.26 GiB 덜 쓰는 3이 있다. 2에는 4가 있다. 그래도 1이 첫째인 것은 순위가 메모리보다 **무엇을 학습하는지**를 먼저 보기 때문이다. 같은 연산으로도 QLoRA가 학습하는 것은 4비트로 줄인 가중치에 붙인 어댑터다. 터미널에서는 `--picture FILE.svg`로 이 그림을 저장한다.
#
# ## 9.4 못 쓰는 자리와 모르는 것
#
# 필요한 메모리는 텐서의 합보다 크다. 캐싱 할당자가 단편화로 못 쓰는 자리까지 있어야 학습이 끝까지 가기 때문이다([3장](03_memory_decomposition.ipynb)). 그림의 옅은 회색이 그 몫이다. 텐서의 최대를 128로 나눈 눈금으로 찾으므로 많아야 한 칸쯤 넉넉하게 적힌다.
#
# 그래도 세어서 알 수 없는 것이 남는다. T4라도 카드마다 용량이 다르고, CUDA 컨텍스트가 차지하는 크기도 다르다. 플래너는 이것을 값 하나가 아니라 **범위**로 안다.

# %%
from helpers import human_bytes

room = plans.request.room
for what, seen in (("memory", room.memory), ("context", room.outside[0].bytes)):
    print(f"{what}: {human_bytes(seen.low)} ~ {human_bytes(seen.high)}")
print(f"limit: {human_bytes(plans.request.limit_bytes)}")

# %% [markdown] lang="ko"
# 사람들이 올린 오류 메시지와 로그에서 모은 범위다(`virtual_gpu/cards.json`). 컨텍스트는 0.01 GiB까지만 적힌 숫자 넷을 더하고 빼어 구한 것이라, 반올림의 몫으로 파일의 범위를 양쪽으로 16 MiB씩 넓혔다(넷이 모두 한쪽으로 치우치면 20 MiB까지 어긋날 수 있다). 플래너는 늘 나쁜 쪽 끝을 가정한다. 가장 작은 용량에서 가장 큰 컨텍스트를 빼고, 규칙을 모르는 커널의 임시 메모리 몫으로 1.01로 나눈 14.255 GiB가 마지막 줄의 **판정 한도**다. 그림의 **카드의 한도** 14.64 GiB는 나쁜 쪽이 아니라 흔한 쪽이다. Colab의 T4가 답한 용량 14.74 GiB에서 컨텍스트 0.10 GiB를 뺐다.
#
# 그 위에 더 남겨 두고 싶은 만큼이 **여유**(margin)다. 여유가 20%라면 필요한 메모리의 1.2배가 판정 한도 안에 들어야 한다. 알맞은 여유는 프로그램마다 달라 기본은 0이고, 여러분이 정한다. 플래너는 같은 일을 한도 쪽에서 한다. 여유 5%로 찾은 표의 머리에는 14.255 ÷ 1.05 = 13.58 GiB가 판정 한도로 적힌다. 여유가 이미 들어 있으니 다시 곱하지 않는다. 여유를 늘리면 첫째가 바뀔까?

# %%
for margin in (0.0, 0.05, 0.2):
    found = plan_training("EleutherAI/polyglot-ko-5.8b", gpu="T4", length=512, batch=16, margin=margin)
    print(f"margin {margin:.0%}: {len(found)} plans, first {found.best}")

# %% [markdown] lang="ko"
# 5%에서 첫째는 그대로다. 체크포인팅을 켠 LoRA가 8 × 2에서 4 × 4로 줄고, 손실까지 나누면 8 × 2가 들어가서 계획이 다섯이 된다. 20%를 두면 첫째가 바뀐다. 9.1절의 둘째 줄이 마이크로 배치를 8에서 2로 줄여 첫째가 되었다. 얼마가 알맞은지는 예측이 얼마나 모자랄 수 있는지에 달렸다. 9.9절에서 잰 값으로 정한다.
#
# ## 9.5 탈락한 방법은 왜 탈락했나
#
# > **주장 3.** "OOM이 나면 배치 크기를 줄이면 된다"
#
# 맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고르고 실행한다. `why()`는 탈락한 것과 그 까닭을 모두 적는다. 까닭이 같은 것끼리 묶으면 몇 무리인가?

# %%
plans.why()

# %% [markdown] lang="ko"
# <details><summary>판정 (무리를 나누어 본 다음에 연다)</summary>
#
# **조건부로 맞다.** 세 무리 가운데 첫째에서만 맞다.
#
# - **순전파 상태가 넘치는 것.** 앞의 네 줄이다. 셋째는 체크포인팅에 손실 나누기까지 해도 16개를 한 번에 넣기에는 빠듯하다는 것이다(그래서 9.1절의 표에 그 줄이 없다). 상태는 들어가므로 마이크로 배치를 줄이면 된다. '가장 큰 것'이 파라미터여도 그렇다. 가장 큰 것이 아니라 **줄이면 들어가는 것**을 본다.
# - **상태부터 넘치는 것.** 전체 미세 조정은 계산할 자리가 아니라 **놓을 자리**부터 없다. 배치를 1로 줄여도 소용없다.
# - **쓸 수 없는 것.** 순수 fp16의 전체 미세 조정은 들어가더라도 제대로 배우지 못한다(foreach와 fused는 옵티마이저의 두 구현이고, 3.16절에서 학습해 보았다). bf16은 T4에 연산 장치가 없어, 오류는 나지 않지만 에뮬레이션이라 느리다(1장).
#
# 마지막 두 줄은 탈락한 것이 아니라 찾지 않은 것이다. 페이지 옵티마이저는 물을 때만 센다(9.2절). QLoRA가 그대로 들어가니, 4비트로 줄이지 않는 가중치까지 16비트로 두는 것은 해 보지 않는다(9.12절).
#
# </details>
#
# 마이크로 배치를 몇까지 넣을 수 있는지는 두 번만 재면 **어림할** 수 있다. 길이를 256으로 줄인 QLoRA(체크포인팅 없음)에서 샘플 하나와 둘을 잰다.

# %%
from virtual_gpu.plan.measure import measure
from virtual_gpu.plan.request import make_request

short = make_request("EleutherAI/polyglot-ko-5.8b", "T4", length=256, batch=16)
for micro_batch in (1, 2):
    measured = measure(short, plans[2].recipe, micro_batch, 16 // micro_batch)
    print(micro_batch, human_bytes(measured.needed_bytes))

# %% [markdown] lang="ko"
# **연습 9-1.** 마이크로 배치가 1, 2, 4, 8, 16 가운데 얼마일 때까지 T4에 들어갈까? 샘플마다 같은 만큼 는다고 보고, `one`(한 샘플), `two`(두 샘플), `limit`(판정 한도)에서 들어가는 가장 큰 마이크로 배치를 돌려주는 함수를 완성하라. 한 샘플도 들어가지 않으면 0이다. 다른 수로도 채점한다. 막히면 `exercise("9-1").hint()`, 그래도 막히면 `.solution()`을 실행한다.

# %%
from helpers import exercise


def largest(one, two, limit):
    return ...


exercise("9-1").check(largest)
print(largest(5.01, 5.86, 14.25))

# %% [markdown] lang="ko"
# 느는 크기가 샘플마다 꼭 같지는 않다. 답을 낸 다음 마지막 줄에 나온 마이크로 배치와 그 두 배를 앞 셀의 `(1, 2)`에 더해, 앞의 것은 들어가고 뒤의 것은 넘치는지 확인한다.
#
# ### 플래너를 열두 줄로
#
# 이제 플래너가 하는 일을 손으로 해 본다. 조합마다 큰 마이크로 배치부터 재어 들어가는 첫째를 남기고, 튜플로 줄을 세운다. 9.1절의 표와 같은가?

# %%
from virtual_gpu.plan import Recipe

request, mine = plans.request, []
for way in ("lora", "qlora"):
    for checkpointing in (False, True):
        recipe = Recipe(way, "mixed_fp16", "adamw_fused", checkpointing=checkpointing)
        for micro_batch in (16, 8, 4, 2, 1):
            plan = measure(request, recipe, micro_batch, 16 // micro_batch)
            if plan.needed_bytes <= request.limit_bytes:
                mine.append(plan)
                break
mine.sort(key=lambda plan: (plan.recipe.method == "qlora", plan.extra_flops, plan.accumulation))
print(*map(repr, mine), sep="\n")
print(repr(measure(request, Recipe("lora", "mixed_fp16", "adamw_fused", checkpointing=True), 1, 16)))

# %% [markdown] lang="ko"
# 같다. 마지막 줄은 체크포인팅을 켠 LoRA를 1 × 16으로 맞춘 것이다. 정렬의 튜플에서 앞의 둘을 맞바꾸면 무엇이 첫째이고 무엇이 둘째일까? 적어 보고 다시 실행한다.
#
# <details><summary>답</summary>
#
# 첫째는 그대로이고, 추가 연산이 없는 것끼리 먼저 모여 둘째가 QLoRA 4 × 4가 된다. 9.12절의 `prefer="speed"`와 같은 차례다.
#
# </details>
#
# 플래너의 나머지는 전체 미세 조정과 여러 장, 손실 나누기(`fused_lm_head=True`), 재지 않아도 아는 것을 건너뛰는 일이다(상태만으로 넘치면 아무것도 재지 않는다).
#
# ## 9.6 아무것도 들어가지 않으면
#
# Llama-3.1-8B를 RTX 4090에서 **전체 미세 조정만** 허용한다. 플래너는 얼마나 모자라는지, 하나만 바꾼다면 무엇을 얼마나 바꾸면 되는지 종류마다 알려 준다. 길이를 줄이라고 할까?

# %%
stubborn = plan_training("meta-llama/Llama-3.1-8B", "RTX 4090", length=512, batch=4, methods=("full",))
stubborn

# %% [markdown] lang="ko"
# 하나씩만 바꾸어 **다시 찾은** 것이고, 화살표 뒤는 그때의 첫째 계획이다.
#
# - **왜 4 × 1인가.** 마이크로 배치가 1이면 네 번 누적해야 하고, 그러면 그레이디언트 15 GiB(80억 × 2바이트)를 둔 채 다음 순전파를 한다. 한 번에 4개를 넣으면 순전파 동안에는 그레이디언트가 없다. 상태가 거의 다인 전체 미세 조정에서는 이쪽이 덜 든다.
# - **방법.** LoRA를 허용하면 그 카드에서 21.83 GiB로 들어간다.
# - **옵티마이저.** 페이지 옵티마이저로 바꾸라는 말이 없다. 상태를 모두 RAM으로 내보내도 파라미터와 그레이디언트만 30 GiB다.
# - **학습 상태를 CPU에.** 파라미터, 그레이디언트, 옵티마이저 상태를 모두 RAM에 두고 AdamW의 스텝도 CPU가 하면 **그 카드 한 장에서** 전체 미세 조정이 된다. 대신 RAM이 155.99 GiB부터다(가중치까지 bf16이면 78.12 GiB). 아래에서 따로 본다.
# - **GPU.** 메모리가 작은 것부터 해 보아 처음으로 들어가는 것이 H100이다. 48 GB 카드에는 8비트 AdamW로도 모자란다. bitsandbytes의 8비트 옵티마이저를 `Trainer`에서 켜면 임베딩의 상태만은 fp32로 두어, 이 모델에서는 128,256 × 4,096 × 6바이트, 3 GiB쯤이 더 든다. 직접 쓴 루프라면 그만큼 덜 들어 RTX A6000에 겨우 들어가지만, 플래너가 내보내는 파일은 모두 `Trainer`처럼 한다.
# - **GPU의 수.** 같은 카드 네 장에 ZeRO-3로 나누면 한 장에 18.83 GiB면 된다.
# - **길이.** 줄이라는 말이 없다. 순수 bf16에 8비트 AdamW를 써도 상태가 파라미터마다 6바이트, 80억 개면 45 GiB쯤이고 임베딩의 3 GiB가 더 붙으니, 길이를 1로 줄여도 들어가지 않는다.
#
# ⚠가 붙은 계획은 들어가도 그대로 믿으면 안 된다. 순수 bf16은 작은 갱신을 반올림으로 잃는다(1.5절). ⚠가 없는 것은 LoRA와 CPU에 두는 계획이고, LoRA는 남는 것이 적다. 9.9절에서 여유를 두고 다시 찾는다.
#
# ### RAM이 많은 컴퓨터라면: 학습 상태를 CPU에
#
# GPU는 작고 RAM은 많은 컴퓨터에서 8B를 통째로 학습할 때 쓰는 것이 CPU 오프로드다. PyTorch에서는 FSDP2의 `CPUOffloadPolicy`가 파라미터, 그레이디언트, 옵티마이저 상태를 모두 RAM에 둔다(DeepSpeed에서 옵티마이저 상태를 옮기는 것이 ZeRO-Offload, 파라미터까지 옮기는 것이 ZeRO-3 오프로드다). 한 장이어도 FSDP2로 감싼다. 그래서 계획의 이름에 ZeRO-3가 붙는다. 블록 하나를 계산할 때마다 그 블록의 파라미터만 카드로 복사하고, 그레이디언트는 나오는 대로 RAM으로 보낸다. 카드에는 무엇이 남을까?

# %%
ram = plan_training("meta-llama/Llama-3.1-8B", "RTX 4090", length=512, batch=4, methods=("full",), cpu_offload=True)
ram

# %% [markdown] lang="ko"
# 첫째 계획이 최대일 때 카드에 무엇이 있는지 종류별로 본다.

# %%
ram.best

# %% [markdown] lang="ko"
# 이번에는 두 계획이 카드 밖에서 쓰는 것이다. RAM, 스텝마다 카드로 가는 파라미터와 돌아오는 그레이디언트, 스텝 시간의 하한을 차례로 적는다.

# %%
from virtual_gpu.plan.host import host_need

for plan in ram.plans:
    print(plan.recipe.precision, host_need(plan).line(None), sep=": ")
    print(f"  to the card {plan.states_to_card_bytes / 1e9:.1f} GB, back {plan.states_to_cpu_bytes / 1e9:.1f} GB")
    print(f"  at least {plan.seconds:.2f} s a step")

# %% [markdown] lang="ko"
# 파라미터, 그레이디언트, 옵티마이저 상태는 0이다. 17.64 GiB는 순전파 상태와 임시 텐서 15.26 GiB, 지금 모아 둔 출력층(128,256 × 4,096 × 2바이트, 1,002 MiB), 단편화 1.40 GiB다. 이제 최대를 정하는 것이 순전파 상태이니, 길이를 늘리려면 체크포인팅부터 켠다. 대가는 RAM과 시간으로 치른다.
#
# - **RAM.** fp32 파라미터, 그레이디언트, AdamW의 상태 둘이면 파라미터마다 16바이트, 80억 개면 120 GiB쯤이다. 스텝에 125.83 GiB인 것은 파라미터와 그레이디언트를 고정 메모리(GPU가 바로 읽어 가도록 묶어 둔 RAM, 11.4절)에 두는데, 그것만은 텐서마다 2의 거듭제곱으로 올려 잡기 때문이다(224 MiB인 MLP의 행렬이 256 MiB를 쓴다). 불러올 때의 92.83 GiB는 그보다 적어 문제가 되지 않는다. **저장할 때가 더 든다.** 이 모든 것이 있는 채로 가중치를 한데 모으므로 29.92 GiB가 더 든다. RAM이 144 GiB라면 학습을 마치고 나서 저장하다 죽는 셈이다. 가중치까지 bf16이면 절반이지만 ⚠가 붙는다. RAM이 128 GB면 둘째만, 192 GB면 둘 다 된다. `host="120GB"`처럼 운영 체제의 몫을 뺀 RAM을 함께 주면 모자란 계획은 빠진다.
# - **오가는 양.** 파라미터는 순전파와 역전파에서 한 번씩 카드로 가고, 그레이디언트는 한 번 돌아온다. fp32로 80억 개면 32 GB(표의 29.92 GiB)이니 62 GB와 32 GB다. 두 배인 64 GB보다 조금 적은 것은 FSDP2가 마지막에 모으는 묶음(출력층)을 순전파에서 가져온 채 역전파를 시작하기 때문이다. **마이크로 배치마다** 오가므로 누적을 늘리면 그만큼 늘어난다. 그래서 이 계획에서는 마이크로 배치를 크게 하는 것이 시간을 아낀다.
# - **시간.** 하한 1.97초는 62.1 GB가 이 카드의 버스(PCIe 4.0 x16, 최고 초당 31.5 GB)를 지나는 시간이다. 돌아오는 32.1 GB는 반대 방향이라 겹친다고 보았다. 계산은 6 × 80억 × 2,048토큰, 99 TFLOP쯤이라 최고 속도(초당 165.2 TFLOP)로 0.6초이니 버스가 하한을 정한다. CPU가 하는 AdamW의 시간은 **여기에 없다**. 그것은 파라미터마다 16바이트를 읽고 12바이트를 쓰는 일이라 80억 개면 225 GB쯤이고, RAM이 초당 50 GB를 읽고 쓴다고 **가정하면** 4.5초다. 복사와 겹치지 않으니 스텝 하나가 6.5초쯤, 1,000스텝이면 1시간 48분이 되는 셈이다. 오래 빌리거나 사기 전에 몇 스텝을 재어 본다.
# - **쓰는 법.** `accelerate.yaml`에 `fsdp_offload_params: true`, 내 루프라면 `fully_shard(module, mp_policy=…, offload_policy=CPUOffloadPolicy())`이고, 통신은 `init_process_group("cuda:nccl,cpu:gloo")`로 연다. `ram.best.save("my_plan")`은 Trainer의 파일을, `kind="torch"`를 더하면 내 루프의 파일을 쓴다. 한 장이어도 `accelerate launch`나 `torchrun`으로 시작한다. 한 장에서 누적하면 accelerate의 루프는 마이크로 배치 사이에 그레이디언트를 카드에 두므로 `kind="accelerate"`로는 쓰지 않는다. DeepSpeed의 오프로드는 카드와 RAM을 이 계획보다 더 써서(작은 모델 하나로 실행해 보았다) 파일로 쓰지 않는다.
# - **여러 장이면** 조각을 나누어 가지므로 한 장에 오가는 양이 그만큼 준다. RAM은 한 컴퓨터 안에서 모두 더한 것이라 줄지 않는다.
# - **찾지 않는 것.** LoRA와 QLoRA(그레이디언트와 상태가 작아 옮길 것은 얼린 가중치뿐인데, 그것은 세지 않는다), 8비트 옵티마이저(융합 AdamW만 센다), bf16이 없는 카드의 fp16(bf16과 fp32로만 실행해 보았다)이다.
# - **카드에서 잰 것.** [torchtune의 README](https://github.com/pytorch/torchtune/blob/bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1/README.md)는 Llama 3.1 **70B**를 CPU 오프로드로 전체 미세 조정하니 A100 여덟 장에서 한 장에 **13.9 GiB**였다고 적었다(길이 2,048, 배치 2, `torch.compile`). README에 없는 것은 그때의 설정 파일을 따랐다(가중치까지 bf16, 체크포인팅, 손실은 8조각). 같은 일을 하는 프로그램을 컴파일 없이 가상 GPU에서 실행하면 13.89 GiB다(9.9절의 636개 가운데 하나다). 견준 것은 이것 하나이고, 둘째 계획처럼 bf16이다. 첫째 계획의 혼합 정밀도와 RAM, 시간은 견주지 못했다.
# - **다른 길.** 같은 README에는 8B를 RTX 4090 한 장에서 18.9 GiB로 전체 미세 조정했다는 줄도 있다. torchtune의 한 장짜리 설정은 가중치까지 bf16이고, 8비트 상태를 페이지에 두고, 그레이디언트가 나오는 대로 역전파 안에서 갱신하고 버린다(`optimizer_in_bwd`). 그래서 누적을 할 수 없다. 플래너는 이것을 찾지 않는다.
#
# **연습 9-2.** Qwen3-14B를 T4에서 길이 16384, 배치 8로 전체 미세 조정하려니 들어가지 않는다. T4는 그대로 두고 들어가게 하는 변화를 찾아라. 바꿀 수 있는 것은 `methods`, `length`(512 이상), `batch`(8 이상), `optimizer`, `lora_rank`이고, 이 가운데 하나만 바꾸어서는 되지 않는다. 여유는 두지 않는다. `{"methods": ("lora",)}`처럼 적는다. 길이는 64의 배수로, 되도록 적게 줄인다. 한 번 찾는 데 1, 2분 걸린다. 먼저 방법을 정하고, 그 방법으로 다시 찾은 `plan_training(..., methods=(…,)).changes`에 길이를 얼마까지 두어도 되는지 묻는다.

# %%
changes = ...
exercise("9-2").check(changes)

# %% [markdown] lang="ko"
# ## 9.7 GPU가 여러 장이면
#
# *GPU가 한 장이면 9.8절로 건너뛴다.* 여러 장이면 모델을 통째로 복제하거나(DDP), ZeRO-2나 ZeRO-3로 나눈다. (층 하나를 GPU 여럿이 함께 계산하는 **텐서 병렬**은 7.3절에서 다루었다. 플래너는 전체 미세 조정에서, 방법과 옵티마이저를 그대로 두고는 달리 들어가지 않거나 배치가 GPU 수보다 작을 때만 이것을 해 본다. `tensor_parallel=2`처럼 적으면 그것만 찾는다. 블록의 모양이 맞으면 시퀀스 병렬(7.4절)을 함께 쓴다. 글 하나를 여럿이 나누는 컨텍스트 병렬(`context_parallel`)도 같은 때에 해 보고, GPU가 여덟 장보다 많으면 모델을 여러 벌 두는 HSDP(`replicas`)도 센다. 파이프라인 병렬과 전문가 병렬은 물을 때만 센다.) Llama-3.1-8B를 H100 여덟 장에서 길이 2048, 배치 64, 혼합 정밀도로 전체 미세 조정한다. 무엇이 첫째일까?

# %%
split = guess("9.7", None, ("DDP", "ZeRO-2", "ZeRO-3"))
split

# %% [markdown] lang="ko"
# "나누기", "추가 연산", "보내는 양"의 열을 함께 본다. 보내는 양은 한 스텝에 파라미터와 그레이디언트를(텐서 병렬이면 순전파 상태도) 주고받느라 **GPU 한 장이** 보내는 바이트다(자기 조각은 빼므로 6.3절에서 센 크기의 (N − 1)/N배다). 마이크로 배치 × 누적은 GPU 한 장의 몫이다(텐서 병렬이면 함께 계산하는 묶음 하나의 몫이다). 2 × 4를 여덟 장이 하면 64다.

# %%
eight = plan_training(
    "meta-llama/Llama-3.1-8B", "H100", 8,
    length=2048, batch=64, methods=("full",), precision="mixed_bf16",
)  # fmt: skip
eight

# %% [markdown] lang="ko"
# 맞혔는가?

# %%
split.against(f"ZeRO-{eight.best.recipe.stage}")

# %% [markdown] lang="ko"
# DDP는 표에 없다. GPU마다 상태를 모두 두어야 하기 때문이다. AdamW든 8비트 AdamW든 상태만으로 한도를 넘고, 그레이디언트를 묶어 보낼 버퍼까지 있어야 한다.
#
# 앞의 둘은 추가 연산이 같고, 순위를 가른 것은 **보내는 양**이다. 그런데 첫째는 추가 연산을 아끼려고 셋째의 네 배를 보낸다. 어느 쪽이 빠를지 어림해 본다. 둘 다 최대 속도의 4할로 계산하고, 통신이 계산과 겹치지 않는다고 **가정한다.**
#
# - **아끼는 것**: 하한의 차이가 0.187초(0.995 − 0.808)이니 0.187 ÷ 0.4 = 0.47초.
# - **더 보내는 것**: 104.70 − 26.18 = 78.5 GiB, 곧 84 GB.
# - **본전**: 84 GB ÷ 0.47초 = 초당 180 GB쯤(한 방향). 통신이 이보다 빠르면 첫째가 빠르다. H100의 NVLink(제조사의 값으로 초당 450 GB)라면 첫째가, 6.1절의 PCIe(초당 15.75 GB)라면 셋째가 빠르기 쉽다.
#
# 마이크로 배치 2가 8보다 GPU를 덜 채우면 덜 아끼거나 오히려 느리다(주장 2). 그래서 첫째와 셋째를 모두 재어 본다. (누적하면서 마지막에 한 번만 보내지 않는 까닭은 사건 6-B에 있다. 내보내는 파일에도 `sync_each_batch`를 켠다.)
#
# 그림에서 DDP와 비교한다.

# %%
eight.chart()

# %% [markdown] lang="ko"
# 한도를 멀리 벗어난 흐린 막대가 DDP다. 색이 옅어졌을 뿐, 맨 왼쪽은 통째로 둔 파라미터이고 맨 오른쪽의 회색은 버퍼다(단편화가 아니다). 위의 네 막대에서 하늘색은 **모아 둔 파라미터**다. ZeRO-2는 모은 것을 역전파까지 두고, ZeRO-3는 층마다 모았다가 버린다.
#
# LoRA는 어떨까? Kaggle이 빌려주는 T4 **두 장**에서 Llama-3.1-8B를 LoRA로 학습한다. 16비트 가중치만 15 GiB쯤이라 T4 한 장에는 놓이지도 않는 모델이다.

# %%
pair = plan_training("meta-llama/Llama-3.1-8B", "2 x T4", length=512, batch=16, methods=("lora",))
pair

# %% [markdown] lang="ko"
# 4비트까지 가지 않고 들어간다. 얼린 가중치도 ZeRO-3로 나눈 덕분이다(6장). 판정 한도가 12.71 GiB로 준 것은 GPU끼리 주고받는 NCCL의 버퍼도 나쁜 쪽 끝으로 잡았기 때문이다. 다른 길은 왜 안 되는가?

# %%
pair.why()

# %% [markdown] lang="ko"
# 복제하는 DDP는 상태만으로 넘친다. '빠듯하다'는 두 줄이다. 손실을 나누지 않은 1 × 8(체크포인팅 없음)과 4 × 2(체크포인팅)이고, 모르는 것이 나쁜 쪽이면 넘친다는 뜻이다. 들어간 계획의 대가는 통신이다. 첫째는 체크포인팅 없이 손실만 나누어 추가 연산이 3%뿐이지만, 하나씩 여덟 번 하면서 그때마다 가중치를 다시 모으느라 한 장이 스텝마다 115.82 GiB를 보낸다. 6.1절의 PCIe(초당 15.75 GB)라면 그것만 7.9초로, 통신을 세지 않은 하한 2.01초보다 훨씬 길다. **셋째**는 체크포인팅을 켜고 손실도 나누어 8개를 한 번에 넣으므로 순전파와 역전파를 한 번만 한다. 보내는 것이 8분의 1인 14.48 GiB, 1초쯤으로 주는데 하한은 0.67초 길 뿐이다. 순위는 추가 연산부터 보지만, 이런 카드에서는 셋째부터 재어 볼 만하다. 첫째는 남는 것이 71 MiB뿐이라 여유 5%를 두면 탈락하고(12.64 × 1.05 = 13.27 GiB), 셋째는 그래도 남는다(11.49 × 1.05 = 12.06 GiB).
#
# 여덟 장으로도 OOM을 만난 사람의 이야기는 9.12절에 있다(사건 9-A).

# %% [markdown] lang="ko"
# ## 9.8 파일로, 터미널에서
#
# 9.1절의 첫째 계획을 폴더에 저장한다. 어떤 파일이 생기는가? 그 가운데 `TrainingArguments`에 넣을 값과 LoRA의 설정을 읽는다. 대상 층이 어떤 이름으로 적혀 있는가?

# %%
from pathlib import Path
from tempfile import mkdtemp

folder = Path(mkdtemp())
print(*(path.name for path in best.save(folder)))
print((folder / "training_arguments.json").read_text())
print((folder / "lora_config.json").read_text())

# %% [markdown] lang="ko"
# `train.py`는 두 파일을 읽어 `Trainer`로 학습하는 짧은 스크립트다. **진짜 GPU에서 돌린 적은 아직 없다.** 저장소의 테스트가 작은 모델로 세 방법을 모두 CPU에서 실행한다(transformers 5.23, peft 0.21, accelerate 1.15).
#
# 누적까지 곱하면 16이고, LoRA의 대상 층은 어텐션의 행렬 하나다. `gradient_checkpointing`은 `activation_checkpointing`(5.7절)의 옛 이름이고, 5.23도 읽는다. rank를 바꾸면 α/r도 달라지므로 `lora_alpha`도 함께 고친다(8.7절). 모든 선형층에 붙이려면 `plan_training(..., lora_targets="all-linear")`로 찾는다.
#
# `Trainer` 말고 PyTorch의 루프, Accelerate, TRL, DeepSpeed의 스크립트도 쓸 수 있다(9.12절의 '다른 형식의 스크립트').
#
# 내 것은 이렇게 실행한다.
#
# 1. `best.save("my_plan")`처럼 이름을 주어 저장하고 내려받는다. (Colab에서는 런타임을 GPU로 바꾸면 파일이 사라진다.)
# 2. GPU 없는 내 컴퓨터에서 센다. 저장소의 폴더에서 한 번 `pip install ".[models]" datasets "trl>=1.16"`을 하고(`train.py`가 `datasets`를, 손실 나누기가 `trl`을 쓴다), `my_plan` 폴더에서 `virtual-gpu run --gpu T4 train.py --text 내글.txt`로 들어가는지 센다(9.10절).
# 3. GPU가 있는 곳에 폴더를 옮기고 `pip install transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 datasets bitsandbytes`를 한다(손실 나누기가 있는 계획이면 `trl==1.16.0`도).
# 4. `python train.py --text 내글.txt`. GPU가 여러 장이면 `accelerate launch --config_file accelerate.yaml train.py --text 내글.txt`다. GPU가 없으면 `--cpu`와 `--model EleutherAI/pythia-14m`처럼 **같은 계열**의 작은 모델을 붙여 예행연습을 한다(계열이 다르면 `lora_config.json`의 `target_modules`를 찾지 못한다).
#
# `내글.txt`는 보통의 글 파일이다. `train.py`는 파일 전체를 글 하나로 읽어 512토큰씩 이어서 자르고, 끝에 남는 것은 버린다. 질문과 답의 쌍(JSONL)이라면 `train.py`에서 데이터를 만드는 줄을 내 것으로 바꾸고 2단계로 다시 센다.
#
# 노트북 없이 터미널에서만 할 수도 있다. 들어가는 것이 있으면 종료 상태가 0이다.
#
# ```sh
# virtual-gpu fit --model EleutherAI/polyglot-ko-5.8b --gpu T4 --length 512 --batch 16 --margin 0.05
# ```
#
# 길이를 몇으로 할지는 데이터를 보고 정한다. 샘플마다 토큰 수(`len(tokenizer(text)["input_ids"])`)를 한 줄에 하나씩 적은 파일을 `--lengths 길이.txt`로 주면, 그 길이에서 샘플과 토큰의 몇 %가 잘리는지, 계획마다 마이크로 배치의 몇 %가 패딩인지, 이어 담으면(packing, 짧은 샘플을 이어 붙여 길이를 채우는 것) 에폭이 몇 스텝으로 줄어드는지도 나온다. `--length`를 주지 않으면 가장 긴 샘플로 센다.
#
# ### 이미 쓰는 설정 파일에서 시작한다
#
# `--from`에 설정 파일을 주면 그대로 들어가는지 세고, 들어가지 않으면 **그 파일의 어느 줄을 바꾸면 되는지** 알려 준다. `TrainingArguments`와 TRL, axolotl, LLaMA-Factory, torchtune의 설정을 읽는다. 실행하지는 않는다.
#
# A100에서 쓰던 LLaMA-Factory의 설정을 T4로 가져왔다고 하자. 어느 줄이 걸릴까? 파일을 읽고 먼저 짚어 본다.

# %%
from contextlib import chdir

from virtual_gpu.plan.command import main

_ = (folder / "my_sft.yaml").write_text("""\
model_name_or_path: Qwen/Qwen3-1.7B
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: my_korean_data
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 8   # as on the A100
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
bf16: true
""")
with chdir(folder):
    status = main(["--from", "my_sft.yaml", "--gpu", "T4"])
print(status)

# %% [markdown] lang="ko"
# 걸리는 것이 둘이다. T4에는 bf16 연산 장치가 없고, 메모리도 카드의 두 배가 넘게 든다. 17억 모델의 LoRA가 왜 그럴까? 8 × 2,048토큰 × 어휘 151,936 × 4바이트 = 9.27 GiB짜리 로짓만 한 텐서 셋이 함께 있기 때문이다(5.9절). 그래서 마이크로 배치만 줄여도 된다. 바꿀 줄은 넷이다. bf16을 fp16으로 바꾸고, 8 × 2를 2 × 8로 바꾸어 스텝 하나의 16개는 그대로 둔다. 학습을 가장 덜 바꾸는 것부터 찾은 답이다. (파일에 없는 체크포인팅은 LLaMA-Factory가 기본으로 켠다.)
#
# '패딩'이라고 적힌 줄들은 무엇일까? 이 파일에는 샘플을 이어 담으라는 `packing`이 없으니, 마이크로 배치는 가장 긴 샘플에 맞추어 **패딩**된다. 그러면 패딩을 가리는 마스크가 생긴다. 다만 샘플이 모두 2,048토큰에서 잘려 길이가 같아진 배치에는 마스크가 없다. 마스크가 있고 없고에 따라 어텐션의 커널이 달라지므로(3.12절) 둘을 따로 재고 큰 쪽으로 판정한다. 여기서는 로짓이 최대를 정해 둘이 비슷하다.
#
# 마지막의 1은 '그대로는 들어가지 않는다'는 종료 상태다. `--save 새파일.yaml`을 붙이면 그 네 줄만 바꾼 파일을 쓴다. `TrainingArguments`의 파일에는 모델, 길이, 방법이 없으므로 `--model`, `--length`, `--methods`로 함께 적는다.
#
# ## 9.9 믿어도 되나
#
# 지금까지의 숫자는 모두 예측이다. 결론부터 적는다.
#
# - **합성곱이 없는 트랜스포머라면 여유 5%로 찾는다**(`margin=0.05`). H100에서 잰 우리 설정 46가지에서 예약의 예측은 잰 값보다 많아야 3.68% 모자랐다. 남들이 예약이나 카드 전체의 최대를 공개한 86개에서는 작은 언어 모델을 잰 둘에서 5%를 더해도 모자랐다. 텐서의 최대만 공개한 것에서도 하나(torchtune, 역전파 안에서 갱신하는 8비트 AdamW)가 9% 모자랐다. 그래서 보증이 아니라 출발점이다.
# - **합성곱이 있으면 5%를 믿을 수 없다.** 남의 프로그램 25가지에서 5%로도 모자란 셋이 모두 그런 것이다. 들어맞은 것도 있지만, 어느 쪽일지 미리 알 수 없다.
# - **T4에서는 재지 못했다.** 9.1절의 첫째처럼 언어 모델을 fp16 혼합 정밀도의 LoRA로 학습한 것은 T4만이 아니라 어느 카드에서도 재지 않았다. 남이 T4에서 잰 것은 Unsloth의 노트북 넷이고, 학습을 시작하기 전의 예약이다([오차의 표](../../docs/errors.md)). 어댑터 가운데 무엇을 재었는지는 아래의 '어떻게 비교했나'에 있다.
#
# 증거는 두 가지다. 하나는 우리가 H100 한 장에서 잰 것이다. 다른 하나는 남들이 자기 GPU에서 재어 공개한 676개로, 같은 일을 하는 프로그램을 가상 GPU에서 실행해 나란히 놓았다.
#
# 그림은 남들의 것이다. 점 하나가 측정 하나이고, 0의 왼쪽이 예측이 **모자란** 것이다(OOM이 되는 쪽이다). 점선의 왼쪽은 여유 5%로도 모자란다. 점선의 왼쪽이거나 점선에 걸친 점은 어느 묶음에 있는가? (걸친 것은 아래 표가 가른다.)
#
# ![잰 것의 종류마다 묶고 출처마다 한 줄, 측정마다 점 하나. 예측이 잰 값과 몇 % 다른지를 로그 눈금의 가로축에 놓았다. 예약이나 카드 전체의 최대에서는 xMem의 두 점이 여유 5%의 점선 왼쪽에 있고, PEFT의 두 점이 점선에 닿아 있다. 텐서에서는 torchtune의 한 점이 점선 왼쪽에 있고, 연산이나 손실 하나에서는 여러 점이 점선 왼쪽에 있다.](../../image/truth_ko.svg)
#
# 우리 것까지 표로 센다. 마지막 열이 여유 5%로도 모자란 것이다. 저마다 왜 모자랐을까?

# %%
from helpers.chapters.c9_planner.measured import how_short

how_short(margin=0.05)

# %% [markdown] lang="ko"
# 들어가는지를 바로 말해 주는 것은 예약이나 카드 전체의 **최대**를 잰 줄이다. 그 줄들에서 5%로도 모자란 것은 다섯이다. 남들이 잰 86개 가운데 둘과, 우리가 H100에서 돌린 남의 프로그램 가운데 합성곱이 있는 셋이다.
#
# - **xMem의 둘**은 RTX 3060에서 AdamW로 학습한 작은 언어 모델이고, 까닭은 찾지 못했다. xMem은 잰 값에 CUDA 컨텍스트가 들었는지 밝히지 않아 예측이 범위이고, 오차는 가까운 끝에서 쟀다. 14개 가운데 10개는 범위 안이라 0이다. 먼 끝에서 재면 −12.52%가 −16.54%가 된다.
# - **점선에 걸친 PEFT의 둘**(−4.36%)은 LoRA가 아니라 prefix tuning이다.
# - **합성곱의 셋**에서는 cuDNN이 쓰는 작업 공간을 세지 못한다. 그 크기가 공개된 소스에 없다. timm의 ViT도 이미지를 합성곱으로 조각낸다. `virtual-gpu run`은 세지 못했다고 알린다.
# - **Liger-Kernel의 줄**은 학습이 아니라 연산 하나, 손실 하나만 잰 것이다. −41.44%도 3.47 MiB짜리 연산이다. 손실 가운데 GiB 단위로 모자란 것도 있다([오차의 표](../../docs/errors.md)).
# - **torchtune의 줄**(−9.03%)은 바로 아래에서 본다.
#
# 방법을 **하나씩 더할 때마다** 얼마나 줄어드는지도 따라갈까? [torchtune의 README](https://github.com/pytorch/torchtune/blob/bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1/README.md)에 그렇게 잰 것이 있다. Llama 3.2 3B를 A100 한 장에서 bf16으로 전체 미세 조정하며(2 × 4,096토큰) 위의 줄에 하나씩 더한 표다. LoRA에서만 역전파 안의 스텝과 8비트 AdamW를 뺐다. 표와 가장 가까운 torchtune 0.4.0의 학습 프로그램을 모두 같은 토큰으로 가상 GPU에서 실행했다. 가장 많이 줄인 것과, 예측이 빗나간 것은 어느 줄인가?

# %%
from helpers.chapters.c9_planner.measured import lever_by_lever

lever_by_lever()

# %% [markdown] lang="ko"
# GiB로 가장 많이 줄인 것은 체크포인팅이다. 여섯 줄은 0.5% 안에서 맞는다. 둘은 적힌 자리까지 같고, 넷은 0.1 GiB쯤 많다. 이 표에 맞추어 고친 규칙은 없지만, 표에 없는 것 하나를 골랐다. AdamW를 융합 AdamW로 보았다(아니면 스텝의 임시 텐서만으로 체크포인팅을 켠 줄들을 넘는다).
#
# 둘은 빗나갔다. 8비트 AdamW는 9% 모자란다. 표는 2024년의 PyTorch로 잰 것인데, 그때의 컴파일러가 임베딩의 스텝에서 fp32 임시 텐서를 더 만들었을 수 있다. 확인하지는 못했다. LoRA는 5%쯤 넘친다. README의 명령이 가리키는 설정(rank 64)이면 가중치, 어댑터와 그 상태, 로짓과 로짓 한 조각의 그레이디언트만 더해도 8.69 GiB라 표의 8.5 GiB가 되기 어려우니, 더 작은 어댑터를 잰 것으로 보인다. 표의 나머지 둘은 실행하지 못했다. 첫 줄은 글의 길이를 밝히지 않았고, QLoRA는 그 4비트 텐서가 지금의 PyTorch에서 컴파일되지 않는다.
#
# <details><summary>어떻게 비교했나</summary>
#
# 필요한 메모리는 한 번 실행해서는 잴 수 없어, 잴 수 있는 것 가운데 가장 가까운 **예약**으로 비교했다(한도가 없을 때의 예약은 필요한 메모리보다 클 수 있다, 3.10절).
#
# H100에서는 48가지 설정은 카드에서 실행하기 **전에** 예측부터 적어 두고, 그 뒤로 고치지 않았다(`benchmarks/README.md`). 하나는 예측대로 OOM이 났고, 하나는 시간 안에 끝나지 않아 46가지가 남았다. 한도를 두고 잰 것은 이 절의 끝에 있는 'T4만큼만 쓰게 한 H100'의 표뿐이다. 남의 프로그램의 예측은 카드가 드러낸 틀린 규칙 몇을 고친 **뒤의** 것이다.
#
# 남들의 측정은 762개를 모아 694개를 실행했고, 그 가운데 676개의 바이트를 비교했다. 미리 적어 둔 예측은 아니고, 틀린 규칙 몇은 이 값들을 보고 고쳤다. PEFT의 것은 모두 벤치마크 하나, 모델 하나(Llama-3.2-3B)다. 한국어 모델의 값도 하나 있다. KoAlpaca가 A100 한 장에서 Polyglot-Ko 5.8B를 통째로 학습할 때(fp16, Adafactor) `nvidia-smi`가 보인 69,061 MiB이고, 컨텍스트까지 더한 예측은 0.95% 모자란다. 내 GPU에서 잰 것이 있는지는 [오차의 표](../../docs/errors.md)에서 찾는다.
#
# 어댑터는 이만큼 재었다. H100의 우리 설정에는 LoRA 8가지와 QLoRA 3가지가 있지만 혼합 정밀도의 LoRA는 없다. 남들이 공개한 최대 86개 가운데 56개는 PEFT의 벤치마크로, LoRA와 그 친척이지만 모두 bf16으로 불러온 모델 하나다. 남의 프로그램에서는 셋뿐이다. PEFT의 LoRA 하나(−0.10%), bf16의 QLoRA 하나(0.00%), 언어 모델이 아닌 diffusers의 fp16 LoRA 하나(−0.68%)다.
#
# </details>
#
# 9.6절이 권한 것 가운데 방법, GPU, GPU의 수를 바꾼 셋을 여유 5%로 다시 찾는다(CPU에 두는 계획은 17.64 × 1.05 = 18.52 GiB라 그대로 들어간다). 네 번째는 GPU와 옵티마이저를 **함께** 바꾼 것이고, 그 계획의 페이지, 카드에 놓이지 못하는 페이지, RAM도 적는다. 무엇이 바뀌는가? 괄호는 마이크로 배치와 필요한 메모리다.

# %%
from virtual_gpu.models.pages import pages_label

choices = [
    ("RTX 4090", "lora", None),
    ("H100", "full", None),
    ("4 x RTX 4090", "full", None),
    ("A100-40GB", "full", "paged_adamw_8bit"),
]
for gpu, way, optimizer in choices:
    asked = {"length": 512, "batch": 4, "methods": (way,), "optimizer": optimizer}
    for margin in (0.0, 0.05):
        plan = plan_training("meta-llama/Llama-3.1-8B", gpu, margin=margin, **asked).best
        print(gpu, way, f"{margin:.0%}", (plan.micro_batch, human_bytes(plan.needed_bytes)))
print(pages_label(plan.paged_bytes, plan.evicted_bytes), host_need(plan).line(None), sep="\n")

# %% [markdown] lang="ko"
# LoRA는 마이크로 배치를 2에서 1로 줄인다. 누적이 두 배가 되지만 추가 연산은 없다. 나머지는 그대로 들어간다. 하나씩만 바꾸어 본 9.6절에는 없던 네 번째는, 8비트 상태를 페이지로 두면(8.13절) 40 GB 카드에도 여유 있게 들어간다는 것을 보여 준다. 다만 페이지 17.89 GiB 가운데 적어도 11.37 GiB는 카드에 놓이지 못해 스텝마다 나갔다가 돌아오고, RAM도 12~20 GiB 든다. 빌리기 전에 몇 스텝을 재어 본다.
#
# 연습 9-2를 풀었다면 하나 더 해 본다. 그 답도 판정 한도에 꼭 찬다. `margin=0.05`를 더해 다시 찾으면 길이를 얼마까지 두어도 되는가?
#
# <details><summary>답 (연습 9-2를 푼 다음에 연다)</summary>
#
# QLoRA로 찾으면 `changes`는 여유가 없을 때 12032, 여유 5%면 10816까지라고 답한다. 4비트로 줄이지 않는 가중치를 16비트로 두고 체크포인트를 RAM에 두는 계획이다. 이 두 가지는 9.12절에서 다룬다. 계획의 이름에는 '나머지는 16비트', '체크포인팅(오프로드)'라고 적혀 있다. 적을 것은 `{"methods": ("qlora",), "length": 12032}`이다. `methods`와 `length`를 함께 바꾸어야 한다. RAM은 보지 않은 답이고, 무료 Colab이라면 빠듯하다.
#
# </details>
#
# T4에 가장 가까운 측정은 **T4만큼만 쓰게 한 H100**이다(카드의 한도와 같은 14.64 GiB). polyglot-ko-1.3b를 가중치까지 16비트로 전체 미세 조정했다. 어느 것이 죽었고, 예측대로인가?

# %%
from helpers.chapters.c9_planner.measured import played_t4

played_t4()

# %% [markdown] lang="ko"
# 배치 16만 죽었고, 넷 다 예측대로다. 다만 가중치까지 16비트인 전체 미세 조정은 T4에서 권하지 않는 방법이다(9.5절). 곧 이 표는 **한도에 닿은 할당자가 예측대로 움직인다**는 것만 보여 주고, T4의 커널이나 LoRA, QLoRA가 얼마를 쓰는지는 보여 주지 않는다.
#
# ## 9.10 마지막으로, 내 프로그램
#
# 메모리가 부족하다는 오류는 플래너가 아니라 **내 프로그램**에서 난다. 그래서 마지막 확인은 프로그램으로 한다. 고치지 않은 파일 하나와 명령 한 줄이면 된다.
#
# ```sh
# virtual-gpu run --gpu T4 examples/train.py --fp16 True --per_device_train_batch_size 16
# ```
#
# 노트북에서는 같은 일을 하는 함수를 부른다. 먼저 프로그램을 읽는다. polyglot-ko-1.3b를 LoRA로 학습하는 보통의 스크립트이고, 이 강의의 함수는 쓰지 않았다.

# %%
from helpers.environment import COURSE

program = COURSE / "examples" / "train.py"
print(program.read_text())

# %% [markdown] lang="ko"
# 가상 T4에서 배치 16으로 실행한다. 가상 GPU는 스텝 세 번을 마치면 프로그램을 끝낸다. 판정 다음 줄은 넘친 줄과 단계, 그때 달라고 한 크기이고, 그 아래는 최대일 때 있던 것이다. 상태인가, 순전파 상태인가?

# %%
from virtual_gpu.program import words
from virtual_gpu.program.runner import run


def show(report):
    print(report.verdict)
    if oom := report.oom:
        where = f"{Path(oom['file']).name}:{oom['line']}"
        print(where, words.phase(oom["phase"]), human_bytes(oom["bytes"]), sep=", ")
    for name, nbytes in report.at_peak.items():
        if nbytes:
            print(f"{nbytes / 2**30:8.2f} GiB  {words.category(name)}")


options = ["--fp16", "True", "--disable_tqdm", "True", "--output_dir", str(folder)]
show(run(str(program), [*options, "--per_device_train_batch_size", "16"], gpu="T4"))

# %% [markdown] lang="ko"
# 첫 순전파의 끝에서 넘쳤다. 달라고 한 940 MiB는 fp32 로짓 한 벌(16 × 512 × 30,080 × 4바이트)이고, 이미 있던 것(출력의 합 14.49 GiB)에 더하면 한도를 넘는다. 상태는 파라미터 2.49 GiB가 거의 다이고, 11.96 GiB가 역전파를 위해 저장한 텐서, 곧 순전파 상태다. 9.5절의 첫째 무리이니 **마이크로 배치부터** 줄인다. 얼마로 줄일지는 플래너에 묻고, 프로그램은 그대로 둔 채 인자만 바꾼다.

# %%
print(plan_training("EleutherAI/polyglot-ko-1.3b", gpu="T4", length=512, batch=16, methods=("lora",)).best)
smaller = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"]
report = run(str(program), [*options, *smaller], gpu="T4")
print(report.verdict, human_bytes(report.reserved), sep="\n")

# %% [markdown] lang="ko"
# 들어간다. 할당자의 예약(셋째 줄)은 모델의 모양만 본 플래너의 답(첫째 줄)과 거의 같고, 거기에 9.4절의 알 수 없는 것을 더한 것이 둘째 줄의 범위다. 판정은 '들어간다', '빠듯하다'(알 수 없는 것에 달렸다), '모자란다'의 셋이다. 여유는 직접 곱한다. 10.10 × 1.05 = 10.61 GiB도 판정 한도 안이다.
#
# 터미널의 명령은 무엇을 바꿀지 찾는 일까지 한다. 그런데 차례가 방금과 다르다.
#
# ![일곱 줄짜리 LoRA 프로그램과 그것을 실행한 명령. 첫 순전파가 카드의 한도 14.64 GiB에 닿는다. 그레이디언트 체크포인팅을 켜면 들어간다.](../../image/09_program_on_a_t4.svg)
#
# 명령은 넘친 자리와 프로그램에 맞는 것만 골라 한 가지씩, 이어서 여럿을 함께 바꾸어 보고, 처음 들어가는 것에서 멈춘다. 순전파나 역전파에서 넘쳤다면 `expandable_segments`(빈자리를 모아서 될 때만), 체크포인팅, 손실 나누기, 마이크로 배치(절반씩), 8비트 옵티마이저, LoRA, QLoRA의 차례다. 계산이 같은 것이 먼저이고 다른 것을 학습하게 되는 것이 마지막이다. 명령은 누적을 함께 늘리지 않으므로 마이크로 배치를 절반으로 줄이면 그 수도 절반이 된다. **고르는 것은 여러분이다.** 추가 연산이 싫으면 방금처럼 마이크로 배치를 줄이고 누적을 그만큼 늘린다.
#
# ### 넘친 것마다 바꿀 것이 다르다
#
# 위의 행부터 맞추어, 처음 맞는 행에서 멈춘다. 1행과 2행이 헷갈리면 마이크로 배치를 1로 줄이고 체크포인팅을 켜서 다시 센다. 어휘가 크면 손실도 나누어 본다. 그래도 넘치면 상태가 한도에 너무 가까운 것이니 1행이다(9.12절의 14B는 손실까지 나누면 들어가니 2행이다).
#
# | 행 | 넘치는 것 | 어떻게 아나 | 무엇을 바꾸나 |
# |---|---|---|---|
# | 1 | 상태(파라미터, 그레이디언트, 옵티마이저) | 있는 상태와 아직 만들지 않은 상태를 모두 더하면 한도를 넘는다. 또는 길이를 더 줄일 수 없는데 마이크로 배치 1에 체크포인팅을 켜고 손실까지 나누어도 넘친다 | 방법(LoRA, QLoRA. QLoRA라면 나머지를 16비트로, 9.12절), 옵티마이저, 학습 상태를 RAM에(9.6절), GPU의 수(ZeRO), 더 큰 GPU |
# | 2 | 순전파 상태 | 상태는 한도 안인데, 있는 것에 다음 요청을 더하면 한도를 넘는다 | 마이크로 배치와 누적, 체크포인팅, 길이. 로짓이 크면 손실 나누기(9.12절) |
# | 3 | 못 쓰는 자리(단편화) | 다음 요청과 더 만들 상태까지 더해도 한도보다 작은데 넘친다 | `expandable_segments`(3.10절), 그래도 넘치면 순전파 상태를 줄인다 |
# | 4 | 예측이 세지 못한 것(할당자 밖, 커널의 작업 공간) | 예측으로는 들어가는데 실제로는 넘친다 | 여유를 늘려 다시 찾는다(9.9절) |
#
# ### 이제 여러분의 차례다
#
# `examples/full.py`는 같은 모델을 어댑터 없이 모두 학습한다. 배치를 1까지 줄여도 넘친다. 프로그램을 읽고, 어디서 넘쳤고 무엇이 있었는지 본다.

# %%
program = COURSE / "examples" / "full.py"
print(program.read_text())
show(run(str(program), [*options, "--per_device_train_batch_size", "1"], gpu="T4"))

# %% [markdown] lang="ko"
# **연습 9-3.** 어느 행인가? 그 행의 것을 **하나만** 바꾸어 T4에 들어가게 하라. `{"row": 행, "change": {"이름": 값}}`으로 적으면 그렇게 바꾼 프로그램을 실행한다. 바꿀 수 있는 것은 `length`(128, 256), `gradient_checkpointing`(True), `optim`(`"adamw_torch"`, `"adamw_bnb_8bit"`, `"adafactor"`), `lora`(True), `expandable_segments`(True)다. 여유 없이 들어가면 맞다.

# %%
answer = ...
exercise("9-3").check(answer)

# %% [markdown] lang="ko"
# 내 프로그램도 똑같이 한다. `run(...)`의 파일과 인자를 내 것으로 바꾸어 실행하고, 행을 정하고, 하나만 바꾸어 다시 실행한다. 터미널에서는 모듈별, 줄별 표가 있는 보고서를 `--html FILE`로 저장하고, `--change checkpointing`이나 `--change lora`처럼 주면 프로그램을 고치지 않고 그렇게 바꾸어 실행한다. 메모리가 모자라면 들어갈 때까지 하나씩, 또 여럿을 함께 바꾸어 다시 실행해 보고, 프로그램에 쓸 줄을 출력한다. GPU가 여럿이면 `--gpus 8`을 붙이고, `torchrun`이나 `accelerate launch`로 시작하는 명령도 그대로 쓴다. Unsloth로 쓴 프로그램도 고치지 않고 실행한다(PyTorch 2.13에서 해 보았다. Triton이 설치되어 있어야 한다). 같은 QLoRA를 TRL과 Unsloth로 나란히 센 표가 `benchmarks/README.md`에 있다.
#
# ## 9.11 기억할 것
#
# 예상이 얼마나 맞았는지 돌아본다.

# %%
from helpers import guesses

guesses()

# %% [markdown] lang="ko"
# - 먼저 **상태**가 들어가는지 본다. 들어가지 않으면 배치를 줄여도 소용없다.
# - 그다음 **순전파 상태**를 줄인다. 어휘가 크면 손실 나누기도 있다. 누적과 체크포인팅이 둘 다 들어가면 스텝의 시간을 재어 보고 고른다.
# - 합성곱이 없는 트랜스포머라면 **여유 5%로** 찾고(`margin=0.05`), 마지막은 **내 프로그램**으로 확인한다.
#
# 이제 "CUDA out of memory"를 만나면 어림짐작으로 배치부터 줄이지 말고, 무엇이 넘쳤는지 세어 보자. 세는 법을 알면 고치는 법은 따라온다. 잘 돌다가 나중에 죽는다면 [10장](10_oom_clinic.ipynb)이, 평가나 저장에서 죽는다면 [11장](11_outside_training.ipynb)이, DPO나 GRPO로 바꾸었더니 죽는다면 [12장](12_two_models.ipynb)이 기다린다. **여러분의 GPU에서는 무엇을 학습하고 싶은가?**

# %% [markdown] lang="ko"
# ## 9.12 더 읽을거리
#
# 아홉 가지다. 빌릴 GPU 고르기, T4의 그룹 쿼리 모델과 14B, 긴 글의 체크포인트를 RAM에 두기, 남는 메모리로 재계산 줄이기, 순위 바꾸기, 다른 형식의 스크립트, 남들이 말하는 숫자, 그리고 사건 9-A와 9-B. 필요한 것만 읽는다.
#
# ### 어느 GPU를 빌릴까
#
# **연습 9-4.** Llama-3.1-8B를 길이 1024, 배치 8로 **LoRA만** 써서 학습하려 한다. LoRA가 들어가는 GPU 가운데 메모리가 가장 작은 것은 무엇인가? (메모리가 2% 안에서 같으면 어느 것을 적어도 된다.) 아래는 플래너가 아는 GPU의 이름과 카드의 한도(GiB)다. 16비트 가중치(80억 × 2바이트)도 못 담는 것을 먼저 지우고, 남은 것을 작은 것부터 `plan_training("meta-llama/Llama-3.1-8B", gpu=…, length=1024, batch=8, methods=("lora",))`로 확인해 `"T4"`처럼 이름으로 답한다.

# %%
from textwrap import fill

from virtual_gpu.cards import CATALOG

cards = sorted(CATALOG.values(), key=lambda card: card.capacity_bytes)
print(fill(" · ".join(f"{card.name} {card.capacity_bytes / 2**30:.1f}" for card in cards), 96))

# %% [markdown] lang="ko"
# 답을 적는다.

# %%
gpu = ...
exercise("9-4").check(gpu)

# %% [markdown] lang="ko"
# ### T4의 그룹 쿼리 모델과 14B
#
# 줄이는 것이 셋이다. 앞의 둘은 9.2절의 패널이 이미 센 것으로, 키와 값의 헤드를 되풀이하는 줄(3.12절, 모델을 불러오기 전에 적는다)과 손실 나누기(LoRA라면 `get_peft_model` 앞에 적는다)다. 셋째는 QLoRA에서 4비트가 아닌 가중치를 16비트로 두는 것이다. 앞의 둘은 이렇게 적는다. 9.8절에서 내보내는 `train.py`에는 계획대로 들어 있고, 내 스크립트에는 직접 적는다. `Trainer`는 `fused_lm_head=True`를 넘기지 않으므로, 내보낸 파일의 `FusedTrainer`처럼 `compute_loss`에서 넣는다.
#
# ```python
# from transformers.integrations import sdpa_attention
# from trl.trainer import add_fused_lm_head
#
# sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False
# model = AutoModelForCausalLM.from_pretrained(...)
# add_fused_lm_head(model)  # 손실은 model(..., labels=labels, fused_lm_head=True).loss
# ```
#
# 적으면 얼마나 줄까? 어느 줄이 어느 모델에 듣는가? 판정 한도는 14.25 GiB다.

# %%
from helpers.chapters.c9_planner.heads import with_each_line

with_each_line(
    ("Qwen/Qwen3-4B", "lora", False, 512),
    ("meta-llama/Llama-3.1-8B", "qlora", False, 512),
    ("Qwen/Qwen3-14B", "qlora", True, 512),
    ("Qwen/Qwen3-14B", "qlora", True, 1024),
)

# %% [markdown] lang="ko"
# **헤드를 되풀이하는 줄**은 체크포인팅이 없을 때 크게 듣는다. 체크포인팅을 켠 14B는 길이 512에서 그대로이고, 1024에서 0.38 GiB 준다. Qwen3-4B는 1.15 GiB 줄고, Llama-3.1-8B의 QLoRA는 그 줄만으로 체크포인팅 없이 1 × 16이 들어간다. 더 빠른지는 재어 보아야 안다(9.3절).
#
# **손실을 나누는 줄**은 Qwen3-14B에서 가장 크게 듣는다. 헤드를 되풀이한 14B에서 최대는 어텐션이 아니라 출력층에 있다. 로짓을 역전파하는 순간에 autocast가 만든 출력층의 fp16 사본 1.45 GiB와 로짓만 한 텐서들이 함께 있는데, TRL의 함수는 사본도 로짓도 조각만큼만 만든다. 그래서 148억 파라미터의 모델이 T4에 **길이 1024로도** 들어간다(13.99 GiB). 다만 9.9절의 여유 5%를 두면 512(13.63 × 1.05 = 14.31 GiB)도 1024(14.69 GiB)도 판정 한도를 넘는다. 그때는 아래의 '나머지는 16비트'까지 켠다.
#
# **'나머지는 16비트' 열**은 QLoRA에서 한 가지를 더 줄인다('–'는 LoRA라 4비트 가중치가 없다는 뜻이다). 4비트로 줄이지 않는 가중치(임베딩, 출력층, 정규화)를 16비트 그대로 둔다. peft의 `prepare_model_for_kbit_training`은 이것을 fp32로 바꾼다(사건 8-B). Qwen3-14B에서는 5.80 GiB(151,936 × 5,120 × 4바이트의 두 벌)이고, 16비트면 2.90 GiB가 준다. 표에서는 3.54 GiB가 주는데, 임베딩이 16비트를 내놓으면 층 사이를 흐르는 값도 16비트라 순전파 상태까지 줄기 때문이다(8.9절).
#
# fp32로 올리는 것은 학습을 안정시키려는 것이었다(8.9절). 16비트로 두어 잃는 것이 있는지는 여기서 재지 않았으니 손실이 줄어드는지 본다. TRL, axolotl, LLaMA-Factory, torchtune은 처음부터 16비트로 둔다. 내 스크립트에서는 그 함수를 부르지 않고, T4라면 `from_pretrained(…, dtype=torch.float16)`으로 불러온다. 플래너는 fp32로 두어 들어가지 않을 때만 이 방법을 찾고, 방법 칸에 '나머지는 16비트'라고 적는다. 예측이고, 어느 카드에서도 재지 않았다.
#
# ### 긴 글: 체크포인트를 RAM에 두기
#
# 앞의 셋(헤드 되풀이, 손실 나누기, 나머지는 16비트)을 다 해도 길이 8192의 Qwen3-14B는 들어가지 않는다. 무엇이 남았을까? 체크포인팅을 켜도 블록마다 입력 하나는 남는다(5.6절). 길이에 비례하므로 글이 길면 이것이 커진다. 이 모델은 블록이 40개이고 은닉층 크기가 5,120이라, 층 사이를 16비트로 지나면 샘플 하나에 40 × 8,192 × 5,120 × 2바이트다. 몇 GiB인지 셈해 보고, 이것을 RAM으로 옮긴 계획이 얼마나 주는지 확인한다. 둘째 줄은 옮기지 않은 같은 계획이다.
#
# transformers 5.17부터 할 수 있다. Colab에 있는 것이 그보다 옛것이면 플래너가 이 계획을 찾지 못해 아래 셀에서 오류가 나고, 연습 9-2와 뒤의 `prefer="margin"`도 다른 답이 나온다. 먼저 `!pip install -U "transformers>=5.17"`을 실행하고 런타임을 다시 시작한 다음, 설정 셀과 `from helpers import exercise, guess, human_bytes, plan_training`, `from virtual_gpu.plan.request import make_request`를 실행하고 이어 간다.

# %%
from dataclasses import replace

from virtual_gpu.plan.measure import measure

long = plan_training("Qwen/Qwen3-14B", gpu="T4", length=8192, batch=16, methods=("qlora",)).best
stays = measure(long.request, replace(long.recipe, offload=False), 1, 16)
print(f"{long!r}\n{stays!r}")
less = stays.needed_bytes - long.needed_bytes, stays.tensors_bytes - long.tensors_bytes
print(human_bytes(40 * 8192 * 5120 * 2), *map(human_bytes, less))

# %% [markdown] lang="ko"
# 입력은 3.12 GiB인데 3.17 GiB가 줄었다. 역전파할 블록의 입력은 카드로 돌아와 있어야 하므로 40개 가운데 39개만큼, 곧 39 × 80 MiB = 3.05 GiB가 준다(출력의 마지막 수다. 텐서의 최대는 꼭 그만큼 줄었다. 나머지 0.12 GiB는 할당자가 못 쓰는 자리가 준 것인데, 필요한 메모리를 찾는 눈금, 곧 텐서의 최대를 128로 나눈 0.1 GiB쯤과 비슷하니 뜻을 두지 않는다). 그래서 15.79 GiB가 12.62 GiB가 되어 들어간다. 학습의 결과도 연산도 그대로다.
#
# 대가는 셋이다. CPU로 보내는 양(같은 양이 돌아온다), 오가는 시간, RAM이다. 스텝 시간의 하한에는 T4의 버스(PCIe 3.0 x16)가 최고 속도(초당 15.75 GB)를 낼 때 오가는 시간이 더해져 있다. 얼마인지 옆에 적었다.

# %%
print("to the CPU:", human_bytes(long.offloaded_bytes))
print(f"the step, the bus alone: {long.seconds:.0f} s, {2 * long.offloaded_bytes / 15.75e9:.1f} s")
print(host_need(long).line("Colab"))

# %% [markdown] lang="ko"
# - **시간.** 스텝마다 50 GiB가 나갔다가 돌아온다. 합해서 100 GiB에 6.8초이고, 이것을 뺀 계산의 하한이 216초이니 3%쯤이다. transformers의 복사는 계산과 겹치지 않아(5.6절) 그 시간이 스텝에 그대로 더해진다. 둘 다 최고 속도로 센 것이라 실제의 몫은 재어 보아야 안다. 길이가 두 배면 오가는 양은 두 배지만 계산은 어텐션 때문에 두 배 넘게 늘어, 이 몫은 준다. 거꾸로 길이가 짧거나 GPU가 빠르면 커진다. 216초에는 커널이 마스크로 건너뛸 수 있는 어텐션도 들어 있다(9.3절). 그래도 스텝 하나가 몇 분이니, 먼저 몇 스텝만 재어 본다.
# - **RAM.** 3.12가 아니라 적어도 5 GiB가 든다. 고정 메모리(운영 체제가 내보내지 못하게 묶어 GPU가 바로 읽는 RAM, 11.4절)를 PyTorch가 2의 거듭제곱으로 올려 잡아, 80 MiB인 입력 하나가 128 MiB를 쓰기 때문이다. 많게는 그 두 배다. 복사가 끝나지 않은 자리는 다시 쓸 수 없어, CPU가 GPU보다 앞서 가면 그만큼 더 잡기 때문이다. 불러올 때의 5.80 GiB(스레드 넷이 1.45 GiB짜리의 자료형을 한꺼번에 바꾸는 가장 나쁜 경우)는 학습보다 먼저 끝나므로 여기에 더하지 않는다. 그래도 프로세스까지 5.24~12.12 GiB다. 무료 Colab의 12.67 GiB에서 시스템이 먼저 쓰는 것을 많게 잡아(1.4 GB) 빼면 11.37 GiB라 빠듯하다. 플래너에 `host="Colab"`(터미널은 `--host Colab`)을 주면 RAM이 확실히 모자라는 계획을 뺀다. 이 계획처럼 빠듯한 것은 남으니, 스텝 몇 번을 돌리며 RAM을 본다.
# - **앞의 셋에 한 줄을 더한다.** transformers 5.17부터 `TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False, "offload": True})`, 내 루프에서는 `model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)`다(5.23부터의 이름은 5.7절). `save`로 내보낸 파일에는 넷이 다 들어 있다. GPU가 없는 컴퓨터에서는 고정 메모리를 잡지 못해 오류가 나므로, 그 파일은 `--cpu`에서 이 한 줄을 끈다.
# - **층 사이가 fp32면 두 배다.** 예를 들어 `prepare_model_for_kbit_training`을 불렀거나 fp32 가중치를 학습하는 경우다. 줄어드는 것도, 오가는 양도, RAM도 두 배가 된다. 내 모델이 어느 쪽인지는 'CPU로 보내는 양'을 스텝의 샘플 수로 나누어 층의 수 × 길이 × 은닉층 크기 × 2바이트와 견주어 보면 안다.
# - **최대가 다른 곳에 있으면 듣지 않는다**(11.9절). 길이가 짧거나, 로짓이나 옵티마이저의 스텝이 최대인 경우다.
# - **언제 찾나.** 플래너는 방법과 옵티마이저를 그대로 두고는 달리 들어가지 않을 때만 해 본다. QLoRA라면 나머지를 16비트로 두는 것이 먼저다. `prefer="margin"`이면 늘 해 본다. ZeRO로 나눈 계획도 같은 때에 찾는다. 그때는 `accelerate.yaml`의 `fsdp_activation_checkpointing_offload: true`다(accelerate 1.15).
# - **카드에서 잰 것.** 우리는 재지 않았다. 이 기능을 만든 사람이 H100에서 재니, 순전파가 끝난 뒤에 남은 것이 층의 수 × 길이 × 은닉층 크기 × 2바이트 그대로 줄었다(8층 × 8k × 1,024에서 194.1 MB가 66.1 MB로, MB는 2²⁰바이트다, [transformers #48444](https://github.com/huggingface/transformers/pull/48444)). 최대가 얼마나 주는지는 최대가 어느 순간에 있느냐에 달렸다.
# - **같은 일을 따로 만든 것.** axolotl은 Qwen3-8B의 전체 미세 조정이 길이 16k에서 63.3 GB가 58.9 GB로, 32k에서 73.1 GB가 64.3 GB로 줄었다고 적었다([axolotl #3733](https://github.com/axolotl-ai-cloud/axolotl/pull/3733)). GB가 2³⁰바이트라면, 블록이 36개라 위와 같이 센 35 × 길이 × 4,096 × 2바이트, 곧 4.38과 8.75 GiB와 맞는다. 속도는 16k에서 4% 느려졌는데, 거기서는 복사가 계산과 겹친다. 겹치지 않는 accelerate의 것은 짧은 길이에서 스텝이 1.38초에서 1.86초로 늘고 최대는 그대로였고, Qwen3-0.6B를 백만 토큰으로(여덟 장) 학습하면 0.6% 늘고 최대가 25% 줄었다([accelerate #4175](https://github.com/huggingface/accelerate/pull/4175)).
#
# ### 남는 메모리로 재계산 줄이기
#
# 체크포인팅에는 켜기와 끄기 사이도 있다. 5.6절처럼 다시 만들기 비싼 행렬곱과 어텐션의 결과는 남길 수 있다. Qwen3-4B의 LoRA를 길이 2,048로 늘리면 체크포인팅 없이는 한 샘플도 들어가지 않고, 켜면 들어가면서 2 GiB쯤 남는다. `selective=True`를 주면 플래너가 남는 자리를 이런 결과로 채운 계획을 더 찾는다(20초쯤 걸린다). 다 남길 자리가 없으면 손실 나누기도 해 본다. 체크포인팅만 켠 계획의 추가 연산은 +33%다. 얼마로 줄까?

# %%
spent = plan_training("Qwen/Qwen3-4B", gpu="T4", length=2048, batch=16, methods=("lora",), selective=True)
spent

# %% [markdown] lang="ko"
# **+33%가 +4%로** 준다. 반올림을 빼면 셋 다 배우는 것이 같다. '결과 5가지 남김'은 연산 다섯 종류의 출력을 버리지 않는다는 뜻이다. 1번은 손실도 나누었다. 1.24 GiB가 비어 있지만 더 남길 결과가 없다.
#
# 무엇부터 남겨야 할까? 아래는 2번이 블록마다 다시 계산하는 행렬곱과 어텐션이다(LoRA의 작은 곱은 뺐다). 크기와 연산은 샘플 하나에 모든 블록을 더한 것이고, 마지막 열은 그 결과를 남길 때 1바이트가 아끼는 FLOPs다. 그것이 큰 것부터, 같으면 결과가 작은 것부터 적었다. 이름은 선형층의 입력 × 출력이다. 2560x4096이 쿼리, 2560x1024가 키와 값, 4096x2560이 어텐션의 출력층, 2560x9728이 MLP의 앞의 둘이다(이 모델은 헤드가 32개 × 128이라 어텐션의 너비가 은닉층 크기 2,560보다 넓다). 마지막 열의 수는 어디서 보던 것인가?

# %%
from virtual_gpu.plan.keeping import results_of

request, checkpointed = spent.request, spent[1].recipe
results = results_of(request, checkpointed)
for one in results:
    print(f"{one.name:>9} {human_bytes(one.nbytes):>10} {one.flops / 1e12:5.2f} TFLOP {one.worth:6,.0f} FLOP/B")

# %% [markdown] lang="ko"
# 선형층은 **입력의 크기**다. m × k와 k × n의 곱은 2mkn FLOPs이고 결과는 16비트로 2mn바이트이니, 나누면 k다. 어텐션은 길이 L, 너비 d의 곱이 둘이라 4L²d FLOPs이고(마스크로 건너뛰는 것도 센 것이다) 결과는 2Ld바이트이니, 나누면 길이의 두 배다. 2 × 2,048 = 4,096보다 조금 작은 것은 역전파에 쓸 logsumexp(소프트맥스 분모의 로그. 헤드와 토큰마다 fp32 하나)도 함께 남기기 때문이다. 길이 1,024면 2,048에 못 미쳐 맨 뒤로 간다. 이 목록에 없는 9728x2560은 블록의 마지막 곱이라 다시 계산하지 않는다(5.8절의 조기 중단). 어댑터를 이 층에도 붙이면(`all-linear`) 어댑터가 저장한 것을 만들러 끝까지 가므로 다시 계산한다.
#
# 그런데 다섯을 더하면 4.4 GiB쯤이고, 2번에 남은 것은 2.67 GiB다. 앞의 넷만 남긴 것, 다섯째를 열 블록에서만 더 남긴 것(`:10`), 아무것도 남기지 않고 손실만 나눈 것을 세어 본다.

# %%
four = replace(checkpointed, kept=tuple(one.name for one in results[:4]))
more = replace(four, kept=(*four.kept, f"{results[4].name}:10"))
for recipe in (four, more, replace(checkpointed, fused_lm_head=True)):
    plan = measure(request, recipe, 1, 16)
    print(f"{plan!r}, +{plan.extra_flops / 1e12:.0f} TFLOP ({plan.extra_flops / plan.least_flops:.0%})")

# %% [markdown] lang="ko"
# 손실을 나누지 않으면 모든 블록에서 남길 수 있는 것은 넷까지이고, 그때의 추가 연산은 +18%다. 다섯째는 서른여섯 블록 가운데 열에만 들어가고, 그것까지 남겨도 +13%다. 손실을 나누면 로짓만 한 텐서들이 빠져 8.50 GiB가 되고, 다섯이 다 들어간다. 로짓을 한 번 더 만드는 데 26 TFLOP쯤(246에서 220을 뺀 것)이 들지만, 다섯째 하나가 117 TFLOP(샘플 16개 × 7.34)을 아낀다. 그래도 드는 27 TFLOP(+4%)은 거의 다 그 로짓이다. 플래너는 두 길 가운데 연산이 적은 것을 고른다.
#
# - **내 스크립트에는** `spent.best.save("my_plan")`으로 내보낸 `train.py`에서 `kept = …`부터 `context_fn`이 있는 `if … else …`의 끝까지를 `get_peft_model` 앞에, 그 코드가 쓰는 `import` 두 줄(`itertools`, `torch.utils.checkpoint`)을 맨 위에 옮긴다. 손실을 나누는 계획이면 `add_fused_lm_head`와 `FusedTrainer`도 함께다. **내 `TrainingArguments`의 체크포인팅은 끈다.** 옮긴 코드가 켠다(내보낸 `training_arguments.json`에도 꺼져 있다. 그 파일만 옮기면 체크포인팅이 없다).
# - **터미널에서는** `virtual-gpu fit … --selective --margin 0.05 --save my_plan`이다. 남는 자리를 쓰는 계획이니 여유(9.9절)를 함께 준다. 위의 1번은 5%를 두어도 들어간다(13.02 × 1.05 = 13.67 GiB).
# - **RAM에 두는 것.** 남길 자리가 없는 결과를 RAM에 두는 편이 다시 계산하는 것보다 빠르면(공개된 연산 속도와 링크의 속도로 따진다) 그런 계획도 찾는다. 긴 글에서 어텐션의 결과가 그렇고, 이름 뒤에 `@cpu`가 붙는다. 얼마를 남기면 최대와 연산이 어떻게 바뀌는지는 `virtual_gpu.activation_budget`이 곡선으로 보여 준다. 터미널에서는 `virtual-gpu fit … --budget 그림.svg`다(5.12절).
# - **찾지 않는 것.** 체크포인팅 없이도 들어가는 방법, 층, 전문가, 글을 나누는 계획(텐서, 파이프라인, 전문가, 컨텍스트 병렬), 학습 상태를 CPU에 두는 계획, `prefer="margin"`이다. ZeRO로 나누는 계획에서는 찾는다. GPT-2처럼 드롭아웃이 있는 어텐션의 결과도 남기지 않는다. 남기면 다시 계산할 때 그 어텐션이 난수를 뽑지 않으니, 뒤의 드롭아웃이 순전파 때와 다른 난수를 받는다.
# - **마이크로 배치는 1만 본다.** 자리가 가장 많이 남기 때문이다. 그러면 GPU가 놀 수 있으니(주장 2) 3번의 4 × 4도 재어 본다.
# - **시간은 어느 카드에서도 재지 않았다.** FLOPs로 센 것이다. 연산마다 파이썬 함수를 불러 남길지 정하므로, 연산이 짧은 작은 모델에서는 아끼는 것보다 더 걸릴 수 있다. 켜기 전과 후의 스텝을 재어 본다.
#
# ### 순위를 바꾸면
#
# `prefer`로 무엇을 먼저 볼지 바꾼다. `"speed"`는 시간의 하한이 짧은 것부터, `"margin"`은 메모리가 가장 많이 남는 것부터다. 첫째가 어떻게 바뀔까?

# %%
for prefer in ("speed", "margin"):
    ranked = plan_training("EleutherAI/polyglot-ko-5.8b", gpu="T4", length=512, batch=16, prefer=prefer)
    print(prefer, *map(repr, ranked), sep="\n  ")

# %% [markdown] lang="ko"
# `"speed"`에서는 첫째가 그대로이고 둘째부터 바뀐다. 체크포인팅을 켠 LoRA보다 켜지 않은 QLoRA가 앞선다(하한에는 4비트를 푸는 시간이 없으므로, 재어 보면 달라질 수 있다). `"margin"`은 방법마다, 체크포인팅을 켠 것과 끈 것마다 가장 적게 쓰는 마이크로 배치를 고른다. 여기서는 손실을 나누는 것, 4비트가 아닌 가중치를 16비트로 두는 것, 체크포인트를 RAM에 두는 것도 늘 해 본다. QLoRA로 샘플을 하나씩 넣고 셋 가운데 뒤의 둘(나머지는 16비트, 체크포인트를 RAM에)을 켜면 58억 모델을 학습하는 데 **3.60 GiB**면 된다(예측이고, 그만큼 느려진다).
#
# ### 다른 형식의 스크립트
#
# `best.save("my_plan", kind="torch")`는 학습 루프가 그대로 보이는 PyTorch 스크립트를, `kind="accelerate"`는 같은 루프를 `Accelerator`로 적은 것을, `kind="trl"`은 TRL의 `SFTTrainer` 스크립트를 쓴다. 여러 장에 나누는 계획이면 `torch`는 6장의 `fully_shard`를 쓰고, `kind="deepspeed"`는 `Trainer`에 DeepSpeed의 ZeRO를 붙인다.
#
# 손실 나누기가 있는 계획이면 어느 종류에나 TRL의 `add_fused_lm_head(model)` 한 줄이 들어 있다(`kind="trl"`의 `SFTTrainer`는 스스로 한다). 그래서 손실 나누기가 없는 계획을 `trl`로 쓰면 대개 계획보다 덜 든다. QLoRA라면 임베딩과 출력층을 fp32로 바꾸지도 않는다. DeepSpeed는 그레이디언트를 모아 보내는 묶음(버킷)의 크기가 따로다. 둘 다 메모리가 이 계획과 다르다. 실행하기 전에 가상 GPU로 확인한다(9.10절).
#
# ### 남들이 말하는 숫자와 비교
#
# 허브에 없는 모델이라도 transformers의 설정만 있으면 셀 수 있다. 널리 인용되는 숫자를 같은 방법으로 다시 센다. 글마다 GB가 10⁹바이트일 때도 2³⁰바이트일 때도 있으므로 둘 다 적는다.
#
# QLoRA 논문(Dettmers 외, 2023, arXiv 2305.14314)의 초록은 650억 파라미터 모델을 48 GB GPU 하나에서 미세 조정했다고 말한다. LLaMA-65B의 모양을 설정으로 적고, 길이 512, 배치 16, rank 64로 모든 선형층에 어댑터를 붙인다.
#
# > **주장 4.** "650억 모델을 48 GB GPU 하나에서" (출처: Dettmers 외, 2023)
#
# 옵티마이저가 융합 AdamW이고, 4비트로 줄이지 않는 가중치는 16비트로 두고, 손실은 나누지 않을 때 가장 적게 쓰는 계획은 몇 GB(10⁹바이트)일까? (`cheapest`는 들어가지 않을 때만 손실을 나누어 본다.)

# %%
paper = guess("9.12", None, "GB")
paper

# %% [markdown] lang="ko"
# 어댑터를 어텐션에만(peft의 기본값, Llama에서는 `q_proj`와 `v_proj`) 붙인 것, 모든 선형층에 붙인 것, 거기에 8비트 AdamW를 쓴 것과 32비트 페이지 AdamW를 쓴 것을 차례로 본다. 플래너는 옵티마이저를 정해 주지 않으면 QLoRA를 융합 AdamW로만 세므로 뒤의 둘은 따로 적어 준다. 첫 줄은 48 GB 카드 세 가지, A40, L40S, RTX A6000의 판정 한도이고, 마지막 세 열은 거기에 들어가는가다. A100에서 센 것이 한도보다 크면 `anything_that_fits`가 손실 나누기와 오프로드까지 써서 들어갈 길을 찾는다.

# %%
from transformers import LlamaConfig

from virtual_gpu.plan import anything_that_fits, cheapest

llama = LlamaConfig(
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
    intermediate_size=22016, vocab_size=32000,
)  # fmt: skip
cards = ("A40", "L40S", "RTX A6000")
limits = [make_request(llama, gpu).limit_bytes for gpu in cards]
print(*(f"{gpu} {human_bytes(limit)}" for gpu, limit in zip(cards, limits, strict=True)), sep=", ")
print(f"{'targets':10} {'optimizer':11} needed             A40 L40S A6000")
tried = ("attention", None), ("all-linear", None), ("all-linear", "adamw_8bit"), ("all-linear", "paged_adamw")
for targets, optimizer in tried:
    asked = {"methods": ("qlora",), "length": 512, "batch": 16, "lora_rank": 64}
    asked |= {"lora_targets": targets, "optimizer": optimizer}
    plan = cheapest(make_request(llama, "A100-80GB", **asked))
    fits = [
        plan.needed_bytes <= limit or anything_that_fits(make_request(llama, gpu, **asked)) is not None
        for gpu, limit in zip(cards, limits, strict=True)
    ]
    gb, gib = f"{plan.needed_bytes / 1e9:.1f} GB", human_bytes(plan.needed_bytes)
    print(f"{targets:10} {plan.recipe.optimizer:11} {gb} {gib}", *fits)

# %% [markdown] lang="ko"
# 앞에서 물은 것은 둘째 줄이고, 페이지 옵티마이저를 쓴 논문에 가까운 것은 넷째 줄이다. 페이지는 자리가 있으면 GPU에 남으므로, 넷째 줄은 자리가 그만큼뿐인 카드에서도 끝까지 간다는 뜻이다.

# %%
paper.against(cheapest(make_request(llama, "A100-80GB", **asked | {"optimizer": None})).needed_bytes)

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 어텐션의 `q_proj`와 `v_proj`에만 어댑터를 붙이면 들어간다. 모든 선형층에 rank 64로 붙이면 세 카드 어디에도 들어가지 않고, 상태를 8비트로 줄이거나 페이지로 두면 셋 모두에 들어간다. 같은 48 GB라도 판정 한도가 다르다(첫 줄). 여유 5%를 두면 8비트는 42.78 × 1.05 = 44.92 GiB, 페이지는 41.56 × 1.05 = 43.64 GiB라 A6000에만 들어간다. (A40의 한도가 L40S보다 낮은 것은 컨텍스트를 잰 기록을 찾지 못해 나쁜 쪽을 더 넓게 잡았기 때문이다.)
#
# 논문의 프로그램과 같지는 않다. 저자들의 [`qlora.py`](https://github.com/artidoro/qlora)도 `--bf16`이면 임베딩을 bf16으로 두지만, 거기서는 어댑터까지 bf16이다. 오늘의 peft는 어댑터를 fp32로 둔다. 페이지 옵티마이저를 쓴 까닭도 논문은 긴 시퀀스에서 순간적으로 치솟는 메모리를 피하려는 것이라고 적었다.
#
# </details>
#
# ### 사건 9-A: "7 × 4 × 4 = 112 GB"
#
# Alpaca의 README에는 70억 모델의 미세 조정에 7 × 4 × 4 = 112 GB가 든다고 적혀 있다. fp32로 네 벌, 곧 가중치와 그레이디언트와 Adam의 두 상태다. 그런데 24 GB짜리 RTX 3090 **여덟 장**, 모두 192 GB를 쓴 사람이 배치를 1로 줄여도 OOM이 났다. 메시지는 이랬다([stanford_alpaca #73](https://github.com/tatsu-lab/stanford_alpaca/issues/73)).
#
# `Tried to allocate 194.00 MiB (GPU 0; 23.70 GiB total capacity; 22.21 GiB already allocated; 127.56 MiB free; 22.50 GiB reserved in total by PyTorch)`
#
# 그가 올린 명령은 이렇다. `full_shard`가 ZeRO-3다.
#
# ```sh
# torchrun --nproc_per_node=4 … train.py … --per_device_train_batch_size 1 … --fsdp "full_shard auto_wrap" …
# ```
#
# 그 여덟 장으로 Alpaca의 학습(LLaMA-7B, 길이 512, 스텝마다 128샘플, 혼합 정밀도, AdamW)을 그대로 하려 한다. **추가 연산 없이** 들어가는 것 가운데 **누적이 가장 적은** 설정을 찾아라. `run(gpus=2나 4나 8, stage=2나 3, micro_batch=…, checkpointing=…)`으로 다섯 번까지 센다. 누적 횟수는 128을 GPU의 수와 마이크로 배치로 나누어 정해진다. 먼저 그의 명령대로, 128샘플까지 누적한 것이다.

# %%
from helpers import case

case("9-A").run(gpus=4, stage=3, micro_batch=1)

# %% [markdown] lang="ko"
# 파라미터, 그레이디언트, 옵티마이저 상태의 합만으로 한도를 넘는다. 들어가는지는 그림에 있는 카드의 한도가 아니라, 나쁜 쪽의 카드와 NCCL의 버퍼까지 뺀 판정 한도 21.48 GiB로 정한다. (표는 FSDP2가 두는 대로 4 + 4 + 8바이트로 나눈 것이다. 6.2절 표의 2 + 2 + 12와 합은 같다.) 여유 없이 센다. 찾은 설정을 `{"이름": 값}`으로 적는다.

# %%
settings = ...
case("9-A").check(settings)

# %% [markdown] lang="ko"
# ### 사건 9-B: 계산기마다 답이 다르다
#
# Code Llama 7B를 배치 1, 길이 2048로 학습하려는 사람이 온라인 계산기에 물었더니 전체 미세 조정 216 GB, LoRA 177 GB, QLoRA 180 GB라고 했다. 다른 글의 그래프에서는 LoRA가 **16 GB**다. 열 배가 넘게 차이 난다([gpu_poor #1](https://github.com/RahulSChand/gpu_poor/issues/1)). 무엇을 켜면 16 GB가 될까?
#
# LoRA라는 말 하나에 체크포인팅, 어댑터를 붙이는 층(`"attention"`은 `q_proj`와 `v_proj`다), rank가 숨어 있다. 배치 1, 길이 2048, LoRA는 그대로 두고 그래프의 16 GB(여기서는 10⁹바이트로 본다. 표의 단위로는 14.90 GiB이고, 2% 안은 14.60~15.20 GiB다)와 **2% 안**에서 맞는 설정을 찾아라. `run(method=…, checkpointing=…, targets="attention"이나 "all-linear", rank=…)`으로 다섯 번까지 센다.
#
# 몇 GB를 움직이는 것부터 정하고, 작은 것으로 맞춘다. 남는 실험으로는 다른 방법도 세어 계산기의 답과 비교한다. 얼마가 필요한지를 묻는 것이므로 카드는 무엇이든 들어가는 B200이다.

# %%
case("9-B").run(method="lora")

# %% [markdown] lang="ko"
# 가중치 12.57 GiB 다음으로 큰 것이 순전파 상태다. 아무것도 켜지 않아도 25.5 GB(23.78 GiB)이니, 계산기의 177 GB는 이 설정들로 설명되지 않는다(신고에는 bug라는 꼬리표가 붙었다). 16 GB의 그래프도 어떤 설정에서 나왔는지는 신고에 없다. 여기서는 16 GB가 될 수 있는 설정 하나를 찾는다. 찾은 설정을 `{"이름": 값}`으로 적는다.

# %%
settings = ...
case("9-B").check(settings)
