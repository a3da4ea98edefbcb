"""The face of CUDA: tensors, modules, values, and that nothing stays replaced."""

import copy
import pickle

import pytest
import torch
import torch.utils._device
from torch.optim.optimizer import _foreach_supported_types as foreach_types

from virtual_gpu.program import cuda

MIB = 2**20


def test_everything_is_put_back():
    owners = (
        torch, torch.cuda, torch._C, torch.Tensor, torch.nn.Module, torch.nn.init, torch.autograd, torch.amp.autocast,
        torch.utils, torch.utils._device.DeviceContext, torch.version, torch.__future__, torch.backends.cuda,
        torch.optim.Optimizer, torch._subclasses.FakeTensor, torch.cuda.memory, torch.cuda.random,
    )  # fmt: skip
    with cuda("T4"):
        torch.zeros(2, device="cuda").sum().item()  # whatever PyTorch loads on the way is loaded
    before = [dict(vars(owner)) for owner in owners]
    foreach = list(foreach_types)
    with pytest.raises(KeyError), cuda("T4"):
        torch.zeros(2, device="cuda")
        raise KeyError
    for owner, then in zip(owners, before, strict=True):
        now = dict(vars(owner))
        changed = {name for name in then.keys() | now.keys() if then.get(name) is not now.get(name)}
        assert not changed - {"_compiled_autograd_enabled"}, owner
    assert foreach_types == foreach
    assert not torch.cuda.is_available()


def test_tensors_find_their_device():
    with cuda("T4") as gpu:
        made = torch.zeros(256, device="cuda")
        assert made.device == torch.device("cuda:0") and made.is_cuda and made.get_device() == 0
        assert made.to("cuda") is made and made.cuda() is made and made.to(0) is made
        assert torch.cuda.memory_allocated() == 1024
        assert made.cpu().device.type == "cpu" and type(made.cpu()) is torch.Tensor
        for tensor in (
            torch.tensor([1.0], device="cuda"), torch.ones(2).type_as(made), made.new_tensor([1, 2]),
            torch.zeros_like(torch.ones(2), device="cuda"), torch.as_tensor([1], device="cuda:0"),
        ):  # fmt: skip
            assert gpu.owns(tensor)
        with torch.device("cuda"):
            assert torch.zeros(2).is_cuda and torch.tensor(1.0).is_cuda
        assert torch.zeros(2).device.type == "cpu"


def test_a_tensor_is_made_of_numbers_on_the_gpu():
    """As torchtune makes its frequencies: each is asked for, and what is known of it is kept."""
    with cuda("T4", values="2.0"):
        known, unknown = torch.tensor([3, 4]).cuda(), torch.empty(1, device="cuda")
        there = torch.tensor([known[0], unknown[0]], dtype=torch.float32, device="cuda")
        assert there.is_cuda and there.shape == (2,)
        here = torch.tensor([[known[0], 5], [known[1], unknown[0]]])
        assert here.device.type == "cpu" and here.tolist() == [[3.0, 5.0], [4.0, 2.0]]
        half = torch.empty(1, dtype=torch.bfloat16, device="cuda")
        assert torch.tensor([half[0]]).dtype == torch.tensor([half[0]], device="cuda").dtype == torch.bfloat16


@pytest.mark.parametrize("built", [None, "13.0"])
def test_a_builds_own_version_of_cuda_stays(built, monkeypatch):
    """torchvision compares it with its own."""
    monkeypatch.setattr(torch.version, "cuda", built)
    with cuda("T4"):
        assert torch.version.cuda == (built or "12.8")
    assert torch.version.cuda == built


def test_two_devices_are_pytorchs_own_error():
    with cuda("T4"):
        with pytest.raises(RuntimeError, match=r"found at least two devices, cuda:0 and cpu!"):
            torch.zeros(3, device="cuda") + torch.ones(3)
        assert (torch.zeros(3, device="cuda") + torch.tensor(1.0)).is_cuda  # a number is welcome
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(3, device="cuda:1")
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            torch.zeros(3, device="cuda").numpy()


