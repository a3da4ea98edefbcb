"""The words of docs/levers.md: what each lever is called, since when there is one, and the lines to write."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.levers.catalogue import OTHER, ROUNDING
from benchmarks.levers.optimizers import RANK


class Words(NamedTuple):
    """What a lever is called, since when there is one, and the lines that pull it. trainer: TrainingArguments."""

    title: str
    since: str
    trainer: str
    loop: str
    note: str = ""


HIDDEN = "hidden = model.model(**batch).last_hidden_state[:, :-1].flatten(0, 1)"
QLORA = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16"
ON_T4 = "T4에서는 `bnb_4bit_compute_dtype=torch.float16`"
TILES = "torch.cat([checkpoint(mlp, part, use_reentrant=False) for part in x.chunk(8, dim=1)], dim=1)"
OFFLOADED = "model.gradient_checkpointing_enable({'use_reentrant': False}, offload=True)"
WORDS = {
    "chunks": Words(
        "손실을 나누어 계산하고 역전파에서 다시 계산", "PyTorch 1.11",
        "",
        "parts = zip(hidden.split(256), target.split(256))\n"
        "sum(checkpoint(loss_of, *part, use_reentrant=False) for part in parts)",
        "교과서의 방법. 출력층의 곱을 한 번 더 한다",
    ),
    "pytorch_chunks": Words(
        "`F.linear_cross_entropy`(조각내기)", "PyTorch 2.13", "",
        f"{HIDDEN}\nF.linear_cross_entropy(hidden, model.lm_head.weight, target, "
        "options=torch.nn.LinearCrossEntropyOptions())",
        "순전파에서 그레이디언트까지 계산해 둔다",
    ),
    "liger_loss": Words(
        "Liger의 fused linear cross-entropy", "", "",
        "LigerFusedLinearCrossEntropyLoss()(model.lm_head.weight, hidden, target)",
        "Triton 커널은 실행하지 않았다. 커널은 받은 텐서를 고칠 뿐이다",
    ),
    "cut": Words(
        "cut cross-entropy", "", "",
        "linear_cross_entropy(hidden, model.lm_head.weight, target)",
        "로짓을 카드의 메모리에 쓰지 않는다. 커널 안의 연산은 세지 못한다. Ampere부터 지원해 T4에서는 쓸 수 없다",
    ),
    "trl": Words(
        "TRL `SFTTrainer`의 기본 손실", "", "SFTConfig(loss_type='nll')",
        "add_fused_lm_head(model)\nmodel(**batch, labels=labels, fused_lm_head=True).loss\n"
        "`Trainer`라면 [처방 한 장](cheat_sheet.md)의 `FusedTrainer`",
        "1.16의 기본값이라 켤 것이 없다",
    ),
    "logits_to_keep": Words(
        "`logits_to_keep`: 답의 로짓만", "transformers 4.48", "",
        "model(**batch, logits_to_keep=answer_length + 1)",
        "손실이 걸린 토큰이 뒤의 4분의 1일 때. 프롬프트까지 학습한다면 쓸 수 없다",
    ),
    "liger": Words(
        "Liger의 커널 전부", "transformers 4.45", "use_liger_kernel=True",
        "AutoLigerKernelForCausalLM.from_pretrained(name)",
        "Liger가 아는 구조만. GPT-NeoX(polyglot)는 없다",
    ),
    "checkpointing": Words(
        "블록마다 체크포인팅", "PyTorch 1.11(`use_reentrant=False`)", "gradient_checkpointing=True",
        "model.gradient_checkpointing_enable({'use_reentrant': False})",
        "LoRA는 얼린 가중치의 그레이디언트를 계산하지 않아 다시 계산하는 몫이 크다. 어댑터가 모든 선형층에 있어 "
        "조기 중단도 듣지 않는다(5.8절)",
    ),
    "every_second": Words(
        "블록 하나 걸러 체크포인팅", "", "",
        "for block in model.model.layers[1::2]: block.gradient_checkpointing = False", "",
    ),
    "pairs": Words(
        "두 블록을 한 체크포인트로", "PyTorch 1.11", "", "checkpoint(lambda x: second(first(x)), hidden, "
        "use_reentrant=False)", "다시 계산하는 동안 두 블록 것이 함께 있다",
    ),
    "selective": Words(
        "선택적 체크포인팅: 곱과 어텐션의 결과는 남긴다", "PyTorch 2.4", "",
        "kept = [torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default]\n"
        "checkpoint(block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, kept))",
        "다시 계산하는 곱이 거의 없다",
    ),
    "attention_kept": Words(
        "선택적 체크포인팅: 어텐션의 결과만 남긴다", "PyTorch 2.4", "",
        "kept = [torch.ops.aten._scaled_dot_product_flash_attention.default]", "길이가 길수록 이득이 크다",
    ),
    "save_on_cpu": Words(
        "순전파 상태를 모두 CPU로", "PyTorch 1.10", "",
        "with torch.autograd.graph.save_on_cpu(pin_memory=True): loss = model(**batch).loss",
        "역전파에 필요해 저장된 가중치까지 옮긴다. 같은 텐서도 저장될 때마다 옮긴다",
    ),
    "trl_offload": Words(
        "TRL(torchtune)의 순전파 상태 오프로드", "", "SFTConfig(activation_offloading=True)",
        "with get_act_offloading_ctx_manager(model): loss = model(**batch).loss",
        "가중치는 두고, 같은 텐서는 한 번만 옮긴다",
    ),
    "checkpoints_on_cpu": Words(
        "체크포인팅 + 남는 것은 CPU로", "PyTorch 1.11", "gradient_checkpointing=True",
        "model.gradient_checkpointing_enable({'use_reentrant': False})\n"
        "with torch.autograd.graph.save_on_cpu(pin_memory=True): loss = model(**batch).loss",
    ),
    "offloaded": Words(
        "체크포인팅 + 체크포인트를 CPU로", "transformers 5.17",
        "gradient_checkpointing=True, gradient_checkpointing_kwargs={'use_reentrant': False, 'offload': True}",
        OFFLOADED,
        "블록의 입력만 옮긴다. 쓰고 있는 블록의 것은 카드에 있다",
    ),
    "tiled_mlp": Words(
        "체크포인팅 + MLP를 여덟 조각으로", "PyTorch 1.11", "",
        TILES,
        "순전파를 두 번 더 하는 셈이라 MLP의 연산이 가장 많이 는다",
    ),
    "long_tiled": Words(
        "MLP를 여덟 조각으로", "PyTorch 1.11", "",
        TILES,
        "최대가 로짓에 있어 그것만으로는 줄지 않는다",
    ),
    "long_chunks": Words(
        "`F.linear_cross_entropy`(조각내기)", "PyTorch 2.13", "",
        "F.linear_cross_entropy(hidden, model.lm_head.weight, target, options=torch.nn.LinearCrossEntropyOptions())",
        "긴 글에서 맨 먼저 할 것. 아래의 행은 모두 이것을 켠 것이다",
    ),
    "long_attention": Words(
        "+ 어텐션의 결과는 남긴다", "PyTorch 2.4", "",
        "kept = [torch.ops.aten._scaled_dot_product_flash_attention.default]",
        "길이의 제곱으로 느는 계산을 다시 하지 않는다. 대신 층마다 블록의 입력과 같은 크기를 더 남긴다(모두 8 GiB쯤)",
    ),
    "long_chunks_tiled": Words(
        "+ MLP를 여덟 조각으로", "PyTorch 1.11", "",
        TILES,
        "로짓이 없어지면 역전파에서 다시 계산하는 MLP 하나가 최대다. 그것이 여덟으로 나뉜다",
    ),
    "long_chunks_offloaded": Words(
        "+ 체크포인트를 CPU로", "transformers 5.17",
        "gradient_checkpointing=True, gradient_checkpointing_kwargs={'use_reentrant': False, 'offload': True}",
        OFFLOADED,
        "블록의 입력 서른두 개가 8 GiB다. 그만큼 RAM으로 나갔다가 돌아온다",
    ),
    "long_all": Words(
        "+ MLP를 여덟 조각으로, 체크포인트를 CPU로", "transformers 5.17", "",
        f"{TILES}\n{OFFLOADED}",
        "순전파 상태는 블록 하나의 것만 카드에 남는다",
    ),
    "compiled": Words(
        "`torch.compile`", "PyTorch 2.0(`model.compile()`은 2.1)", "torch_compile=True", "model.compile()",
        "합친 연산의 중간 결과는 만들지도 남기지도 않는다",
    ),
    "budget_half": Words(
        "`torch.compile` + 메모리 예산 0.5", "PyTorch 2.4", "`torch_compile=True`(오른쪽 첫 줄을 먼저)",
        "torch._functorch.config.activation_memory_budget = 0.5\nmodel.compile()",
        "남길 것을 컴파일러가 고른다. 결과는 드롭아웃이 없을 때의 것이다. 있으면 그레이디언트가 소리 없이 틀릴 수 있다"
        "(pytorch #190758, 5.6절)",
    ),
    "budget_fifth": Words(
        "`torch.compile` + 메모리 예산 0.2", "PyTorch 2.4", "`torch_compile=True`(오른쪽 첫 줄을 먼저)",
        "torch._functorch.config.activation_memory_budget = 0.2\nmodel.compile()", "위와 같다",
    ),
    "foreach": Words(
        "AdamW, foreach", "", "optim='adamw_torch'", "torch.optim.AdamW(parameters, foreach=True)",
        "CUDA에서 `AdamW()`의 기본값. 파라미터 한 벌만큼 임시 텐서가 있다",
    ),
    "loop": Words(
        "AdamW, 하나씩", "", "", "torch.optim.AdamW(parameters, foreach=False)",
        "가장 큰 텐서의 임시만 있다",
    ),
    "adamw_8bit": Words(
        "8비트 AdamW", "bitsandbytes 0.26", "optim='adamw_bnb_8bit'", "bnb.optim.AdamW8bit(parameters)",
        "Trainer는 임베딩의 상태를 fp32로 둔다. 표는 직접 쓴 루프의 것이고, Trainer에서는 임베딩의 원소마다 6바이트가 "
        "더 든다",
    ),
    "ao_8bit": Words(
        "torchao의 8비트 AdamW", "", "optim='adamw_torch_8bit'", "torchao.optim.AdamW8bit(parameters)",
        "스텝을 파라미터마다 컴파일한다. 상태를 fp32로 풀었다가 다시 줄이느라 가장 큰 파라미터(대개 임베딩)의 "
        "fp32 두 벌이 잠깐 있다",
    ),
    "ao_4bit": Words(
        "torchao의 4비트 AdamW", "", "optim='adamw_torch_4bit'", "torchao.optim.AdamW4bit(parameters)",
        "상태는 8비트의 절반이지만 잠깐 있는 것이 가장 큰 파라미터의 fp32 여섯 벌이다. 어휘가 큰 모델에서는 8비트보다 "
        "많이 든다",
    ),
    "stochastic": Words(
        "torchao의 AdamW, 확률적 반올림", "", "",
        "torchao.optim._AdamW(parameters, bf16_stochastic_round=True)",
        "bf16 가중치에서 작은 갱신이 사라지지 않게 한다. 메모리는 그대로다. 이름이 `_`로 시작해 바뀔 수 있다",
    ),
    "paged": Words(
        "페이지 AdamW(32비트)", "bitsandbytes 0.39", "optim='paged_adamw_32bit'",
        "bnb.optim.PagedAdamW32bit(parameters)",
        "상태는 CUDA의 관리 메모리에 있어 PyTorch가 세지 않는다. 카드에 자리가 없으면 스텝마다 PCIe를 오간다. "
        "윈도우와 WSL2에서는 RAM으로 넘치지 못한다",
    ),
    "paged_8bit": Words(
        "페이지 8비트 AdamW", "bitsandbytes 0.39", "optim='paged_adamw_8bit'",
        "bnb.optim.PagedAdamW8bit(parameters)",
        "위와 같다. 블록마다의 스케일은 카드에 남는다",
    ),
    "in_backward": Words(
        "역전파 안에서 AdamW", "PyTorch 2.1", "",
        "for p, one in optimizers.items(): p.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), "
        "optimizers[p].zero_grad()))",
        "누적, 그레이디언트 클리핑, `GradScaler`와 함께 쓸 수 없다",
    ),
    "8bit_in_backward": Words(
        "역전파 안에서 8비트 AdamW", "PyTorch 2.1", "", "위의 줄에 `bnb.optim.AdamW8bit([p])`", "위와 같다",
    ),
    "adafactor": Words(
        "Adafactor(Trainer의 것)", "", "optim='adafactor'",
        "Adafactor(parameters, scale_parameter=False, relative_step=False)",
        "상태는 거의 없지만 텐서마다 fp32 임시가 여러 벌 있다",
    ),
    "lion": Words(
        "Lion(32비트)", "bitsandbytes 0.38", "optim='lion_32bit'", "bnb.optim.Lion(parameters)", "상태는 fp32 하나",
    ),
    "lion_8bit": Words("8비트 Lion", "bitsandbytes 0.38", "optim='lion_8bit'", "bnb.optim.Lion8bit(parameters)"),
    "muon": Words(
        "Muon + AdamW", "PyTorch 2.9", "", "torch.optim.Muon(matrices)\ntorch.optim.AdamW(others, fused=True)",
        "블록의 행렬만 Muon이고 임베딩, 출력층, 벡터는 AdamW다. 뉴턴·슐츠 반복의 곱이 더 든다",
    ),
    "adam_mini": Words(
        "Adam-mini", "", "",
        "Adam_mini(model.named_parameters(), dim=hidden, n_heads=heads, n_kv_heads=kv_heads)",
        "분산을 묶음마다 하나만 둔다",
    ),
    "galore": Words(
        f"GaLore, rank {RANK}", "transformers 4.39",
        f"optim='galore_adamw', optim_target_modules='all-linear', optim_args='rank={RANK}'", "",
        "그레이디언트는 그대로 있고 상태만 준다. 첫 스텝과 200스텝마다 SVD를 한다",
    ),
    "galore_layerwise": Words(
        f"GaLore, 층마다 바로 스텝, rank {RANK}", "transformers 4.39",
        f"optim='galore_adamw_layerwise', optim_target_modules='all-linear', optim_args='rank={RANK}'", "",
        "그레이디언트도 남지 않는다. 누적을 쓸 수 없다",
    ),
    "apollo": Words(
        f"APOLLO, rank {RANK}", "transformers 4.49",
        f"optim='apollo_adamw', optim_target_modules='all-linear', optim_args='rank={RANK}'", "",
        "SVD 대신 무작위 사영",
    ),
    "apollo_mini": Words(
        "APOLLO-Mini(rank 1)", "transformers 4.49",
        "optim='apollo_adamw', optim_target_modules='all-linear', optim_args='rank=1,scale_type=tensor'", "",
    ),
    "lomo": Words("LOMO", "transformers 4.41", "optim='lomo'", "", "상태가 없는 SGD를 역전파 안에서"),
    "adalomo": Words("AdaLomo", "transformers 4.41", "optim='adalomo'", "", "행과 열의 상태만"),
    "sgd": Words("SGD(모멘텀 없음)", "", "optim='sgd'", "torch.optim.SGD(parameters)", "상태가 없는 아래쪽 끝"),
    "nf4": Words(
        "QLoRA, nf4", "transformers 4.30", "", f"from_pretrained(name, quantization_config={QLORA}))\n"
        f"model = prepare_model_for_kbit_training(model)\n{ON_T4}",
    ),
    "nf4_double": Words(
        "QLoRA, nf4 + 이중 양자화", "transformers 4.30", "",
        f"{QLORA}, bnb_4bit_use_double_quant=True)\n{ON_T4}",
    ),
    "fp4": Words(
        "QLoRA, fp4", "transformers 4.30", "", "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='fp4')",
    ),
    "int8": Words(
        "LLM.int8 + LoRA", "", "", "BitsAndBytesConfig(load_in_8bit=True)",
        "얼린 선형층의 입력까지 남아 오히려 늘어난다. int8 커널의 곱셈은 세지 못한다",
    ),
    "int8_checkpointed": Words(
        "LLM.int8 + LoRA + 체크포인팅", "", "gradient_checkpointing=True",
        "BitsAndBytesConfig(load_in_8bit=True)\nmodel.gradient_checkpointing_enable({'use_reentrant': False})",
        "8비트 선형층의 입력이 `save_for_backward`가 아니라 `ctx`의 속성에 담겨 있어, "
        "체크포인팅의 새 구현이 버리지 못한다",
    ),
    "int8_reentrant": Words(
        "위의 것에서 `use_reentrant=True`", "", "gradient_checkpointing_kwargs={'use_reentrant': True}",
        "model.gradient_checkpointing_enable({'use_reentrant': True})\nmodel.enable_input_require_grads()",
        "첫 순전파가 `no_grad`라 입력이 남지 않는다. axolotl과 LLaMA-Factory의 SFT는 이것이 기본값이다",
    ),
    "nf4_checkpointed": Words(
        "QLoRA(이중 양자화) + 체크포인팅", "transformers 4.30", "gradient_checkpointing=True", f"{QLORA}, "
        f"bnb_4bit_use_double_quant=True)\n{ON_T4}", "함께 켜야 줄어든다",
    ),
    "nf4_checkpointed_rest_16": Words(
        "위의 것에서 4비트가 아닌 가중치는 16비트 그대로", "", "", "`prepare_model_for_kbit_training`을 부르지 않는다",
        "임베딩과 출력층이 절반이 되고, autocast가 출력층의 사본을 만들지 않는다. "
        "TRL, axolotl, LLaMA-Factory, torchtune이 이렇게 한다",
    ),
    "modules_to_save": Words(
        "LoRA + 임베딩과 출력층은 통째로", "", "",
        "LoraConfig(modules_to_save=['embed_tokens', 'lm_head'])", "새 토큰을 넣을 때 켜는 것. 늘어난다",
    ),
    "tied": Words(
        "임베딩과 출력층을 한 벌로", "", "", "AutoConfig.from_pretrained(name, tie_word_embeddings=True)",
        "처음부터 학습할 때만. 배운 모델을 나중에 묶을 수는 없다",
    ),
    "float8": Words(
        "fp8 학습(torchao, 텐서마다 스케일)", "torchao 0.5", "", "convert_to_float8_training(model)",
        "`torch.compile` 없이 실행한 값이라 융합되면 사라질 임시까지 들어 있다",
    ),
    "longest_alone": Words(
        "긴 글은 따로: 토큰 수의 예산", "", "", "배치 샘플러가 (글의 수 × 가장 긴 길이)를 넘지 않게 묶는다",
        "가장 긴 글 하나의 배치가 최대다",
    ),
    "packed": Words(
        "packing(글 사이를 막지 않음)", "", "SFTConfig(packing=True, packing_strategy='wrapped')", "",
        "패딩이 없다. 앞 글이 뒷글에 보인다",
    ),
    "padding_free_sdpa": Words(
        "padding-free, sdpa", "transformers 4.44", "SFTConfig(padding_free=True)",
        "DataCollatorWithFlattening()", "글 사이를 막는 마스크(길이²)를 만든다",
    ),
    "padding_free": Words(
        "padding-free, FlashAttention 2", "transformers 4.44", "SFTConfig(padding_free=True)",
        "DataCollatorWithFlattening()\nfrom_pretrained(name, attn_implementation='flash_attention_2')",
        "마스크를 만들지 않는다",
    ),
    "experts_too": Words(
        "전문가에도 LoRA", "peft 0.17", "",
        "LoraConfig(target_parameters=['mlp.experts.gate_up_proj', 'mlp.experts.down_proj'])",
        "전문가는 층이 아니라 3차원 파라미터다. 순전파마다 가중치에 더한 사본이 생긴다",
    ),
    "dpo_precomputed": Words(
        "기준 모델의 로그 확률을 미리 계산", "", "DPOConfig(precompute_ref_log_probs=True)", "",
        "기준 모델을 올리지 않는다. 그 대신 학습 전에 데이터를 한 번 다 읽는다. 연산에는 그것을 세지 않았다",
    ),
    "dpo_one": Words(
        "한 쌍씩 열여섯 번 누적", "", "per_device_train_batch_size=1, gradient_accumulation_steps=16", "",
        "손실을 조각내면 배치가 차지하는 것이 얼마 되지 않는다",
    ),
    "dpo_lora": Words(
        "LoRA(rank 16, 모든 선형층)", "", "",
        "DPOTrainer(…, peft_config=LoraConfig(r=16, target_modules='all-linear'))",
        "어댑터를 끈 모델이 기준 모델이라 두 번째 모델이 없다",
    ),
    "dpo_rows": Words(
        "TRL 1.6~1.13의 손실", "", "", "",
        "로짓을 통째로 만들고, 기준 모델의 것도 함께 들고 있다. TRL만 1.16으로 올려도 출발점과 같아진다. "
        "axolotl 0.18은 TRL 1.8을 쓴다",
    ),
    "grpo_one": Words(
        "답 하나씩 서른두 번 누적", "", "per_device_train_batch_size=1, gradient_accumulation_steps=32", "",
        "답 서른두 개는 여전히 한꺼번에 만든다",
    ),
    "grpo_beta": Words(
        "KL 항(`beta=0.04`)", "", "GRPOConfig(beta=0.04)", "",
        "전체 미세 조정이면 기준 모델이 한 벌 더 있다. 어댑터라면 끄면 되니 연산만 늘어난다",
    ),
    "grpo_iterations": Words(
        "같은 답으로 두 번 학습", "", "GRPOConfig(num_iterations=2)", "",
        "예전 로그 확률을 한 번 더 계산해 둔다",
    ),
    "grpo_lora": Words(
        "LoRA(rank 16, 모든 선형층)", "", "",
        "GRPOTrainer(…, peft_config=LoraConfig(r=16, target_modules='all-linear'))",
        "남는 것은 가중치와 답을 만드는 동안의 KV 캐시다",
    ),
    "grpo_vllm": Words(
        "vLLM을 같은 카드에", "", "GRPOConfig(use_vllm=True, vllm_mode='colocate')", "",
        "가중치가 두 벌이다. 엔진은 꼭 드는 것(가중치와 답 하나의 KV 캐시)만 셌다. "
        "정책의 로그 확률을 학습 쪽에서 한 번 더 계산하고, TRL은 두 확률의 차이만큼 손실을 조정한다",
    ),
    "grpo_vllm_asleep": Words(
        "vLLM, 학습하는 동안 재우기", "",
        "GRPOConfig(use_vllm=True, vllm_mode='colocate', vllm_enable_sleep_mode=True)", "",
        "학습하는 동안에는 엔진의 가중치도 캐시도 없다. 깨워서 가중치를 넘길 때가 최대일 수 있다",
    ),
}  # fmt: skip
BASE_WORDS = {
    "1.3b": "polyglot-ko-1.3b를 T4에서 전체 미세 조정: fp16 혼합 정밀도(fp32 가중치), 배치 16 × 256, "
    "체크포인팅, fused AdamW",
    "1.3b-lora": "polyglot-ko-1.3b를 T4에서 LoRA(rank 16, 모든 선형층): fp16 가중치, autocast, 배치 16 × 256, "
    "체크포인팅 없음",
    "8b": "Llama-3.1-8B를 RTX 4090(24 GB)에서 전체 미세 조정: bf16 가중치 그대로, 1 × 2048, 체크포인팅, fused AdamW",
    "8b-lora": "Llama-3.1-8B를 RTX 4090에서 LoRA(rank 16, 모든 선형층): bf16 가중치, autocast, 1 × 2048, "
    "체크포인팅 없음",
    "8b-texts": "`8b-lora`와 같은 LoRA에 체크포인팅, "
    "길이가 2048, 512, 384, 256 × 4, 128인 글 여덟 개를 가장 긴 글에 맞춰 패딩",
    "8b-32k": "Llama-3.1-8B를 RTX 4090에서 QLoRA(nf4, 이중 양자화, rank 16, 모든 선형층): 나머지는 bf16, autocast, "
    "1 × 32768, 체크포인팅",
    "moe-lora": "Qwen3-30B-A3B를 H100에서 LoRA(q, v, rank 16): bf16, 1 × 2048, 체크포인팅",
    "1b-dpo": "Llama-3.2-1B를 RTX 3090에서 TRL 1.16의 DPO로 전체 미세 조정: bf16 혼합 정밀도(fp32 가중치), "
    "4쌍 × 1024를 네 번 누적, 체크포인팅, fused AdamW, 기준 모델도 카드에",
    "1b-grpo": "Llama-3.2-1B를 RTX 3090에서 TRL 1.16의 GRPO로 전체 미세 조정: 정밀도와 옵티마이저는 위와 같다. "
    "질문 512와 답 512, 답 32개를 `generate`로 한꺼번에 만들고 4개씩 학습, `beta=0`",
    "1.7b-grpo": "Qwen3-1.7B를 RTX 4090에서 위와 같은 GRPO, LoRA(rank 16, 모든 선형층): 가중치는 bf16",
}
GROUPS = {
    "loss": "로짓과 손실",
    "activations": "순전파 상태",
    "long": "긴 글: 토큰 32,768개",
    "optimizer": "옵티마이저",
    "weights": "가중치",
    "data": "데이터",
    "experts": "전문가(MoE)",
    "pairs": "DPO: 모델이 둘일 때",
    "completions": "GRPO: 답을 생성해 학습할 때",
}
RESULTS = {OTHER: "다른 알고리즘", ROUNDING: "반올림만"}
PHASES = {"forward": "순전파", "backward": "역전파", "step": "스텝", "generation": "답 생성"}
HEAD = """# 레버 한 장

