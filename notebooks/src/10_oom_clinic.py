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
# # 10장. OOM 진료실
#
# `torch.OutOfMemoryError: CUDA out of memory.` 화면에 이 줄이 있다면 이 장부터 읽어도 된다. 앞의 장들은 거의 학습의 첫 스텝을 다루었다. 이 장은 잘 돌다가 죽는 프로그램을 다룬다. 모델도 배치 크기도 그대로인데 왜 몇백 스텝을 잘 돌고 나서 죽을까?
#
# 바로 왔다면 알아 둘 말은 셋이다. **할당자**는 드라이버에서 메모리를 크게 받아 나누어 주는 PyTorch의 장치, **순전파 상태**는 역전파에 쓰려고 남긴 중간값, **가상 GPU**는 값을 담지 않는 텐서로 같은 코드를 돌리며 할당된 바이트를 세는 가짜 카드다. 나머지는 [용어집](../../docs/glossary.md)에 있다.
#
# 갈림길은 둘이다. **언제 죽었나**, 그리고 스텝이 끝난 뒤에도 살아 있는 텐서(**스텝 뒤의 `allocated`**)가 느는가. 이 표가 이 장의 지도다. (`allocated`가 배치의 길이를 따라 오르내려도 쌓이지 않으면 '그대로'로 본다. `reserved`는 할당자가 쥐고 있는 것으로, 빈자리까지 센다.)
#
# | 언제 죽었나 | 스텝 뒤의 `allocated` | 까닭 | 어디로 |
# |---|---|---|---|
# | 첫 스텝이나 둘째 스텝 | – | 스텝 자체가 카드보다 크다, 단편화(T가 F + R 이하일 때, 3.10절의 배치 13), 또는 남이 카드를 쓴다(10.6절) | 10.1절, [처방 한 장](../../docs/cheat_sheet.md). 긴 것부터 오게 묶었다면 10.3절 |
# | 어느 긴 배치에서 | 그대로 | 가장 긴 배치 | 10.3절 |
# | 스텝마다 늘다가 | 늘어난다 | 이름 하나가 붙들고 있다 | 10.4절 |
# | OOM을 잡아 다시 하다가 | 볼 수 없다. 다시 하기 직전의 `allocated`가 크다 | 예외가 앞 시도의 텐서를 붙들고 있다 | 10.4절 |
# | 길이가 제각각인 배치를 돌다가 | 그대로, `reserved`만 늘어난다 | 캐시(안 죽는다), 단편화 | 10.5절 |
# | 어떤 날은 되고 어떤 날은 안 된다 | 그대로 | 다른 프로세스 | 10.6절 |
# | 평가, 생성, 저장, 불러오기 | – | 학습 밖의 것 | [11장](11_outside_training.ipynb) |
#
# 가장 긴 배치(둘째 줄)와 단편화(첫째, 다섯째 줄)는 **언제 죽었나로는 갈리지 않는다.** 단편화도 대개 긴 배치에서 죽는다. 먼저 메시지의 세 수, 할당하려던 T(`Tried to allocate`), 카드에 남은 F(`is free`), 쥐고 있지만 빈 R(`reserved … but unallocated`)에서 T와 F + R을 비교한다(10.1절). T가 더 크면 단편화가 아니니 다시 돌릴 것도 없다. 작거나 같을 때만 `expandable_segments:True`를 켜고 다시 돌린다(10.5절). 끝까지 가면 단편화, 그래도 죽으면 가장 긴 배치다.
#
# **급하면 10분.** 첫 코드 셀과 10.2절의 `doctor_panel()` 셀만 실행해 패널에 traceback을 통째로 붙이거나, 터미널에서 `virtual-gpu doctor error.txt`를 실행한다(저장소를 내려받은 폴더에서 `pip install ".[models]"`를 하면 생긴다). 하나를 고쳐 또 죽으면 그 traceback을 다시 붙인다. T가 `allocated`보다 훨씬 작으면 T가 아니라 카드를 채운 것(체크포인팅, 배치)부터 줄인다. 잘 돌다가 죽었다면 10.10절의 콜백이나 `logged`로 스텝마다 메모리를 적으며 다시 돌리고, 10.9절의 그림에 맞추어 본다.
#
# 이 장을 마치면 메시지 하나로 알 수 있는 것과 없는 것을 가르고, 늦게 나는 OOM의 까닭을 그래프의 모양으로 구별하고, 쌓인 텐서를 붙든 이름까지 찾아간다. 여기에 나오는 OOM은 모두 가상 카드에서 실제로 낸 것이다(10.6절의 메시지만 남의 것이다).
#
# ## 10.1 메시지부터 읽는다
#
# 직접 OOM을 하나 내 보자. GPT-2(1억 2,400만 파라미터, fp32 가중치 0.46 GiB)를 16 GB짜리 T4에서 길이 1,024, 배치 12로 학습한다. 강의의 함수는 쓰지 않은 보통의 루프다.

# %%
import torch
from transformers import AutoModelForCausalLM, logging

import virtual_gpu
from helpers import case, caught, doctor_panel, enable_checkpointing, exercise, guess, guesses, human_bytes

logging.set_verbosity_error()


def train(batch_size, length=1024, steps=2):
    model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        tokens = torch.zeros(batch_size, length, dtype=torch.long, device="cuda")
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# %% [markdown] lang="ko"
# `caught`는 가상 T4에서 함수를 실행해 traceback을 돌려준다. 먼저 마지막 줄만 보고, 숫자를 눈에 담는다. (`use_cache=False`는 생성할 때나 쓰는 키와 값을 남기지 않게 한다.)

# %%
error = caught(train, 12)
print(error.splitlines()[-1])

# %% [markdown] lang="ko"
# 세 수에 이름을 붙인다. 할당하려던 **T**(`Tried to allocate`)는 2.30 GiB, 카드에 남은 **F**(`is free`)는 2.24 GiB, 할당자가 쥐고 있지만 빈 **R**(`reserved by PyTorch but unallocated`)은 45.22 MiB다.
#
# T는 무엇일까? 파라미터 전체도 0.46 GiB이고, 은닉층은 너비가 768이다. 아래에서 하나를 골라 `None` 대신 적는다.

# %%
which = guess("10.1", None, ("weights", "hidden states", "attention scores", "logits"))
which

# %% [markdown] lang="ko"
# T를 바이트로 고쳐 배치와 길이로 나누고, 값 하나의 바이트(fp32는 4, 16비트는 2)로 나눈다. 남는 수는 어디서 보던 것인가?

# %%
2.30 * 2**30 / (12 * 1024) / 4

# %% [markdown] lang="ko"
# GPT-2의 어휘 50,257에 가깝다. 토큰마다 어휘 전체에 점수를 매긴 **로짓**이다. 꼭 맞지 않는 것은 메시지가 소수 둘째 자리까지만 적고, 적힌 크기가 텐서가 아니라 할당자가 드라이버에 요청한 **세그먼트**의 것이기 때문이다. 큰 텐서의 세그먼트는 2 MiB의 배수로 올린다(3.10절). 그러니 가까운지 본다.
#
# **T가 꼭 2.00 MiB나 20.00 MiB이면 나누지 않는다.** 1 MiB까지의 텐서는 2 MiB, 10 MiB까지의 텐서는 20 MiB짜리 세그먼트를 받으므로 그 수는 텐서의 크기가 아니다. 작은 것 하나도 얻지 못할 만큼 카드가 찼다는 뜻이니 `allocated`를 본다.
#
# 이 일을 하는 것이 의사(doctor)다. 오류 메시지나 traceback, 로그를 통째로 읽고 까닭을 근거와 함께 말한다. 아무 데도 보내지 않고 GPU도 쓰지 않는다.

# %%
doctor = virtual_gpu.diagnose(error)
print(doctor.verdict, doctor.sure)
which.against("logits")

# %% [markdown] lang="ko"
# 통째로 본다. **죽은 자리**는 마지막 요청이 나온 곳이고, 괄호 안은 그것이 얼마나 확실한지다. 그 자리가 카드를 채웠다는 뜻은 아니다.

# %%
doctor

