"""Several cards in one process: each is counted as if it were alone, and ends where it ends."""

import copy
import io
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm

from virtual_gpu.errors import WrongValue
from virtual_gpu.program.again import Run
from virtual_gpu.program.context import cuda
from virtual_gpu.program.runner import run

PROGRAMS = Path(__file__).parent / "programs"
MIB = 2**20


def train(device):
    """Three steps of a model on that card, and what the card says of them."""
    model = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1000)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        ids = torch.randint(1000, (8, 64), device=device)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert {p.device for p in model.parameters()} == {loss.device} == {torch.device(device)}
    stats = torch.cuda.memory_stats(device)
    return {name: stats[name] for name in stats if name.startswith(("allocated", "reserved", "segment", "active"))}


@pytest.mark.parametrize("looked_at", [0, 1, 2])
def test_each_card_takes_what_it_takes_alone(looked_at):
    with cuda("T4"):
        alone = train("cuda:0")
    with cuda("T4", visible_gpus=3, rank=looked_at) as gpu:
        assert torch.cuda.device_count() == 3
        assert [train(f"cuda:{index}") for index in (2, 0, 1)] == [alone] * 3
        assert gpu.meter is gpu.several.meters[looked_at] and gpu.watch.blocks
        assert max(gpu.watch.reserved_peaks) == alone["reserved_bytes.all.peak"]


def test_a_model_on_two_cards_is_its_halves():
    """Activations cross over, gradients come back; workspaces lie where the product is computed."""

    def halves(first, second):
        one, other = nn.Linear(1024, 2048).to(first), nn.Linear(2048, 512).to(second)
        optimizer = torch.optim.AdamW([*one.parameters(), *other.parameters()])
        for _ in range(2):
            hidden = one(torch.randn(64, 1024, device=first)).relu()
            loss = other(hidden.to(second)).square().mean()
            assert loss.device == torch.device(second)
            loss.backward()
            assert one.weight.grad.device == torch.device(first)
            optimizer.step()
            optimizer.zero_grad()
        return [torch.cuda.max_memory_allocated(device) for device in (first, second)]

    with cuda("T4", visible_gpus=2):
        forth = halves("cuda:0", "cuda:1")
    with cuda("T4", visible_gpus=2, rank=1):
        assert halves("cuda:1", "cuda:0") == forth
    with cuda("T4"):
        both = halves("cuda:0", "cuda:0")[0]
    assert min(forth) > 8.125 * MIB and both < sum(forth) and all(both > half for half in forth)


def test_a_tensor_says_which_card_it_is_on():
    with cuda("T4", visible_gpus=2):
        there = torch.arange(6.0, device="cuda:1").reshape(2, 3)
        assert (there.device, there.get_device(), there.is_cuda) == (torch.device("cuda", 1), 1, True)
        assert there.to("cuda:1") is there and there.cuda().get_device() == 0
        made = [
            torch.zeros_like(there),
            there.new_ones(2),
            torch.tensor([1.0], device=1),
            there[there > 1],
            there.clone(),
        ]
        made += [copy.deepcopy(there), (there > 0).nonzero(), there.to(torch.float16), nn.Linear(3, 2).to(1)(there)]
        with torch.device("cuda:1"):
            made.append(torch.empty(3))
        assert [one.get_device() for one in made] == [1] * len(made)
        assert torch.tensor([1.0, 2.0], device=1).tolist() == [1.0, 2.0]
        file = io.BytesIO()
        torch.save({"here": there.cuda(0), "there": there}, file)
        for map_location, places in ((None, [0, 1]), ("cuda:1", [1, 1])):
            file.seek(0)
            assert [one.get_device() for one in torch.load(file, map_location=map_location).values()] == places
        for one, other, said in (
            (there, there.cuda(0), "cuda:1 and cuda:0"),
            (there.cuda(0), there, "cuda:0 and cuda:1"),
        ):
            with pytest.raises(RuntimeError, match=said):
                one + other


