"""Run the cases: `python -m benchmarks.claims --side virtual` here, `--side card` on a machine with a card.

Each case is a process. Those that ask for the card alone run one by one, before and after the others, of which as many
run side by side as fit in the memory. Rows are appended to OUT/claims.jsonl.gz as each case ends; requests that were
recorded, to OUT/claims_traces.tar.gz at the end.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from virtual_gpu.terminal import tell

from .cases import CASES, FIRST, LAST, MODELS, MORE, TOGETHER, Case

ROOM = 74.0  # GiB of the card that cases side by side may take
CARD = "H100"
MOST_BYTES = 14 * 2**20  # of the traces' archive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("card", "virtual"), required=True)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", nargs="*", default=None, help="beginnings of cases' names")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=8.0, help="after so many nothing new begins")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.side)
        return 0
    chosen = [case for case in CASES.values() if given.only is None or case.name.startswith(tuple(given.only))]
    if given.side == "virtual":
        chosen = [case for case in chosen if not case.card]
    Runs(given.side, given.out, given.workers, given.minutes * 60).run(chosen)
    return 0


def child(name: str, side: str) -> None:
    import warnings

    warnings.filterwarnings("ignore")
    case = CASES[name]
    if side == "card" and case.call.split(":")[0] in ("chapters", "times"):
        _no_skipped_steps()
    if side == "card" or case.outside:
        case.run()
        return
    import transformers.modeling_utils  # noqa: F401  before there is a card: it looks for what it could use with one

    import virtual_gpu
    from virtual_gpu.program import device

    if case.call != "chapters:loading":  # which reads what it saved
        device._HUGE = 2**10  # of a copy on the CPU only the shape matters here
    with virtual_gpu.cuda(CARD, writes=True) as gpu:
        if case.name == "sharded":
            from virtual_gpu.program import ranks

            ranks.install(gpu.patches, gpu, gpu.watch)
        case.run()


def _no_skipped_steps() -> None:
    """A scale that random weights do not overflow: a skipped step has no optimizer state, which the claims count."""
    from torch.amp import GradScaler

    start = GradScaler.__init__

    def init(self: Any, device: str = "cuda", init_scale: float = 256.0, *args: Any, **more: Any) -> None:
        start(self, device, min(init_scale, 256.0), *args, **more)

    GradScaler.__init__ = init


class Runs:
    """Processes of cases, and where their rows go."""

    def __init__(self, side: str, out: Path, workers: int, seconds: float):
        self.side, self.out, self.workers, self.end = side, out, workers, time.monotonic() + seconds
        self.folder = Path(tempfile.mkdtemp(prefix="claims_"))
        self.traces = self.folder / "traces"
        self.traces.mkdir()
        self.began = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        self.rows = out / ("claims.jsonl.gz" if side == "card" else "virtual.jsonl.gz")
        self.rows.unlink(missing_ok=True)
        self.packed, self.left_out = time.monotonic(), []

    def run(self, chosen: list[Case]) -> None:
        wanted = {case.name for case in chosen}
        for case in (*FIRST, *MODELS):
            if case.name in wanted:
                self.wait([self.start(case)])
        self.together([case for case in TOGETHER if case.name in wanted])
        self.pack()
        for case in LAST:
            if case.name in wanted and self.in_time(case):
                self.wait([self.start(case)])
        self.together([case for case in MORE if case.name in wanted])
        self.pack()
        if self.left_out:
            self.write([{"case": "traces", "row": "left out", "files": self.left_out}])

    def in_time(self, case: Case) -> bool:
        if time.monotonic() < self.end:
            return True
        self.write([{"case": case.name, "row": "not run", "error": "the time was up"}])
        return False

    def together(self, waiting: list[Case]) -> None:
        """As many side by side as have room, in their order but for those that have none yet."""
        running: list[Any] = []
        while waiting or running:
            left = ROOM - sum(case.gib for case, *_ in running)
            case = next((case for case in waiting if case.gib <= left), None)
            if case is not None and len(running) < self.workers:
                waiting.remove(case)
                if self.in_time(case):
                    running.append(self.start(case))
                continue
            running = [one for one in running if not self.ended(one)]
            time.sleep(0.05)

    def start(self, case: Case) -> Any:
        tell(f"{case.name} begins … Ctrl+C stops")
        base = self.folder / case.name
        env = {
            **os.environ, **case.env, "CLAIMS_SIDE": self.side, "CLAIMS_CASE": case.name,
            "CLAIMS_ROWS": f"{base}.rows", "CLAIMS_TRACES": str(self.traces), "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2", "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        if self.side == "virtual":
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        command = [sys.executable, "-m", __package__, "--side", self.side, "--child", case.name]
        with open(f"{base}.out", "wb") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                                       stdin=subprocess.DEVNULL)  # fmt: skip
        return case, process, time.monotonic(), base

    def wait(self, running: list[Any]) -> None:
        while not all(self.ended(one) for one in running):
            time.sleep(0.05)

    def ended(self, one: Any) -> bool:
        case, process, began, base = one
        took = time.monotonic() - began
        limit = case.seconds * (8 if self.side == "virtual" else 1)
        if process.poll() is None:
            if took < limit:
                return False
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        path = Path(f"{base}.rows")
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        code = process.returncode
        rows: list[Any] = [json.loads(line) for line in lines]
        end = {"case": case.name, "row": "end", "exit": code, "seconds": round(took, 2), "timed_out": took >= limit}
        if code:
            end["output"] = Path(f"{base}.out").read_bytes()[-3000:].decode(errors="replace")
        self.write([*rows, end])
        if time.monotonic() - self.packed > 40:
            self.pack()
        bad = sum(1 for row in rows if row.get("error"))
        print(f"{time.monotonic() - self.began:6.1f} s  {case.name:28} exit {code}  {took:5.1f} s  "
              f"{len(rows)} rows, {bad} with an error", flush=True)  # fmt: skip
        return True

    def write(self, rows: list[Any]) -> None:
        with gzip.open(self.rows, "at", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, default=str) + "\n")

    def pack(self) -> None:
        """The traces, small ones first, while they fit."""
        self.packed = time.monotonic()
        name = "claims_traces.tar.gz" if self.side == "card" else "virtual_traces.tar.gz"
        total, self.left_out = 0, []
        made = self.folder / name
        with tarfile.open(made, "w:gz", compresslevel=1) as archive:
            for file in sorted(self.traces.glob("*.gz"), key=lambda file: file.stat().st_size):
                if total + file.stat().st_size > MOST_BYTES:
                    self.left_out.append(file.name)
                    continue
                total += file.stat().st_size
                archive.add(file, file.name)
        shutil.copy(made, self.out / name)


if __name__ == "__main__":
    sys.exit(main())
