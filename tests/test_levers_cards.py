"""The levers on several cards: what one card sends and holds is what the instrument's own ranks say."""

import copy
import json
import math
import subprocess
import sys

import pytest
import real_ranks
import torch
from test_levers import RECORD, same_versions
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.levers.catalogue import BASES, LEVERS, META
from benchmarks.levers.program import Sent
from benchmarks.levers.stages import Stage
from helpers import run_ranks
from tools import lever_claims
from tools import levers as tool
from virtual_gpu.models.configs import load_config
from virtual_gpu.program import ranks
from virtual_gpu.program.context import cuda
from virtual_gpu.shards.layout import Layout
from virtual_gpu.shards.ledger import dealt_elements, elements_sent, local_shapes
from virtual_gpu.shards.rank_step import rank_step

BY_KEY = {lever.key: lever for lever in LEVERS}
FULL = ("1.3b-x2", "8b-x8")


@pytest.mark.skipif(not same_versions("1.3b-x2", "fsdp2"), reason="other versions of the libraries")
def test_a_row_is_what_its_program_takes(tmp_path):
    into = tmp_path / "record.json"
    command = [sys.executable, "-m", "benchmarks.levers", "--only", "1.3b-x2", "--lever", "fsdp2", "--into", str(into)]
    subprocess.run(command, cwd=tool.PAGE.parent.parent, check=True, capture_output=True)
    assert json.loads(into.read_text())["rows"]["1.3b-x2"]["fsdp2"] == RECORD["1.3b-x2"]["fsdp2"]


@pytest.mark.parametrize("base", FULL)
def test_what_is_sent_is_what_the_ledger_says(base):
    """To the byte: its elements, in the bytes in which the program gathers and reduces; fp16's scaler asks once."""
    program, rows = BASES[base], RECORD[base]
    asks = 2 * 4 if program.autocast == torch.float16 else 0

    def sent(stage, gathered, reduced, copies=1):
        found = elements_sent(program.model_id, Layout(program.gpus, stage, replicas=copies))
        wide = {
            "allreduce": 2 * (4 if copies == 1 else reduced),
            "broadcast": 4,
            "allgather_base": gathered,
            "reduce_scatter_base": reduced,
        }
        return sum(number * wide[name] for name, number in found.items()) + asks * (stage >= 2)

    expected = {
        "base": (0, 0, 0), "bucket_view": (0, 0, 0), "zero_1": (1, 0, 0), "zero_1_view": (1, 0, 0),
        "fsdp2_kept": (2, 2, 2), "fsdp2": (3, 2, 2), "fsdp2_all_saved": (3, 2, 2), "fsdp2_sums_32": (3, 2, 4),
        "fsdp2_32": (3, 4, 4),
    }  # fmt: skip
    assert {name: rows[name]["sent"] for name in expected} == {name: sent(*how) for name, how in expected.items()}
    if "hsdp" in rows:
        assert rows["hsdp"]["sent"] == sent(3, 2, 2, 2)
    assert rows["ddp_no_sync"]["sent"] == rows["base"]["sent"]
    assert rows["ddp_accumulated"]["sent"] == 4 * rows["base"]["sent"]


@pytest.mark.parametrize("base", FULL)
def test_zero_1_is_the_card_that_got_most(base):
    program = BY_KEY["zero_1"].of(base)
    dealt = dealt_elements(local_shapes(program.model_id), program.gpus)
    assert dealt[program.rank] == max(dealt)
    # two fp32 numbers an element less than DDP, but for those of this card; the rest is how the buckets round
    saved = RECORD[base]["base"]["peak"] - RECORD[base]["zero_1"]["peak"]
    assert saved == pytest.approx(8 * (sum(dealt) - dealt[program.rank]), rel=0.002)


def test_what_ddp_sends_and_when():
    """Its buckets, once each is full: twice the gradients; nothing inside `no_sync`."""
    with cuda("T4", gpus=2) as gpu:
        ranks.install(gpu.patches, gpu, gpu.watch)
        torch.distributed.init_process_group("nccl")
        layers = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
        model = torch.nn.parallel.DistributedDataParallel(layers.cuda())
        nbytes = sum(4 * parameter.numel() for parameter in model.parameters())
        for _ in range(2):  # with one bucket, and with those of the rebuilt order
            with Sent() as sent:
                model(torch.ones(2, 512, device="cuda")).sum().backward()
            assert sent.nbytes == 2 * nbytes
        with Sent() as sent, model.no_sync():
            model(torch.ones(2, 512, device="cuda")).sum().backward()
        assert sent.nbytes == 0
        with Sent() as sent:
            torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(8, device="cuda"), 2, "0")
        assert sent.nbytes == 2 * 8 * 4  # what comes out


