"""Every architecture: a training step of a small one on the virtual GPU and, with values, on the CPU; equal bytes.

The configurations are transformers' own defaults, made small by one table of sizes. Attention is eager and dropout off,
where CUDA has kernels of its own (tests/test_virtual_gpu.py holds those).
"""

import copy
import gc
import math
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
import transformers
from test_real_bytes import AskedFor, CountRealBytes, CpuGPU, tensors_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import helpers.experiment
from helpers.experiment import gpu_memory_experiment, predict_memory
from helpers.models import byte_tokenizer, load_model_and_tokenizer
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.models.build import build_on_gpu
from virtual_gpu.models.configs import load_config
from virtual_gpu.rules import attention as rules_of_attention
from virtual_gpu.rules.cublas import cublas_workspace_bytes
from virtual_gpu.step import predict

words = str.split

# -- architectures ----------------------------------------------------------------------------------------------------

# Causal language models, by what is particular in them.
DENSE = words("""
    gpt2 gpt_neox gptj gpt_neo codegen opt bloom mpt falcon phi phi3 stablelm starcoder2 persimmon xglm biogpt
    llama smollm3 olmo olmo2 granite nemotron cohere glm glm4 qwen2 qwen3 ernie4_5 hyperclovax seed_oss arcee""")
SLIDING = words("mistral ministral gemma gemma2 gemma3_text gemma3n_text cohere2 olmo3 exaone4 modernbert-decoder")
EXPERTS = words("""
    mixtral qwen2_moe qwen3_moe olmoe phimoe gpt_oss deepseek_v2 deepseek_v3 glm4_moe ernie4_5_moe exaone_moe
    granitemoe llama4_text lfm2_moe""")
RECURRENT = words("mamba mamba2 recurrent_gemma bamba jamba qwen3_next lfm2")
ENCODER_DECODER = words("t5 mt5 bart mbart pegasus marian m2m_100 longt5 switch_transformers")
WITH_IMAGES = words("gemma3 llama4")  # trained on text alone: the part that sees images has no gradient
USUAL = [*DENSE, *SLIDING, *EXPERTS, *RECURRENT, *ENCODER_DECODER, *WITH_IMAGES]
# The rest of what transformers builds, once a week.
REST = words("""
    afmoe apertus aria_text axk1 axk2 bailing_hybrid beam bert bert-generation big_bird bigbird_pegasus bitnet
    blenderbot blenderbot-small camembert cohere2_moe cohere_compass_text cpmant ctrl cwm data2vec-text deepseek_v32
    deepseek_v4 diffllama doge dots1 dots3_note_text electra emu3 ernie falcon_mamba flex_olmo flint fuyu gemma4
    gemma4_text gemma4_unified gemma4_unified_text glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt_bigcode
    gpt_neox_japanese granite_swa granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 inkling2_text inkling_text internlm3 iquestcoder jais2 kimi_linear kolibri1 laguna
    lfm3 megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral3 mllama moshi
    moss_transcribe_diarize mvp nanochat nemotron_h olmo_hybrid openai-gpt phi4_multimodal plbart qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp qwen4_exp_text reformer rembert roberta roberta-prelayernorm
    roc_bert roformer solar_open trocr vaultgemma xlm-roberta xlm-roberta-xl xlnet xlstm youtu zamba zamba2 zaya
    falcon_h1 fsmt led nllb-moe prophetnet rwkv pegasus_x seamless_m4t seamless_m4t_v2 t5gemma umt5""")
# Their memory depends on the data.
DEPEND_ON_VALUES = words("jetmoe dbrx longcat_flash blt xlm xmod t5gemma2")
# transformers can build their decoder alone; the whole model does not read tokens.
NO_TOKENS = words("whisper musicgen musicgen_melody")
NOT_TRIED = {
    "dots3_note": "the sizes of its parts are checked against each other",
    "gemma3n": "takes timm, a library that the course does not have",
    "gemma4_assistant": "drafts with the keys of another model",
    "gemma4_unified_assistant": "drafts with the keys of another model",
    "git": "takes images: see OTHERS",
}

BATCH, LENGTH, VOCABULARY = 2, 16, 256


# -- small ones -------------------------------------------------------------------------------------------------------