def test_what_lies_there_in_parts_or_in_pages():
    with cuda("T4", visible_gpus=2):
        places, values = torch.tensor([[0, 2], [1, 0]]), torch.ones(2)
        sparse = torch.sparse_coo_tensor(places, values, (3, 2), device="cuda:1")
        assert sparse.device == (sparse @ torch.ones(2, 4, device="cuda:1")).device == torch.device("cuda", 1)
        import bitsandbytes as bnb

        layer = nn.Linear(256, 256).to("cuda:1")
        optimizer = bnb.optim.PagedAdamW8bit(layer.parameters())
        layer(torch.ones(1, 256, device="cuda:1")).sum().backward()
        optimizer.step()
        assert torch.cuda.memory_allocated(0) == 0 < torch.cuda.memory_allocated(1)


def test_the_current_card_is_a_thread_s_own():
    seen = []
    with cuda("T4", visible_gpus=2):
        with torch.cuda.device(1):
            thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
            thread.start()
            thread.join()
            assert torch.empty(1, device="cuda").get_device() == torch.cuda.current_device() == 1
            assert torch.cuda.memory_allocated() == torch.cuda.memory_allocated(1) == 0
        kept = torch.empty(MIB, device="cuda")
        assert (torch.cuda.current_device(), kept.get_device(), seen) == (0, 0, [0])
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_allocated(1)) == (4 * MIB, 0)
        free = [torch.cuda.mem_get_info(index)[0] for index in (0, 1)]
        assert free[1] - free[0] == (20 - 2) * MIB  # a segment of either size, the small one cached
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            torch.cuda.set_device(2)


def test_every_card_ends_where_it_ends(tmp_path):
    program = tmp_path / "two.py"
    program.write_text('import torch\nkept = [torch.empty(2**28, device="cuda:1") for _ in range(20)]\n')
    report = run(str(program), gpu="T4", visible_gpus=2)
    assert report.status == "oom" and "GPU 1" in str(report.error) and report.oom["card"] == 1
    assert "cuda:1" in report.verdict and "cuda:0" not in report.verdict
    assert "cuda:0" in report.text().splitlines()[1] and "--rank 1" in report.text().splitlines()[1]
    assert report.other_cards[0]["allocated"] > 13 * 2**30 > report.allocated == 0
    assert any("cuda:1" in line for line in report.advice)
    program.write_text('import torch\nkept = torch.empty(2**30, device="cuda:1")\n')
    report = run(str(program), gpu="T4", visible_gpus=2)
    assert report.fullest == {"card": 1, "allocated": 2**32, "reserved": 2**32}
    assert "cuda:1: " in report.verdict and "cuda:1 " in report.summary
    program.write_text('import torch\nkept = torch.empty(2**31 + 2**30 + 2**29 + 2**27, device="cuda:1")\n')
    assert run(str(program), gpu="T4", visible_gpus=2).judgement == "tight"


def test_a_card_s_peak_is_that_of_the_run(tmp_path):
    """Whatever the program resets, and whichever card is looked at."""
    program = tmp_path / "two.py"
    program.write_text(
        'import torch\nkept = torch.empty(2**31, device="cuda:1")\ndel kept\ntorch.cuda.empty_cache()\n'
        "torch.cuda.reset_peak_memory_stats(1)\nassert torch.cuda.max_memory_reserved(1) == 0\n"
        'torch.empty(2**20, device="cuda:0")\n'
    )
    first, second = (run(str(program), gpu="T4", visible_gpus=2, rank=rank) for rank in (0, 1))
    assert first.status == second.status == "fits", first.error
    assert first.fullest == second.fullest == {"card": 1, "allocated": 2**33, "reserved": 2**33}
    assert "--rank 1" in first.which_card[0] and not second.which_card
    assert not any("GPU" in note for note in first.notes)  # a program that uses only another card uses one


def test_what_goes_on_elsewhere_is_not_recorded_here():
    with cuda("T4", visible_gpus=2) as gpu:
        there, stop = torch.empty(2**30, device="cuda:1"), threading.Event()

        def compute():
            while not stop.is_set():
                there[:1024].mul(2)

        thread = threading.Thread(target=compute)
        thread.start()
        layer = nn.Linear(64, 64).to("cuda:0")
        for _ in range(50):
            layer(torch.ones(2, 64, device="cuda:0")).sum().backward()
        stop.set()
        thread.join()
        assert max(gpu.watch.reserved_peaks) == torch.cuda.max_memory_reserved(0) < 2**30
        assert gpu.several.here == 0


