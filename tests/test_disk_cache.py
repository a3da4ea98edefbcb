"""What a command has measured stays on the disk: the next one answers the same from it, or measures anew."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import zlib
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from virtual_gpu import disk_cache as module
from virtual_gpu import remembered
from virtual_gpu.command import main
from virtual_gpu.disk_cache import VARIABLE, DiskCache, kept_on_disk
from virtual_gpu.models.offloaded import Moved
from virtual_gpu.step.predict import Need
from virtual_gpu.trace.trace import Trace

KEY = "a function's name", (7, "T4"), ()
ASKED = ["--gpu", "2 x T4", "--length", "64", "--batch", "4", "--methods", "lora"]


def a_model(folder, **more):
    GPT2Config(
        n_layer=8, n_embd=128, n_head=4, vocab_size=1024, bos_token_id=0, eos_token_id=0, **more
    ).save_pretrained(folder)
    return str(folder)


def fit(model, cache):
    """The answer of `virtual-gpu fit` in a process of its own, and whether that imported code of models."""
    command = [sys.executable, "-X", "importtime", "-m", "virtual_gpu", "fit", "--model", model, *ASKED, "--json"]
    told = {**os.environ, VARIABLE: str(cache), "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), "transformers.modeling_utils" in done.stderr


def written(cache):
    """What lies there, by name: when it was written, and what it is."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in cache.glob("*/*")}


def test_the_same_question_again_measures_nothing_and_has_the_same_answer(tmp_path):
    model, cache = a_model(tmp_path / "model"), tmp_path / "cache"
    first, built = fit(model, cache)
    kept = written(cache)
    assert first["fits"] and built and kept and len({path.parent for path in cache.glob("*/*")}) == 1
    assert fit(model, cache) == (first, False) and written(cache) == kept  # whatever is found is written: nothing was
    # What is not whole is as nothing, and so is what is no result: measured anew, and written again.
    for number, path in enumerate(cache.glob("*/*")):
        stored = path.read_bytes()
        path.write_bytes((stored[:-1], stored[:-1] + bytes([stored[-1] ^ 1]), b"", _harmful(tmp_path))[number % 4])
    assert fit(model, cache) == (first, True) and written(cache).keys() == kept.keys()
    assert fit(model, cache) == (first, False) and not (tmp_path / "harm").exists()
    # A folder whose configuration says something else is another model.
    a_model(tmp_path / "model", n_inner=256)
    assert fit(model, cache)[0]["plans"] != first["plans"]
    assert written(cache).keys() > kept.keys()


def _harmful(folder):
    """A file as the cache writes it, of a pickle that would make a folder."""

    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(folder / "harm"),)

    stored = zlib.compress(pickle.dumps(Harm()))
    return hashlib.sha256(stored).digest() + stored


def test_a_pickle_that_names_a_function_is_no_result(tmp_path):
    cache = DiskCache(tmp_path)
    cache.put(KEY, {"bytes": 1})
    (path,) = tmp_path.glob("*/*")
    path.write_bytes(_harmful(tmp_path))
    assert DiskCache(tmp_path).take(KEY) is None and not (tmp_path / "harm").exists()


RESULTS = [
    7,
    {"parameters": 1, "gradients": 2},
    Need(1, 2, {"parameters": 3}, {"activations": 4}, offloaded=5),
    (Counter({Fraction(1, 3): 2}), torch.bfloat16, Moved({512: 3})),
    {"conv", "fc"},
]


@pytest.mark.parametrize("result", RESULTS, ids=str)
def test_what_was_put_there_is_there_once_for_who_comes_later(tmp_path, result):
    DiskCache(tmp_path).put(KEY, result)
    later = DiskCache(tmp_path)
    found = later.take(KEY)
    assert found == result and type(found) is type(result)
    assert later.take(KEY) is None  # taken
    assert later.take((*KEY, 1)) is None and later.found == 1