def test_a_module_that_moves_keeps_its_parameters():
    with cuda("T4"):
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        model[1].weight = model[0].weight
        weight, optimizer = model[0].weight, torch.optim.AdamW(model.parameters())
        model.cuda()
        assert model[0].weight is weight and model[1].weight is weight and weight.is_cuda
        assert torch.cuda.memory_allocated() == MIB + 2 * 2048
        model.half()
        assert weight.dtype == torch.float16 and torch.cuda.memory_allocated() == MIB // 2 + 2 * 1024
        model(torch.ones(1, 512, device="cuda", dtype=torch.half)).sum().backward()
        optimizer.step()
        assert optimizer.state[weight]["exp_avg"].is_cuda
        again = copy.deepcopy(model)
        assert again[0].weight is again[1].weight is not weight


def test_values_agree_with_each_other():
    with cuda("T4") as gpu:
        loss = torch.randn(4, device="cuda").sum()
        assert loss.item() == 1.0 and f"{loss:.2f}" == "1.00"
        assert not torch.isnan(loss) and torch.isfinite(loss).all()
        assert loss < 2 and not loss < 0.5
        assert sum(gpu.answers.values()) > 0
        assert all(answer.where.startswith(f"{__file__}:") for answer in gpu.answers)


def test_what_the_program_wrote_into_one_element_is_followed():
    """How mixed precision counts overflows, and how a loop adds up its losses."""
    with cuda("T4"):
        gradient, overflows = torch.randn(4, device="cuda"), torch.zeros(1, device="cuda")
        overflows += torch.isfinite(gradient.amax()).logical_and(torch.isfinite(gradient.amin())).logical_not()
        assert not overflows.bool() and overflows.byte()[0].item() == 0
        total = torch.tensor(0.5, device="cuda")
        for _ in range(3):
            total += gradient.mean()
        assert total.item() == 3.5 and (total / 2).cpu() == 1.75 and not total < 3
        total.copy_(gradient.sum())
        assert total.item() == 1.0
        torch._foreach_add_([overflows], [gradient[:1]])
        assert overflows.item() == 1.0  # what an optimizer makes of it is not followed


def test_small_integers_keep_their_values():
    with cuda("T4") as gpu:
        mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).cuda()
        assert mask.sum().item() == 5 and not mask.all() and mask.bool().nonzero().shape == (5, 2)
        hidden = torch.randn(2, 3, 4, device="cuda")
        assert hidden[mask.bool()].shape == (5, 4)
        assert not gpu.answers  # nothing was made up
        mask[0].copy_(hidden[0, :, 0])  # now one row is unknown, and with it the whole
        assert mask.sum().item() == 1


def test_a_mask_of_ones_is_skipped_as_on_a_card(monkeypatch):
    """transformers asks whether all of it is ones, unless it takes the tensors for a trace's: fake ones are that."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_fake_tensor", lambda x: isinstance(x, torch._subclasses.FakeTensor))
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip

    def peak(masked):
        with cuda("A100-40GB"):
            model = LlamaForCausalLM(config).cuda().half()
            ids = torch.ones(4, 512, dtype=torch.int64)
            mask = None if masked is None else torch.ones_like(ids)
            if masked:
                mask[1:, -3:] = 0
            model(input_ids=ids.cuda(), attention_mask=mask if mask is None else mask.cuda()).logits.sum().backward()
            return torch.cuda.max_memory_allocated()

    one_mask = 4 * 512 * 8
    assert peak(None) <= peak(False) <= peak(None) + 2 * one_mask < peak(True)


def test_masks_of_floats_keep_their_values():
    """peft's prompt tuning: float ones before a mask of integers, whose padding is still there afterwards."""
    with cuda("T4") as gpu:
        mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).cuda()
        whole = torch.cat((torch.ones(2, 2).to(mask.device), mask), dim=1)
        assert whole.dtype == torch.float32 and not whole.bool().all() and whole.sum().item() == 9
        assert not gpu.answers
        whole[:, :2].copy_(torch.randn(2, 2, device="cuda"))
        assert whole.bool().all() and gpu.answers  # one of them is unknown, and with it the whole
        trained = torch.nn.Parameter(torch.zeros(2, 2)).cuda()
        assert trained.sum().item() == 1.0


