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
# # 11장. 학습 스텝 밖의 OOM: 평가·생성·저장·불러오기
#
# 학습 스텝은 카드에 들어간다. 그런데 작업 하나에는 불러오기, 평가, 생성, 저장, 재개도 있다. **학습하고 있지 않을 때 GPU와 RAM에는 무엇이 살아 있는가?** 이것이 이 장의 물음이다.
#
# 먼저 작업 하나를 처음부터 끝까지 실행해 본다. 그다음 절마다 한 단계씩 들여다보고, 고치는 한 줄을 찾는다. 끝에서 그 줄들을 모두 넣어 같은 작업을 다시 실행한다.
#
# 이 장의 표는 모두 가상 GPU에서 **센** 것이다. RAM은 텐서만 센다. 스텝 안의 OOM은 [10장](10_oom_clinic.ipynb)에 있다.
#
# <details><summary>지금 OOM이 났다면: 어느 절의 어느 줄인가</summary>
#
# | traceback에 있는 함수, 또는 증상 | 절 | 먼저 해 볼 것 |
# |---|---|---|
# | `torch_pad_and_concatenate`, `nested_concat`, 또는 평가의 **몇 배치 뒤의** `fixed_cross_entropy` | 11.1 | `preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)` |
# | 평가의 **첫** 배치에서 `ForCausalLMLoss`, `fixed_cross_entropy`. 로짓을 모으지 않는데 뒤의 배치에서도 | 11.2 | `per_device_eval_batch_size`를 줄인다. 뒤의 배치에서만 죽으면 하나쯤이면 된다 |
# | 내 평가 루프에서 배치마다 는다 | 11.2 | `with torch.no_grad():` |
# | 프롬프트를 읽다가 `sdpa_attention_forward` | 11.3 | `generate(..., prefill_chunk_size=512)` |
# | `num_beams`를 켰더니 | 11.5 | 배치를 `num_beams`로 나눈다 |
# | 답이 길어질수록 는다 | 11.3, 11.4 | T4이고 그룹 쿼리 모델이면 먼저 3.12절의 한 줄, 그다음 `generate(..., cache_implementation="offloaded")` |
# | 저장하다가 GPU에서 | 11.6 | `copy.deepcopy(model.state_dict())` 대신 `{k: v.cpu() for k, v in model.state_dict().items()}` |
# | 저장하다가 RAM에서 | 11.6 | `max_shard_size="2GB"`. GPU가 여럿이면 11.11절의 `SHARDED_STATE_DICT` |
# | 저장한 것에서 이어서 하다가 | 11.7 | `torch.load(path, map_location="cpu", mmap=True)` |
# | `from_pretrained` | 11.8 | `dtype="float16", device_map="cuda"`(추론과 LoRA) |
# | 오프로드를 켰는데 GPU가 줄지 않는다 | 11.9 | 가중치, 그레이디언트, 옵티마이저 상태의 합이 최대와 거의 같으면 LoRA(8장), 아니면 `model.activation_checkpointing_enable()` |
# | 파이썬 오류 없이 끊기거나 `Killed` | 사건 11-A, 11.8, 11.9 | GPU가 아니라 RAM이다. RAM으로 옮긴 것부터 센다 |
#
# </details>

# %%
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from helpers import case, enable_checkpointing, exercise, guess, guesses, human_bytes
from helpers.chapters.c11_outside.tried import attempt, compare

torch.set_num_threads(1)
disable_progress_bar()
folder = Path(mkdtemp())
load = AutoModelForCausalLM.from_pretrained

# %% [markdown] lang="ko"
# 작은 GPT-2(파라미터 5천2백만 개, 52M)로 작업 하나를 처음부터 끝까지 실행한다. 흔히 쓰는 코드다. 뼈대만 적으면 아래와 같고, 전부는 `helpers/chapters/c11_outside/job.py`에 있다.
#
# ```python
# model = GPT2LMHeadModel(config).cuda()                                      # 불러오기
# loss.backward(), optimizer.step(), optimizer.zero_grad()                    # 학습, 두 스텝
# Trainer(model, arguments, compute_metrics=..., eval_dataset=...).evaluate() # 평가
# model.generate(tokens, max_new_tokens=2)                                    # 생성
# best = copy.deepcopy(model.state_dict())                                    # 저장: 가장 좋은 것을
# model.load_state_dict(best), model.save_pretrained(folder)                  #       기억했다가 쓴다
# torch.save({"model": ..., "optimizer": ...}, "checkpoint.pt")                #       (그림에는 없다, 11.6절)
# checkpoint = torch.load("checkpoint.pt")                                    # 재개: 이튿날 읽어서
# model.load_state_dict(checkpoint["model"]), optimizer.load_state_dict(...)  #       이어서 학습한다
# ```
#
# 모두 fp32이고 어휘는 32,000이다. 학습은 길이 512인 샘플을 2개씩, 평가는 같은 길이의 16개를 4개씩, 생성은 길이 896인 프롬프트 8개로 한다.
#
# 학습이 아닌 다섯 단계 가운데 GPU의 최대가 학습을 **넘는** 것은 몇일까?

# %%
above_training = guess("11", None, ("0", "1", "2", "3", "4", "5"))
above_training

# %% [markdown] lang="ko"
# 단계마다 GPU와 RAM의 최대를 그린다. 점선은 학습의 최대다.

# %%
from helpers.chapters.c11_outside.job import job
from helpers.chapters.c11_outside.pictures import draw_gathering, draw_job

first_try = job()
draw_job(first_try)

# %% [markdown] lang="ko"
# 평가와 재개가 점선 위에 있다.

# %%
above_training.against("2")

# %% [markdown] lang="ko"
# RAM은 더하다. 학습은 거의 쓰지 않는데 불러오기, 평가, 저장, 재개가 쓴다. 평가의 1,000 MiB는 16 × 512 × 32,000 × 4바이트, 로짓 전부다. 나머지 셋의 199 MiB는 가중치 한 벌이다. 불러오기와 재개는 모델을 RAM에 먼저 만들고, 저장은 파일에 쓸 것을 RAM에 모은다. 스텝의 메모리만 세어서는 알 수 없는 것들이다.

# %% [markdown] lang="ko"
# ## 11.1 학습은 되는데 평가에서 죽는다
#
# 평가에는 그레이디언트도 옵티마이저 상태도 없다. 그런데 평가에서 죽는다([transformers #8476](https://github.com/huggingface/transformers/issues/8476)).
# 앞의 그림에서 가장 높던 단계이기도 하다. 무엇이 그렇게 큰가?
#
# Qwen2.5-0.5B를 fp16으로 T4에 올리고, 길이 512인 샘플 48개를 8개씩 평가하면서 `compute_metrics`를 준다. 어휘가 151,936개이므로 로짓은 48 × 512 × 151,936 × 2바이트다.

