"""What one can change: the same line as Trainer's argument and in a loop of one's own, and how to try it.

The doctor proposes them, `virtual-gpu run` makes some of them in a program, tools/cheat_sheet.py prints the lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from .allocator_settings import VARIABLES
from .language import tr
from .models.attention import REPEAT_KV


@dataclass(frozen=True)
class Change:
    """One change. trainer: arguments of TrainingArguments; loop: lines of Python; shell: a line of the terminal.

    subclass: lines for who has a Trainer, where no argument of it does that.
    environment, options: of the command that tries it on a virtual card; options None: a virtual card does not show it.
    """

    trainer: str = ""
    loop: str = ""
    shell: str = ""
    environment: str = ""
    options: tuple[str, ...] | None = ()
    subclass: str = ""

    @property
    def lines(self) -> list[str]:
        """What to write, behind whose it is: the Trainer's argument, lines of PyTorch, a line of the terminal."""
        lines = []
        for whose, text in (("Trainer: ", self.trainer or self.subclass), ("PyTorch: ", self.loop)):
            lines += [f"{' ' * len(whose) if at else whose}{line}" for at, line in enumerate(text.splitlines())]
        return [*lines, *([f"$ {self.shell}"] if self.shell else [])]


def expandable(variable: str = VARIABLES[-1]) -> Change:
    """Expandable segments by that variable: every PyTorch reads the older, those up to 2.8 ignore the newer."""
    setting = f"{variable}=expandable_segments:True"
    return Change(shell=f"export {setting}", environment=setting)


BLOCK = "Block"  # the class of a model's blocks, which a run may know

