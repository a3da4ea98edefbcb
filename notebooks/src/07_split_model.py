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
# # 7장. 모델을 쪼개기
#
# 6장의 데이터 병렬과 ZeRO는 배치와 저장만 나누었다. 계산은 모든 GPU가 모든 층에서 했고, 순전파 상태와 모아 둔 층은 바닥에 남았다. 이 장에서는 **모델 자체**를 나눈다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - **파이프라인 병렬**(pipeline parallelism)의 버블과 메모리를 순서(schedule)마다 비교하고 고른다.
# - **텐서 병렬**(tensor parallelism)의 계획을 직접 짜고, **시퀀스 병렬**(sequence parallelism)이 무엇을 더 나누는지 설명한다.
# - 긴 글을 나누는 **컨텍스트 병렬**(context parallelism)과 전문가를 나누는 **전문가 병렬**(expert parallelism)이 무엇을 주고받는지 말하고, 무엇을 어디에 묶을지 판단한다.
#
# 앞부분에서는 6장처럼 진짜 프로세스 네 개를 띄운다. `run_ranks(함수, rank 수)`는 rank마다 프로세스를 띄워 함수를 실행하고 돌려준 값을 모은다. 저장된 출력은 GPU가 없는 컴퓨터에서 얻었다. T4 한 장뿐이라면 이 장을 실행만 해 보고 [8장](08_lora.ipynb)으로 가도 된다.
#
# 나누는 방향은 둘이다. 층과 층 사이를 자르거나(파이프라인), 층 하나하나를 쪼갠다(텐서). 그림에서 GPU 하나가 맡는 부분을 비교한다. 층과 GPU의 수를 바꾸어도 된다.

# %%
from helpers.chapters.c7_split.drawings import draw_model_splits

draw_model_splits(layers=8, gpus=4)

# %% [markdown] lang="ko"
# ## 7.1 파이프라인 병렬: 층을 나눈다
#
# 층이 여덟 개인 모델을 rank 네 개에 두 층씩 둔다. 이렇게 나눈 조각이 **스테이지**(stage)다. rank 0이 순전파한 결과를 rank 1에 보내고, rank 1은 rank 2에 보낸다. 역전파는 거꾸로 온다.
# 배치 하나를 통째로 넣으면 한 rank가 일하는 동안 나머지 셋은 쉰다. 그래서 배치를 **마이크로 배치** 여덟 개로 잘라 잇달아 넣는다. 넣는 순서를 정하는 방법 가운데 둘을 먼저 실행한다.
#
# - **GPipe**(Huang 외, 2019): 순전파를 모두 끝낸 다음 역전파를 한다.
# - **1F1B**(one forward, one backward; Narayanan 외, 2019): 역전파를 할 수 있게 되면 바로 해서 순전파 하나와 역전파 하나를 번갈아 한다.
#
# 둘 다 `torch.distributed.pipelining`에 있다. 그려 보기 전에 짐작한다. 네 rank의 시간 가운데 쉬는 시간은 몇 %일까?

# %%
from helpers import guess

idle = guess("7.1", None, "%")
idle

# %% [markdown] lang="ko"
# rank가 실제로 일한 순서를 기록해 그린다. 숫자는 마이크로 배치의 번호다. 순서는 기록한 것이고, 시간은 한 층의 순전파를 1, 역전파를 2로 놓고 다시 계산했다.

# %%
from helpers import run_ranks
from helpers.chapters.c7_split.drawings import draw_pipeline
from helpers.chapters.c7_split.pipeline import bubble, pipeline

piped = {schedule: run_ranks(pipeline, 4, schedule, 8) for schedule in ("GPipe", "1F1B")}
draw_pipeline(piped)

# %% [markdown] lang="ko"
# 그림의 회색을 모두 더하면 얼마인가?

# %%
idle.against(bubble(piped["1F1B"]))

# %% [markdown] lang="ko"
# 쪼개도 결과는 같을까? 스테이지마다 가진 그레이디언트를 차례로 이어 붙여, 프로세스 하나가 첫 스텝에서 구한 것과 비교한다. 출력은 두 손실과 그레이디언트가 같은지다.

# %%
import torch

from helpers.chapters.c7_split.pipeline import LAYERS, gradients_of
from helpers.ranks.training import one_process

first = one_process(steps=1, layers=LAYERS)
for schedule, ranks in piped.items():
    same = torch.allclose(gradients_of(ranks), first.gradients, rtol=0, atol=1e-12)
    print(schedule, f"{ranks[-1].loss:.6f} {first.losses[0]:.6f}", same)

# %% [markdown] lang="ko"
# 같다. 메모리와 시간만 다르다는 뜻이다.
#
# ### 버블
#
# 회색이 쉬는 시간, **버블**(bubble)이다. 스테이지가 p개, 마이크로 배치가 m개이고 스테이지마다 걸리는 시간이 같으면, 마이크로 배치 하나의 순전파와 역전파에 걸리는 시간을 단위로 해서 모두 m + p − 1이 걸리고
# 그 가운데 p − 1은 쉰다. 버블의 비율은 **(p − 1)/(m + p − 1)** 이다. m을 바꾸어 실행하고, 기록한 순서에서 구한 비율과 식을 비교한다. 논문(Narayanan 외, 2021)은 쉬지 않는 시간으로 나누어 (p − 1)/m이라고 적는다. 같은 것을 다르게 센 것이다.

# %%
for m in (4, 8, 16):
    shares = [bubble(run_ranks(pipeline, 4, schedule, m)) for schedule in ("GPipe", "1F1B")]
    print(m, *shares, f"{3 / (m + 3):.3f}")

# %% [markdown] lang="ko"
# 두 순서의 버블이 같고, 식과도 같다. 버블은 마이크로 배치를 많이 넣어야 줄어든다.
#
# 시계로 재도 그럴까? 이 모델은 너무 작아서 시간의 대부분이 통신이고, 코어는 rank보다 적을 수도 있다. 그래서 층마다 일부러 기다리게 해서(순전파 0.025초, 역전파 0.05초) 오래 걸리는 계산을 흉내 낸다. 기다리는 동안에는 CPU를 쓰지 않는다.
# 출력은 시계로 잰 버블과 식의 값이다. 잰 값은 실행할 때마다 조금씩 다르다.

