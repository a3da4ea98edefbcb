"""The package's imports run one way, and only their keepers know the heavy libraries."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "helpers"

# From the ground up: a module may import the modules of the lines above its own, and none beside or below.
# A new module gets a place here.
ORDER = [
    ["language"],
    ["units"],
    ["gpu_catalog", "caching_allocator", "cuda_kernels", "fake_outputs", "svg", "environment"],
    ["timeline"],
    ["depth", "micro_batches"],
    ["course"],
    ["virtual_gpu"],
    ["gpu"],
    ["four_bit"],
    ["models", "data", "small_model", "trainers"],
    ["training"],
    ["report", "quantization_pictures", "accumulation_pictures", "checkpointing_pictures", "lora_pictures"],
    ["experiment"],
    ["flops", "largest"],
    ["splits"],
    # A chapter's own machinery: it knows no other chapter's.
    [
        "number_formats",
        "quantization",
        "accumulation",
        "checkpointing",
        "checkpointing_costs",
        "distributed",
        "fine_tuning",
        "lora",
    ],
    # The last chapter puts the tools of the others together.
    ["planner"],
    ["figures", "plots"],
    ["exercises"],
    ["panels"],
]
RANK = {module: rank for rank, modules in enumerate(ORDER) for module in modules}

# Narrower than the order: these may import nothing of ours but what is named.
ONLY = {"svg": {"language", "units"}}

# Libraries and names that only their keepers know.
KEEPER_OF_LIBRARY = {"ipywidgets": "panels", "matplotlib": "plots", "peft": "models"}
KEEPER_OF_NAME = dict.fromkeys(
    [
        "AutoConfig",
        "AutoModelForCausalLM",
        "AutoTokenizer",
        "BitsAndBytesConfig",
        "LoraConfig",
        "from_pretrained",
        "get_peft_model",
        "prepare_model_for_kbit_training",
    ],
    "models",
)

FILES = {path.relative_to(PACKAGE): path for path in sorted(PACKAGE.rglob("*.py"))}


def module_of(file: Path) -> str:
    """The first name below the package: of helpers/distributed/launch.py, `distributed`."""
    return file.with_suffix("").parts[0]


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, anywhere in it: `helpers.units`, `torch.nn`."""
    names = set()
    inside = ("helpers", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(inside[: len(inside) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, [base, node.module]))
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def ours(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("helpers.")}


@pytest.fixture(params=[file for file in FILES if file.name != "__init__.py" or len(file.parts) > 1], ids=str)
def file(request):
    return request.param


def test_every_module_has_a_place_in_the_order():
    modules = {module_of(file) for file in FILES} - {"__init__"}
    assert not modules - set(RANK), "give these a line in ORDER (tests/test_imports.py)"


def test_imports_run_one_way(file):
    module = module_of(file)
    for imported in ours(FILES[file]) - {module}:
        rank = RANK.get(imported)
        assert rank is not None, f"helpers/{file} imports {imported}, which has no line in ORDER"
        if module in RANK:
            assert rank < RANK[module], f"helpers/{file} imports {imported}, which does not stand above it in ORDER"
    if module in ONLY:
        assert ours(FILES[file]) <= ONLY[module] | {module}


def test_heavy_libraries_have_one_keeper(file):
    libraries = {name.split(".")[0] for name in imports_of(FILES[file])}
    for library, keeper in KEEPER_OF_LIBRARY.items():
        assert library not in libraries or module_of(file) == keeper, f"only {keeper} knows {library}"


def test_models_are_loaded_in_one_place(file):
    names = set()
    for node in ast.walk(ast.parse(FILES[file].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.name)
    for name, keeper in KEEPER_OF_NAME.items():
        assert name not in names or module_of(file) == keeper, f"only {keeper} uses {name}"


def test_importing_helpers_is_light():
    code = "import json, sys, helpers; print(json.dumps([name for name in sys.modules if '.' not in name]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = {"torch", "transformers", "datasets", "peft", "bitsandbytes", "matplotlib", "ipywidgets"}
    assert not heavy & set(json.loads(result.stdout))