CHANGES = {
    "accumulation": Change(
        "per_device_train_batch_size=4, gradient_accumulation_steps=4",
        "(loss / 4).backward()\nif step % 4 == 3: optimizer.step(); optimizer.zero_grad()",
    ),
    "checkpointing": Change(
        "gradient_checkpointing=True",
        "model.gradient_checkpointing_enable()\nmodel.train()",
        options=("--change", "checkpointing"),
    ),
    "diffusers_checkpointing": Change(
        "", "model.enable_gradient_checkpointing()", options=("--change", "checkpointing")
    ),
    "block_checkpointing": Change(
        "",
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing\n"
        f"apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, {BLOCK}))",
        options=("--change", "block_checkpointing"),
    ),
    "offload": Change(
        'gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False, "offload": True}',
        'model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)',
    ),
    "fused": Change(
        'optim="adamw_torch_fused"',
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)",
        options=("--change", "fused"),
    ),
    "shorter": Change("", 'tokenizer(texts, truncation=True, max_length=128, padding=True, return_tensors="pt")'),
    "eight_bit": Change(
        'optim="adamw_bnb_8bit"',
        "import bitsandbytes as bnb\noptimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-5)",
        options=("--change", "eight_bit"),
    ),
    "lora": Change(
        "",
        'model = get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM"))\nmodel.enable_input_require_grads()',
        options=("--change", "lora"),
    ),
    "qlora": Change(
        "",
        'four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
        "bnb_4bit_compute_dtype=torch.float16)\n"
        "model = AutoModelForCausalLM.from_pretrained(name, quantization_config=four_bit)\n"
        "model = prepare_model_for_kbit_training(model)",
        options=("--change", "qlora", "--change", "lora"),
    ),
    "mixed": Change(
        "fp16=True",
        'scaler = torch.amp.GradScaler("cuda")\n'
        'with torch.autocast("cuda", dtype=torch.float16): loss = model(**batch).loss\n'
        "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
    ),
    "expandable": expandable(),
    "other_processes": Change(shell="nvidia-smi", options=None),
    "one_card_a_rank": Change(loop='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', options=None),
    "restart": Change(loop="del model, optimizer\ngc.collect(); torch.cuda.empty_cache()", options=None),
    "outside_handler": Change(
        loop="failed = False\ntry:\n    step(batch_size)\nexcept torch.OutOfMemoryError:\n    failed = True\n"
        "if failed:\n    step(batch_size // 2)"
    ),
    "no_limit": Change(loop="torch.cuda.set_per_process_memory_fraction(1.0)", options=None),
    "sixteen_bits": Change(
        "",
        "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)",
        options=("--change", "sixteen_bits"),
    ),
    "weights_in_fp32": Change("", "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)"),
    "trained_in_fp32": Change("", "for p in model.parameters():\n    if p.requires_grad: p.data = p.data.float()"),
    "bf16": Change(
        "bf16=True",
        'with torch.autocast("cuda", dtype=torch.bfloat16): loss = model(**batch).loss\n'
        "loss.backward(); optimizer.step()",
    ),
    "device_map": Change("", 'model = AutoModelForCausalLM.from_pretrained(name, device_map="auto")', options=None),
    "repeat_kv": Change(
        loop=f"from transformers.integrations import sdpa_attention\n{REPEAT_KV}", options=("--change", "repeat_kv")
    ),
    "sdpa": Change("", 'model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa")'),
    "fused_loss": Change(
        "use_liger_kernel=True",
        "from liger_kernel.transformers import AutoLigerKernelForCausalLM\n"
        "model = AutoLigerKernelForCausalLM.from_pretrained(name)",
        options=None,
    ),
    "fused_head": Change(
        "",
        "from trl.trainer import add_fused_lm_head\nadd_fused_lm_head(model)\n"
        "loss = model(**batch, fused_lm_head=True).loss",
        options=("--change", "fused_head"),
        subclass="from trl.trainer import add_fused_lm_head\nadd_fused_lm_head(model)\n"
        "class FusedTrainer(Trainer):\n"
        "    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):\n"
        '        inputs = inputs if return_outputs else {**inputs, "fused_lm_head": True}\n'
        "        return super().compute_loss(model, inputs, return_outputs, **kwargs)",
    ),
    "smaller_batch": Change(
        "per_device_train_batch_size=1",
        "loader = DataLoader(dataset, batch_size=1)",
        options=("--change", "smaller_batch"),
    ),
    "preprocess_logits": Change(
        "",
        "trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)",
        options=("--through-evaluation",),
    ),
    "loss_only": Change(
        "prediction_loss_only=True",
        "losses = []\nwith torch.no_grad():\n    for batch in loader: losses.append(model(**batch).loss.item())",
        options=("--through-evaluation",),
    ),
    "eval_accumulation": Change(
        "eval_accumulation_steps=1",
        "kept = []\nwith torch.no_grad():\n    for batch in loader: kept.append(model(**batch).logits.cpu())",
        options=("--through-evaluation",),
    ),
    "eval_batch": Change(
        "per_device_eval_batch_size=1",
        "with torch.no_grad():\n    for batch in DataLoader(dataset, batch_size=1): model(**batch)",
        options=("--through-evaluation",),
    ),
    "fewer_tokens": Change("", "model.generate(**inputs, max_new_tokens=128)", options=("--through-evaluation",)),
    "fewer_sequences": Change("", "for one in prompts: model.generate(**one)", options=("--through-evaluation",)),
    "offloaded_cache": Change("", 'model.generate(**inputs, cache_implementation="offloaded")', options=None),
    "load_on_cpu": Change("", 'state = torch.load(path, map_location="cpu")\nmodel.load_state_dict(state)\ndel state'),
    "model_only": Change(
        "save_only_model=True", "torch.save(model.state_dict(), path)", options=("--through-evaluation",)
    ),
    "to_cpu_first": Change(
        "", "torch.save({name: value.cpu() for name, value in model.state_dict().items()}, path)", options=None
    ),
    "bucket_view": Change("", "DistributedDataParallel(model, gradient_as_bucket_view=True)"),
    "engine_share": Change(
        "",
        "arguments = GRPOConfig(folder, use_vllm=True, vllm_gpu_memory_utilization=0.2)\n"
        "llm = LLM(name, gpu_memory_utilization=0.5)",
        options=None,
    ),
    "engine_sleep": Change(
        "", "arguments = GRPOConfig(folder, use_vllm=True, vllm_enable_sleep_mode=True)", options=None
    ),
    "engine_length": Change(
        "",
        "arguments = GRPOConfig(folder, use_vllm=True, vllm_max_model_length=2048)\n"
        "llm = LLM(name, max_model_len=2048)",
        options=None,
    ),
    "engine_more": Change(
        "",
        "arguments = GRPOConfig(folder, use_vllm=True, vllm_gpu_memory_utilization=0.4)\n"
        "llm = LLM(name, gpu_memory_utilization=0.9)",
        options=None,
    ),
    "fewer_workers": Change(
        "dataloader_num_workers=0, dataloader_pin_memory=False",
        "loader = DataLoader(dataset, batch_size=4, num_workers=0, pin_memory=False)",
        options=None,
    ),
    "streaming": Change("", "dataset = load_dataset(name, streaming=True)", options=None),
    "blocking": Change(shell="export CUDA_LAUNCH_BLOCKING=1", environment="", options=None),
    "synchronous": Change(shell="unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF", options=None),
}


