"""Fixtures that several test files share, and the order of the files."""

import gc
import os
import signal

import pytest

import helpers  # noqa: F401  (the course speaks Korean: so do its tests)
from virtual_gpu.language import set_language, tr

# Tests take all cores already, a file each; and they count what their own process runs. `test_forks.py` sees to those.
os.environ.setdefault("VIRTUAL_GPU_PROCESSES", "1")

# What a command keeps for the next one would let a test pass on what another has measured; `test_disk_cache.py` asks.
os.environ["VIRTUAL_GPU_CACHE"] = ""

# A shell's background job, and all that it starts, ignores Ctrl+C; tests of interrupts must not depend on that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two processes take a file at a time: with the longest first neither waits for the other at the end. The order is all
# that depends on this list; `make test` prints what is slow now.
LONGEST_FIRST = [
    "test_planner.py",
    "test_exercises.py",
    "09_fit_your_gpu.ipynb",
    "12_two_models.ipynb",
    "13_images.ipynb",
    "08_lora.ipynb",
    "test_ledger.py",
    "test_experiment.py",
    "test_two_models.py",
    "test_readme.py",
    "06_distributed_zero.ipynb",
    "test_start.py",
    "test_checkpointing_costs.py",
    "test_architectures.py",
    "test_lora.py",
    "test_distributed.py",
    "test_website.py",
    "test_nothing_is_left.py",
    "test_stamp.py",
    "11_outside_training.ipynb",
    "test_fake_outputs.py",
    "05_gradient_checkpointing.ipynb",
    "test_panels.py",
    "04_gradient_accumulation.ipynb",
    "03_memory_decomposition.ipynb",
    "test_measure_gpu.py",
    "07_split_model.ipynb",
]


def pytest_collection_modifyitems(config, items):
    """What is marked stress runs only where it is asked for, `-m stress`; then the longest files come first."""
    if "stress" not in config.option.markexpr:
        stress = [item for item in items if item.get_closest_marker("stress")]
        items[:] = [item for item in items if item not in stress]
        config.hook.pytest_deselected(items=stress)
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))  # stable: within a file nothing moves


@pytest.fixture(autouse=True)
def same_language():
    """A test that asks for another language, or calls a command that does, leaves the one it found."""
    before = tr(ko="ko", en="en")
    yield
    set_language(before)


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Python's collections of garbage look through all that torch and transformers are: a tenth of the time. Not here.

    What a file itself makes is collected as ever, and what it leaves at the next file's beginning. What was frozen
    before stays so: to look through all of it once a file takes half a minute of a run.
    """
    gc.collect()
    gc.freeze()