# What a configuration calls its sizes. Those that a configuration has are set, in its parts (text, vision) as well.
SIZES = {
    name: size
    for size, names in [
        (
            64,
            "hidden_size n_embd d_model dim embedding_size embed_dim n_embed attention_hidden_size hidden_size_global",
        ),
        (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
        (2, "num_encoder_layers num_blocks depth"),
        (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
        (4, "num_encoder_attention_heads num_decoder_attention_heads"),
        (2, "num_key_value_heads num_kv_heads"),
        (
            96,
            "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim d_inner ffn_hidden_size hidden_dim",
        ),
        (32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
        (64, "max_position_embeddings n_positions n_ctx max_seq_len sequence_length max_sequence_length"),
        (64, "max_source_positions max_target_positions encoder_hash_byte_group_vocab"),
        (VOCABULARY, "vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token n_group num_group top_k_experts moe_k moe_topk"),
        (16, "head_dim d_kv state_size ssm_state_size kv_lora_rank q_lora_rank"),
        (8, "qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim sliding_window attention_window"),
        (8, "chunk_size mamba_chunk_size attn_chunk_size patch_size"),
        (32, "image_size"),
        (1, "topk_group first_k_dense_replace n_shared_experts pad_token_id"),
        (0, "bos_token_id eos_token_id"),
    ]
    for name in words(names)
}
# Where these sizes do not go together, or a default is None.
MORE = {
    "bailing_hybrid": {"num_expert_group": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 48),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xlm": {"emb_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 128},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 128},
    "zaya": {"num_experts_per_tok": 1},
}


def small(model_type, **more):
    """The architecture's default configuration with SIZES, no dropout, and `more`."""
    return CONFIG_MAPPING[model_type](**_sizes(CONFIG_MAPPING[model_type](), **more))


def _sizes(config, **more):
    names = config.to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in names}
    sizes |= {name: type(value)(0) for name, value in names.items() if "drop" in name and type(value) in (int, float)}
    if names.get("qk_rope_head_dim"):  # latent attention: every head has its keys, and a part of it is turned
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": sizes["num_attention_heads"]}
    sizes = {name: value for name, value in sizes.items() if name in names}
    if names.get("is_encoder_decoder"):
        sizes["decoder_start_token_id"] = 1
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            sizes[name] = {"model_type": part.model_type} | _sizes(part, **more.pop(name, {}))
    return sizes | more


# -- a step -----------------------------------------------------------------------------------------------------------


class Meter(CountRealBytes):
    """The CPU's bytes. AdamW's step counters, tensors without a dimension, stay on the CPU on a real GPU too."""

    in_step = False

    def count(self, tensor):
        if not (self.in_step and tensor.dim() == 0):
            super().count(tensor)


class OnCPU:
    """A step with values."""

    def __init__(self):
        self.gpu = CpuGPU()

    def start(self, held):
        self.meter = Meter(held)

    @contextmanager
    def running(self):
        with sdpa_kernel(SDPBackend.MATH), self.meter:
            yield

    @contextmanager
    def stepping(self):
        self.meter.in_step = True
        with self.meter:
            yield

    def read(self):
        return self.meter.live, self.meter.peak


# It keeps statistics in 16 bits, adds gradients into new tensors, has no cuBLAS that copies operands, and a buffer of
# log_sigmoid.
OTHERWISE_ON_A_WATCHED_CPU = [
    "layer_norm_statistics",
    "accumulate_in_place",
    "cublas_operands",
    "softmax_half",
    "softmax_backward",
    "reduction_buffers",
    "index_temporaries",
    "attention_temporaries",
    "pointwise_losses",
]


class OnVirtualGPU:
    """A step without values."""

    def __init__(self, name="T4"):
        self.gpu = VirtualGPU(CATALOG[name], without=OTHERWISE_ON_A_WATCHED_CPU)
        with self.gpu:  # both cuBLAS workspaces are there before the step
            (torch.ones(1, 1, requires_grad=True) @ torch.ones(1, 1, requires_grad=True)).sum().backward()
        self.workspaces = 2 * cublas_workspace_bytes(self.gpu.spec.compute_capability)
        assert self.gpu.memory_allocated() == self.workspaces
        self.asked = AskedFor(self.gpu)

    def start(self, held):
        self.asked.peak = self.asked.live

    def running(self):
        return self.gpu

    def stepping(self):
        return nullcontext()

    def read(self):
        return self.asked.live - self.workspaces, self.asked.peak - self.workspaces


