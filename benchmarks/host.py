"""The host's RAM, predicted beside measured: a checkpoint loaded in every way that people load one.

A Llama of 297 M parameters is made in a folder (3 GB of files). Each way then runs twice, in processes of its own: on
this machine, where the kernel says what it took (VmHWM, and anonymous memory sampled every millisecond), and on a
virtual GPU, whose host is counted and where no weight is filled. "anonymous" is what kills a process; "mapped" are
pages of files, which count in VmHWM while nobody else needs the room.

`--processes` measures what a process takes before it has a tensor, and a DataLoader's processes (machines.json).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from virtual_gpu.host.process import host_growth
from virtual_gpu.terminal import tell

SIZE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 18,
    "num_attention_heads": 16, "tie_word_embeddings": False,
}  # fmt: skip
IMPORTS = (
    "pass",
    "import torch",
    "import torch, transformers",
    "import torch, datasets, peft; from transformers import AutoModelForCausalLM, Trainer, TrainingArguments",
)
Way = Callable[[Path], Any]


def build(folder: Path) -> torch.nn.Module:
    """The model with random weights in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "fp32"))


def pretrained(folder: Path, **how: Any) -> torch.nn.Module:
    """`from_pretrained`, of safetensors."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **how)


def loaded(folder: Path, *, mmap: bool = False, meta: bool = False) -> torch.nn.Module:
    """Build the model, and load the state of a pickle into it."""
    if meta:
        with torch.device("meta"):
            model = build(folder)
    else:
        model = build(folder)
    model.load_state_dict(torch.load(folder / "fp32.pt", mmap=mmap), assign=meta)
    return model


def copied(folder: Path) -> tuple:
    """A model and a second copy of its state, as one kept for the best epoch."""
    model = build(folder)
    return model, {name: value.clone() for name, value in model.state_dict().items()}


def stepped(folder: Path) -> tuple:
    """A step of AdamW on the CPU: gradients and two moments, in fp32."""
    model = build(folder)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


WAYS: dict[str, Way] = {
    "build in fp32": build,
    "build in fp32, .half()": lambda folder: build(folder).half(),
    "torch.load": lambda folder: torch.load(folder / "fp32.pt"),
    "torch.load, mmap=True": lambda folder: torch.load(folder / "fp32.pt", mmap=True),
    "build, torch.load, load_state_dict": loaded,
    "build, torch.load mmap=True, load_state_dict": lambda folder: loaded(folder, mmap=True),
    "build on meta, torch.load, assign=True": lambda folder: loaded(folder, meta=True),
    "from_pretrained fp32 files": lambda folder: pretrained(folder / "fp32"),
    "from_pretrained fp32 files, dtype=bfloat16": lambda folder: pretrained(folder / "fp32", dtype=torch.bfloat16),
    "from_pretrained bf16 files, dtype='auto'": lambda folder: pretrained(folder / "bf16", dtype="auto"),
    "from_pretrained bf16 files, dtype=float32": lambda folder: pretrained(folder / "bf16", dtype=torch.float32),
    "build, state_dict copied": copied,
    "build, one step of AdamW on the CPU": stepped,
}


def _copied() -> tuple:
    model = torch.nn.Linear(4096, 4096)
    return model, {name: value.clone() for name, value in model.state_dict().items()}


def _stepped() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2**24))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], foreach=False)
    optimizer.step()
    return optimizer


# Without transformers and files, in one process, for the tests: tensors of 64 MiB, which malloc takes from the kernel.
SMALL: dict[str, Callable[[], Any]] = {
    "build": lambda: torch.nn.Linear(4096, 4096),
    "build, .half()": lambda: torch.nn.Linear(4096, 4096, bias=False).half(),
    "state_dict copied": _copied,
    "one step of AdamW": _stepped,
    "a list of batches": lambda: [torch.ones(2**24) for _ in range(3)],
}


def small() -> dict[str, int]:
    """Bytes by which each of SMALL raises what this process holds: the kernel's own mark, since no file is mapped.

    Sampled anonymous memory would miss the end of `.half()`, whose peak lasts less than a millisecond.
    """
    torch.set_num_threads(1)
    found = {}
    for name, way in SMALL.items():
        way()  # the code that it imports and touches first is no part
        gc.collect()
        with host_growth() as grown:
            kept = way()
        del kept
        found[name] = grown.peak_rss
    return found


def measure(way: Way, folder: Path) -> dict[str, int]:
    """Bytes by which the kernel says that this process grew. Measured after one small model: imports are no part."""
    if (folder / "fp32").exists():
        from transformers import LlamaConfig, LlamaForCausalLM

        tiny = dict.fromkeys(SIZE, 16) | {
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "tie_word_embeddings": False,
        }
        LlamaForCausalLM(LlamaConfig(**tiny))
    gc.collect()
    with host_growth() as grown:
        kept = way(folder)
    del kept
    return {"anonymous": grown.peak_anonymous, "resident": grown.peak_rss}


def predict(way: Way, folder: Path) -> dict[str, int]:
    """Bytes that the virtual host counts, and by which this process really grew meanwhile."""
    import virtual_gpu

    with virtual_gpu.cuda("A100", limited=False) as gpu, host_growth() as grown:
        kept = way(folder)
        report = gpu.host.report()
        del kept
    return {"anonymous": report.peak, "mapped": report.mapped, "really": grown.peak_anonymous}


def make(folder: Path) -> None:
    """The checkpoint: safetensors in fp32 and bf16, and a pickle in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    model.save_pretrained(folder / "fp32")
    torch.save(model.state_dict(), folder / "fp32.pt")
    model.to(torch.bfloat16).save_pretrained(folder / "bf16")


