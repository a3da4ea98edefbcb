"""What a run saves (`torch.save`, safetensors) and loads again: kept for the run, in a folder beside the program's.

A best checkpoint that is loaded before the test, the state that a learning rate finder goes back to, the size of a file
that is printed and the file deleted: there the program finds what it saved, under the name that it gave. On the disk
that takes little, as numbers that nobody knows are holes in the file (`Saving.sparsely`). What was there before the run
stays as it was, though the program no longer finds what it has written over and deleted; nothing is left behind. They
are among their folder's contents too (`os.listdir`, `glob`, pathlib's).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .patches import Patches

_OF_SAVE = inspect.signature(torch.save)


class OwnFiles:
    """The files, by the path under which the program knows them; one that it has deleted is found nowhere."""

    def __init__(self, patches: Patches):
        self._at: dict[str, str] = {}
        self._patches, self._folder, self._numbers = patches, "", itertools.count()
        self._install()

    def save(self, saving: Any, args: tuple, kwargs: dict[str, Any]) -> Exception | None:
        """As `torch.save` of these arguments, where they name a file. What pickle raised, if it did: nothing is kept.

        That may be the program's own error, or that of a class that stands in for another on a virtual card.
        """
        given = _OF_SAVE.bind(*args, **kwargs)
        if (path := _path_of(given.arguments["f"])) is None:
            return None
        given.arguments["f"] = self._place()
        given.arguments.pop("_use_new_zipfile_serialization", None)  # the form before 1.6 has no holes
        self.forget(path)
        try:
            with saving.sparsely():
                self._patches.original(torch, "save")(*given.args, **given.kwargs)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, OSError) as error:
            return error  # what pickle and PyTorch raise, and a full disk
        self._at[path] = given.arguments["f"]
        return None

    def save_tensors(self, saving: Any, tensors: Any, filename: Any, metadata: Any = None) -> None:
        """As safetensors' `save_file` of these arguments."""
        place = self._place()
        saving.write_safetensors(tensors, place, metadata)
        self.forget(filename)
        self._at[_path_of(filename)] = place

    def _place(self) -> str:
        """Where the next file goes."""
        if not self._folder:
            folder = tempfile.TemporaryDirectory(prefix="virtual_gpu", ignore_cleanup_errors=True)
            self._patches.later(folder.cleanup)
            self._folder = folder.name
        return os.path.join(self._folder, f"{next(self._numbers)}.pt")

    def find(self, file: Any) -> str | None:
        """Where the contents of a file are that this run saved, by path or by the open file; None: it is no such."""
        if not self._at or (path := _path_of(file)) is None:
            return None
        return path if os.path.dirname(path) == self._folder else self._at.get(path)

    def forget(self, file: Any) -> bool:
        """The program writes another file there, or has deleted this one: whether it was one of these."""
        there = self._at.pop(_path_of(file), None) if self._at else None
        if there is not None:
            # Windows keeps what is mapped, which goes with the folder; what was deleted is not there.
            with contextlib.suppress(PermissionError, FileNotFoundError):
                self._patches.original(os, "unlink")(there)
        return there is not None

    def _leave(self, path: str) -> None:
        """One of these is not at that path any more: neither is what an earlier run has left there, which stays."""
        if not os.path.exists(path):
            return
        if os.path.getsize(path):
            self._at[path] = os.path.join(self._folder, "deleted")
        else:  # what the program's own `open` has left
            self._patches.original(os, "unlink")(path)

    def _below(self, folder: str | None) -> list[str]:
        return [path for path in self._at if folder and path.startswith(os.path.join(folder, ""))]

    def _there(self, folder: str) -> tuple[set[str], set[str]]:
        """Names in a folder: (these files', those of files that the program has deleted)."""
        here = {os.path.basename(path): there for path, there in self._at.items() if os.path.dirname(path) == folder}
        ours = {name for name, there in here.items() if os.path.exists(there)}
        return ours, {*here} - ours

    def _install(self) -> None:
        """Let the functions of the operating system that name one file know of these."""

        def elsewhere(named: dict[str, Any]) -> bool:
            """Whether a path is relative to another folder than the current one."""
            return any(named.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))

        def reading(read: Any) -> Any:
            @functools.wraps(read)
            def of_ours(path: Any, *args: Any, **named: Any) -> Any:
                return read(path if elsewhere(named) else self.find(path) or path, *args, **named)

            return of_ours

        def deleting(delete: Any) -> Any:
            @functools.wraps(delete)
            def deleted(path: Any, **named: Any) -> None:
                there = None if elsewhere(named) else self.find(path)
                if there is None or not os.path.exists(there):
                    delete(there or path, **named)
                    return
                self.forget(path)
                self._leave(_path_of(path))

            return deleted

        def removing(remove: Any) -> Any:
            @functools.wraps(remove)
            def removed(path: Any, **named: Any) -> None:
                remove(path, **named)
                if self._at and not elsewhere(named):
                    for one in self._below(_path_of(path)):
                        self.forget(one)

            return removed

        def moving(move: Any) -> Any:
            @functools.wraps(move)
            def moved(src: Any, dst: Any, **named: Any) -> None:
                if not self._at or elsewhere(named):
                    move(src, dst, **named)
                    return
                source, target = _path_of(src), _path_of(dst)
                there = self._at.get(source)
                if there is None or not os.path.exists(there):
                    move(there or src, dst, **named)
                    self.forget(dst)
                    for one in self._below(source):  # of a folder
                        self._at[target + one[len(source) :]] = self._at.pop(one)
                    return
                self.forget(dst)
                self._at[target] = self._at.pop(source)
                self._leave(source)

            return moved

        def copying(copy: Any) -> Any:
            @functools.wraps(copy)
            def copied(src: Any, dst: Any, **named: Any) -> Any:
                there = self.find(src)
                if there is None or not os.path.exists(there):
                    return copy(there or src, dst, **named)
                if copy is not files["copyfile"] and os.path.isdir(dst):
                    dst = os.path.join(dst, os.path.basename(src))
                again = self._place()
                try:
                    os.link(there, again)  # programs read these files, and write others
                except OSError:  # a file system that has no links
                    files["copyfile"](there, again)
                self.forget(dst)
                self._at[_path_of(dst)] = again
                return dst

            return copied

        def listing(names_in: Any) -> Any:
            @functools.wraps(names_in)
            def names(path: Any = ".") -> list:
                found = names_in(path)
                if not self._at or (folder := _path_of(path)) is None:
                    return found
                ours, gone = self._there(folder)
                return [*(name for name in found if name not in gone), *sorted(ours - {*found})]

            return names

        def scanning(scan: Any) -> Any:
            @functools.wraps(scan)
            def entries(path: Any = ".") -> Any:
                found = scan(path)
                if not self._at or (folder := _path_of(path)) is None:
                    return found
                return _Entries(found, os.fspath(path), *self._there(folder))

            return entries

        system = dict.fromkeys(("stat", "lstat", "access"), reading) | dict.fromkeys(("remove", "unlink"), deleting)
        system |= dict.fromkeys(("rename", "replace"), moving) | {"rmdir": removing}
        system |= {"listdir": listing, "scandir": scanning}
        for name, replaced in system.items():
            shipped = getattr(os, name)
            ours = replaced(shipped)
            self._patches.set(os, name, ours)
            for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
                if shipped in able:  # shutil asks so
                    able.add(ours)
                    self._patches.later(functools.partial(able.discard, ours))
        files = {name: getattr(shutil, name) for name in ("copyfile", "copy", "copy2")}
        self._patches.set_all(shutil, {name: copying(copy) for name, copy in files.items()})


