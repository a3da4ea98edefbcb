"""The course's experiment on one process, several GPUs or several nodes: the same script for every engine.

    python examples/train_distributed.py --model gpt2 --layers 2                                        # one process
    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py --model gpt2 --layers 2      # DDP
    accelerate launch --config_file configs/fsdp2.yaml examples/train_distributed.py --model gpt2       # as the file says

Accelerate turns the launcher's environment into an engine, and now and then into a lesser one than was asked for,
without a word. So this script compares what it got with what was asked, and stops where they differ. At the end rank 0
prints the engine, the losses, and the bytes that every rank holds at its first optimizer step.

Every rank first builds the whole model in fp32 in its CPU memory (but under ZeRO-3, which shards as it builds).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, set_seed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from helpers.data import make_dummy_dataset
from helpers.experiment import with_depth
from helpers.gpu import storage_bytes
from helpers.language import tr
from helpers.models import DEFAULT_MODEL, build_model, load_config
from helpers.training import enable_checkpointing, make_optimizer
from helpers.units import human_bytes, positive_int

RANK = int(os.environ.get("RANK", 0))
ALONE = tr(ko="프로세스 하나", en="one process")


def stop(ko: str, en: str) -> NoReturn:
    """End this rank with status 2; rank 0 says why."""
    if RANK > 0:
        time.sleep(10)  # torchrun ends all ranks with the first that fails: the one that speaks goes first
    print(tr(ko=f"멈춤: {ko}", en=f"Stopped: {en}"), file=sys.stderr, flush=True)
    sys.exit(2)


# -- what was asked --------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        stop(ko=f"인자를 읽을 수 없다. {message}", en=f"bad arguments. {message}")


def positive(text: str) -> int:
    try:
        return positive_int(int(text) if text.lstrip("-").isdigit() else text, tr(ko="값", en="value"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def read_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="hub id, bundled architecture, or folder with a config.json")
    add("--layers", type=positive, help="build only so many layers of it")
    add("--pretrained", action="store_true", help="load the weights; otherwise they are random")
    add("--batch-size", type=positive, default=1, help="micro-batch of one rank")
    add("--accumulation", type=positive, default=1, help="micro-batches per optimizer step")
    add("--steps", type=positive, default=3, help="optimizer steps")
    add("--length", type=positive, default=256, help="tokens per sample")
    add("--learning-rate", type=float, default=5e-5)
    add("--checkpointing", action="store_true", help="gradient checkpointing")
    add("--fully-shard", action="store_true", help="FSDP2 by this script's own hand, where accelerate does not do it")
    add("--expect-ranks", type=positive, help="stop unless exactly so many ranks work together")
    add("--report", type=Path, help="write the report as JSON, too")
    return parser.parse_args()


@dataclass
class Asked:
    """What the launcher and the arguments ask for."""

    engine: str
    ranks: int
    offload: bool


def what_was_asked(args: argparse.Namespace) -> Asked:
    """Read the launcher's environment; stop where it cannot lead to what the reader wants."""
    env = os.environ
    flags = {name: env.get(f"ACCELERATE_USE_{name}", "false").lower() == "true" for name in ("DEEPSPEED", "FSDP")}
    ranks = int(env.get("WORLD_SIZE", 1))
    # accelerate's launcher for a CPU gives the address of a meeting point, but starts one process and nobody else.
    if "LOCAL_RANK" not in env and "MASTER_ADDR" in env and args.expect_ranks != 1:
        stop(
            ko="프로세스를 여러 개 요청했지만 하나만 떴다(accelerate launch --cpu는 --num_processes와 설정 파일의 엔진을 "
            "무시한다). --cpu를 빼거나 torchrun을 쓴다. 정말 하나면 되면 --expect-ranks 1을 준다.",
            en="several processes were asked for and one was started (accelerate launch --cpu ignores --num_processes "
            "and the file's engine). Leave --cpu out, or use torchrun. If one is enough: --expect-ranks 1.",
        )
    if args.expect_ranks not in (None, ranks):
        stop(
            ko=f"랭크 {args.expect_ranks}개를 기대했는데 {ranks}개가 떴다. torchrun의 --nnodes와 --nproc-per-node, 설정 파일의 "
            "num_machines와 num_processes를 확인한다.",
            en=f"{args.expect_ranks} ranks were expected and {ranks} came. Look at torchrun's --nnodes and "
            "--nproc-per-node, or at num_machines and num_processes in the file.",
        )
    here = int(env.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and here > torch.cuda.device_count():
        stop(
            ko=f"이 노드에 GPU가 {torch.cuda.device_count()}개인데 랭크를 {here}개 띄웠다. 랭크마다 GPU가 하나씩 있어야 한다.",
            en=f"{here} ranks on a node with {torch.cuda.device_count()} GPUs: every rank needs its own.",
        )
    if flags["DEEPSPEED"]:
        if args.fully_shard:
            stop(ko="--fully-shard는 DeepSpeed와 함께 쓸 수 없다.", en="--fully-shard does not go with DeepSpeed.")
        if importlib.util.find_spec("deepspeed") is None:
            stop(
                ko="설정 파일은 DeepSpeed를 요청하는데 설치되어 있지 않다. 'pip install deepspeed'로 설치하거나 configs/fsdp2.yaml을 쓴다.",
                en="the file asks for DeepSpeed, which is not installed: 'pip install deepspeed', or configs/fsdp2.yaml.",
            )
        engine = f"DeepSpeed ZeRO-{env.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
        return Asked(engine, ranks, env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == "cpu")
    if flags["FSDP"] and env.get("FSDP_VERSION") != "2":
        stop(ko="FSDP 1은 지원하지 않는다. 설정에 fsdp_version: 2를 쓴다.", en="not FSDP 1: set fsdp_version: 2.")
    if flags["FSDP"] or args.fully_shard:
        if "LOCAL_RANK" not in env:
            stop(
                ko="FSDP2에는 torchrun이나 accelerate launch가 필요하다.",
                en="FSDP2 takes torchrun or accelerate launch.",
            )
        return Asked("FSDP2", ranks, False)
    return Asked("DDP" if ranks > 1 else ALONE, ranks, False)


# -- what came ---------------------------------------------------------------------------------------------------------


def start_engine(args: argparse.Namespace, asked: Asked) -> Accelerator:
    """The accelerator; stop unless all ranks that were asked for are in one group, and accelerate knows it."""
    cpu, handlers = not torch.cuda.is_available(), []
    if cpu and asked.engine.startswith("DeepSpeed"):
        # cpu=True would drop DeepSpeed, and without a backend every rank would take itself for the only one.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        handlers, cpu = [InitProcessGroupKwargs(backend="gloo")], False
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=args.accumulation, kwargs_handlers=handlers)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not world == accelerator.num_processes == asked.ranks:
        stop(
            ko=f"랭크 {asked.ranks}개를 요청했는데 통신하는 랭크는 {world}개, accelerate가 아는 랭크는 "
            f"{accelerator.num_processes}개다. 이대로면 랭크마다 따로 학습한다.",
            en=f"{asked.ranks} ranks asked for, {world} communicate, accelerate knows of {accelerator.num_processes}: "
            "each would train on its own.",
        )
    if asked.engine == "FSDP2" and accelerator.distributed_type != DistributedType.FSDP and not args.fully_shard:
        stop(
            ko="FSDP2를 요청했지만 accelerate가 적용하지 않았다(CPU에서는 fsdp_config를 무시하고 DDP로 돌린다). GPU에서 "
            "돌리거나, 이 스크립트가 직접 나누도록 --fully-shard를 준다.",
            en="FSDP2 was asked for and accelerate does not apply it (on a CPU it ignores fsdp_config and takes DDP). Run "
            "on GPUs, or let this script shard by itself: --fully-shard.",
        )
    return accelerator