def test_a_trace_comes_back(tmp_path):
    columns = {
        "born": np.arange(3), "nbytes": np.array([512, 1, 7]), "category": np.zeros(3, np.int8),
        "span": np.ones(3, np.int32), "names": ("forward",),
    }  # fmt: skip
    DiskCache(tmp_path).put(KEY, Trace(**columns))
    found = DiskCache(tmp_path).take(KEY)
    assert all(np.array_equal(getattr(found, name), column) for name, column in columns.items())


def test_what_a_measurement_depends_on_is_another_folder(tmp_path, monkeypatch):
    def folder():
        module._who_answers.cache_clear()
        return DiskCache(tmp_path).folder

    here = folder()
    assert folder() == here
    with monkeypatch.context() as patch:
        patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        assert folder() != here
    with monkeypatch.context() as patch:
        patch.setattr(module, "installed", lambda *names: {"torch": "1.0"})
        assert folder() != here
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "rule.py").write_text("BYTES = 1")
    monkeypatch.setattr(module, "_PACKAGE", tmp_path / "package")
    one = folder()
    (tmp_path / "package" / "rule.py").write_text("BYTES = 2")
    assert len({here, one, folder()}) == 3
    module._who_answers.cache_clear()


def test_the_oldest_go_where_there_are_too_many(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path)
    for number in range(4):
        cache.put((number,), number)
        os.utime(cache._path((number,)), ns=(number, number))
    monkeypatch.setattr(module, "LARGEST", 2 * cache._path((0,)).stat().st_size)
    cache.prune()
    assert [DiskCache(tmp_path).take((number,)) for number in range(4)] == [None, None, 2, 3]


def test_a_folder_that_is_none_keeps_nothing_and_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with kept_on_disk():
        remembered.note(KEY, 1)
        assert remembered.taken(KEY) is None
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    "told, folder",
    [
        ({"HOME": "/home/somebody"}, "/home/somebody/.cache/virtual_gpu"),
        ({"HOME": "/home/somebody", "XDG_CACHE_HOME": "/scratch"}, "/scratch/virtual_gpu"),
        ({"HOME": "/home/somebody", VARIABLE: "elsewhere"}, "elsewhere"),
        ({"HOME": "/home/somebody", VARIABLE: ""}, ""),
        ({"HOME": "~"}, ""),  # as where the user has none: no folder of that name is made
    ],
)
def test_where_it_is_kept(monkeypatch, told, folder):
    for name in ("HOME", "XDG_CACHE_HOME", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    module.set_default_folder()
    assert os.environ[VARIABLE] == folder


@pytest.mark.parametrize("wanted, folder", [(False, "there"), (True, None)])
def test_nothing_is_kept_where_nobody_wants_it(tmp_path, monkeypatch, wanted, folder):
    monkeypatch.setenv(VARIABLE, str(tmp_path / folder) if folder else "")
    with kept_on_disk(wanted):
        assert remembered.elsewhere is None


def test_nothing_is_kept_beside_a_library_that_is_being_edited(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with kept_on_disk():
        assert remembered.elsewhere is not None
    assert remembered.elsewhere is None

    class Edited:
        version = "1.0"
        read_text = staticmethod(lambda name: json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))

    monkeypatch.setattr(module.importlib.metadata, "distribution", lambda name: Edited)
    with kept_on_disk():
        assert remembered.elsewhere is None


@pytest.mark.parametrize(
    "asked, kept",
    [
        (["shards", "--model", "gpt2", "--gpus", "2", "--length", "16"], True),
        (["largest", "--model", "gpt2", "--gpu", "T4", "--length", "16", "--no-cache"], False),
        (["bug-report"], False),
    ],
)
def test_commands_that_measure_keep_it(tmp_path, monkeypatch, capsys, asked, kept):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    from virtual_gpu.shards import rank_step

    rank_step._trace.cache_clear()
    assert main(asked) == 0 and bool(written(tmp_path)) == kept
    assert remembered.elsewhere is None