def test_data_goes_where_it_is_sent():
    with cuda("T4", visible_gpus=2):
        weight = nn.Parameter(torch.ones(MIB, device="cuda:0"))
        weight.data = weight.data.to("cuda:1")
        assert weight.get_device() == (weight * 2).get_device() == 1
        assert torch.cuda.memory_allocated(0) == 0 and torch.cuda.memory_allocated(1) == 4 * MIB


def test_cards_are_not_mixed():
    """Inside they are CPUs, of which PyTorch lets numbers without a dimension mix with anything."""
    with cuda("T4", visible_gpus=2):
        here, there = torch.tensor(2.0, device="cuda:0"), torch.ones(3, device="cuda:1")
        for mix, said in (
            (lambda: there * here, "cuda:1 and cuda:0"),
            (lambda: here + there.mean(), "cuda:0 and cuda:1"),
            (lambda: there[torch.tensor([0], device="cuda:0")], "cuda:1 and cuda:0"),
        ):
            with pytest.raises(RuntimeError, match=said):
                mix()
        assert (there * torch.tensor(2.0)).get_device() == 1  # of the CPU it may be
        here.copy_(there.mean())
        torch._foreach_add_([here, there], 1)
        taken = torch.cuda.memory_allocated(1)
        there[0], there[1:] = here, torch.ones(2, device="cuda:0")  # copies between cards
        assert torch.cuda.memory_allocated(1) == taken


def test_in_backward_the_card_of_the_gradient_is_current():
    """As in PyTorch's thread of that card; what C++ runs on its own is where its tensors are."""
    seen = {}

    def see(name):
        def hook(*_):
            seen[name] = (torch.cuda.current_device(), torch.empty(1, device="cuda").get_device())

        return hook

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            see(f"node {gradient.get_device()}")()
            return gradient * torch.full(gradient.shape, 2.0, device="cuda")

    with cuda("T4", visible_gpus=2):
        first, second = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 8).to("cuda:1")
        second.weight.register_post_accumulate_grad_hook(see("parameter"))
        second.register_full_backward_pre_hook(see("module, before"))
        second.register_full_backward_hook(see("module"))
        hidden = Double.apply(first(torch.randn(4, 8, device="cuda:0")))
        there = hidden.to("cuda:1")
        there.register_hook(lambda gradient: gradient * torch.ones(8, device="cuda"))
        handle = there.register_hook(see("removed"))
        handle.remove()
        loss = Double.apply(second(there)).sum()
        with torch.cuda.device(1):
            hidden.register_hook(see("of the other card"))
            loss.backward()
            assert torch.cuda.current_device() == 1
        assert first.weight.grad.get_device() == 0
    there = dict.fromkeys(("node 1", "parameter", "module", "module, before"), (1, 1))
    assert seen == there | {"node 0": (0, 0), "of the other card": (0, 0)}


def test_streams_belong_to_a_card():
    with cuda("T4", visible_gpus=2):
        side = torch.cuda.Stream(device=1)
        assert side.device == torch.device("cuda", 1) and side != torch.cuda.Stream(device=0)
        assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1) != torch.cuda.default_stream(0)
        with torch.cuda.stream(side):
            assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == side
            assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
            kept = torch.empty(MIB, device="cuda")
            other = torch.empty(MIB, device="cuda:0")
        assert (kept.get_device(), other.get_device(), torch.cuda.current_device()) == (1, 0, 0)
        reserved = torch.cuda.memory_reserved(0)
        again = torch.empty(MIB, device="cuda:0")  # of the same pool: a side stream of card 1 is none of card 0
        assert torch.cuda.memory_reserved(0) == reserved and again.get_device() == 0


def test_a_number_without_a_card_is_refused_and_leaves_nothing():
    with cuda("T4", visible_gpus=2) as gpu:
        for ask in (
            lambda: torch.empty(1, device="cuda:5"),
            lambda: torch.cuda.memory_allocated(5),
            lambda: torch.cuda.mem_get_info(5),
            lambda: torch.cuda.set_per_process_memory_fraction(0.5, 5),
        ):
            with pytest.raises((torch.AcceleratorError, ValueError, AssertionError), match=r"invalid device|device id"):
                ask()
        assert (gpu.several.here, torch.cuda.memory_allocated()) == (0, 0)
        torch.cuda.set_per_process_memory_fraction(0.5, 1)
        assert [torch.cuda.get_per_process_memory_fraction(card) for card in (0, 1)] == [1.0, 0.5]
        with pytest.raises(torch.OutOfMemoryError, match=r"GPU 1.*allowed"):
            torch.empty(2**31, device="cuda:1")
        assert [torch.cuda.memory_stats(card)["num_ooms"] for card in (0, 1)] == [0, 1]
        assert len({torch.cuda.get_device_properties(card).uuid for card in (0, 1)}) == 2
        assert torch.empty(2**31, device="cuda:0").get_device() == 0


