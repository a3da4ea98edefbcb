"""The doctor: PyTorch's messages of every wording read, their causes by evidence, foreign and broken text taken."""

import ast
import io
import json
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virtual_gpu.cards import CATALOG
from virtual_gpu.changes import _WHAT, CHANGES, what
from virtual_gpu.command import main
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.doctor import diagnose, foreign, places, sizes, text
from virtual_gpu.doctor.changes import FIRST
from virtual_gpu.doctor.diagnosis import first_changes
from virtual_gpu.doctor.frames import Frame
from virtual_gpu.doctor.message import Size, messages
from virtual_gpu.doctor.report import command
from virtual_gpu.doctor.text import read_end
from virtual_gpu.doctor.words import _CAUSES, cause
from virtual_gpu.language import set_language
from virtual_gpu.units import GiB, MiB

ROWS = json.loads((Path(__file__).parent / "data" / "oom_messages.json").read_text(encoding="utf-8"))
HINT = "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
HEAD = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
TYPICAL = (
    f"{HEAD} 144.00 MiB. GPU 1 has a total capacity of 23.69 GiB of which 77.06 MiB is free. Including non-PyTorch "
    "memory, this process has 23.61 GiB memory in use. Of the allocated memory 23.01 GiB is allocated by PyTorch, and "
    f"38.50 MiB is reserved by PyTorch but unallocated. {HINT}"
)


@pytest.fixture(autouse=True)
def english():
    set_language("en")
    yield
    set_language("en")


def written(row):
    """A row's sizes in the words of PyTorch 1.13, or of 2.1 and later."""
    if row["wording"] == "1.13":
        return (
            f"RuntimeError: CUDA out of memory. Tried to allocate {row['tried']} (GPU 0; {row['total']} total capacity; "
            f"{row['allocated']} already allocated; {row['free']} free; {row['reserved']} reserved in total by "
            "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
        )
    total = f" total capacity of {row['total']}" if "total" in row else ""
    said = f"{HEAD} {row['tried']}. GPU 0 has a{total} of which {row['free']} is free. "
    said += "".join(f"Process {n} has {one} memory in use. " for n, one in enumerate(row.get("processes", ()), 7))
    if "in_use" in row:
        said += f"Including non-PyTorch memory, this process has {row['in_use']} memory in use. "
    if "allocated" in row:
        said += f"Of the allocated memory {row['allocated']} is allocated by PyTorch, and "
        said += f"{row['unallocated']} is reserved by PyTorch but unallocated. {HINT}"
    return said


def row(name):
    [found] = [one for one in ROWS if one["id"] == name]
    return found


# -- published messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_published_message(row):
    """Every number is read, and the verdict is what the thread ended with, where that is known."""
    found = diagnose("\n".join(filter(None, [row["before"], written(row)])))
    sized = ("tried", "total", "free", "in_use", "allocated", "unallocated", "reserved")
    assert found.message.stated == {name: Size.read(*row[name].split()) for name in sized if name in row}
    assert [size for _, size in found.message.processes] == [
        Size.read(*one.split()) for one in row.get("processes", ())
    ]
    assert (found.verdict, found.sure) == (row["verdict"], row["sure"])
    assert cause(found.verdict) in text(found)
    assert len(first_changes(found)) == 3


def test_their_numbers_add_up():
    """Capacity is what is free, this process's and the others', within the print, but where the reason is known."""
    added = {one["id"]: sizes.adds_up(next(messages(written(one)))) for one in ROWS}
    states_no_own = {"fine-tune-mistral-3", "starcoder-15", "Cylinder3D-109", "pytorch-111729", "trl-3172"}
    states_no_total = {"enzo-attn", "file/a100-40-c", "csun-trace"}
    assert {name for name, known in added.items() if known is None} == states_no_own | states_no_total
    assert {name for name, known in added.items() if known is False} == {"lora-fast-1", "file/a100-40-b"}  # < 60 MiB


def test_their_cards():
    cards = {one["id"]: diagnose(written(one)).card for one in ROWS if "total" in one}
    stated = {one["id"]: (one["card"] or "").replace(" ", "-").replace("-80GB", "") for one in ROWS}
    unknown = {name for name, card in cards.items() if not card.cards}
    assert unknown == {"fine-tune-mistral-3", "pytorch-111729"}  # Windows says 24.00 GiB; a card that nobody named
    assert cards["fine-tune-mistral-3"].name == "24.00GiB"
    for name, card in cards.items():
        if card.cards and name != "litgpt-oom":
            assert card.cards[0].replace(" ", "-") == stated[name]
    assert set(cards["litgpt-oom"].cards) == {"H100", "A100-80GB"}


def test_who_else_is_on_the_card():
    """Listed is certain; a difference is likely, or possible where this process's other libraries may hold it."""
    found = {name: diagnose(written(row(name))).findings[0] for name in ("trl-5197", "trl-3172", "Cylinder3D-109")}
    assert {name: (one.cause, one.sure) for name, one in found.items()} == {
        "trl-5197": ("other_process", "certain"), "trl-3172": ("other_process", "likely"),
        "Cylinder3D-109": ("other_process", "possible"),
    }  # fmt: skip
    assert found["trl-5197"].evidence[0].startswith("The other processes that it lists hold 4.23 GiB.")
    assert all("this request would have passed" in one.evidence[0] for one in found.values())
    outside = diagnose(written(row("file/a100-40-c"))).findings[0]
    assert outside.evidence == ("7.73 GiB of what this process uses are not PyTorch's allocator's.",)


