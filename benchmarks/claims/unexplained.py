"""Rows of benchmarks/README.md that nothing explained, run again at their sizes with every request recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from .side import ON_CARD, alive, counters, error_of, keep_trace, measure, say, segments, settle

CALLS = 10
BF16 = torch.bfloat16


def _empty_that_can_be_read() -> None:
    """The recipes' `torch.empty` has values that nobody set; on a card an index must lie within."""
    made = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = made(*args, **kwargs)
        if out.is_floating_point():
            with torch.no_grad():
                out.normal_(0, 0.02) if out.numel() else out
        else:
            out.zero_()
        return out

    torch.empty = empty


class _Card:
    """What the recipes ask of a virtual GPU."""

    def place(self, thing: Any) -> Any:
        return thing


def _settings(**given: Any) -> Any:
    from benchmarks.recipes.recipe import Stated

    return Stated(given)


def _peaks(call: Callable[[], Any], calls: int = CALLS) -> list[int]:
    """As Liger's `_test_memory`: the peak of each call, one after another."""
    found = []
    for _ in range(calls):
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated())
    return found


def _liger_twin(kind: str, s: Any) -> Callable[[], Any]:
    """Liger's own chunked loss at these sizes, forward and backward, as its benchmark script calls it."""
    import liger_kernel.chunked_loss as losses

    if kind == "distill_jsd_loss":
        student = torch.nn.Linear(s.H // 2, s.V, bias=False, dtype=s.dtype, device="cuda")
        teacher = torch.nn.Linear(s.H, s.V, bias=False, dtype=s.dtype, device="cuda")
        x = torch.rand(s.BT, s.H // 2, dtype=s.dtype, device="cuda", requires_grad=True)
        seen, target = torch.rand(s.BT, s.H, dtype=s.dtype, device="cuda"), torch.randint(s.V, (s.BT,), device="cuda")
        loss = losses.LigerFusedLinearJSDLoss()

        def call() -> None:
            out = loss(x, student.weight, seen, teacher.weight, target)
            (out[0] if isinstance(out, tuple) else out).backward()

        return call
    head = torch.nn.Linear(s.H, s.V, bias=getattr(s, "bias", False), dtype=s.dtype, device="cuda")
    x = torch.randn(s.B, s.T, s.H, dtype=s.dtype, device="cuda", requires_grad=kind != "kto_loss")
    target = torch.randint(s.V, (s.B, s.T), device="cuda")
    kinds = {"fused_linear_orpo_loss": "ORPO", "fused_linear_cpo_loss": "CPO", "fused_linear_simpo_loss": "SimPO"}
    name = f"LigerFusedLinear{kinds.get(kind, 'KTO')}Loss"
    if kind == "kto_loss":
        loss = getattr(losses, name)(ignore_index=s.ignore_index, beta=s.beta, use_ref_model=True)
        ref = torch.nn.Linear(s.H, s.V, bias=s.bias, dtype=s.dtype, device="cuda")
        labels = torch.arange(s.B, device="cuda") % 2 == 0
        kl = torch.randn(1, device="cuda", dtype=s.dtype)
        seen = torch.randn(s.B, s.T, s.H, dtype=s.dtype, device="cuda")

        def call() -> None:
            out = loss(x, head.weight, target, bias=head.bias, preference_labels=labels, ref_input=seen,
                       ref_weight=ref.weight, ref_bias=ref.bias, kl=kl)  # fmt: skip
            (out[0] if isinstance(out, tuple) else out).backward()
    else:
        loss = getattr(losses, name)()

        def call() -> None:
            out = loss(head.weight, x, target)
            (out[0] if isinstance(out, tuple) else out).backward()

    return call


def preferences(kind: str, rows: str, liger: bool = True) -> None:
    """For each size: Liger's compiled loss, then the eager twin; what is alive after the first is told with its frames.

    In the order of Liger's script (`run_benchmarks`: sizes within a provider, liger first), in one process.
    """
    from benchmarks.recipes import liger_losses, liger_preferences

    programs = liger_losses.PROGRAMS | liger_preferences.PROGRAMS
    sizes = SIZES[rows]
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)

    def told(name: str, call: Callable[[], Any]) -> None:
        gc.collect()
        before = torch.cuda.memory_allocated()
        row: dict[str, Any] = {"before": before, "alive_before": alive() if before > 2**26 else []}
        try:
            row["peaks"] = _peaks(call)
        except Exception as error:
            row["error"] = error_of(error)
            error.__traceback__ = None
        say(name, **row, **counters())

    if liger and ON_CARD:
        for given in sizes:
            try:
                call = _liger_twin(kind, _settings(**given))
            except Exception as error:
                say(f"liger {given}", error=error_of(error))
                continue
            told(f"liger {given}", call)
            del call
            gc.collect()
            say(f"after liger {given}", alive=alive(), **counters())
    if ON_CARD:  # after Liger's: what is compiled should find PyTorch's own
        _empty_that_can_be_read()
    with torch.device("cuda"):
        for given in sizes:
            gc.collect()
            torch.cuda.empty_cache()
            try:
                program = programs[kind](_Card(), _settings(**given))
                told(f"eager {given}", program.calls("full"))
                del program
            except Exception as error:
                say(f"eager {given}", error=error_of(error))
    say("trace", trace=keep_trace("preferences"))


def multi_token() -> None:
    """A convolution over scores: what cuDNN takes for it, by type."""
    from benchmarks.recipes.liger_attention import PROGRAMS

    if ON_CARD:
        _empty_that_can_be_read()
    for dtype in (BF16, torch.float32, torch.float16):
        for length in (128, 256, 512):
            settings = _settings(B=2, C_in=4, C_out=4, K=3, groups=1, bias=True, dtype=dtype, L=length)

            def run(settings: Any = settings) -> list[int]:
                with torch.device("cuda"):
                    call = PROGRAMS["multi_token_attention"](_Card(), settings).calls("full")
                    return _peaks(call, 4)

            measure(f"multi token {dtype!s} {length}", run, trace=True)


def embedding() -> None:
    """Liger's embedding rows: eager, then what torch.compile leaves behind of every size before it."""
    table = [(32, 512, 768, v) for v in (1024, 2048, 4096, 32768, 131072)]
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=200_000)
    for kind in ("eager", "compiled"):
        for b, t, d, v in table:
            try:
                layer = torch.nn.Embedding(v, d, device="cuda")
                ids = torch.randint(0, v, (b, t), device="cuda")
                called = torch.compile(layer) if kind == "compiled" else layer

                def call(called: Any = called, ids: Any = ids) -> None:
                    out = called(ids)
                    out.backward(torch.randn_like(out))

                say(f"{kind} {b}x{t} {d} {v}", before=torch.cuda.memory_allocated(), peaks=_peaks(call, 4),
                    alive=alive(most=12), **counters())  # fmt: skip
                del layer, called, call, ids
            except Exception as error:
                say(f"{kind} {b}x{t} {d} {v}", error=error_of(error))
            gc.collect()
        if not ON_CARD:
            break
    say("trace", trace=keep_trace("embedding"))