# %% tags=["nbval-ignore-output"]
from helpers.chapters.c7_split.pipeline import measured_bubble

slow = run_ranks(pipeline, 4, "1F1B", 8, 0.025)
f"{measured_bubble(slow):.3f}", f"{3 / 11:.3f}"

# %% [markdown] lang="ko"
# 잰 값이 조금 크다. 보내고 받는 시간이 더해졌기 때문이다.
#
# **연습 7-1.** 파이프라인의 스테이지 수 `stages`와 참을 수 있는 버블의 비율 `most`를 받아, 버블이 `most` 이하가 되는 가장 작은 마이크로 배치 수를 돌려주는 함수를 완성하라. 스테이지마다 걸리는 시간은 같다. 막히면 `exercise("7-1").hint()`, 그래도 막히면 `exercise("7-1").solution()`을 실행한다.

# %%
from helpers import exercise


def micro_batches(stages, most):
    return ...


exercise("7-1").check(micro_batches)

# %% [markdown] lang="ko"
# ### 붙들고 있는 순전파 상태
#
# 버블이 같다면 1F1B는 왜 쓸까? 그림의 오른쪽 끝에 답이 있다. 역전파가 끝날 때까지 그 마이크로 배치의 순전파 상태를 버릴 수 없다. rank마다 한꺼번에 붙들고 있던 마이크로 배치의 최대 수와, 그때의 순전파 상태를 바이트로 센 것을 출력한다.

# %%
from helpers import human_bytes

for schedule, ranks in piped.items():
    print(schedule, [run.in_flight for run in ranks], [human_bytes(run.kept_bytes) for run in ranks])

# %% [markdown] lang="ko"
# - **GPipe**에서는 모든 rank가 m개를 붙든다. 마이크로 배치의 크기를 그대로 두고 m을 늘려 버블을 줄이면 순전파 상태가 m에 비례해 늘어난다. (논문의 GPipe는 스테이지마다 체크포인팅을 해서 입력만 m개를 붙든다.)
# - **1F1B**에서는 rank i가 **p − i개**만 붙든다. m을 늘려도 그대로다.
# - 층을 나누었으니 파라미터, 그레이디언트, 옵티마이저 상태는 어느 순서에서나 rank마다 자기 스테이지 몫뿐이다. 순서가 바꾸는 것은 순전파 상태와 버블이다.
# - 1F1B에서는 앞 rank일수록 많이 붙든다. GPU마다 메모리가 고르지 않다. (마지막 rank의 하나가 남들의 하나보다 조금 큰 것은 출력층과 손실이 거기 있어서다.)
#
# ### 카드 두 장에 층만 나누면: `device_map="auto"`
#
# Kaggle은 T4 두 장을 빌려준다. transformers의 `device_map="auto"`는 한 프로세스에서 층을 앞에서부터 카드에 나누어 올린다. 카드 0이 순전파한 결과를 카드 1이 이어받고 역전파는 거꾸로 온다. 배치를 자르지 않으니 마이크로 배치가 하나인 파이프라인이다. m = 1, p = 2를 위의 식에 넣으면 버블은 (2 − 1)/(1 + 2 − 1) = 1/2이다. 두 카드에 걸리는 시간이 같다면 두 장을 써도 한 장의 속도밖에 나지 않는다. 얻는 것은 메모리뿐이다.
#
# Llama-3.1-8B는 fp16 가중치만 14.96 GiB라, 쓸 수 있는 메모리가 14.64 GiB인 T4 한 장에는 올라가지도 않는다. 가상 T4 두 장에 나누어 올리고, 길이 1,024인 글 하나로 LoRA 학습의 순전파와 역전파를 한 번 한다(체크포인팅을 켠다. 가중치는 내려받지 않는다). 출력층(`lm_head`)은 어느 카드에 놓이고, 로짓은 어느 카드에서 나올까? 둘째 줄과 넷째 줄을 비교한다. 출력은 차례로 카드별 층의 수, 나머지 부분이 놓인 카드, 카드별 가중치, 로짓의 카드와 크기, 카드별 최대 메모리다.

# %%
from collections import Counter

import virtual_gpu
from helpers import enable_checkpointing
from helpers.models import lora_config


def on_two_cards(name="meta-llama/Llama-3.1-8B", batch=1, length=1024):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, dtype="float16", device_map="auto")
    places, weights = model.hf_device_map, Counter()
    print(dict(Counter(card for part, card in places.items() if "layers" in part)))
    print({part: card for part, card in places.items() if "layers" not in part})
    for parameter in model.parameters():
        weights[parameter.device.index] += parameter.nbytes
    print([human_bytes(weights[card]) for card in (0, 1)])
    enable_checkpointing(model)
    model = get_peft_model(model, lora_config(8)).train()
    tokens = torch.ones(batch, length, dtype=torch.int64).cuda()
    outputs = model(tokens, labels=tokens, use_cache=False)
    print(outputs.logits.device, human_bytes(outputs.logits.nbytes))
    outputs.loss.backward()
    print([human_bytes(torch.cuda.max_memory_allocated(card)) for card in (0, 1)])


with virtual_gpu.cuda("T4", visible_gpus=2):
    on_two_cards()