def shape(tensor):
    return tuple(tensor.shape), tensor.dtype


def bytes_of_a_step(model, batch, place, **arguments):
    """What is compared: forward with labels, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    held = [*model.parameters(), *model.buffers(), *batch.values()]
    known, saved = {tensor.untyped_storage()._cdata for tensor in held}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage
        return tensor

    place.start(held)
    with place.running(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch, **arguments).loss
    after_forward = place.read()
    sizes = Counter(storage.nbytes() for storage in saved.values())
    saved.clear()
    with place.running():
        loss.backward()
    del loss
    after_backward = place.read()
    with place.stepping():
        optimizer.step()
    names = {name: p for name, p in model.named_parameters()}
    return {
        "parameters": {name: (*shape(p), p.requires_grad) for name, p in names.items()},
        "buffers": {name: shape(buffer) for name, buffer in model.named_buffers()},
        "gradients": {name: shape(p.grad) for name, p in names.items() if p.grad is not None},
        "optimizer": {
            name: {key: shape(value) for key, value in optimizer.state[p].items()}
            for name, p in names.items()
            if p in optimizer.state
        },
        "saved for backward": sizes,
        "live and peak": (after_forward, after_backward, place.read()),
    }


def tokens():
    ids = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def both(config, batch, build=build_on_gpu, dtype=torch.float32, gpu="T4", attention="eager", **arguments):
    for place in (OnCPU(), OnVirtualGPU(gpu)):
        model = build(copy.deepcopy(config), dtype, attention, None, place.gpu).train()
        part = model.config.get_text_config()
        if hasattr(part, "use_cache"):
            part.use_cache = False
        yield bytes_of_a_step(model, place.gpu.place(batch), place, **arguments)


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch):
    """Attention without a fused kernel also in the models that do not ask which one."""
    monkeypatch.setattr(rules_of_attention, "attention_kernel", lambda *args, **kwargs: "math")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def check_equal(real, virtual):
    for what, expected in real.items():
        assert virtual[what] == expected, what
    assert real["gradients"]


# -- the tests --------------------------------------------------------------------------------------------------------


def test_every_causal_language_model_is_here():
    """Those that transformers builds from a configuration: compared, or with a reason why not."""
    names = [*USUAL, *REST, *DEPEND_ON_VALUES, *NO_TOKENS, *NOT_TRIED]
    assert max(Counter(names).values()) == 1
    assert len(USUAL) >= 25
    if transformers.__version__.startswith("5.23."):
        assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(names)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=pytest.mark.stress) for name in REST)])
def test_a_step(name):
    """Parameters, gradients, optimizer state, tensors saved for backward, live bytes and peak: to the byte."""
    check_equal(*both(small(name, **MORE.get(name, {})), tokens()))


TOKENS = tokens()
PIXELS = torch.zeros(BATCH, 3, 32, 32)
IMAGES = {"pixel_values": PIXELS, "labels": torch.tensor([0, 1])}
SPEECH = {"input_features": torch.zeros(BATCH, 80, 128), "labels": TOKENS["labels"]}
OTHERS = [
    *(("MaskedLM", name, TOKENS) for name in words("bert roberta distilbert albert electra deberta-v2 modernbert")),
    *(("ImageClassification", name, IMAGES) for name in words("vit beit dinov2")),
    ("CausalLM", "git", TOKENS | {"pixel_values": PIXELS}),
    ("ImageTextToText", "llava", TOKENS),
    ("ImageTextToText", "paligemma", TOKENS),
    ("SpeechSeq2Seq", "whisper", SPEECH),
    ("", "siglip", {"input_ids": TOKENS["input_ids"], "pixel_values": PIXELS}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("auto", "name", "batch"), OTHERS, ids=[f"{name}-{auto}" for auto, name, _ in OTHERS])
def test_a_step_of_other_models(auto, name, batch):
    """What the course's loop does not train, masked language models, images and speech: the meter is the same."""

    def build(config, dtype, attention, peft, gpu):
        kind = getattr(transformers, f"AutoModelFor{auto}" if auto else "AutoModel")
        with torch.device("meta" if gpu.is_virtual else "cpu"):
            model = kind.from_config(config, dtype=dtype, attn_implementation=attention)
            model.tie_weights()
        return gpu.place(model)

    arguments = {} if auto else {"return_loss": True}
    check_equal(*both(small(name), batch, build=build, **arguments))


