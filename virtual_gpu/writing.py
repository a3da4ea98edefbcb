"""Files into a folder: checked before any work is done, never over what is there, never through a link."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import ExistingFile
from .language import tr
from .units import path_of


def check_folder(folder: str | Path, names: Iterable[str], force: bool = False) -> Path:
    """The folder if these files can be written into it, or if it can be made; ExistingFile says what is in the way."""
    folder = path_of(folder, "folder")
    if "\0" in str(folder):
        raise ExistingFile(tr(ko=f"{str(folder)!r}: 폴더의 이름이 아니다.", en=f"{str(folder)!r} names no folder."))
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ExistingFile(tr(ko=f"{there}: 폴더가 아니다.", en=f"{there} is no folder."))
    if not os.access(there, os.W_OK | os.X_OK):
        raise ExistingFile(tr(ko=f"{there}: 여기에 쓸 수 없다.", en=f"{there} cannot be written to."))
    for name in names:
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ExistingFile(tr(ko=f"{path}: 링크이거나 파일이 아니다.", en=f"{path} is a link or no file."))
        if path.exists() and not force:
            raise ExistingFile(
                tr(
                    ko=f"{path}: 이미 있다. 덮어쓰려면 --force(force=True)를 쓴다.",
                    en=f"{path} is there already: --force (force=True) writes over it.",
                )
            )
    return folder


def write(files: Mapping[str, str], folder: str | Path, force: bool = False) -> list[Path]:
    """Write name → text into the folder, made where it is not there, and return the paths."""
    folder = check_folder(folder, files, force)
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | (os.O_TRUNC if force else os.O_EXCL)
    for name, text in files.items():
        with open(os.open(folder / name, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
    return [folder / name for name in files]