# %%
logits = 48 * 512 * 151_936 * 2
print(human_bytes(logits), human_bytes(logits // 6))

# %% [markdown] lang="ko"
# 앞의 것이 로짓 전부, 뒤의 것이 배치 하나의 몫이다. 가중치는 1 GiB쯤이고 T4에는 14.64 GiB가 있으니, 로짓을 다 모아도 들어갈 것 같다. 배치 6개 가운데 **몇 번째**에서 죽을까, 아니면 끝까지 갈까?

# %%
dies_at = guess("11.1", None, ("4", "5", "6", "survives"))
dies_at

# %% [markdown] lang="ko"
# `compare`는 프로그램을 하나씩 가상 T4에서 실행해 GPU와 RAM의 최대를 센다. 죽었다면 요청한 **텐서의** 크기와 요청한 함수를 적는다. 죽은 줄의 최대는 그때까지의 것이고, 들어주지 못한 요청은 들어 있지 않다. RAM의 942 MiB는 `.cuda()` 전에 CPU에 잠깐 있던 가중치다. 최대는 더하는 것이 아니라 **가장 높던 순간**의 값이므로, 더 큰 값이 적힌 줄에서 빼지 않는다. 로짓만 보려고 단편화를 없애는 `expandable_segments`(10.5절)를 켰다.


# %%
from transformers import Trainer, TrainingArguments


def evaluate(
    samples=48, metric=lambda found: {}, preprocess=None, dtype="float16", states=0, **options
):  # fmt: skip
    arguments = TrainingArguments(
        folder, per_device_eval_batch_size=8, report_to="none", disable_tqdm=True, **options
    )  # fmt: skip
    model = load("Qwen/Qwen2.5-0.5B", dtype=dtype).cuda()
    states = [torch.zeros_like(p) for p in model.parameters() for _ in range(states)]  # AdamW has 2
    trainer = Trainer(
        model, arguments, compute_metrics=metric,
        eval_dataset=[{"input_ids": [1] * 512, "labels": [1] * 512}] * samples,
        preprocess_logits_for_metrics=preprocess,
    )  # fmt: skip
    trainer.evaluate()


pages = "expandable_segments:True"
compare({f"{n} samples": partial(evaluate, n) for n in (40, 48)}, settings=pages)

# %% [markdown] lang="ko"
# 48개는 죽었다. 요청한 6.96 GiB는 로짓 전부의 크기다. 왜 들어가지 않았을까? 같은 평가에서 배치가 모델을 지날 때마다 살아 있는 텐서를 적어, 이어 붙이는 순간을 그린다. 칸의 수는 GiB다.

# %%
seen = []


def note(logits, labels):
    seen.append((torch.cuda.memory_allocated(), logits.nbytes))
    return logits


attempt(partial(evaluate, preprocess=note), settings=pages)
draw_gathering(seen, "T4")

# %% [markdown] lang="ko"
# `Trainer`는 배치마다 `torch.cat`으로 지금까지의 로짓에 새것을 붙인다. 붙이는 동안은 옛것과 새것이 **함께** 있다. 여섯째 줄의 네 칸을 더하면 카드를 넘는다.

# %%
dies_at.against("6")

# %% [markdown] lang="ko"
# 이제 샘플 40개를 기본 설정에서(단편화도 있다) 평가한다. `as it is`는 그대로이고, `with AdamW`는 에폭 뒤의 평가처럼 옵티마이저 상태까지 있을 때다. 나머지 다섯이 고치는 길이다.
#
# - `no metric`: `compute_metrics`를 주지 않는다.
# - `preprocess`: 모으기 전에 토큰마다 수 하나(argmax)로 줄인다.
# - `list`: 이어 붙이지 않고 목록에 모은다. `to RAM`: 그것을 배치마다 CPU로 옮긴다.
# - `batch by batch`: 모으지 않고 배치마다 지표를 부른다.
#
# 지표를 지키면서 GPU와 RAM이 모두 가장 적은 두 줄은 어느 것인가?

# %%
argmax = {"preprocess": lambda logits, labels: logits.argmax(-1)}
sums = {"right": 0, "all": 0}


def batch_accuracy(found, compute_result=False):
    guessed, labels = found.predictions.argmax(-1)[:, :-1], found.label_ids[:, 1:]
    counted = labels != -100
    sums["right"] += ((guessed == labels) & counted).sum().item()
    sums["all"] += counted.sum().item()
    if compute_result:  # the last batch
        result = {"accuracy": sums["right"] / max(sums["all"], 1)}
        sums.update(right=0, all=0)
        return result


cures = {
    "as it is": {},
    "with AdamW": {"states": 2},
    "no metric": {"metric": None},
    "preprocess": argmax,
    "list": {"eval_do_concat_batches": False},
    "to RAM": {"eval_do_concat_batches": False, "eval_accumulation_steps": 1},
    "batch by batch": {"metric": batch_accuracy, "batch_eval_metrics": True},
}
compare({name: partial(evaluate, 40, **options) for name, options in cures.items()})

# %% [markdown] lang="ko"
# - 답은 `preprocess`와 `batch by batch`다. `no metric`도 같은 값이지만 지표가 없다.
# - `compute_metrics`를 주지 않거나 `prediction_loss_only=True`면 손실만 남는다. 펄플렉시티는 이것으로 충분하다. `math.exp(metrics["eval_loss"])`다(배치마다 레이블 수가 다르면 평균의 평균이라 조금 어긋난다).
# - **`preprocess_logits_for_metrics`를 먼저 쓴다.** 지표를 지키면서 어휘 전체의 점수를 모으지 않는다. 출력이 여럿인 모델이면 `logits`가 튜플이므로 `logits[0]`을 쓴다.
# - `batch_eval_metrics=True`는 배치마다 `compute_metrics`를 부른다. 받는 것은 **GPU의 텐서**다. 위의 `batch_accuracy`처럼 개수를 `.item()`으로 더해 두고, `compute_result=True`로 불린 마지막에 나눈다.
# - `list`는 두 벌을 한 벌로 줄일 뿐이다. 샘플이 늘면 다시 죽는다.
# - `eval_accumulation_steps`만 켜면 이번에는 RAM에서(NumPy로) 이어 붙여 **두 벌**이 되는 순간이 있다. 텐서가 아니라서 이 표로는 세지 못한다. 그래서 `to RAM`에는 `eval_do_concat_batches=False`를 함께 적었다.
# - `to RAM`은 로짓을 없애지 않고 **RAM으로 옮긴다.** 켜지 않아도 모은 것은 끝에 RAM으로 간다. 그래서 `list`와 `to RAM`의 RAM은 모두 로짓 전부(5.80 GiB)다. bf16 모델이면 RAM에서는 **두 배**다. NumPy에 bf16이 없어 `Trainer`가 fp32로 바꾼다.
# - `as it is`와 `with AdamW`는 더해 보면 들어가는데 **단편화** 때문에 죽었다(0.93 + 4.64 + 1.16 + 5.80 = 12.53 GiB). `with AdamW`는 더 일찍, 넷째 배치의 **순전파**에서 죽었다. traceback에는 `fixed_cross_entropy`가 있지만, 여유를 없앤 것은 옵티마이저 상태와 모은 로짓이다.
#
# 아래는 그대로 옮겨 쓸 수 있는 지표다. `preprocess`와 함께 쓰므로 `predictions`는 로짓이 아니라 토큰 번호다. 여기서 다시 `argmax`를 부르지 않는다. 다음 토큰을 맞히는 모델이라 한 칸 밀어 견주고, 레이블이 -100인 자리는 뺀다.


# %%
def accuracy(found):
    guessed, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guessed == labels)[counted].mean())}


compare({"accuracy": partial(evaluate, metric=accuracy, **argmax)})

# %% [markdown] lang="ko"
# **고치는 한 줄:** `preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)`. `fp16=True`나 `bf16=True`로 학습한다면 로짓이 fp32라서 더 급하다(11.11절에서 센다).
#
# > **주장 1.** "`eval_accumulation_steps`를 켜면 해결된다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** RAM이 넉넉할 때만이다. 로짓은 사라지지 않고 자리를 옮긴다. 사건 11-A가 그 다음 이야기다.
#
# </details>

# %% [markdown] lang="ko"
# **연습 11-1.** `Trainer`의 기본 설정에서 마지막 배치를 이어 붙이는 순간, GPU에 있는 로짓은 **모두** 몇 바이트인가? 그전까지 모은 것, 마지막 배치의 것, 다 이어 붙인 것을 더한다. `each`는 로짓 하나의 바이트다. 마지막 배치는 꽉 차지 않을 수 있고, 배치가 하나뿐이면 이어 붙이지 않는다.


# %%
def gathered(samples, batch, length, vocabulary, each):
    return ...


exercise("11-1").check(gathered)

# %% [markdown] lang="ko"
# ### 사건 11-A: 메시지도 없이 죽는다
#
# "평가에서 GPU OOM이 나서 `eval_accumulation_steps`를 켰다. 그랬더니 몇 배치 뒤에 세션이 아무 말 없이 끊어진다." 무료 Colab에서 11.1절의 모델로 샘플 96개를 평가한다. 로짓은 이어 붙이지 않고 목록에 모은다.
#
# Colab이 12.7 GB라고 적는 RAM은 12.67 GiB다. 시스템이 0.84 GiB 넘게, 파이썬과 CUDA가 0.24 GiB 넘게 먼저 쓰므로, 텐서에 남는 것은 많아야 11.6 GiB다(출처는 저장소의 `virtual_gpu/host/machines.json`).
#
# 이 모델을 선생으로 삼아 작은 모델을 가르치려고(증류, distillation) 토큰마다 **가장 높은 점수 k개**를 그 번호와 함께 남기려 한다(`logits.topk(k, -1)`. 번호는 int64다). k는 2의 거듭제곱으로, 될수록 크게 잡는다.
#
# `run`이 받는 것은 `accumulate`(`eval_accumulation_steps`)와 `keep`("logits", "nothing", 또는 k)이다. k가 가장 큰 설정을 사전으로 답하라. 먼저 계산하면, 아래의 한 번을 빼고 남은 네 번으로 넉넉하다.

# %%
case("11-A").run(accumulate=1)

# %% [markdown] lang="ko"
# 찾은 설정을 적는다.

# %%
answer = ...  # {"accumulate": 4, "keep": 64}
case("11-A").check(answer)

# %% [markdown] lang="ko"
# ## 11.2 평가 배치는 얼마나 키울 수 있나
#
# 이번에는 내 루프다. 역전파가 없으니 배치를 키울 수 있다. 얼마나? 모델은 11.1절의 것(fp16, 길이 512, T4)이다. 거기에서 배치 8의 평가는 6.74 GiB였고, 가중치가 0.92 GiB다. 옵티마이저 없이 역전파까지만 하는 학습에서 배치 4는 되고 8은 죽는다면, 8, 16, 32 가운데 평가가 끝까지 가는 가장 큰 배치는 무엇일까?

# %%
largest_eval = guess("11.2", None, ("8", "16", "32"))
largest_eval

