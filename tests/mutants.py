"""A program that breaks one thing of the instrument and then runs tests, which should notice: pytest's exit status.

python mutants.py off RULE TEST...            the rule holds for no version
python mutants.py text FILE OLD NEW TEST...   the file of virtual_gpu as if it said NEW where it says OLD
"""

import importlib.machinery
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Changed(importlib.machinery.SourceFileLoader):
    """Loads one module with a piece of its text replaced, as a finder that stands before all others."""

    def __init__(self, file: str, old: str, new: str):
        self.old, self.new = old, new
        super().__init__("virtual_gpu." + file.removesuffix(".py").replace("/", "."), str(ROOT / "virtual_gpu" / file))

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, name):
        text = Path(self.path).read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.path} has {self.old!r} {text.count(self.old)} times"
        return compile(text.replace(self.old, self.new), self.path, "exec")


def main(kind: str, *arguments: str) -> int:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("virtual_gpu", "helpers")]:
        del sys.modules[name]  # where this process was forked from one that has them
    if kind == "text":
        file, old, new, *tests = arguments
        sys.meta_path.insert(0, Changed(file, old, new))
    else:
        from virtual_gpu.rules.active import RULES

        rule, *tests = arguments
        RULES[rule] = replace(RULES[rule], since="99")
    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
