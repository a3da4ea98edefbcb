"""The course's experiment on one process, several GPUs or several nodes: the same script for every engine.

    python examples/train_distributed.py --model gpt2 --layers 2                                      # one process
    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py --model gpt2 --layers 2    # DDP
    accelerate launch --config_file configs/fsdp2.yaml examples/train_distributed.py --model gpt2     # as in the file

What accelerate makes of the launcher's environment is compared with what was asked for, and the script stops where the
two differ. At the end rank 0 prints the engine, the bytes that every rank holds at its first optimizer step, and the
mean loss of every optimizer step. Every rank builds the whole model in fp32 in CPU memory before it is shared out,
except under ZeRO-3, which shares it out as it is built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader

from helpers.chapters.c6_distributed import engine
from helpers.data import make_dummy_dataset
from virtual_gpu.language import tr
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import DEFAULT_MODEL, load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.step.optimizers import make_optimizer
from virtual_gpu.step.run import enable_checkpointing
from virtual_gpu.units import human_bytes, positive_int


def main() -> None:
    args = read_arguments()
    try:
        asked = engine.what_was_asked(fully_shard=args.fully_shard, expect_ranks=args.expect_ranks)
        engine.check_machine(asked)
        accelerator = start(args, asked)
        engine.check_group(asked, accelerator.num_processes)
        report = train(args, asked, accelerator)
    except engine.EngineError as error:
        stop(error)
    if accelerator.is_main_process:
        print(as_text(report, args, asked), flush=True)
        if args.report:
            args.report.write_text(json.dumps(report, indent=1), encoding="utf-8")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    leave()


def start(args: argparse.Namespace, asked: engine.Asked) -> Accelerator:
    """The accelerator, told what it does not see by itself where there is no GPU."""
    cpu, handlers = not torch.cuda.is_available(), []
    if cpu and asked.deepspeed:
        # cpu=True would take DDP instead, and without a backend every rank would believe to be the only one.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        cpu, handlers = False, [InitProcessGroupKwargs(backend="gloo")]
    try:
        accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=args.accumulation, kwargs_handlers=handlers)
    except ValueError as error:  # a precision that this machine cannot compute in
        stop(error)
    engine.check_precision(asked, accelerator.mixed_precision, accelerator.native_amp)
    return accelerator


def experiment(args: argparse.Namespace, ranks: int) -> tuple[torch.nn.Module, Any]:
    """The model on the CPU in fp32, the same on every rank, and data for exactly the optimizer steps asked for."""
    try:
        config = load_config(args.model)
        if args.layers:
            config = with_depth(config, args.layers)
        limit = getattr(config, "max_position_embeddings", None) or args.length
        if args.length > limit:
            raise ValueError(
                tr(
                    ko=f"길이 {args.length}: {args.model}의 최대 길이는 {limit}이다.",
                    en=f"length {args.length}: {args.model} goes up to {limit}.",
                )
            )
        samples = args.steps * args.accumulation * args.batch_size * ranks
        dataset = make_dummy_dataset(samples, args.length, min(30000, config.vocab_size))
        set_seed(0)
        if args.pretrained:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(config.name_or_path, config=config, dtype=torch.float32)
        else:
            model = build_model(config, torch.float32, device="cpu")
    except (ValueError, OSError) as error:
        stop(error)
    model.config.use_cache = False
    if args.checkpointing:
        enable_checkpointing(model)
    return model.train(), dataset


def train(args: argparse.Namespace, asked: engine.Asked, accelerator: Accelerator) -> dict:
    """Train, and return the report: what came, the mean loss of every optimizer step, a row for every rank (bytes)."""
    by_hand = args.fully_shard and accelerator.distributed_type != DistributedType.FSDP
    if by_hand:
        if accelerator.mixed_precision == "fp16":  # a loss scale that overflows on one rank must be known to all
            stop(tr(ko="--fully-shard에는 fp16 대신 bf16을 쓴다.", en="--fully-shard wants bf16, not fp16."))
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # or transformers loads weights on rank 0 alone
    model, dataset = experiment(args, asked.ranks)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    loader = DataLoader(dataset, batch_size=args.batch_size)
    if by_hand:
        model = engine.shard(model, accelerator.device)
        optimizer, loader = accelerator.prepare(make_optimizer("adamw", model, args.learning_rate), loader)
    else:
        optimizer = make_optimizer("adamw", model, args.learning_rate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    engine.check_engine(asked, model)
    set_seed(0, device_specific=True)  # from here on every rank draws its own random numbers (dropout)

    first_step, row, losses, group = engine.FirstStep(model, optimizer), None, [], []
    for batch in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast() if by_hand else contextlib.nullcontext():
                loss = model(**batch).loss
            accelerator.backward(loss)  # divides by the micro-batches of a step
            optimizer.step()
            optimizer.zero_grad()
        group.append(loss.detach())
        if len(group) == args.accumulation:
            row = row or first_step.read()
            losses.append(accelerator.gather(torch.stack(group).mean()).mean().item())
            group = []

    row |= {"rank": accelerator.process_index, "device": accelerator.device.type}
    if row["device"] == "cuda":
        row["peak"] = torch.cuda.max_memory_allocated()
    rows = [row]
    if asked.ranks > 1:
        rows = [None] * asked.ranks
        dist.all_gather_object(rows, row)
    engine.check_offload(asked, rows)
    return {
        "engine": engine.engine_of(model),
        "by_hand": by_hand,
        "ranks": len(rows),
        "precision": accelerator.mixed_precision,
        "clipping": model.gradient_clipping() if asked.deepspeed else 0,  # DeepSpeed clips by itself
        "parameters": parameters,
        "losses": losses,
        "rows": rows,
    }


def as_text(report: dict, args: argparse.Namespace, asked: engine.Asked) -> str:
    """The report for a reader."""
    hand = tr(ko=", 이 스크립트가 직접", en=", by this script") if report["by_hand"] else ""
    words = {
        "parameters": tr(ko="파라미터", en="parameters"),
        "gradients": tr(ko="그레이디언트", en="gradients"),
        "optimizer": tr(ko="옵티마이저 상태", en="optimizer state"),
        "peak": tr(ko="최대 메모리", en="peak memory"),
    }
    name, ranks, rank = tr(ko="엔진", en="engine"), tr(ko="rank", en="ranks"), tr(ko="rank", en="rank")
    was_asked, losses = tr(ko="요청", en="asked for"), tr(ko="손실", en="losses")
    setting = {
        tr(ko="모델", en="model"): args.model,
        words["parameters"]: f"{report['parameters']:,}",
        tr(ko="혼합 정밀도", en="mixed precision"): report["precision"],
        tr(ko="배치 × 누적 × rank", en="batch × accumulation × ranks"): (
            f"{args.batch_size} × {args.accumulation} × {report['ranks']}"
        ),
        tr(ko="길이", en="length"): args.length,
    }
    if report["clipping"]:
        setting[tr(ko="그레이디언트 클리핑", en="gradient clipping")] = f"{report['clipping']:g}"
    lines = [
        f"{name}: {report['engine']}{hand} ({was_asked}: {asked.engine}) · "
        f"{ranks}: {report['ranks']} ({was_asked}: {asked.ranks})",
        " · ".join(f"{word}: {value}" for word, value in setting.items()),
    ]
    for row in report["rows"]:
        sizes = ", ".join(f"{word} {human_bytes(row[kind])}" for kind, word in words.items() if kind in row)
        lines.append(f"{rank} {row['rank']} ({row['device']}): {sizes}")
    return "\n".join([*lines, f"{losses}: " + " ".join(f"{loss:.3f}" for loss in report["losses"])])


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        stop(tr(ko=f"명령의 인자가 잘못되었다. {message}", en=f"bad arguments. {message}"))


def read_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="hub id, bundled architecture, or folder with a config.json")
    add("--layers", type=positive, help="build only so many of its layers")
    add("--pretrained", action="store_true", help="load the weights; otherwise they are random")
    add("--batch-size", type=positive, default=1, help="one rank's micro-batch")
    add("--accumulation", type=positive, default=1, help="micro-batches per optimizer step")
    add("--steps", type=positive, default=3, help="optimizer steps")
    add("--length", type=positive, default=256, help="tokens per sample")
    add("--learning-rate", type=positive_float, default=5e-5)
    add("--checkpointing", action="store_true", help="gradient checkpointing")
    add(
        "--fully-shard",
        action="store_true",
        help="FSDP2 by this script where accelerate does not do it (CPU, torchrun)",
    )
    add("--expect-ranks", type=positive, help="stop unless exactly so many ranks come")
    add("--report", type=Path, help="write the report to this JSON file as well")
    args = parser.parse_args()
    if args.pretrained and args.layers:
        parser.error(tr(ko="--pretrained와 --layers는 함께 쓸 수 없다.", en="--pretrained excludes --layers."))
    if args.report and not args.report.parent.is_dir():
        parser.error(
            tr(ko=f"--report: 폴더 {args.report.parent}가 없다.", en=f"--report: no folder {args.report.parent}.")
        )
    return args


def positive(text: str) -> int:
    try:
        return positive_int(int(text) if text.lstrip("-").isdecimal() else text, tr(ko="값", en="value"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_float(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(tr(ko=f"값={text!r}: 0보다 큰 수여야 한다.", en=f"{text!r}: a number above 0."))


def stop(reason: object) -> NoReturn:
    """End with status 2; rank 0 says why."""
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(10)  # torchrun ends all ranks with the first that fails: the one that speaks must be it
    print(tr(ko="멈춤:", en="Stopped:"), reason, file=sys.stderr, flush=True)
    sys.exit(2)


def leave() -> None:
    """Past the interpreter's exit, where a thread of gloo's aborts now and then; all is written by now."""
    if "RANK" in os.environ and not torch.cuda.is_available():
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