<!-- tools/levers.py가 benchmarks/levers.json에서 쓴다. 손으로 고치지 않는다. -->

메모리를 줄이려고 사람들이 당기는 것을 한 번에 하나씩 당겨 본다. 아래의 출발점에서 **한 군데만** 바꾼 프로그램을
가상 GPU에서
두 스텝 실행하고, 텐서가 가장 많이 차지한 때를 적었다. 라이브러리가 있는 것은 그 라이브러리의 코드를 그대로
실행했다. 실제 GPU에서
측정한 값은 없다. 기록은 `benchmarks/levers.json`에 있고, `python -m benchmarks.levers`가 다시 만든다({date},
torch {torch},
transformers {transformers}, peft {peft}).

어느 레버든 **최대가 있는 자리**의 것을 줄여야 최대가 줄어든다. 출발점이 다르면 순서도 다르다. 무엇부터 할지는
[처방 한 장](cheat_sheet.md)에 있고, 여기는 하나하나의 크기를 견주는 곳이다.

## 출발점

| 이름 | 무엇을 | 최대 | 어디에서 | 카드의 한도 | 들어가나 |
|---|---|---:|---|---:|---|
{bases}

## 읽는 법

- **최대**는 GiB이고, 괄호 안은 출발점과의 차이다. 굵은 글씨는 그 카드에 들어간다. 들어가는지는 최대가 아니라
  할당자가 카드에서 잡은 양(예약)으로 정한다. 예약이 한도를 넘고 최대는 넘지 않으면 그 한도를 걸고 다시 실행해 본다.
  그래서 최대가 한도보다 작아도 굵지 않은 것이 있다. '+'로 시작하는 줄은 위의 것에 더한 것이다.