@pytest.mark.stress
@pytest.mark.parametrize("peft", ["lora", "qlora"])
def test_adapters_are_what_rank_step_says(peft):
    """What is sent to the byte; the peak but for what the program has beside its step."""
    program, row = BASES["8b-lora-x2"], RECORD["8b-lora-x2"][f"fsdp2_{peft}"]
    step = rank_step(
        program.model_id, program.gpus, gpu=program.card, batch_size=program.batch, sequence_length=program.length,
        gradient_checkpointing=True, peft=peft, lora_rank=16, lora_targets="all-linear",
    )  # fmt: skip
    assert step.parameters_and_gradients_sent == row["sent"]
    assert row["peak"] == pytest.approx(step.total, rel=0.002)
    assert row["reserved"] == pytest.approx(step.reserved_bytes, rel=0.002)


def test_stages_together_are_the_model():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=101, num_hidden_layers=4, **sizes)).eval()
    tokens = torch.arange(2 * 24).reshape(2, 24) % 101
    hidden = tokens
    for number in range(2):
        hidden = Stage(copy.deepcopy(model), number, 2, 24)(hidden)
    assert torch.equal(hidden, model(tokens, use_cache=False).logits)


@pytest.mark.parametrize("ends", [0, 1])
def test_stages_that_cards_share_are_the_model(ends):
    """On four real ranks, with values. ends: the first and the last stage have a layer less."""
    assert max(run_ranks(real_ranks.stages_between_ranks, 4, ends)) < 1e-6


def test_a_stage_of_meta_s_layout_sends_what_its_sizes_say():
    """Gathered and summed between the cards of a layer, for attention and MLP, forward and backward; its parameters
    gathered once in 16 bits and their gradients summed once in 32; what comes from and goes to the stages beside."""
    program, config = BASES["405b-x16384"], load_config(BASES["405b-x16384"].model_id)
    assert program.gpus == math.prod(META.sizes) and config.num_hidden_layers + 2 * META.ends == 16 * 8
    width, keys = config.hidden_size, config.head_dim * config.num_key_value_heads
    layer = 2 * width * (width + keys) + 3 * width * config.intermediate_size  # without its two norms
    text = 2 * program.length * width
    between = 2 * 2 * (1 + 1) * 8 * program.batch * text
    expected = between + (2 + 4) * 8 * layer // META.tensor + 2 * program.batch * text // META.tensor
    assert RECORD["405b-x16384"]["base"]["sent"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("logits_whole", [True, False])
def test_the_plan_of_tokens_is_the_same_mathematics(logits_whole):
    """On real ranks, with values; transformers computes the loss in fp32."""
    assert max(run_ranks(real_ranks.tokens_between_ranks, 2, logits_whole)) < 1e-6


def test_verdicts_on_cards_follow_from_their_numbers():
    rows = {base: {lever: {"peak": 100, "sent": 1} for lever in ("base", *BY_KEY)} for base in BASES}
    half, hybrid, by_n = (
        next(claim.tried for claim in lever_claims.CLAIMS if claim.tried is tried)
        for tried in (lever_claims._half, lever_claims._hybrid, lever_claims._by_n)
    )
    assert half(rows)[0] == lever_claims.FALSE and hybrid(rows)[0] == lever_claims.TRUE
    rows["8b-x8"]["fsdp2"]["peak"] = 50
    assert half(rows)[0] == lever_claims.CONDITIONAL and hybrid(rows)[0] == lever_claims.FALSE
    rows["1.3b-x2"]["fsdp2"]["peak"] = rows["8b-lora-x2"]["fsdp2_lora"]["peak"] = 50
    assert half(rows)[0] == lever_claims.TRUE
    assert [by_n(rows, alone)[0] for alone in (400, 800)] == [lever_claims.FALSE, lever_claims.TRUE]
    rows["8b-x8"]["loss_parallel"]["peak"] = 50
    assert by_n(rows, 400)[0] == lever_claims.CONDITIONAL