def engine_of(model: torch.nn.Module) -> str:
    """The engine by what the model has become, not by what any setting says."""
    if type(model).__module__.startswith("deepspeed"):
        return f"DeepSpeed ZeRO-{model.zero_optimization_stage()}"
    if isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters()):
        return "FSDP2"
    return "DDP" if isinstance(model, DistributedDataParallel) else ALONE


def build(args: argparse.Namespace) -> torch.nn.Module:
    """The model on the CPU in fp32, from its configuration alone or with its weights."""
    try:
        config = load_config(args.model)
    except ValueError as error:
        stop(ko=str(error), en=str(error))
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and args.length > limit:
        stop(
            ko=f"길이 {args.length}: {args.model}의 최대 길이는 {limit}이다.",
            en=f"length {args.length}: {args.model} goes up to {limit}.",
        )
    set_seed(0)  # the same weights on every rank
    if args.pretrained:
        from transformers import AutoModelForCausalLM

        if args.layers:
            stop(ko="--pretrained와 --layers는 함께 쓸 수 없다.", en="--pretrained does not go with --layers.")
        return AutoModelForCausalLM.from_pretrained(config.name_or_path or args.model, dtype=torch.float32)
    return build_model(with_depth(config, args.layers) if args.layers else config, torch.float32, device="cpu")


