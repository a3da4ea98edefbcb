"""Two kernels at the same moment in one folder: neither disturbs the other."""

import json
import os
import time

import pytest
from jupyter_client.manager import start_new_kernel

ROUNDS = 3
# Each kernel waits before a round until the other stands there too; so each of its answers is made beside another's.
PROGRAM = """
import json, time
from pathlib import Path
from helpers import gpu_memory_experiment, memory_panel, predict_memory, rank_step, set_language

def meets(round):
    Path(f"{{me}}-{{round}}").touch()
    give_up = time.monotonic() + 240
    while not Path(f"{{other}}-{{round}}").exists():
        assert time.monotonic() < give_up, "the other kernel does not come"
        time.sleep(0.001)

me, other, language = {me!r}, {other!r}, {language!r}
set_language(language)
panel = memory_panel()
found = []
for round in range({rounds}):
    meets(round)
    setting = dict(batch_size=2 + round, sequence_length=64, model_id="gpt2")
    report = gpu_memory_experiment(gpu="T4", **setting)
    panel.controls["batch_size"].value = 2 + round
    found.append([
        report.peak_bytes, report.reserved_bytes, rank_step("gpt2", 2 + round, sequence_length=64).total,
        predict_memory(gpu="A100-40GB", peft="lora", precision="mixed_fp16", **setting).peak_bytes,
        panel.picture.value, panel.status.value,
    ])
    for mine in Path().glob(f"{{me}}-{{round - 1}}"):
        mine.unlink()
print(json.dumps(found))
"""  # the last line that it prints


def start(folder, name):
    """A kernel whose notebook lies in the folder: (its manager, its client)."""
    here = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "IPYTHONDIR": str(folder.parent / name)}
    return start_new_kernel(cwd=str(folder), env={**os.environ, **here})


def printed(client, request):
    """What the cell of this request prints, once it has run; its error fails the test."""
    said, give_up = "", time.monotonic() + 300
    while True:
        message = client.get_iopub_msg(timeout=give_up - time.monotonic())
        content = message["content"]
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            said += content["text"]
        if message["msg_type"] == "error":
            pytest.fail("\n".join(content["traceback"]))
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return said


@pytest.mark.kernel
@pytest.mark.slow
def test_two_kernels_at_the_same_moment(tmp_path):
    """In one folder, as two notebooks of a reader: what both ask alike is equal, and no file of either is left."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    kernels = {name: start(folder, name) for name in ("one", "two")}
    try:
        asked = {}
        for (name, (_, client)), other, language in zip(kernels.items(), ("two", "one"), ("ko", "en"), strict=True):
            asked[name] = client.execute(PROGRAM.format(me=name, other=other, language=language, rounds=ROUNDS))
        found = [json.loads(printed(client, asked[name]).splitlines()[-1]) for name, (_, client) in kernels.items()]
    finally:
        for manager, client in kernels.values():
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    numbers = [[answers[:4] for answers in rounds] for rounds in found]
    assert numbers[0] == numbers[1] and len({tuple(answers) for answers in numbers[0]}) == ROUNDS
    for korean, english in zip(*found, strict=True):
        assert korean[4].startswith("<svg") and "예측" in korean[5] and "Predicted" in english[5]
    assert {path.name for path in folder.iterdir()} <= {f"{name}-{ROUNDS - 1}" for name in kernels}
