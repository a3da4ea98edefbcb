"""Changes made in a program from outside are the lines that are printed for them: the same bytes."""

import html
import json
import re
from dataclasses import MISSING, fields
from functools import cache

import pytest
import torch
from transformers import LlamaConfig

from virtual_gpu.changes import CHANGES
from virtual_gpu.command import main
from virtual_gpu.models.fused_head import has_fused_head
from virtual_gpu.program import again, cuda
from virtual_gpu.program.again import Run, advice
from virtual_gpu.program.changed import MADE
from virtual_gpu.program.report import Report
from virtual_gpu.program.runner import run
from virtual_gpu.program.trained import Trained

IMPORTS = """
import sys
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
name, dataset = sys.argv[1], [dict(input_ids=list(range(256)), labels=list(range(256)))] * 32
"""
LOOP = """
model = AutoModelForCausalLM.from_pretrained(name)
model.cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
loader = DataLoader(dataset, batch_size=4)
loader.collate_fn = lambda rows: {key: torch.tensor([row[key] for row in rows]).cuda() for key in rows[0]}
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
model = AutoModelForCausalLM.from_pretrained(name)
args = dict(per_device_train_batch_size=4, optim="adamw_torch")
args.update()
Trainer(model=model, train_dataset=dataset, args=TrainingArguments("out", report_to="none", **args)).train()
"""
# What runs together: nobody trains weights of 4 bits, and a batch of 1 is another program's batch.
SETS = [
    *((name,) for name in MADE if name not in ("qlora", "block_checkpointing", "repeat_kv")),
    ("qlora", "lora"),
    ("checkpointing", "fused_head", "eight_bit"),
]
NEEDS_HEAD = pytest.mark.skipif(not has_fused_head(), reason="no TRL with the fused head")


def written(text: str, names) -> str:
    """The program with the changes' own lines: in the place of the line that sets the same name, or beside it."""
    lines = text.splitlines()
    for key in names:
        if text is TRAINER and CHANGES[key].subclass:
            at = next(at for at, line in enumerate(lines) if line.startswith("Trainer("))
            lines[at:] = [*CHANGES[key].subclass.splitlines(), *(f"Fused{line}" for line in lines[at:])]
            continue
        if text is TRAINER and CHANGES[key].trainer:
            lines = [line.replace("update(", f"update({CHANGES[key].trainer}, ") for line in lines]
            continue
        loop = CHANGES[key].loop.splitlines()
        place = max(at for at, line in enumerate(lines) if line.startswith("model = "))
        place += not any(line.startswith("model = AutoModel") for line in loop)
        for line in loop:
            target = re.match(r"optimizer =|loader =|loss =|model = AutoModel", line)
            old = next((at for at, one in enumerate(lines) if target and one.lstrip().startswith(target[0])), None)
            if old is None:
                lines.insert(place, line)
                place += 1
            else:
                lines[old] = " " * (len(lines[old]) - len(lines[old].lstrip())) + line
                place = old + 1 if "model" in target[0] else place
    return "\n".join(lines)


@cache
def ran(folder, text: str, changes=(), through: str = "loop.py"):
    (folder / through).write_text(IMPORTS + text)
    report = run(str(folder / through), [str(folder)], changes=changes)
    if report.error is not None:
        raise report.error
    return report