# %% [markdown] lang="ko"
# 한 장에 올라가지도 않던 모델이 두 장에서는 역전파까지 간다. 출력층은 카드 1에 있는데 로짓은 카드 0에서 나왔다. accelerate가 모델의 출력을 입력이 있던 카드로 복사하기 때문이다. 복사하는 동안에는 로짓이 두 카드에 모두 있고, 카드 0의 것은 `outputs`가 살아 있는 동안 남는다. 그래서 배치, 길이, 어휘가 크면 카드 0도 찬다. 가중치는 7.48 GiB로 같은데 카드 1의 최대가 더 큰 것은 로짓과 손실을 카드 1에서 계산하기 때문이다.
#
# - `"auto"`는 가중치의 크기만 보고 나눈다. 부분의 이름마다 카드 번호를 적은 사전(둘째 줄의 출력과 같은 모양)을 `device_map`에 주면 직접 나눌 수 있다. `virtual-gpu fit --model meta-llama/Llama-3.1-8B --gpu T4 --gpus 2 --methods lora --length 1024 --device-map`은 가장 많이 쓰는 카드의 메모리가 가장 적어지도록 층을 나눈 계획도 찾는다. `--save 폴더`는 1번 계획만 파일로 쓰는데, 그것이 `device_map` 계획이면 폴더에 `device_map.json`이 생긴다.
# - 모델을 카드 한 장에 둔 채(`device_map` 없이) 카드 두 장이 보이는 곳에서 `Trainer`를 쓰면, 층을 나누는 것이 아니라 `nn.DataParallel`로 배치를 나눈다. 순전파 때마다 가중치를 카드 1에 복사하고, 로짓과 그레이디언트는 카드 0에 모은다. 옵티마이저 상태도 카드 0에만 있어서 카드 0이 먼저 넘친다. `per_device_train_batch_size`는 카드 한 장의 몫이므로 전체 배치는 두 배가 된다. 한 장만 쓰려면 노트북에서는 `import torch`보다 먼저 `os.environ["CUDA_VISIBLE_DEVICES"] = "0"`을 실행한다. 배치를 나누려면 학습 코드를 파일로 저장해 `!torchrun --nproc_per_node 2 train.py`로 실행한다([6장](06_distributed_zero.ipynb)). 이때는 카드마다 모델이 통째로 들어가야 한다.
# - 내 프로그램이 카드 두 장에서 어떤지는 `virtual-gpu run --gpu T4 --visible-gpus 2 train.py`가 센다. 카드마다 따로 세고, 어느 카드에서 넘치는지 말한다. 위의 숫자도 이렇게 센 것이고, 아직 진짜 카드 두 장과 비교하지는 못했다.
#
# ## 7.2 버블을 더 줄이는 순서
#
# 1F1B의 버블 3/11은 크다. 요즘 쓰는 순서는 두 가지 생각을 더한다.
#
# - **인터리브**(interleaved 1F1B; Narayanan 외, 2021): rank 하나에 스테이지를 두 개 둔다. rank 0이 1·2층이 아니라 1층과 5층을 맡는다. 스테이지가 짧아지니 처음에 기다리는 시간도 짧아진다.
# - **제로 버블**(zero bubble, ZBV; Qi 외, 2024): 역전파를 둘로 쪼갠다. **입력의 그레이디언트**는 앞 스테이지가 기다리므로 바로 구하고, **가중치의 그레이디언트**는 아무도 기다리지 않으므로 빈 시간에 끼워 넣는다. 층은 V 모양으로 놓아 rank 0이 첫 층과 마지막 층을 맡는다.
#
# 메모리는 어느 쪽이 더 들까? 1F1B의 rank 0은 마이크로 배치 네 개를 붙들었다. 인터리브의 rank 0은 몇 개일까?

# %%
held = guess("7.2", None, "micro-batches")
held

# %% [markdown] lang="ko"
# 같은 여덟 층을 두 순서로 실행한다. 옅은 칸이 rank의 둘째 스테이지다. 버블과 오른쪽 끝의 수를 앞의 그림과 비교한다.

# %%
modern = {schedule: run_ranks(pipeline, 4, schedule, 8) for schedule in ("Interleaved1F1B", "ZBVZeroBubble")}
draw_pipeline(modern)

# %% [markdown] lang="ko"
# 짐작과 나란히 놓는다.

# %%
held.against(modern["Interleaved1F1B"][0].in_flight)

# %% [markdown] lang="ko"
# 그레이디언트는 이번에도 같을까? 버블은 몇 분의 몇인가?

# %%
for schedule, ranks in modern.items():
    same = torch.allclose(gradients_of(ranks), first.gradients, rtol=0, atol=1e-12)
    print(schedule, same, bubble(ranks), [human_bytes(run.kept_bytes) for run in ranks])

# %% [markdown] lang="ko"
# 기록한 네 순서를 움직여 본다. 순서를 고르고 ▶를 누르거나 순간을 옮기면, 그때 누가 무엇을 계산하고 몇 개를 붙들고 있는지 나온다. 1F1B에서 rank 0의 수가 늘기를 멈추는 순간을 찾는다.

# %%
from helpers.chapters.c7_split.panel import pipeline_panel

pipeline_panel(piped | modern)

# %% [markdown] lang="ko"
# - **인터리브**는 버블을 27%에서 16%로 줄이지만 rank 0이 5.5개를 붙든다(스테이지 하나는 절반으로 셌다). 스테이지의 경계가 세 곳에서 일곱 곳으로 늘어 통신도 그만큼 잦아진다.
# - **제로 버블**은 모든 rank가 똑같이 네 개를 붙든다. 고르지 않던 메모리가 고르게 되는 대신, 가장 적게 붙들던 rank 3도 네 개를 붙든다.
#
# 여기까지는 순전파 상태만 센 것이다. 6장의 FSDP2와 함께 쓰면 인터리브가 오히려 덜 들 수 있다. PyTorch의 파이프라인은 통신을 아끼려고 마지막 마이크로 배치까지 스테이지의 파라미터를 모은 채로, 그레이디언트를 쪼개지 않은 채로 붙든다. 인터리브는 카드마다 절반 크기의 스테이지를 둘 맡는데, 아래의 예에서 임시 텐서가 36 GiB에서 24 GiB로 준다. torchtitan의 개발자들이 Llama 3.1 405B를 H100 512장(FSDP2 8 × 텐서 병렬 8 × 파이프라인 8)에서 재니 가장 많이 쓴 카드가 1F1B에서 82.5 GiB, 인터리브에서 72.7 GiB였다([표 5](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)). 같은 프로그램을 fp8과 비동기 텐서 병렬 없이 가상 GPU에서 실행하면 첫 스테이지를 맡은 rank 0이 86.5 GiB와 76.3 GiB다(`benchmarks/README.md`).
#
# 내 모델을 스테이지로 나누면 얼마나 드는지는 9장의 플래너에 묻는다. 터미널에서 `virtual-gpu fit --model Qwen/Qwen3-8B --gpu H100 --gpus 8 --methods full --pipeline-parallel 4`라고 하면, 1F1B를 실행해 가장 많이 드는 GPU로 판정한다. `--save 폴더`를 더하면 그렇게 학습하는 스크립트를 적는다. 스테이지 하나를 GPU 여럿이 맡으면(여기서는 둘) FSDP2로 더 나눈다.
#
# > **주장 1.** "동기식 학습을 그대로 두고도 파이프라인의 버블을 0으로 만들 수 있다" (출처: Qi 외, 2024)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 여기서는 1/17, 약 6%가 남았다. 스텝의 처음과 끝에 서로를 기다리기 때문이고, 논문은 옵티마이저 스텝의 동기화까지 미루어 이것도 없앤다.
# 또 역전파를 쪼갠 두 조각의 시간이 저마다 순전파와 같을 때의 이야기다. 실제 층에서는 조금씩 어긋난다.
#
# </details>
#
# ### 사건 7-A: 스테이지가 똑같은데 GPU 0만 메모리가 부족하다
#
# "층이 완전히 고르게 나뉘었는데도 첫 GPU의 메모리가 훨씬 크다." DeepSpeed에 올라온 이슈다. 까닭은 7.1절에서 보았다. 1F1B에서는 rank 0이 가장 많이 붙든다. 그렇다고 GPipe로 바꾸면 모두가 많이 붙든다. 네 rank를 돌렸더니 버블이 27%이고, rank마다 순전파 상태를 21 MiB 넘게 붙든다.
#
# 버블은 **10% 이하**, 가장 많이 붙든 rank의 순전파 상태는 **8 MiB 이하**가 되게 하라. 실험은 다섯 번이다. `run(schedule=…, micro_batches=…)`는 rank마다의 기록을 돌려준다. 순서는 `"GPipe"`, `"1F1B"`, `"Interleaved1F1B"`, `"ZBVZeroBubble"`이고, 마이크로 배치 수는 문장 64개를 나누는 수다. 배치는 64개 그대로이므로 마이크로 배치를 늘리면 하나의 크기가 줄어든다.