# %% [markdown] lang="ko"
# 모두 배치 셋을 처리한다. `train`은 역전파까지, `forgot`은 `no_grad` 없이 순전파만, 나머지는 `no_grad` 안에서 한다. 손실을 목록에 모으는데, `item`은 `.item()`으로 수만 모은다. `hidden`은 출력층과 손실을 빼고 모델의 몸통만 부른 것이다. `forgot` 두 줄의 최대는 `train 4`보다 클까, 작을까?


# %%
def three(batch, context=torch.no_grad, backward=False, item=False, head=True, count=3, check=False):
    model = load("Qwen/Qwen2.5-0.5B", dtype="float16", device_map="cuda").train()
    if check:
        enable_checkpointing(model)
    tokens, losses = torch.ones(batch, 512, dtype=torch.int64).cuda(), []
    with context():
        for _ in range(count):
            if not head:
                model.model(tokens, use_cache=False)
                continue
            loss = model(tokens, labels=tokens, use_cache=False).loss
            if backward:
                loss.backward()
            losses.append(loss.item() if item else loss)


train = partial(three, context=torch.enable_grad, backward=True)
forgot = partial(three, context=torch.enable_grad)
compare(
    {
        "train 4": partial(train, 4),
        "train 8": partial(train, 8),
        "forgot 4": partial(forgot, 4),
        "forgot 4, item": partial(forgot, 4, item=True),
        "no_grad 4": partial(three, 4),
        "no_grad 16": partial(three, 16),
        "no_grad 32": partial(three, 32),
        "hidden 64": partial(three, 64, head=False),
    },
    ram=False,
)

# %% [markdown] lang="ko"
# - `no_grad`를 **잊으면** 순전파 상태가 풀려나지 않는다. 손실을 그대로 모으면 목록이 배치마다 계산 그래프를 붙들어 쌓인다.
# - `.item()`으로 모아도 모자란다. 이름 `loss`가 다음 손실이 나올 때까지 앞 배치의 그래프를 붙들어 **두 배치의 것이 겹친다**(10.4절). 그래서 13.77 GiB로 학습보다 많다. 고치는 것은 `no_grad`다.
# - `model.eval()`은 계산 그래프를 끄지 않는다. 드롭아웃을 끄고, 학습할 때만 듣는 체크포인팅도 끈다.
# - 학습은 8에서 죽었는데 평가는 16까지 되고 32에서 죽었다. 죽은 곳은 로짓과 손실이다. 층의 순전파 상태는 곧바로 풀려나므로, **평가 배치의 크기는 로짓이 정한다.** 손실을 계산하는 순간 로짓 하나가 **10바이트**를 차지한다. fp16 로짓 2, fp32로 바꾼 것 4, log-softmax 4다. 샘플 하나에 512 × 151,936 × 10바이트, 0.725 GiB이니 (14.64 − 0.92) ÷ 0.725 = 18.9, 많아야 18이다(11.11절에서 하나씩 센다). 로짓이 없으면(`hidden`) 64개도 3.6 GiB면 된다.

# %%
largest_eval.against("16")

# %% [markdown] lang="ko"
# **고치는 한 줄:** `with torch.no_grad():`. 그리고 평가 배치는 학습의 몇 배가 아니라 (남은 메모리) ÷ (길이 × 어휘 × 10바이트)에서 **시작한다**(로짓이 16비트일 때다. 혼합 정밀도 없이 fp32로 계산하면 로짓 4, log-softmax 4로 8바이트다). 이 값은 위 끝이다. 여기서는 18인데, 기본 설정에서는 첫 배치만 되고 뒤의 배치에서 단편화로 죽는다. 하나쯤 빼고(17) 배치를 **셋 이상** 돌려 본다(11.11절).
#
# ## 11.3 `generate`와 KV 캐시
#
# 토큰을 하나씩 만들 때마다 앞의 모든 토큰의 키와 값이 필요하다. 그것을 간직하는 것이 **KV 캐시**다. 토큰 하나의 크기는 설정만 보면 안다.
#
# $$2 \times \text{층} \times \text{키·값 헤드} \times \text{헤드 크기} \times \text{바이트}$$
#
# 여기에 토큰 수와 배치를 곱한다. 식의 값과, `generate`가 끝난 뒤 캐시 객체의 텐서를 센 값을 나란히 놓는다. 배치 4, 프롬프트 256에 두 토큰을 만들었다(마지막 토큰은 캐시에 들어가지 않는다). 열은 키·값 헤드와 쿼리 헤드의 수, 토큰 하나, 식, 센 값이다.

# %%
from helpers.chapters.c11_outside.cache import cache_bytes
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.kv_cache import kv_bytes


def generate(name, batch=4, prompt=256, new=2, padded=0, **options):
    model = load(name, dtype="float16", device_map="cuda")
    tokens = torch.ones(batch, prompt, dtype=torch.int64).cuda()
    mask = torch.ones_like(tokens)
    mask[0, :padded] = 0
    settings = {
        "max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True,
    }  # fmt: skip
    out = model.generate(tokens, attention_mask=mask, **settings | options)
    return cache_bytes(out.past_key_values)


print(f"{'model':27} {'KV/Q':>5} {'one token':>10} {'formula':>11} {'counted':>11}")
for name in ("EleutherAI/polyglot-ko-1.3b", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B"):
    config, counted = load_config(name), attempt(partial(generate, name)).returned
    queries = config.num_attention_heads
    heads = f"{getattr(config, 'num_key_value_heads', queries)}/{queries}"
    one, formula = human_bytes(kv_bytes(config, 1)), kv_bytes(config, 257, 4)
    print(f"{name:27} {heads:>5} {one:>10} {formula:>11,} {counted:>11,}")

# %% [markdown] lang="ko"
# 한 바이트도 다르지 않다. 파라미터 수가 비슷한 polyglot-ko-1.3b와 Llama-3.2-1B의 토큰 하나가 여섯 배 차이 난다. Llama는 **그룹 쿼리**(GQA, 3.12절)라 쿼리 헤드가 32개인데 키·값 헤드는 8개뿐이다. 헤드의 크기는 polyglot의 절반이고 층도 3분의 2다.
#
# 패널에서 모델, 문맥, 배치, 캐시의 자료형을 바꾼다. 식으로 계산하므로 바로 바뀐다.
#
# ![RTX 4090에 올린 Llama-3.1-8B. 가중치 14.96 GiB에 문맥 16,384토큰의 캐시 2.00 GiB를 더해 23.16 GiB 안에 들어간다.](../../image/11_cache_panel.svg)
#
# - Llama-3.1-8B의 문맥을 131,072로 늘린다. 캐시를 4비트로 줄이면 들어가는가?
# - 문맥 4,096에서 배치를 키운다. 캐시가 가중치보다 커지는 배치는 얼마인가?
# - gemma-3-1b의 문맥을 두 배로 늘린다. 캐시는 왜 두 배가 되지 않을까(11.11절)?
#
# <details><summary>답 (먼저 바꿔 본 다음에 연다)</summary>
#
# 4비트면 캐시가 4.00 GiB라 가중치와의 합은 18.96 GiB다. **식으로는** 들어간다. 그러나 프롬프트를 한 번에 읽으면 임시 텐서가 더 든다. 그것은 이 절의 끝에서 본다. 문맥 4,096이면 샘플 하나의 캐시가 0.50 GiB이므로 배치 30에서 15.00 GiB가 되어 가중치 14.96 GiB를 넘는다(둘의 합은 카드를 넘는다). gemma-3-1b는 26층 가운데 22층이 앞의 512토큰만 간직하므로 나머지 4층만 두 배가 된다.
#
# </details>

# %%
from helpers import cache_panel

cache_panel()

# %% [markdown] lang="ko"
# **연습 11-2.** 설정에서 캐시의 바이트를 계산하는 함수를 써라. `each`는 수 하나의 바이트다. 쓸 것은 `config`의 `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`, `hidden_size`, `head_dim`이다. `num_key_value_heads`와 `head_dim`은 없거나 `None`인 모델도 있다. 모든 층이 토큰을 다 간직하는 모델만 다룬다.


# %%
def cache_size(config, tokens, batch, each):
    return ...


exercise("11-2").check(cache_size)

# %% [markdown] lang="ko"
# ### 캐시는 1 GiB인데
#
# Llama-3.2-1B로 길이 4,096인 프롬프트 8개를 T4에서 이어 쓴다. 캐시는 토큰 하나에 32 KiB이니 8 × 4,096개에 1 GiB이고, 가중치는 1,235,814,400개의 2바이트로 2.30 GiB다. 합하면 3.30 GiB다. T4와 A100-80GB 가운데 어디에서 끝까지 갈까?

# %%
long_prompts = guess("11.3", None, ("T4", "A100", "both"))
long_prompts

# %% [markdown] lang="ko"
# `as it is`는 그대로 실행한 것이고, `padded`는 프롬프트 하나가 짧아 패딩한 것이다. `no grouped heads`는 3.12절의 한 줄을 먼저 실행한 것이다. `chunks`는 프롬프트를 512토큰씩 나누어 읽는다(`prefill_chunk_size`). 마지막 줄은 둘을 함께 쓴 것이다.

# %%
from unittest.mock import patch

from transformers.integrations import sdpa_attention


def without_grouped_heads(**options):
    # sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False, for this run alone
    with patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *args, **kwargs: False):
        return long(**options)


