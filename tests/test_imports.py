"""The two buildings and the order of their rooms: every import runs one way, at a module's top or in a function.

What stands under `if TYPE_CHECKING` is for readers of types and runs never: it is not counted.
"""

import ast
import json
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the ground up: a module imports the modules of the lines above its own and those of its own room, never what
# stands beside or below. A room is a module, or a folder ("trace.*"); the longest name that fits a module is its
# place. A new room gets a place here.
ORDER = [
    # -- virtual_gpu: the instrument ----------------------------------------------------------------------------------
    ["virtual_gpu.errors", "virtual_gpu.language"],
    [
        "virtual_gpu.allocator_settings",
        "virtual_gpu.interrupts",
        "virtual_gpu.optional",
        "virtual_gpu.terminal",
        "virtual_gpu.units",
    ],
    ["virtual_gpu.allocator_blocks"],
    # Facts and rules of cards and of PyTorch on them: they know nothing of a run.
    [
        "virtual_gpu.cards",
        "virtual_gpu.allocator",
        "virtual_gpu.frames",
        "virtual_gpu.remembered",
        "virtual_gpu.turns",
        "virtual_gpu.writing",
        "virtual_gpu.rules.*",
        "virtual_gpu.drawing.svg",
    ],
    ["virtual_gpu.cores", "virtual_gpu.disk_cache", "virtual_gpu.drawing.labels", "virtual_gpu.room"],
    # The second meter: the RAM of the machine that the GPU is in.
    ["virtual_gpu.host.*"],
    # A run's trace, and what is read off it: edits of it, pictures, the report.
    ["virtual_gpu.trace.*"],
    ["virtual_gpu.drawing.moments"],
    ["virtual_gpu.drawing.*"],
    ["virtual_gpu.report"],
    # Where a trace comes from: the virtual GPU, and a real one beside it.
    ["virtual_gpu.counting.*"],
    ["virtual_gpu.real"],
    # What is run there: models, one step, one step of many ranks.
    ["virtual_gpu.models.*"],
    ["virtual_gpu.step.*"],
    ["virtual_gpu.shards.*"],
    # What people change: its lines, and a sentence for each.
    ["virtual_gpu.changes"],
    # What an error shows.
    ["virtual_gpu.doctor.*"],
    # Any program, on a card that it takes for a real one.
    ["virtual_gpu.program.*"],
    # What people ask: will it fit, and what would? Then the doors: a function, the package's names, the command.
    ["virtual_gpu.plan.*"],
    ["virtual_gpu.api"],
    ["virtual_gpu"],
    ["virtual_gpu.about"],
    ["virtual_gpu.command"],
    ["virtual_gpu.__main__"],
    # -- helpers: the course ------------------------------------------------------------------------------------------
    # What every chapter shares.
    [
        "helpers.charts",
        "helpers.environment",
        "helpers.hand",
        "helpers.rows",
        "helpers.small_model",
        "helpers.spoken",
        "helpers.trainers",
        "helpers.watched",
    ],
    ["helpers.progress"],
    ["helpers.self_check"],
    ["helpers.course", "helpers.data", "helpers.gpu", "helpers.guessing", "helpers.rows"],
    ["helpers.ahead", "helpers.card_times"],
    ["helpers.models", "helpers.panel", "helpers.training"],
    ["helpers.comparing"],
    ["helpers.experiment", "helpers.ranks.*"],
    ["helpers.chapters"],
    # A chapter knows no other chapter; the last one puts the tools of the others together.
    [
        "helpers.chapters.c1_numbers.*",
        "helpers.chapters.c2_quantization.*",
        "helpers.chapters.c3_memory.*",
        "helpers.chapters.c4_accumulation.*",
        "helpers.chapters.c5_checkpointing.*",
        "helpers.chapters.c6_distributed.*",
        "helpers.chapters.c7_split.*",
        "helpers.chapters.c8_lora.*",
        "helpers.chapters.c11_outside.*",
    ],
    ["helpers.chapters.c9_planner.*"],
    ["helpers.chapters.c10_clinic.*"],
    ["helpers.chapters.c12_two_models.*"],
    ["helpers.chapters.c13_images.*"],
    ["helpers.figures", "helpers.planner.*"],
    ["helpers"],
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}

