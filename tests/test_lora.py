"""LoRA: the module of the notebook is peft's, counts, bytes, training, merging, loading, the search."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig

from helpers import gpu_memory_experiment, gpu_memory_sweep, predict_memory, use_gpu
from helpers.chapters.c8_lora import fine_tuning
from helpers.chapters.c8_lora.fine_tuning import (
    TASKS,
    complete,
    dequantized_model,
    fine_tune,
    known,
    picture_of_update,
    pretrained_model,
    quantized_model,
    share_of_singular_values,
    small_tokenizer,
    updates,
    with_rank,
)
from helpers.chapters.c8_lora.lora import load_adapter, merge, reached, storage_table, trainable_parameters, unmerge
from helpers.chapters.c8_lora.recipe import rehearse, train_small, write_text
from helpers.chapters.c8_lora.runs import Rates, Run, Runs
from helpers.models import load_model_and_tokenizer
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.language import set_language
from virtual_gpu.models.adapters import add_adapters
from virtual_gpu.models.build import build_on_gpu, count_parameters
from virtual_gpu.models.quantized import check_kernels
from virtual_gpu.step import largest
from virtual_gpu.step.largest import LargestModels, largest_model
from virtual_gpu.step.predict import model_bytes, predict_need
from virtual_gpu.step.setting import Setting

ROOT = Path(__file__).resolve().parent.parent
SOURCE = (ROOT / "notebooks/src/08_lora.py").read_text(encoding="utf-8")


def adapted(rank=4, targets="all-linear", model=None, **more):
    torch.manual_seed(1)
    arguments = {"lora_alpha": 2 * rank, "lora_dropout": 0.0, **more}
    return add_adapters(pretrained_model() if model is None else model, rank, targets, **arguments)


@pytest.fixture(scope="module")
def lora_class():
    """The class that stands in the notebook, from the notebook's own source."""
    code = re.search(r"class LoRALinear\(nn\.Module\):\n(?:(?:    .*)?\n)+", SOURCE).group()
    names = {"nn": nn, "torch": torch}
    exec(code, names)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    return names["LoRALinear"]


@pytest.fixture(scope="module")
def learned():
    """An adapter trained on the second task."""
    return fine_tune(adapted(16), "LoRA")


# -- the module and peft ----------------------------------------------------------------------------------------------


def test_our_module_is_pefts(lora_class):
    """The same outputs and gradients over a whole model, from the same start, with a B that is not zero."""
    theirs = adapted(8, ["query_key_value", "dense_h_to_4h"])
    ours = pretrained_model().requires_grad_(False)
    pairs = []
    for name, module in theirs.get_base_model().named_modules():
        if not hasattr(module, "lora_A"):
            continue
        parent, _, leaf = name.rpartition(".")
        layer = lora_class(ours.get_submodule(name), r=8, alpha=16)
        setattr(ours.get_submodule(parent), leaf, layer)
        a, b = module.lora_A.default.weight, module.lora_B.default.weight
        nn.init.normal_(b, std=0.02)
        layer.A.data.copy_(a.data)
        layer.B.data.copy_(b.data)
        pairs += [(layer.A, a), (layer.B, b)]
    assert len(pairs) == 8
    losses = [fine_tuning._task_loss(model, "country") for model in (ours, theirs)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for mine, other in pairs:
        assert other.grad.abs().max() > 1e-6
        torch.testing.assert_close(mine.grad, other.grad)
    assert count_parameters(ours, trainable_only=True) == count_parameters(theirs, trainable_only=True)


def test_b_is_zero_at_the_start(lora_class):
    layer, x = lora_class(nn.Linear(6, 5), r=2), torch.randn(3, 6)
    assert torch.equal(layer(x), layer.base(x))
    layer(x).sum().backward()
    assert layer.A.grad.abs().max() == 0 and layer.B.grad.abs().max() > 0 and layer.base.weight.grad is None


# -- counts and bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        (("polyglot-ko-1.3b",), (1_572_864, 1_333_383_168)),
        (("polyglot-ko-1.3b", "qlora"), (1_572_864, 1_333_383_168)),
        (("polyglot-ko-1.3b", None), (1_331_810_304, 1_331_810_304)),
        # 24 layers: (2048 + 6144) + (2048 + 2048) + 2 × (2048 + 8192) a rank
        (("polyglot-ko-1.3b", "lora", 4, "all-linear"), (24 * 4 * 32_768, 1_331_810_304 + 24 * 4 * 32_768)),
        # LoRA's paper counts 2 · r · d a matrix; here q_proj 4096 → 4096 and v_proj 4096 → 1024, 32 layers
        (("Llama-3.1-8B", "lora", 16), (32 * 16 * (8192 + 5120), 8_030_261_248 + 32 * 16 * (8192 + 5120))),
        (("gpt2", "lora", 8, ("c_attn",)), (12 * 8 * (768 + 2304), 124_439_808 + 12 * 8 * (768 + 2304))),
    ],
    ids=str,
)
def test_trainable_parameters(arguments, counts):
    assert trainable_parameters(*arguments) == counts


