"""Extensions that a program compiles for its card when it needs them (`torch.utils.cpp_extension`, DeepSpeed's ops).

No kernel can be run here, and what one allocates is in no file that could be read. Where it is known from its source, a
stand-in takes its place; any other is refused by name before a compiler is started.

DeepSpeed 0.19.8: csrc/adam/multi_tensor_adam.cu and csrc/adam/cpu_adam_impl.cpp change the lists of tensors that they
get and allocate nothing.
TRL's Triton kernels: see models.fused_head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ..language import tr
from ..models.fused_head import STAND_INS
from .imports import Imports
from .patches import Patches
from .watch import Watch


class ExtensionError(NotImplementedError):
    """A program needs a kernel of which nothing is known here."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What is changed in place has no values."""


_STAND_INS = {
    "fused_adam": SimpleNamespace(multi_tensor_adam=_nothing),
    "cpu_adam": SimpleNamespace(
        create_adam=_nothing, adam_update=_nothing, adam_rollback=_nothing, destroy_adam=_nothing
    ),
}


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """Answer for the extensions that are known, and refuse the others."""

    def stand_in(name: str) -> Any:
        found = _STAND_INS.get(name)
        if found is None:
            raise ExtensionError(
                tr(
                    ko=f"'{name}' 확장은 카드에 맞춰 컴파일되는 코드다. 메모리를 얼마나 쓰는지 몰라 실행하지 않는다.",
                    en=f"the extension '{name}' is compiled for the card, and what it allocates is not known: not run.",
                )
            )
        watch.note(
            tr(
                ko=f"{name}: 커널은 실행하지 않았다. 받은 텐서를 고칠 뿐 할당하는 것은 없다",
                en=f"{name}: its kernel is not run; it changes the tensors that it gets and allocates nothing",
            )
        )
        return found

    def deepspeed(module: ModuleType) -> None:
        patches.set(module.OpBuilder, "load", lambda builder, verbose=False: stand_in(builder.name))

    def pytorch(module: ModuleType) -> None:
        load, load_inline = module.load, module.load_inline

        def compiled(name: str, sources: Sequence[str] | str, *args: Any, **kwargs: Any) -> Any:
            return stand_in(name) if _of_cuda(sources, kwargs) else load(name, sources, *args, **kwargs)

        def compiled_inline(name: str, *args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 or kwargs.get("cuda_sources") or kwargs.get("with_cuda"):
                return stand_in(name)
            return load_inline(name, *args, **kwargs)

        patches.set_all(module, {"load": compiled, "load_inline": compiled_inline})

    def trl(module: ModuleType) -> None:
        patches.set_all(module, STAND_INS)

    imports.after("trl.kernels.chunked_logprob", trl)
    imports.after("deepspeed.ops.op_builder.builder", deepspeed)
    imports.after("torch.utils.cpp_extension", pytorch)


def _of_cuda(sources: Iterable[str] | str, settings: dict[str, Any]) -> bool:
    sources = [sources] if isinstance(sources, str) else sources
    return bool(settings.get("with_cuda")) or any(str(source).endswith((".cu", ".cuh")) for source in sources)
