"""Write docs/cheat_sheet.md: out of memory, what to try and in which order. Every number is computed here.

python tools/cheat_sheet.py
"""

from __future__ import annotations

import re
from pathlib import Path

from helpers import predict_memory, shard_ledger
from virtual_gpu.changes import CHANGES
from virtual_gpu.drawing.labels import phase_label
from virtual_gpu.report import MemoryReport
from virtual_gpu.units import GiB

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "cheat_sheet.md"
MODEL = "EleutherAI/polyglot-ko-1.3b"
BASE = {"model_id": MODEL, "gpu": "T4", "batch_size": 16, "sequence_length": 256}
PRECISIONS = ("auto", "mixed_fp16")
RANKS = 4
FRAGMENTED = 13  # a batch whose tensors fit a T4 and whose segments do not
CHAPTERS = {str(int(path.name[:2])): f"{path.stem}.ipynb" for path in (ROOT / "notebooks" / "src").glob("??_*.py")}

# What to try, in the order of what it costs; the setting that does it; its price; the chapter that explains it.
# CODE has the same steps as one writes them.
CHECKPOINTED = {"gradient_checkpointing": True}
STEPS = [
    ("아무것도 하지 않음", {}, "", "3장"),
    (
        "배치를 4로 줄이고 네 번 누적",
        {"batch_size": 4, "gradient_accumulation_steps": 4},
        "작은 배치는 GPU를 덜 채운다",
        "4장",
    ),
    ("그레이디언트 체크포인팅", CHECKPOINTED, "순전파를 한 번 더 한다", "5장"),
    (
        "체크포인팅 + `adamw_fused`",
        {**CHECKPOINTED, "optimizer": "adamw_fused"},
        "위와 같다. 스텝의 임시 텐서가 없어진다",
        "3장, 5장",
    ),
    ("길이를 128로", {"sequence_length": 128}, "긴 글을 잘라야 한다", "3장"),
    (
        "체크포인팅 + 8비트 AdamW",
        {**CHECKPOINTED, "optimizer": "adamw_8bit", "fp32_embedding_state": True},
        "옵티마이저 상태를 8비트로 양자화한다(Trainer처럼 임베딩의 것은 fp32)",
        "2장, 3장",
    ),
    ("LoRA", {"peft": "lora"}, "가중치의 변화량이 rank로 제한된다", "8장"),
    ("LoRA + 체크포인팅", {"peft": "lora", **CHECKPOINTED}, "둘 다", "5장, 8장"),
    ("QLoRA + 체크포인팅", {"peft": "qlora", **CHECKPOINTED}, "층마다 4비트를 풀어 쓰는 연산이 더 든다", "2장, 8장"),
    (
        "QLoRA + 체크포인팅 + 손실 나누기",
        {"peft": "qlora", **CHECKPOINTED, "fused_lm_head": True},
        "위와 같다. 로짓을 한 번 더 계산한다",
        "3장, 9장",
    ),
]
# A vocabulary of 151,936 words: what logits take, and a loss in tiles does not.
WORDY = {
    "model_id": "Qwen/Qwen3-4B", "gpu": "T4", "batch_size": 4, "sequence_length": 512, "peft": "qlora",
    "precision": "mixed_fp16", "attention": "sdpa_repeat_kv", **CHECKPOINTED,
}  # fmt: skip
# A long text: what the inputs of 40 blocks take.
LONG = WORDY | {
    "model_id": "Qwen/Qwen3-14B", "batch_size": 1, "sequence_length": 8192, "precision": "autocast_fp16",
    "fused_lm_head": True, "rest_in_fp32": False,
}  # fmt: skip

# Grouped heads on a T4: what the matrices of length × length take that the math kernel makes.
GROUPED = {
    "model_id": "Qwen/Qwen2.5-1.5B", "batch_size": 1, "sequence_length": 2048, "precision": "autocast_fp16",
    "peft": "lora", "lora_rank": 16, "lora_targets": "all-linear", "lora_dropout": 0.0,
}  # fmt: skip