# -- every wording ----------------------------------------------------------------------------------------------------


def stated(said):
    [found] = messages(said)
    return {name: size.bytes for name, size in found.stated.items()}


def test_wordings_since_one():
    old = (
        "CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already allocated; "
    )
    numbers = {"tried": 12.5 * MiB, "total": round(10.92 * GiB), "allocated": round(8.57 * MiB)}
    assert stated(old + "9.28 GiB free; 4.68 MiB cached)") == numbers | {
        "free": round(9.28 * GiB), "reserved": round(4.68 * MiB),
    }  # fmt: skip
    limited = stated(old + "1.00 GiB free; 5.00 GiB allowed; 512 bytes reserved in total by PyTorch)")
    assert limited["allowed"] == 5 * GiB and limited["reserved"] == 512
    typo = stated(TYPICAL.replace("capacity", "capacty").replace("GPU 1", "GPU \x01"))
    assert typo == stated(TYPICAL) and typo["in_use"] == round(23.61 * GiB)
    pools = TYPICAL.replace(
        "PyTorch, and", "PyTorch, with 46.00 KiB allocated in private pools (e.g., CUDA Graphs), and"
    )
    assert stated(pools) == stated(TYPICAL) | {"private": 46 * 1024}
    backend = (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 23.50 GiB\n"
        "Requested               : 12.50 MiB\nDevice limit            : 23.99 GiB\nFree (according to CUDA): 0 bytes\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
    )
    assert stated(backend) == {
        "allocated": 23.5 * GiB, "tried": 12.5 * MiB, "total": round(23.99 * GiB), "free": 0,
    }  # fmt: skip


def test_what_nobody_can_hold_is_not_taken():
    """WSL prints 16 EiB for what it does not know; some containers print 0 bytes for this process."""
    for nonsense in ("17179869184.00 GiB", "0 bytes"):
        found = diagnose(TYPICAL.replace("23.61 GiB", nonsense))
        assert sizes.own(found.message) is None and found.verdict == "cannot_tell"


def test_our_own_message_is_read_back():
    card = replace(CATALOG["T4"], memory_bytes=30 * MiB, usable_bytes=30 * MiB)
    with VirtualGPU(card), pytest.raises(torch.OutOfMemoryError) as caught:
        _ = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (12 * MiB, MiB, 20 * MiB)]
    found = diagnose(str(caught.value))
    assert {name: size.bytes // MiB for name, size in found.message.stated.items()} == {
        "tried": 20, "total": 30, "free": 16, "in_use": 14, "allocated": 13, "unallocated": 1,
    }  # fmt: skip
    assert found.verdict == "cannot_tell" and sizes.adds_up(found.message)