# Libraries that bring much with them, and the only modules that may have them at their top. With a module at whose
# top one stands it comes along, so such a module is itself imported inside functions only (the panels: by the course's
# lazy names).
HEAVY = {
    "accelerate": ["virtual_gpu.step.run"],
    "bitsandbytes": ["virtual_gpu.models.quantized"],
    "datasets": [],
    "ipywidgets": [
        "helpers.ahead",
        "helpers.comparing",
        "helpers.panel",
        "helpers.chapters.*.panel",
        "helpers.chapters.*.ring",
        "helpers.chapters.*.scrubber",
    ],
    "matplotlib": [],
    "pandas": [],
    "peft": [],
}
# What the instrument does without altogether, and what only these modules of its have, for who asks for a frame or a
# plot.
NEVER = ("datasets", "ipywidgets")
OPTIONAL = {"matplotlib": ["virtual_gpu.drawing.plots"], "pandas": ["virtual_gpu.drawing.frames"]}
# Names that load a model or change its layers. Only these rooms have them: ours, the one that stands in front of a
# stranger's calls, and the door that takes a stranger's configuration.
LOADERS = {
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "BitsAndBytesConfig",
    "LoraConfig",
    "from_pretrained",
    "get_peft_model",
    "prepare_model_for_kbit_training",
}
LOADING_ROOMS = {"virtual_gpu.models.*", "virtual_gpu.program.*", "virtual_gpu.api", "helpers.models"}
# Run on a virtual card as a reader writes them.
PROGRAMS = {
    "helpers.chapters.c12_two_models.trained",
    "helpers.chapters.c13_images.trained",
    "virtual_gpu.plan.deepspeed_rank",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {
    module_name(path): path for package in ("virtual_gpu", "helpers") for path in sorted((ROOT / package).rglob("*.py"))
}


def in_package(package: str, module: str) -> bool:
    return module.split(".")[0] == package


def room_of(module: str) -> str | None:
    """The longest name in ORDER that is the module, or a folder that it lies in."""
    if module in RANK:
        return module
    folders = [module, *(module.rsplit(".", cut)[0] for cut in range(1, module.count(".") + 1))]
    return next((f"{folder}.*" for folder in folders if f"{folder}.*" in RANK), None)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def statements(node: ast.AST, inside_function: bool = False):
    """(import statement, stands in a function?) of everything that can run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside_function
        elif is_for_types(child):
            yield from (pair for part in child.orelse for pair in statements(part, inside_function))
        else:
            yield from statements(child, inside_function or is_function(child))


@cache
def imports(module: str) -> list[tuple[str, bool]]:
    """(dotted name, in a function?) of all that a module imports; of ours the module, whatever is taken from it."""
    path, found = FILES[module], []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for statement, lazily in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            base = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
            origin = ".".join(filter(None, [base, statement.module]))
            names = [n if (n := f"{origin}.{alias.name}") in FILES else origin for alias in statement.names]
        found += [(name, lazily) for name in names]
    return found


def ours(module: str) -> set[str]:
    """The modules of both packages that a module imports, whether there is such a file or not."""
    return {name for name, _ in imports(module) if name.split(".")[0] in ("virtual_gpu", "helpers")}


def fits(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


EVERY_IMPORT = [(module, *found) for module in FILES for found in imports(module)]


def test_every_module_has_a_place():
    assert [module for module in FILES if not room_of(module)] == [], "give it a line in ORDER (tests/test_imports.py)"


def test_what_is_imported_of_ours_is_there():
    assert [(module, name) for module in FILES for name in ours(module) if name not in FILES] == []


def test_the_instrument_knows_nothing_of_the_course():
    assert [
        (module, name)
        for module, name, _ in EVERY_IMPORT
        if in_package("virtual_gpu", module) and in_package("helpers", name)
    ] == []


def test_imports_run_one_way():
    against = []
    for module in FILES:
        room = room_of(module)
        for name in ours(module):
            there = room_of(name)
            if there != room and RANK.get(there, -1) >= RANK.get(room, 0):
                against.append(f"{module} imports {name}, which does not stand above it in ORDER")
    assert against == []


def test_nothing_imports_in_a_circle():
    TopologicalSorter({module: ours(module) - {module} for module in FILES}).prepare()  # CycleError names the circle


def test_heavy_libraries_are_imported_where_they_are_needed():
    at_a_top = [(module, name) for module, name, lazily in EVERY_IMPORT if not lazily]
    assert [(m, n) for m, n in at_a_top if (who := HEAVY.get(n.split(".")[0])) is not None and not fits(m, who)] == []
    assert [(m, n) for m, n in at_a_top if fits(n, HEAVY["bitsandbytes"])] == [], "bitsandbytes comes with it"


def test_what_the_instrument_does_without():
    its = [(m, n, n.split(".")[0]) for m, n, _ in EVERY_IMPORT if in_package("virtual_gpu", m)]
    assert [(m, n) for m, n, library in its if library in NEVER] == []
    assert [(m, n) for m, n, library in its if m not in OPTIONAL.get(library, [m])] == []


def test_models_are_loaded_in_one_place():
    elsewhere = []
    for module, path in FILES.items():
        if room_of(module) not in LOADING_ROOMS and module not in PROGRAMS:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            words = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "name")}
            elsewhere += [(module, word) for word in sorted(words & LOADERS)]
    assert elsewhere == []


@pytest.mark.parametrize("package", ["virtual_gpu", "helpers"])
def test_importing_is_light_and_says_nothing(package):
    code = f"import json, sys, {package}; print(json.dumps([name for name in sys.modules if '.' not in name]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    [line] = result.stdout.splitlines()
    assert not {*HEAVY, "torch", "transformers", "IPython"} & set(json.loads(line))
    assert result.stderr == ""


def test_no_two_test_files_have_one_name():
    """pytest imports them by it: the second of two is an error, and in processes of xdist one that is easily missed."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py") if "in_browser" not in path.parts)
    assert [name for name, times in names.items() if times > 1] == []