def test_what_the_program_leaves_itself(monkeypatch, tmp_path):
    program = tmp_path / "one.py"
    program.write_text(
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"\nimport torch\nassert torch.cuda.device_count() == 1\n'
    )
    assert run(str(program), gpu="T4", visible_gpus=2).status == "fits"
    program.write_text("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n")
    report = run(str(program), gpu="T4", visible_gpus=2)
    assert report.status == "failed" and {"--gpus 2", "--visible-gpus 2"} <= options_in(report.error)
    with pytest.raises(WrongValue) as raised:
        run("torchrun", ["--nproc_per_node", "3", str(program)], gpu="T4", visible_gpus=2)
    assert options_in(raised.value) == {"--gpus 3", "--visible-gpus 2"}


def options_in(text):
    """What a message says to write, and in place of what."""
    return set(re.findall(r"--[a-z-]+ \d+", str(text)))


@pytest.mark.parametrize(
    "line, sees, wanted",
    [
        ('torch.ones(1, device="cuda:1")', {}, {"--visible-gpus 2"}),
        ("torch.cuda.set_device(2)", {"visible_gpus": 2}, {"--visible-gpus 3"}),
        ("torch.nn.DataParallel(torch.nn.Linear(1, 1).cuda(), device_ids=[0, 1])", {}, {"--visible-gpus 2"}),
        ('torch.ones(1).to("cuda:3")', {"gpus": 2}, {"--visible-gpus 4", "--gpus 2"}),
    ],
)
def test_a_program_that_wants_more_cards_hears_how_to_have_them(line, sees, wanted, tmp_path):
    program = tmp_path / "one.py"
    program.write_text(f"import torch\n{line}\n")
    report = run(str(program), gpu="T4", **sees)
    assert report.status == "failed" and wanted in map(options_in, report.notes)
    program.write_text(f"import torch\ntry:\n    {line}\nexcept Exception:\n    pass\nraise ValueError('its own')\n")
    assert not [note for note in run(str(program), gpu="T4", **sees).notes if "--visible-gpus" in note]


def test_a_run_for_one_of_many_names_the_option_for_several():
    with cuda("T4", gpus=2), pytest.raises(NotImplementedError) as raised:
        torch.ones(1, device="cuda:1")
    assert options_in(raised.value) == {"--visible-gpus 2", "--gpus 2"}


def test_what_was_tried_names_its_card():
    """The command's: of several cards the one that ran out again, or the fullest."""
    cards = {"card": 0, "reserved": 3, "other_cards": [{"card": 1, "allocated": 5, "reserved": 7}]}
    fits = {**cards, "status": "fits", "judgement": "fits", "allocated": 2, "seconds": 1.0, "error": None, "oom": None}
    fits |= {"growth": None}
    out = {**fits, "status": "oom", "judgement": "does not fit", "oom": {"card": 0}}
    rows = [Run("a change", report).row() for report in (fits, out, {**fits, "oom": {"card": 0}})]
    assert [(row["card"], row["reserved"]) for row in rows] == [(1, 7), (0, 7), (1, 7)]