@pytest.mark.parametrize(
    "broken",
    [
        TYPICAL.replace(" ", "\n"),
        TYPICAL.replace(" is ", " \x1b[31mis\x1b[0m "),
        "\n".join(f"│ {line} │" for line in TYPICAL.replace(". ", ".\n").split("\n")),
        json.dumps({"error": 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n' + TYPICAL}),
        f"[rank3]: {TYPICAL}",
        ("\ufeff" + TYPICAL).encode("utf-16"),
        b"\xff\x00\xc3" + TYPICAL.encode() + b"\xff\xff",
        f"step 1\rstep 2\r\n{TYPICAL}\r",
    ],
)
def test_broken_text_is_read(broken):
    found = diagnose(broken)
    assert {name: size.bytes for name, size in found.message.stated.items()} == stated(TYPICAL)


def test_a_message_cut_anywhere_is_read_as_far_as_it_goes():
    whole = stated(TYPICAL)
    for at in range(0, len(TYPICAL), 7):
        for part in (TYPICAL[:at], TYPICAL[at:]):
            found = diagnose(part)
            said = {} if found.message is None else {k: v.bytes for k, v in found.message.stated.items()}
            assert said.keys() <= whole.keys()
    assert {"allocated", "unallocated"} <= diagnose(TYPICAL[150:]).message.stated.keys()


def test_several_ranks_at_once():
    lines = [(rank, line) for line in ['  File "/a/train.py", line 3, in main', TYPICAL] for rank in (1, 0)]
    said = "\n".join(
        f"[rank{rank}]: {line.replace('GPU 1', f'GPU {rank}').replace('train.py', f'of_{rank}.py')}"
        for rank, line in lines
    )
    found = diagnose(said)
    assert (found.messages, found.rank, found.other_ranks) == (2, 0, (1,))
    assert found.users_line.file == "/a/of_0.py" and found.message.device == 0


def test_a_second_error_in_the_handler_of_the_first():
    again = "During handling of the above exception, another exception occurred:"
    said = "\n\n".join([trace(MINE), again, trace(("/home/me/train.py", "retry", "run(model, 4)"))])
    found = diagnose(said)
    assert (found.verdict, found.sure, first_changes(found)[0]) == ("in_handler", "certain", "outside_handler")
    apart = diagnose(said.replace(again, "The above exception was the direct cause of the following exception:"))
    assert apart.verdict == "cannot_tell"


def test_notes():
    pools = "with 20.00 GiB allocated in private pools (e.g., CUDA Graphs), and 38.50"
    assert "pools of CUDA graphs" in text(diagnose(TYPICAL.replace("and 38.50", pools)))
    spilled = TYPICAL.replace("23.01 GiB is", "31.00 GiB is")
    assert "the machine's RAM" in text(diagnose(spilled)) and "the machine's RAM" not in text(diagnose(TYPICAL))


# -- what the numbers say ---------------------------------------------------------------------------------------------


def test_a_limit_of_the_programs_own():
    said = TYPICAL.replace("77.06 MiB is free. ", "20.00 GiB is free. ").replace("23.61 GiB memory", "3.50 GiB memory")
    said = said.replace("Of the allocated", "3.00 GiB allowed; Of the allocated").replace("23.01 GiB is", "2.90 GiB is")
    found = diagnose(said)
    assert (found.verdict, found.sure) == ("limit", "certain") and first_changes(found)[0] == "no_limit"


@pytest.mark.parametrize(
    "allocated, cached, sure",
    [("23.01 GiB", "38.50 MiB", None), ("22.98 GiB", "66.94 MiB", "possible"), ("20.00 GiB", "3.00 GiB", "likely")],
)
def test_fragmentation_is_never_certain(allocated, cached, sure):
    """T = 144 against F + R = 116, 144 and 3,149 MiB. That it is not fragmentation is certain."""
    found = diagnose(TYPICAL.replace("23.01 GiB", allocated).replace("38.50 MiB", cached))
    assert (found.verdict, found.sure) == ("fragmentation" if sure else "cannot_tell", sure)
    assert any(one.startswith("not fragmentation: T = 144.00 MiB > F + R") for one in found.ruled_out) == (sure is None)


@pytest.mark.parametrize("known", [True, False])
def test_logits_are_found_by_factoring(known):
    """The arithmetic is a hint: alone it makes no finding, with the model's name a possible one."""
    said = TYPICAL.replace("144.00 MiB", "236.00 MiB") + ("\nmodel: polyglot-ko-1.3b" if known else "")
    found = diagnose(said)
    assert (4096, 30_080, 2) in {(one.tokens, one.vocabulary, one.width) for one in found.products}
    assert (found.verdict, found.sure) == ((places.LOGITS, "possible") if known else ("cannot_tell", None))
    assert "4,096 × 30,080 × 2 = 235.00 MiB" in text(found)
    expected = f"rounded up to 2 MiB, give this size. It is a hint only: about {found.products_by_chance:.0%} of"
    assert (expected in text(found)) == (not known)
    assert not diagnose(TYPICAL.replace("144.00 MiB", "2.00 MiB")).products


# -- the traceback ----------------------------------------------------------------------------------------------------

SITE = "/env/lib/python3.11/site-packages/"


def trace(*frames):
    """Python's own layout: (file, function, code)."""
    lines = [f'  File "{file}", line 7, in {function}\n    {code}' for file, function, code in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, TYPICAL])


MINE = ("/home/me/train.py", "main", "run(model)")


@pytest.mark.parametrize(
    "file, function, code, moment, sure",
    [
        ("transformers/modeling_utils.py", "from_pretrained", "", places.LOADING, "certain"),
        ("torch/nn/modules/module.py", "convert", "return t.to(device)", places.LOADING, "likely"),
        ("torch/serialization.py", "default_restore_location", "", places.RESUMING, "likely"),
        ("transformers/trainer.py", "_load_optimizer_and_scheduler", "", places.RESUMING, "certain"),
        ("transformers/trainer.py", "_save_checkpoint", "", places.SAVING, "certain"),
        ("transformers/trainer_pt_utils.py", "nested_concat", "", places.EVALUATION_GATHERS, "certain"),
        ("transformers/trainer.py", "evaluation_loop", "", places.EVALUATION, "certain"),
        ("transformers/generation/utils.py", "_sample", "", places.GENERATION, "certain"),
        ("transformers/cache_utils.py", "update", "", places.GENERATION, "certain"),
        ("torch/optim/adamw.py", "_init_group", 'state["exp_avg"] = torch.zeros_like(', places.OPTIMIZER_STATES, "certain"),
        ("bitsandbytes/optim/optimizer.py", "init_state", "", places.OPTIMIZER_STATES, "certain"),
        ("torch/optim/adam.py", "_multi_tensor_adamw", "", places.OPTIMIZER_STEP, "certain"),
        ("deepspeed/runtime/engine.py", "_take_model_step", "", places.OPTIMIZER_STEP, "certain"),
        ("torch/autograd/__init__.py", "backward", "", places.BACKWARD, "likely"),
        ("transformers/loss/loss_utils.py", "fixed_cross_entropy", "", places.LOGITS, "certain"),
        ("trl/trainer/utils.py", "selective_log_softmax", "", places.LOGITS, "certain"),
        ("transformers/models/llama/modeling_llama.py", "eager_attention_forward", "", places.ATTENTION, "likely"),
        ("peft/tuners/lora/layer.py", "forward", "", places.FORWARD, "likely"),
        ("accelerate/utils/operations.py", "pad_across_processes", "", places.EVALUATION_GATHERS, "certain"),
        ("torch/nn/parallel/distributed.py", "_ddp_init_helper", "", places.WRAPPING, "certain"),
        ("deepspeed/runtime/zero/partition_parameters.py", "_allgather_params", "", places.GATHERING, "likely"),
    ],
)  # fmt: skip
def test_the_moment(file, function, code, moment, sure):
    found = diagnose(
        trace(MINE, (SITE + "torch/nn/modules/module.py", "_call_impl", ""), (SITE + file, function, code))
    )
    assert (found.verdict, found.sure) == (moment, sure)
    assert found.users_line.file == MINE[0] and found.users_line.code == MINE[2]
    assert file.split("/")[0] in found.libraries


def gpt2(**more):
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **more))