SDPA = words("gpt2 llama mistral gemma3_text cohere2 exaone4 qwen3_moe deepseek_v3 bamba t5 bart")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SDPA)
def test_a_step_with_sdpa(name):
    """With its kernel of plain operations: the masks that are made for it, or left out, are the same."""
    check_equal(*both(small(name), tokens(), attention="sdpa"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, name) for name in words("mixtral gpt_oss deepseek_v3 gemma3_text mamba t5 bart opt")]
    + [(torch.bfloat16, name) for name in words("mixtral t5")],
    ids=str,
)
def test_a_step_in_16_bits(name, dtype):
    check_equal(*both(small(name), tokens(), dtype=dtype, gpu="H100"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_below_compute_capability_8(name, monkeypatch):
    """There transformers multiplies expert by expert; the tensors are those of the grouped product."""
    from transformers.integrations import moe

    real, virtual = both(small(name), tokens())
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *args: False)
    place = OnCPU()
    model = build_on_gpu(small(name), torch.float32, "eager", None, place.gpu).train()
    model.config.use_cache = False
    loop = bytes_of_a_step(model, tokens(), place)
    # Where the experts' rows end, four numbers of 4 bytes, the grouped product saves and the loop keeps in its context:
    # it gives this block of 512 bytes back a moment later.
    assert set(real["saved for backward"] - loop["saved for backward"]) <= {16}
    for (live, peak), (live_of_loop, peak_of_loop) in zip(virtual["live and peak"], loop["live and peak"], strict=True):
        assert live == live_of_loop
        assert 0 <= peak_of_loop - peak <= 512
    for what in ("parameters", "buffers", "gradients", "optimizer"):
        assert virtual[what] == loop[what]


# -- by the course's own names ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder with the configuration of a checkpoint, as model_id: family, more → path."""

    def save(name, **more):
        small(name, **MORE.get(name, {}) | more).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def buffer_of_4_bit(name):
    return name.endswith(("absmax", "code", "offset"))


def total(shapes):
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype, *_ in shapes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["exaone4", "mixtral", "bert", "mamba", "gemma3", "t5", "bart"])
def test_predict_memory(name, folder):
    """The report's parameters, gradients and optimizer state are those of the step with values."""
    model_id = folder(name)
    report = predict_memory(model_id=model_id, batch_size=BATCH, sequence_length=LENGTH, precision="fp32", gpu="T4")
    place = OnCPU()
    model = build_on_gpu(load_config(model_id), torch.float32, "eager", None, place.gpu).train()
    real = bytes_of_a_step(model, tokens(), place)
    assert report.parameters_bytes == total(real["parameters"].values())
    assert report.gradients_bytes == total(real["gradients"].values())
    states = [state for states in real["optimizer"].values() for key, state in states.items() if key != "step"]
    assert report.optimizer_bytes == total(states)
    assert report.fits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "peft"),
    [("t5", None), ("t5", "lora"), ("t5", "qlora"), ("mixtral", "qlora"), ("ernie4_5_moe", None), ("mamba", None)],
)
def test_a_checkpoint(name, peft, tmp_path):
    """Loaded with its weights and without: the same tensors, in fp32 what transformers keeps there."""
    model = build_on_gpu(small(name), torch.float16, "sdpa", None, CpuGPU())
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    real, virtual = (
        load_model_and_tokenizer(str(tmp_path), peft=peft, gpu=gpu, quiet=True)[0]
        for gpu in (CpuGPU(), VirtualGPU(CATALOG["T4"]))
    )
    # Without adapters nothing is said of what is trained: transformers loads ernie4_5_moe's expert bias as if it were,
    # but it gets no gradient.
    said = slice(None) if peft else slice(2)
    real, virtual = (
        {key: tensor[said] for key, tensor in tensors_of(model).items()}
        | {key: shape(buffer) for key, buffer in model.named_buffers() if not buffer_of_4_bit(key)}
        for model in (real, virtual)
    )
    assert real == virtual
    if not peft:
        in_fp32 = {key for key, (_, dtype) in real.items() if dtype == torch.float32 and "inv_freq" not in key}
        assert bool(in_fp32) == (name in ("t5", "ernie4_5_moe"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{}, {"peft": "lora"}, {"peft": "qlora"}, {"gradient_checkpointing": True}], ids=str
)
def test_an_encoder_decoder_in_the_experiment(options, folder):
    gpu = VirtualGPU(CATALOG["T4"])
    report = gpu_memory_experiment(2, model_id=folder("t5"), sequence_length=LENGTH, gpu=gpu, **options)
    assert report.fits and report.peak_bytes > report.parameters_bytes > 0
    assert gpu.memory_allocated() == 0