def test_a_shape_that_depends_on_unknown_values_stops():
    with cuda("T4"), pytest.raises(RuntimeError, match=r"test_cuda.py:\d+: aten.nonzero"):
        torch.randn(4, device="cuda").gt(0).nonzero()


def test_experts_are_chosen_in_turn():
    """Ids, counts, masks and lists agree: each of 16 experts has as many of the 64 tokens, and each token four."""
    with cuda("T4") as gpu:
        _, ids = torch.randn(64, 16, device="cuda").softmax(-1).topk(4, dim=-1)
        assert not gpu.watch.notes and not gpu.answers  # nothing was made of it yet
        assert torch.bincount(ids.flatten(), minlength=16).tolist() == [16] * 16
        zeros = torch.zeros(16, dtype=torch.int64, device="cuda")
        assert zeros.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten())).tolist() == [16] * 16
        assert torch.histc(ids.int(), 16, 0, 15).tolist() == [16] * 16
        mask = torch.nn.functional.one_hot(ids, 16).permute(2, 1, 0)  # Mixtral's loop
        assert len(mask.sum((-1, -2)).gt(0).nonzero()) == 16 and (mask.sum((0, 1)) == 4).all()
        for expert in range(16):
            assert len(torch.where(mask[expert])[0]) == len(torch.where(ids == expert)[0]) == 16
        _, groups = torch.randn(6, 64, device="cuda").topk(2, dim=0)  # by columns
        assert groups.shape == (2, 64) and sorted(torch.bincount(groups.flatten()).tolist()) == [21] * 4 + [22] * 2
        assert gpu.watch.notes and {answer.asked for answer in gpu.answers} == {"copy to the CPU", "item"}
        values, into = torch.empty(4, 2, device="cuda"), torch.zeros(4, 2, dtype=torch.int64, device="cuda")
        torch.topk(torch.randn(4, 8, device="cuda"), 2, out=(values, into))
        assert into.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_few_tokens_are_spread_and_many_are_followed():
    with cuda("T4"):
        few = torch.randn(2, 64, device="cuda").topk(8).indices.flatten().tolist()
        assert len({*few}) == 16 and max(few) >= 48
        ids = torch.randn(4096, 128, device="cuda").topk(8).indices  # Qwen3-30B's loop over its experts
        mask = torch.nn.functional.one_hot(ids, 128).permute(2, 1, 0)
        assert len(torch.where(mask[100])[0]) == 4096 * 8 // 128


def test_a_loop_that_waits_for_a_choice_ends():
    """A character of a small vocabulary, taken by top-k: it is a value that nobody knows as any other."""
    with cuda("T4"), pytest.raises(RuntimeError, match=r"test_cuda.py:\d+: "):
        done = torch.zeros(2, dtype=torch.bool).cuda()
        while not done.all():
            done = done | (torch.randn(2, 32, device="cuda").topk(1).indices[:, 0] == 2)


def test_the_words_of_a_vocabulary_are_not_chosen_in_turn():
    with cuda("T4") as gpu:
        _, ids = torch.randn(64, 32000, device="cuda").topk(4)
        assert ids[0, 0].item() == 1 and gpu.answers and not gpu.watch.notes


