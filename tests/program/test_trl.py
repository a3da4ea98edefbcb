"""TRL's trainers on a virtual GPU: the loss without logits, answers to what ends a completion, a reference model."""

import pytest
import torch

import virtual_gpu
from helpers.models import byte_tokenizer
from virtual_gpu.models.fused_head import STAND_INS
from virtual_gpu.program.values import ValueStop
from virtual_gpu.rules.cublas import cublas_workspace_bytes


def test_a_mask_that_is_answered_with_false_picks_nothing():
    with virtual_gpu.cuda("T4") as card:
        tokens = torch.randn(4, 9, device="cuda").argsort(1)
        ends = torch.isin(tokens, torch.tensor([7], device="cuda")).any(dim=1)
        assert tokens[ends].shape == (0, 9) and tokens.sum(1)[ends].shape == (0,)
        where = torch.full((4,), 9, device="cuda")
        where[ends] = tokens.argmax(1)[ends]
        assert [answer.asked for answer in card.answers] == ["index"]  # what the mask picks is known from then on
        assert tokens[tokens > 3].shape == (36,) and "많아야" in card.watch.notes[-1]
    with virtual_gpu.cuda("T4", values="stop"), pytest.raises(ValueStop):
        tokens = torch.rand(4, 9, device="cuda")
        tokens[torch.isnan(tokens).any(dim=1)]


def test_the_logits_are_made_in_tiles_only():
    """TRL's own function; its Triton kernels are not run, and what is around them is counted."""
    with virtual_gpu.cuda("T4"):
        chunked = pytest.importorskip("trl.kernels.chunked_logprob")
        tokens, width, vocabulary, chunk = 1024, 256, 151_936, 32_768
        hidden = torch.rand(tokens, width, device="cuda", dtype=torch.float16, requires_grad=True)
        head = torch.rand(vocabulary, width, device="cuda", dtype=torch.float16, requires_grad=True)
        labels = torch.ones(tokens, dtype=torch.int64, device="cuda")
        torch.mm(hidden.detach(), head.detach()[:8].t())  # the workspace of cuBLAS is there from here on
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        arguments = (hidden, head, None, labels, 1.0, chunk)
        logps = chunked.ChunkedLogProbFunction.apply(*arguments, None, 1.0, ("log_probs",))[0]
        tile, one = tokens * chunk * 2, tokens * 4
        assert tile < torch.cuda.max_memory_allocated() - before <= tile + 10 * one
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        logps.sum().backward()
        sums = (tokens + vocabulary) * width * 4  # gradients are added up in fp32
        workspace = cublas_workspace_bytes((7, 5))  # of autograd's own thread
        assert tile + sums <= torch.cuda.max_memory_allocated() - held <= tile + sums + sums // 2 + workspace + 10 * one
        assert hidden.grad.dtype == head.grad.dtype == torch.float16
    assert chunked._forward_kernel is not STAND_INS["_forward_kernel"]


def test_a_bundled_configuration_names_its_class():
    with virtual_gpu.cuda("T4"):
        from transformers import AutoConfig

        for name, kind in (("Qwen/Qwen3-0.6B", "Qwen3ForCausalLM"), ("openai-community/gpt2", "GPT2LMHeadModel")):
            assert AutoConfig.from_pretrained(name).architectures == [kind]


def test_a_tokenizer_that_is_not_there_is_not_an_empty_one(tmp_path):
    """Of a bundled name, without the hub, transformers 5 makes one that finds no token in any text."""
    with virtual_gpu.cuda("T4"):
        from transformers import AutoTokenizer

        with pytest.raises(OSError, match=r"hf download Qwen/Qwen3-0\.6B"):
            AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B", cache_dir=tmp_path, local_files_only=True)
        folder = tmp_path / "mine"
        byte_tokenizer().save_pretrained(folder)
        assert len(AutoTokenizer.from_pretrained(folder)("서울")["input_ids"]) > 1