# name of the step → TrainingArguments, and a loop of one's own
CODE = {
    name: (CHANGES[key].trainer, CHANGES[key].loop)
    for name, key in {
        "배치를 4로 줄이고 네 번 누적": "accumulation",
        "그레이디언트 체크포인팅": "checkpointing",
        "`adamw_fused`": "fused",
        "길이를 128로": "shorter",
        "8비트 AdamW": "eight_bit",
        "LoRA": "lora",
        "QLoRA": "qlora",
        "혼합 정밀도(T4)": "mixed",
        "손실 나누기": "fused_head",
        "체크포인트를 RAM에": "offload",
    }.items()
}

PAGE = """\
# 처방 한 장: CUDA out of memory

<!-- tools/cheat_sheet.py가 계산해서 쓴다. 손으로 고치지 않는다. -->

오류 메시지가 손에 있으면 먼저 `virtual-gpu doctor error.txt`에 traceback을 통째로 준다(10장의 패널도 같다). 프로그램이 있으면 `virtual-gpu run --gpu T4 train.py`가 GPU 없이 실행해 보고, 모자라면 아래의 것들을 하나씩, 또 함께 바꾸어 들어가는 것을 찾아 적을 줄을 출력한다(9장의 9.10절). 다른 물음은 [질문에서 시작하기](questions.md)에서 찾는다. 여기에 없는 방법과 적을 줄은 [레버 한 장](levers.md)에 있다. `Killed`로 끝났거나 세션이 말없이 끊겼다면 이 장이 아니라 RAM이다. 11장의 11.8절로 간다.

오류를 만났을 때 **위에서부터** 하나씩 해 본다. 잃는 것이 적은 순서다. 절약은 polyglot-ko-1.3b를 길이 256, 배치 16으로 학습할 때 두 번째 스텝까지의 최대 메모리를
가상 T4(한도 {capacity})에서 센 것이고, 실제 GPU에서 측정한 것이 아니다. 모델과 길이가 다르면 절약도 다르니 같은 실험을 자기 설정으로 다시 해 본다.

## 먼저 볼 것

1. **최대가 어디에 있는가.** `virtual-gpu run --gpu T4 train.py`나 `virtual_gpu.predict(...)`의 보고서가 말해 준다(강의의 노트북에서는 `gpu_memory_experiment(...)`와 `predict_memory(...)`). 최대가 **스텝**에 있으면 옵티마이저를, **역전파**에 있으면 순전파 상태를 줄인다.
   엉뚱한 쪽을 줄이면 아래 표의 어떤 줄처럼 거의 변하지 않는다.
2. **남은 것이 있는가.** 앞서 난 오류가 모델을 붙들고 있을 수 있다. `del model, optimizer; gc.collect(); torch.cuda.empty_cache()`를 실행하거나(강의의 노트북에서는 `cleanup()`) 커널을 다시 시작한다. OOM 뒤에 `CheckpointError`가 나는 것도 같은 까닭이다(PyTorch 2.12까지).
3. **다른 프로세스가 있는가.** `nvidia-smi`로 본다.
4. **단편화인가.** 오류 메시지에서 "Tried to allocate"(T), "is free"(F), "reserved by PyTorch but unallocated"(R)를 읽는다.
   - T가 F + R보다 크면 단편화가 아니다. 빈자리를 다 모아도 모자란다. 아래 표로 간다.
   - T가 F + R 이하이면 빈자리를 모았을 때 **이 요청은** 통과한다. 환경 변수 `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`를 켜고 다시 시작한다. 이 이름은 어느 버전이나 읽는다. 새 이름 `PYTORCH_ALLOC_CONF`는 PyTorch 2.9부터이고(둘 다 있으면 새 이름이 이긴다), 2.8까지는 오류 없이 무시된다. 리눅스에서는 잃는 것이 거의 없다(윈도우에서는 쓸 수 없고, CUDA IPC를 쓰는 프로그램은 가린다).
   - 그다음 요청까지 통과한다는 뜻은 아니다. 위의 모델을 배치 {fragmented}으로 학습하면 텐서는 {tensors}뿐인데 T4에 들어가지 않고, 켜면 {expandable}를 예약하고 들어간다. 배치 16도 첫 OOM은 이 조건에 맞지만, 켜도 {not_enough}를 예약해야 해서 들어가지 않는다(3장).

## 순서대로

GiB는 필요한 최대 메모리, 괄호 안은 출발점에서 줄어든 비율이다. **굵은 글씨**는 T4에 들어간다.

| | 해 볼 것 | 순수 fp16 | 혼합 정밀도(fp16) | 대가 | 설명 |
|---|---|---|---|---|---|
{rows}

- 순수 fp16에 AdamW를 쓰면 메모리에는 들어가도 학습이 무너지거나 느리다. 어떻게 되는지는 구현(`foreach`, `fused`)에 따라 다르다(3장). 전체 미세 조정에서 믿을 것은 혼합 정밀도 열이다.
- `eager` 어텐션은 출발점보다 더 든다. 순수 fp16 {eager_fp16}, 혼합 정밀도 {eager_mixed}. 먼저 확인한다.
- 혼합 정밀도의 전체 미세 조정에서는 체크포인팅을 켜도 최대가 **{mixed_phase}**에 남는다. 순전파 상태보다 옵티마이저의 임시 텐서가 커서, 배치나 길이만 줄이면 거의 그대로다.
- QLoRA만 켜고 체크포인팅을 끄면 순수 fp16에서 {qlora_fp16}로, LoRA의 {lora_fp16}보다 오히려 더 든다. 이유는 8장에 있다.
- **체크포인팅을 켜고도 남으면 결과를 남긴다.** 남는 메모리에 비싼 결과를 남기면 그만큼 다시 계산하지 않는다. ZeRO로 나눈 모델도 그렇다. `virtual-gpu fit --selective`가 무엇을 남길지 고르고 그 줄이 든 `train.py`를 쓴다([9장](../notebooks/ko/09_fit_your_gpu.ipynb)의 9.12절).
- **어휘가 크면 손실 나누기부터 본다.** 어휘가 151,936개인 Qwen3-4B를 QLoRA와 체크포인팅으로 4 × 512토큰씩 학습하면 {wordy}가 들고, 손실을 나누면 {fused}면 된다(혼합 정밀도, 9장). TRL 1.16의 `SFTTrainer`는 기본으로 그렇게 하고, `Trainer`는 Liger가 아는 모델(polyglot은 아니다)이면 `use_liger_kernel=True`로 비슷하게 한다. 모르는 모델이면 아래의 `FusedTrainer`를 쓴다.
- **T4에서 그룹 쿼리 모델(Llama 3, Qwen2.5, Qwen3 등)을 학습하면 한 줄을 먼저 적는다.** transformers 4.54부터 5.23까지, PyTorch 2.13까지는 패딩이 없는 배치의 어텐션이 T4에서 길이 × 길이 행렬을 만드는 math 커널로 간다. Qwen2.5-1.5B를 LoRA(rank 16, 모든 선형층, 드롭아웃 없음)로 1 × 2048토큰씩 학습하면 {squares}가 들고, 키와 값의 헤드를 되풀이하는 한 줄을 적으면 {repeated}면 된다. 줄은 아래에, 까닭은 [3장](../notebooks/ko/03_memory_decomposition.ipynb)의 3.12절에 있다.
- **QLoRA도 넘치면 `prepare_model_for_kbit_training`을 부르지 않는다.** 그 함수는 4비트가 아닌 가중치(임베딩, 출력층, 정규화)를 fp32로 바꾼다. 16비트 그대로 두면 위의 {fused}가 {rest}로 준다. TRL, axolotl, LLaMA-Factory, torchtune은 처음부터 그렇게 한다([9장](../notebooks/ko/09_fit_your_gpu.ipynb)의 9.12절).
- **T4에서 TRL로 QLoRA를 학습하면 어댑터를 fp32로 되돌린다.** TRL 1.16은 4비트로 읽은 모델의 어댑터를 bf16으로 바꾸는데, `fp16=True`의 손실 스케일링은 bf16 그레이디언트를 받지 못해 첫 갱신에서 `"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16'`으로 멈춘다. 되돌리는 줄은 아래에 있다([12장](../notebooks/ko/12_two_models.ipynb)의 12.5절).
- **글이 길면 체크포인트를 RAM에 둔다.** 체크포인팅을 켜도 남는 블록의 입력을 옮긴다(transformers 5.17부터). Qwen3-14B를 길이 8192, 배치 1의 QLoRA로 학습하면 체크포인팅, 손실 나누기, 16비트로 둔 나머지에 헤드를 되풀이하는 줄(9장의 9.12절)까지 써도 {long}인데, 옮기면 {moved}라 T4에 들어간다(누적하지 않은 텐서의 최대다. 9장의 값은 16번 누적하고 단편화까지 센 것이다). 그만큼의 RAM과 오가는 시간이 들고, 최대가 로짓이나 스텝에 있으면 듣지 않는다. TRL 1.16의 `DPOTrainer`는 기준 모델을 거칠 때마다, `GRPOTrainer`는 답을 만들 때마다 체크포인팅을 껐다 켜는데, 다시 켤 때 `offload`가 빠져 체크포인트가 GPU에 남는다. `virtual-gpu fit --save`가 쓰는 `train.py`에는 이것을 막는 줄이 있으니, 직접 쓴 스크립트에는 그 줄을 옮겨 적는다.

## 코드로는

왼쪽은 `TrainingArguments(...)`에 넣는 인자, 오른쪽은 직접 쓴 루프에 넣는 줄이다. 빈칸은 `TrainingArguments`로 정하지 않는 것이다. `Trainer`에서도 오른쪽 줄로 모델이나 데이터를 미리 만들어 넘긴다. 손실 나누기만은 미리 만들어 넘겨도 아무것도 달라지지 않으니, 표 아래의 `FusedTrainer`를 쓴다.

| 해 볼 것 | `TrainingArguments` | 직접 쓴 루프 |
|---|---|---|
{code}

`get_peft_model`과 `LoraConfig`, `prepare_model_for_kbit_training`은 peft에, `BitsAndBytesConfig`와 `AutoModelForCausalLM`은 transformers에 있다.

**`Trainer`로 손실 나누기**(TRL 1.16부터. `nn.DataParallel`에서는 쓸 수 없다). `Trainer`는 `fused_lm_head=True`를 넘기지 않으므로 `compute_loss`에서 넣는다.

```python
from transformers import Trainer
from trl.trainer import add_fused_lm_head


class FusedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        inputs = inputs if return_outputs else dict(inputs, fused_lm_head=True)
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


add_fused_lm_head(model)  # LoRA라면 get_peft_model 앞에
FusedTrainer(model, arguments, train_dataset=dataset).train()
```

**T4의 그룹 쿼리 모델.** 모델을 부르기 전에 적는다.

```python
from transformers.integrations import sdpa_attention

sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False
```

**T4에서 TRL의 QLoRA.** 트레이너를 만든 뒤, `trainer.train()` 앞에 적는다.

```python
for parameter in trainer.model.parameters():
    if parameter.requires_grad:
        parameter.data = parameter.data.float()
```

`virtual-gpu fit --save DIR`이 쓰는 `train.py`에는 이 줄들이 계획대로 들어 있다.

## 한참 뒤에 난다면

위의 숫자는 모든 배치의 길이가 같을 때의 것이다. 잘 돌다가 나는 OOM은 대개 다음 가운데 하나다. 어느 것인지 가르는 법과 줄을 찾는 법은 10장에 있다.

| 언제 | 까닭 | 해 볼 것 |
|---|---|---|
| 아무 때나, 가끔 | 가장 긴 글이 든 배치 | 학습을 시작할 때 가장 긴 배치를 두 번(옵티마이저의 상태는 첫 스텝에서 생긴다) 먼저 돌려 본다. `max_length`로 자르거나 토큰 수의 예산으로 묶는다. 비슷한 길이끼리 묶기(`group_by_length`)는 패딩만 줄이고 최대는 줄이지 않는다 |
| 평가할 때 | `Trainer`가 로짓을 모두 GPU에 모아 둔다 | `preprocess_logits_for_metrics`로 필요한 것만 남기거나, 지표가 없으면 `prediction_loss_only=True`. `eval_accumulation_steps=1`은 RAM으로 옮길 뿐이다. 그래도 죽으면 `per_device_eval_batch_size`를 줄인다(11장) |
| 생성할 때 | KV 캐시: 2 × 층 × KV 헤드 × 헤드 차원 × 길이 × 배치 × 2바이트(16비트일 때) | 배치나 `max_new_tokens`를 줄인다 |
| 조금씩 늘다가 | 역전파하지 않은 손실(검증), 로짓, 훅의 출력을 목록에 모은다 | `with torch.no_grad():`, `.item()`, `.cpu()` |
| 이미지를 넣으면 | 사진 한 장이 글 수천 토큰이다. 정답이 없는 이미지 토큰의 로짓, 비전 인코더의 순전파 상태 | `max_pixels`를 낮추고, 내 루프라면 `logits_to_keep`, 어댑터는 언어 모델에만. T4에서 1,200만 픽셀 사진을 학습하는 차례는 13장의 13.3절 |
| SFT에서 DPO나 GRPO로 바꾼 뒤 | 기준 모델 한 벌, 통째로 만든 로짓, 만든 답의 KV 캐시, 답을 만드는 엔진 | 죽은 단계마다 고칠 줄이 다르다. 12장의 12.10절에 표가 있다. `virtual-gpu fit --model 모델 --gpu T4 --objective dpo`(또는 `grpo`)가 들어가는 계획을 찾는다 |
| GRPO에 `use_vllm=True`를 적은 뒤 | 시작할 때 몫만큼 잡는 엔진. 재우지 않으면 학습하는 동안에도 있다 | 몫(`vllm_gpu_memory_utilization`)을 줄이고 `vllm_max_model_length`에 실제로 쓸 길이를 적는다. 너무 줄이면 시작하지 못한다. 모자라면 `vllm_enable_sleep_mode=True`(12장의 12.7절). 얼마로 적을지는 `virtual-gpu fit --model 모델 --gpu T4 --objective grpo --vllm colocate`가 정한다 |
| FSDP2로 나눈 DPO나 GRPO의 기준 모델에서 | TRL 1.16은 기준 모델을 블록마다가 아니라 통째로 모은다 | GRPO는 `beta=0`(TRL의 기본값). DPO는 `precompute_ref_log_probs=True`로 줄지만, 미리 계산할 때 한 번은 통째로 모은다. 어댑터를 학습하면 기준 모델이 따로 없다(12장의 12.9절) |
| `Trainer`와 FSDP2로 누적할 때 | 마지막 마이크로 배치까지 그레이디언트를 나누지 않고 통째로 둔다(16비트로 파라미터 하나에 2바이트) | `accelerator_config`의 `gradient_accumulation_kwargs`에 `sync_each_batch`를 `True`로 적는다. 마이크로 배치마다 보내는 대신 자기 몫만 둔다 |
| OOM을 잡아 다시 하면 | 예외가 앞 시도의 텐서를 붙들고 있다 | `except` 밖에서 다시 한다 |
| 같은 셀을 다시 실행하면 | 앞의 모델과 오류가 메모리를 붙들고 있다 | `del model, optimizer; gc.collect(); torch.cuda.empty_cache()`(강의의 노트북에서는 `cleanup()`), 안 되면 커널을 다시 시작한다 |

## GPU가 {ranks}개라면

같은 모델을 혼합 정밀도(파라미터 하나에 16바이트)로 학습할 때 GPU 하나가 들고 있는 파라미터, 그레이디언트, 옵티마이저 상태다. 순전파 상태는 들어 있지 않다. 데이터 병렬과 1단계는 그레이디언트를 보낼 묶음에 한 벌 더 두며, DDP의 `gradient_as_bucket_view=True`로 그만큼(2.48 GiB) 줄일 수 있다. 6장에서 설명한다.

| ZeRO 단계 | GPU 하나에 | 줄어든 비율 |
|---|---|---|
{stages}

가중치조차 한 장에 안 들어가는데 프로세스를 여럿 띄우기 어려우면(노트북, Kaggle의 T4 두 장) 층을 카드에 나누어 올린다(`device_map`). 한 번에 한 장만 일하므로 빨라지지는 않는다. `virtual-gpu fit --device-map`이 어떻게 나눌지 찾는다(7장의 7.1절).

## 그래도 안 되면

- 모델과 GPU, 길이, 배치를 주면 들어가는 설정을 모두 찾아 순위를 매기고, 없으면 가장 작은 변화를 알려 주는 **플래너**에 묻는다. 터미널이나 9장의 패널에서 쓴다.
  `virtual-gpu fit --model EleutherAI/polyglot-ko-5.8b --gpu T4 --length 512 --batch 16`
- 더 작은 모델을 고르거나 더 큰 GPU를 빌린다. 얼마나 모자라는지는 `virtual_gpu.predict(...)`(강의의 노트북에서는 `predict_memory(...)`)의 `needed_bytes`가 말해 준다.
- RAM이 넉넉하면 **학습 상태를 CPU에** 둔다(FSDP2의 `CPUOffloadPolicy`, `accelerate.yaml`의 `fsdp_offload_params: true`). 혼합 정밀도의 전체 미세 조정이라면 RAM이 파라미터마다 스텝에 16바이트가 넘게, 저장할 때 4바이트가 더 든다(가중치까지 bf16이면 그 절반). 얼마인지는 `virtual-gpu fit --cpu-offload`가 센다(9장의 9.6절).
- 그 밖의 CPU로 옮기기(offload)도 RAM을 쓰고, 최대가 다른 곳에 있으면 GPU를 아끼지 못한다(11장). 느려지는 시간은 이 강의에서 재지 않았다.
"""