long = partial(generate, "meta-llama/Llama-3.2-1B", 8, 4096)
rows = {
    "as it is": long,
    "padded": partial(long, padded=10),
    "no grouped heads": without_grouped_heads,
    "chunks": partial(long, prefill_chunk_size=512),
    "no grouped, chunks": partial(without_grouped_heads, prefill_chunk_size=512),
}
compare(rows, ram=False, returned="cache")

# %% [markdown] lang="ko"
# 같은 것을 A100에서도 그대로 실행한다.

# %%
compare({"as it is": long}, "A100-80GB", ram=False, returned="cache")

# %% [markdown] lang="ko"
# 토큰을 만들기도 전에, **프롬프트를 읽다가**(prefill) 죽었다. 요청한 16 GiB는 8 × 32 × 4,096 × 4,096 × 4바이트, 길이의 제곱인 점수 행렬이다. T4의 융합 어텐션 커널은 그룹 쿼리를 받지 않아(3.12절) `math` 커널이 점수를 fp32로 모두 만들었다. A100은 이 행렬을 만들지 않는다. 고치는 길은 둘이다.
#
# - `no grouped heads`: 키와 값을 쿼리 헤드의 수로 복사해 넘기면 T4도 융합 커널을 쓴다. 최대가 A100과 같다. 마스크가 있으면 transformers가 저절로 이렇게 하므로 `padded`는 죽지 않았다. 이 함정은 **패딩이 없는** 배치에 있다.
# - `chunks`: 마스크가 없는 것은 첫 조각뿐이다. 그 점수 행렬은 8 × 32 × 512 × 512 × 4바이트, 256 MiB다. 그래서 프롬프트를 읽는 동안의 최대는 마지막 줄과 같은 3.68 GiB다. 표의 4.20 GiB는 **그다음, 토큰을 하나씩 만들 때**의 것이다. 그때는 다시 마스크가 없어 `math` 커널이고, 층마다 키와 값을 쿼리 헤드의 수로 늘려 fp32로 바꾸느라 캐시의 0.9배쯤(4.20 − 3.30 GiB)을 더 쓴다. 한 층 몫의 사본이라 층이 많은 모델일수록 이 비율은 작다. 조각을 더 잘게 나누어도 줄지 않는다.
#
# 인자 하나면 되니 `chunks`를 먼저 쓰고, T4에서 답까지 길면 둘을 함께 쓴다.

# %%
long_prompts.against("A100")

# %% [markdown] lang="ko"
# > **주장 2.** "`generate`의 최대는 가중치에 KV 캐시를 더한 것이다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 프롬프트가 짧고 답이 길며, **융합 커널을 쓸 때만** 거의 맞다. T4에서 그룹 쿼리 모델을 패딩 없이 돌리면 토큰을 하나 만드는 동안에도 한 층의 키와 값을 늘린 사본이 더 든다(이 모델에서는 캐시의 0.9배쯤). 둘의 합은 3.30 GiB인데 A100에서도 5.32 GiB였다. 프롬프트를 읽는 동안의 임시 텐서가 캐시의 두 배다. 패널의 131,072토큰도 그래서 식으로만 들어간다. `prefill_chunk_size`를 함께 주어야 한다.
#
# </details>
#
# **고치는 한 줄:** `generate(..., prefill_chunk_size=512)`. T4에서 그룹 쿼리 모델로 긴 답을 만든다면 모델을 부르기 전에 `sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False`도 적는다(`from transformers.integrations import sdpa_attention`).
#
# ## 11.4 캐시의 종류
#
# transformers의 기본값은 **동적 캐시**(dynamic)다. 토큰마다 `torch.cat`으로 한 줄을 붙이므로 층 하나의 키나 값이 잠깐 두 벌이 된다(11.11절에서 센다). **정적 캐시**(static)는 최대 길이만큼 미리 잡아 두고 그 자리에 쓴다. **오프로드 캐시**는 지금 계산하는 층과 그다음 층의 것만 GPU에 두고 나머지는 RAM의 **고정 메모리**(pinned memory)에 둔다. 운영 체제가 내보내지 못하는 RAM이라 GPU가 직접 읽어 간다.
#
# RTX 4090에서 Llama-3.1-8B에 16,384토큰을 읽히고 두 토큰을 만든다('캐시'는 끝난 뒤 GPU에 남은 것이다. 오프로드 캐시는 한 층 몫이다). 두 벌이 되는 동적 캐시의 최대는 정적 캐시보다 클까? 오프로드 캐시는 캐시 2 GiB를 RAM으로 보내는데, RAM은 2 GiB보다 적게 늘까, 더 늘까? 마지막 줄은 12,000토큰이다.

# %%
eight = partial(generate, "meta-llama/Llama-3.1-8B", 1)
kinds = {
    "dynamic": partial(eight, 16384),
    "static": partial(eight, 16384, cache_implementation="static"),
    "offloaded": partial(eight, 16384, cache_implementation="offloaded"),
    "offloaded, 12,000": partial(eight, 12000, cache_implementation="offloaded"),
}
compare(kinds, "RTX 4090", returned="cache")

# %% [markdown] lang="ko"
# 동적 캐시와 정적 캐시의 최대는 같다. 둘 다 프롬프트를 읽을 때가 최대이고, 한 줄을 붙이는 것은 그 뒤의 일이기 때문이다.
#
# 오프로드 캐시는 GPU를 캐시만큼 줄인다. 대신 토큰마다 캐시 전부가 PCIe 버스를 오간다. 제조사의 최고 속도(PCIe 4.0 x16, 초당 31.5 GB)로 계산하면 1.94 GiB가 한 방향에 66 ms이고, 가중치와 캐시를 읽는 데는 18 ms쯤이다. **토큰 하나가 적어도 서너 배 느려진다**(재지 않았다). 그런데 보낸 것은 2 GiB인데 RAM은 6 GiB 가까이 늘었다. PyTorch가 고정 메모리를 **2의 거듭제곱으로** 잡고, 다 쓴 것도 돌려주지 않기 때문이다. 16,384는 꼭 2의 거듭제곱이라 토큰이 하나 붙자 두 배짜리를 새로 잡았다(계산은 11.11절). 12,000이면 1.94 GiB다.
#
# **고치는 한 줄:** 캐시가 넘치는데 RAM이 넉넉하다면 `generate(..., cache_implementation="offloaded")`. RAM은 캐시의 **세 배**(위의 5.81 GiB)까지, 짧은 프롬프트에서 시작해 답이 2의 거듭제곱을 여러 번 넘으면 네 배 가까이까지 잡는다.
#
# ## 11.5 생성에 더 드는 것
#
# 프롬프트를 읽을 때 필요한 로짓은 마지막 토큰의 것뿐이다. `generate`는 그것만 계산하지만, 모델을 **직접** 부르면 모든 토큰의 로짓이 생긴다. A100에서 길이 2,048인 프롬프트 8개로 비교한다. `beams`는 빔이 넷인 빔 탐색(beam search)이다. `generate`와 같은 줄은 어느 것이고, 빔 넷의 캐시는 몇 배인가?


# %%
def read_prompt(**options):
    model = load("meta-llama/Llama-3.2-1B", dtype="float16", device_map="cuda")
    with torch.no_grad():
        out = model(torch.ones(8, 2048, dtype=torch.int64).cuda(), use_cache=True, **options)
    return cache_bytes(out.past_key_values)


compare(
    {
        "model(x)": read_prompt,
        "logits_to_keep=1": partial(read_prompt, logits_to_keep=1),
        "generate": partial(generate, "meta-llama/Llama-3.2-1B", 8, 2048, 1),
        "beams": partial(generate, "meta-llama/Llama-3.2-1B", 8, 2048, 1, num_beams=4),
    },
    "A100-80GB",
    ram=False,
    returned="cache",
)

# %% [markdown] lang="ko"
# `generate`는 `logits_to_keep=1`과 같고, 빔 넷의 캐시는 네 배다. 직접 부르면 8 × 2,048 × 128,256 × 2바이트, 3.91 GiB의 로짓이 생긴다. 표의 차이가 2.98 GiB인 것은 두 최대의 순간이 다르기 때문이다. `logits_to_keep=1`의 최대는 층을 지날 때의 임시 텐서이고, `model(x)`의 최대는 그것이 풀려난 뒤 가중치, 캐시, 로짓이 함께 있을 때다. 빔 넷은 배치 네 배와 같다.
#
# **고치는 한 줄:** 내 생성 루프라면 `model(..., logits_to_keep=1)`. 빔 탐색이라면 배치를 `num_beams`로 나눈다.
#
# ## 11.6 저장은 디스크 일인가
#
# 가장 좋은 모델을 기억해 두었다가 끝에 저장한다고 하자. `state_dict()`만 부르는 것, 그것을 `copy.deepcopy`한 것, 텐서를 하나씩 `.cpu()`로 옮긴 것을 비교한다. 파일을 쓸 것이라 더 작은 GPT-2(17M)를 쓴다. 가중치는 66.11 MiB다(GPU의 67.11 MiB에는 할당자가 나누지 않고 남긴 1 MiB가 들어 있다). GPU를 더 쓰는 것은 어느 것이고, RAM을 더 쓰는 것은 어느 것인가?