- **연산**은 한 스텝의 행렬곱(어텐션 포함)이 출발점보다 얼마나 늘었나다. PyTorch의 `FlopCounterMode`로 셌다.
  시간이 아니다.
- **오가는 양**은 한 스텝에 카드와 RAM 사이를 오가는 바이트(양쪽 방향의 합)다. **오가는 양**도 **연산**도,
  값이 적힌 출발점 가운데 맨 오른쪽 것의 값이다.
- DPO와 GRPO의 행은 TRL 트레이너의 순서를 그대로 옮긴 이 도구의 스텝으로 셌다(바이트를 트레이너의 것과 견주는 것은
  `tests/test_pairs.py`와 `tests/test_two_models.py`, 엔진의 몫을 공개된 로그와 견주는 것은 `tests/test_vllm.py`).
  **연산**에는 답을 생성하는 몫이 들어 있지 않다.
- **언제부터**는 아는 것만 적었다. 실행한 버전은 표 옆에 있다.
- **결과**: *같다*는 같은 계산을 다시 하거나 옮길 뿐이라는 뜻, *반올림만*은 같은 수식을 다른 순서나 다른 조각으로
  계산한다는 뜻,
  *다른 알고리즘*은 배우는 것이 달라질 수 있다는 뜻이다. 정확도는 이 표에 없다.
"""
TAIL = """
## 아직 실행하지 않은 것

{waiting}

## 세지 못한 것

- `torch.compile`의 행에서: 컴파일러가 카드에서 시간을 재어 커널이나 패딩을 고를 때(autotuning) 쓰는 메모리와 CUDA
  그래프.
- torchao의 `CPUOffloadOptimizer`, DeepSpeed의 CPU 오프로드: 상태를 RAM에 실제로 만들어야 해서 이 표의 크기로는
  실행하지 않았다.
  DeepSpeed의 것은 `virtual-gpu run`으로 실행해 볼 수 있다.
- GaLore의 SVD가 cuSOLVER에서 따로 쓰는 작업 공간, Triton 커널 안의 연산.
- Liger와 cut cross-entropy, TRL의 손실은 파이썬 코드를 그대로 실행하고 Triton 커널의 실행만 건너뛰었다. 이
  커널들은 파이썬이 미리 만든 텐서에 쓴다.
"""
