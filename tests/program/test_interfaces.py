"""What programs ask of CUDA, one interface after another."""

import glob
import io
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from virtual_gpu.errors import WrongValue
from virtual_gpu.program import cuda, writing
from virtual_gpu.program.command import main
from virtual_gpu.program.runner import run

MIB = 2**20
TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=64, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a configuration and no weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("tiny")
    LlamaConfig(**TINY, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
    return str(folder)


def load(folder, **more):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **more)


def test_the_card_says_what_it_is():
    with cuda("RTX 4090"):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
        assert "4090" in torch.cuda.get_device_name() and torch.cuda.get_device_capability() == (8, 9)
        properties = torch.cuda.get_device_properties("cuda:0")
        assert properties.total_memory == torch.cuda.mem_get_info()[1] and properties.major == 8
        assert torch.cuda.is_bf16_supported() and torch.cuda.get_arch_list() == ["sm_89"]
        assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
        torch.accelerator.synchronize()
        torch.empty(MIB, dtype=torch.uint8, device=torch.accelerator.current_accelerator())


def test_a_card_after_several_is_one():
    for cards in (4, 1, 2):
        with cuda("T4", gpus=cards):
            torch.manual_seed(1)
            assert torch.cuda.device_count() == len(torch.cuda.get_rng_state_all()) == cards


def test_seeds_and_random_states():
    with cuda("T4"):
        torch.manual_seed(1)
        torch.cuda.manual_seed_all(2)
        assert torch.cuda.initial_seed() == 2
        state = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.cuda.get_rng_state(), state) and state.device.type == "cpu"
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert generator.device.type == "cuda" and torch.rand(2, device="cuda", generator=generator).is_cuda


def test_events_and_graphs_let_a_program_go_on():
    with cuda("T4"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) > 0 and y.is_cuda


def test_marks_for_profilers_are_as_without_a_profiler():
    with cuda("T4"):
        assert torch.cuda.nvtx.range_push("step") == torch.cuda.nvtx.range_pop() == -2
        with torch.cuda.nvtx.range("forward"):
            torch.cuda.nvtx.mark("here")
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("step"))
    with pytest.raises(RuntimeError, match="NVTX"):
        torch.cuda.nvtx.range_push("step")


def test_default_devices_and_numbers_as_devices():
    with cuda("T4"):
        torch.set_default_device("cuda")
        try:
            assert torch.nn.Linear(2, 2).weight.is_cuda and torch.tensor([1]).is_cuda
        finally:
            torch.set_default_device(None)
        module = torch.nn.Linear(2, 2)
        assert module.to(0).weight.is_cuda and torch.ones(2, device=0).is_cuda
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            module.to(1)


def test_modules_change_type_and_place():
    with cuda("T4"):
        module = torch.nn.Linear(512, 512, bias=False, device="meta").to_empty(device="cuda")
        assert torch.cuda.memory_allocated() == MIB
        module.bfloat16()
        assert torch.cuda.memory_allocated() == MIB // 2 and module.weight.dtype == torch.bfloat16
        module.to("cpu", torch.float32)
        assert torch.cuda.memory_allocated() == 0 and not module.weight.is_cuda
        assert torch.ones(2).pin_memory().to("cuda", non_blocking=True).is_cuda


def test_factories_pin_what_they_make():
    """nanochat's chat_sft makes its batch by `torch.tensor(rows, pin_memory=True)`, its pretraining by `empty`."""
    with cuda("T4") as gpu:
        held = gpu.host.meter.pinned.reserved_bytes
        like = torch.ones(4)
        made = [
            torch.tensor([[1, 2], [3, 4]], pin_memory=True), torch.empty(4, pin_memory=True),
            torch.zeros_like(like, pin_memory=True), like.new_tensor([1.0], pin_memory=True),
        ]  # fmt: skip
        assert all(one.is_pinned() for one in made) and made[0].tolist() == [[1, 2], [3, 4]]
        assert torch.tensor([1.0], pin_memory=True, requires_grad=True).requires_grad
        assert gpu.host.meter.pinned.reserved_bytes > held and not torch.tensor([1]).is_pinned()
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            torch.tensor([1], device="cuda", pin_memory=True)
        with pytest.raises(TypeError):
            torch.as_tensor([1], pin_memory=True)


