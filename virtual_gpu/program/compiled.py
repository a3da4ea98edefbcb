"""`torch.compile` on a virtual GPU: Dynamo, AOTAutograd and Inductor as they are, on tensors without values.

Dynamo traces the program with fake tensors of its own, on "cpu:0", where virtual tensors are inside. Meanwhile what
was replaced for the program is put back: PyTorch's compiler is to see PyTorch. CUDA's rules that stand above autograd
(which attention kernel, what autocast casts) hold in there too. The graphs that come of it run with everything in
place, operation by operation, and what they ask for is counted.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..language import tr
from ..rules.active import installed
from . import amp
from .device import GPU, ProgramGPU, ProgramMode
from .frames import OURS, is_program
from .imports import Imports
from .inductor import TIMED, for_card, inductor_for, moved, on_gpu, to_card
from .patches import Patches
from .watch import Watch

_ERROR = re.compile(r"[\w.]*(Error|Exception|Unsupported)\b.*: ")
_PYTORCH = os.path.dirname(torch.__file__) + os.sep
SINCE = (2, 13)  # of PyTorch: whose compiler was read and run
BACKENDS = ("inductor", "aot_eager", "eager")


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """Let `torch.compile` compile for the virtual card, or give back what it got, with a note that says so."""
    made: list[Compiler] = []

    def compiler() -> Compiler:
        if not made:
            made.append(Compiler(patches, watch))
        return made[0]

    def compile(model: Any = None, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code
        if model is None:
            return lambda function: chosen(function, caller, kwargs)
        return chosen(model, caller, kwargs)

    def chosen(model: Any, caller: CodeType, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("disable") or _is_libraries_own(model, caller):
            return model
        backend, why = _backend(kwargs.get("backend"))
        if watch.gpu.several is not None:  # what is traced lies on "cpu:0"
            why = tr(ko="한 프로세스가 카드 여러 장을 쓴다", en="one process with several cards")
        if why:
            return _noted_when_called(model, watch, why)
        return compiler().compiled(model, {**kwargs, "backend": backend})

    def begins(_: Any) -> None:
        compiler().begins()

    def ends(_: Any) -> None:
        compiler().ends()

    def dynamo(module: Any) -> None:
        """What was compiled before comes to the block's tensors too: whoever compiled it, this is the card."""
        from torch._dynamo.callback import callback_handler

        reset, told = module.reset, ((callback_handler.start_callbacks, begins), (callback_handler.end_callbacks, ends))

        def listen() -> None:
            for listeners, listener in told:
                if listener not in listeners:
                    listeners.append(listener)

        def no_longer() -> None:
            for listeners, listener in told:
                if listener in listeners:
                    listeners.remove(listener)

        def without_gpu() -> None:
            with patches.suspended():  # with one it would reset CUDA graphs, which a CPU build of PyTorch has not
                reset()
            listen()  # it has forgotten who is

        patches.set(module, "reset", without_gpu)
        patches.later(no_longer)
        listen()

    if installed("torch") >= SINCE:
        imports.after("torch._dynamo", dynamo)
    patches.set(torch, "compile", compile)


def _backend(asked: Any) -> tuple[Any, str]:
    """The backend that is meant, and why it is not taken; "" where it is."""
    if installed("torch") < SINCE:  # before anything is asked of it that older ones do not have
        return asked, f"PyTorch {torch.__version__} < {SINCE[0]}.{SINCE[1]}"
    from torch._dynamo import config
    from torch._dynamo.backends.registry import get_default_backend

    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" or config.disable:
        return asked, "TORCHDYNAMO_DISABLE, torch._dynamo.config.disable"
    backend = asked or get_default_backend()
    return backend, "" if backend in BACKENDS else f"backend={backend!r:.80}"


def _is_libraries_own(model: Any, caller: CodeType) -> bool:
    """Whether a library compiles a function of its own when it is imported, or PyTorch one: they run as they are.

    FlexAttention and what makes its masks are not among these: they are made to be compiled.
    """
    from torch.nn.attention import flex_attention

    if model is flex_attention.flex_attention or caller is flex_attention.create_block_mask.__code__:
        return False
    if caller.co_filename.startswith(_PYTORCH):
        return caller is not torch.nn.Module.compile.__code__
    return caller.co_name == "<module>" and not is_program(caller)