# %%
import copy

from helpers.chapters.c11_outside.resume import SHARE, extra_of, saved, small_gpt, train_two_steps

ways_to_keep = {
    "state_dict()": lambda model: model.state_dict(),
    "deepcopy": lambda model: copy.deepcopy(model.state_dict()),
    "v.cpu()": lambda model: {k: v.cpu() for k, v in model.state_dict().items()},
}
compare({name: extra_of(take) for name, take in ways_to_keep.items()}, returned="grown")

# %% [markdown] lang="ko"
# `state_dict()`는 복사하지 않는다. 그래서 공짜이고, 그래서 **다음 스텝이 그 값을 바꾼다.** `deepcopy`는 값을 지키지만 **GPU에** 한 벌을 더 만든다. 셋째는 그 한 벌을 **RAM에** 둔다. (임베딩과 출력층이 한 텐서인 모델이면 `state_dict()`에 이름이 둘이다. `deepcopy`는 한 번만 복사하지만 `v.cpu()`는 두 번 복사한다.)
#
# 이제 파일을 쓴다. 파일 하나로, 20 MB씩과 5 MB씩 나누어, LoRA 어댑터만, LoRA를 합쳐서 저장한다. RAM이 가장 적은 줄은 어느 것인가?

# %%
from peft import LoraConfig, get_peft_model


def save(size="50GB", lora=False, merge=False):
    with torch.device("cuda"):
        model = small_gpt()
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)).cuda()
    if merge:
        model = model.merge_and_unload()
    into = Path(mkdtemp())
    model.save_pretrained(into, max_shard_size=size)
    return sum(file.stat().st_size for file in into.glob("*.safetensors"))


programs = {
    "one file": save,
    "20 MB shards": partial(save, "20MB"),
    "5 MB shards": partial(save, "5MB"),
    "adapter": partial(save, lora=True),
    "merged": partial(save, lora=True, merge=True),
}
compare(programs, writes=True, returned="files")

# %% [markdown] lang="ko"
# `save_pretrained`(safetensors)로 저장할 때는 **파일 하나에 담을 텐서가 모두 RAM에** 온다. 그래서 나누면 파일의 합은 그대로인데 RAM은 조각 하나만큼으로 준다. 5 MB로 나눈 줄이 8 MiB인 것은 텐서 하나를 쪼개지는 않기 때문이다. 어댑터만 저장하면 거의 들지 않고, 합치면(merge) RAM에 다시 모델 하나가 든다. `torch.save`는 다르다. 텐서를 하나씩 RAM으로 옮겨 쓰므로, 옵티마이저 상태까지 저장해도 RAM은 가장 큰 텐서 하나만큼이다.
#
# **고치는 한 줄:** GPU라면 `deepcopy` 대신 `{k: v.cpu() for k, v in model.state_dict().items()}`, RAM이라면 `save_pretrained(path, max_shard_size="2GB")`. transformers 5.23의 기본값은 50 GB라 대개 파일이 하나다.
#
# > **주장 3.** "저장은 디스크 일이다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **틀리다.** 저장할 것을 어떻게 모으느냐에 따라 GPU에 한 벌(`deepcopy`), RAM에 한 벌(`.cpu()`, safetensors)이 더 든다.
#
# </details>
#
# ## 11.7 처음부터는 되는데 이어서 하면 죽는다
#
# "처음부터는 빠듯하게나마 학습된다. 체크포인트에서 이어서 하면 OOM이다"([transformers #22123](https://github.com/huggingface/transformers/issues/22123)). [nanoGPT #158](https://github.com/karpathy/nanoGPT/issues/158)도 같다. 까닭을 코드에서 볼 수 있는 nanoGPT의 것을 재현한다(`Trainer`는 지금 어떤지 이 절의 끝에 적는다). 모델은 11.6절의 GPT-2(17M)이고, 그만큼 T4도 344 MiB만 쓰게 막는다. 여기서 체크포인트는 **체크포인트 파일**, 곧 저장한 가중치와 옵티마이저 상태다(5장의 것은 남겨 둔 순전파 상태다). 먼저 학습해서 저장한다.

# %%
path = folder / "checkpoint.pt"
compare({"train and save": saved(path)}, writes=True)[0][-1]

# %% [markdown] lang="ko"
# 이제 이어서 학습한다. 아래 `resume`은 고치기 전의 nanoGPT와 같은 순서다([nanoGPT #236](https://github.com/karpathy/nanoGPT/pull/236)). `scratch`는 파일을 읽지 않고 처음부터 학습한 것이다. GPU가 `scratch`만큼으로 돌아오는 줄은 어느 것이고, 그 가운데 RAM을 더 쓰는 것은 어느 것인가?


# %%
def resume(read=True, delete=False, **options):
    torch.cuda.set_per_process_memory_fraction(SHARE)
    model = small_gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if read:
        checkpoint = torch.load(path, **options)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    if delete:
        del checkpoint
    train_two_steps(model, optimizer)


programs = {
    "scratch": partial(resume, read=False),
    "resume": resume,
    "del": partial(resume, delete=True),
    "cpu": partial(resume, map_location="cpu"),
    "cpu, mmap": partial(resume, map_location="cpu", mmap=True),
}
compare(programs)

# %% [markdown] lang="ko"
# `map_location`을 적지 않으면 텐서는 **저장될 때 있던 곳**, 곧 GPU로 돌아간다. 그리고 변수 `checkpoint`가 학습하는 내내 그것을 붙든다.
#
# 붙든 것이 모두 두 벌인 것은 아니다. 옵티마이저의 `load_state_dict`는 (PyTorch 2.13에서) 같은 장치에 있는 상태를 복사하지 않고 그대로 쓴다. 모델의 `load_state_dict`는 값을 복사하므로 파일의 것이 남는다. 그래서 `scratch`의 293.90 MiB에 모델 한 벌 66.11 MiB를 더한 **360 MiB**가 필요한데 한도는 344 MiB다. 고치는 줄은 셋이고 모두 `scratch`만큼으로 돌아온다. RAM을 더 쓰는 것은 `cpu`뿐이다.
#
# - `del checkpoint`: 다 쓴 뒤에 버린다. 읽는 일만 하는 함수로 떼어 내면, 그 함수가 끝날 때 저절로 된다(위의 `resume`은 같은 함수에서 학습까지 하므로 끝까지 붙든다).
# - `map_location="cpu"`: GPU에 올리지 않는다. 대신 파일의 크기만큼 RAM이 든다. 파일은 가중치 66.11 MiB에 옵티마이저 상태 둘 132.22 MiB, 모두 198.33 MiB다.
# - `mmap=True`: 파일을 RAM에 읽어 들이지 않고 필요한 페이지(page)만 그때그때 가져온다. 운영 체제가 언제든 버리고 다시 읽을 수 있어 이 페이지들 때문에 죽지는 않는다(표의 RAM은 이것을 세지 않는다).
#
# (표의 2.00 MiB는 텐서의 크기이고, 할당자는 20 MiB짜리 세그먼트를 달라고 했다, 10.1절. RAM의 66.11 MiB는 모델을 RAM에 먼저 만든 것이다.)
#
# **고치는 한 줄:** `torch.load(path, map_location="cpu", mmap=True)`. `Trainer`의 `resume_from_checkpoint`라면 고칠 것이 없다. transformers 5.23은 GPU가 하나일 때 옵티마이저 상태를 CPU로 읽는다(그만큼 RAM이 든다). GPU가 여럿일 때는 11.11절에 있다.
#
# ### 사건 11-B: RAM도 없다
#
# 위와 같은 학습을 이어서 하는데, GPU는 362 MiB까지, 텐서에 쓸 RAM은 **128 MiB**까지다. 체크포인트를 읽는 라이브러리 함수는 `map_location`만 받아 `mmap`을 넘길 자리가 없다. 파일에는 `"model"`과 `"optimizer"`, 그리고 가중치의 이동 평균 `"ema"`(모델과 같은 크기)가 있다. EMA는 학습이 끝난 뒤에 쓰므로 버릴 수 없다.
#
# `run`이 받는 것은 `map_location`("cuda", "cpu")과, 다 읽은 뒤 `model`, `optimizer`, `ema`를 저마다 어떻게 할지다. `checkpoint`에 그대로 두거나("keep"), 지우거나("drop"), RAM으로 옮긴다("cpu"). 설정은 쉰네 가지인데 실험은 아래의 한 번을 빼고 네 번 남는다. 먼저 종이에 더해 본다. 읽는 순간의 합과 학습하는 순간의 합을 따로 더하고, 할당자의 자투리가 20 MiB쯤 더 드니(10.5절) 합은 **340 MiB까지**로 잡는다.