class Cpu:
    is_virtual, name, device = False, "CPU", torch.device("cpu")

    def place(self, thing):
        return thing.to("cpu")


SMALL = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "gpt_neox": GPTNeoXConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=320, rotary_pct=0.5, **SMALL
    ),
    "llama": LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=320,
        tie_word_embeddings=True,
        **SMALL,
    ),
    "gpt2": GPT2Config(n_embd=128, n_layer=2, n_head=4, n_positions=256, **SMALL),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("peft", ["lora", "qlora"])
@pytest.mark.parametrize(("rank", "targets"), [(1, "attention"), (16, "all-linear")])
def test_virtual_bytes_are_real_bytes(family, peft, rank, targets):
    """Every tensor of the model with its adapters, and the storage table, on the virtual GPU and on a real CPU."""
    real, fake = (
        build_on_gpu(CONFIGS[family], torch.float16, "sdpa", peft, gpu, rank, targets)
        for gpu in (Cpu(), VirtualGPU(CATALOG["T4"]))
    )
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in fake.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in real.named_parameters()
    ]
    assert model_bytes(fake) == model_bytes(real)
    assert storage_table(fake) == storage_table(real)
    assert sum(row[3] for row in storage_table(real)) == model_bytes(real)
    assert sum(row[2] for row in storage_table(real)) == count_parameters(real)
    ranks = {p.shape[0] for n, p in real.named_parameters() if ".lora_A." in n}
    assert ranks == {rank}


def test_bytes_of_a_4_bit_parameter():
    """0.5 for the code and 0.127 bits of double quantization (QLoRA, section 3), and an offset and tables a layer."""
    model, _ = load_model_and_tokenizer("polyglot-ko-1.3b", peft="qlora", gpu=VirtualGPU(CATALOG["T4"]), quiet=True)
    _, _, count, size = next(row for row in storage_table(model) if row[1] == "uint8")
    assert count == 24 * 12 * 2048**2
    assert size / count == pytest.approx(0.5 + 0.127 / 8, rel=1e-3)
    assert "0.5160" in storage_table(model)._repr_html_()


def test_adapters_before_4_bit_layers_are_not_cast_under_autocast():
    """peft asks `torch.is_autocast_enabled()` without naming a device: CUDA's is meant, in recomputing too."""
    common = {"model_id": "meta-llama/Llama-3.2-1B", "peft": "qlora", "precision": "autocast_fp16", "lora_dropout": 0.0}
    setting = Setting(4, **common, rest_in_fp32=False)
    details = predict_memory(setting, gpu="T4").run_again()
    inputs = 4 * setting.sequence_length * 2048 * 2  # of a layer, in fp16: the norm's result serves all adapters
    made = [one.origin.made for one in details.held(0) if one.nbytes == inputs]
    assert made and not [place for place in made if place.operation == "_to_copy" and "lora_A" in (place.module or "")]
    assert not torch.is_autocast_enabled()