@pytest.mark.parametrize(
    "start",
    [
        torch.cuda.is_available,
        torch.cuda.init,
        lambda: torch.ones(1).to("cuda:1"),
        lambda: torch.ones(1, device="cuda"),
        lambda: torch.cuda.set_device(1),
    ],
)
def test_cuda_reads_once_which_cards_there_are(start, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with cuda("T4", visible_gpus=2):
        assert torch.cuda.device_count() == 2 and len(torch.cuda.default_generators) == 2
        torch.ones(3).add(1)  # on the CPU
        start()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert torch.ones(1, device="cuda:1").get_device() == 1 and torch.cuda.device_count() == 2
    with cuda("T4", visible_gpus=2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:1")


def test_a_launcher_chooses_cards_for_the_program(monkeypatch, tmp_path):
    """`accelerate launch --gpu_ids 1`: the variable is for another process, whatever the launcher asked in its own."""
    commands = pytest.importorskip("accelerate.commands.launch")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    prepared = commands.prepare_simple_launcher_cmd_env

    def after_a_look(args):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        return prepared(args)

    monkeypatch.setattr(commands, "prepare_simple_launcher_cmd_env", after_a_look)
    program = tmp_path / "one.py"
    program.write_text("import torch\nassert torch.cuda.is_available() and torch.cuda.device_count() == 1\n")
    report = run(
        "accelerate", ["launch", "--num_processes", "1", "--gpu_ids", "1", str(program)], gpu="T4", visible_gpus=2
    )
    assert report.status == "fits", report.error


@pytest.mark.parametrize(
    "said, left",
    [
        ("0,1", 2), ("1", 1), ("1,0", 2), (" 1 , 0 ", 2), ("-1", 0), ("", 0), ("2", 0), ("0,2,1", 1), ("1,-1,0", 1),
        ("0,,1", 1), ("NoDevFiles", 0), ("1,1", 0), ("1gpu,0x", 2), ("GPU-00000000-0000-0000-0000-000000000001,0", 2),
        ("GPU-8f1c", 0),
    ],
)  # fmt: skip
def test_what_cuda_reads_of_its_variable(said, left, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with cuda("T4", visible_gpus=2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
        assert (torch.cuda.device_count(), torch.cuda.is_available()) == (left, left > 0)
        if not left:
            for ask in (lambda: torch.zeros(1, device="cuda"), lambda: nn.Linear(1, 1).cuda(), torch.cuda.init):
                with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
                    ask()


@pytest.mark.slow
@pytest.mark.parametrize("four", [(), ("--four",)])
def test_layers_on_both_cards_by_a_device_map(four):
    of_one, of_two = (run(str(PROGRAMS / "two_cards.py"), four, gpu="T4", visible_gpus=number) for number in (1, 2))
    assert (of_one.status, of_two.status, of_two.steps) == ("fits", "fits", 2), of_two.error
    own, (other,) = of_two.allocated, of_two.other_cards
    assert 0 < other["allocated"] < own < of_one.allocated < own + other["allocated"]


@pytest.mark.slow
def test_the_trainer_s_data_parallel(tmp_path):
    """The first card has the gathered logits and all of the optimizer; the second weights while it computes."""
    of_one = run(str(PROGRAMS / "data_parallel.py"), gpu="T4")
    report = run(str(PROGRAMS / "data_parallel.py"), gpu="T4", visible_gpus=2, rank=1)
    assert (of_one.status, report.status) == ("fits", "fits"), report.error
    (first,) = report.other_cards
    assert report.at_peak["optimizer"] == 0 < of_one.at_peak["optimizer"]
    assert report.allocated < of_one.allocated < first["allocated"]
    assert any(outside.what == "NCCL" for outside in report.room.outside)


def test_what_is_broadcast_together_is_one_block():
    """torch/csrc/cuda/comm.cpp: tensors of a type, until there are `buffer_size` bytes."""
    with cuda("T4", visible_gpus=2):
        tensors = [torch.empty(MIB, device="cuda:0") for _ in range(4)] + [torch.empty(7, 3, device="cuda:0").half()]
        torch.cuda.reset_peak_memory_stats(0)
        before = torch.cuda.memory_allocated(0)
        first, second = comm.broadcast_coalesced(tensors, (0, 1), 10 * MIB)
        assert all(one is two for one, two in zip(first, tensors, strict=True))
        assert [(t.shape, t.dtype, t.get_device()) for t in second] == [(t.shape, t.dtype, 1) for t in tensors]
        # Three of 4 MiB are 12, the first sum beyond 10; the last one of its type is by itself.
        shared = [t.untyped_storage().nbytes() for t in second]
        assert shared == [12 * MIB] * 3 + [4 * MIB, 42]
        assert torch.cuda.memory_allocated(1) == 16 * MIB + 512
        assert torch.cuda.max_memory_allocated(0) == before + 12 * MIB  # what is copied together, for a moment
        with pytest.raises(RuntimeError, match="first on devices list"):
            comm.broadcast(second[0], (0, 1))
        assert [one.get_device() for one in comm.broadcast(torch.ones(3), (0, 1))] == [0, 1]
        gathered = comm.gather([tensors[0], second[0]], destination=1)
        assert (gathered.shape, gathered.get_device()) == ((2 * MIB,), 1)


def test_gradients_with_places_are_added_without_nccl():
    """torch/cuda/nccl.py, is_available: NCCL takes dense tensors, one a card."""
    nccl = torch.cuda.nccl
    with cuda("T4", visible_gpus=2) as gpu:
        here, there = (torch.ones(4, 6, device=f"cuda:{card}") for card in (0, 1))
        assert nccl.is_available([here, there]) and nccl.is_available([here])
        for wrong in ([here, here], [here, there.t()], [here.cpu(), there], [here.to_sparse(), there]):
            assert not nccl.is_available(wrong)
        model = nn.DataParallel(nn.Embedding(500, 16, sparse=True).cuda())
        optimizer = torch.optim.SparseAdam(model.parameters())
        for _ in range(2):
            model(torch.zeros(4, 3, dtype=torch.int64, device="cuda")).sum().backward()
            gradient = model.module.weight.grad
            assert gradient.is_sparse and gradient.get_device() == 0 and gradient._values().shape == (12, 16)
            optimizer.step()
            optimizer.zero_grad()
        assert gpu.uses_nccl  # for the weights


def test_nccl_writes_into_what_it_is_given():
    nccl = torch.cuda.nccl
    with cuda("T4", visible_gpus=2) as gpu:
        twos, fours = ([torch.arange(float(n), device=f"cuda:{card}") + card for card in (0, 1)] for n in (2, 4))
        parameter = nn.Parameter(torch.zeros(2, device="cuda:1"))
        taken = [torch.cuda.memory_allocated(card) for card in (0, 1)]
        nccl.all_gather(twos, fours)
        assert [one.tolist() for one in fours] == [[0.0, 1.0, 1.0, 2.0]] * 2
        nccl.broadcast([twos[0], parameter])
        assert parameter.tolist() == [0.0, 1.0]
        nccl.reduce_scatter(fours, twos)
        nccl.all_reduce(fours)
        nccl.reduce(fours, output=parameter.new_empty(4), root=1)
        assert [torch.cuda.memory_allocated(card) for card in (0, 1)] == taken and gpu.uses_nccl
        assert not gpu.answers.most_common()
        for not_known in (*twos, *fours):
            not_known[0].item()
        assert [count for _, count in gpu.answers.most_common()] == [4]
        for wrong, said in (
            (lambda: nccl.all_reduce([twos[0], twos[0]]), "unique devices"),
            (lambda: nccl.all_reduce(twos, fours), "output must be of size"),
            (lambda: nccl.broadcast([twos[0], fours[1]]), "same number of elements"),
            (lambda: nccl.broadcast(twos, root=2), "invalid root"),
            (lambda: nccl.all_reduce([torch.ones(2)]), "cuda dense"),
            (lambda: nccl.unique_id(), "unique_id"),
        ):
            with pytest.raises((RuntimeError, NotImplementedError), match=said):
                wrong()


def test_what_is_not_compiled_is_said_when_it_is_called():
    with cuda("T4", visible_gpus=2) as gpu:

        @torch.compile
        def twice(x):
            return 2 * x

        assert twice.__name__ == "twice" and not gpu.watch.notes
        assert [twice(torch.ones(2, device=card)).get_device() for card in (1, 0)] == [1, 0]
        assert [note.partition(":")[0] for note in gpu.watch.notes] == ["torch.compile"]
    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"visible_gpus": 2, "gpus": 2}, "gpus=2, visible_gpus=2"),
        ({"visible_gpus": 0}, "visible_gpus"),
        ({"visible_gpus": 17}, "visible_gpus=17"),
        ({"visible_gpus": 2, "rank": 2}, "rank=2"),
    ],
)
def test_wrong_numbers_of_cards(wrong, said):
    with pytest.raises(WrongValue, match=re.escape(said)), cuda("T4", **wrong):
        pass
    assert not torch.cuda.is_available()