def page() -> str:
    """The page's text."""
    start = {precision: predict_memory(**BASE, precision=precision) for precision in PRECISIONS}
    held = [shard_ledger(MODEL, RANKS, stage).largest.total for stage in range(4)]
    stages = [
        f"| {stage or '없음(데이터 병렬)'} | {_gib(size)} | {_less(size, held[0])} |" for stage, size in enumerate(held)
    ]
    tight = {**BASE, "batch_size": FRAGMENTED}
    full = predict_memory(**tight)
    page = PAGE.format(
        fragmented=FRAGMENTED,
        tensors=_gib(full.needed_bytes),
        expandable=_gib(_reserved(full, full.capacity_bytes)),
        not_enough=_gib(_reserved(start["auto"])),
        code="\n".join(map(code_row, CODE)),
        capacity=_gib(start["auto"].capacity_bytes),
        rows="\n".join(map(row, range(len(STEPS)))),
        stages="\n".join(stages),
        ranks=RANKS,
        eager_fp16=_needed(attention="eager"),
        eager_mixed=_needed(attention="eager", precision="mixed_fp16"),
        mixed_phase=phase_label(predict_memory(**BASE, precision="mixed_fp16", **CHECKPOINTED).peak_phase),
        qlora_fp16=_needed(peft="qlora"),
        lora_fp16=_needed(peft="lora"),
        wordy=_needed(**WORDY),
        fused=_needed(**WORDY, fused_lm_head=True),
        squares=_needed(**GROUPED),
        repeated=_needed(**GROUPED, attention="sdpa_repeat_kv"),
        long=_needed(**LONG),
        moved=_needed(**LONG, offload_checkpoints=True),
        rest=_needed(**WORDY | {"precision": "autocast_fp16"}, fused_lm_head=True, rest_in_fp32=False),
    )
    if full.fits or _reserved(start["auto"]) <= full.capacity_bytes:
        raise ValueError(f"batch {FRAGMENTED} fits as it is, or 16 in expandable segments: other examples are needed")
    return _linked(page)