def test_what_lora_saves_and_what_it_does_not():
    use_gpu("T4")
    full, with_lora, qlora = gpu_memory_sweep(batch_size=16, peft=[None, "lora", "qlora"])
    assert (full.fits, with_lora.fits, qlora.fits) == (False, True, True)
    assert with_lora.gradients_bytes == 4 * 1_572_864 == with_lora.optimizer_bytes / 2
    assert qlora.parameters_bytes < with_lora.parameters_bytes / 2
    assert qlora.needed_bytes > with_lora.needed_bytes  # fp32 activations after prepare_model_for_kbit_training
    assert with_lora.at_peak["activations"] > 0.8 * full.at_peak["activations"]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_rank_and_targets_are_settings():
    small, large = (
        predict_memory(batch_size=1, peft="lora", lora_rank=rank, lora_targets=["query_key_value", "dense"], gpu="T4")
        for rank in (8, 64)
    )
    assert large.gradients_bytes == 8 * small.gradients_bytes
    assert small.setting["lora_targets"] == ("query_key_value", "dense")
    assert large.title.endswith("lora · rank 64 · query_key_value, dense · 가상 T4")
    json.dumps(large.to_dict())
    assert Setting(1, lora_rank=64) == Setting(1)  # without adapters there is no rank
    assert "lora_rank" not in predict_memory(batch_size=1, gpu="T4").setting


def test_the_default_is_as_before():
    assert (
        predict_memory(batch_size=1, peft="lora", gpu="T4").title
        == "polyglot-ko-1.3b · 배치 1 · 길이 256 · lora · 가상 T4"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lora_rank": 0}, "lora_rank=0: 1 이상의 정수"),
        ({"lora_rank": -3}, "lora_rank=-3: 1 이상의 정수"),
        ({"lora_rank": "eight"}, "lora_rank='eight': 1 이상의 정수"),
        ({"lora_rank": 2049}, r"lora_rank=2049: .*query_key_value은\(는\) 2048 × 6144 층이라 rank가 2048을"),
        (
            {"lora_targets": ["q_proj"]},
            "찾지 못했다: q_proj. 이 모델의 선형층: dense, dense_4h_to_h, dense_h_to_4h, query_key_value",
        ),
        ({"lora_targets": ["dense", "k_proj"]}, "찾지 못했다: k_proj"),
        ({"lora_targets": []}, "찾지 못했다: -"),
        ({"lora_targets": 8}, "lora_targets=8: 'attention'"),
        ({"lora_targets": [8]}, r"lora_targets=\[8\]: 'attention'"),
        ({"lora_targets": "lm_head"}, "찾지 못했다: lm_head"),
    ],
    ids=str,
)
@pytest.mark.parametrize("run", [predict_memory, gpu_memory_experiment])
def test_bad_settings(setting, message, run, capsys):
    gpu = use_gpu("T4")
    with pytest.raises(ValueError, match=message):
        run(batch_size=1, peft="lora", **setting)
    assert gpu.memory_allocated() == 0


# -- it learns --------------------------------------------------------------------------------------------------------


def test_the_small_model_knows_one_task_and_not_the_other():
    model = pretrained_model()
    assert (known(model, "capital"), known(model, "country")) == (32, 0)
    assert complete(model, "프랑스의 수도는 ") == "프랑스의 수도는 파리이다."
    assert pretrained_model() is not model
    with pytest.raises(ValueError, match="모르는 과제"):
        known(model, "capitol")


def test_particles_of_the_sentences():
    sentences = {start + end for start, end in TASKS["country"]}
    assert {"파리는 프랑스의 수도이다.", "서울은 대한민국의 수도이다.", "빈은 오스트리아의 수도이다."} <= sentences