# %%
from helpers import case

runs = case("7-A").run(schedule="GPipe", micro_batches=16)
float(bubble(runs)), [human_bytes(run.kept_bytes) for run in runs]

# %% [markdown] lang="ko"
# 찾은 순서와 마이크로 배치 수를 적는다.

# %%
answer = ...  # (schedule, micro_batches)
case("7-A").check(answer)

# %% [markdown] lang="ko"
# ## 7.3 텐서 병렬: 행렬을 나눈다
#
# 층 하나가 GPU 하나에 들어가지 않거나, 층을 계산하는 데 너무 오래 걸린다면 층을 쪼갠다. 층의 대부분은 행렬곱이므로 행렬곱을 나누는 방법을 알면 된다. 두 가지다.

# %%
from helpers.chapters.c7_split.drawings import draw_matrix_splits

draw_matrix_splits()

# %% [markdown] lang="ko"
# **(b)** 행렬을 열로 나누면 저마다 결과의 일부 열을 얻는다. 나란히 놓으면(concatenate) 전체다. **(c)** 행으로 나누면 입력도 열로 나누어야 하고, 저마다 크기가 온전한 행렬을 얻는다. 모두 더하면 전체다.
# 더 큰 행렬에서 두 방법 모두 결과가 같은지 확인한다.

# %%
x, a = torch.randint(-9, 10, (2, 6, 6), generator=torch.manual_seed(0))
by_columns = torch.cat([x @ part for part in a.chunk(2, dim=1)], dim=1)
by_rows = sum(part @ rows for part, rows in zip(x.chunk(2, dim=1), a.chunk(2, dim=0), strict=True))
torch.equal(by_columns, x @ a), torch.equal(by_rows, x @ a)

# %% [markdown] lang="ko"
# 그러면 어느 쪽을 쓸까? MLP에는 행렬이 둘이고 사이에 GELU가 있다. 비선형 함수라서 더하기 전에 씌우면 결과가 달라진다. 두 조각 u, v로 확인한다. 첫째 값은 열로 나누었을 때(나란히 놓기)
# GELU를 먼저 씌워도 되는지, 둘째 값은 행으로 나누었을 때(더하기) 되는지다.

# %%
from torch.nn.functional import gelu, scaled_dot_product_attention

u, v = torch.randn(2, 4, 4, generator=torch.manual_seed(0), dtype=torch.float64)
side_by_side = torch.equal(torch.cat([gelu(u), gelu(v)], 1), gelu(torch.cat([u, v], 1)))
side_by_side, torch.allclose(gelu(u) + gelu(v), gelu(u + v))

# %% [markdown] lang="ko"
# 그래서 **첫째 행렬은 열로, 둘째 행렬은 행으로** 나눈다. 첫째의 결과가 열로 나뉜 채 GELU를 지나 둘째의 입력이 되므로 중간에 아무것도 주고받지 않는다. 마지막에 한 번만 더하면 된다(Shoeybi 외, 2019, Megatron-LM).
#
# > **주장 2.** "행렬을 열로 나누든 행으로 나누든 결과는 똑같다" (출처: 책 5장을 정리한 글)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 행렬곱만 보면 똑같다(실수라면 더하는 순서 때문에 마지막 자리가 다를 수 있다). 그러나 행으로 나누면 비선형 함수보다 먼저 더해야 하므로,
# 어느 쪽이든 된다는 뜻은 아니다.
#
# </details>
#
# 어텐션은 더 쉽다. 헤드는 서로를 보지 않고 계산하므로 헤드째 나누면 된다. 헤드 네 개를 두 개씩 따로 계산해 나란히 놓는다.

# %%
q, k, v = torch.randn(3, 1, 4, 8, 16, generator=torch.manual_seed(0), dtype=torch.float64)
whole = scaled_dot_product_attention(q, k, v, is_causal=True)
parts = zip(q.chunk(2, dim=1), k.chunk(2, dim=1), v.chunk(2, dim=1), strict=True)
halves = [scaled_dot_product_attention(*part, is_causal=True) for part in parts]
torch.allclose(torch.cat(halves, dim=1), whole, rtol=0, atol=1e-12)

