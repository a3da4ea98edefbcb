"""Measurements that stay on the disk: a command that needs one again has it at once.

For commands that run nobody's program but this package: in their process nothing can have changed what is measured.
What is `remembered` is kept under all that it depends on: its key says what was asked, and the folder's name who
answered (this package's files, the versions of the libraries, what the environment tells PyTorch).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import pickle
import platform
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import remembered
from .language import tr
from .optional import LIBRARIES, installed
from .terminal import tell

_PACKAGE = Path(__file__).parent
VARIABLE = "VIRTUAL_GPU_CACHE"  # the folder; empty: nothing is kept
LARGEST = 64 * 2**20  # bytes of all that is kept; a search leaves a MiB or two
_TOLD = ("PYTORCH", "TORCH", "CUBLAS")  # what variables that PyTorch reads begin with
_DIGEST = hashlib.sha256().digest_size
# What results are made of besides this package's own dataclasses and named tuples, PyTorch's dtypes among them.
_PARTS = {
    ("collections", "Counter"),
    ("fractions", "Fraction"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
}


def set_default_folder() -> None:
    """Where the environment names no folder, the one where PyTorch and the hub have theirs; none without a home."""
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    os.environ.setdefault(VARIABLE, os.path.join(base, "virtual_gpu") if os.path.isabs(base) else "")


def add_no_cache(parser: argparse.ArgumentParser) -> None:
    """The option of a command that says `wanted=False`."""
    text = tr(
        ko=f"앞선 실행이 잰 것을 쓰지 않고 새로 잰다({VARIABLE}이 그 폴더다. 빈 값이면 남기지 않는다)",
        en=f"measure anew what earlier runs have measured ({VARIABLE} is the folder of that; empty: none is kept)",
    )
    parser.add_argument("--no-cache", action="store_true", help=text)


@contextlib.contextmanager
def kept_on_disk(wanted: bool = True) -> Iterator[None]:
    """In this block what is remembered comes from the disk where it is there, and goes there where it is not.

    Not where it isn't `wanted`, where VARIABLE names no folder, and where a library is one that is being edited.
    """
    folder = os.environ.get(VARIABLE, "")
    if not wanted or not folder or _edited():
        yield
        return
    cache = DiskCache(Path(os.path.expanduser(folder)))
    before, remembered.elsewhere = remembered.elsewhere, cache
    try:
        yield
    finally:
        remembered.elsewhere = before
        cache.prune()
    if cache.found:
        tell(
            tr(
                ko=f"앞선 실행이 잰 것을 {cache.folder}에서 가져왔다. --no-cache를 주면 새로 잰다.",
                en=f"Taken from {cache.folder}: what earlier runs have measured. --no-cache measures anew.",
            )
        )


class DiskCache:
    """Results in a folder, a file each, whose name is a digest of the key: what `remembered.elsewhere` can be.

    A file that cannot be read, or is not what was written, is as none; what cannot be written is not kept.
    """

    def __init__(self, folder: Path):
        self.root, self.folder = folder, folder / _who_answers()
        self.found = 0
        self._asked: set[str] = set()

    def take(self, key: tuple) -> Any:
        """What is kept under this key, once; None where nothing is."""
        path = self._path(key)
        if path.name in self._asked:
            return None
        self._asked.add(path.name)
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(stored[_DIGEST:]).digest() != stored[:_DIGEST]:
            return None
        try:
            result = _Results(io.BytesIO(zlib.decompress(stored[_DIGEST:]))).load()
        except pickle.UnpicklingError:  # it is whole, and yet no result of ours
            return None
        self.found += 1
        return result

    def put(self, key: tuple, result: Any) -> None:
        """Keep a result: under its name there is a whole file or none, whoever else writes."""
        stored = zlib.compress(pickle.dumps(result), 1)
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk, a folder that may not be written
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(hashlib.sha256(stored).digest() + stored)
            os.replace(part, path)
        with contextlib.suppress(OSError):
            part.unlink()  # there only where it could not be written to its end

    def prune(self) -> None:
        """Delete the oldest files where all together exceed LARGEST."""
        files = []
        for path in self.root.glob("*/*"):
            with contextlib.suppress(OSError):  # another command has deleted it
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= LARGEST:
                break
            total -= size
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(self, key: tuple) -> Path:
        return self.folder / hashlib.sha256(repr(key).encode()).hexdigest()


class _Results(pickle.Unpickler):
    """A pickle of what results are made of; one that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PARTS:
            return super().find_class(module, name)
        import torch  # of which a command that only prints its help knows nothing

        if module == "torch" or module.startswith(f"{_PACKAGE.name}."):
            found = super().find_class(module, name)
            is_record = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, tuple))
            if is_record or isinstance(found, torch.dtype):
                return found
        raise pickle.UnpicklingError(f"{module}.{name}")


@functools.cache
def _who_answers() -> str:
    """A digest of all that a measurement depends on besides what was asked."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(repr((str(path.relative_to(_PACKAGE)), path.stat().st_size)).encode() + path.read_bytes())
    told = {name: value for name, value in os.environ.items() if name.startswith(_TOLD)}
    about = installed(*LIBRARIES), platform.python_version(), platform.system(), platform.machine(), told
    digest.update(json.dumps(about, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _edited() -> bool:
    """Whether a library is installed where it is edited (pip's `-e`), so that its version does not say what it does."""
    said = (importlib.metadata.distribution(name).read_text("direct_url.json") for name in installed(*LIBRARIES))
    return any(json.loads(one).get("dir_info", {}).get("editable", False) for one in said if one)
