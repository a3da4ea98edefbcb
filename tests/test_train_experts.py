"""examples/train_experts.py: whether experts are gathered or their tokens travel, real processes learn the same."""

import dataclasses
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.distributed
from test_train_distributed import TWO_RANKS, launch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from helpers.chapters.c7_split.experts import expert_ranks
from virtual_gpu.program.runner import run

PROGRAM = Path(__file__).parent.parent / "examples" / "train_experts.py"
STEPS = 4
pytestmark = pytest.mark.skipif(
    "ep_size" not in vars(transformers.distributed.DistributedConfig), reason="a newer transformers' expert parallelism"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A mixture of eight experts that fits anywhere."""
    folder = tmp_path_factory.mktemp("tiny_moe")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, vocab_size=128,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def losses(tiny, experts):
    options = ["--model", tiny, "--length", 64, "--steps", STEPS, "--lr", 1e-2, "--experts", experts]
    ((status, out, err),) = launch([*TWO_RANKS, *map(str, (PROGRAM, *options))])
    assert status == 0, err[-3000:]
    return [float(line.split()[1]) for line in out.splitlines() if line.startswith("loss")]


def test_experts_on_their_own_ranks_learn_the_same(tiny):
    gathered, sent = (losses(tiny, experts) for experts in (1, 2))
    assert len(gathered) == STEPS and gathered[0] != gathered[-1]
    assert sent == pytest.approx(gathered, abs=0.02)  # in bf16, summed up in another order


def test_a_text_is_cut_alike_on_every_rank_or_refused(tmp_path, monkeypatch):
    """A rank with a step more than another would wait for ever."""
    program = runpy.run_path(str(PROGRAM), {"__name__": "program"})
    monkeypatch.setattr(program["AutoTokenizer"], "from_pretrained", lambda name: characters)
    text = tmp_path / "my.txt"
    text.write_text("a" * 50)
    args = SimpleNamespace(text=text, model="any", batch=1, length=8, steps=9)
    found = []
    for rank in range(2):
        program["batches"].__globals__.update(RANK=rank, RANKS=2)
        found.append(program["batches"](args, 128))
    assert [[batch.shape for batch in some] for some in found] == [[(1, 8)] * 3] * 2
    assert {*torch.cat([*found[0], *found[1]]).flatten().tolist()} == {*range(48)}
    with pytest.raises(SystemExit, match="50 tokens, one step of 2 ranks takes 80"):
        program["batches"](SimpleNamespace(**vars(args) | {"length": 40}), 128)


def characters(text, return_tensors):
    return SimpleNamespace(input_ids=torch.arange(len(text))[None])


def test_one_process_is_refused():
    report = run(str(PROGRAM), [], gpu="H100")
    assert report.status == "failed" and "torchrun" in str(report.error)


def test_a_rank_of_it_on_a_virtual_gpu(tiny):
    """What is kept for good is as large; what is gathered is not there."""
    reports = [
        run(str(PROGRAM), ["--model", str(tiny), "--length", "64", "--experts", f"{experts}"], gpu="H100", gpus=2)
        for experts in (1, 2)
    ]
    assert all(report.error is None and report.steps == 2 for report in reports)
    one, two = (report.at_peak["parameters"] for report in reports)
    assert one == two


def test_the_chapters_ranks(capsys, monkeypatch):
    expert_ranks(1, 8, layers=1)
    rows = [line.split(", ") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "8"] and rows[0][1] == rows[1][1]
    assert float(rows[0][2].split()[0]) > float(rows[1][2].split()[0])

    @dataclasses.dataclass
    class Older:
        tp_size: int = 1

    monkeypatch.setattr(transformers.distributed, "DistributedConfig", Older)
    expert_ranks(1, 8)
    assert "5.23" in capsys.readouterr().out
