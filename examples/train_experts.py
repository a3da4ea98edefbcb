"""Train all of a mixture of experts on several GPUs: by FSDP2, or with experts that stay where they are.

    torchrun --nproc-per-node 8 examples/train_experts.py my.txt                 # every block is gathered to compute it
    torchrun --nproc-per-node 8 examples/train_experts.py my.txt --experts 8     # the experts' tokens travel instead
    virtual-gpu run --gpu H100 --gpus 8 examples/train_experts.py --experts 8    # rank 0 of it, without a GPU

transformers (5.23) shares the model out while it loads it: `DistributedConfig`. Without a text the tokens are random.
"""

import argparse
import os
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))


def main() -> None:
    args = read_arguments()
    if RANKS == 1:
        raise SystemExit("one process shares nothing out: start several, with torchrun --nproc-per-node N")
    shared = DistributedConfig(fsdp_size=RANKS, ep_size=args.experts, fsdp_mixed_precision=True)
    layers = {"num_hidden_layers": args.layers} if args.layers else {}
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, distributed_config=shared, **layers
    ).train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh(model)], lr=args.lr, fused=True)
    device = next(model.parameters()).device
    for ids in batches(args, model.config.vocab_size):
        loss = model(input_ids=ids.to(device), labels=ids.to(device), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            print(f"loss {loss.item():.3f}", flush=True)


def by_mesh(model: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """The parameters, apart by the ranks that share them: a fused step does not take them together."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def batches(args: argparse.Namespace, words: int) -> list[torch.Tensor]:
    """This rank's token ids, (batch, length) for each step; every rank has others."""
    size = args.batch * args.length
    if args.text is None:
        draw = torch.Generator().manual_seed(RANK)
        return [torch.randint(words, (args.batch, args.length), generator=draw) for _ in range(args.steps)]
    ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(encoding="utf-8"), return_tensors="pt")
    tokens = ids.input_ids[0]
    steps = min(len(tokens) // (size * RANKS), args.steps)  # as many on every rank: they wait for each other
    if steps == 0:
        raise SystemExit(f"{args.text} has {len(tokens):,} tokens, one step of {RANKS} ranks takes {size * RANKS:,}")
    return [*tokens[: steps * RANKS * size].view(steps, RANKS, args.batch, args.length)[:, RANK]]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    parser.add_argument("--experts", type=int, default=1, help="ranks that have experts of their own")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