# The change in a sentence, in Korean and English. No saving is named: none was computed.
_WHAT = {
    "accumulation": ("배치를 줄이고 그만큼 누적한다(예: 16을 4 × 4로)", "a smaller batch, accumulated (16 as 4 × 4)"),
    "checkpointing": ("그레이디언트 체크포인팅을 켠다", "gradient checkpointing"),
    "diffusers_checkpointing": (
        "그레이디언트 체크포인팅을 켠다(diffusers의 모델)",
        "gradient checkpointing (a model of diffusers)",
    ),
    "block_checkpointing": (
        "직접 쓴 모델의 블록마다 체크포인팅을 켠다(블록의 클래스: Block. 모델을 만든 바로 다음에)",
        "gradient checkpointing of a model of one's own (Block: the class of its blocks; right after it is made)",
    ),
    "offload": (
        "체크포인트(블록의 입력)를 RAM에 둔다(transformers 5.17부터). 길이가 길 때 듣는다",
        "keep checkpoints (blocks' inputs) in RAM (transformers 5.17); it helps at great length",
    ),
    "fused": ("스텝의 임시 텐서를 없앤다", "a fused optimizer: no temporaries in its step"),
    "shorter": ("시퀀스를 자른다", "shorter sequences"),
    "eight_bit": ("옵티마이저 상태를 8비트로 둔다", "optimizer states in 8 bits"),
    "lora": ("LoRA로 학습할 파라미터를 줄인다", "LoRA: fewer trainable parameters"),
    "qlora": ("QLoRA: 가중치를 4비트로 올린다", "QLoRA: weights in 4 bits"),
    "mixed": ("혼합 정밀도로 학습한다", "mixed precision"),
    "expandable": (
        "빈자리를 모아 쓰게 한다(리눅스). 다음 요청까지 통과한다는 뜻은 아니다",
        "let the allocator gather its holes (Linux); that the requests after this one pass too is not said",
    ),
    "other_processes": (
        "카드를 쓰는 다른 프로세스를 찾아, 자기 것이면 끝낸다",
        "find who else is on the card; end what is yours",
    ),
    "one_card_a_rank": ("rank마다 카드를 하나씩 쓰는지 본다", "see that each rank has a card of its own"),
    "restart": (
        "앞의 실행이 남긴 것을 놓는다(노트북이면 커널을 다시 시작한다)",
        "let go of what an earlier run left (in a notebook: restart the kernel)",
    ),
    "outside_handler": (
        "except 밖에서 다시 시도한다. 안에서는 표시만 한다",
        "try again outside except; inside it note only that it failed",
    ),
    "no_limit": ("프로그램이 건 한도를 푼다", "lift the limit that the program set itself"),
    "sixteen_bits": ("가중치를 16비트로 올린다", "load the weights in 16 bits"),
    "weights_in_fp32": ("가중치를 fp32로 올린다(전체 미세 조정)", "load the weights in fp32 (to train all of them)"),
    "trained_in_fp32": (
        "학습하는 파라미터만 fp32로 바꾼다(LoRA). TRL이라면 Trainer를 만든 뒤, train() 앞에서 trainer.model의 것을",
        "make fp32 only what is trained (LoRA; with TRL of trainer.model, once the trainer is made, before train())",
    ),
    "bf16": (
        "fp16 대신 bf16으로 학습한다. bf16 연산 장치가 있는 카드(Ampere부터)에서",
        "bf16 in place of fp16, on a card that has it (Ampere and later)",
    ),
    "device_map": ("모델을 여러 카드와 RAM에 나눈다", "spread the model over cards and RAM"),
    "sdpa": ("점수 행렬을 통째로 만들지 않는 어텐션을 쓴다", "an attention that does not keep the whole score matrix"),
    "repeat_kv": (
        "그룹 쿼리의 키와 값을 쿼리 헤드 수만큼 늘려 넘긴다(암페어보다 옛 카드와 fp32. 그러면 길이 × 길이 행렬을 "
        "만들지 않는 커널을 쓴다). 모델을 부르기 전에 쓴다",
        "keys and values of grouped heads repeated (on cards before Ampere and in fp32, which then take a kernel "
        "without matrices of length × length); before the model is called",
    ),
    "fused_loss": (
        "로짓을 통째로 만들지 않는 손실을 쓴다(Liger가 아는 모델이면)",
        "a loss that never makes all logits at once (if Liger knows the model)",
    ),
    "fused_head": (
        "로짓을 조각내어 손실을 계산한다(TRL 1.16부터. SFTTrainer는 처음부터 그렇게 한다)",
        "a loss from tiles of the logits (TRL 1.16; its SFTTrainer does so by default)",
    ),
    "smaller_batch": ("배치를 1로 줄여 본다", "batch 1"),
    "preprocess_logits": (
        "평가에서 로짓 대신 지표에 쓸 것만 모은다. compute_metrics는 그때 토큰 번호를 받는다",
        "gather what the metric needs instead of logits; compute_metrics then gets token ids",
    ),
    "loss_only": ("평가에서 로짓을 모으지 않는다", "gather no logits in evaluation"),
    "eval_accumulation": ("모은 로짓을 스텝마다 CPU로 옮긴다", "move gathered logits to the CPU at each step"),
    "eval_batch": ("평가의 배치를 줄인다", "a smaller batch in evaluation"),
    "fewer_tokens": ("만들 토큰 수를 줄인다", "fewer new tokens"),
    "fewer_sequences": ("한 번에 만드는 시퀀스를 줄인다", "fewer sequences at once"),
    "offloaded_cache": ("KV 캐시를 RAM에 둔다", "keep the KV cache in RAM"),
    "load_on_cpu": ("체크포인트를 CPU로 읽는다", "read the checkpoint to the CPU"),
    "model_only": ("모델만 저장한다", "save the model alone"),
    "to_cpu_first": ("CPU로 옮긴 뒤에 저장한다", "save from the CPU"),
    "bucket_view": ("DDP가 그레이디언트를 한 벌만 두게 한다", "one copy of the gradients in DDP"),
    "engine_share": (
        "엔진의 몫을 줄인다(얼마로 적을지는 virtual-gpu fit --model 모델 --gpu 카드 --objective grpo --vllm colocate)",
        "a smaller share for the engine (which: virtual-gpu fit --model MODEL --gpu CARD --objective grpo --vllm "
        "colocate)",
    ),
    "engine_sleep": ("학습하는 동안 엔진을 재운다(TRL)", "let the engine sleep while the model is trained (TRL)"),
    "engine_length": ("가장 긴 글을 실제로 쓸 길이로 줄인다", "limit texts to the length that you really need"),
    "engine_more": ("엔진의 몫을 카드에 남는 만큼까지 늘린다", "a larger share, up to what is left of the card"),
    "fewer_workers": ("DataLoader의 프로세스와 고정 메모리를 줄인다", "fewer loader processes, no pinned memory"),
    "streaming": ("데이터를 한꺼번에 올리지 않는다", "do not hold the whole data set in RAM"),
    "blocking": (
        "오류가 난 줄을 정확히 본다. 이름만 메모리 부족이고 색인 오류일 때도 있다",
        "see the line that really failed; an index out of range can look like this",
    ),
    "synchronous": (
        "비동기 할당자를 끄면 메시지에 숫자가 더 나온다",
        "without the asynchronous allocator the message has more numbers",
    ),
}


def what(key: str) -> str:
    """The change in a sentence: what it does, and where it does not help."""
    return tr(*_WHAT[key])