# %% [markdown] lang="ko"
# Q, K, V를 만드는 행렬은 열로(헤드째), 출력 투영은 행으로 나눈다. 여기도 마지막에 한 번만 더한다.
#
# ### 진짜 rank에서
#
# PyTorch의 `parallelize_module`에 어느 행렬을 열로(`ColwiseParallel`), 어느 행렬을 행으로(`RowwiseParallel`) 나눌지 알려 주면 된다. 먼저 층 정규화와 MLP 하나를 나눈다. 출력은 순전파와 역전파에서 부른
# 집합 통신의 수, 그리고 손실과 그레이디언트가 나누지 않은 것과 같은지다.

# %%
from helpers.chapters.c7_split.tensor import tensor_parallel_mlp

for n in (2, 4):
    run = run_ranks(tensor_parallel_mlp, n)[0]
    print(n, run.shapes, dict(run.forward), dict(run.backward), run.difference < 1e-12)

# %% [markdown] lang="ko"
# rank가 몇이든 순전파에 all-reduce 한 번, 역전파에 한 번이다. 역전파의 한 번은 입력의 그레이디언트를 더하는 것이다. (PyTorch의 `Linear`는 가중치를 전치해 저장하므로 (16, 8)은 X의 오른쪽에 곱하는 8 × 16 행렬이다.)
#
# 이번에는 transformers의 GPT-NeoX를 나눈다. polyglot-ko와 구조가 같고 크기만 줄였다(2층, 은닉층 64, 헤드 4개). 모델의 코드는 한 줄도 고치지 않는다. 필요한 것은 블록마다 넘기는 네 줄짜리 `plan`뿐이다. MLP의 계획과 같은 모양인가?

# %%
import inspect

from helpers.chapters.c7_split.tensor import tensor_parallel

print(inspect.getsource(tensor_parallel))

# %% [markdown] lang="ko"
# 어텐션의 Q, K, V는 열로, 출력 투영은 행으로 나눈다. MLP도 첫째는 열, 둘째는 행이다. rank 두 개와 네 개에서 실행한다. 출력은 순전파와 역전파의 집합 통신, 결과가 같은지, rank 하나가 가진 파라미터의 바이트다.

# %%
from helpers.chapters.c7_split.drawings import draw_block_splits

split = {n: run_ranks(tensor_parallel, n) for n in (2, 4)}
for n, ranks in split.items():
    run = ranks[0]
    print(n, dict(run.forward), dict(run.backward), run.difference < 1e-12, human_bytes(run.held))
draw_block_splits(split[2][0].shapes, heads=4)

# %% [markdown] lang="ko"
# 층이 둘이고 층마다 어텐션과 MLP에서 한 번씩이므로 순전파에 4번, 역전파에 4번이다. 손실도 그레이디언트도 나누지 않은 모델과 같다. rank 수를 두 배로 늘려도 rank 하나의 파라미터가 절반이 되지 않는 것은
# 임베딩과 출력층을 나누지 않았기 때문이다. 이렇게 작은 모델에서는 그것이 차지하는 비율이 크다.
#
# ### 계획을 직접 짠다
#
# **연습 7-2.** Llama의 블록에는 행렬이 일곱 개 있다. 어텐션의 `q_proj`, `k_proj`, `v_proj`, `o_proj`와 SwiGLU를 쓰는 MLP의 `gate_proj`, `up_proj`, `down_proj`다. 저마다 열(`"columns"`)로 나눌지 행(`"rows"`)으로 나눌지 적어라. 채점기는 그 계획으로 작은 Llama를 정말 rank 두 개에 나누어 실행하고, 나누지 않은 것과 비교한다.

# %%
plan = {
    "q_proj": ..., "k_proj": ..., "v_proj": ..., "o_proj": ...,
    "gate_proj": ..., "up_proj": ..., "down_proj": ...,
}  # fmt: skip
exercise("7-2").check(plan)

# %% [markdown] lang="ko"
# 헤드 네 개를 rank 세 개에 나눌 수는 없다. 위의 `check_model`이 실행하기 전에 막는다. 무엇이 안 된다고 하는가? (이 검사가 없을 때 PyTorch가 내는 오류는 사건 7-B에 있다.)

# %%
try:
    run_ranks(tensor_parallel, 3)
except RuntimeError as error:
    print(str(error).splitlines()[0].split(": ", 1)[1])

# %% [markdown] lang="ko"
# ### 사건 7-B: 서버 두 대를 묶었더니 모양이 맞지 않는다
#
# "텐서 병렬을 8에서 16으로 늘렸더니 불러오기는 되는데 순전파에서 `shape '[…, -1, 128]' is invalid`로 죽는다." transformers와 torchtitan에 올라온 이슈다. 요즘 모델은 키와 값의 헤드를 여러 쿼리 헤드가 나누어 쓴다(그룹 쿼리 어텐션, GQA). 그 헤드보다 GPU가 많으면 헤드 하나도 다 받지 못하는 rank가 생긴다.
#
# Llama-3.1-70B를 H100 64개에 놓는다. 텐서 병렬을 **가장 크게** 얼마까지 할 수 있는가? `run(tensor_parallel=…)`으로 다섯 번까지 해 본다. `gradient_checkpointing`과 `sequence_length`도 바꿀 수 있다.

# %%
case("7-B").run(tensor_parallel=2)

# %% [markdown] lang="ko"
# 가장 큰 수를 적는다.

# %%
degree = ...
case("7-B").check(degree)

# %% [markdown] lang="ko"
# ## 7.4 시퀀스 병렬: 나머지를 토큰으로 나눈다
#
# 텐서 병렬은 두 행렬 사이만 나눈다. 층 정규화와 블록의 입력은 모든 rank가 똑같이 갖는다. **시퀀스 병렬**은 그 부분을 토큰 방향으로 나눈다(Korthikanti 외, 2022). 행렬 앞에서 토큰을 모으고(all-gather), 뒤에서는 더하면서 흩는다(reduce-scatter). 그만큼 통신이 늘어날까?
#
# 앞의 층 정규화와 MLP를 두 가지로 실행한다. 첫 줄은 나누지 않았을 때 붙든 바이트다. 출력은 rank 수, 시퀀스 병렬인지, 순전파의 집합 통신, 역전파를 위해 rank 하나가 붙든 바이트, 결과가 같은지다.

# %%
print(1, run_ranks(tensor_parallel_mlp, 1)[0].kept)
for n in (2, 4):
    for sequence_parallel in (False, True):
        run = run_ranks(tensor_parallel_mlp, n, sequence_parallel)[0]
        print(n, sequence_parallel, dict(run.forward), run.kept, run.difference < 1e-12)