def ids(batch, length=1024):
    return torch.zeros(batch, length, dtype=torch.long, device="cuda")


def loads():
    gpt2(n_layer=40, n_embd=1280, n_head=20).to("cuda")


def steps():
    model = gpt2(n_layer=6).to("cuda")
    model(input_ids=ids(1, 8), labels=ids(1, 8)).loss.backward()
    torch.optim.AdamW(model.parameters()).step()


def attends():
    gpt2(n_layer=2, vocab_size=128, bos_token_id=0, eos_token_id=0, attn_implementation="eager").to("cuda")(ids(16))


def computes_logits():
    gpt2(n_layer=1).to("cuda")(input_ids=ids(4), labels=ids(4))


def goes_back():
    torch.nn.Embedding(50_000, 3_000).to("cuda")(ids(1, 4)).sum().backward()


def generates():
    model = gpt2(n_layer=4, vocab_size=128, bos_token_id=0, eos_token_id=0).to("cuda")
    model.generate(ids(64, 900), attention_mask=ids(64, 900), max_new_tokens=5)


@pytest.mark.parametrize(
    "program, moment, sure",
    [
        (loads, places.LOADING, "likely"), (steps, places.OPTIMIZER_STATES, "certain"),
        (attends, places.ATTENTION, "likely"), (computes_logits, places.LOGITS, "certain"),
        (goes_back, places.BACKWARD, "likely"), (generates, places.GENERATION, "certain"),
    ],
)  # fmt: skip
def test_the_moment_in_what_todays_libraries_raise(program, moment, sure):
    """On a virtual GPU of 1 GiB: the frames are torch's and transformers' own."""
    import virtual_gpu

    with virtual_gpu.cuda("1GiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        program()
    found = diagnose("".join(traceback.format_exception(caught.value)))
    assert (found.verdict, found.sure) == (moment, sure)
    assert found.users_line.file == __file__ and found.users_line.function == program.__name__


def test_checkpointing_that_is_on_is_not_advised():
    frames = (
        (SITE + "torch/autograd/graph.py", "_engine_run_backward", ""),
        (SITE + "torch/utils/checkpoint.py", "unpack_hook", ""),
    )
    found = diagnose(trace(MINE, *frames))
    assert found.verdict == places.BACKWARD and "checkpointing" not in first_changes(found, most=9)
    assert "checkpointing" in first_changes(diagnose(trace(MINE, *frames[:1])))
    assert "offload" in first_changes(found, most=9)  # there are checkpoints, on the card
    assert "offload" not in first_changes(diagnose(trace(MINE, *frames[:1])), most=9)
    back = (SITE + "torch/autograd/graph.py", "unpack_from_cpu", "return tensor.to(device, non_blocking=pin_memory)")
    assert "offload" not in first_changes(diagnose(trace(MINE, *frames, back)), most=9)


@pytest.mark.parametrize(
    ("folder", "first"), [("gpt2", "fused_head"), ("gpt_neox", "fused_head"), ("llama", "fused_loss")]
)
def test_a_loss_that_the_model_cannot_have_is_not_advised(folder, first):
    """Liger has no kernels for GPT-2 and GPT-NeoX; TRL's loss needs none of a model's."""
    frames = (
        (SITE + f"transformers/models/{folder}/modeling_{folder}.py", "forward", "loss = self.loss_function("),
        (SITE + "transformers/loss/loss_utils.py", "ForCausalLMLoss", "logits = logits.float()"),
    )
    found = diagnose(trace(MINE, *frames).replace("144.00 MiB", "4.00 GiB"))
    assert found.verdict == places.LOGITS and first_changes(found)[0] == first
    assert {"fused_loss", "fused_head"}.intersection(first_changes(found, most=9)) == {first}
    # Then what fills the card, whatever the model's name; where holes may be why, they are closed in between.
    assert first_changes(found)[1] == "checkpointing"
    holes = trace(MINE, *frames).replace("144.00 MiB", "4.00 GiB").replace("38.50 MiB is", "5.00 GiB is")
    assert first_changes(diagnose(holes)) == [first, "expandable", "checkpointing"]
    # Where the logits are little beside what is alive, what fills the card comes first.
    late = diagnose(trace(MINE, *frames))
    assert late.little and first not in first_changes(late) and first_changes(late, most=9)[-1] == first


def test_of_an_evaluation_the_outer_moment_is_said():
    found = diagnose(
        trace(
            MINE,
            (SITE + "transformers/trainer.py", "evaluation_loop", ""),
            (SITE + "torch/nn/functional.py", "cross_entropy", ""),
        )
    )
    assert [one.cause for one in found.findings] == [places.EVALUATION, places.LOGITS]


@pytest.mark.parametrize(
    "layout, line",
    [
        ('  File "/home/me/a.py", line 12, in go\n    model(x)\n    ^^^^^^^^', ("/home/me/a.py", 12, "go", "model(x)")),
        ("│ /home/me/a.py:12 in go                                 │\n│ ❱ 12 │   model(x)      │", ("/home/me/a.py", 12, "go", "model(x)")),
        ("File ~/a.py:12, in Loop.go(self, y)\n     10 y = 1\n---> 12 model(x)", ("~/a.py", 12, "go", "model(x)")),
        ("Cell In[3], line 12\n     11 y = 1\n---> 12 model(x)", ("In [3]", 12, "", "model(x)")),
        ("<ipython-input-3-a1b2> in go(x)\n     11 y = 1\n---> 12 model(x)", ("<ipython-input-3-a1b2>", 12, "go", "model(x)")),
        ("/home/me/a.py in go(x)\n     11 y = 1\n---> 12 model(x)", ("/home/me/a.py", 12, "go", "model(x)")),
        ("tests/test_a.py:12: in go\n    model(x)", ("tests/test_a.py", 12, "go", "")),
        ("/tmp/ipython-input-27.py in <cell line: 0>()\n     11 y = 1\n---> 12 model(x)", ("/tmp/ipython-input-27.py", 12, "<cell line: 0>", "model(x)")),
        ("File /tmp/a.py:12, in <cell line: 0>()\n---> 12 model(x)", ("/tmp/a.py", 12, "<cell line: 0>", "model(x)")),
        ('  File "/tmp/a.py", line 12, in <cell line: 0>\n    model(x)', ("/tmp/a.py", 12, "<cell line: 0>", "model(x)")),
        ("│ /tmp/a.py:12 in <cell line: 0>      │\n│ ❱ 12 │   model(x)    │", ("/tmp/a.py", 12, "<cell line: 0>", "model(x)")),
        ("/home/me/a.py in go(x)\n    788 y = 1\n--> 789", ("/home/me/a.py", 789, "go", "")),
    ],
)  # fmt: skip
def test_layouts_of_tracebacks(layout, line):
    last = diagnose(f"{layout}\n{TYPICAL}").users_line
    assert (last.file, last.line, last.function, last.code) == line


@pytest.mark.parametrize(
    "file, library",
    [
        ("C:\\me\\venv\\Lib\\site-packages\\torch\\nn\\x.py", "torch"), ("/usr/lib/python3/dist-packages/trl/x.py", "trl"),
        ("/work/transformers/src/transformers/trainer.py", "transformers"), ("/work/trl/trl/trainer/x.py", "trl"),
        ("/usr/lib/python3.11/runpy.py", "python"), ("/env/bin/torchrun", "python"), ("<frozen runpy>", "python"),
        ("/work/transformers/examples/run.py", None), ("/home/me/torch/train.py", None),
    ],
)  # fmt: skip
def test_whose_a_file_is(file, library):
    found = diagnose(trace((file, "f", "")))
    assert found.frames[0].library == library


@pytest.mark.parametrize(
    "file, shown",
    [
        ("/env/lib/python3.12/site-packages/torch/_tensor.py", "torch/_tensor.py"),
        ("/usr/local/lib/python3.12/dist-packages/transformers/trainer_pt_utils.py", "transformers/trainer_pt_utils.py"),
        ("C:\\Python310\\lib\\site-packages\\torch\\optim\\adamw.py", "torch/optim/adamw.py"),
        ("/env/lib/python3.12/site-packages/transformers/models/gpt2/modeling_gpt2.py", "models/gpt2/modeling_gpt2.py"),
        ("/work/transformers/src/transformers/trainer.py", "transformers/trainer.py"),
        ("/usr/lib/python3.11/runpy.py", "runpy.py"), ("/usr/lib/python3.11/json/decoder.py", "json/decoder.py"),
    ],
)  # fmt: skip
def test_a_librarys_file_is_shown_from_its_package_on(file, shown):
    [frame] = diagnose(trace((file, "f", ""))).frames
    assert str(frame) == f"{shown}:7 in f"


# -- messages that are not PyTorch's list of numbers ------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, verdict, name",
    [
        ("RuntimeError: MPS backend out of memory (MPS allocated: 8.80 GB, max allowed: 9.07 GB). Tried to allocate 256.00 MB", "other_framework", "MPS"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 0 bytes is free.", "other_framework", "ROCm"),
        ("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 1.00 GiB.", "other_framework", "XPU"),
        ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes.", "other_framework", "JAX/XLA"),
        ("ResourceExhaustedError: OOM when allocating tensor with shape[64,512] and type float on /GPU:0 by allocator GPU_0_bfc", "other_framework", "TensorFlow"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "library_call", "cuBLAS"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "library_call", "cuDNN"),
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'", "library_call", "NCCL"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:75] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", "host_memory", "DefaultCPUAllocator"),
        ("numpy.core._exceptions.MemoryError: Unable to allocate 12.0 GiB for an array with shape (1, 2)", "host_memory", "NumPy"),
        ("[1]  + 4242 killed\n[ 12.3] Out of memory: Killed process 4242 (python) total-vm:3kB", "host_memory", "the kernel's OOM killer"),
        ("Killed", "host_memory", "signal 9"),
        ("failed (exitcode: -9) local_rank: 0 (pid: 1) of binary: python\nSignal 9 (SIGKILL) received by PID 1", "host_memory", "signal 9"),
        ("Your notebook tried to allocate more memory than is available. It has restarted.", "host_memory", "the notebook's host"),
        ("RuntimeError: DataLoader worker is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory: insufficient shared memory (shm)", "host_memory", "shared memory (/dev/shm)"),
        ("ValueError: Free memory on device (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB).", "engine_share", "vLLM"),
        ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "engine_share", "vLLM"),
        ("ValueError: To serve at least one request with the models's max seq len (40960), (4.38 GiB KV cache is needed, which is larger than the available KV cache memory (2.10 GiB).", "engine_cache", "vLLM"),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.", "engine_cache", "vLLM"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376.", "not_memory", "Triton"),
        ("ValueError: Attempting to unscale FP16 gradients.", "fp16_gradients", "GradScaler"),
        ("NotImplementedError: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'", "bf16_gradients", "GradScaler"),
        ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58", "no_numbers", "CUDA"),
        ("RuntimeError: CUDA error: out of memory", "no_numbers", "CUDA"),
        ("torch.OutOfMemoryError: Allocation on device", "no_numbers", "CUDA"),
    ],
)  # fmt: skip
def test_a_foreign_message_is_recognised(said, verdict, name):
    found = diagnose(f"Traceback (most recent call last):\n{said}")
    assert (found.verdict, found.foreign.name) == (verdict, name)
    assert foreign.says(found.foreign) in text(found)
    assert all(CHANGES[key].options is None or found.foreign.kind != foreign.HOST for key in first_changes(found))