def test_a_task_is_learned_and_the_old_one_comes_back(learned):
    assert learned.trainable == 32_768
    assert learned.losses[-1] < learned.losses[0] / 10
    assert learned.learned >= 28 and learned.kept <= 4
    assert [step for step, *_ in learned.history] == list(range(0, 101, 10))
    with learned.model.disable_adapter():
        assert (known(learned.model, "capital"), known(learned.model, "country")) == (32, 0)


def test_only_the_adapters_move(learned):
    before = dict(pretrained_model().named_parameters())
    for name, after in learned.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(after, before[name.removeprefix("base_model.model.").replace(".base_layer", "")])


def test_4_bits_learn_too():
    """Real bitsandbytes weights: stored as uint8, unchanged by training, the loss falls through them."""
    base = quantized_model(pretrained_model())
    packed = {n: p.clone() for n, p in base.named_parameters() if p.dtype == torch.uint8}
    assert len(packed) == 8 and known(base, "capital") >= 30
    run = fine_tune(adapted(16, model=base).double(), steps=40)
    assert run.losses[-1] < run.losses[0] / 4
    after = {n.replace(".base_layer", ""): p for n, p in run.model.get_base_model().named_parameters()}
    assert all(torch.equal(p, after[n]) for n, p in packed.items())


def test_the_difference_of_fine_tuning_has_a_low_rank():
    base = pretrained_model()
    full = fine_tune(pretrained_model(), lr=2e-3)
    assert full.learned == 32 and len(updates(base, full.model)) == 8
    few, enough, all_of_it = (with_rank(base, full.model, rank) for rank in (1, 8, 64))
    assert known(few, "country") < 16 and known(enough, "country") == known(all_of_it, "country") == 32
    for name, update in updates(base, enough).items():
        assert torch.linalg.matrix_rank(update, rtol=1e-9) == 8, name
    torch.testing.assert_close(all_of_it.get_submodule("lm_head").weight, full.model.get_submodule("lm_head").weight)
    assert "무작위 행렬" in share_of_singular_values(update).svg()


def test_the_frozen_head_is_what_holds_the_loss_up():
    few, with_head = (fine_tune(adapted(4, **more)) for more in ({}, {"modules_to_save": ["lm_head"]}))
    assert with_head.trainable - few.trainable == pretrained_model().get_output_embeddings().weight.numel()
    assert few.learned < with_head.learned == 32 and with_head.losses[-1] < few.losses[-1] / 10


def test_nothing_to_train():
    with pytest.raises(ValueError, match="학습할 파라미터가 하나도 없다"):
        fine_tune(pretrained_model().requires_grad_(False))


def test_runs_draw_themselves(learned):
    runs = Runs([learned])
    assert f"{learned.losses[-1]:.2f}" in runs._repr_html_() and "32,768" in repr(runs)
    assert f"손실 {learned.losses[-1]:.2f}, 새 과제 {learned.learned}, 옛 과제 {learned.kept}" in runs.chart().svg()
    layer = learned.model.get_submodule("base_model.model.gpt_neox.layers.0.attention.dense")
    assert picture_of_update(layer).svg().count("<rect") > 500


def test_rates_are_a_row_a_method_and_a_column_a_rate():
    def run(name, lr, learned):
        return Run(name, nn.Identity(), 1, lr, history=[(0, learned, 0)])

    rates = Rates([run("full", 2e-3, 32), run("LoRA", 2e-2, 31), run("full", 2e-4, 9), run("LoRA", 2e-3, 16)])
    assert repr(rates).splitlines()[1:] == ["full 9 32 –", "LoRA – 16 31"]
    assert "full: 0.0002 → 9, 0.002 → 32; LoRA: 0.002 → 16, 0.02 → 31" in rates.chart().svg()
    assert "<td>16</td>" in rates._repr_html_()


def test_weights_that_4_bits_compute_with():
    """`dequantized_model` holds what bitsandbytes' layers multiply by (the rest of theirs was in fp32 once)."""
    base = pretrained_model()
    tokens = fine_tuning._lesson("capital")[0]
    quantized, plain = quantized_model(base), dequantized_model(base)
    torch.testing.assert_close(plain(input_ids=tokens).logits, quantized(input_ids=tokens).logits, rtol=0, atol=1e-5)
    assert (plain(input_ids=tokens).logits - base(input_ids=tokens).logits).abs().max() > 0.01