# %%
case("11-B").run()

# %% [markdown] lang="ko"
# 찾은 설정을 사전으로 적는다. 적지 않은 것은 `map_location="cuda"`와 `"keep"`이다.

# %%
answer = ...  # {"map_location": "cpu", "ema": "drop"}
case("11-B").check(answer)

# %% [markdown] lang="ko"
# ## 11.8 불러오다가 죽는다
#
# 무료 Colab에서 텐서에 남는 RAM은 많아야 11.6 GiB다(사건 11-A). polyglot-ko-5.8b를 T4에서 쓰려고 불러온다. fp16이면 11 GiB라 T4에 들어간다. 그런데 옛 예제에서 흔히 보는 대로 fp32로 불러온 뒤 `.half()`로 줄이면 Colab에서 어떻게 될까?

# %%
dies_in = guess("11.8", None, ("GPU", "RAM", "nowhere"))
dies_in

# %% [markdown] lang="ko"
# 차례로 fp32로 불러와 줄이기, fp32를 GPU에 바로 올려 줄이기, fp16으로 GPU에 바로 올리기, 올리면서 4비트로 줄이기다. 첫 줄은 방금 예상했다. 나머지 셋 가운데 끝까지 가는 것은 몇 줄인가?

# %%
from transformers import BitsAndBytesConfig

name = "EleutherAI/polyglot-ko-5.8b"
on_gpu, four_bit = {"device_map": "cuda"}, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
ways = {
    "fp32, half": lambda: load(name, dtype="float32").half().cuda(),
    "fp32 on GPU": lambda: load(name, dtype="float32", **on_gpu).half(),
    "fp16 on GPU": lambda: load(name, dtype="float16", **on_gpu),
    "4 bit": lambda: load(name, quantization_config=four_bit, **on_gpu),
}
compare(ways, host="Colab")

# %% [markdown] lang="ko"
# - `Killed`는 RAM이 모자랐다는 뜻이다. **파이썬 오류가 없다.** 이슈에 옮겨 적힌 Colab의 알림은 "Your session crashed after using all available RAM"이다([FTCP #8](https://github.com/PV-Lab/FTCP/issues/8)). 리눅스 터미널이라면 종료 코드(`echo $?`)가 137인지, `dmesg`에 `Out of memory: Killed process`가 있는지 본다.
# - fp32를 GPU에 바로 올려도 죽는다. 줄이기 **전**의 크기가 최대다.
# - `dtype="float16", device_map="cuda"`가 답이다. 텐서마다 파일에서 읽어 GPU로 보내므로 RAM에 모델이 쌓이지 않는다. 4비트도 텐서마다 올려 줄이므로 fp16 모델이 통째로 올라가는 순간이 없다. 7B라면 fp16 가중치만 13 GiB가 넘으니 4비트로 불러온다.

# %%
dies_in.against("RAM")

# %% [markdown] lang="ko"
# **고치는 한 줄:** `from_pretrained(name, dtype="float16", device_map="cuda")`. 쓰거나 LoRA를 붙일 때의 줄이다. 모든 가중치를 `fp16=True`로 학습한다면 `dtype="float32"`로 불러온다(사건 1-A).
#
# ## 11.9 오프로드와 고정 메모리
#
# 오프로드는 바이트를 없애지 않고 RAM으로 옮긴다. 옮긴 곳의 크기를 모르면 GPU 대신 RAM이 죽는다. polyglot-ko-1.3b를 배치 2, 길이 512로 순전파, 역전파한다. `save_on_cpu`는 역전파를 위해 저장하는 것을 모두 옮기고, `pinned`는 고정 메모리(11.4절)로 옮긴다. 그러면 복사가 계산과 겹칠 수 있다. `offload`는 체크포인팅을 켜고 층의 입력만 옮긴다(5.6절).
#
# '순전파의 최대'는 역전파를 부르기 전까지의 최대다. 'GPU 최대'가 가장 많이 줄어드는 줄은 어느 것인가?

# %%
from contextlib import nullcontext

from torch.autograd.graph import save_on_cpu


def one_step(batch=2, context=nullcontext, lora=False, **checkpointing):
    model = load("EleutherAI/polyglot-ko-1.3b", dtype="float16", device_map="cuda").train()
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["query_key_value"]))
    if checkpointing:
        enable_checkpointing(model, **checkpointing)
    tokens = torch.ones(batch, 512, dtype=torch.int64).cuda()
    with context():
        loss = model(tokens, labels=tokens, use_cache=False).loss
    forward = torch.cuda.max_memory_allocated()
    loss.backward()
    return forward


compare(
    {
        "keep": one_step,
        "save_on_cpu": partial(one_step, context=save_on_cpu),
        "pinned": partial(one_step, context=partial(save_on_cpu, pin_memory=True)),
        "offload": partial(one_step, offload=True),
    },
    returned="forward",
)

# %% [markdown] lang="ko"
# **어느 줄도 줄지 않았다.** 순전파의 최대는 4.38 GiB에서 2.78 GiB로 줄었다. 그런데 역전파의 끝에는 가중치 2.48 GiB와 그레이디언트 2.48 GiB가 다 있어 네 줄 모두 4.98 GiB다. 작업의 최대는 **둘 가운데 큰 쪽**이라 그대로다.
#
# RAM에는 `save_on_cpu`가 순전파에서 줄인 1.60 GiB의 두 배가 넘게 쌓는다. 가중치까지 복사하고, 두 연산이 함께 저장한 텐서는 두 번 복사하기 때문이다. 층의 입력만 옮기면 100 MiB도 들지 않는다.
#
# 그렇다면 그레이디언트를 없애면 된다. 얼린 가중치에는 그레이디언트가 없다(LoRA, 8장). 체크포인팅만 켠 것, LoRA만 쓴 것, 둘을 함께 쓴 것을 비교한다.

# %%
compare(
    {
        "checkpointing": partial(one_step, offload=False),
        "LoRA": partial(one_step, lora=True),
        "LoRA, checkpointing": partial(one_step, lora=True, offload=False),
    },
    returned="forward",
)

# %% [markdown] lang="ko"
# 체크포인팅만 켜서는 4.98 GiB 그대로다. 최대를 정하던 그레이디언트를 없애야 4.05 GiB가 되고, 이제는 순전파 상태가 최대를 정하므로 체크포인팅이 들어 2.94 GiB가 된다. **가장 높은 순간에 있는 것을 줄여야 최대가 준다.**
#
# 순전파 상태가 최대를 정하면 오프로드도 듣는다. 배치를 8로 키우고, 옮기지 않는 체크포인팅도 함께 놓는다. GPU와 RAM을 합쳐 가장 적게 드는 줄은 어느 것인가?

# %%
compare(
    {
        "keep": partial(one_step, 8),
        "save_on_cpu": partial(one_step, 8, save_on_cpu),
        "checkpointing": partial(one_step, 8, offload=False),
        "offload": partial(one_step, 8, offload=True),
    },
    returned="forward",
)

# %% [markdown] lang="ko"
# 이번에는 셋 다 10.28 GiB를 절반쯤으로 줄인다. 그런데 체크포인팅만 켜도 5.14 GiB이고 RAM은 들지 않는다. `save_on_cpu`는 거기서 조금 더 줄이는 데 RAM 9.70 GiB를 쓴다. `offload`는 순전파의 최대를 체크포인팅보다 더 낮추었는데(3.67과 4.04 GiB) 작업의 최대는 같다. 최대가 다시 역전파에 있기 때문이다. 가중치와 그레이디언트의 4.96 GiB(2.48 GiB의 두 벌) 아래로는 어느 줄도 내려가지 못한다.
#
# > **주장 4.** "GPU가 모자라면 오프로드하면 된다"
#
# <details><summary>판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 옮긴 것이 최대를 정하던 것이고, 옮긴 만큼의 RAM이 있을 때만이다. 무료 Colab에서 텐서에 남는 RAM은 11.6 GiB로 T4의 14.64 GiB보다 작다.
#
# </details>
#
# **고치는 한 줄:** 가중치, 그레이디언트, **옵티마이저 상태**의 합이 `max_memory_allocated()`와 거의 같으면 체크포인팅도 순전파 상태의 오프로드도 듣지 않는다. 그레이디언트와 옵티마이저 상태를 줄인다(LoRA). 위의 실험에는 옵티마이저가 없었다. 합이 최대보다 훨씬 작으면 오프로드보다 먼저 `model.activation_checkpointing_enable()`이다.
#
# ## 11.10 같은 작업을 다시
#
# 이 작업에 해당하는 줄을 처음의 작업에 넣는다. 새로 만드는 모델이라 11.8절의 `device_map` 대신 `with torch.device("cuda")`로 처음부터 GPU에 만든다. 학습의 코드는 그대로다. 가장 좋은 모델은 GPU에 복사하지 않고 그때그때 파일로 저장한다.
#
# ```diff
# - model = GPT2LMHeadModel(config).cuda()
# + with torch.device("cuda"): model = GPT2LMHeadModel(config)
# - Trainer(model, arguments, compute_metrics=..., eval_dataset=...).evaluate()
# + Trainer(..., preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)).evaluate()
# - model.generate(tokens, max_new_tokens=2)
# + model.generate(tokens, max_new_tokens=2, prefill_chunk_size=128)
# - best = copy.deepcopy(model.state_dict())
# - model.load_state_dict(best), model.save_pretrained(folder)
# + model.save_pretrained(folder, max_shard_size="50MB")
# - checkpoint = torch.load("checkpoint.pt")
# + checkpoint = torch.load("checkpoint.pt", map_location="cpu", mmap=True)
# ```
#
# (프롬프트가 896이라 조각은 512가 아니라 128로 잡았다.) 연한 막대와 괄호의 값은 처음의 것이다. 점선을 넘는 단계가 남아 있는가? 먼저 찍는 것은 학습이 재개보다 얼마나 높은지다.