@pytest.mark.parametrize("said", ["", "\n", "hello", "KeyError: 'loss'", "C:\\new\\notes.txt", "killed time today"])
def test_nothing_is_made_of_other_text(said):
    found = diagnose(said)
    assert (found.verdict, found.sure, found.foreign, found.message) == ("cannot_tell", None, None, None)
    assert text(found) == "Verdict: No out-of-memory message was found." and first_changes(found) == []


@pytest.mark.parametrize(
    "weights, changes",
    [(torch.float16, ["weights_in_fp32", "trained_in_fp32"]), (torch.bfloat16, ["trained_in_fp32", "bf16"])],
)
def test_gradients_that_a_scaler_refuses_are_no_lack_of_memory(weights, changes):
    """As torch's GradScaler raises it on a virtual T4; its lines are what helps, and no cure of memory is among them."""
    import virtual_gpu

    def scaled_step(cured):
        model = torch.nn.Linear(4, 4, dtype=weights, device="cuda")
        if cured:
            exec(CHANGES["trained_in_fp32"].loop, {"model": model})
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.ones(1, 4, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    with virtual_gpu.cuda("T4"), pytest.raises((ValueError, NotImplementedError)) as caught:
        scaled_step(cured=False)
    found = diagnose(caught.value)
    assert found.sure == "certain" and first_changes(found) == changes
    assert found.findings[0].evidence[0].startswith(("ValueError: ", "NotImplementedError: "))
    assert found.users_line.function == "scaled_step"
    with virtual_gpu.cuda("T4"):
        scaled_step(cured=True)


# -- any text ---------------------------------------------------------------------------------------------------------

PIECES = [
    TYPICAL, TYPICAL[:90], HEAD, "\x1b[", "[rank1]: ", "\\n", '  File "', ", line 1, in f", "│ ", ":12 in ", "---> 3 ", "GiB ",
    "9" * 40, " 1.5 GiB is free", "Process 3 has ", "CUDA_ERROR_OUT_OF_MEMORY", "\n", "\r", "\ufeff", "site-packages/torch/", "Killed",
]  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.binary(max_size=400), st.text(max_size=400), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_any_text_is_answered(raw):
    found = diagnose(raw)
    assert text(found)
    json.dumps(found.message.json() if found.message else None)


@pytest.mark.parametrize(
    "piece",
    [" ", "\n", "\x1b[0", "\\n", "a/", "│ ", "[rank0]: ", "CUDA out of memory. ", HEAD + " ", '  File "a", line 1, in f\n',
     "1.00 GiB ", "Process 1 has 1.00 GiB memory in use. ", "│ a:1 in f", "---> 1 x\n", "/a.py", "site-packages/", "Tried", "9"],
)  # fmt: skip
def test_no_text_takes_long(piece):
    """A million characters of what the patterns look for; the limit is loose, a catastrophe takes minutes."""
    begin = time.process_time()
    text(diagnose(piece * (10**6 // len(piece))))
    assert time.process_time() - begin < 20


def test_only_the_end_of_a_long_log_is_read():
    log = b"x" * 500_000 + TYPICAL.encode()
    assert read_end(io.BytesIO(log), most=10_000) == (log[-10_000:], True)
    assert read_end(io.BytesIO(log)) == (log, False)
    assert "only its end was read" in text(diagnose(log, cut=True))


# -- what to try, and the command -------------------------------------------------------------------------------------


def test_every_cause_has_its_words_and_changes():
    assert FIRST.keys() == _CAUSES.keys()
    assert {key for keys in FIRST.values() for key in keys} <= CHANGES.keys()
    assert _WHAT.keys() == CHANGES.keys()
    for code in ("ko", "en"):
        set_language(code)
        assert all(what(key) for key in CHANGES) and all(cause(name) for name in FIRST)


@pytest.mark.parametrize("key", CHANGES)
def test_changes_are_taken_as_they_stand(key, tmp_path):
    """TrainingArguments knows the names and values; a loop's lines are Python."""
    from transformers import TrainingArguments

    change = CHANGES[key]
    keywords = ast.parse(f"f({change.trainer})").body[0].value.keywords
    given = {one.arg: ast.literal_eval(one.value) for one in keywords if one.arg not in ("fp16", "use_liger_kernel")}
    taken = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
    assert all(getattr(taken, name) == value for name, value in given.items())
    assert change.trainer or change.shell or ast.parse(change.loop).body


def test_the_command_is_one_of_ours(tmp_path):
    import argparse

    from virtual_gpu.program.command import add_to

    found = diagnose(
        trace(("/home/me/my train;rm.py", "f", ""), (SITE + "transformers/trainer.py", "evaluation_loop", ""))
    )
    assert command(found, "eval_batch") == "virtual-gpu run --gpu 'RTX 3090' --through-evaluation program.py"
    assert command(found, "expandable").startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True virtual-gpu run")
    assert command(found, "other_processes") is None
    parser = argparse.ArgumentParser()
    add_to(parser.add_subparsers())
    args = parser.parse_args(["run", "--gpu", "RTX 3090", "--through-evaluation", "train.py"])
    assert args.gpu == found.card.name and args.through_evaluation and args.command == ["train.py"]
    assert command(diagnose(trace(MINE)), "checkpointing") == (
        "virtual-gpu run --gpu 'RTX 3090' --change checkpointing train.py"
    )


def test_how_to_run_stands_below_the_list_where_a_command_is_shown():
    """A message without the card's capacity has changes, but no command of ours."""
    said = trace(SCRIPT, (SITE + "torch/autograd/graph.py", "_engine_run_backward", ""))
    with_card, without = diagnose(said), diagnose(said.replace("of 23.69 GiB", ""))
    assert first_changes(with_card) == first_changes(without)
    *_, changes, how = text(with_card).split("\n\n")
    assert changes.startswith("Try, in this order:\n1. ") and changes.count("$ virtual-gpu run") == 3
    assert how.startswith("virtual-gpu run counts whether") and "--change" in how
    assert text(without).split("\n\n")[-1].startswith("Try, in this order:\n1. ")
    assert "virtual-gpu run" not in text(without)
    assert "on a virtual card" in with_card._repr_html_() and "on a virtual card" not in without._repr_html_()


@pytest.mark.parametrize(
    "named, variable",
    [("PYTORCH_CUDA_ALLOC_CONF", None), ("PYTORCH_ALLOC_CONF", None), ("no name", "PYTORCH_CUDA_ALLOC_CONF")],
)
def test_the_setting_is_written_by_the_name_in_the_message(named, variable, capsys, monkeypatch):
    """PyTorch up to 2.8 ignores PYTORCH_ALLOC_CONF without a word; every one reads the older name."""
    said = TYPICAL.replace("PYTORCH_CUDA_ALLOC_CONF", named).replace("38.50 MiB is", "5.00 GiB is")
    setting = f"{variable or named}=expandable_segments:True"
    found = diagnose(said)
    assert first_changes(found)[0] == "expandable"
    for shown in (text(found), found._repr_html_()):
        assert f"$ export {setting}\n" in shown or f"$ export {setting}<" in shown
        assert f"$ {setting} virtual-gpu run --gpu" in shown
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
    main(["doctor", "--json", "-"])
    first = json.loads(capsys.readouterr().out)["try"][0]
    assert first["shell"] == f"export {setting}" and first["command"].startswith(f"{setting} virtual-gpu")


def test_what_is_for_linux_is_not_offered_on_windows():
    holes = trace(MINE).replace("38.50 MiB is", "5.00 GiB is")
    assert first_changes(diagnose(holes))[0] == "expandable"
    windows = diagnose(holes.replace(MINE[0], "C:\\Users\\me\\train.py"))
    assert windows.verdict == "fragmentation" and len(first_changes(windows)) == 3
    assert "expandable" not in first_changes(windows, most=9)


def test_the_subcommand(tmp_path, capsys, monkeypatch):
    log = tmp_path / "error.txt"
    log.write_text(trace(MINE, (SITE + "torch/optim/adamw.py", "_init_group", "")), encoding="utf-8")
    assert main(["doctor", str(log)]) == 0
    out = capsys.readouterr().out
    assert "Died in: the optimizer's first step: its states are being made (certain)" in out
    assert "Your last line: train.py:7 in main: run(model)" in out and 'optim="adamw_bnb_8bit"' in out
    assert main(["doctor", "--language", "ko", str(log)]) == 0
    assert "죽은 자리: 첫 스텝에서 옵티마이저 상태를" in capsys.readouterr().out
    assert main(["doctor", "--json", str(log)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["verdict"], said["users_line"]["line"]) == (1, "optimizer_first_step", 7)
    assert [one["change"] for one in said["try"]] == ["eight_bit", "lora", "qlora"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"nothing here")))
    assert main(["doctor", "-"]) == 1
    assert main(["doctor", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err


# -- from Python ------------------------------------------------------------------------------------------------------


def test_its_face_in_python():
    """An exception or its text; printed it is the command's report, in a notebook a page with everything escaped."""
    import virtual_gpu

    with virtual_gpu.cuda("1GiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        steps()
    found = virtual_gpu.diagnose(caught.value)
    assert (found.verdict, found.sure) == (places.OPTIMIZER_STATES, "certain")
    assert repr(found) == str(found) == text(found)
    with pytest.raises(virtual_gpu.WrongValue, match="int"):
        virtual_gpu.diagnose(3)


def test_its_page():
    silly = "<script>alert(1)</script>&"
    page = diagnose(trace((f"/home/me/{silly}.py", silly, silly)))._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    found = diagnose(trace(MINE, (SITE + "torch/optim/adamw.py", "_init_group", "")))
    page = found._repr_html_()
    for said in (cause(found.verdict), "144.00 MiB", "train.py:7 in main", what("eight_bit"), command(found, "lora")):
        assert said in page.replace("&#x27;", "'"), said
    assert "not fragmentation" in page
    assert "No out-of-memory message" in diagnose("hello")._repr_html_()
    assert "not a message of PyTorch on CUDA" in diagnose("RuntimeError: MPS backend out of memory")._repr_html_()


@pytest.mark.parametrize(
    "file", ["/tmp/ipykernel_12/3456.py", "/tmp/ipython-input-3-ab12.py", "<ipython-input-3-ab12>"]
)
def test_a_cell_is_no_program_to_run(file):
    found = diagnose(trace((file, "train", "loss.backward()")))
    assert found.users_line.is_cell and str(found.users_line) == "a notebook's cell:7 in train"
    assert command(found, "accumulation").endswith(" program.py")


def test_a_bar_says_that_the_steps_before_passed():
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 470.00 MiB. GPU 0 has a total capacity of"
    oom += " 14.74 GiB of which 439.06 MiB is free."
    bar = " 30%|███       | 300/1000 [05:00<11:40,  1.00s/it]"
    [note] = diagnose(f"{bar}\r{bar.replace('300', '301')}\n{oom}").notes
    assert "301/1000" in note
    for early in (bar.replace("300/", "1/"), f"Map: {bar.strip()}", "", "300/1000"):
        assert diagnose(f"{early}\n{oom}").notes == []


def test_killed_while_a_model_is_loaded():
    found = diagnose("Loading checkpoint shards:  33%|███▎      | 1/3 [00:09<00:18,  9.2s/it]\nKilled\n")
    assert (found.verdict, found.sure) == ("host_loading", "likely")
    assert first_changes(found)[0] == "sixteen_bits"
    assert diagnose("Killed\n").verdict == "host_memory"
    assert "virtual-gpu run --host Colab" in text(found)


def test_a_place_is_no_cause_and_a_request_that_is_little_is_said_to_be():
    logits = (SITE + "transformers/loss/loss_utils.py", "fixed_cross_entropy", "loss = nn.functional.cross_entropy(x)")
    step = (SITE + "torch/optim/adamw.py", "_init_group", "")
    found = diagnose(trace(MINE, logits))
    tried, alive = found.message.tried.bytes, found.message.allocated.bytes
    assert tried < 0.1 * alive and any(f"{tried / alive:.0%} of what is alive" in note for note in found.notes)
    assert "Died in: logits and loss" in repr(found)
    assert not any("of what is alive" in note for note in diagnose(trace(MINE, step)).notes)  # small by its nature
    assert "Verdict: " in repr(diagnose("MemoryError"))


LOSS = (SITE + "transformers/loss/loss_utils.py", "fixed_cross_entropy", "loss = nn.functional.cross_entropy(x)")
SCRIPT = ("/home/me/train.py", "<module>", "main()")


def test_where_the_request_is_little_the_command_that_shows_the_rest_stands_beside_it():
    run = "virtual-gpu run --gpu 'RTX 3090' train.py"
    [note] = diagnose(trace(SCRIPT, LOSS)).notes
    assert note == f"T is 1% of what is alive: the rest fills the card. Find out first what that is: $ {run}"
    # The program is the script, not the module of it that called the library last.
    assert diagnose(trace(SCRIPT, ("/home/me/steps.py", "step", "loss = model(x)"), LOSS)).notes == [note]
    bare = note.partition(": $")[0] + "."
    assert diagnose(trace(("/tmp/ipykernel_12/3456.py", "train", "f()"), LOSS)).notes == [bare]
    assert diagnose(trace(SCRIPT, LOSS).replace("of 23.69 GiB", "")).notes == [bare]


def test_where_the_request_is_little_what_was_held_before_has_its_cures_too():
    """Weights, gradients and states stay whatever the batch is; where adapters are trained already, they are little."""
    back = (SITE + "torch/autograd/graph.py", "_engine_run_backward", "")
    for frame in (LOSS, back):
        assert first_changes(diagnose(trace(SCRIPT, frame))) == ["checkpointing", "eight_bit", "lora"]
        large = diagnose(trace(SCRIPT, frame).replace("144.00 MiB", "4.00 GiB"))
        assert large.little is None and "eight_bit" not in first_changes(large)
    adapters = diagnose(trace(SCRIPT, (SITE + "peft/peft_model.py", "forward", ""), LOSS))
    assert first_changes(adapters) == ["checkpointing", "accumulation", "shorter"]
    assert "lora" not in first_changes(adapters, most=9)
    scores = (SITE + "transformers/models/llama/modeling_llama.py", "eager_attention_forward", "")
    assert first_changes(diagnose(trace(SCRIPT, scores))) == ["sdpa", "shorter", "accumulation"]


@pytest.mark.parametrize(
    "file, library, path",
    [
        (r"C:\Users\me\AppData\Local\Programs\Python\Python311\Lib\threading.py", "python", "threading.py"),
        (r"C:\ProgramData\anaconda3\Lib\runpy.py", "python", "runpy.py"),
        (r"C:\Users\me\anaconda3\envs\llm\lib\asyncio\events.py", "python", "asyncio/events.py"),
        (r"C:\Program Files\WindowsApps\PythonSoftwareFoundation.Python.3.11_3.11.2_x64__q\Lib\runpy.py", "python", "runpy.py"),
        (r"C:\Users\me\AppData\Roaming\uv\python\cpython-3.11.9-windows-x86_64-none\Lib\runpy.py", "python", "runpy.py"),
        (r"C:\Users\me\anaconda3\envs\llm\lib\site-packages\torch\nn\functional.py", "torch", "torch/nn/functional.py"),
        (r"D:\Work\Lib\train.py", None, "D:/Work/Lib/train.py"),
    ],
)  # fmt: skip
def test_a_file_on_windows_is_a_library_s_from_its_package_on(file, library, path):
    assert (Frame(file, 1, "f").library, Frame(file, 1, "f").path) == (library, path)