@pytest.mark.parametrize(("on", "count"), [(True, 17), (False, 1)])
def test_old_checkpointing_needs_an_input_that_wants_a_gradient(on, count):
    model = adapted(4, modules_to_save=["lm_head"])
    found, trainable, warning = reached(model, fine_tuning._lesson("country")[0], input_grads=on)
    assert (found, trainable) == (count, 17)
    assert warning.startswith("" if on else "None of the inputs have requires_grad=True")
    without = {n for n, p in model.named_parameters() if p.requires_grad and p.grad is None}
    assert len(without) == 17 - count and all("lora_" in name for name in without)


def test_training_leaves_the_threads_as_they_were(learned):
    before = torch.get_num_threads()
    fine_tune(adapted(1), steps=2)
    assert torch.get_num_threads() == before


# -- merging, saving, loading -----------------------------------------------------------------------------------------


def test_merged_is_the_same_function(learned):
    model = copy.deepcopy(learned.model)
    tokens = fine_tuning._lesson("country")[0]
    before, weights = model(input_ids=tokens).logits, [p.clone() for p in model.parameters()]
    merge(model)
    torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=0, atol=1e-11)
    assert not torch.equal(model.get_base_model().gpt_neox.layers[0].attention.dense.weight, weights[0])
    with pytest.raises(RuntimeError, match="이미 합쳐져 있다"):
        merge(model)
    torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=0, atol=1e-11)
    unmerge(model)
    for now, then in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="합쳐진 어댑터가 없다"):
        unmerge(model)
    for call in (merge, unmerge):
        with pytest.raises(RuntimeError, match="LoRA 어댑터가 없다"):
            call(pretrained_model())


def test_adapters_are_swapped(learned, tmp_path):
    learned.model.save_pretrained(tmp_path / "country")
    short = fine_tune(adapted(4), task="short", steps=40)
    short.model.save_pretrained(tmp_path / "short")
    one = adapted(4)
    load_adapter(one, tmp_path / "country", "country")
    assert (known(one, "country"), known(one, "short")) == (learned.learned, 0)
    load_adapter(one, tmp_path / "short", "short")
    assert known(one, "short") == short.learned >= 28
    one.set_adapter("country")
    assert known(one, "country") == learned.learned
    sizes = [(tmp_path / name / "adapter_model.safetensors").stat().st_size for name in ("country", "short")]
    assert 8 * 32_768 < sizes[0] < 8 * 32_768 + 8192 and sizes[1] < sizes[0] / 3


def test_an_adapter_of_another_base(learned, tmp_path):
    learned.model.save_pretrained(tmp_path)
    narrow = adapted(4, model=pretrained_model(width=32))
    before = [p.clone() for p in narrow.parameters()]
    with pytest.raises(ValueError, match=r"다른 모델의 것이다\. gpt_neox\.layers\.0\.\S+: 어댑터는 64, 이 모델은 32"):
        load_adapter(narrow, tmp_path, "other")
    assert all(torch.equal(p, q) for p, q in zip(narrow.parameters(), before, strict=True))
    llama = add_adapters(build_on_gpu(CONFIGS["llama"], torch.float32, "sdpa", None, Cpu()))
    with pytest.raises(ValueError, match="이 모델은 그런 층이 없다"):
        load_adapter(llama, tmp_path, "other")
    with pytest.raises(FileNotFoundError, match="save_pretrained로 저장한 폴더"):
        load_adapter(narrow, tmp_path / "nowhere", "other")


def test_the_tokenizer_gives_the_text_back():
    tokenizer = small_tokenizer()
    for task in TASKS.values():
        for start, end in task:
            ids = tokenizer(f"\n{start}{end}\n").input_ids
            assert tokenizer.decode(ids) == f"\n{start}{end}\n" and len(ids) == len(start + end) + 2
    assert tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0