BEGINS_IN_A_TURN = ["sliding_attention", *["full_attention", "sliding_attention"] * 6]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "more", "method"),
    [
        ("llama", {}, "depth"),
        ("mixtral", {}, "depth"),
        ("deepseek_v3", {"first_k_dense_replace": 1}, "depth"),
        ("deepseek_v3", {"first_k_dense_replace": 5}, "run"),  # the first experts are in the sixth layer
        ("deepseek_v3", {"first_k_dense_replace": 3, "num_hidden_layers": 11}, "depth"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, "run"),
        # Two kinds of attention, which take the same memory.
        ("gpt_neo", {"attention_types": [[["global", "local", "local"], 2], [["global"], 1]]}, "depth"),
        ("gemma2", {}, "depth"),
        ("bart", {"encoder_layers": 6, "decoder_layers": 3}, "run"),
        ("gemma3", {"text_config": {"num_hidden_layers": 7, "layer_types": ["full_attention"] * 7}}, "depth"),
        ("gemma3", {"text_config": {"num_hidden_layers": 13, "layer_types": BEGINS_IN_A_TURN}}, "depth"),
    ],
    ids=str,
)
def test_depth(name, more, method, folder):
    """What is predicted from the first layers is what all of them need, or all of them are run."""
    more = more if name in ("bart", "gemma3") else {"num_hidden_layers": 7} | more
    setting = {"model_id": folder(name, **more), "batch_size": 1, "sequence_length": 8, "precision": "fp32"}
    report, full = (predict_memory(**setting, gpu="T4", full=full) for full in (False, True))
    assert report.method == method
    assert report.needed_bytes == full.needed_bytes
    assert report.parameters_bytes == full.parameters_bytes
    assert (report.gradients_bytes, report.optimizer_bytes) == (full.gradients_bytes, full.optimizer_bytes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DEPEND_ON_VALUES)
def test_memory_that_depends_on_values(name, folder):
    """One line says so, and everything is given back."""
    gpu = VirtualGPU(CATALOG["T4"])
    with pytest.raises(ValueError, match="가상 GPU의 텐서에는 값이 없는데") as caught:
        gpu_memory_experiment(2, model_id=folder(name), sequence_length=LENGTH, gpu=gpu)
    message = str(caught.value)
    assert "\n" not in message and "aten." in message and "진짜 GPU에서만 잴 수 있다" in message
    del caught
    gc.collect()
    assert gpu.memory_allocated() == 0


@pytest.mark.parametrize("name", ["vit", "clip", "whisper", "musicgen", "llava", "wav2vec2"])
def test_what_does_not_read_and_write_tokens(name, folder, monkeypatch):
    """One line says so before anything is built."""
    monkeypatch.setattr(predict, "build_on_gpu", None)
    monkeypatch.setattr(helpers.experiment, "load_model_and_tokenizer", None)
    model_id = folder(name)
    for run in (predict_memory, gpu_memory_experiment):
        with pytest.raises(ValueError, match=f"^{name}: 토큰을 읽고 토큰을 쓰는 모델이 아니라서") as caught:
            run(batch_size=1, model_id=model_id, gpu="T4")
        assert "\n" not in str(caught.value)