# %%
second_try = job(careful=True)
peaks = {phase.name: phase.gpu for phase in second_try}
print("train - resume:", human_bytes(peaks["train"] - peaks["resume"]))
draw_job(second_try, first_try)

# %% [markdown] lang="ko"
# 재개도 이제 학습을 넘지 않는다(재개는 새 프로세스에서 쟀다. 같은 노트북에서 이어 하면 앞의 예약이 조각나 더 든다). **이 작업의 최대는 이제 학습 스텝이 정한다.** 재개의 RAM이 준 것은 모델을 GPU에 바로 만들었기 때문이고, `mmap`의 페이지는 여기에서도 세지 않는다. 카드에서는 단편화까지 여유를 더 둔다.

# %%
guesses()

# %% [markdown] lang="ko"
# 기억할 것은 셋이다.
#
# - **두 벌이 되는 순간**을 찾는다. 이어 붙일 때, 복사할 때, 줄이기 전과 후가 함께 있을 때다.
# - `eval_accumulation_steps`, `map_location="cpu"`, 오프로드는 GPU의 바이트를 RAM으로 **옮긴다.** 없애는 것이 아니다.
# - 파이썬 오류 없이 끝났다면 GPU보다 **RAM**을 먼저 의심한다.
#
# 증상에서 줄을 찾는 표는 이 장의 맨 앞에 접혀 있고, 오류 메시지에서 거꾸로 찾아가는 길은 [10장](10_oom_clinic.ipynb)에 있다.

# %% [markdown] lang="ko"
# ## 11.11 더 읽을거리
#
# ### 로짓 하나는 몇 바이트인가
#
# 로짓 하나는 2바이트일까 4바이트일까? fp16 모델, 거기에 `fp16=True`(혼합 정밀도로 평가한다), fp32 모델, 거기에 `fp16=True`의 차례로 배치 하나만 평가하면서 엿본다. 그리고 둘째 설정으로 40개를 평가한다. 이번에는 몇째 배치에서 죽을까?

# %%
dtypes = []


def peek(logits, labels):
    dtypes.append(str(logits.dtype))
    return logits.argmax(-1)


for options in ({}, {"fp16": True}, {"dtype": "float32"}, {"dtype": "float32", "fp16": True}):
    attempt(partial(evaluate, 1, preprocess=peek, **options))
print(dtypes)
compare({"40 samples, fp16=True": partial(evaluate, 40, fp16=True)})

# %% [markdown] lang="ko"
# 모델이 16비트라도 `fp16=True`나 `bf16=True`를 켜면 로짓은 **fp32**다. Accelerate가 `autocast`의 출력을 fp32로 되돌려 주기 때문이다(`convert_outputs_to_fp32`). fp16 모델에 LoRA를 붙여 `fp16=True`로 학습할 때가 그렇다. 5.80 GiB일 로짓이 두 배(11.59 GiB)가 되고, 이번에는 셋째 배치에서 셋의 몫인 6.96 GiB를 달라다가 죽는다.
#
# ### 죽기 직전의 최대
#
# 11.1절의 최대 13.69 GiB는 그 직전, 여섯째 배치의 순전파가 손실을 계산할 때의 것이다. 배치 하나의 평가 6.74 GiB(11.1절의 `no metric`)에 모은 로짓 5.80 GiB와 **앞 배치의 로짓** 1.16 GiB를 더한 것이다. `Trainer`의 반복문 안의 이름 `logits`가 다음 로짓이 나올 때까지 앞의 것을 붙들기 때문이다(10.4절). 둘째 표의 12.54 GiB도 다섯째 배치의 순전파에서 6.74 + 4.64 + 1.16 GiB다.
#
# ### 옵티마이저 상태를 오프로드하면
#
# 옵티마이저 상태를 오프로드하면(ZeRO-Offload) 파라미터마다 fp32 가중치, 그레이디언트, 두 상태, 곧 적어도 16바이트가 RAM에 든다([DeepSpeed의 문서](https://deepspeed.readthedocs.io/en/stable/memory.html)). 10억 파라미터에 14.9 GiB이니 무료 Colab에는 들어가지 않는다.
#
# ### 체크포인팅을 켠 학습과 평가
#
# 학습에 체크포인팅(5장)을 켜면 11.2절의 차이가 줄어든다. 배치를 하나씩 키운다.

# %%
rows = {f"train {n}": partial(train, n) for n in (5, 6, 7)}
rows |= {f"train {n}, checkpointing": partial(train, n, check=True) for n in (12, 13, 14, 15)}
rows |= {f"no_grad {n}": partial(three, n) for n in (17, 18, 19)}
compare(rows, ram=False)

# %% [markdown] lang="ko"
# 같은 것을 `expandable_segments`를 켜고 실행한다.

# %%
compare(rows, ram=False, settings=pages)

# %% [markdown] lang="ko"
# 기본 설정에서는 학습 5, 체크포인팅을 켠 학습 12, 평가 17까지다. 단편화(10.5절)를 없애면 6, 14, 18까지다. 체크포인팅이 없으면 평가가 학습의 세 배(기본 설정 3.4배), 켜면 1.3~1.4배다. 켠 뒤에는 학습의 최대도 로짓이 정하므로, 차이는 역전파가 더 만드는 그레이디언트다. 13에서 요청한 3.77 GiB는 13 × 512 × 151,936 × 4바이트, 로짓의 fp32 그레이디언트다. `per_device_eval_batch_size`의 기본값은 학습과 상관없이 8이다.
#
# ### 평가가 끝난 뒤
#
# 평가를 마치고 학습으로 돌아오자마자 죽었다는 이슈도 있다([axolotl #1813](https://github.com/axolotl-ai-cloud/axolotl/issues/1813)). 평가는 무엇을 남기는가? 학습 두 스텝, 평가 한 배치, 학습 한 스텝을 하고, `empty_cache()`를 부른 뒤 한 스텝을 더 학습한다. 그때마다 살아 있는 텐서와 할당자가 예약한 양을 적는다. `nvidia-smi`의 값은 예약한 양에 CUDA 컨텍스트를 더한 것이다(3.10절).