def prefix() -> None:
    """PEFT's prefix tuning of Llama-3.2-3B at the longest batch: the recipe's own run, its requests recorded."""
    from benchmarks.recipes import peft_metamathqa as P

    if ON_CARD:
        from .side import built

        P.loaded = lambda config, dtype: built("meta-llama/Llama-3.2-3B", dtype).eval()
    name = next(key for key in P.METHODS if "prefix" in key.lower())
    other = next(key for key in P.METHODS if "rank32" in key and key.startswith("lora--"))
    for method in (name, other):
        say(f"{method}: settings", given=P.METHODS[method])
        try:
            settle()
            run = P._Run(method, "2026-07")
            run.step(300)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)
            found = run.step(P.LONGEST)
            say(method, end=found, trace=keep_trace(method), segments=len(segments()), **counters())
            del run
            settle()
        except Exception as error:
            say(method, error=error_of(error))


ORPO = tuple({"T": t, "H": 4096, "V": 128256, "dtype": BF16, "B": b} for t, b in ((1024, 2), (1024, 4), (4096, 2)))
KTO = tuple(
    {"T": 512, "H": 1024, "V": 128256, "dtype": BF16, "bias": True, "beta": 0.1, "ignore_index": 42, "B": b}
    for b in (2, 4, 8)
)
JSD = tuple(
    {"H": 4096, "V": 128256, "dtype": BF16, "bias": False, "weight_hard_loss": 0.5, "weight_soft_loss": 0.5,
     "ignore_index": -100, "BT": b} for b in (1024, 2048)
)  # fmt: skip
SIZES = {"ORPO": ORPO, "KTO": KTO, "JSD": JSD}