def processes() -> None:
    """Print what a process holds after its imports, and what a DataLoader's processes add."""
    show = "print(*(int(x.split()[1]) // 1000 for x in open('/proc/self/status') if x[:5] in ('VmRSS', 'RssAn')))"
    for line in IMPORTS:
        code = f"{line}\n{show}"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        rss, anonymous = out.split()[-2:]
        print(f"resident {rss:>5} MB, anonymous {anonymous:>5} MB: {line}")
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import Trainer  # noqa: F401

    data = TensorDataset(torch.zeros(2560, 1024))
    for start in ("fork", "spawn"):
        batches = iter(DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context=start))
        for _ in range(200):
            next(batches)
        for worker in batches._workers:
            rollup = Path(f"/proc/{worker.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            found = {name: int(rest.split()[0]) // 1000 for name, _, rest in (x.partition(":") for x in rollup[1:])}
            private = found["Private_Clean"] + found["Private_Dirty"]
            print(f"{start}: private {private} MB, shared and written by the parent {found['Shared_Dirty']} MB")
        del batches
        time.sleep(0.5)


def main() -> None:
    """Print the table; with --one, a single way as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--small", action="store_true", help="five ways without files, as JSON, for the tests")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--virtual", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is made (3 GB)")
    args = parser.parse_args()
    if args.processes:
        return processes()
    if args.small:
        return print(json.dumps(small()))
    if args.one:
        found = (predict if args.virtual else measure)(WAYS[args.one], args.folder)
        return print(json.dumps(found))
    if args.make:
        return make(args.folder)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        command = [sys.executable, __file__, "--folder", str(folder)]
        if not (folder / "bf16").exists():
            tell("making the checkpoint, 3 GB … Ctrl+C stops")
            subprocess.run([*command, "--make"], check=True, stderr=subprocess.DEVNULL)
        print("| way | predicted, anonymous | measured | predicted, with mapped | VmHWM | the prediction itself took |")
        print("|---|---|---|---|---|---|")
        for number, way in enumerate(WAYS, 1):
            tell(f"{number} of {len(WAYS)}: {way} … Ctrl+C stops")
            real, virtual = (
                json.loads(
                    subprocess.run(
                        [*command, "--one", way, *more], capture_output=True, text=True, check=True
                    ).stdout.splitlines()[-1]
                )
                for more in ([], ["--virtual"])
            )
            both = virtual["anonymous"] + virtual["mapped"]
            row = (virtual["anonymous"], real["anonymous"], both, real["resident"], virtual["really"])
            print(f"| {way} | " + " | ".join(f"{n / 1e6:,.0f}" for n in row) + " |", flush=True)
    return None


if __name__ == "__main__":
    main()