def shard(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """ZeRO-3 by PyTorch itself: every block is a group that is gathered for its computation and let go after it."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    model.to(accelerator.device)
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 0)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Held:
    """Bytes on this rank at the first optimizer step, distinct storages once.

    Counted where the innermost optimizer steps, whatever the engine wraps around it: the gradients are those that this
    optimizer gets, and weights of its own (DeepSpeed's fp32 copies) belong to the optimizer state.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any):
        self.model, self.gradients, self.masters, self.devices = model, 0, 0, set()
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        self.optimizer = optimizer
        self.hook = optimizer.register_step_pre_hook(self.before_step)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = [local(p) for group in optimizer.param_groups for p in group["params"]]
        grads = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        models = {p.untyped_storage().data_ptr() for p in self.parameters()}
        self.gradients += storage_bytes(grads)  # ZeRO-3 steps once for every group of parameters
        self.masters += storage_bytes(p for p in stepped if p.untyped_storage().data_ptr() not in models)

    def parameters(self) -> list[torch.Tensor]:
        return [local(getattr(p, "ds_tensor", p)) for p in self.model.parameters()]

    def read(self, device: torch.device) -> dict:
        """The rank's row of the report."""
        self.hook.remove()
        values = [local(v) for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        states = [v for v in values if v.dim() > 0]  # AdamW's step counters are scalars on the CPU
        return {
            "rank": RANK,
            "device": str(device),
            "parameters": storage_bytes(self.parameters()),
            "gradients": self.gradients,
            "optimizer": storage_bytes(states) + self.masters,
            "optimizer_on": sorted({v.device.type for v in states}),
        }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- training ----------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, asked: Asked, accelerator: Accelerator) -> dict:
    """Train, and return the report: what came, losses per optimizer step, a row per rank (bytes)."""
    by_hand = args.fully_shard and accelerator.distributed_type != DistributedType.FSDP
    if by_hand:
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # transformers would leave the other ranks empty
        if accelerator.mixed_precision == "fp16":
            stop(ko="--fully-shard는 fp16을 지원하지 않는다. bf16을 쓴다.", en="--fully-shard: bf16, not fp16.")
    model = build(args)
    model.config.use_cache = False
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    vocabulary = min(30000, model.config.vocab_size)
    samples = args.steps * args.accumulation * args.batch_size * asked.ranks
    loader = DataLoader(make_dummy_dataset(samples, args.length, vocabulary), batch_size=args.batch_size)
    if args.checkpointing:
        enable_checkpointing(model)
    model.train()
    if by_hand:
        model = shard(model, accelerator)
        optimizer, loader = accelerator.prepare(make_optimizer("adamw", model, args.learning_rate), loader)
    else:
        model, optimizer, loader = accelerator.prepare(
            model, make_optimizer("adamw", model, args.learning_rate), loader
        )
    if engine_of(model) != asked.engine:
        stop(
            ko=f"{asked.engine}을(를) 요청했는데 실제로는 {engine_of(model)}이다.",
            en=f"{asked.engine} was asked for, {engine_of(model)} came.",
        )
    set_seed(0, device_specific=True)  # from here on, a rank has its own random numbers (dropout)
    held, row, losses, group = Held(model, optimizer), None, [], []
    for batch in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast() if by_hand else contextlib.nullcontext():
                loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        group.append(loss.detach())
        if len(group) == args.accumulation:
            row = row or held.read(accelerator.device)
            losses.append(accelerator.gather(torch.stack(group).mean()).mean().item())
            group = []
    if torch.cuda.is_available():
        row["peak"] = torch.cuda.max_memory_allocated()
    rows = [row]
    if asked.ranks > 1:
        rows = [None] * asked.ranks
        dist.all_gather_object(rows, row)
    if asked.offload and any(row["optimizer_on"] != ["cpu"] for row in rows):
        stop(ko="옵티마이저 상태를 CPU로 옮기지 않았다.", en="the optimizer state was not offloaded to the CPU.")
    return {
        "engine": engine_of(model),
        "by_hand": by_hand,
        "ranks": len(rows),
        "precision": accelerator.mixed_precision,
        "parameters": elements,
        "losses": losses,
        "rows": rows,
    }


def report_text(report: dict, args: argparse.Namespace, asked: Asked) -> str:
    """The report for a reader."""
    hand = tr(ko=", 이 스크립트가 직접", en=", by this script") if report["by_hand"] else ""
    kinds = {
        "parameters": tr(ko="파라미터", en="parameters"),
        "gradients": tr(ko="그레이디언트", en="gradients"),
        "optimizer": tr(ko="옵티마이저 상태", en="optimizer state"),
        "peak": tr(ko="최대 메모리", en="peak"),
    }
    batch = f"{args.batch_size} × {args.accumulation} × {report['ranks']}"
    lines = [
        tr(
            ko=f"엔진: {report['engine']}{hand} (요청: {asked.engine}) · 랭크: {report['ranks']}개 (요청: {asked.ranks}개)",
            en=f"engine: {report['engine']}{hand} (asked: {asked.engine}) · ranks: {report['ranks']} ({asked.ranks})",
        ),
        tr(
            ko=f"모델: {args.model}, 파라미터 {report['parameters']:,}개 · 혼합 정밀도: {report['precision']} · "
            f"배치 × 누적 × 랭크: {batch} · 길이: {args.length}",
            en=f"model: {args.model}, {report['parameters']:,} parameters · mixed precision: {report['precision']} · "
            f"batch × accumulation × ranks: {batch} · length: {args.length}",
        ),
    ]
    for row in report["rows"]:
        sizes = ", ".join(f"{word} {human_bytes(row[kind])}" for kind, word in kinds.items() if kind in row)
        lines.append(
            tr(ko=f"랭크 {row['rank']} ({row['device']}): {sizes}", en=f"rank {row['rank']} ({row['device']}): {sizes}")
        )
    lines.append(tr(ko="손실: ", en="losses: ") + " ".join(f"{loss:.3f}" for loss in report["losses"]))
    return "\n".join(lines)


def main() -> None:
    args = read_arguments()
    asked = what_was_asked(args)
    accelerator = start_engine(args, asked)
    report = train(args, asked, accelerator)
    if RANK == 0:
        print(report_text(report, args, asked), flush=True)
        if args.report:
            args.report.write_text(json.dumps(report, indent=1))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