def test_scripted_code_runs_as_python_and_compiled_code_where_that_is_asked(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with cuda("T4") as gpu:
        model = torch.compile(torch.nn.Linear(4, 4).cuda())
        assert model(torch.ones(1, 4, device="cuda")).shape == (1, 4)

        @torch.jit.script
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        assert twice(torch.ones(1, device="cuda")).is_cuda
        assert [note.partition(":")[0] for note in gpu.watch.notes] == ["torch.compile", "torch.jit.script"]


def test_transformers_takes_flash_attention_where_there_is_such_a_card(tiny):
    with cuda("L4"):
        model = load(tiny, device_map="cuda", attn_implementation="flash_attention_2")
        ids = torch.ones(2, 16, dtype=torch.int64, device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        assert model.model.layers[0].self_attn.q_proj.weight.grad.is_cuda
    with cuda("T4"), pytest.raises(Exception, match="Ampere"):
        load(tiny, device_map="cuda", attn_implementation="flash_attention_2")(ids.cpu().cuda())


def test_eight_bits_hold_a_byte_a_weight(tiny):
    from transformers import BitsAndBytesConfig

    with cuda("L4"):
        model = load(tiny, device_map="auto", quantization_config=BitsAndBytesConfig(load_in_8bit=True))
        weight = model.model.layers[0].mlp.up_proj.weight
        assert weight.dtype == torch.int8 and weight.is_cuda
        assert model(torch.ones(1, 8, dtype=torch.int64, device="cuda")).logits.shape == (1, 8, 256)


def test_a_product_in_eight_bits_asks_for_what_a_card_asked(tmp_path):
    """The first product of LoRA on polyglot-ko-1.3b in int8, 16 samples of 256: an H100's record, levers, row int8."""
    from transformers import BitsAndBytesConfig, GPTNeoXConfig

    name = f"{tmp_path}/neox"
    sizes = {"hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 16, "intermediate_size": 8192}
    GPTNeoXConfig(**sizes, vocab_size=512).save_pretrained(name)
    with cuda("H100") as gpu:
        model = load(name, device_map="cuda", quantization_config=BitsAndBytesConfig(load_in_8bit=True))
        layer = model.gpt_neox.layers[0].attention.query_key_value
        leaf = torch.zeros(16, 256, 2048, device="cuda", requires_grad=True)
        x = leaf * 1
        layer(x)  # the bias is cast once
        asked, allocate = [], gpu._allocate
        gpu._allocate = lambda nbytes, category: asked.append(nbytes) or allocate(nbytes, category)
        y = layer(x)
        rows, out = 4096 * 2048, 4096 * 6144
        large = [nbytes for nbytes in asked if nbytes >= 2**13]
        assert large == [2 * rows, 4 * 4096, rows, 2 * rows, rows, 4 * out, 2 * out, 4 * out]
        total = y.sum()
        total.backward()
        del y, x
        before = torch.cuda.memory_allocated()  # the backward is over, and the graph still holds the input
        del total
        assert before - torch.cuda.memory_allocated() == 4 * rows + 512  # and the sum


def test_generation_ends_at_its_length(tiny):
    with cuda("T4"):
        ids = torch.ones(2, 4, dtype=torch.int64).cuda()
        for sample in (False, True):
            out = load(tiny, device_map="cuda").generate(ids, max_new_tokens=6, do_sample=sample)
            assert out.shape == (2, 10)


def test_files_are_loaded_where_they_belong(tmp_path):
    path = tmp_path / "state.pt"
    kept = torch.arange(512.0)
    torch.save({"whole": kept, "part": kept[:256], "step": torch.tensor([7])}, path)
    with cuda("T4"):
        state = torch.load(path, map_location="cuda")
        assert state["whole"].is_cuda and torch.cuda.memory_allocated() == 2048 + 512  # one block for whole and part
        assert state["step"].item() == 7 and state["part"].shape == (256,)
        layer = torch.nn.Linear(512, 1, bias=False).cuda()
        layer.load_state_dict({"weight": state["whole"][None]})
        assert torch.equal(torch.load(path, map_location="cpu")["whole"], kept)
        assert torch.load(path, map_location=lambda storage, place: storage.cuda())["whole"].is_cuda
    assert torch.equal(torch.load(path)["whole"], kept)


def test_checkpoints_are_written_if_asked_for(tmp_path):
    for writes in (False, True):
        with cuda("T4", writes=writes):
            state = {"w": torch.randn(3, device="cuda"), "zeros": torch.zeros(3, device="cuda"), "n": 4}
            torch.save(state, tmp_path / f"{writes}.pt")
    written = torch.load(tmp_path / "True.pt", map_location="cpu")
    assert written["w"].tolist() == [1.0, 1.0, 1.0] and written["zeros"].tolist() == [0.0, 0.0, 0.0]
    assert not (tmp_path / "False.pt").exists()


def test_a_file_says_that_its_tensors_were_on_the_gpu(tmp_path):
    path = tmp_path / "state.pt"
    with cuda("T4", writes=True):
        device = torch.device("cuda", 0)
        torch.save({"gpu": torch.zeros(128, device="cuda"), "cpu": torch.ones(2), "device": device}, path)
    with cuda("T4"):
        state = torch.load(path)  # where it was saved from
        assert state["gpu"].is_cuda and torch.cuda.memory_allocated() == 512
        assert state["cpu"].tolist() == [1.0, 1.0] and not state["cpu"].is_cuda and state["device"] == device
        del state
        assert torch.load(path, map_location="cpu")["gpu"].shape == (128,) and torch.cuda.memory_allocated() == 0


def test_saving_brings_one_storage_after_another_to_the_cpu(tmp_path):
    """As PyTorch does: RAM for the largest, a storage that two tensors share once, known values as they are."""
    path = tmp_path / "state.pt"
    with cuda("T4", writes=True) as gpu:
        rows = [torch.zeros(2**20, device="cuda") for _ in range(4)]
        state = {"rows": rows, "again": rows[0][:7], "step": torch.tensor(3).cuda(), "weight": nn.Parameter(rows[1])}
        gpu.host.meter.reset_peak()
        before = gpu.host.meter.peak_bytes
        torch.save(state, path)
        assert gpu.host.meter.peak_bytes - before == 4 * 2**20
        assert pickle.loads(pickle.dumps(rows[0])).shape == (2**20,)  # by itself: its bytes at once
    assert 4 < path.stat().st_size / (4 * 2**20) < 4.01
    read = torch.load(path, map_location="cpu")
    assert read["again"].untyped_storage().data_ptr() == read["rows"][0].untyped_storage().data_ptr()
    assert read["step"].item() == 3 and read["rows"][3].tolist() == [1.0] * 2**20
    assert isinstance(read["weight"], nn.Parameter) and read["weight"].requires_grad


def test_large_unknown_tensors_are_written_whole(tmp_path):
    """Their copy on the CPU is one number, expanded: PyTorch wrote what lay behind it in memory."""
    numbers, into, path = 2**24, io.BytesIO(), tmp_path / "large.pt"
    with cuda("T4", writes=True) as gpu:
        large = torch.empty(numbers, dtype=torch.uint8, device="cuda").add_(torch.empty(1, device="cuda").byte())
        gpu.host.meter.reset_peak()
        before = gpu.host.meter.peak_bytes
        torch.save(large, path)
        assert gpu.host.meter.peak_bytes - before == numbers
        torch.save(large, into)
    for file in (path, io.BytesIO(into.getvalue())):
        assert torch.equal(torch.load(file, map_location="cpu"), torch.ones(numbers, dtype=torch.uint8))


def test_a_class_of_tensors_of_the_program_s_own_is_a_plain_one_on_the_gpu():
    """As MONAI's images are: what they carry has no bytes on the card."""

    class Image(torch.Tensor):
        pass

    image = torch.rand(2, 1, 8, 8).as_subclass(Image)
    image.spacing = 0.5
    convolution = nn.Conv2d(1, 4, 3)
    with cuda("T4") as gpu:
        convolution.cuda()
        there, again = image.to("cuda"), image.cuda()
        assert type(image * 2) is Image and type(there) is type(again) and not isinstance(there, Image)
        assert there.as_subclass(torch.Tensor) is not None and not any("Image" in note for note in gpu.watch.notes[1:])
        convolution(there).sum().backward()
        loss = nn.functional.mse_loss(convolution(again), torch.zeros(2, 4, 6, 6, device="cuda").as_subclass(Image))
        assert loss.item() is not None and there.shape == again.shape == (2, 1, 8, 8)
        assert "Image" in gpu.watch.notes[0]
        assert torch.cuda.memory_allocated() > 2 * 512
    assert type(image.clone()) is Image and image.spacing == 0.5
    assert "as_subclass" not in vars(torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_weights_that_wait_on_the_cpu_are_overwritten_where_they_lie(dtype):
    """As blocks are swapped by way of a pinned buffer: what comes off the card goes where the others were."""
    elements = 2**24
    with cuda("T4") as gpu:
        weights = [torch.empty(elements, dtype=dtype, device="cuda") for _ in range(2)]
        waiting, off = (one.cpu() for one in weights)
        buffer = torch.empty_like(weights[0], device="cpu").pin_memory()
        held = gpu.host.meter.current_bytes
        buffer.copy_(weights[0])
        waiting.copy_(buffer)
        assert waiting.stride() == (0,) and waiting[7].item() == 1
        waiting.copy_(torch.empty(elements, dtype=torch.float32).normal_())  # nobody has written it
        waiting.copy_(torch.zeros((), dtype=dtype))
        assert waiting[7].item() == 0
        off.copy_(waiting)
        assert off[7].item() == 0 and gpu.host.meter.current_bytes == held
        with pytest.raises(RuntimeError, match="written-to tensor"):  # values of its own, which there is no room for
            off.copy_(torch.arange(elements).to(dtype))


def test_a_run_loads_what_it_has_saved(tmp_path):
    """A best checkpoint, loaded where it was saved from: one block a storage; the folder is as it was."""
    path = tmp_path / "best.pt"
    with cuda("T4") as gpu:
        net = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8)).cuda()
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.zeros(2, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ids = torch.arange(5)
        best = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "ids": ids, "on": ids.cuda()}
        torch.save(best, path)
        held = torch.cuda.memory_allocated()
        loaded = torch.load(path)
        weights = sum(-(-one.numel() * 4 // 512) * 512 for one in net.parameters())
        steps = [state["step"] for state in loaded["optimizer"]["state"].values()]
        assert torch.cuda.memory_allocated() - held == 3 * weights + 512  # two states, and `on`
        assert {one.device.type for one in loaded["net"].values()} == {"cuda"} and steps == [1.0] * 4
        assert loaded["epoch"] == 3 and loaded["ids"].tolist() == loaded["on"].tolist() == [0, 1, 2, 3, 4]
        net.load_state_dict(loaded["net"])
        optimizer.load_state_dict(loaded["optimizer"])
        del loaded, steps
        on_cpu = torch.load(str(path), map_location="cpu")["net"]
        assert on_cpu["0.weight"].device.type == "cpu" and on_cpu["1.bias"].tolist() == [1.0] * 8
        torch.save(net, path)  # over it, and whole
        assert next(torch.load(path, weights_only=False).parameters()).is_cuda
        assert any("torch.load" in note for note in gpu.watch.notes)
        folder = gpu.own_files._folder
        assert sum(os.stat(Path(folder) / name).st_blocks for name in os.listdir(folder)) * 512 < 2**20
    assert not any(tmp_path.iterdir()) and not Path(folder).exists()


def test_files_of_a_run_are_found_moved_and_deleted(tmp_path, monkeypatch):
    """By the functions that programs use on checkpoints, by path and by open file."""
    first, second, third = (tmp_path / f"{n}.pt" for n in range(3))
    first.write_bytes(b"of an earlier run")
    with cuda("T4"):
        state = nn.Linear(512, 512).cuda().state_dict()
        torch.save(state, first)
        assert first.stat().st_size == os.path.getsize(first) > 4 * 512 * 512
        shutil.copyfile(first, second)
        os.replace(second, third)
        assert third.exists() and not os.path.exists(second)
        with open(third, "rb") as file:
            assert torch.load(file)["weight"].is_cuda
        with open(third, "rb") as file:
            assert torch.load(io.BytesIO(file.read()), map_location="cpu")["weight"].shape == (512, 512)
        (tmp_path / "more").mkdir()
        assert torch.load(shutil.copy(third, tmp_path / "more"))["bias"].is_cuda
        third.unlink()
        assert not third.exists()
        with pytest.raises(FileNotFoundError):
            torch.load(third)
        with second.open("wb") as file:
            torch.save(state, file)
        with second.open("rb") as file:
            assert torch.load(file)["bias"].shape == (512,)
        os.remove(second)
        assert not second.exists()
        second.write_bytes(b"another")
        assert second.read_bytes() == b"another"
        assert os.stat in os.supports_follow_symlinks and os.unlink in os.supports_dir_fd
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / first.name).write_bytes(b"a")
        monkeypatch.chdir(tmp_path)
        shutil.rmtree("sub")  # deletes by names in an open folder
        assert first.stat().st_size > 4 * 512 * 512
        os.remove(first)
    assert first.read_bytes() == b"of an earlier run" and sorted(tmp_path.glob("**/*.pt")) == [first, second]


def test_a_file_of_an_earlier_run_is_not_deleted_for_ours(tmp_path):
    """Written over and deleted, it is not there for the program, whatever it asks; afterwards it is as it was."""
    path, other = tmp_path / "best.pt", tmp_path / "other.pt"
    path.write_bytes(b"of an earlier run")
    with cuda("T4"):
        state = nn.Linear(8, 8).cuda().state_dict()
        for away in (os.remove, lambda one: os.replace(src=one, dst=other)):
            torch.save(state, path)
            away(path)
            assert not path.exists() and not os.access(path, os.R_OK)
            for ask in (os.remove, os.stat, open, torch.load):
                with pytest.raises(FileNotFoundError):
                    ask(path)
        assert torch.load(other)["bias"].shape == (8,)
        torch.save(state, path)
        assert path.exists()
    assert path.read_bytes() == b"of an earlier run" and not other.exists()


def test_a_run_loads_the_safetensors_that_it_has_saved(tmp_path):
    """With their sizes and types, and the numbers that are known; what is not known takes nothing of the disk."""
    path = tmp_path / "best.safetensors"
    with cuda("T4") as gpu:
        net = nn.Linear(2048, 2048).half().cuda()
        kept = net.state_dict() | {"on": torch.arange(5).cuda()}
        kept |= {"ids": torch.tensor([[2.5], [3.5]]), "one": torch.tensor(7)}
        safetensors.torch.save_file(kept, path, metadata={"epoch": "3"})
        with safetensors.safe_open(path, "pt", device="cpu") as file:
            assert file.metadata() == {"epoch": "3"} and {*file.keys()} == {*kept}
            assert file.get_tensor("ids").tolist() == [[2.5], [3.5]] and file.get_tensor("one").item() == 7
            assert file.get_slice("weight").get_shape() == [2048, 2048]
        held = torch.cuda.memory_allocated()
        loaded = safetensors.torch.load_file(path, device="cuda")
        assert torch.cuda.memory_allocated() - held == 2 * 2048 * 2048 + 2 * 2048 + 3 * 512
        assert loaded["on"].tolist() == [0, 1, 2, 3, 4] and loaded["weight"].dtype == torch.float16
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors.torch.save_file({"a": net.weight, "b": net.weight}, path)
        assert path.exists() and any("safetensors" in note for note in gpu.watch.notes)
        folder = gpu.own_files._folder
        assert sum(os.stat(Path(folder) / name).st_blocks for name in os.listdir(folder)) * 512 < 2**20
        safetensors.torch.save_model(net, str(tmp_path / "net.safetensors"))
        assert safetensors.torch.load_model(net, str(tmp_path / "net.safetensors")) == (set(), [])
    assert not any(tmp_path.iterdir()) and not Path(folder).exists()


def test_files_of_a_run_are_among_their_folder_s(tmp_path, monkeypatch):
    """As programs look for the last checkpoint; one of an earlier run that was deleted is not."""
    monkeypatch.chdir(tmp_path)
    for name in ("step_10.pt", "notes.txt"):
        (tmp_path / name).write_bytes(b"of an earlier run")
    with cuda("T4"):
        state = nn.Linear(8, 8).cuda().state_dict()
        for step in (10, 20, 30):
            torch.save(state, f"step_{step}.pt")
        os.remove("step_10.pt")
        names = ["notes.txt", "step_20.pt", "step_30.pt"]
        assert os.listdir() == os.listdir(tmp_path) == names
        assert sorted(glob.glob("step_*.pt")) == names[1:] and glob.glob(str(tmp_path / "*_30.pt"))
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert sorted(path.name for path in Path().glob("*.pt")) == names[1:]
        assert [sorted(files) for _, _, files in os.walk(tmp_path)] == [names]
        with os.scandir(tmp_path) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        assert sizes["step_30.pt"] == os.path.getsize("step_30.pt") > sizes["notes.txt"]
    assert sorted(os.listdir()) == ["notes.txt", "step_10.pt"]


def test_files_of_a_run_go_with_their_folder(tmp_path):
    with cuda("T4") as gpu:
        state = nn.Linear(8, 8).cuda().state_dict()
        staged = tmp_path / "staged" / "part"
        staged.mkdir(parents=True)
        torch.save(state, staged / "a.pt")
        os.rename(src=tmp_path / "staged", dst=tmp_path / "final")
        assert torch.load(tmp_path / "final" / "part" / "a.pt")["bias"].is_cuda and not (staged / "a.pt").exists()
        shutil.copy2(src=tmp_path / "final" / "part" / "a.pt", dst=tmp_path / "b.pt")
        shutil.rmtree(tmp_path / "final")
        assert not (tmp_path / "final" / "part" / "a.pt").exists() and (tmp_path / "b.pt").exists()
        assert len(os.listdir(gpu.own_files._folder)) == 1
        with open(tmp_path / "c.pt.tmp", "wb") as file:
            torch.save(state, file)
        os.replace(tmp_path / "c.pt.tmp", tmp_path / "c.pt")
    assert not any(tmp_path.iterdir())


def test_of_a_file_s_real_tensors_the_largest_alone_lose_their_numbers(tmp_path):
    with cuda("T4") as gpu:
        large = torch.ones(2**28 + 1, dtype=torch.uint8)
        torch.save({"large": large, "state": torch.get_rng_state(), "seven": torch.tensor(7)}, tmp_path / "a.pt")
        loaded = torch.load(tmp_path / "a.pt")
        assert torch.equal(loaded["state"], torch.get_rng_state()) and loaded["seven"] == 7
        assert len(loaded["large"]) == len(large) and not loaded["large"].any()
        assert any("256 MiB" in note for note in gpu.watch.notes)


def test_what_cannot_be_pickled_is_told(tmp_path):
    with cuda("T4") as gpu:
        torch.save({"function": lambda: 0}, tmp_path / "a.pt")
        assert any("pickle" in note and "lambda" in note for note in gpu.watch.notes)
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "a.pt")


def test_layers_in_few_bits_that_a_program_makes_itself():
    """bitsandbytes' own: `.cuda()` quantizes, after a cast or a `load_state_dict`; the bias goes the ordinary way."""
    with cuda("T4"):
        import bitsandbytes as bnb

        x = torch.zeros(8, 512, dtype=torch.float16, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        four = bnb.nn.Linear4bit(512, 256, compute_dtype=torch.float16, compress_statistics=False).half().to("cuda")
        assert type(four.weight.quant_state).__name__ == "QuantState" and four.weight.dtype == torch.uint8
        # 512 bytes more: the bias, and the 16 numbers that 4 bits stand for
        assert torch.cuda.memory_allocated() - before == 512 * 256 // 2 + 512 * 256 // 64 * 4 + 2 * 512
        assert [name for name, _ in four.named_parameters()] == ["weight", "bias"] and four.bias.dtype == torch.float16
        four(x).sum().backward()
        assert x.grad.shape == x.shape and four.weight.grad is None
        eight = nn.Sequential(bnb.nn.Linear8bitLt(512, 256, has_fp16_weights=False))
        eight.load_state_dict(nn.Sequential(nn.Linear(512, 256)).state_dict())
        assert type(eight[0].weight).__name__ == "Int8Params"
        eight.cuda()
        assert eight[0].weight.dtype == torch.int8 and eight(x).shape == (8, 256)


def test_a_state_is_loaded_as_the_program_has_it():
    """Into the parameters that are there, or by `assign` as others: moving to a card alone swaps."""
    with cuda("T4"):
        layer = nn.Linear(4, 4).cuda()
        weight, state = layer.weight, {name: torch.ones_like(one) for name, one in layer.state_dict().items()}
        layer.load_state_dict(state)
        assert layer.weight is weight
        layer.load_state_dict(state, assign=True)
        assert layer.weight is not weight
        layer.cpu().cuda()
        assert layer.weight.is_cuda and torch.__future__.get_swap_module_params_on_conversion()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_to_with_a_device_and_a_type_moves(mode):
    """Both named, or by another tensor: inference mode brings such a `to` whole, its device by position."""
    with cuda("T4"), mode():
        here, there = torch.ones(4, dtype=torch.int64), torch.ones(4, device="cuda")
        device = torch.device("cuda")
        moved = [
            here.to(device, torch.int64), here.to(device=device, dtype=torch.float16), here.to(there),
            here.to("cuda", torch.int64, True), here.to(there, non_blocking=True),
        ]  # fmt: skip
        assert [(one.is_cuda, one.dtype) for one in moved] == [
            (True, torch.int64), (True, torch.float16), (True, torch.float32), (True, torch.int64),
            (True, torch.float32),
        ]  # fmt: skip
        back = [there.to("cpu", torch.int64), there.to(device="cpu", dtype=torch.float16), there.to(here)]
        assert [(one.is_cuda, one.dtype) for one in back] == [
            (False, torch.int64), (False, torch.float16), (False, torch.int64)
        ]  # fmt: skip
        assert here.new_tensor([1], device="cuda").is_cuda and not here.new_tensor([1]).is_cuda
        assert there.new_tensor([1]).is_cuda and there.new_tensor([1], device="cpu").device.type == "cpu"
        assert there.to("cuda", torch.float32) is there
        assert there.to("cuda", torch.float32, copy=True) is not there and there.to("cuda", torch.half).is_cuda


@pytest.mark.parametrize(
    ("matrix", "right"),
    [((16, 8), (16, 2)), ((4, 16, 8), (4, 16)), ((4, 16, 8), (4, 16, 2)), ((8, 16), (8, 2)), ((8, 8), (8,))],
)
def test_least_squares_have_the_shapes_of_the_cpu(matrix, right):
    def solve(device, **driver):
        a = torch.eye(*matrix[-2:], device=device).expand(matrix).clone().requires_grad_()
        solved = torch.linalg.lstsq(a, torch.ones(right, device=device), **driver)
        solved.solution.sum().backward()
        return [(one.shape, one.dtype) for one in (*solved, a.grad)], solved.solution.device.type

    expected, _ = solve("cpu", driver="gels")  # CUDA's one
    with cuda("T4"):
        assert solve("cuda") == (expected, "cuda")


def test_4_bit_weights_stored_as_16_bits_stay_4_bits(tiny):
    """peft casts 16-bit weights to fp32 where their class is not called Params4bit; FSDP wants them stored so."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    held = []
    for stored in (torch.uint8, torch.bfloat16):
        four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=stored)
        with cuda("A100-40GB"):
            model = AutoModelForCausalLM.from_pretrained(tiny, quantization_config=four_bit, device_map="cuda")
            model = prepare_model_for_kbit_training(model)
            assert model.model.layers[0].mlp.up_proj.weight.dtype == stored
            held.append(torch.cuda.memory_allocated())
            del model
    assert held[0] == held[1]


def test_a_4_bit_weight_stays_known_where_its_module_is_moved(tiny):
    """`Params4bit` and its layer keep their state; peft, DoRA and Unsloth's kernels read it off either."""
    from transformers import BitsAndBytesConfig

    with cuda("T4"):
        model = load(tiny, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="cuda")
        layer = model.model.layers[0].mlp.up_proj
        for moved in (model, model._apply(lambda tensor: tensor)):
            assert moved.model.layers[0].mlp.up_proj is layer
            assert layer.weight.quant_state is layer.quant_state and layer.quant_state.shape == (128, 64)
            assert layer.weight.bnb_quantized


@pytest.mark.parametrize(("card", "grouped", "expanded"), [("T4", 0, 2), ("A100", 1, 1)])
def test_which_kernel_attention_will_take_can_be_asked(card, grouped, expanded):
    """As Unsloth asks it, to repeat grouped heads where only math takes them; `SDPBackend`'s numbers."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with cuda(card):
        query, key = (torch.empty(1, heads, 8, 64, device="cuda", dtype=torch.float16) for heads in (8, 2))
        mask = torch.ones(1, 1, 8, 8, device="cuda", dtype=torch.bool)
        before = torch.cuda.memory_allocated()
        assert torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True) == grouped
        assert torch._fused_sdp_choice(query, query, query, None, 0.0, True) == expanded
        assert torch._fused_sdp_choice(query, query, query, mask) == int(SDPBackend.EFFICIENT_ATTENTION)
        with sdpa_kernel(SDPBackend.MATH):
            assert torch._fused_sdp_choice(query, query, query) == int(SDPBackend.MATH)
        assert torch.cuda.memory_allocated() == before
    assert torch._fused_sdp_choice(*[torch.empty(1, 2, 8, 64)] * 3) in (0, 1)  # the CPU's own answer


def test_kernels_of_bitsandbytes_that_others_call_by_themselves_are_there():
    """Unsloth looks for them in the native library, and turns 4 bits off where they are no C functions."""
    with cuda("T4"):
        import bitsandbytes.functional as bnb

        kernel, there = bnb.lib.cdequantize_blockwise_fp16_nf4, torch.empty(64, device="cuda", dtype=torch.float16)
        assert hasattr(kernel, "restype")
        assert kernel(None, None, None, bnb.get_ptr(there), 64, 64, None) is None
        assert not bnb.lib.compiled_with_cuda
    with pytest.raises(RuntimeError):
        bnb.lib.cdequantize_blockwise_fp16_nf4()


def test_dora_on_4_bits_dequantizes_the_weight(tiny):
    """In each forward, all of it in 16 bits; peft copies the layer first, when it makes the adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    peaks = []
    for dora in (False, True):
        with cuda("T4"):
            model = AutoModelForCausalLM.from_pretrained(tiny, quantization_config=four_bit, device_map="cuda")
            model = get_peft_model(model, LoraConfig(target_modules=["up_proj"], use_dora=dora)).train()
            ids = torch.ones(1, 4, dtype=torch.int64).cuda()
            for _ in range(2):  # workspaces come in the first
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                model(input_ids=ids, labels=ids).loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] - peaks[0] >= 2 * 64 * 128


@pytest.mark.parametrize("without", [(), ("unscale_bf16",)], ids=["in_force", "left_out"])
def test_a_scaler_refuses_bfloat16_as_on_a_card(without):
    """The commonest end of QLoRA with fp16=True where a library made the adapters bf16 (pytorch #127176)."""
    with cuda("T4", without=without):
        layer = nn.Linear(4, 4).to("cuda", torch.bfloat16)
        optimizer, scaler = torch.optim.AdamW(layer.parameters()), torch.amp.GradScaler("cuda")
        scaler.scale(layer(torch.ones(1, 4, device="cuda", dtype=torch.bfloat16)).sum()).backward()
        if without:
            scaler.step(optimizer)
        else:
            with pytest.raises(NotImplementedError, match=r"unscale_cuda.*not implemented for 'BFloat16'"):
                scaler.step(optimizer)


def test_streams_without_a_vendors_name():
    with cuda("T4"):
        stream = torch.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with stream:
            assert torch.cuda.current_stream() == stream
        torch.Event().record(stream)


def test_a_caches_layers_can_wait_on_the_cpu(tiny):
    with cuda("T4"):
        model, ids = load(tiny, device_map="cuda"), torch.ones(2, 64, dtype=torch.int64).cuda()
        before, held = torch.cuda.memory_allocated(), {}
        for kind in (None, "offloaded"):
            options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
            out = model.generate(ids, cache_implementation=kind, **options)
            held[kind] = {layer.keys.is_cuda for layer in out.past_key_values.layers}
            del out
        assert before and held == {None: {True}, "offloaded": {True, False}}  # the next layer is fetched already


def test_a_number_may_be_what_every_value_is():
    with cuda("T4", values="1.5"):
        loss = torch.randn(3, device="cuda").sum()
        assert loss.item() == 1.5 and loss > 1.2 and loss.long().item() == 1
    with pytest.raises(ValueError, match="answer, stop"), cuda("T4", values="ask"):
        pass


def test_a_loop_that_only_a_value_ends_is_stopped(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import torch\nloss = torch.randn(1, device='cuda')\nwhile loss > 0.5:\n    loss = loss * 0.9\n")
    report = run(str(script))
    assert report.status == "failed" and "waits.py:3: " in str(report.error)


def test_a_fork_cannot_use_the_card():
    with cuda("T4"):
        torch.zeros(1, device="cuda")
        child = os.fork()
        if child == 0:
            try:
                torch.zeros(1, device="cuda")
            except RuntimeError as error:
                os._exit(42 if "forked subprocess" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_an_interrupt_ends_the_program_and_puts_everything_back(tmp_path, capsys):
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal, torch\ntorch.zeros(1, device='cuda')\nsignal.raise_signal(signal.SIGINT)\n1 / 0\n"
    )
    before = signal.getsignal(signal.SIGINT)
    assert main([str(script)]) == 130 and "중단" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before and not torch.cuda.is_available()


@pytest.mark.parametrize("wrong", ({"gpus": 0}, {"steps": 0}, {"gpus": 2, "rank": 2}, {"gpu": "T5"}))
def test_wrong_arguments_are_told_before_the_program_runs(wrong, tmp_path):
    script = tmp_path / "never.py"
    script.write_text("raise SystemExit(9)\n")
    with pytest.raises((WrongValue, ValueError)):
        run(str(script), **wrong)


def test_files_that_cannot_be_written_are_told_before_the_program_runs(tmp_path, capsys):
    script = Path(tmp_path / "prints.py")
    script.write_text("print('ran')\n")
    there, link = tmp_path / "there.json", tmp_path / "link.json"
    there.write_text("mine")
    link.symlink_to(there)
    for option in ("--html", "--save", "--report", "--snapshot"):
        for path in (script / "x.html", there, link, tmp_path):
            assert main([option, str(path), str(script)]) == 2
            said = capsys.readouterr()
            assert "ran" not in said.out and str(tmp_path) in said.err
        assert main(["--force", option, str(link), str(script)]) == 2  # never through a link
    assert there.read_text() == "mine" and "ran" not in capsys.readouterr().out
    assert main(["--force", "--report", str(there), str(script)]) == 0
    assert there.read_text().startswith("{")


def test_another_card_than_those_there_are_is_the_programs_error(tmp_path, capsys):
    script = tmp_path / "two.py"
    script.write_text("import torch\ntorch.zeros(1, device='cuda:1')\n")
    assert main([str(script)]) == 2
    error = capsys.readouterr().err
    assert "invalid device ordinal" in error and "two.py" in error and "virtual_gpu" not in error


def test_what_is_saved_into_memory_is_read_from_there(monkeypatch):
    """Also where the program may write no file; not what would take this machine's RAM."""
    with cuda("T4") as gpu:
        state = torch.nn.Linear(64, 32).cuda().state_dict()
        for into, given in ((io.BytesIO(), ()), (io.BytesIO(), ("f",))):
            torch.save(state, **{"f": into}) if given else torch.save(state, into)
            into.seek(0)
            read = torch.load(into)
            assert {name: (one.shape, one.device.type) for name, one in read.items()} == {
                "weight": ((32, 64), "cuda"), "bias": ((32,), "cuda")
            }  # fmt: skip
        assert not gpu.watch.notes
        monkeypatch.setattr(writing, "_IN_MEMORY", 100)
        into = io.BytesIO()
        torch.save(state, into)
        assert not into.getvalue() and gpu.watch.notes


def test_an_encoder_in_evaluation_computes_its_padding():
    with cuda("T4") as gpu:
        layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 2).cuda().eval()
        mask = torch.zeros(2, 8, dtype=torch.bool, device="cuda")
        with torch.no_grad():
            assert encoder(torch.ones(2, 8, 64, device="cuda"), src_key_padding_mask=mask).shape == (2, 8, 64)
        assert any("TransformerEncoder" in note for note in gpu.watch.notes)


def test_gradients_of_each_sample_by_torch_func():
    """vmap over grad: a batch of gradients, of each parameter's shape; a module called with wrapped parameters."""
    with cuda("T4"):
        model = torch.nn.Linear(64, 10).cuda()
        parameters = {name: one.detach() for name, one in model.named_parameters()}

        def loss(parameters, x, y):
            logits = torch.func.functional_call(model, parameters, (x[None],))
            return torch.nn.functional.cross_entropy(logits, y[None])

        x, y = torch.randn(16, 64, device="cuda"), torch.zeros(16, dtype=torch.int64, device="cuda")
        before = torch.cuda.memory_allocated()
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        assert {name: one.shape for name, one in found.items()} == {"weight": (16, 10, 64), "bias": (16, 10)}
        assert torch.cuda.memory_allocated() - before >= 16 * (10 * 64 + 10) * 4


def test_what_a_program_puts_on_a_parameter_stays_there():
    """DeepSpeed keeps a parameter's parts (`ds_id`, `ds_tensor`) so, and goes by them after `Module.bfloat16`."""
    with cuda("T4"):
        layer = torch.nn.Linear(8, 8)
        layer.weight.mine, kept = [1], layer.weight
        for move in (layer.to("cuda").half, layer.bfloat16, layer.cpu, layer.cuda):
            move()
            assert layer.weight is kept and kept.mine == [1]
        kept.data = torch.zeros(4, 4, device="cuda")
        assert kept.mine == [1] and kept.shape == (4, 4)
        assert not {"known", "drawn"} & {*vars(layer.half().weight)}  # what is noted of its values is of the old ones


def test_a_program_s_own_factories_are_not_ours(monkeypatch):
    """DeepSpeed's `zero.Init` puts ones that cast in the place of `torch.empty` and its like."""

    def casting(make):
        def made(*size, **how):
            tensor = make(*size, **how)
            return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

        return made

    with cuda("T4"):
        x = torch.ones(1024, 1024, device="cuda")
        x @ x  # cuBLAS has its workspace
        for name in ("empty", "empty_strided", "full", "zeros", "ones", "tensor"):
            monkeypatch.setattr(torch, name, casting(getattr(torch, name)))
        before = torch.cuda.memory_allocated()
        products = [x * 2, x * 2, x @ x, torch.ones(2).cpu(), x.new_zeros(1024)]
        assert [one.dtype for one in products] == [torch.float32] * 3 + [torch.bfloat16, torch.float32]
        assert torch.cuda.memory_allocated() - before == 3 * 4 * 1024**2 + 4096
        assert x.cpu().dtype == torch.float32
        monkeypatch.undo()