def test_experts_in_a_loop_take_what_they_take_on_the_cpu(monkeypatch):
    """A layer that sends tokens by count runs operation by operation as one whose router scores are as assumed."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.index_add_.default):
                seen.append((func, *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))))
            return out

    config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block, tokens = MixtralSparseMoeBlock(config), torch.randn(1, 64, 32, requires_grad=True)
    monkeypatch.setattr(type(block.gate), "forward", in_turn(type(block.gate).forward))
    seen = []
    with Shapes():
        block(tokens).sum().backward()
    there, seen = seen, []
    monkeypatch.undo()
    with cuda("T4"), Shapes():
        block.cuda()(tokens.detach().cuda().requires_grad_()).sum().backward()
    assert seen == there and len(there) > 8 * 6


def in_turn(route):
    """A router of real scores, whose choice is replaced."""

    def forward(gate, hidden):
        logits, scores, ids = route(gate, hidden)
        return logits, scores, (torch.arange(ids.numel()) % 8).view(ids.shape)

    return forward


def test_the_policy_stop_stops_at_the_first_value():
    with cuda("T4", values="stop"), pytest.raises(RuntimeError, match=r"test_cuda.py:\d+: aten.bincount"):
        _, ids = torch.randn(64, 16, device="cuda").topk(4)
        torch.bincount(ids.flatten(), minlength=16)
    with cuda("T4", values="stop"), pytest.raises(RuntimeError, match=r"test_cuda.py:\d+: "):
        torch.randn(4, device="cuda").sum().item()


def test_autocast_and_its_default():
    with cuda("T4"):
        layer, x = torch.nn.Linear(8, 8).cuda(), torch.ones(2, 8, device="cuda")
        with torch.autocast("cuda"):
            assert layer(x).dtype == torch.float16 and torch.is_autocast_enabled()
        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert layer(x).dtype == torch.float32


def test_memory_functions_are_pytorchs():
    with cuda("T4"):
        block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == 30 * MIB == torch.cuda.memory_allocated()
        assert torch.cuda.memory_reserved() == 30 * MIB
        free, total = torch.cuda.mem_get_info()
        assert total == torch.cuda.get_device_properties(0).total_memory and free < total - 30 * MIB
        assert "Allocated memory" in torch.cuda.memory_summary()
        (segment,) = torch.cuda.memory_snapshot()
        assert segment["total_size"] == 30 * MIB
        del block
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0 and torch.cuda.max_memory_allocated() == 30 * MIB
        torch.cuda.set_per_process_memory_fraction(0.001)
        with pytest.raises(torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 30\.00 MiB"):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")


def test_streams_have_pools_of_their_own():
    with cuda("T4"):
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side != torch.cuda.default_stream() and side != other
            block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        del block
        block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")  # what the side stream freed serves no other
        assert torch.cuda.memory_reserved() == 60 * MIB
        assert {segment["stream"] for segment in torch.cuda.memory_snapshot()} == {0, side.cuda_stream}
        with side:
            again = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 60 * MIB and torch.cuda.memory_allocated() == 60 * MIB
        del again, block


def test_the_allocators_settings_are_followed(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:4")
    with cuda("T4"):
        block = torch.empty(33 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 40 * MIB
        del block
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:1")
    with pytest.raises(ValueError, match="max_split_size_mb"), cuda("T4"):
        pass


def test_a_recorded_history_has_the_programs_lines():
    with cuda("T4"):
        torch.cuda.memory._record_memory_history()
        block = torch.empty(MIB, device="cuda")
        del block
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        assert [event["action"] for event in events] == ["segment_alloc", "alloc", "free_requested", "free_completed"]
        assert events[1]["frames"][0]["filename"] == __file__ and events[1]["size"] == 4 * MIB
        torch.cuda.memory._record_memory_history(None)
        assert torch.cuda.memory._snapshot()["device_traces"] == [[]]


def test_a_history_tells_of_the_release_of_what_was_there_before_it():
    """As PyTorch's, whose blocks know what was asked for with a history or without; here in blocks of 512 bytes."""
    with cuda("T4"):
        block = torch.empty(MIB - 128, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            other = torch.empty(3, device="cuda")
        for recorded in (False, True):
            if recorded:
                torch.cuda.memory._record_memory_history()
            segments = torch.cuda.memory._snapshot()["segments"]
            at = {b["requested_size"]: b["address"] for s in segments for b in s["blocks"]}
            assert {4 * MIB - 512, 512} <= {*at}
        del block, other
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        assert [e["action"] for e in events] == ["free_requested", "free_completed"] * 2
        assert [(e["size"], e["stream"]) for e in events[::2]] == [(4 * MIB - 512, 0), (512, side.cuda_stream)]
        assert [e["addr"] for e in events[::2]] == [at[4 * MIB - 512], at[512]]


def test_flash_attention_keeps_what_the_package_keeps():
    batch, length, heads, width = 2, 256, 8, 64
    with cuda("L4"):
        from flash_attn import flash_attn_func

        q = torch.zeros(batch, length, heads, width, device="cuda", dtype=torch.half, requires_grad=True)
        k, v = (torch.zeros(batch, length, 2, width, device="cuda", dtype=torch.half) for _ in range(2))
        before = torch.cuda.memory_allocated()
        out = flash_attn_func(q, k, v, causal=True)
        kept = torch.cuda.memory_allocated() - before
        assert kept == out.numel() * 2 + batch * heads * length * 4 + 512  # out, softmax_lse, rng_state
        out.sum().backward()
        assert q.grad.shape == q.shape
    with cuda("T4"), pytest.raises(RuntimeError, match="Ampere"):
        flash_attn_func(*(torch.zeros(1, 8, 2, 64, device="cuda", dtype=torch.half) for _ in range(3)))
    with pytest.raises(ImportError):
        import flash_attn  # noqa: F401


def test_a_model_built_inside_a_block_leaves_predictions_after_it_as_they_were(monkeypatch):
    """What a block sets goes with it: transformers would take the fake tensors of later runs for a trace's."""
    from transformers import LlamaConfig
    from transformers.utils import import_utils

    from virtual_gpu.models.build import build_model

    monkeypatch.setattr(import_utils, "is_fake_tensor", lambda x: isinstance(x, torch._subclasses.FakeTensor))
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    with cuda("A100-40GB"):
        build_model(config, torch.float32)
        inside = torch.zeros(1, device="cuda")
    build_model(config, torch.float32)
    assert not import_utils.is_fake_tensor(inside)


def test_a_parameters_data_may_leave_the_card_and_come_back():
    """As where blocks are swapped: its place on the card is free meanwhile."""
    with cuda("T4"):
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        weight, held = layer.weight, torch.cuda.memory_allocated()
        layer.weight.data = layer.weight.data.to("cpu")
        assert layer.weight is weight and layer.weight.device.type == layer.weight.data.device.type == "cpu"
        assert torch.cuda.memory_allocated() == held - 4 * 2**20
        layer.weight.data = layer.weight.data.to("cuda")
        assert layer.weight is weight and layer.weight.device.type == "cuda" and layer.weight.requires_grad
        layer(torch.ones(8, 1024, device="cuda")).sum().backward()
        assert layer.weight.grad.device.type == "cuda"


@pytest.mark.parametrize("writes", [False, True])
def test_python_s_pickle_copies_a_tensor(writes, tmp_path):
    with cuda("T4", writes=writes):
        copied = pickle.loads(pickle.dumps({"layer": torch.nn.Linear(2, 1), "mask": torch.ones(2)}))
        assert copied["mask"].tolist() == [1.0, 1.0] and copied["layer"].weight.shape == (1, 2)
        torch.save(copied["mask"], tmp_path / "mask.pt")
    assert (tmp_path / "mask.pt").exists() == writes


def test_the_type_of_a_parameter_makes_one():
    """As accelerate's hooks write it: `type(parameter)(tensor, requires_grad=…)`, also to leave a card for meta."""
    with cuda("T4"):
        weight = torch.nn.Linear(4, 4).cuda().weight
        again = type(weight)(weight.detach() * 2, requires_grad=False)
        gone = type(weight)(weight.detach().to("meta"), requires_grad=True)
        assert isinstance(again, torch.nn.Parameter) and again.is_cuda and not again.requires_grad
        assert isinstance(gone, torch.nn.Parameter) and gone.is_meta and gone.requires_grad
        with pytest.raises(TypeError, match="fake_mode"):
            type(weight)()