# %% [markdown] lang="ko"
# 근거의 두 셈은 16비트일 때와 fp32일 때다. 자료형은 메시지에 없으니 둘을 다 적는다. 여기서는 fp32인 둘째다.
#
# 메시지에 물을 것은 넷이다.
#
# | 물음 | 셈 | 이 메시지에서는 |
# |---|---|---|
# | 마지막에 무엇을 달라고 했나 | T ÷ (배치 × 길이 × 바이트) | 로짓 |
# | 빈자리를 모으면 되었나 | T ≤ F + R이면 이 요청은 통과할 수 있다. 아니면 단편화가 **아니다** | 2.30 > 2.28 GiB, 아니다 |
# | 남이 카드를 쓰나 | 전체 − F가 `this process has`보다 뚜렷이 크면 그렇다 | 12.50과 12.51 GiB, 아니다 |
# | 카드를 채운 것은 무엇인가 | `allocated`가 텐서의 합이다. 무엇인지는 **메시지에 없다** | 12.36 GiB |
#
# 숫자가 없거나 이상한 메시지를 읽는 법은 10.10절에 있다.
#
# > **주장 1.** "Tried to allocate에 적힌 텐서를 줄이면 된다"
#
# 고르기 전에 배치를 12에서 16으로 늘려 본다. T도 늘까?

# %%
human_bytes(virtual_gpu.diagnose(caught(train, 16)).message.tried.bytes)

# %% [markdown] lang="ko"
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** T는 잔을 넘치게 한 마지막 한 방울이다. T를 없애서 낫는 것은 T가 크고, 그것을 뺀 나머지가 한도보다 넉넉히 작을 때뿐이다(배치 12의 로짓이 그런지는 10.2절에서 본다). 배치 16의 T는 MLP의 중간값(16 × 1,024 × 3,072 × 4)이고 카드는 그전에 이미 찼다. 먼저 볼 것은 T가 아니라 `allocated`다.
#
# </details>
#
# ## 10.2 진료실
#
# 아래의 패널에 traceback을 통째로 붙여 넣고 **진단**을 누른다. 예에는 10.8절의 프로그램 열 개가 들어 있다. 4부터는 시험 문제이니 남겨 둔다.
#
# - '프로그램 2'와 '프로그램 3'을 골라 '해 볼 것'이 어떻게 다른지 본다.
# - '프로그램 1'의 traceback에서 마지막 줄만 남기고 진단한다. 무엇을 잃는가?

# %%
doctor_panel()

# %% [markdown] lang="ko"
# 프로그램 2에는 배치를 줄이라는 말이 없다. 옵티마이저 상태는 배치와 상관없기 때문이다. 프로그램 3은 점수 행렬이라 어텐션과 길이가 먼저다. 죽은 자리가 다르면 처방도 다르다.
#
# 마지막 줄만 남기면 자리를 잃는다. 로짓이라는 것도, 그것을 나누는 처방도 나오지 않는다. 어느 순간인지, 내 코드의 어느 줄인지는 숫자가 아니라 traceback의 한 칸 한 칸(**프레임**, 함수 호출 하나)에 적혀 있다. 얼마나 줄어드는지는 진단에 없으니 실행해서 센다. 내 프로그램이면 진단의 맨 오른쪽 열에 있는 명령(`virtual-gpu run`)으로 센다. (처방의 숫자는 보기다. 체크포인팅의 이름은 transformers 5.23부터 `activation_checkpointing_enable`이다. 처방에 적힌 `gradient_checkpointing_enable`은 그 전의 이름으로, 5.23에서도 경고와 함께 되지만 Colab의 5.15에는 이것뿐이다. 아래의 `enable_checkpointing`은 있는 쪽을 부르는 강의의 함수다.)
#
# 10.1절의 (12, 1,024)에 처방을 써 본다. 배치만 4로 줄인 것, 길이만 512로 줄인 것(의사의 세 줄에는 없다), 크기는 그대로 두고 손실만 나눈 것, 체크포인팅만 켠 것, 손실 나누기와 체크포인팅을 함께 한 것이다. **손실 나누기**는 로짓을 한꺼번에 만들지 않고 조각마다 만드는 것이고(5.9절의 조각낸 손실, 9.2절), 여기서는 TRL의 함수를 쓴다(출력의 `tiles`). 의사가 첫째로 적은 것이 그것이다. 손실만 나누면 들어갈까? 최대가 낮은 것부터 늘어놓으면 어떤 차례일까?
#
# 10.1절의 `train`은 `from_pretrained`가 돌려준 그대로의 eval 모드라 드롭아웃이 없었다. 여기서는 모두 학습 모드(`.train()`)다. 체크포인팅은 학습 모드에서만 하고, `Trainer`는 스스로 바꾼다.

# %%
from trl.trainer import add_fused_lm_head


def cured(batch_size, length=1024, tiles=False, checkpointing=False):
    model = AutoModelForCausalLM.from_pretrained("gpt2").cuda().train()
    if tiles:
        add_fused_lm_head(model)
    if checkpointing:
        enable_checkpointing(model)
    loss_from = {"fused_lm_head": True} if tiles else {}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        tokens = torch.zeros(batch_size, length, dtype=torch.long, device="cuda")
        model(input_ids=tokens, labels=tokens, use_cache=False, **loss_from).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


both = {"tiles": True, "checkpointing": True}
for sizes, cures in (
    ((4, 1024), {}), ((12, 512), {}), ((12, 1024), {"tiles": True}), ((12, 1024), {"checkpointing": True}),
    ((12, 1024), both),
):  # fmt: skip
    print(sizes, *cures, "|", caught(cured, *sizes, **cures).splitlines()[-1][:72])

# %% [markdown] lang="ko"
# 손실만 나누면 **다시 죽는다.** 넘친 것은 로짓이었지만, 카드를 채운 것은 블록마다 남긴 순전파 상태였기 때문이다. 그것을 버리는 체크포인팅만으로 들어가는 다음 줄이 그 증거다. 이번의 T는 로짓의 조각 하나(4,096토큰 × 32,768어휘 × 4바이트)다. **의사의 첫 줄은 마지막 방울을 없애는 것**이고, 여유까지 만들지는 않는다. 여유는 카드를 채운 것을 줄이는 둘째 줄이 만든다. 고친 프로그램이 죽으면 그 traceback을 다시 진단한다.
#
# 체크포인팅만 켜도 8.81 GiB로 들어간다. 손실까지 나누면 3.27 GiB로, 배치와 길이를 그대로 두고도 다섯 가운데 가장 낮다. 체크포인팅이 블록의 입력만 남기면, 남는 것 가운데 로짓이 가장 크기 때문이다. 배치를 4로 줄이고 처방대로 세 번 누적하면(12 = 4 × 3) 앞의 그레이디언트, 많아야 한 벌 0.46 GiB가 첫 줄에 더해진다(4장). (최대는 `allocated`의 것이고, 예약은 이보다 크다.)
#
# 대가는 저마다 다르다. 배치를 줄이면 누적해야 하고, 체크포인팅과 손실 나누기는 계산을 더 하며(5장, 9장), 길이를 줄이면 데이터를 버린다. 무엇을 지켜야 하는지에 따라 고른다. Liger의 `use_liger_kernel=True`도 로짓을 조각내지만, Liger가 GPT-2를 몰라서 의사가 TRL의 것을 적었다.
#
# ## 10.3 가장 긴 배치가 정한다
#
# *지도에서: 어느 긴 배치에서 죽고, 스텝 뒤의 `allocated`는 그대로다.*
#
# 늦은 OOM에서 가장 먼저 의심할 것이다. 배치는 그 안의 가장 긴 글에 맞추어 채워진다(패딩). 그래서 긴 글이 걸리는 스텝에서 죽는다. 새는 것이 아니다([transformers #26284](https://github.com/huggingface/transformers/issues/26284), [allennlp #2515](https://github.com/allenai/allennlp/issues/2515)).
#
# 길이 2,000개를 만들어 썼다. 내 데이터라면 `lengths = [len(ids) for ids in dataset["input_ids"]]`다. 중앙값, 가장 긴 것, 512를 넘는 것의 수를 본다.

# %%
from random import Random

from helpers.chapters.c10_clinic.lengths import (
    Epoch, budget_batches, compared, died_in, example_lengths, grouped_batches, needed, packed_batches, peak_of,
    random_batches, step_peaks,
)  # fmt: skip

lengths = example_lengths()
sorted(lengths)[1000], max(lengths), sum(length > 512 for length in lengths)

# %% [markdown] lang="ko"
# 앞의 GPT-2를 같은 방법으로 학습할 때 한 스텝에 **필요한 메모리**(9장)다. T4의 한도는 14.64 GiB(메시지의 14.74 GiB에서 CUDA 컨텍스트를 뺀 것)다. 토큰이 두 배가 되면 얼마나 느는가? 마지막 줄은 토큰 8,192개를 32 × 256, 16 × 512, 8 × 1,024로 나눈 것이다. 무엇이 정하는가?

# %%
for tokens in (2048, 4096, 8192, 16384):
    print(f"{tokens:6,} {human_bytes(peak_of(tokens))}")