def _noted_when_called(model: Any, watch: Watch, why: str) -> Any:
    """What is not compiled as it is; of a function it is said once it is called, as only then it would be compiled.

    A library decorates functions when it is imported (bitsandbytes), which most programs never call.
    """
    if not isinstance(model, FunctionType):
        _note_eager(watch, why)
        return model
    seen = weakref.ref(watch)  # the library keeps the function, and is not to keep the run

    @functools.wraps(model)
    def run(*args: Any, **kwargs: Any) -> Any:
        if (watch := seen()) is not None:
            _note_eager(watch, why)
        return model(*args, **kwargs)

    return run


def _note_eager(watch: Watch, why: str) -> None:
    watch.note(
        tr(
            ko=f"torch.compile: 컴파일하지 않고 실행했다({why}). 컴파일한 코드는 연산을 합쳐 최대가 다르다",
            en=f"torch.compile: run without compiling ({why}); compiled code fuses operations, and its peak is another",
        )
    )


class Compiler:
    """PyTorch's compiler for one virtual GPU, from the first compilation in a block to the block's end."""

    def __init__(self, patches: Patches, watch: Watch):
        self.patches, self.watch, self.gpu = patches, watch, watch.gpu
        self.compile, self.takes_bf16 = patches.original(torch, "compile"), torch.cuda.is_bf16_supported
        self.generators = torch.cuda.default_generators
        self.stack: list[ExitStack] = []
        self.made: list[tuple[Any, Callable, Callable]] = []
        self.own_again: set[int] = set()  # ids of functions that are themselves while the compiler traces
        with patches.suspended():
            from torch._dynamo import config, exc, lookup_backend, reset, trace_rules, utils
            from torch._dynamo.variables import TensorVariable, functions, nn_module
            from torch._functorch import config as aot
            from torch._inductor import compile_fx
            from torch._inductor import config as inductor
            from torch.nn.attention import flex_attention

        own = Patches()  # stay while the others are suspended
        patches.later(self._undo)
        self.own = own
        settings = ExitStack()
        settings.enter_context(config.patch(suppress_errors=True, use_lazy_graph_module=False))
        settings.enter_context(aot.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False))
        _draw_again()
        own.later(settings.close)
        if OURS not in trace_rules.SKIP_DIRS:
            trace_rules.add("virtual_gpu")  # not the program's: what counts an operation is not to be traced
        # It would find a CPU while Dynamo traces. In its place a check that is made anyway, which Dynamo can trace.
        own.set(flex_attention, "_validate_device", flex_attention._validate_embed_dim)
        self.utils, self.lookup_backend = utils, lookup_backend
        self.dynamo, self.exc, self.tensors = config, exc, TensorVariable
        called = self._run_by_the_program(functions.invoke_and_store_as_constant)
        for module in (functions, nn_module):  # which has it by name
            own.set(module, "invoke_and_store_as_constant", called)
        for name in ("partition_fn", "compile_fx_forward", "compile_fx_backward"):
            own.set(compile_fx, name, self._for_card(getattr(compile_fx, name)))
        self.compile_fx, self.reset, self.settings = compile_fx.compile_fx, reset, inductor
        handler = _WhatFailed(self.watch)
        logger = logging.getLogger("torch._dynamo.convert_frame")
        logger.addHandler(handler)
        own.later(lambda: logger.removeHandler(handler))

    def _undo(self) -> None:
        try:
            with self.patches.suspended():
                self.reset()  # what was compiled asks for a GPU that is no longer there
        finally:
            self.own.undo()

    def compiled(self, model: Any, kwargs: dict[str, Any]) -> Any:
        """`torch.compile(model, **kwargs)` for the virtual card."""
        kwargs = dict(kwargs)
        if self.dynamo.fail_on_recompile_limit_hit:  # which PyTorch does not let be with the other
            self.dynamo.suppress_errors = False
        options, mode = kwargs.pop("options", None), kwargs.pop("mode", None)
        if mode is not None and options is not None:
            raise RuntimeError("Either mode or options can be specified, but both can't be specified at the same time.")
        options = dict(options or {})
        guards = self._one(options.pop("guard_filter_fn", None), self._guards)
        if kwargs["backend"] == "inductor":
            # PyTorch's own, which refuses what is no option or mode
            chosen = torch._TorchCompileInductorWrapper(mode, options, kwargs.get("dynamic")).config
            timed = [key for key in TIMED if chosen.pop(key, False)]
            if timed:
                self._note_timed([f"mode={mode!r}"] if mode else timed)
            kwargs["backend"] = self._one(chosen, self._inductor)
        else:
            kwargs["backend"] = self._one(kwargs["backend"], self._plain)
        with self.patches.suspended():  # a module is to be called as PyTorch calls it
            return self.compile(model, **kwargs, options={"guard_filter_fn": guards})

    def _one(self, what: Any, make: Callable[[Any], Callable]) -> Callable:
        """What `make` makes of equal things, once: Dynamo compiles anew where another backend is meant."""
        found = next((one for known, by, one in self.made if by == make and known == what), None)
        if found is None:
            found = make(what)
            self.made.append((what, make, found))
        return found

    def _note_timed(self, settings: Sequence[str]) -> None:
        text = ", ".join(settings)
        self.watch.note(
            tr(
                ko=f"torch.compile: {text}은(는) 따르지 않았다. 카드에서 시간을 재거나 CUDA 그래프를 쓰는 것이다",
                en=f"torch.compile: {text} not followed: it times kernels on the card, or takes CUDA graphs",
            )
        )

    def _guards(self, kept: Callable | None) -> Callable:
        """Without guards on functions that are replaced for the program, and are others while the compiler traces."""

        def holds(guards: Sequence[Any]) -> list[bool]:
            before = self.patches.originals()
            asked = [True] * len(guards) if kept is None else kept(guards)
            before |= dict.fromkeys(self.own_again)
            ours = [guard.has_value and (id(guard.value) in before or _is_ours(guard.value)) for guard in guards]
            return [wanted and not own for wanted, own in zip(asked, ours, strict=True)]

        return holds

    def begins(self) -> None:
        """A compilation begins: PyTorch is to see itself, and the card's tensors where they are inside."""
        with ExitStack() as stack:
            stack.enter_context(self.gpu.mode.uncounted())
            stack.enter_context(self.gpu.rules.compiling())
            stack.enter_context(_disable_current_modes())
            stack.enter_context(self.patches.suspended())
            traced = Patches()
            stack.callback(traced.undo)
            amp.install(traced)
            traced.set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
            traced.set(torch.cuda, "is_bf16_supported", self.takes_bf16)
            traced.set(torch.cuda, "default_generators", self.generators)
            asked = getattr(sys.modules.get("transformers.utils.import_utils"), "is_fake_tensor", None)
            if hasattr(asked, "transformers_own"):  # which stays replaced once a model was built (`models.build`)
                self.own_again.add(id(asked.transformers_own))
                traced.set(sys.modules["transformers.utils.import_utils"], "is_fake_tensor", asked.transformers_own)
            traced.set_all(self.tensors, {"method_attr_device": _device(self.gpu), "method_attr_is_cuda": _is_cuda})
            traced.set(self.utils, "run_node", _with_card_here(self.utils.run_node))
            traced.set(FakeTensorMode, "dispatch", _on_card_is_here(FakeTensorMode.dispatch))
            # As on a machine without a GPU, which this is: no fake-tensor mode computes with constants there.
            traced.set(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
            self.stack.append(stack.pop_all())

    def ends(self) -> None:
        """It has ended, or failed to begin."""
        if self.stack:
            self.stack.pop().close()

    def _run_by_the_program(self, invoke: Callable) -> Callable:
        """What is marked `assume_constant_result` is not traced but called: there the program has its card."""

        def run(tracer: Any, function: Callable, *args: Any) -> Any:
            def on_card(*given: Any, **named: Any) -> Any:
                self.ends()
                try:
                    with self.gpu.mode:  # which Dynamo has put aside
                        return function(*given, **named)
                finally:
                    self.begins()

            return invoke(tracer, on_card if self.stack else function, *args)

        return run

    def _plain(self, name: str) -> Callable:
        compile_ = self.lookup_backend(name)

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable:
            _rename(graph)
            with _to_card_is_here():
                return compile_(graph, inputs)

        return backend

    def _inductor(self, options: dict[str, Any]) -> Callable:
        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable:
            if not on_gpu(graph, inputs):
                return graph.forward
            _rename(graph)
            timed = [key for key in TIMED if attrgetter(key)(self.settings)]
            if timed:
                self._note_timed(timed)
            try:
                with _to_card_is_here():
                    return self.compile_fx(graph, inputs, config_patches=options or None)
            except self.exc.RestartAnalysis:
                raise  # Dynamo's own, which it goes on by
            except Exception as error:
                _note_eager(self.watch, f"Inductor: {type(error).__name__}: {error!s:.200}".replace("\n", " "))
                return graph.forward

        return backend

    def _for_card(self, stage: Callable) -> Callable:
        def run(graph: torch.fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            to_card(graph, self.gpu.device)
            inputs = [moved(value, GPU, self.gpu.device) for value in inputs]
            with inductor_for(self.gpu):
                return stage(graph, inputs, *args, **kwargs)

        return run


def _device(gpu: ProgramGPU) -> Callable:
    """What a tensor's `device` is to a program that is traced."""

    def device_of(variable: Any, tracer: Any) -> Any:
        from torch._dynamo.variables.base import VariableTracker

        device = gpu.device if variable.device == GPU else variable.device
        return None if device is None else VariableTracker.build(tracer, device)

    return device_of


def _is_cuda(variable: Any, tracer: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    return None if variable.device is None else VariableTracker.build(tracer, variable.device == GPU)


def _is_ours(value: Any) -> bool:
    code = getattr(value, "__code__", value)
    return isinstance(code, CodeType) and code.co_filename.startswith(OURS)


def _with_card_here(run_node: Callable) -> Callable:
    """As Dynamo runs a node to learn its shape, where the node names the card."""

    def run(tracer: Any, node: Any, args: Any, kwargs: Any, module: Any) -> Any:
        if node.op == "call_method" and node.target in ("to", "cuda"):
            return args[0].to(*_to_here(node.target, args[1:]), **_named_here(kwargs))
        with _to_card_is_here():
            return run_node(tracer, node, args, kwargs, module)

    return run


def _rename(graph: torch.fx.GraphModule) -> None:
    """Let a graph of Dynamo's name `GPU` where it moves a tensor to the card."""
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target in ("to", "cuda"):
            node.args = (node.args[0], *_to_here(node.target, node.args[1:]))
            node.target, node.kwargs = "to", _named_here(node.kwargs)
    graph.recompile()


def _to_here(method: str, args: tuple) -> tuple:
    """The arguments of `Tensor.to` for those of this method, with `GPU` for the card."""
    return (GPU,) if method == "cuda" else tuple(map(_here, args))


def _named_here(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: _here(value) for name, value in kwargs.items()}


def _here(value: Any) -> Any:
    names_card = isinstance(value, (str, torch.device)) and torch.device(value).type == "cuda"
    return GPU if names_card else value


def _on_card_is_here(dispatch: Callable) -> Callable:
    """Where a traced program names "cuda" itself: that is `GPU` here. Inductor, which comes later, means it."""

    def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = kwargs.get("device") if kwargs else None
        if device is not None and torch.device(device).type == "cuda" and not for_card():
            kwargs = {**kwargs, "device": GPU}
        return dispatch(mode, func, types, args, kwargs)

    return dispatched


@contextmanager
def _to_card_is_here() -> Iterator[None]:
    """In here `Tensor.to` takes the card for `GPU`, as DTensor names it in what Dynamo and AOTAutograd run at once."""
    to, own, thread = torch.Tensor.to, Patches(), threading.get_ident()

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if for_card() or threading.get_ident() != thread:
            return to(tensor, *args, **kwargs)
        return to(tensor, *_to_here("to", args), **_named_here(kwargs))

    own.set(torch.Tensor, "to", moved)
    try:
        yield
    finally:
        own.undo()


def _draw_again() -> None:
    """Let a compiled graph run an operation that draws, and again in backward, each with a random state.

    No bytes of the operation hang on the state; it lies on the CPU, or is a generator's.
    """
    from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state

    if ProgramMode in graphsafe_run_with_rng_state.python_key_table:
        return

    @graphsafe_run_with_rng_state.py_impl(ProgramMode)
    def run(mode: ProgramMode, operation: Callable, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
        with mode:
            return operation(*args, **kwargs)

    @run_with_rng_state.py_impl(ProgramMode)
    def run_in(mode: ProgramMode, state: torch.Tensor, operation: Callable, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return operation(*args, **kwargs)

    @run_and_save_rng_state.py_impl(ProgramMode)
    def run_and_save(mode: ProgramMode, operation: Callable, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return torch.cuda.get_rng_state(), operation(*args, **kwargs)


class _WhatFailed(logging.Handler):
    """Says in the report what Dynamo could not trace."""

    def __init__(self, watch: Watch):
        super().__init__(logging.WARNING)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().splitlines()
        if lines and lines[0].startswith("torch._dynamo hit config."):
            _note_eager(self.watch, f"{lines[0]:.200}")
        if lines and lines[0].startswith("WON'T CONVERT"):
            reason = next((line for line in lines if _ERROR.match(line)), lines[-1])
            _note_eager(self.watch, f"Dynamo: {reason.strip():.200}")