def a_llama(folder, **sizes):
    """The folder with a small model's configuration; programs are written beside it."""
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    LlamaConfig(**small, **sizes, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return a_llama(tmp_path_factory.mktemp("model"), vocab_size=4096, num_attention_heads=4, num_key_value_heads=4)


@pytest.mark.parametrize("names", [pytest.param(one, marks=NEEDS_HEAD if "fused_head" in one else ()) for one in SETS])
@pytest.mark.parametrize("text", (LOOP, TRAINER), ids=("loop", "trainer"))
def test_a_change_is_the_line_that_is_printed(folder, text, names):
    plain, changed = ran(folder, text), ran(folder, text, names)
    edited = ran(folder, written(text, names))
    assert changed.phases == edited.phases and changed.at_peak == edited.at_peak and changed.steps == 3
    assert all(times > 0 for times in changed.changed.values()) and changed.changed.keys() == set(names)
    assert changed.phases != plain.phases
    assert ran.__wrapped__(folder, text).phases == plain.phases  # nothing of the change is left


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Heads of keys and values are fewer than those of queries."""
    return a_llama(tmp_path_factory.mktemp("grouped"), vocab_size=512, num_attention_heads=8, num_key_value_heads=2)


@pytest.mark.parametrize("text", (LOOP, TRAINER), ids=("loop", "trainer"))
def test_grouped_heads_are_repeated_where_their_kernel_takes_none(grouped, text):
    plain, changed = ran(grouped, text), ran(grouped, text, ("repeat_kv",))
    edited = ran(grouped, written(text, ("repeat_kv",)))
    assert changed.phases == edited.phases and changed.at_peak == edited.at_peak
    assert changed.changed == {"repeat_kv": 1} and changed.allocated < 0.8 * plain.allocated
    assert any("--change repeat_kv" in note for note in plain.notes)
    assert not any("--change repeat_kv" in note for note in changed.notes)
    half = text.replace("from_pretrained(name)", "from_pretrained(name, dtype=torch.bfloat16)")
    (grouped / "loop.py").write_text(IMPORTS + half)
    on_ampere = run(str(grouped / "loop.py"), [str(grouped)], gpu="A100-80GB")  # whose flash attention takes groups
    assert not any("repeat_kv" in note for note in on_ampere.notes)


def test_repeated_heads_are_tried_first_and_kept(grouped, monkeypatch):
    long = LOOP.replace("batch_size=4", "batch_size=256").replace("dataset, ", "dataset * 32, ")
    long = long.replace("from_pretrained(name)", "from_pretrained(name, dtype=torch.float16)")
    (grouped / "long.py").write_text(IMPORTS + long)
    first = run(str(grouped / "long.py"), [str(grouped)], gpu="1GiB, 7.5")
    assert first.status == "oom" and first.trained.grouped
    told, _ = tried(monkeypatch, first, lambda made: ("oom", "forward", ()))
    assert told[0] == "repeat_kv" and all("repeat_kv" in one for one in told if "expandable" not in one)
    assert "repeat_kv, checkpointing" in told
    other = run(str(grouped / "long.py"), [str(grouped)], gpu="1GiB, 8.0")
    assert other.status == "oom" and not other.trained.grouped
    # where its place is another's code, what is left of the sets is what it would have been
    told, runs = tried(monkeypatch, first, lambda made: ("oom", "forward", ("repeat_kv",)))
    assert [change for change, _ in runs if "expandable" not in change][:2] == ["checkpointing", "fused_head"]


OWN = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(512, 256), torch.nn.Linear(256, 512)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(6))
    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batch in DataLoader(torch.ones(64, 256, dtype=torch.int64), batch_size=16):
    model(batch.cuda(), batch.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_blocks_of_a_model_of_ones_own_are_checkpointed(folder):
    name = "block_checkpointing"
    plain, changed = ran(folder, OWN), ran(folder, OWN, (name,))
    line = "model = Model().cuda()\n"
    edited = ran(folder, OWN.replace(line, f"{line}{CHANGES[name].loop}\n"))
    assert changed.phases == edited.phases and changed.at_peak == edited.at_peak
    assert changed.changed == {name: 1} and changed.allocated < plain.allocated / 2
    # a second time there is nothing to wrap, nor in a model that has its own to turn on
    assert ran(folder, OWN.replace(line, f"{line}{CHANGES[name].loop}\n"), (name,)).changed == {name: 0}
    assert ran(folder, LOOP, (name,)).changed == {name: 0}
    # nor where a larger model has it in it
    nested = "model(batch.cuda(), batch.cuda()).backward()"
    assert nested in OWN
    twice = OWN.replace(nested, f"{nested}\n    Whole(model)(batch.cuda()).backward()").replace(
        "model = Model()", "class Whole(Model):\n    def __init__(self, part):\n        super().__init__()\n"
        "        self.part, self.blocks = part, None\n    def forward(self, ids):\n"
        "        return self.part(ids, ids)\nmodel = Model()", 1,
    )  # fmt: skip
    assert ran(folder, twice, (name,)).changed == {name: 1}


def test_the_lines_to_write_name_the_class_of_the_blocks(folder):
    own = OWN.replace("Block", "Layer").replace("ones(64", "ones(256").replace("batch_size=16", "batch_size=256")
    (folder / "own.py").write_text(IMPORTS + own)
    report = run(str(folder / "own.py"), [str(folder)], gpu="1GiB, 8.0")
    assert (report.status, report.trained.blocks) == ("oom", "Layer")
    report.tried = [{"status": "fits", "changes": ["block_checkpointing"]}]
    assert any(line.endswith("isinstance(part, Layer))") for line in report.to_write)
    assert "Block" not in "".join(report.to_write)
    report.trained = Trained(own=True, blocks="Decoder, Encoder")  # a model and another, each with its own
    assert any(line.endswith("isinstance(part, (Decoder, Encoder)))") for line in report.to_write)


def test_checkpointed_blocks_keep_the_names_of_their_parameters(folder):
    """An average of the weights is kept by names that were taken down before the first step."""
    average = """
average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
at_first, tensors = [name for name, _ in model.named_modules()], model.state_dict().keys()
"""
    update = """
    for name, parameter in model.named_parameters():
        average[name].lerp_(parameter.detach(), 0.01)
    assert [name for name, _ in model.named_modules()] == at_first and model.state_dict().keys() == tensors
    import copy
    copy.deepcopy(model)(batch.cuda(), batch.cuda()).backward()
"""
    text = OWN.replace("optimizer = torch", f"{average}optimizer = torch") + update
    report = ran(folder, text, ("block_checkpointing",))
    assert (report.status, report.changed) == ("fits", {"block_checkpointing": 1})
    assert any(module.startswith("blocks.0") for module, _ in report.modules)


def test_a_program_without_the_place_says_where_it_was_looked_for(folder):
    text = """
layer = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-5)
for _ in range(3):
    layer(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
    report = ran(folder, text, MADE if has_fused_head() else tuple(name for name in MADE if name != "fused_head"))
    assert set(report.changed.values()) == {0} and not report.changes_made
    for name in report.changed:
        assert sum(note.startswith(f"{name}: ") for note in report.notes) == 1
    assert report.allocated == ran(folder, text).allocated


def test_names_are_checked_before_anything_runs(folder, capsys):
    with pytest.raises(ValueError, match="checkpointing") as error, cuda("T4", changes=["more_memory"]):
        raise AssertionError
    assert "more_memory" in str(error.value) and all(name in str(error.value) for name in MADE)
    assert main(["run", "--change", "more_memory", str(folder / "loop.py")]) == 2
    assert "more_memory" in capsys.readouterr().err


def test_optimizers_of_a_program_itself_are_left_alone():
    adam = torch.optim.AdamW
    layer = torch.nn.Linear(8, 8)
    with cuda("T4", changes=["eight_bit"]) as gpu:
        kept = torch.optim.AdamW

        class Own(torch.optim.AdamW):
            pass

        assert type(Own(layer.parameters(), 1e-3)) is Own and gpu.changes["eight_bit"] == 0
        assert type(torch.optim.AdamW(layer.parameters(), amsgrad=True)) is adam  # bitsandbytes has none
        assert type(torch.optim.AdamW(layer.parameters(), 1e-3)).__name__ == "AdamW8bit"
        with pytest.raises(TypeError):
            torch.optim.AdamW(layer.parameters(), rate=1e-3)
    assert gpu.changes["eight_bit"] == 1 and torch.optim.AdamW is adam
    assert type(kept(layer.parameters())) is adam  # what a module of the program has bound


def test_a_program_keeps_adapters_of_its_own(folder):
    own = LOOP.replace(
        "model.cuda()", 'model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))\nmodel.cuda()'
    )
    report = ran(folder, own, ("lora",))
    assert report.changed == {"lora": 0} and report.phases == ran(folder, own).phases
    both = ran(folder, own, ("qlora", "lora"))
    assert both.changed == {"qlora": 1, "lora": 0} and both.allocated < report.allocated


def first_run(phase: str, *, allocated: int = 90, asked: int = 20, trained: Trained | None = None, changed=()):
    """A report of a card of 100 bytes that ran out of them."""
    oom = {"phase": phase, "allocated": allocated, "bytes": asked}
    names = [field.name for field in fields(Report) if field.default is MISSING and field.default_factory is MISSING]
    return Report(
        **{
            **dict.fromkeys(names),
            "capacity": 100,
            "oom": oom,
            "trained": trained or Trained(),
            "changed": dict(changed),
        }
    )


def tried(monkeypatch, first, answers, command=("train.py",)):
    """What was told, and what came out; answers: changes → (status, phase of the OOM, names without a place).

    One run at a time or several: the same. What was begun ahead and not wanted is ended.
    """
    going, most = set(), 0

    class Begun:
        def __init__(self, change, options, command, environment, changes):
            nonlocal most
            self.change, self.changes = change, changes
            going.add(change)
            most = max(most, len(going))

        def result(self):
            self.stop()
            status, phase, nowhere = answers(frozenset(self.changes) or self.change)
            oom = {"phase": phase} if status == "oom" else None
            changed = {name: int(name not in nowhere) for name in self.changes}
            report = {"status": status, "judgement": status, "oom": oom, "changed": changed}
            return Run(self.change, report, self.changes)

        def stop(self):
            going.remove(self.change)

    monkeypatch.setattr(again, "Begun", Begun)
    found, several = [], False
    for at_once in (1, 2, 5):
        told, most = [], 0
        runs = list(advice([], command, first, told.append, at_once=at_once))
        found.append((told, [(run.change, run.report["status"]) for run in runs]))
        assert not going and most <= at_once
        several = several or most > 1
    assert found[1:] == found[:-1] and (several or len(told) < 2)
    return found[0]


def test_what_is_tried_follows_the_phase_in_which_it_died(monkeypatch):
    forward = first_run("forward")
    both = frozenset(("checkpointing", "fused_head"))
    told, runs = tried(monkeypatch, forward, lambda made: ("fits" if made == both else "oom", "backward", ()))
    assert told == ["checkpointing", "fused_head", "checkpointing, fused_head"] and runs[-1][1] == "fits"
    # holes in the reserved memory are there: the allocator's setting may be enough
    told, runs = tried(monkeypatch, first_run("forward", allocated=70), lambda made: ("fits", None, ()))
    assert len(told) == 1 and "expandable_segments" in told[0]
    # what is only tight is told, and the search goes on
    told, runs = tried(monkeypatch, forward, lambda made: ("tight" if len(made) == 1 else "fits", None, ()))
    assert [status for _, status in runs] == ["tight", "tight", "fits"]
    # more than the card in weights, gradients and states: what changes only activations is not tried
    heavy = Trained(weights=40, gradients=40, states=80, eight_bit_states=10)
    told, _ = tried(monkeypatch, first_run("forward", trained=heavy), lambda made: ("oom", "forward", ()))
    assert told[0] == "eight_bit" and all({"eight_bit", "lora"}.intersection(one.split(", ")) for one in told)
    # in the step the activations are gone
    told, _ = tried(monkeypatch, first_run("step"), lambda made: ("oom", "step", ()))
    assert told == ["fused", "eight_bit", "lora", "qlora, lora", "qlora, lora, fused_head"]
    told, _ = tried(monkeypatch, first_run("loading"), lambda made: ("oom", "loading", ()))
    assert told[:2] == ["sixteen_bits", "sixteen_bits, eight_bit"] and "checkpointing" not in ", ".join(told)
    told, _ = tried(monkeypatch, first_run("evaluation"), lambda made: ("oom", "evaluation", ()))
    assert told == ["smaller_batch"]
    # the head, which a Trainer's user has to write himself, only where checkpoints and 8 bits are not enough
    enough = frozenset(("checkpointing", "eight_bit"))
    _, runs = tried(monkeypatch, forward, lambda made: ("fits" if made >= enough else "oom", "backward", ()))
    assert runs[-1] == ("checkpointing, eight_bit", "fits")
    # a model of the program's own has no place for what transformers has
    told, _ = tried(
        monkeypatch, first_run("forward", trained=Trained(own=True, causal=False)), lambda made: ("oom", "forward", ())
    )
    assert told[:3] == ["block_checkpointing", "smaller_batch", "block_checkpointing, smaller_batch"]
    assert not {"checkpointing", "lora", "qlora", "fused_head"}.intersection(", ".join(told).split(", "))
    # what is there already is not tried
    trained = Trained(adapters=True, quantized=True, sixteen_bits=True)
    told, _ = tried(monkeypatch, first_run("loading", trained=trained), lambda made: ("oom", "loading", ()))
    assert told == []
    told, _ = tried(
        monkeypatch, first_run("forward", changed={"checkpointing": 1}), lambda made: ("oom", "forward", ())
    )
    assert "checkpointing" not in ", ".join(told)


@pytest.mark.parametrize(
    "arguments", ["--train.micro_batch_size 4 --train.global_batch_size 64", "data.batch_size=4 data.eval.batch_size=9"]
)
def test_the_batch_is_found_among_arguments_of_arguments(monkeypatch, arguments):
    """As jsonargparse's and Hydra's are written."""
    told, _ = tried(
        monkeypatch, first_run("forward"), lambda made: ("oom", "forward", ()), ("train.py", *arguments.split())
    )
    name = arguments.lstrip("-").replace("=", " ").partition(" ")[0]
    assert [one for one in told if "batch" in one][:2] == [f"{name} 2", f"{name} 1"]


def test_what_cannot_help_is_not_tried_again(monkeypatch):
    # after checkpointing it dies in the step: fewer activations more would not have helped
    told, _ = tried(monkeypatch, first_run("forward"), lambda made: ("oom", "step", ()))
    assert told[:2] == ["checkpointing", "eight_bit"] and "smaller_batch" not in told
    # no transformers, no loader: nothing of theirs is told as tried, nor tried in company
    nowhere = ("checkpointing", "fused_head", "smaller_batch", "lora", "qlora")
    told, runs = tried(monkeypatch, first_run("forward"), lambda made: ("oom", "forward", nowhere))
    assert [change for change, _ in runs] == ["eight_bit"] and len(told) == len(set(told)) <= 6
    # where it dies before it makes an optimizer, a set with another optimizer is the change before it: told once
    loading = first_run("loading", trained=Trained(causal=False))
    told, runs = tried(monkeypatch, loading, lambda made: ("oom", "loading", ("eight_bit",)))
    assert told == ["sixteen_bits", "sixteen_bits, eight_bit"] and runs == [("sixteen_bits", "oom")]
    # nor what has no library here
    with monkeypatch.context() as without:
        without.setattr(again, "can_change", lambda name: name not in ("fused_head", "eight_bit", "lora", "qlora"))
        told, _ = tried(monkeypatch, first_run("forward"), lambda made: ("oom", "forward", ()))
    assert told == ["checkpointing", "smaller_batch", "checkpointing, smaller_batch"]
    # what the program fails with is told, and left out of the sets
    fails = frozenset(("fused_head",))
    told, runs = tried(
        monkeypatch, first_run("forward"), lambda made: ("failed" if made == fails else "oom", "forward", ())
    )  # fmt: skip
    assert ("fused_head", "failed") in runs and sum("fused_head" in change for change in told) == 1


def test_what_a_step_must_hold_whatever_the_activations(folder):
    """Counted at the error; of a program that is trained as it was counted."""
    path = folder / "loop.py"
    path.write_text(IMPORTS + LOOP.replace("batch_size=4", "batch_size=64").replace("dataset, ", "dataset * 8, "))
    what = run(str(path), [str(folder)], gpu="1GiB, 8.0").trained
    fits = ran(folder, LOOP)
    parameters = fits.at_peak["parameters"]
    all_bytes = what.weights
    assert what == Trained(
        weights=all_bytes, gradients=all_bytes, states=2 * all_bytes, eight_bit_states=all_bytes // 2
    )  # fmt: skip
    assert parameters - 512 * 64 <= what.weights <= parameters  # the allocator's rounding of each
    assert fits.trained == Trained()  # nobody asks
    path.write_text(IMPORTS + LOOP.replace("batch_size=4", "batch_size=64").replace("dataset, ", "dataset * 8, "))
    lora = run(str(path), [str(folder)], gpu="1GiB, 8.0", changes=["lora"]).trained
    assert lora.adapters and lora.gradients < lora.weights / 10 and lora.least() < what.least() / 2


def test_a_program_that_does_not_fit_is_told_its_lines(folder, capfd, tmp_path):
    """The whole of it, each attempt a process of its own: the lines of the change that makes it fit."""
    page = tmp_path / "page.html"
    path = folder / "loop.py"
    long = LOOP.replace("batch_size=4", "batch_size=48").replace("dataset, ", "dataset * 8, ")
    frugal = ran(folder, long, ("checkpointing",))
    assert frugal.reserved < 2**30 < ran(folder, long).reserved
    command = ["run", "--gpu", "1GiB, 8.0", "--json", "--html", str(page), "--advise", str(path), str(folder)]
    assert main(command) == 1
    report = json.loads(capfd.readouterr().out)
    first = report["tried"][0]
    assert (first["changes"], first["status"], first["reserved"]) == (["checkpointing"], "fits", frugal.reserved)
    assert report["tried"][-1]["judgement"] == "fits"
    lines = [line for name in report["tried"][-1]["changes"] for line in CHANGES[name].lines]
    assert lines and all(html.escape(line) in page.read_text() for line in lines)


def test_a_change_that_fails_beside_another_run_is_tried_alone(monkeypatch):
    """Two runs may meet at a folder or a port; what fails alone too is the change's."""
    going = set()

    class Begun:
        def __init__(self, change, options, command, environment, changes):
            self.change, self.changes = change, changes
            going.add(change)

        def result(self):
            status = "failed" if len(going) > 1 or self.change == "fused_head" else "oom"
            self.stop()
            oom = {"phase": "backward"} if status == "oom" else None
            report = {"status": status, "judgement": status, "oom": oom, "changed": dict.fromkeys(self.changes, 1)}
            return Run(self.change, report, self.changes)

        def stop(self):
            going.remove(self.change)

    monkeypatch.setattr(again, "Begun", Begun)
    runs = list(advice([], ["train.py"], first_run("forward"), lambda _: None, at_once=2))
    failed = [run.change for run in runs if run.report["status"] == "failed"]
    assert failed == ["fused_head"] and len(runs) > 4 and not going