# %%
def around_an_evaluation():
    model = load("Qwen/Qwen2.5-0.5B", dtype="float16", device_map="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seen = [f"{'':12} {'allocated':>9} {'reserved':>10}"]

    def note(name):
        held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        seen.append(f"{name:12} {human_bytes(held):>9} {human_bytes(reserved):>10}")

    def run(name, batch, length, train=True):
        tokens = torch.ones(batch, length, dtype=torch.int64).cuda()
        with torch.set_grad_enabled(train):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        if train:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        note(name)

    train = ("train", 4, 320)
    for step in (train, train, ("evaluate", 8, 512, False), train):
        run(*step)
    torch.cuda.empty_cache()
    note("empty_cache")
    run(*train)
    return seen


print(*attempt(around_an_evaluation).returned, sep="\n")

# %% [markdown] lang="ko"
# 살아 있는 텐서는 늘 2.80 GiB, 가중치와 옵티마이저 상태 둘이다. 평가가 남긴 것은 텐서가 아니라 **예약**이다. 8.17 GiB이던 것이 13.97 GiB가 되고, 학습으로 돌아와도 줄지 않는다. `empty_cache()`로 돌려주면 3.97 GiB가 되고, 다음 스텝은 7.97 GiB면 된다.
#
# 이 프로그램은 죽지 않는다. 평가 뒤의 학습 스텝(넷째 줄)은 쥐고 있던 자리를 다시 썼다. 자리가 모자랐다면 할당자가 통째로 빈 세그먼트를 스스로 돌려주었을 것이다. 다만 학습이 평가가 남긴 큰 세그먼트에 작은 텐서를 놓고 나면, 그 세그먼트는 통째로 비지 않아 돌려줄 수 없게 된다(10.5절의 단편화다. 여기서 재현하지는 못했다). 그래서 `empty_cache()`는 학습으로 **돌아가기 전에** 부른다. `Trainer`라면 `TrainerCallback`의 `on_evaluate(self, *args, **kwargs)`에서 부르고, 그 콜백을 `Trainer(..., callbacks=[...])`에 넣는다(`torch_empty_cache_steps`는 학습 몇 스텝마다 부르는 것이다). `expandable_segments`를 켜도 된다.


# ### 동적 캐시가 한 토큰을 붙일 때
#
# 11.4절의 동적 캐시가 붙이면서 더 쓰는 양을 따로 센다. 프롬프트를 읽은 뒤 최대를 지우고, 한 토큰을 더 만드는 동안 늘어난 최대를 본다. 층 하나의 키는 16,384 × 8 × 128 × 2바이트, 32 MiB다.

# %%
from transformers import DynamicCache, StaticCache


def one_more_token(make):
    model = load("meta-llama/Llama-3.1-8B", dtype="float16", device_map="cuda")
    cache, tokens = make(model.config), torch.ones(1, 16384, dtype=torch.int64).cuda()
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(tokens[:, :1], past_key_values=cache, use_cache=True)
    return torch.cuda.max_memory_allocated() - before


static = partial(StaticCache, max_cache_len=16400)
compare(
    {
        "dynamic": partial(one_more_token, lambda config: DynamicCache(config=config)),
        "static": partial(one_more_token, static),
    },
    "RTX 4090",
    returned="grown",
)

# %% [markdown] lang="ko"
# 두 벌이 되는 것은 **층 하나의 키나 값**뿐이다. "동적 캐시는 메모리를 두 배로 쓴다"는 말은 텐서로 셀 때 틀리다(할당자가 예약한 양은 조각이 남아 더 클 수 있다). 정적 캐시는 이것도 쓰지 않지만, 쓰지 않은 자리까지 처음부터 잡는다.
#
# ### 창이 있는 층
#
# gemma-3-1b는 26층 가운데 22층이 앞의 512토큰만 본다(sliding window). 프롬프트 8,192토큰을 읽은 직후와 한 토큰을 더 만든 뒤의 캐시를 센다. 어느 쪽이 클까?


# %%
def sliding():
    model = load("google/gemma-3-1b-pt", dtype="float16", device_map="cuda")
    tokens, sizes = torch.ones(1, 8192, dtype=torch.int64).cuda(), []
    with torch.no_grad():
        out = model(tokens, use_cache=True, logits_to_keep=1)
        sizes.append(cache_bytes(out.past_key_values))
        model(tokens[:, :1], past_key_values=out.past_key_values, use_cache=True)
    return [*sizes, cache_bytes(out.past_key_values)]


read, after = attempt(sliding, "A100-80GB").returned
gemma = load_config("google/gemma-3-1b-pt")
print(human_bytes(read), human_bytes(after), human_bytes(kv_bytes(gemma, 8193)))

# %% [markdown] lang="ko"
# 셋째가 식이다(창이 있는 층은 창만큼만 센다). 읽은 직후는 다섯 배 가까이 크다. 캐시가 마지막 511토큰을 **잘라 내지만**, 자른 조각(slice)이 원래 텐서를 붙들고 있기 때문이다. 다음 토큰이 새 텐서를 만들어야 풀려난다. 긴 프롬프트를 읽는다면 캐시의 최대는 앞의 값이다.
#
# **양자화 캐시**(`cache_implementation="quantized"`)에는 optimum-quanto나 HQQ가 필요하다. 이 강의의 환경에는 없어 세지 않았다. 패널의 8비트와 4비트는 식이고, 블록의 스케일과 아직 양자화하지 않은 최근 토큰은 세지 않았다.
#
# ### 고정 메모리는 2의 거듭제곱이다
#
# 65 MiB를 고정하면 RAM이 얼마나 늘까?

# %%
import virtual_gpu

with virtual_gpu.cuda("T4") as card:
    for size in (64, 65):
        held = card.host.meter.current_bytes
        pinned = torch.empty(size * 2**20, dtype=torch.uint8).pin_memory()
        print(size, human_bytes(card.host.meter.current_bytes - held))
        del pinned

# %% [markdown] lang="ko"
# 65 MiB가 128 MiB가 되었다. 큰 버퍼를 손수 고정한다면 2의 거듭제곱에 맞춘다.
#
# 11.4절의 5.81 GiB도 이것이다. 층 하나의 키는 16,384 × 8 × 128 × 2바이트, 32 MiB다. 32 MiB를 잡았다가, 토큰이 하나 붙어 그것을 넘는 순간 64 MiB를 더 잡는다. 둘을 더한 96 MiB가 31층(GPU에 남은 한 층을 뺀 것)의 키와 값마다 있으면 5.81 GiB다.
#
# ### 파일의 형식과 RAM
#
# `low_cpu_mem_usage=True`를 적으라는 글이 많다. transformers 4의 앞쪽 판에서는 이것을 켜야 빈 모델을 만들고 파일에서 바로 채웠고, 꺼져 있으면 무작위 가중치로 만든 모델과 파일에서 읽은 것이 RAM에 두 벌이었다. **transformers 5에서는 늘 그렇게 하고, 이 인자는 받아서 버린다**(`modeling_utils.py`). `dtype`도 바뀌었다. 적지 않으면 `config.json`에 적힌 자료형이다(`"auto"`). transformers 4의 기본값은 fp32였다.
#
# pickle로 된 옛 파일(`pytorch_model.bin`)도 zip 형식이면 transformers 5가 `mmap=True`로 연다(`modeling_utils.py`의 `load_state_dict`). zip이 아닌 더 옛 형식이거나, `torch.load`를 `mmap` 없이 직접 부르면 통째로 RAM에 읽는다. safetensors는 텐서 하나씩 읽을 수 있다. 자료형을 바꾸지 않고 CPU에 두면 파일의 페이지를 그대로 보여 줄 뿐이라(mmap) RAM이 거의 들지 않는다.
#
# ### GPU가 여럿일 때: 저장, 재개, 불러오기
#
# 설치된 소스를 읽은 것이고 실행하지 않았다. RAM은 프로세스마다 든다. CPU에 fp32로 불러오는 줄이라면 프로세스의 수를 곱한다.
#
# - FSDP의 `FULL_STATE_DICT`는 모델 전체를 rank 0의 **RAM에** 모은다(accelerate 1.15의 `offload_to_cpu=True, rank0_only=True`). RAM이 모자라면 `fsdp_state_dict_type: SHARDED_STATE_DICT`로 조각을 저장하고, 나중에 `accelerate merge-weights`로 합친다.
# - DeepSpeed ZeRO-3의 체크포인트는 저절로 조각이고, 나중에 `zero_to_fp32.py`로 합친다. `stage3_gather_16bit_weights_on_model_save: true`로 바꾸면 층마다 모아 rank 0의 RAM에 16비트 모델 하나를 만든다.
# - `Trainer`는 DDP에서 옵티마이저 상태를 지금도 각자의 GPU로 바로 읽는다. CPU에 프로세스의 수만큼 쌓이는 것을 피하려는 것이라고 소스에 적혀 있다. FSDP와 DeepSpeed는 저마다의 방법으로 읽는다.
# - 내 코드로 DDP를 쓴다면, rank 0이 저장한 텐서는 `cuda:0`에 있던 것이다. `map_location` 없이 읽으면 **모든 프로세스의 사본이 GPU 0에** 쌓인다. `map_location=f"cuda:{local_rank}"`나 `"cpu"`를 적는다.
# - DDP는 `device_map={"": local_rank}`로 각자의 GPU에 바로 올린다. QLoRA도 같다. `"auto"`는 한 프로세스가 카드를 다 차지하려 하므로 쓰지 않는다.
# - ZeRO-3에는 `device_map`을 적지 않는다(적으면 오류다). transformers 5는 rank 0에서만 값을 읽어 조각으로 나눈다. 4비트 모델은 그러지 않는다.
# - FSDP는 `fsdp_cpu_ram_efficient_loading: true`를 켠다. accelerate가 rank 0의 값을 나머지에 보낸다. 여기에서도 4비트 모델은 빠진다.
#
# ### `DataLoader`의 일꾼
#
# `DataLoader`의 일꾼(worker)도 RAM을 쓴다. 프로세스 하나에, 미리 만들어 둔 배치 `prefetch_factor`(기본값 2)개씩이다. 텍스트 배치는 작아서 문제가 되지 않지만, 이미지나 긴 오디오라면 `num_workers` × 2 × 배치의 크기를 센다.
#
# 데이터셋을 파이썬의 리스트로 들고 있으면, 일꾼은 처음에는 그것을 부모와 함께 쓴다. 그러나 원소를 읽기만 해도 참조 횟수가 바뀌어 그 페이지가 일꾼마다 복사된다. 크다면 NumPy 배열이나 `datasets`(Arrow)에 담는다([Demystify RAM Usage](https://ppwwyyxx.com/blog/2022/Demystify-RAM-Usage-in-Multiprocess-DataLoader/)).
