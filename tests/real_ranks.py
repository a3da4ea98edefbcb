"""What the tests' ranks run: a step at each ZeRO stage whose bytes are counted, and everything that can go wrong."""

import contextlib
import copy
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from transformers import LlamaConfig

from benchmarks.levers.ranks import plan_of_tokens
from benchmarks.levers.stages import Grid, Stage, loss_of_next, of_whole_vocabulary
from helpers.ranks.training import weigh
from virtual_gpu.models.adapters import add_adapters
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.shards.fake_rank import _locals, _optimizer, _states, fsdp_groups, shard
from virtual_gpu.shards.layout import CONVENTIONS, Layout


def tiny():
    """gpt2 with two layers and a few rows, no number of which divides by three."""
    config = with_depth(load_config("gpt2"), 2)
    config.n_embd, config.n_head, config.vocab_size, config.n_positions = 80, 2, 1001, 64
    return config


def one_step_at_each_stage():
    """Stage → bytes by kind of this rank, after one step on real tensors."""
    rows = {}
    for stage in range(4):
        layout = Layout(dist.get_world_size(), stage)
        model, mesh = shard(tiny(), layout, CONVENTIONS["mixed"])
        model.to_empty(device="cpu")
        if stage < 2:
            model.tie_weights()
        for parameter in _locals(model.parameters()):
            torch.nn.init.normal_(parameter, std=0.02)
        optimizer = _optimizer(model, layout, CONVENTIONS["mixed"], mesh)
        tokens = torch.randint(1000, (1, 16))
        outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
        gathered = weigh(model.parameters())
        outputs.loss.backward()
        optimizer.step()
        row = {"parameters": weigh(model.parameters())}
        row["gathered"] = gathered if stage == 2 else 0
        row["gradients"] = weigh(p.grad for p in model.parameters())
        row |= {
            kind: weigh(_states(optimizer, name))
            for kind, name in (("master", "master"), ("momentum", "exp_avg"), ("variance", "exp_avg_sq"))
        }
        rows[stage] = row
    return rows


def tiny_llama():
    """Two layers whose linear layers quantize in whole blocks, and whose other tensors do not divide by two."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 192}
    return LlamaConfig(vocab_size=301, max_position_embeddings=64, tie_word_embeddings=False, **sizes)


def one_step_of_qlora():
    """Bytes by kind of this rank after a step on a 4-bit model whose storage FSDP2 can split, of real tensors."""
    import bitsandbytes as bnb

    model = build_model(tiny_llama(), torch.bfloat16, device="cpu")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child is not model.get_output_embeddings():
                options = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": torch.bfloat16}
                layer = bnb.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16, **options
                )
                layer.weight = bnb.nn.Params4bit(child.weight.data, requires_grad=False, module=layer, **options)
                setattr(parent, name, layer.to("cpu"))  # quantizes
    model = add_adapters(model, targets="all-linear")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(*[torch.bfloat16] * 3)
    for group in (*fsdp_groups(model.get_base_model()), model):
        fully_shard(group, mesh=mesh, mp_policy=policy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    tokens = torch.randint(300, (1, 16))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    states = [module.quant_state for module in model.modules() if getattr(module, "quant_state", None) is not None]
    statistics = [tensor for s in states for tensor in (s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code)]
    return {
        "parameters": weigh(model.parameters()),
        "statistics": sum(tensor.numel() * tensor.itemsize for tensor in statistics),
        "gradients": weigh(p.grad for p in trained),
        "momentum": weigh(_states(optimizer, "exp_avg")),
        "variance": weigh(_states(optimizer, "exp_avg_sq")),
    }


def tokens_between_ranks(logits_whole):
    """How far a small Llama, its tokens and tensors split between the ranks, is off the whole one: loss, gradients."""
    config = tiny_llama()
    config.vocab_size, config.num_attention_heads, config.num_key_value_heads = 300, 4, 2
    torch.manual_seed(0)
    whole = build_model(config, torch.float64, device="cpu")
    split = copy.deepcopy(whole)
    parallelize_module(split, init_device_mesh("cpu", (dist.get_world_size(),)), plan_of_tokens(logits_whole))
    tokens = torch.arange(2 * 16).reshape(2, 16) * 7 % 300
    expected = whole(input_ids=tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    with contextlib.nullcontext() if logits_whole else loss_parallel():
        loss = split(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    off = [float((loss - expected).abs())]
    for mine, other in zip(split.parameters(), whole.parameters(), strict=True):
        off.append(float((mine.grad.full_tensor() - other.grad).abs().max()))
    return max(off)


def stages_between_ranks(ends):
    """How far the stages of a small Llama, each split by tokens, tensors and FSDP2, are off the whole one."""
    config = tiny_llama()
    config.vocab_size, config.num_attention_heads, config.num_key_value_heads = 300, 4, 2
    config.num_hidden_layers = 4 - 2 * ends
    torch.manual_seed(0)
    whole = build_model(config, torch.float64, device="cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    grid = Grid(2, 2, 2, policy=MixedPrecisionPolicy(), ends=ends)
    stages = [Stage(copy.deepcopy(whole), number, 2, 16, ends) for number in range(2)]
    for stage in stages:
        grid.split(stage, mesh)
    tokens = torch.arange(16)[None] * 7 % 300  # of each rank: the mean of their gradients is that of one
    expected = whole(input_ids=tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    with loss_parallel():
        loss = loss_of_next(of_whole_vocabulary(stages[1](stages[0](tokens)), mesh), tokens)
        loss.backward()
    off = [float((loss.full_tensor() - expected).abs())]
    mine = [parameter for stage in stages for parameter in stage.parameters()]
    for one, other in zip(mine, whole.parameters(), strict=True):
        off.append(float((one.grad.full_tensor() - other.grad).abs().max()))
    return max(off)


def who(number):
    """Rank, world size, threads, and what was given."""
    print("a rank's print is not shown")
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), number


def raise_on(rank):
    """The rank divides by zero; the others wait for it."""
    if dist.get_rank() == rank:
        return rank / 0
    dist.barrier()


def leave_on(rank, code):
    """The rank leaves without a word."""
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def exit_on(rank):
    """The rank calls sys.exit."""
    if dist.get_rank() == rank:
        raise SystemExit("enough")
    dist.barrier()


def kill_on(rank, number=signal.SIGKILL):
    """The rank is ended by a signal, as the system ends one that needs too much memory."""
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


def wait_alone(rank):
    """One rank calls a collective that the others never call: they sleep."""
    if dist.get_rank() == rank:
        dist.barrier()
    time.sleep(600)


def write_pid_and_wait(folder):
    """Leave this process's id in the folder, then hang."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


def write_pid_and_hold(folder):
    """Never gives the interpreter to another thread again."""
    Path(folder, str(os.getpid())).touch()
    re.match(r"(a+)+$", "a" * 64 + "b")


def start_another_and_wait(folder):
    """A process of the rank's own, which nobody else knows."""
    Path(folder, str(subprocess.Popen(["sleep", "600"]).pid)).touch()
    time.sleep(600)


def raise_half_a_character():
    raise ValueError("half a character: \ud800")


def not_picklable():
    """Return what cannot be sent back."""
    return lambda: None