# %% [markdown] lang="ko"
# all-reduce 하나가 all-gather와 reduce-scatter 하나씩으로 바뀌었고, 붙든 바이트가 줄었다. 넷으로 나누었는데도 나누지 않은 것의 4분의 1까지 줄지 않는 것은 행렬 앞에서 모은 입력을 `parallelize_module`이 역전파까지 들고 있기 때문이다.
#
# > **주장 3.** "시퀀스 병렬은 통신량을 늘리지 않는다" (출처: Korthikanti 외, 2022)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** all-reduce 하나는 reduce-scatter와 all-gather를 이은 것이므로(6장) 순전파에서 오가는 양이 같다. 그러나 Megatron-LM처럼 조각만 두면 역전파에서 입력을 한 번 더 모아야 한다. 논문은 이 all-gather를 계산과 겹쳐 가린다.
#
# </details>
#
# ## 7.5 텐서 병렬과 ZeRO를 함께
#
# 텐서 병렬과 6장의 ZeRO를 함께 쓰려면 GPU를 바둑판처럼 배열한다(2-D mesh). 가로로 놓인 GPU 여덟 개는 한 층을 나누어 같은 샘플을 계산하고, 세로로는 ZeRO가 조각을 나눈다.
# 텐서 병렬은 층마다 주고받아야 해서 보통 한 서버 안의 GPU끼리 한다.
#
# Llama-3.1-70B를 GPU 512개에 두 방법으로 나눈다. 한 번은 512개 모두를 ZeRO로, 한 번은 여덟 개씩 텐서 병렬로 묶고 64개의 묶음을 ZeRO로 나눈다. 앞의 방법에서는 GPU마다 샘플이 하나, 뒤의 방법에서는 묶음마다 하나다(체크포인팅 없음).
# 열은 텐서 병렬의 크기, GPU 하나의 최대 메모리, 그 가운데 순전파 상태, 텐서 병렬로 보내는 양(GiB)이다. GPU 여덟 개가 층 하나를 나누어 계산하면 순전파 상태는 몇 %가 남을까?

# %%
remains = guess("7.5", None, "%")
remains

# %% [markdown] lang="ko"
# 두 방법을 실행한다.

# %%
from helpers import rank_step

kept = []
for degree in (1, 8):
    two_d = rank_step("Llama-3.1-70B", 512, tensor_parallel=degree, sequence_length=4096)
    parts = (two_d.total, two_d.at_peak["activations"], two_d.activations_sent)
    print(degree, "".join(f"{nbytes / 2**30:9.2f}" for nbytes in parts))
    kept.append(parts[1])
remains.against(kept[1] / kept[0])

# %% [markdown] lang="ko"
# 여덟 개가 층 하나를 나누어 계산하는데도 순전파 상태는 절반 가까이 남는다. 텐서 병렬이 나누는 것은 블록 안의 넓은 부분(어텐션의 헤드, MLP의 폭)뿐이기 때문이다. 블록의 입력, 층 정규화, 그리고 여기서는
# 로짓까지 여덟 GPU가 저마다 온전히 갖는다. Korthikanti 외(2022)는 GPU t개로 나눈 한 층의 바이트를 sbh(10 + 24/t + 5as/ht)로 적었는데(s는 길이, b는 배치, h는 은닉층의 크기, a는 헤드 수), t로 나누어지지 않는 10이 바로 이것이다(로짓은 층 밖에 있어 이 식에는 없다). 로짓은 어휘로 나눈 채 손실까지 계산할 수 있고(PyTorch의 `loss_parallel`), 글이 길수록 크게 듣는다. 얼마나 주는지는 [수단의 표](../../docs/levers.md)의 '나누어 계산하기'에 있다.
# 체크포인팅을 켜면 층마다 남는 것이 블록의 입력뿐이므로 그때는 거의 나누어지지 않는다. 7.4절의 시퀀스 병렬이 바로 이 10까지 나눈다. 여기서는 쓰지 않았다.
#
# 통신도 잦아진다. 블록 하나에 all-reduce가 몇 번 있는지 세려면 전체 원소 수를 (층 수 × 토큰 수 × 은닉층 크기)로 나눈다.

# %%
two_d.sent_activations["all_reduce"] / (80 * 4096 * 8192)

# %% [markdown] lang="ko"
# 블록마다 일곱 번이다(0.0125 = 1/80은 출력층의 것이다). 순전파에서 두 번(어텐션 뒤, MLP 뒤), 역전파에서 다섯 번이다. Megatron-LM 논문(Shoeybi 외, 2019)은 역전파도 두 번으로 끝낸다.
# 여기서 더 많은 것은 transformers의 Llama에서 q, k, v와 gate, up이 서로 다른 행렬이고, `parallelize_module`이 행렬마다 입력의 그레이디언트를 따로 더하기 때문이다. 7.4절처럼 블록의 반쪽마다 한 번 모으는 계획(torchtitan이 그렇게 한다)이라면 일곱 번일 필요가 없다.
#
# ## 7.6 긴 글과 전문가
#
# ### 컨텍스트 병렬
#
# 글 하나가 GPU 하나에 들어가지 않을 만큼 길면 토큰을 나눈다. 층 정규화와 MLP는 토큰마다 따로 계산하므로 그냥 나누어도 된다. 어텐션만 모든 키와 값을 본다. 그래서 키와 값의 조각을 rank들이 둥글게 돌려 가며 본다(**링 어텐션**, ring attention; Liu 외, 2023). 조각마다 따로 구한 소프트맥스는 나중에 합칠 수 있다. 분모의 로그(log-sum-exp)를 함께 들고 다니면 된다.
#
# rank를 리스트로 흉내 내어 고리를 한 바퀴 돈다. 쿼리 조각 하나가 키·값 조각 네 개를 차례로 만난다.


# %%
def ring_attention(q, keys, values):
    out, lse = torch.zeros_like(q), torch.full((*q.shape[:-1], 1), float("-inf"), dtype=q.dtype)
    for k, v in zip(keys, values, strict=True):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        here = scores.logsumexp(-1, keepdim=True)
        both = torch.logaddexp(lse, here)
        out = out * (lse - both).exp() + scores.softmax(-1) @ v * (here - both).exp()
        lse = both
    return out