# -- the program to copy ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_program_learns_and_fits_unchanged(tmp_path):
    """examples/qlora_t4.py: real 4-bit training on this CPU, and two steps on a virtual T4 as predicted."""
    text = write_text(tmp_path)
    learned = PeftModel.from_pretrained(pretrained_model().float(), train_small(tmp_path, text))
    assert known(learned, "short") >= 28
    report = rehearse("polyglot-ko-1.3b", "T4", tmp_path, text)
    assert (report["status"], report["steps"]) == ("fits", 2)
    setting = {"peft": "qlora", "lora_rank": 16, "lora_targets": "all-linear", "lora_dropout": 0.0}
    setting |= {"gradient_checkpointing": True, "precision": "autocast_fp16", "optimizer": "adamw_fused"}
    predicted = predict_memory(batch_size=1, sequence_length=512, gpu="T4", **setting)
    assert report["allocated"] == pytest.approx(predicted.needed_bytes, rel=0.05)


def test_a_program_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="0 tokens, fewer than --length"):
        (tmp_path / "empty.txt").write_text("")
        train_small(tmp_path, tmp_path / "empty.txt")


# -- 4-bit kernels ----------------------------------------------------------------------------------------------------


def test_4_bits_where_bitsandbytes_has_no_kernel(monkeypatch):
    import bitsandbytes

    check_kernels("cpu")

    def no_kernel(*args, **kwargs):
        raise NotImplementedError("Could not run 'bitsandbytes::quantize_4bit'")

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", no_kernel)
    with pytest.raises(RuntimeError, match=r"이 장치\(cpu\)에서 4비트로 양자화할 커널이 없다.*quantize_4bit"):
        build_on_gpu(CONFIGS["llama"], torch.float16, "sdpa", "qlora", Cpu())
    # A virtual GPU needs none.
    build_on_gpu(CONFIGS["llama"], torch.float16, "sdpa", "qlora", VirtualGPU(CATALOG["T4"]))
    set_language("en")
    try:
        with pytest.raises(RuntimeError, match="has no 4-bit kernel for cpu"):
            check_kernels("cpu")
    finally:
        set_language("ko")


# -- the search -------------------------------------------------------------------------------------------------------


def test_the_largest_model_is_the_largest(monkeypatch):
    """Against trying every architecture: those passed over without a run do not fit either."""
    setting = {"sequence_length": 128, "gradient_checkpointing": True, "optimizer": "adamw_fused"}
    names = ["gpt2", "polyglot-ko-1.3b", "Llama-3.2-3B", "Llama-3.1-8B"]  # each method holds one more
    t4 = CATALOG["T4"]
    some = {Setting(1, model_id=name).model_id: {} for name in names}
    monkeypatch.setattr(largest, "architectures", lambda: some)
    for peft in (None, "lora", "qlora"):
        fitting = []
        for name in some:
            one = Setting(1, model_id=name, peft=peft, **setting)
            need = predict_need(one, t4.compute_capability)  # remembered: the search asks for the same
            assert largest._held_bytes(one) <= need.tensors
            if need.card <= t4.capacity_bytes:
                fitting.append((largest._parameters(name)[0], name, need.tensors))
        parameters, name, needed = max(fitting)
        assert largest_model("T4", peft, **setting) == (name, parameters, needed)


def test_where_nothing_fits(monkeypatch):
    monkeypatch.setattr(largest, "architectures", lambda: {"meta-llama/Llama-3.1-70B": {}})
    assert largest_model("T4", "qlora") is None
    told = []
    table = LargestModels(("T4",), progress=told.append)
    assert [line.split(":")[0] for line in told] == ["T4, full", "T4, lora", "T4, qlora"]
    assert repr(table) == "T4: -, -, -" and "<td>-</td>" in table._repr_html_()
    with pytest.raises(ValueError, match="모르는 GPU 이름"):
        largest_model("T5")