def row(number: int) -> str:
    """The line of the table for the step of that number."""
    what, setting, price, chapter = STEPS[number]
    cells = " | ".join(_cell(setting, precision) for precision in PRECISIONS)
    return _linked(f"| {number or ''} | {what} | {cells} | {price} | {chapter} |")


def code_row(name: str) -> str:
    """A step's line of the table of code."""
    arguments, loop = ("<br>".join(f"`{line}`" for line in code.splitlines()) for code in CODE[name])
    return f"| {name} | {arguments} | {loop} |"


def _reserved(report: MemoryReport, capacity: int | None = None) -> int:
    return report.timeline.trace.reserved_peak(capacity, expandable_segments=True)


def _linked(text: str) -> str:
    return re.sub(r"(?<!\[)\b(\d{1,2})장", lambda found: f"[{found[0]}](../notebooks/ko/{CHAPTERS[found[1]]})", text)


def _cell(setting: dict, precision: str) -> str:
    start, report = (predict_memory(**{**BASE, **more}, precision=precision) for more in ({}, setting))
    text = (
        f"{_gib(report.needed_bytes)} ({_less(report.needed_bytes, start.needed_bytes)})"
        if setting
        else _gib(report.needed_bytes)
    )
    return f"**{text}**" if report.fits else text


def _needed(**setting) -> str:
    return _gib(predict_memory(**{**BASE, **setting}).needed_bytes)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GiB:.2f} GiB"


def _less(nbytes: float, start: float) -> str:
    return f"−{(1 - nbytes / start) * 100:.0f}%" if nbytes < start else ""


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
    print(f"wrote {TARGET}")