q, k, v = torch.randn(3, 1, 4, 32, 16, generator=torch.manual_seed(0), dtype=torch.float64)
pieces = [ring_attention(part, k.chunk(4, 2), v.chunk(4, 2)) for part in q.chunk(4, 2)]
torch.allclose(torch.cat(pieces, 2), scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-12)

# %% [markdown] lang="ko"
# 네 조각으로 나누어 구해도 같다. rank 하나가 갖는 것은 토큰의 1/4에 대한 것뿐이고, s × s 행렬도 조각만큼만 생긴다. 대가는 층마다 키와 값이 한 바퀴 도는 통신이다. 미래를 보지 못하게 가리는 언어 모델에서는 앞 토큰을 맡은 rank의 일이 적으므로, 앞과 뒤를 짝지어 나누어 일을 고르게 한다. 헤드로 나누었다가 토큰으로 다시 나누는 방법(Ulysses; Jacobs 외, 2023)은 rank마다 서로 다른 조각을 모두와 맞바꾸는 **all-to-all**을 쓰고, 헤드 수보다 많이 나눌 수 없다.
#
# ### 전문가 병렬
#
# 전문가 혼합(MoE) 모델은 토큰마다 전문가(expert) 몇 개만 쓴다. 어느 전문가로 갈지는 **라우터**(router)라는 작은 층이 토큰마다 점수를 매겨 정한다. 전문가를 rank에 나누어 두고, 토큰을 자기 전문가가 있는 rank로 보냈다가(all-to-all) 돌려받는다. 전문가 여덟 개를 rank 네 개에 두 개씩 둔다. 토큰 4,096개가 아무렇게나 전문가 하나씩을 고르면 rank마다 몇 개를 받게 될까? 치우친 경우도 함께 센다.

