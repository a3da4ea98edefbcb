"""The words of docs/levers.md on several cards: what each lever is called, since when there is one, the lines to write.

trainer: TrainingArguments, or what accelerate's `Accelerator` is given.
"""

from __future__ import annotations

from tools.lever_words import QLORA, Words

FSDP2 = "PyTorch 2.6"
ACCUMULATED = "배치 네 개의 그레이디언트를 더한다"
EACH = "accelerator_config={'gradient_accumulation_kwargs': {'sync_each_batch': True}}"
HALVES = "fsdp_mixed_precision=True"
DISTRIBUTED = "from_pretrained(name, distributed_config=config)"
CARD_WORDS = {
    "bucket_view": Words(
        "DDP, 묶음(버킷)이 곧 그레이디언트", "PyTorch 1.7",
        "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])",
        "DistributedDataParallel(model, gradient_as_bucket_view=True)",
        "그레이디언트의 둘째 벌이 없어진다. 묶음은 `zero_grad` 뒤에도 남아 최대가 순전파에 있다",
    ),
    "zero_1": Words(
        "ZeRO-1: 옵티마이저 상태를 나눈다", "PyTorch 1.8", "",
        "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr, fused=True)",
        "텐서를 통째로 나누어 준다. 가장 많이 받은 카드의 값이다",
    ),
    "zero_1_view": Words(
        "ZeRO-1 + 묶음이 곧 그레이디언트", "PyTorch 1.8", "",
        "DistributedDataParallel(model, gradient_as_bucket_view=True)\n"
        "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr, fused=True)",
    ),
    "fsdp2": Words(
        "FSDP2", FSDP2, "",
        "policy = MixedPrecisionPolicy(half, half, half)\n"
        "for part in (embedding, *blocks, [norm, head], model): fully_shard(part, mp_policy=policy)",
        "ZeRO-3. 임베딩, 블록, 출력층이 저마다 한 묶음이다(torchtitan이 묶는 대로)",
    ),
    "fsdp2_blocks": Words(
        "FSDP2, 블록만 감싼다", FSDP2, "fsdp=True, fsdp_config={'version': 2, 'reshard_after_forward': True}",
        "for part in (*blocks, model): fully_shard(part, mp_policy=policy)",
        "accelerate가 묶는 대로. 임베딩과 출력층은 모은 채로 남는다",
    ),
    "fsdp2_kept": Words(
        "FSDP2, 순전파에서 모은 것을 둔다", FSDP2, "fsdp_config={'reshard_after_forward': False}",
        "fully_shard(part, reshard_after_forward=False)",
        "ZeRO-2. 한 번만 모은다",
    ),
    "fsdp2_all_saved": Words(
        "FSDP2, 체크포인팅 없이", FSDP2, "gradient_checkpointing=False", "",
        "순전파 상태는 나누어지지 않는다",
    ),
    "fsdp2_sums_32": Words(
        "FSDP2, 그레이디언트는 fp32로 더한다", FSDP2,
        "FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)",
        "policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)",
        "torchtitan의 기본값",
    ),
    "fsdp2_32": Words(
        "FSDP2, `MixedPrecisionPolicy` 없이(autocast만)", FSDP2, "", "fully_shard(part)",
        "fp32로 모으고, autocast가 만든 16비트 사본이 더해진다",
    ),
    "hsdp": Words(
        "HSDP: 네 장씩 나누고 두 벌", FSDP2, "ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)",
        "mesh = init_device_mesh('cuda', (2, 4), mesh_dim_names=('copies', 'parts'))\nfully_shard(part, mesh=mesh)",
        "묶음 사이에서는 그레이디언트의 조각을 all-reduce한다",
    ),
    "fsdp2_offload": Words(
        "FSDP2 + `CPUOffloadPolicy`", FSDP2, "fsdp_config={'cpu_offload': True}",
        "fully_shard(part, offload_policy=CPUOffloadPolicy())",
        "조각과 상태가 RAM에 있고 AdamW는 CPU가 한다. PCIe로 오가는 양: {traffic}",
    ),
    "ddp_accumulated": Words(
        "DDP, 누적 4: 배치마다 보낸다", "", EACH, "",
        f"{ACCUMULATED}. 손으로 쓴 루프가 흔히 이렇다",
    ),
    "ddp_no_sync": Words(
        "DDP, 누적 4: 마지막에만 보낸다", "", "gradient_accumulation_steps=4",
        "with model.no_sync(): loss.backward()",
        "최대는 배치마다 보내는 윗줄과 같다. "
        "출발점보다 느는 것은 다음 순전파를 하는 동안에도 쌓인 그레이디언트가 남아 있어서다",
    ),
    "fsdp2_accumulated": Words(
        "FSDP2, 누적 4: 배치마다 보낸다", FSDP2, EACH, "",
        f"{ACCUMULATED}. 더한 것은 조각으로 남는다",
    ),
    "fsdp2_no_sync": Words(
        "FSDP2, 누적 4: 마지막에만 보낸다", FSDP2, "gradient_accumulation_steps=4",
        "model.set_requires_gradient_sync(False)",
        "보내지 않은 그레이디언트가 통째로 카드마다 있다. accelerate의 기본값이다",
    ),
    "tensor": Words(
        "텐서 병렬 8", "PyTorch 2.3",
        "from_pretrained(name, distributed_config=DistributedConfig(tp_size=8, tp_plan='auto'))",
        "parallelize_module(layer, mesh, ColwiseParallel())\nparallelize_module(layer, mesh, RowwiseParallel())",
        "블록은 모델의 계획대로, 임베딩과 출력층은 열로. 여덟 장이 글 하나를 함께 계산한다. "
        "블록 사이의 순전파 상태와 로짓은 저마다 온전히 갖는다",
    ),
    "sequence": Words(
        "텐서 병렬 8 + 시퀀스 병렬", "PyTorch 2.3", "",
        "'input_layernorm': SequenceParallel()\n'self_attn.o_proj': RowwiseParallel(output_layouts=Shard(1))",
        "블록 사이를 토큰으로 나눈다",
    ),
    "loss_parallel": Words(
        "텐서 병렬 8 + 시퀀스 병렬 + 나누어진 로짓의 손실", "PyTorch 2.3", "",
        "'lm_head': ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)\n"
        "with loss_parallel(): loss_of(logits).backward()",
        "로짓을 어휘로 나눈 채 손실을 계산한다",
    ),
    "fsdp2_tensor": Words(
        "텐서 병렬 2 × FSDP2 4", FSDP2, "ParallelismConfig(tp_size=2, dp_shard_size=4)",
        "mesh = init_device_mesh('cuda', (4, 2), mesh_dim_names=('data', 'tensor'))\n"
        "fully_shard(part, mesh=mesh['data'])",
        "두 장이 글 하나를 함께 계산한다",
    ),
    "context": Words(
        "FSDP2 + 컨텍스트 병렬 8", "PyTorch 2.7(시험판)", "ParallelismConfig(cp_size=8)",
        "with context_parallel(mesh, buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]): "
        "loss_of(model(…)).backward()",
        "여덟 장이 글 하나를 토큰으로 나눈다. 어텐션은 키와 값을 돌려 가며 계산한다",
    ),
    "gpipe": Words(
        "파이프라인 8, GPipe: 첫 스테이지", "PyTorch 2.4", "",
        "stage = PipelineStage(part, rank, 8, device)\nScheduleGPipe(stage, 32, loss_fn=loss_of).step(ids)",
        "네 층씩. 글 하나가 마이크로 배치 하나이고, 모두 서른둘이다(누적 4의 글과 같은 수)",
    ),
    "one_f_one_b": Words(
        "파이프라인 8, 1F1B: 첫 스테이지", "PyTorch 2.4", "",
        "Schedule1F1B(stage, 32, loss_fn=loss_of).step(ids)",
        "마이크로 배치를 여덟 개까지만 붙든다",
    ),
    "one_f_one_b_last": Words(
        "파이프라인 8, 1F1B: 마지막 스테이지", "PyTorch 2.4", "",
        "Schedule1F1B(stage, 32, loss_fn=loss_of).step(target=ids)",
        "출력층이 여기 있다. 모든 마이크로 배치의 로짓을 스텝이 끝날 때까지 모은다",
    ),
    "interleaved": Words(
        "파이프라인 8, 인터리브 1F1B: 첫 카드", "PyTorch 2.4", "",
        "stages = [PipelineStage(part, number, 16, device) for number, part in ((rank, one), (rank + 8, two))]\n"
        "ScheduleInterleaved1F1B(stages, 32, loss_fn=loss_of).step(ids)",
        "스테이지가 열여섯이고 카드마다 둘이다. 버블이 줄고, 보내는 양은 세 배다",
    ),
    "interleaved_last": Words(
        "파이프라인 8, 인터리브 1F1B: 마지막 카드", "PyTorch 2.4", "",
        "ScheduleInterleaved1F1B(stages, 32, loss_fn=loss_of).step(target=ids)", "출력층이 여기 있다",
    ),
    "zero_bubble": Words(
        "파이프라인 8, 제로 버블(ZBV): 첫 카드", "PyTorch 2.6", "",
        "stages = [PipelineStage(part, number, 16, device) for number, part in ((rank, one), (15 - rank, two))]\n"
        "ScheduleZBVZeroBubble(stages, 32, loss_fn=loss_of).step(ids, target=ids)",
        "임베딩도 출력층도 여기 있다. 역전파를 둘로 나누므로, 체크포인팅을 켜면 나눈 조각마다 블록을 다시 계산한다",
    ),
    "zero_bubble_last": Words(
        "파이프라인 8, 제로 버블(ZBV): 마지막 카드", "PyTorch 2.6", "",
        "ScheduleZBVZeroBubble(stages, 32, loss_fn=loss_of).step()", "V의 한가운데다",
    ),
    "experts": Words(
        "전문가 병렬 8", "", "",
        f"config = DistributedConfig(fsdp_size=8, ep_size=8, {HALVES})\n{DISTRIBUTED}",
        "전문가는 열여섯씩 통째로 카드에 있고 토큰이 오간다. 토큰은 배치만큼 늘고, 모아야 하는 가중치는 늘지 않는다. "
        "나머지는 FSDP2. 최대는 이제 전문가가 아니라 임베딩의 그레이디언트에 있다",
    ),
    "experts_in_fours": Words(
        "전문가 병렬 4", "", "",
        f"config = DistributedConfig(fsdp_size=8, ep_size=4, {HALVES})\n{DISTRIBUTED}",
        "네 장이 전문가를 나누고, 같은 전문가를 가진 두 장이 그것을 다시 FSDP2로 나눈다. 최대가 전문가에 있지 않아 "
        "8과 같고, 보내는 양만 는다",
    ),
    "experts_tensors": Words(
        "전문가 병렬 8, 나머지는 텐서 병렬 2 × FSDP2 4", "", "",
        f"config = DistributedConfig(tp_size=2, fsdp_size=4, ep_size=8, {HALVES})\n{DISTRIBUTED}",
        "두 장이 글 하나를 함께 계산하므로 연산이 절반이다",
    ),
    "layout_first": Words(
        "첫 스테이지", "PyTorch 2.4", "", "", "임베딩과 일곱 층. 마이크로 배치를 열여섯 개까지 붙든다",
    ),
    "layout_last": Words(
        "마지막 스테이지", "PyTorch 2.4", "", "",
        "일곱 층과 출력층. 마이크로 배치를 하나만 붙든다. 로짓은 어휘로 나뉘어 있다",
    ),
    "layout_sums_16": Words(
        "그레이디언트를 bf16으로 더한다", FSDP2, "", "MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)",
        "쌓이는 그레이디언트가 절반이다. 많은 카드의 합을 bf16으로 하면 작은 값이 사라질 수 있다",
    ),
    "layout_interleaved": Words(
        "인터리브 1F1B: 카드마다 네 층짜리 스테이지 둘, 둘째 카드", "PyTorch 2.4", "",
        "ScheduleInterleaved1F1B([one, two], 16)",
        "버블이 준다. 이 배열에서는 최대가 거의 같다",
    ),
    "layout_zero_bubble": Words(
        "제로 버블(ZBV): 카드마다 네 층짜리 스테이지 둘, 둘째 카드", "PyTorch 2.6", "",
        "ScheduleZBVZeroBubble([one, two], 16)",
        "마이크로 배치가 열여섯뿐이라 뒤쪽 카드보다 적게 붙든다",
    ),
    "layout_zero_bubble_last": Words(
        "제로 버블(ZBV): 마지막 카드", "PyTorch 2.6", "", "ScheduleZBVZeroBubble([one, two], 16)",
        "V의 한가운데. 뒤쪽 카드일수록 많이 붙든다. 마이크로 배치가 31개를 넘으면 어느 카드나 이만큼이다",
    ),
    "layout_compiled": Words(
        "블록마다 `torch.compile`", "PyTorch 2.4", "", "for block in stage.layers: block.compile()",
        "합친 연산의 중간 결과를 남기지 않는다. 모아 온 입력은 여전히 남는다",
    ),
    "layout_products": Words(
        "선택적 체크포인팅: 곱, 어텐션, reduce-scatter의 결과는 남긴다", "PyTorch 2.4", "",
        "kept = [mm, attention, torch.ops._c10d_functional.reduce_scatter_tensor.default]",
        "행으로 나눈 곱(`o_proj`, `down_proj`)의 결과는 더하기 전이라 카드마다 온전한 크기다. "
        "모아 온 입력을 남기지 않는 대신 이것이 남는다",
    ),
    "layout_columns": Words(
        "위와 같되 행으로 나눈 곱은 다시 계산한다", "PyTorch 2.4", "",
        "by_rows = op is mm and any(part.is_shard(1) for part in args[0].placements)\n"
        "return MUST_SAVE if op in kept and not by_rows else PREFER_RECOMPUTE",
        "나머지는 모두 다시 계산한다(모으는 일, 정규화, 활성 함수). 남는 것은 모두 여덟으로 나뉜 것이다",
    ),
    "layout_checkpointing": Words(
        "블록마다 체크포인팅", "PyTorch 1.11", "", "checkpoint(block, x, use_reentrant=False)",
        "블록의 입력은 토큰으로 나뉘어 있다",
    ),
    "layout_resharded": Words(
        "블록마다 체크포인팅, 순전파 뒤에 파라미터를 다시 나눈다", FSDP2, "",
        "fully_shard(part, mesh=mesh['data'], reshard_after_forward=True)",
        "거의 줄지 않고, 마이크로 배치마다 한 번씩 더 모은다. PyTorch의 파이프라인은 마지막 마이크로 배치가 아니면 "
        "역전파 뒤에 다시 나누지 않는다",
    ),
    "layout_tensor_fsdp2": Words(
        "파이프라인 없이: 텐서 병렬 8 × FSDP2 2,048, 체크포인팅", FSDP2, "",
        "mesh = init_device_mesh('cuda', (2048, 8), mesh_dim_names=('data', 'tensor'))",
        "8장이 글 하나를 계산한다(출발점은 128장이 16개이므로 한 장의 몫은 같다). 126층을 차례로 모은다",
    ),
    "fsdp2_lora": Words(
        "FSDP2 + LoRA", FSDP2, "fsdp=True, fsdp_config={'version': 2}",
        "for part in (embedding, *blocks, [norm, head], model): fully_shard(part, mp_policy=policy)",
        "얼린 가중치까지 나눈다. 보내는 것은 거의 다 얼린 가중치다",
    ),
    "ddp_qlora": Words(
        "DDP + QLoRA", "transformers 4.30",
        f"from_pretrained(name, device_map={{'': local_rank}}, quantization_config={QLORA}, "
        "bnb_4bit_use_double_quant=True))",
        "", "",
    ),
    "fsdp2_qlora": Words(
        "FSDP2 + QLoRA", "bitsandbytes 0.43",
        f"from_pretrained(name, quantization_config={QLORA}, bnb_4bit_use_double_quant=True, "
        "bnb_4bit_quant_storage=torch.bfloat16))",
        "",
        "4비트를 16비트 자리에 담아야 나누어진다. 층은 가상 GPU의 것이다",
    ),
}  # fmt: skip
CARD_BASE_WORDS = {
    "1.3b-x2": "polyglot-ko-1.3b를 T4 두 장에서 전체 미세 조정, DDP: fp16 혼합 정밀도(fp32 가중치), "
    "카드마다 16 × 256, 체크포인팅, fused AdamW",
    "8b-x8": "Llama-3.1-8B를 H100 여덟 장에서 전체 미세 조정, DDP: bf16 혼합 정밀도(fp32 가중치), 카드마다 1 × 2048, "
    "체크포인팅, fused AdamW",
    "8b-long-x8": "위와 같되 FSDP2이고, 카드마다 1 × 16384",
    "70b-x8": "Llama-3.1-70B를 H100 여덟 장에서 전체 미세 조정, FSDP2: bf16 가중치 그대로, 카드마다 1 × 2048, "
    "체크포인팅, fused AdamW",
    "405b-x16384": "Llama-3.1-405B를 H100 16,384장에서 사전 학습, Meta의 배열(Llama 3 논문, arXiv 2407.21783): "
    "텐서와 시퀀스 병렬 8 × 파이프라인 16(마이크로 배치 16 × 1 × 8192) × FSDP2 128(순전파 뒤에도 파라미터를 모은 채로 "
    "둔다), bf16으로 계산하고 그레이디언트는 fp32로 더한다, 체크포인팅 없음. 순서(1F1B)와 옵티마이저(fused AdamW)는 "
    "여기서 골랐다. 1F1B에서 가장 많이 드는 둘째 스테이지",
    "moe-x8": "Qwen3-30B-A3B를 H100 여덟 장에서 전체 미세 조정, transformers의 FSDP2: bf16 혼합 정밀도(fp32 가중치), "
    "카드마다 1 × 2048, 체크포인팅, fused AdamW",
    "8b-lora-x2": "Llama-3.1-8B를 RTX 3090 두 장에서 LoRA(rank 16, 모든 선형층), DDP: bf16 가중치, autocast, "
    "카드마다 1 × 2048, 체크포인팅",
}
CARD_GROUPS = {
    "cards": "나누어 갖기: DDP, ZeRO, FSDP2",
    "cards_split": "나누어 계산하기: 텐서, 토큰, 층",
    "cards_layout": "405B를 16,384장에",
    "cards_experts": "전문가를 나누어 갖기(MoE)",
    "cards_lora": "LoRA와 QLoRA",
}
CARDS_HEAD = """
## 여러 장

카드가 여러 장이면 무엇을 나누어 갖느냐가 레버다. 여럿 가운데 **한 장**(rank 하나)의 프로그램을 가상 GPU에서
실행했다. 다른 카드에 보내는 것은
PyTorch의 가짜 process group이 받고, 나누고 모으는 것은 PyTorch의 코드가 그대로 한다. 다만 DDP의 C++ reducer는
값을 읽으므로, 그레이디언트를 모아 보내는 묶음(버킷)은
가상 GPU가 대신 만든다. 무엇이 왜 줄어드는지는 [6장](../notebooks/ko/06_distributed_zero.ipynb)과
[7장](../notebooks/ko/07_split_model.ipynb)에 있다.

- **예약**은 할당자가 카드에서 가장 많이 잡았을 때의 양이다(GiB, 한도가 없을 때).
- **보내는 양**은 이 카드가 한 스텝에 부르는 집합 통신의 바이트다. 들어가는 것과 나오는 것 가운데 큰 쪽을 세고,
  all-reduce는 두 번으로
  친다(6.3절). 고리로 이은 N장에서 한 장이 보내는 것은 그 (N − 1)/N배다.
- NCCL의 버퍼는 할당자 밖에 있어 최대에 없다. 들어가는지는 한도에서 그것(통신하는 그룹마다, 카드가 둘이면 {two} MiB,
  더 많으면 {more} MiB로 보았다)을 뺀 나머지로 정했다. 예약이 그 안이면 들어간다. 예약은 넘고 최대는 넘지 않으면
  그 한도를 걸고 다시 실행해, 할당자가 빈자리를 돌려주고 끝까지 가면 들어간다고 적었다. 그래서 최대가 같아도 판정이
  다를 수 있다.
- 연산은 카드 한 장의 것이다.
- 전문가는 차례로 골랐다(라우터의 점수를 모르므로). 토큰이 한쪽에 몰리면 그 카드는 더 받고 더 쓴다(7.6절).
- FSDP2의 행은 모두 임베딩, 블록, 출력층을 저마다 묶은 것이고, accelerate처럼 묶은 것은 따로 한 행이다. `moe-x8`만은
  transformers가 묶는 대로이고, 그레이디언트를 fp32로 더한다(그래서 파라미터당 8바이트를 보낸다).
- `DistributedConfig`는 `from_pretrained`에 준다. 직접 쓴 루프는 `examples/train_experts.py`에 있다.
- `ParallelismConfig`는 `TrainingArguments`와 `Accelerator`의 `parallelism_config=`에,
  `FullyShardedDataParallelPlugin`은 `Accelerator`의 `fsdp_plugin=`에 준다.
"""
CARDS_WAITING = """
여러 장에서 세지 못한 것:

- polyglot의 텐서 병렬: fp16의 `GradScaler`는 나눈 그레이디언트(DTensor)와 나누지 않은 것을 함께 받지 못한다
  (PyTorch 2.13의 오류).
- DDP의 `static_graph=True`: 묶음의 수와 크기를 바꾸지 않는다. 그 밖의 것은 C++ reducer 안에 있어 보지 못한다.
- DDP의 `register_comm_hook`(fp16으로 줄여 보내기): 훅은 실행하지 않는다.
- FSDP2의 `CPUOffloadPolicy`는 고정하지 않은 RAM(`pin_memory=False`)으로 실행했다. 카드의 바이트는 같다.
"""