print([human_bytes(needed(batch, 8192 // batch)) for batch in (32, 16, 8)])

# %% [markdown] lang="ko"
# 어텐션이 점수 행렬을 만들지 않으면(3.12절), 모양이 아니라 **토큰의 수**(글의 수 × 가장 긴 글)가 정하고, 토큰의 수에 대해 직선으로 는다. 그러면 길이와 섞는 순서만으로, 학습을 시작하기 전에 **어느 스텝이 한도를 넘는지** 안다.
#
# 내 모델의 직선은 세 스텝을 재어 얻는다(10.10절의 '내 루프의 최대').
#
# 섞어서 열여섯씩 묶으면 한 에폭은 125스텝이다. 2,000개 가운데 열두 개만 512를 넘는다. 한도를 넘는 스텝은 몇 개일까?

# %%
steps_beyond = guess("10.3", None)
steps_beyond

# %% [markdown] lang="ko"
# 왼쪽은 스텝마다 필요한 메모리, 오른쪽은 그 분포다. 붉은 선이 T4의 한도다.

# %%
epoch = Epoch(random_batches(lengths, 16))
epoch

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
steps_beyond.against(len(epoch.beyond))

# %% [markdown] lang="ko"
# 한도에 닿는 길이를 직선에서 구한다. 차례로 기울기(토큰 하나의 바이트), 절편, 한도의 토큰 수, 열여섯 개씩일 때의 길이, 그보다 긴 글의 수다.

# %%
slope = (peak_of(16384) - peak_of(8192)) / 8192
start = peak_of(8192) - 8192 * slope
most = (epoch.limit - start) / slope
human_bytes(slope), human_bytes(start), int(most), int(most / 16), sum(length > most / 16 for length in lengths)

# %% [markdown] lang="ko"
# 직선의 기울기는 토큰 하나에 1.59 MiB, 절편은 1.39 GiB다(0.46 GiB의 세 벌쯤, 가중치와 AdamW의 상태다. 최대는 로짓이 있는 순간이라 가중치의 그레이디언트는 아직 없다). 그러니 한도는 8,550토큰쯤, 열여섯 개씩이면 길이 534다. 534를 넘는 글은 열한 개이고 저마다 다른 배치에 들었다. 글의 0.6%가 스텝의 8.8%가 된 것은 한 스텝이 글을 열여섯 개씩 뽑기 때문이다. 그래도 열에 하나가 안 되니, 첫 몇 스텝을 지켜보고 안심하면 안 된다.
#
# 길이를 다루는, 흔히 권하는 방법들이다. 최대가 **그대로인** 방법은 어느 것인가?
#
# - `group_by_length`: 비슷한 길이끼리 묶는다. transformers 5에서는 `train_sampling_strategy="group_by_length"`, 4에서는 `group_by_length=True`
# - `max_length=512`: 자른다
# - `packing 4`, `packing 8`: 1,024토큰짜리 줄에 이어 담고(packing), 한 배치에 네 줄, 여덟 줄씩
# - `padding-free`: 패딩 없이 한 줄로 잇는다(FlashAttention 2나 3이 있어야 하는데, **T4에는 없다**)
# - `8192 tokens`: 글의 수 × 가장 긴 글이 8,192를 넘지 않게 묶는다

# %%
short = [min(length, 512) for length in lengths]
ways = {
    "shuffle": epoch.batches,
    "group_by_length": grouped_batches(lengths, 16),
    "max_length=512": random_batches(short, 16),
    "packing 4": packed_batches(lengths, 4),
    "packing 8": packed_batches(lengths, 8),
    "padding-free": [[sum(batch)] for batch in epoch.batches],
    "8192 tokens": budget_batches(lengths, 8192),
}
compared(ways)

# %% [markdown] lang="ko"
# **`group_by_length`는 최대를 줄이지 않는다.** 패딩이 줄어 빨라질 뿐, 가장 긴 배치는 그대로다. 대신 그것이 에폭의 첫 스텝에 와서 대개 일찍 알게 된다. (첫 에폭의 첫 스텝에는 옵티마이저의 상태가 아직 없다. 모자란 것이 그보다 작으면 **둘째 에폭의 첫 스텝**에서 죽는다.) 나머지는 가장 큰 스텝의 토큰이 줄어 한도 안에 든다.
#
# 한도를 넘는 스텝이 없으면 끝까지 갈까? 가장 큰 것이 14.08 GiB로 같은 셋을 가상 T4에서 정말 학습한다. 둘째 줄은 `expandable_segments:True`를 켠 것, 셋째 줄은 토큰 예산의 배치 37개를 세 가지로 섞은 것이다. 죽은 스텝을 적고, 끝까지 갔으면 `None`이다.

# %%
print({name: died_in(ways[name]) for name in ("max_length=512", "packing 8", "8192 tokens")})
print({name: died_in(ways[name], "expandable_segments:True") for name in ("max_length=512", "8192 tokens")})
print([died_in(Random(seed).sample(ways["8192 tokens"], 37)) for seed in range(3)])

# %% [markdown] lang="ko"
# **꼭 그렇지는 않다.** 모양이 (마지막 배치만 빼고) 늘 같은 packing은 살았다. 나머지 둘은 모양이 다른 앞의 스텝들이 빈자리를 조각내어 죽었고, 조각을 막는 설정을 켜면 둘 다 끝까지 간다(10.5절). 토큰 예산의 배치는 긴 것부터 늘어놓은 것인데, 섞으면 순서에 따라 죽기도 하고 끝까지 가기도 한다. 9장의 '필요한 메모리'는 **같은 모양을 되풀이할 때**의 값이라, 모양이 바뀌면 조각만큼 더 든다. 한도에 이렇게 가까우면 예산을 낮추거나 이것을 켠다.
#
# <details><summary>고르기 전에 알아 둘 것</summary>
#
# - 이어 담기와 padding-free에서는 글 사이를 가르지 않는 어텐션이면 앞의 글까지 보고 배운다. TRL은 `packing=True`로 padding-free까지 켜는데(기본인 bfd 방식일 때), 이것은 FlashAttention 2와 3만 받친다. T4에서는 자르기나 토큰 예산부터 쓰고, 이어 담는다면 글 사이가 갈리는지 확인한다. 마스크를 따로 만들면 위의 셈보다 더 든다. `padding_free=True`만 켜면 TRL은 `max_length`를 지키지 않는다.
# - 토큰 예산이면 스텝마다 글의 수가 다르다. 누적하거나 GPU가 여럿이면 손실을 묶음 전체의 토큰 수로 나눈다(4.4절).
#
# </details>
#
# 어느 방법이든 지켜야 할 것은 하나다. **가장 큰 배치(글의 수 × 가장 긴 글)를 먼저 두 번 돌려 본다.** 왜 한 번이 아닐까? 한도를 끄고 두 스텝을 학습한다. 첫 줄은 긴 것부터 열여섯씩, 둘째 줄은 가장 긴 배치를 두 번이다. 스텝마다 텐서의 최대를 비교한다.

# %%
ordered = sorted(lengths, reverse=True)
for batches in ([ordered[:16], ordered[16:32]], [ordered[:16]] * 2):
    print([max(batch) for batch in batches], [human_bytes(peak) for peak in step_peaks(batches)])

# %% [markdown] lang="ko"
# 같은 배치인데 두 번째가 0.93 GiB 높다. 옵티마이저의 상태(가중치 0.46 GiB의 두 배)가 첫 `step()`에서 생기므로, **두 번** 돌려야 상태와 가장 긴 배치가 함께 있는 순간을 본다. `Trainer`라면 가장 긴 글과 가장 짧은 글을 번갈아 채운다.
#
# ```python
# order = sorted(range(len(dataset)), key=lambda i: len(dataset[i]["input_ids"]))
# rows = 16  # per_device_train_batch_size × gradient_accumulation_steps × GPU의 수
# trial = dataset.select([order[-1], order[0]] * (rows * 5 // 2 + 1))  # 가장 긴 글과 가장 짧은 글
# arguments.max_steps = 5  # TrainingArguments의 나머지는 내 설정 그대로
# arguments.train_sampling_strategy = "sequential"  # transformers 5. 섞이면 가장 긴 글만 든 배치가 생긴다
# arguments.save_strategy = arguments.eval_strategy = "no"  # 아니면 시험의 checkpoint-5가 남는다
# Trainer(model=model, args=arguments, train_dataset=trial, data_collator=collator).train()  # 나머지도 내 것 그대로
# ```
#
# - 가장 긴 글로**만** 채우지 않는다. 길이가 모두 같으면 transformers가 어텐션 마스크를 버린다. 그러면 진짜 배치의 마스크(층마다 글의 수 × 길이²)가 빠져 낮게 나오고, T4의 그룹 쿼리 모델이면 거꾸로 점수 행렬이 생겨 괜히 죽는다(3.12절).
# - 다섯 스텝인 것은, fp16이면 `GradScaler`가 처음 몇 스텝을 건너뛸 수 있기 때문이다(1장). `step()`이 두 번은 정말 실행되어야 한다.
# - 토큰 예산으로 묶는다면 가장 긴 글이 든 배치가 아니라 **토큰이 가장 많은 배치**로 시험한다. `max(batches, key=lambda batch: len(batch) * max(batch))`다. 가장 긴 글의 배치는 토큰이 그보다 적을 수 있어 낮게 나온다.
# - 통과하면 **프로그램을 다시 시작해** 진짜 학습을 한다. 시험이 가중치를 바꾸었다.
# - 짧은 배치들 뒤의 단편화(10.5절)와 평가(11장)는 이 시험도 보지 못한다.
#
# **연습 10-1.** 토큰 예산으로 묶는 `batches_of(lengths, budget)`를 써라. 모든 글이 한 번씩 들어가고, 배치마다 (글의 수 × 가장 긴 글)이 예산을 넘지 않으며, 패딩이 적어야 한다(기준 답보다 2%p 넘게 많으면 안 된다). 돌려주는 것은 길이의 목록의 목록이다. 막히면 `exercise("10-1").hint()`, 그래도 막히면 `exercise("10-1").solution()`을 실행한다. 학습에 쓸 때는 묶은 뒤 배치의 순서를 섞는다.


# %%
def batches_of(lengths, budget):
    return ...


exercise("10-1").check(batches_of)

# %% [markdown] lang="ko"
# ## 10.4 무엇인가 붙들고 있다
#
# *지도에서: 스텝 뒤의 `allocated`가 는다.*
#
# 새는 것은 스텝이 **끝난 뒤**의 메모리가 계단처럼 는다. PyTorch에 구멍이 난 것이 아니라, 파이썬의 이름 하나가 텐서를 붙들고 있다. 재는 데는 네 줄이면 된다. `yield` 뒤의 줄은 루프의 몸이 끝나 다음 배치를 달라고 할 때 실행되므로, 스텝이 끝난 뒤의 값이다.


# %%
def measured(batches, after):
    for batch in batches:
        yield batch
        after.append(torch.cuda.memory_allocated())


# %% [markdown] lang="ko"
# 내 학습이라면 `Trainer`의 콜백이나 루프를 감싼 함수로 적는다. 10.10절의 '내 학습에서 적기'에 둘 다 있다.
#
# **오르내리는 것은 새는 것이 아니다.** 루프가 `output = model(...)`처럼 결과에 이름을 붙이면 스텝이 끝나도 마지막 배치의 로짓이 남아, 스텝 뒤의 `allocated`가 배치의 길이를 따라 오르내린다. 누적하는 중이면 그레이디언트도 그렇다. 새는 것은 **내려오지 않는다.** 길이가 비슷한 스텝끼리 비교하거나, 재기 전에 `del output`을 한다.
#
# 층이 하나뿐인 GPT-2로 여덟 스텝을 돌며 넷 가운데 하나를 목록에 모은다. 역전파를 마친 손실, 역전파하지 않은 손실(검증에서 `no_grad`를 잊은 것), 로짓, `.item()`이다. 가장 가파른 것은 어느 것일까?

# %%
steepest = guess("10.4", None, ("loss after backward", "loss without backward", "logits", "item"))
steepest

# %% [markdown] lang="ko"
# 그림의 네 선을 비교한다. 바닥에 붙은 선은 몇 개인가? 겹치는 선은 아래 것을 굵게 그렸다.

# %%
from helpers.chapters.c10_clinic.growth import growth_chart, small_gpt


def epoch_of(keep, backward=True):
    kept, after = [], []
    with virtual_gpu.cuda("T4"):
        model = small_gpt().cuda()
        batches = [torch.zeros(4, 256, dtype=torch.long, device="cuda")] * 8
        for tokens in measured(batches, after):
            output = model(input_ids=tokens, labels=tokens)
            if backward:
                output.loss.backward()
                model.zero_grad()
            kept.append(keep(output))
    return after


grown = {
    "loss after backward": epoch_of(lambda output: output.loss),
    "loss without backward": epoch_of(lambda output: output.loss, backward=False),
    "logits": epoch_of(lambda output: output.logits),
    "item": epoch_of(lambda output: output.loss.item()),
}
growth_chart(**grown)

# %% [markdown] lang="ko"
# 숫자로 본다. 스텝 하나에 몇 바이트씩 느는가?

# %%
a_step = {name: (after[-1] - after[0]) // 7 for name, after in grown.items()}
print(a_step)
steepest.against(max(a_step, key=a_step.get))

# %% [markdown] lang="ko"
# 역전파를 마친 손실을 모으면 스텝마다 **512바이트**가 는다. 할당자의 가장 작은 칸 하나다. 역전파가 그래프에 저장된 순전파 상태를 이미 놓았기 때문이다. 역전파하지 않은 손실에는 순전파 상태 전부가 달려 있고, 로짓은 그 자신이 크다.
#
# > **주장 2.** "`total += loss`가 메모리를 샌다" ([PyTorch FAQ](https://docs.pytorch.org/docs/stable/notes/faq.html)가 이렇게 모으지 말라고 한다)
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** `backward()`를 부른 손실이라면 목록에 모아도 스텝마다 512바이트이고, `total`에 더하면 GPU에는 `total` 하나뿐이다. 그래프의 노드, 곧 연산 하나하나의 기록은 RAM에 쌓인다. 역전파하지 않는 손실, 곧 `no_grad`를 잊은 검증 손실이라면 위에서는 한 스텝에 300,309,504바이트였다. 어느 쪽이든 `.item()`이나 `.detach()`가 답이다.
#
# </details>
#
# **예외도 붙든다**([pytorch #27600](https://github.com/pytorch/pytorch/issues/27600), [jupyter/notebook #5421](https://github.com/jupyter/notebook/issues/5421)). 예외에는 traceback이, traceback에는 프레임이, 프레임에는 지역 변수가 달려 있다. 배치 16이 죽은 뒤 살아 있는 것을 네 번 잰다. except 안, 거기서 `gc.collect()`와 `empty_cache()`를 부른 뒤, except를 나온 뒤, `kept`를 놓은 뒤다. 둘째 줄은 예외에 다른 이름(`kept`)을 붙인 것이다. 두 줄은 어디에서 갈라지는가?

# %%
import gc

for keep in (False, True):
    with virtual_gpu.cuda("T4"):
        alive = []
        try:
            train(16)
        except torch.OutOfMemoryError as oom:
            kept = oom if keep else None
            alive.append(torch.cuda.memory_allocated())
            gc.collect()
            torch.cuda.empty_cache()
            alive.append(torch.cuda.memory_allocated())
        alive.append(torch.cuda.memory_allocated())
        kept = None
        alive.append(torch.cuda.memory_allocated())
    print(keep, [human_bytes(size) for size in alive])

# %% [markdown] lang="ko"
# except 안에서는 `gc.collect()`도 `empty_cache()`도 듣지 않는다. 쓰레기도 빈자리도 아니고, 아직 붙들린 텐서이기 때문이다. `as oom`을 쓰지 않아도 마찬가지다. except 안에 있는 동안에는 파이썬이 처리하고 있는 예외를 쥐고 있다(`sys.exception()`). except가 끝나면 파이썬이 쥔 것도 `oom`이라는 이름도 사라지고, 다른 이름이 없으면 그때 메모리가 풀린다. (남은 8.12 MiB는 cuBLAS의 작업 공간이다.) 예외를 꼭 남겨야 하면 `traceback.clear_frames(oom.__traceback__)`로 끝난 프레임의 지역 변수를 비운다. except 안에서도 듣는다.
#
# 붙드는 이름은 더 있다.
#
# | 이름 | 무엇을 붙드나 | 놓는 법 |
# |---|---|---|
# | 훅이 값을 담는 목록 | 순전파 상태 | 목록을 비운다. 훅을 떼는 것(`remove`)만으로는 그대로다 |
# | 셀에서 만든 변수 | 모델, 배치, `outputs` | `del`, 아니면 함수 안에서 만든다 |
# | `trainer` 같은 객체 | 그 안의 모델, 옵티마이저, 배치 | `del trainer` |
# | `_`, `__`, `Out[3]` | 셀의 마지막 식이 돌려준 값 | 처음부터 끝에 세미콜론을 찍는다. 이미 보였으면 `%xdel _3`(3은 셀의 번호. `%reset -f out`은 IPython이 따로 둔 사본을 놓지 않는다) |
# | `sys.last_value`, `sys.last_exc`, `sys.last_traceback` | 잡지 않은 마지막 오류의 프레임 | 다른 오류를 하나 낸 **다음** `gc.collect()`, 아니면 커널을 다시 시작 |
# | 앞의 셀이 만든 옵티마이저 | 파라미터와 상태 | 셀을 다시 실행하기 전에 `del` |
#
# `from helpers import cleanup` 다음 `cleanup()`은 텐서, 모델, 옵티마이저, 그것을 담은 목록과 사전, `Out`, 마지막 오류를 놓는다. `trainer`처럼 속성으로 붙든 객체와 이름을 붙인 예외는 직접 `del` 한다. 이름으로 지우므로 학습한 모델이 있으면 먼저 저장한다.
#
# > **주장 3.** "`del model`을 하면 메모리를 돌려받는다" · **주장 4.** "OOM을 막으려면 `gc.collect()`를 스텝마다 불러야 한다"
#
# <details><summary>판정 (하나씩 맞다, 조건부로 맞다, 틀리다 가운데 고른다)</summary>
#
# 3은 **조건부로 맞다.** 그 이름이 마지막일 때만 그렇다. 옵티마이저, `trainer`, `Out`, 예외 가운데 하나라도 남아 있으면 그대로다. 돌아온 자리도 할당자가 쥐고 있어 `nvidia-smi`의 숫자는 줄지 않는다(10.5절). 4는 **틀리다.** 이름이 붙은 것은 모으지 못한다. 이름은 사라졌는데 서로를 가리키는 고리가 남았을 때만 듣는다. 함수가 예외를 지역 변수에 담으면 그런 고리(예외, traceback, 프레임, 그 변수)가 생기니, OOM을 잡은 뒤에 한 번은 쓸모가 있다.
#
# </details>
#
# ### 사건 10-A: OOM을 잡아 배치를 줄였는데
#
# "OOM은 except **밖에서** 다시 하라고 해서 그렇게 했다. 배치를 24에서 4로 줄이고 `empty_cache()`도 부른다. 그래도 OOM이다. 4만 따로 실행하면 된다."
#
# ```python
# failed = None
# try:
#     step(24)
# except torch.OutOfMemoryError as error:
#     failed = error  # 로그에 적으려고
# if failed is not None:
#     torch.cuda.empty_cache()
#     step(4)
# ```
#
# `case("10-A").run()`이 이 프로그램을 돌린다(층이 둘인 GPT-2). `run(collect=True)`처럼 아래의 것을 바꾸어 돌린다. 괄호 안이 처음의 값이고, 실험은 다섯 번이다.
#
# - `where`(`"after"`): 다시 하는 곳. except 안이면 `"inside"`
# - `empty_cache`(`True`), `collect`(`False`): 다시 하기 전에 `empty_cache()`나 `gc.collect()`를 부르는가
# - `record`(`"error"`): `failed`에 담는 것. `"message"`면 `str(error)`
#
# 하나만 바꾸어 통과하게 한다. 무엇을 바꾸어야 하나? `{설정: 값}`으로 적는다.

# %%
case("10-A").run()

# %% [markdown] lang="ko"
# 답을 적는다.

# %%
changes = ...
case("10-A").check(changes)

# %% [markdown] lang="ko"
# **연습 10-2.** 평균 검증 손실을 돌려주는 `validate(model, batches)`를 써라. 배치가 몇 개든 최대가 같아야 한다. `batches`의 하나는 토큰의 텐서이고 라벨도 그것이다. 모델은 이미 `eval()`이다. 이름을 붙인 것은 다음 배치를 계산하는 동안에도 살아 있으니 조심한다. 아래의 시작점은 값은 맞지만 배치가 늘면 죽는다.


# %%
def validate(model, batches):
    losses = [model(input_ids=tokens, labels=tokens).loss for tokens in batches]
    return (sum(losses) / len(losses)).item()


exercise("10-2").check(validate)

# %% [markdown] lang="ko"
# ## 10.5 새지 않는 누수와 단편화
#
# *지도에서: 스텝 뒤의 `allocated`는 그대로이고 `reserved`만 는다.*
#
# `nvidia-smi`의 숫자가 자꾸 커진다. 새는 것일까? 길이가 제각각인 배치 열여섯 개를, 한도를 끈 T4에서 돌린다(층이 하나인 GPT-2, 옵티마이저 없이 순전파와 역전파만). 붉은 선이 T4의 한도다. 늘고 줄지 않는 선은 어느 것이고, 끝까지 느는가?

# %%
from helpers.chapters.c10_clinic.shapes import rooms, shape_of, varied_lengths

free = shape_of("T4", varied_lengths(), limited=False)
lines = {"reserved": free.reserved, "most in the step": free.most, "after the step": free.held}
growth_chart(free.limit, **lines)

# %% [markdown] lang="ko"
# `reserved`(할당자가 쥔 것)만 는다. 그때까지 가장 긴 배치가 온 넷째와 열한째 스텝에서 뛰고, 그 뒤로는 **멈춘다.** 조금 더 큰 텐서에는 앞의 빈자리가 모자라 새 세그먼트를 받기 때문이다. 스텝 뒤에 남는 텐서는 그대로이니 새는 것이 아니라 캐시다.
#
# 카드에 그만큼 자리가 없으면 죽을까? 같은 열여섯 스텝을 8 GiB와 5.6 GiB인 카드에서 돌린다. 텐서의 최대는 둘 다보다 작다. 나머지 세 줄은 흔히 권하는 것이다.

# %%
rooms()

# %% [markdown] lang="ko"
# 8 GiB에서는 그대로도 끝까지 간다. 할당자가 OOM을 내기 전에 통째로 빈 세그먼트를 드라이버에 돌려주고 다시 해 보기 때문이다. 5.6 GiB에서는 죽는다. 텐서는 다 들어가는데 빈자리가 조각나 있다. 이것이 **단편화**다(10.3절의 토큰 예산도 이렇게 죽었다). 할당자는 **통째로 빈** 세그먼트만 돌려줄 수 있는데, 스텝 도중에는 작은 텐서 하나가 세그먼트 전체를 붙든다. 스텝이 끝나면 거의 다 비므로, OOM 직전의 반납으로는 모자라도 스텝마다 부른 `empty_cache()`는 듣는다(그 줄의 `reserved`는 비운 뒤의 값이다). 나머지 세 줄은 저마다 다른 방법으로 조각을 줄일 뿐, 텐서를 줄이지는 않는다(`expandable_segments`는 리눅스에서만 된다).
#
# > **주장 5.** "`empty_cache()`를 부르면 OOM이 안 난다" · **주장 6.** "`nvidia-smi`의 숫자가 늘면 틀림없이 새는 것이다"
#
# <details><summary>판정 (하나씩 맞다, 조건부로 맞다, 틀리다 가운데 고른다)</summary>
#
# 5는 **조건부로 맞다.** 빈자리가 조각나서 죽을 때만 듣는다. 살아 있는 텐서는 한 바이트도 줄지 않고, 부를 때마다 드라이버에서 다시 받는 시간이 든다. 같은 카드의 다른 프로세스에 자리를 내줄 때도 쓸모가 있다.
#
# 6은 **틀리다.** 늘다가 멈추면 캐시다. 텐서가 쌓이는지는 **스텝 뒤의** `memory_allocated()`가 말한다. 그것도 `memory_reserved()`도 그대로인데 `nvidia-smi`만 계속 늘면 PyTorch의 할당자 밖(NCCL, 다른 라이브러리)이다.
#
# </details>
#
# **정말 단편화 탓인가?** T가 F + R 이하이고, `expandable_segments:True`를 켜면 **끝까지** 가야 한다. 앞의 것만으로는 모자란다(10.8절에서 본다). 그다음에 볼 것은 길이의 종류를 줄이는 `pad_to_multiple_of`, 그래도 모자라면 배치다([torchtune #1185](https://github.com/meta-pytorch/torchtune/issues/1185), [SpecForge #739](https://github.com/sgl-project/SpecForge/pull/739)).
#
# 켜는 법: 터미널이면 `export PYTORCH_ALLOC_CONF=expandable_segments:True`, 노트북이면 런타임을 다시 시작하고 `import torch`보다 먼저 `%env PYTORCH_ALLOC_CONF=expandable_segments:True`다. PyTorch 2.8까지는 이름이 `PYTORCH_CUDA_ALLOC_CONF`다. 새 PyTorch는 옛 이름도 읽지만(둘 다 있으면 새 이름이 이긴다), 2.8까지는 새 이름을 오류 없이 무시한다. 그러면 '또 죽었으니 가장 긴 배치'로 잘못 읽게 된다. **메시지에 적힌 이름을 쓴다.**
#
# ## 10.6 다른 프로세스
#
# *지도에서: 어떤 날은 되고 어떤 날은 안 된다.*
#
# [trl #4237](https://github.com/huggingface/trl/issues/4237)에 올라온 T4의 숫자를 PyTorch의 문장에 넣었다. 이 메시지에는 `this process`가 없다. 컨테이너 안에서는 이럴 때가 있다. 네 프로세스 가운데 나는 누구인가?

# %%
virtual_gpu.diagnose(
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.11 GiB. "
    "GPU 0 has a total capacity of 14.74 GiB of which 1.65 GiB is free. "
    "Process 1 has 6.79 GiB memory in use. Process 2 has 514.00 MiB memory in use. "
    "Process 3 has 4.93 GiB memory in use. Process 4 has 894.00 MiB memory in use. "
    "Of the allocated memory 4.50 GiB is allocated by PyTorch, "
    "and 2.14 GiB is reserved by PyTorch but unallocated."
)

# %% [markdown] lang="ko"
# 나는 `allocated` + R에 CUDA 컨텍스트를 더한 것과 비슷한 프로세스다. 4.50 + 2.14 = 6.64 GiB이니 6.79 GiB인 Process 1이다. 나머지는 다른 프로세스의 것이고(내가 띄운 것일 수도 있다), 그것이 없었다면 이 요청은 통과했다. 둘째 진단도 맞을 수 있다. 내가 쥔 빈자리 R(2.14 GiB)만으로도 T(2.11 GiB)보다 크니, 남의 것을 끝낼 수 없다면 `expandable_segments:True`를 켜 본다. 이럴 때 배치를 줄이면 남이 쓰는 만큼을 내 몫에서 깎을 뿐이다. `nvidia-smi`로 누구인지 보고, rank마다 카드를 하나씩 쓰는지, 죽은 노트북의 커널이 남아 있지 않은지 본다.
#
# ### 사건 10-B: 새는 것 같다
#
# "PyTorch가 5.6 GiB를 쓸 수 있는 6 GiB 카드에서 학습한다. 열세 번째 스텝에서 OOM이 난다. `nvidia-smi`를 보면 메모리가 계속 늘다가 죽으니 새는 것이 틀림없다."
#
# `case("10-B").run()`은 이 학습을(옵티마이저는 뺐다) 가상 카드에서 실제로 돌려 스텝마다 세 숫자와 마지막 메시지를 보여 준다(5.6 GiB에는 CUDA 컨텍스트가 들어 있지 않다). 바꿀 수 있는 것은 다음이고, 실험은 다섯 번이다.
#
# - `seed`(`9`): 길이를 뽑는 씨앗
# - `max_length`(`512`): 자르는 길이
# - `empty_cache`(`False`): 스텝마다 `empty_cache()`를 부르는가
# - `expandable`(`False`): `expandable_segments:True`를 켜는가
#
# 까닭은 `"leak"`, `"longest"`, `"fragmentation"`, `"other_process"` 가운데 무엇인가? 글을 그대로 두고 끝까지 가게 하는 설정은? `{"why": 까닭, "change": {설정: 값}}`으로 적는다. (죽는 스텝에서 `reserved`가 주는 것은 OOM을 내기 전에 통째로 빈 세그먼트를 돌려주었기 때문이다.)

# %%
case("10-B").run()

# %% [markdown] lang="ko"
# 답을 적는다.

# %%
answer = ...
case("10-B").check(answer)

# %% [markdown] lang="ko"
# ## 10.7 스냅샷: 누가 붙들고 있나
#
# *지도에서: 까닭의 갈래를 알았다. 이제 그 줄을 찾는다.*
#
# `torch.cuda.memory._record_memory_history()`를 켜면 PyTorch가 할당마다 그것을 부른 줄을 적어 둔다. 이름 앞의 밑줄이 말하듯 바뀔 수 있는 API다. 로짓을 모으는 루프를 기록하고, 끝에 살아 있는 블록을 **내 코드의 줄**로 모은다. 기록을 켜기 전에 만든 것에는 줄이 없으니 모델을 만들기 전에 켠다.

# %%
from pathlib import Path
from tempfile import mkdtemp

from helpers.chapters.c10_clinic.blocks import alive_by_line

path = Path(mkdtemp()) / "snapshot.pickle"
with virtual_gpu.cuda("T4"):
    torch.cuda.memory._record_memory_history()
    model, kept = small_gpt().cuda(), []
    for _ in range(4):
        tokens = torch.zeros(4, 256, dtype=torch.long, device="cuda")
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        kept.append(output.logits)
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)
alive_by_line(snapshot)

# %% [markdown] lang="ko"
# 쌓인 텐서를 **만든** 줄이 나온다. 붙든 줄(`kept.append`)은 적혀 있지 않다. 이름은 파이썬에게 묻는다. 쌓인 것과 모양이 같은 텐서를 찾아, 그것을 담은 것의 이름과 개수를 본다(함수나 객체 안의 것이면 `owners`를 그대로 본다).

# %%
stacked = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
stacked = [one for one in stacked if one.shape == (4, 256, 50257)]
owners = [one for tensor in stacked for one in gc.get_referrers(tensor) if one is not stacked]
held = {name: sum(value is owner for owner in owners) for name, value in list(globals().items())}
print(len(stacked), {name: times for name, times in held.items() if times})
del stacked, owners, held

# %% [markdown] lang="ko"
# 넷을 다 붙든 이름은 `kept`다. `output`은 마지막 스텝의 것 하나를 아직 담고 있을 뿐이다(방금 만든 목록 `stacked`는 뺐다). 객체의 속성인 목록이 붙들면 이름이 나오지 않는다. 그때는 지우기 전에 `gc.get_referrers(owners[0])`으로 한 단계 더 올라간다. **역전파하지 않은 손실**이 쌓였다면 순전파 상태는 파이썬의 목록이 아니라 그래프가, 그래프는 손실이 쥔다. 모양 대신 손실을 찾는다(`one.shape == () and one.grad_fn is not None`).
#
# 표의 둘째와 셋째 줄은 그레이디언트와 가중치다. 진짜 GPU에서는 둘째 줄에 이름이 없다. 역전파는 autograd의 스레드에서 돌아 파이썬의 줄이 남지 않는다.
#
# 같은 기록을 시간을 따라 그린다. 가로는 할당과 해제의 차례, 세로는 살아 있는 바이트이고, 64 MiB가 넘고 끝까지 남는 블록을 줄마다 다른 색으로 칠했다. 네 스텝을 돌았다. 주황색 띠는 몇 개이고, 초록색 띠는 왜 하나인가?

# %%
from helpers.chapters.c10_clinic.shapes import four_shapes, history_chart, shapes_chart

history_chart(snapshot)

# %% [markdown] lang="ko"
# 주황색은 넷, 스텝마다 하나씩 더해지는 로짓이다. **이렇게 늘어나는 띠가 붙들린 것이다.** 파란색은 가장 큰 가중치인 임베딩, 초록색은 그 그레이디언트다. 그레이디언트는 같은 자리에 더해지므로 스텝이 늘어도 하나다. 회색은 스텝마다 생겼다가 사라지는 것과 작은 것이다.
#
# `_dump_snapshot`이 쓴 파일(자리는 `print(path)`로 본다)을 **pytorch.org/memory_viz**에 끌어다 놓으면 위와 같은 그림이 된다(파일은 브라우저 밖으로 나가지 않는다). 띠 하나가 텐서 하나이고, 누르면 그 줄이 나온다. 기록에 적힌 일을 읽는 법은 10.10절에 있다.
#
# 진짜 GPU에서 오래 도는 학습이라면 기록의 길이를 정하고, OOM이 난 순간 저장한다.
#
# ```python
# torch.cuda.memory._record_memory_history(max_entries=100_000)  # 모델을 만들기 전, 프로그램의 맨 앞에
# ...
# try:
#     trainer.train()
# except torch.OutOfMemoryError:
#     torch.cuda.memory._dump_snapshot("oom.pickle")
#     raise
# ```
#
# 이 파일에는 **죽은 스텝의 순전파 상태도** 살아 있다. 그래서 위의 표로 보면 새지 않아도 순전파의 줄이 맨 위다. 붙들린 것은 memory_viz에서 여러 스텝에 걸쳐 끝까지 이어지는 띠로 가린다. `Trainer`라면 내 줄이 `trainer.train()` 하나라 이것뿐이다. 띠를 눌러 traceback 전체를 본다. 내 루프라면 스텝이 끝난 자리에서, 이를테면 10번째와 30번째에 저장해 표 둘에서 **늘어난 줄**을 찾는다. 강의를 설치한 환경에서 저장소의 폴더를 열고 `import pickle; from helpers.chapters.c10_clinic.blocks import alive_by_line; alive_by_line(pickle.load(open("10.pickle", "rb")))`다. 강의가 없으면 memory_viz에서 두 그림을 비교한다.
#
# '기록을 켜기 전, 또는 라이브러리'라는 줄에는 역전파가 만든 것과, 늦게 켰다면 가중치가 들어간다. pickle은 코드를 실행할 수 있으니 자기가 만든 파일만 연다.
#
# ## 10.8 시험: 죽은 프로그램 열 개
#
# 프로그램 열 개가 가상 T4에서 실제로 죽으며 남긴 메시지다. 1, 2, 3은 몸풀기다. 나머지는 먼저 **메시지와 traceback만** 보고 까닭을 적는다. 의사가 보는 것도 그것뿐이다. 그다음 프로그램을 펴고, 답을 바꾼 번호를 적어 둔다. 두 번 쓰는 것도, 쓰지 않는 것도 있다. 고를 것은 `logits`, `attention`(점수 행렬), `longest`(가장 긴 배치), `optimizer`(첫 스텝의 상태), `kept`(붙들고 있다), `handler`(예외 안에서 다시), `evaluation`(모은 로짓), `generate`(질문을 읽거나 답을 만들다가), `loading`(올리다가), `limit`(스스로 건 한도)이다.

# %%
from helpers.chapters.c10_clinic.broken import rounds, ward, with_expandable_segments

ward()

# %% [markdown] lang="ko"
# `None` 대신 까닭을 적고 실행한다. 답한 것만 채점하고, 나머지는 접어 둔다. 의사가 틀린 줄(×)은 왜 틀렸을까?

# %%
answers = {1: None, 2: None, 3: None, 4: None, 5: None, 6: None, 7: None, 8: None, 9: None, 10: None}
rounds(answers)

# %% [markdown] lang="ko"
# 의사가 맞히지 못하는 것이 있다. `longest`와 `kept`다. 여러분이 프로그램을 펴 보고 답을 바꾼 것도 이것이 아닌가? 메시지와 traceback은 **한 순간**의 것이라, 앞의 스텝들이 어땠는지, 무엇이 쌓였는지는 적혀 있지 않다. 의사는 죽은 자리만 말한다. 이 둘은 시간에 따른 변화로 구별한다. 스텝 뒤의 `allocated`가 늘면 `kept`, 그대로면 `longest`나 단편화다. 뒤의 둘은 바로 아래에서 가른다.
#
# 4, 6, 7, 8은 T가 F + R 이하다(10도 그렇지만 스스로 건 한도라 뺀다. 메시지에 `3.69 GiB allowed`라고 있다). 정말 단편화라면 `expandable_segments:True`를 켜고 끝까지 가야 한다(10.5절). 끝까지 가는 것이 있는가? '켜면 T'와 '켜면 텐서'는 설정을 켠 뒤 다시 죽은 순간의 것이다.

# %%
with_expandable_segments(4, 6, 7, 8)

# %% [markdown] lang="ko"
# 넷 다 그 요청은 지나갔지만 뒤에서 죽는다(8에서 늘어난 1 GiB쯤은 한 층의 KV 캐시다. 다음 층의 같은 자리에서 죽었다). 단편화만 고쳐서 살릴 수 있는 것은 없다.
#
# ## 10.9 기억할 것
#
# 처음의 지도를 그림으로 다시 본다. 층이 하나인 GPT-2를(옵티마이저 없이) 저마다 한도(붉은 선)가 다른 가상 카드에서 실제로 돌린 것이다. ×는 죽은 순간에 살아 있던 텐서에 T를 더한 높이다. **A, B, C, D는 저마다 무엇인가?** 가장 긴 배치, 붙들고 있다, 캐시, 단편화가 하나씩이다. 죽었는가, 스텝 뒤의 `allocated`가 느는가, ×가 한도의 위인가 아래인가를 차례로 본다.

# %%
shapes = [*four_shapes().values()]
shapes_chart(dict(zip("ABCD", (shapes[2], shapes[0], shapes[3], shapes[1]), strict=True)))

# %% [markdown] lang="ko"
# <details><summary>답 (먼저 적은 다음에 연다)</summary>
#
# A는 캐시(죽지 않았다), D는 붙들린 것(`allocated`가 는다), B는 가장 긴 배치(×가 한도 위), C는 단편화(×가 한도 아래)다.
#
# </details>
#
# ×가 한도 위면 빈자리를 다 모아도 모자란 것이다. 아래면 **이 요청의** 자리는 있는데 흩어져 있다. 그다음 요청까지 들어간다는 뜻은 아니다. 캐시와 단편화는 `reserved`가 똑같이 늘다가, 죽느냐에서 갈린다(맨 끝에서 꺾인 것은 죽기 전에 빈 세그먼트를 돌려준 것이다).
#
# **내 로그에 맞추어 볼 때는 다른 프로세스부터 확인한다.** 메시지의 전체 − F가 내 것(`this process`, 없으면 `allocated` + R에 컨텍스트를 더한 것)보다 뚜렷이 크면 다른 프로세스다. 그때는 남이 쓴 만큼 한도가 내려온다. ×는 그 한도의 위에도 아래에도 올 수 있다(10.6절의 메시지는 6.61 < 8.29 GiB, 아래다).
#
# 죽는 스텝은 콜백까지 오지 못하니 메시지에서 셈한다. ×는 `allocated` + T, 한도는 `allocated` + R + F다. 아래의 ×라도 단편화라고 하려면 `expandable_segments:True`로 끝까지 가야 한다(프로그램 4는 아래인데도 가장 긴 배치였다).
#
# 이 장에서 적은 예상과 결과를 돌아본다.

# %%
guesses()

# %% [markdown] lang="ko"
# | 보이는 것(위의 행부터) | 까닭 | 먼저 할 것 |
# |---|---|---|
# | 전체 − F가 내 것(`this process`, 없으면 `allocated` + R + 컨텍스트)보다 뚜렷이 크다 | 다른 프로세스 | `nvidia-smi` |
# | OOM을 잡아 다시 하다가 죽었다 | 예외가 앞 시도를 붙들고 있다 | except 밖에서 다시 하고, 예외 대신 `str(error)`만 남긴다 |
# | 죽었다. 스텝 뒤의 `allocated`가 계단처럼 늘었다 | 붙든 이름 | 스냅샷으로 줄을 찾는다. `.item()`, `no_grad` |
# | 죽었다. 스텝 뒤의 `allocated`는 그대로이고 ×가 한도 위다 | 가장 긴 배치 | 자르기, 이어 담기, 토큰 예산. 한도에 가까우면 `expandable_segments:True`도 |
# | 죽었다. 스텝 뒤의 `allocated`는 그대로이고 ×가 한도 아래다(`reserved`가 늘다가 멈추었어도) | 단편화이거나 가장 긴 배치 | `expandable_segments:True`를 켠다. 끝까지 가면 단편화, 또 죽으면 가장 긴 배치(프로그램 4) |
# | **죽지 않았다.** `reserved`만 늘다가 멈춘다 | 캐시 | 두어도 된다 |
#
# **T는 마지막 요청일 뿐이다. 죽기 전의 스텝들을 보라.** 의사도 메시지 하나만 보면 죽은 자리밖에 모른다. 오래 걸리는 학습이라면 가장 큰 배치를 먼저 두 번 돌려 본다.
#
# 학습이 끝났는데 평가에서, 저장하다가, 이어서 시작하다가 죽는다면? [11장](11_outside_training.ipynb)에서 답한다. 물음에서 시작하려면 [질문에서 시작하기](../../docs/questions.md)를 편다.

# %% [markdown] lang="ko"
# ## 10.10 더 읽을거리
#
# ### 내 학습에서 적기
#
# `Trainer`라면 콜백으로 적는다. 스텝의 번호, 스텝 뒤의 `allocated`, 그 스텝의 최대, `reserved`, 카드에 남은 F다.
#
# ```python
# from transformers import TrainerCallback
#
# class Memory(TrainerCallback):
#     def on_step_end(self, args, state, control, **kwargs):
#         held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
#         sizes = held, most, torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
#         print(state.global_step, *(f"{size / 2**30:.2f}" for size in sizes), flush=True)
#         torch.cuda.reset_peak_memory_stats()
#
# trainer.add_callback(Memory())
# ```
#
# 내 루프라면 `for batch in logged(batches):`처럼 감싼다. 죽어도 남도록 목록에 담지 않고 바로 찍는다.
#
# ```python
# def logged(batches):
#     for step, batch in enumerate(batches, 1):
#         yield batch
#         held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
#         sizes = held, most, torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
#         print(step, *(f"{size / 2**30:.2f}" for size in sizes), flush=True)
#         torch.cuda.reset_peak_memory_stats()
# ```
#
# ### 숫자가 없거나 이상한 메시지
#
# `CUDA error: out of memory`나 `CUBLAS_STATUS_ALLOC_FAILED`는 할당자가 아닌 것(드라이버, cuBLAS)이 메모리를 얻지 못한 것이다. 뒤의 것은 범위를 벗어난 색인 때문일 때도 있으니, 메모리가 넉넉하면 `CUDA_LAUNCH_BLOCKING=1`로 다시 실행해 본다. F가 T보다 큰데 죽었다면 대개 프로그램이 스스로 건 한도다(메시지의 `… allowed`). `this process has`에서 `allocated`와 R을 빼면 10.1절에서는 0.1 GiB, CUDA 컨텍스트다. 그보다 뚜렷이 크면 PyTorch 밖의 것(NCCL, 다른 라이브러리)이 쓴다. 메시지 없이 `Killed`로 끝났으면 GPU가 아니라 RAM이다(11장).
#
# ### 셀마다: `%%gpu_memory`
#
# 노트북에서는 셀 위에 한 줄이면 된다. 진짜 GPU에서도, `%virtual_gpu T4`로 고른 가상 카드에서도 된다. 앞뒤와 최대를 읽는다.

# %%
# %load_ext virtual_gpu
# %virtual_gpu T4

# %% [markdown] lang="ko"
# 이제 커널에 T4가 있다.

# %%
# %%gpu_memory
model = small_gpt().cuda()
tokens = torch.zeros(8, 256, dtype=torch.long, device="cuda")
model(input_ids=tokens, labels=tokens).loss.backward()

# %% [markdown] lang="ko"
# 막대의 파란색이 셀이 끝난 뒤에 남은 것(371.59 MiB, 거의 가중치와 그레이디언트), 주황색이 최대까지 더 있던 것이다. 막대의 끝 14.74 GiB는 카드 전체다. 아래의 두 막대는 순전파와 역전파의 최대를 따로 보인 것이다. 다 썼으면 카드를 돌려준다.

# %%
# %virtual_gpu off

# %% [markdown] lang="ko"
# ### 내 루프의 최대
#
# 10.3절의 직선을 내 모델에서 얻으려면, 옵티마이저의 상태가 생긴 **첫 `step()` 뒤에** 세 스텝의 최대를 잰다. 크기는 진짜 배치에 가깝게, 설정은 진짜 학습과 같게 한다. 체크포인팅이나 드롭아웃을 쓰면 `model.train()`을 먼저 부르고, 혼합 정밀도면 순전파를 `torch.autocast`로 감싼다. 세 점이 한 직선에 놓이면 나머지도 그 위에 있다. 놓이지 않으면 배치가 너무 작거나 어텐션이 길이²짜리를 만드는 것이다(`eager`, T4의 그룹 쿼리). 뒤의 것이면 길수록 더 가파르게 휘니, 가장 긴 배치의 모양 그대로 잰다. 진짜 배치에 패딩이 있으면 모델을 부를 때 한 칸이 0인 `attention_mask`도 넘긴다.
#
# 아래의 `line_of`는 토큰 하나의 바이트와 절편을 돌려준다. 10.3절의 GPT-2로 직선을 얻어, 섞은 에폭에서 한도를 넘는 스텝을 짚는다. 10.3절의 그림과 같은 스텝인가? (텐서의 최대는 '필요한 메모리'보다 1%쯤 낮으므로, 한도의 98%를 넘으면 넘는 것으로 본다.)


# %%
import numpy as np


def line_of(model, optimizer, shapes):
    tokens, most = [], []
    for rows, length in [shapes[0], *shapes]:  # the first one only makes the optimizer's state
        torch.cuda.reset_peak_memory_stats()
        ids = torch.zeros(rows, length, dtype=torch.long, device="cuda")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens.append(rows * length)
        most.append(torch.cuda.max_memory_allocated())
    return np.polyfit(tokens[1:], most[1:], 1)


with virtual_gpu.cuda("T4") as card:
    model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
    slope, base = line_of(model, torch.optim.AdamW(model.parameters(), fused=True), [(16, 384), (16, 256), (16, 192)])
    limit = card.capacity_bytes
beyond = [n for n, batch in enumerate(epoch.batches, 1) if base + slope * len(batch) * max(batch) > 0.98 * limit]
print(f"{slope / 2**20:.2f} MiB a token, {base / 2**30:.2f} GiB", len(beyond), beyond)

# %% [markdown] lang="ko"
# 10.3절의 그림과 같은 열한 스텝이다.
#
# 한 스텝의 최대는 두 줄이다. 재기 전에 되돌리고, 잰 뒤에 읽는다. 길이를 매번 **4분의 1로** 줄인다. 최대도 매번 4분의 1이 되는가?

# %%
with virtual_gpu.cuda("T4"):
    model = small_gpt().cuda()
    for length in (1024, 256, 64, 16):
        torch.cuda.reset_peak_memory_stats()
        tokens = torch.zeros(4, length, dtype=torch.long, device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        print(length, human_bytes(torch.cuda.max_memory_allocated()))
        model.zero_grad()

# %% [markdown] lang="ko"
# 줄다가 멈춘다. 긴 배치의 최대는 로짓이 있는 순간이고, 짧은 배치의 최대는 길이와 상관없이 역전파의 맨 끝, 임베딩 크기의 그레이디언트들이 겹치는 순간이다. 그래서 위에서 진짜 배치에 가까운 크기로 재라고 했다.
#
# 루프의 첫 줄 `reset_peak_memory_stats()`를 지우고 다시 실행하면 나머지 줄은 무엇이 되는가?
#
# <details><summary>답 (먼저 해 본 다음에 연다)</summary>
#
# 모두 첫째 줄과 같은 수다. 되돌리지 않으면 길이 1,024 때의 최대가 남는다.
#
# </details>
#
# ### 스냅샷에 적힌 일
#
# 10.7절의 기록에서 처음을 본다. 64 MiB가 넘는 일만 골랐다. `alloc`의 앞에는 무엇이 오는가?

# %%
from helpers.chapters.c10_clinic.blocks import events

events(snapshot, least=2**26, most=8)

# %% [markdown] lang="ko"
# 첫 스텝에는 맞는 빈자리가 없어 `alloc`마다 그 앞에 `segment_alloc`이 있다(`most`를 40으로 늘리면 빈자리를 다시 쓰는 `alloc`도 보인다). 147.24 MiB를 놓으려고 148 MiB를 드라이버에서 받았다(10.1절의 2 MiB 배수).
#
# | 적힌 것 | 뜻 |
# |---|---|
# | `alloc` | 텐서가 자리를 얻었다 |
# | `free_requested`, `free_completed` | 텐서가 사라졌다. 빈자리는 할당자에 남는다 |
# | `segment_alloc` | 맞는 빈자리가 없어 드라이버에서 받았다 |
# | `segment_free` | 드라이버에 돌려주었다(`empty_cache`, OOM 직전) |
# | `segment_map`, `segment_unmap` | `expandable_segments`를 켰을 때의 앞의 둘이다 |
# | `oom` | 얻지 못했다 |
#
# 10.7절의 표에서 둘째 줄은 셋째 줄보다 8 MiB쯤 컸다. 그레이디언트는 가중치와 크기가 같다. 블록 하나가 더 있는데, cuBLAS의 작업 공간 8.12 MiB다(10.4절에서 끝까지 남던 것). 순전파의 스레드와 역전파의 스레드가 하나씩 가진다. 첫 줄에도 하나가 들어 있다.
#
# ### 프로파일러
#
# `torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True)`도 할당을 적는다. `export_memory_timeline`은 그것을 파라미터, 그레이디언트, 순전파 상태로 갈라 그려 주지만, PyTorch 2.13은 이 함수를 없앨 것이라며 스냅샷을 권한다. 여기서는 실행해 보지 않았다. 종류별로 가른 그림은 `virtual-gpu run --html FILE`이 그린다.