class _Entries:
    """What `os.scandir` gives, with these files among it."""

    def __init__(self, found: Any, folder: str, ours: set[str], gone: set[str]):
        self._found, self._folder, self._ours, self._gone = found, folder, ours, gone
        self._each = self._all()

    def _all(self) -> Iterator[Any]:
        seen = set()
        for entry in self._found:
            seen.add(entry.name)
            if entry.name not in self._gone:
                yield entry
        for name in sorted(self._ours - seen):
            yield _Entry(name, os.path.join(self._folder, name))

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._each)

    def close(self) -> None:
        """As scandir's own."""
        self._found.close()

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Entry:
    """`os.DirEntry` of a file that the run has saved, which Python makes of files on the disk alone."""

    name: str
    path: str

    def __fspath__(self) -> str:
        return self.path

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """It is."""
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """It is a file."""
        return False

    def is_symlink(self) -> bool:
        """It is a file."""
        return False

    def is_junction(self) -> bool:
        """It is a file."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Of the file as the run keeps it."""
        return os.stat(self.path)

    def inode(self) -> int:
        """Of the file as the run keeps it."""
        return self.stat().st_ino


def _path_of(file: Any) -> str | None:
    """The path of a file, by name or open; None where it has none (a number, bytes, a buffer in memory)."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    return os.path.abspath(name) if isinstance(name, str) else None