# %%
draw = torch.Generator().manual_seed(0)
even = torch.randint(8, (4096,), generator=draw)
skewed = torch.multinomial(torch.tensor([8.0, 4, 2, 1, 1, 1, 1, 1]), 4096, replacement=True, generator=draw)
[torch.bincount(chosen // 2, minlength=4).tolist() for chosen in (even, skewed)]

# %% [markdown] lang="ko"
# 파라미터는 rank마다 똑같이 1/4이지만 **받는 토큰은 값에 달려 있다.** 치우치면 한 rank가 고르게 받을 때의 2.5배(가장 적게 받은 rank의 여섯 배)를 받고, 전문가를 계산하는 동안의 순전파 상태도 2.5배가 된다(어텐션과 로짓은 그대로다). 그래서 받는 수를 제한하지 않으면 전문가 병렬의 메모리는 미리 정확히 말할 수 없다. 균형 손실(auxiliary loss)을 더하거나 받을 수 있는 수를 제한(capacity)하는 것은 이 때문이다.
#
# 토큰이 고르게 간다고 보면 셀 수 있다. transformers는 FSDP2와 전문가 병렬을 모델을 불러올 때 함께 건다. `examples/train_experts.py`에서는 이 두 줄이다.
#
# ```python
# shared = DistributedConfig(fsdp_size=ranks, ep_size=args.experts, fsdp_mixed_precision=True)
# model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, distributed_config=shared)
# ```
#
# GPU 여덟 개에서 `--experts 1`이면 FSDP2뿐이다. 전문가도 여덟 조각으로 나누어 두고 블록을 계산할 때마다 모은다. `--experts 8`이면 rank마다 전문가 128개 가운데 16개를 통째로 갖고, 모으는 대신 토큰을 주고받는다. 기본 모델 Qwen3-30B-A3B는 토큰마다 전문가 8개를 쓰므로, 토큰 2,048개가 16,384행이 되어 오간다. 어느 쪽이든 rank 하나가 갖는 파라미터는 1/8이다. 그러면 최대도 같을까?
#
# Qwen3-30B-A3B를 8층만 남겨 H100 여덟 장에서 전체 미세 조정하는 rank 하나를 가상 GPU에서 실행한다(카드마다 1 × 2048, fp32 가중치에 bf16 계산, 체크포인팅, 융합 AdamW). `expert_ranks`는 `examples/train_experts.py`를 고치지 않은 그대로 실행하고 rank 0을 센다. 터미널에서는 `virtual-gpu run --gpu H100 --gpus 8 examples/train_experts.py --experts 8 --layers 8`이다(9.10절). `--layers`를 빼면 48층을 모두 실행한다. transformers 5.23에서 얻은 출력이고, 이 기능이 없는 버전에서는 그렇다는 한 줄만 나온다. 마지막 줄은 블록 하나의 전문가를 bf16으로 모은 것이다. 전문가 128개에 2,048 × 768인 행렬이 세 개씩(gate, up, down) 있다.

# %%
from helpers.chapters.c7_split.experts import expert_ranks

expert_ranks(1, 8, layers=8)
print("experts of a block in bf16:", human_bytes(128 * 3 * 2048 * 768 * 2))

# %% [markdown] lang="ko"
# 파라미터는 같은데 최대가 15.90 GiB에서 12.25 GiB로 준다. 최대에는 적힌 두 가지 말고도 옵티마이저 상태(2.61 × 2 = 5.22 GiB)와 그때까지 모인 그레이디언트가 있다. 6.5절에서 '모아 둔 파라미터'로 따로 그린 것은 여기서 임시 텐서에 든다. FSDP2의 임시 텐서 6.10 GiB는 거의 다 전문가다. 지금 블록과 미리 모은 다음 블록의 전문가가 두 벌, 온전한 크기의 그레이디언트가 bf16으로 한 벌, 그것을 더하려고 fp32로 바꾼 것이 두 벌 값이라, 1.12 GiB의 다섯 배쯤이다. 전문가 병렬에는 이것이 없다. 남은 1.74 GiB는 임베딩의 그레이디언트다(bf16과 fp32). 최대인 순간도 그레이디언트가 다 모인 역전파의 끝으로 옮겨 가, 최대는 임시 텐서만큼 줄지는 않는다.
#
# 줄어든 3.65 GiB는 블록 하나의 일이라 층이 많아져도 그대로다. 48층을 모두 실행하면 62.36 GiB가 58.67 GiB로, 6% 줄 뿐이다([레버 한 장](../../docs/levers.md)의 '전문가를 나누어 갖기'). 가중치, 그레이디언트, 옵티마이저 상태가 두 방법 모두 1/8이기 때문이다. 더 큰 차이는 통신에 있다. 그 표에서 한 스텝에 보내는 양은 243.6 GB와 31.0 GB다. 다만 토큰은 배치만큼 늘고 모으는 전문가는 늘지 않으므로, 카드마다 토큰이 많을수록 차이가 준다. 내 배치와 길이에서 어느 쪽이 나은지는 `virtual-gpu fit … --expert-parallel 8`이 센다.
#
# 이 값은 토큰이 고르게 갈 때의 것이다. 가상 GPU의 텐서에는 값이 없어 라우터의 점수를 모르므로, 전문가를 차례로 고른 것으로 본다. 한쪽으로 몰리면 그 rank에서 전문가를 계산하는 동안의 텐서가 위에서 센 만큼 커진다. 두 방법이 같은 것을 배우는지는 값이 있어야 안다. 저장소의 테스트는 전문가 여덟 개인 작은 모델을 진짜 프로세스 두 개로 네 스텝 학습하고, 두 방법의 손실이 0.02 안에서 같은지 확인한다.
#
# ## 7.7 무엇을 어떻게 묶을까
#
# | 묶음 | 나누는 것 | 통신 | 어디에 |
# |---|---|---|---|
# | 텐서 병렬 + 시퀀스 병렬 | 층 안의 행렬, 순전파 상태 | 블록마다, 가장 잦다 | 한 서버 안(NVLink), 8 이하이고 KV 헤드 수 이하 |
# | 컨텍스트 병렬 | 토큰 | 어텐션마다 키와 값 | 텐서 병렬 바로 바깥, 글이 아주 길 때만 |
# | 전문가 병렬 | 전문가 | MoE 층마다 all-to-all | 되도록 한 서버 안 |
# | 파이프라인 병렬 | 층 | 스테이지 사이의 순전파 상태뿐, 가장 적다 | 서버와 서버 사이 |
# | 데이터 병렬, ZeRO·FSDP2 | 배치와 저장 | DDP는 스텝마다 그레이디언트(2Ψ), FSDP2는 블록마다 파라미터를 두 번 모으고 그레이디언트를 한 번 흩는다(3Ψ) | 가장 바깥 |
#
# 안쪽에서 바깥쪽으로 텐서(TP) → 컨텍스트(CP) → 파이프라인(PP) → 데이터 병렬(DP)의 차례로 GPU를 채우는 것이 보통이다. Meta는 Llama 3 405B를 GPU 16,384개에서 학습할 때 텐서 병렬 8 × 파이프라인 16 × 데이터 병렬 128로, 길이를 131,072로 늘린 단계에서는 텐서 병렬 8 × 컨텍스트 병렬 16 × 파이프라인 16 × 데이터 병렬 8로 놓았다(Llama 3 논문, arXiv 2407.21783, 표 4).
#
# 두 배열 가운데 첫째는 PyTorch에 있는 것만으로도 돌려 볼 수 있다. rank 하나를 가상 GPU에서 실행한 결과가 [레버 한 장](../../docs/levers.md)의 '405B를 16,384장에'에 있다. 논문은 길이 8,192에서 체크포인팅 없이 학습했다고 적었는데(3.3.2절), 여기서는 둘째 스테이지의 최대가 159.80 GiB라 80 GB 카드에 들어가지 않는다. 그 가운데 60 GiB는 어텐션과 MLP에 넣으려고 모은 입력이다. PyTorch의 시퀀스 병렬은 이것을 나누지 않은 채로 역전파까지 남긴다(7.4절). 하나가 토큰 8,192 × 은닉층 크기 16,384 × 2바이트, 곧 256 MiB이고, 둘째 스테이지는 마이크로 배치 15개 × 8층 × 2개를 붙든다. 열로 나눈 곱과 어텐션, reduce-scatter의 결과만 남기고 나머지를 모두 역전파에서 다시 계산하면(선택적 체크포인팅) 64.57 GiB로 들어간다.
#
# 전문가 병렬은 데이터 병렬의 GPU를 다시 묶어 쓴다. GPU가 여덟 개 이하라면 이 장의 방법은 대개 필요 없다. 6장의 FSDP2에 체크포인팅을 더해 보고, 그래도 층 하나의 순전파 상태가 벅차거나 배치가 GPU 수보다 작아야 하면 텐서 병렬을, MoE 모델에서 가중치를 모으는 통신이 시간을 잡아먹으면 전문가 병렬을 더한다.
#
# ## 7.8 기억할 것
#
# 예상이 얼마나 맞았는지 돌아본다.

# %%
from helpers import guesses

guesses()

# %% [markdown] lang="ko"
# - 파이프라인의 버블은 (p − 1)/(m + p − 1)이다. 인터리브는 스테이지를 잘게 나누어, 제로 버블은 역전파를 둘로 쪼개어 줄인다.
# - GPipe는 rank마다 마이크로 배치 m개의 순전파 상태를, 1F1B는 rank i에서 p − i개만 붙든다.
# - 텐서 병렬은 첫째 행렬을 열로, 둘째 행렬을 행으로 나누어 블록 하나의 순전파를 all-reduce 두 번으로 끝낸다. 순전파 상태도 나누지만 블록 안쪽만 나눈다. 나머지는 시퀀스 병렬이 나눈다.
# - 컨텍스트 병렬은 키와 값을 돌려 가며 보고, 전문가 병렬은 토큰을 보낸다. 전문가 병렬의 메모리는 토큰이 어디로 몰리느냐에 달려 있다.
# - 잦은 통신은 안쪽(서버 안), 드문 통신은 바깥쪽(서버 사이)에 둔다.
#
# GPU를 64개 빌려 상태를 나누고 모델까지 쪼갰다. 그런데 학습할 파라미터 자체를 1/100로 줄일 수 있다면 그레이디언트도 옵티마이저 상태도 처음부터 1/100이다. GPU 하나로도 될까? [8장](08_lora.ipynb)에서 답한다.
