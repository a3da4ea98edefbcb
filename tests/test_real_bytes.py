"""Virtual bytes are real bytes: the same small model on the virtual GPU and, with values, on the CPU."""

import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig
from versions import keeps_workspaces

import helpers.training
from helpers.models import byte_tokenizer, load_model_and_tokenizer
from helpers.training import train_model
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.models.build import build_model, build_on_gpu, count_parameters
from virtual_gpu.models.quantized import VirtualLinear4bit, _real_layer
from virtual_gpu.real import storage_bytes
from virtual_gpu.rules.cublas import cublas_workspace_bytes
from virtual_gpu.step import run
from virtual_gpu.step.predict import model_bytes
from virtual_gpu.step.run import TrainingLog
from virtual_gpu.trace.timeline import Timeline

SMALL = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "gpt_neox": GPTNeoXConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=320, rotary_pct=0.5, **SMALL
    ),
    "llama": LlamaConfig(  # grouped-query heads, tied weights
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=320,
        tie_word_embeddings=True,
        **SMALL,
    ),
    # Conv1D, tied weights. Without dropout, whose mask is not the CPU's: see test_virtual_gpu.
    "gpt2": GPT2Config(
        n_embd=128, n_layer=2, n_head=4, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SMALL
    ),
}
PEFT = [None, "lora", "qlora"]
BATCH, LENGTH = 2, 32


class CpuGPU:
    """A real "GPU" on the CPU, for the code that measures nothing on it."""

    is_virtual, name, device = False, "CPU", torch.device("cpu")

    def place(self, thing):
        return {name: t.to("cpu") for name, t in thing.items()} if isinstance(thing, dict) else thing.to("cpu")

    def owns(self, tensor):
        return tensor.device == self.device

    def autocast(self, dtype):
        return nullcontext()

    def memory_allocated(self):
        return 0

    @contextmanager
    def record(self, model, optimizer):
        yield SimpleNamespace(phase=lambda name: nullcontext(), timeline=Timeline)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """The real GPU is in use; a model on a virtual one is known by its tensors."""
    gpu = CpuGPU()
    monkeypatch.setattr(helpers.training, "current_gpu", lambda: gpu)
    return gpu


OTHERWISE_ON_A_WATCHED_CPU = [
    "accumulate_in_place",
    "cublas_operands",
    "cublaslt_workspace",
    "softmax_half",
    "softmax_backward",
    "reduction_buffers",
    "index_temporaries",
    "attention_temporaries",
    "pointwise_losses",
]


@pytest.fixture
def virtual():
    """A T4 that adds gradients as a watched CPU does, which it is held against."""
    return VirtualGPU(CATALOG["T4"], without=OTHERWISE_ON_A_WATCHED_CPU)


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    """A checkpoint in fp16 as the hub has it, in a local folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build_on_gpu(CONFIGS[request.param], torch.float16, "sdpa", None, CpuGPU())
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def tensors_of(model):
    """name → (shape, dtype, is it trained) of the parameters, tied ones once."""
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peft", PEFT)
def test_a_checkpoint_and_its_architecture_alone(checkpoint, peft, cpu, virtual):
    """transformers, peft and bitsandbytes load the real weights; the virtual GPU holds the same tensors."""
    real, _ = load_model_and_tokenizer(checkpoint, peft=peft, gpu=cpu)
    fake, _ = load_model_and_tokenizer(checkpoint, peft=peft, gpu=virtual, quiet=True)
    assert tensors_of(fake) == tensors_of(real)
    assert model_bytes(fake) == model_bytes(real)
    assert count_parameters(fake) == count_parameters(real)
    statistics = ("absmax", "code", "offset", "nested_absmax", "nested_code")
    buffers = {name: (tuple(b.shape), b.dtype) for name, b in fake.named_buffers()}
    assert {name: b for name, b in buffers.items() if not name.endswith(statistics)} == {
        name: (tuple(b.shape), b.dtype) for name, b in real.named_buffers()
    }


@pytest.mark.parametrize("double", [True, False], ids=["double", "plain"])
@pytest.mark.parametrize("shape", [(64, 64), (500, 260), (33, 7)], ids=str)
def test_a_4_bit_layer(virtual, shape, double):
    """Packed weight and quantization state against bitsandbytes' own, also where blocks do not come out even."""
    linear = torch.nn.Linear(*shape, dtype=torch.float16)
    real = _real_layer(linear, torch.float16, double).to("cpu")
    fake = virtual.place(VirtualLinear4bit(linear, torch.float16, nested=double))
    state, nested = real.weight.quant_state, real.weight.quant_state.state2
    theirs = [real.weight, real.bias, state.absmax, state.code]
    theirs += [state.offset, nested.absmax, nested.code] if double else []
    ours = [fake.weight, fake.bias, *(getattr(fake, name) for name in fake.quantization_state)]
    assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]
    assert virtual.memory_allocated() == sum(-(-t.nbytes // 512) * 512 for t in theirs)
    x = torch.ones(3, shape[0], requires_grad=True)
    y = virtual.place(x).requires_grad_()
    out, fake_out = real(x), fake(y)
    assert (fake_out.shape, fake_out.dtype) == (out.shape, out.dtype)
    with virtual:
        fake_out.sum().backward()
    assert (y.grad.shape, y.grad.dtype) == (x.shape, x.dtype)


def both(family, virtual, cpu, dtype=torch.float32, attention="eager", peft=None):
    for gpu in (cpu, virtual):
        yield build_on_gpu(CONFIGS[family], dtype, attention, peft, gpu).train()


def trained(model, optimizer_name, monkeypatch):
    """The log of one step, and the optimizer's state: name of the parameter → {name of the state: (shape, dtype)}."""
    made = []
    make = run.make_optimizer
    ids = torch.randint(0, 512, (BATCH, LENGTH))
    log = TrainingLog()
    arguments = SimpleNamespace(per_device_train_batch_size=BATCH, max_steps=1, optim=optimizer_name)
    with monkeypatch.context() as patch:
        patch.setattr(run, "make_optimizer", lambda *args: made.append(make(*args)) or made[0])
        train_model(model, [{"input_ids": row, "labels": row} for row in ids], arguments, log=log)
    names = {p: name for name, p in model.named_parameters()}
    state = {
        names[parameter]: {
            key: (tuple(value.shape), value.dtype)
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        }
        for parameter, values in made[0].state.items()
    }
    return log, state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("optimizer", "peft", "dtype"),
    [
        ("adamw", None, torch.float32),
        ("adamw", None, torch.float16),
        ("adamw_fused", None, torch.float32),
        ("adamw_8bit", None, torch.float32),
        ("adamw_8bit", None, torch.float16),
        ("sgd", None, torch.float32),
        ("adafactor", None, torch.float32),
        ("adamw", "lora", torch.float16),
        ("adamw", "qlora", torch.float16),
        ("adamw_8bit", "lora", torch.float32),
    ],
)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_gradients_and_optimizer_state(family, optimizer, peft, dtype, cpu, virtual, monkeypatch):
    (real_log, real), (fake_log, fake) = (
        trained(model, optimizer, monkeypatch) for model in both(family, virtual, cpu, dtype, peft=peft)
    )
    assert fake == real
    assert fake_log.gradients_bytes == real_log.gradients_bytes > 0
    assert fake_log.optimizer_bytes == real_log.optimizer_bytes
    assert (real_log.optimizer_bytes == 0) == (optimizer == "sgd")
    # What the meter counts in these categories is what the tensors hold, each rounded up.
    at_end = fake_log.timeline.at_end(-1)
    assert 0 <= at_end["gradients"] - fake_log.gradients_bytes < 512 * 100
    assert 0 <= at_end["optimizer"] - fake_log.optimizer_bytes < 512 * 400


@pytest.mark.parametrize("family", CONFIGS)
def test_tensors_saved_for_backward(family, cpu, virtual):
    """Eager attention: with sdpa the CPU's own kernel saves something else than the one that CUDA would take."""
    saved = []
    for model, place in zip(both(family, virtual, cpu), (nullcontext(), virtual), strict=True):
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        storages = {}

        def pack(tensor, storages=storages, parameters=parameters):
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                storages[storage._cdata] = storage
            return tensor

        with place, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            outputs = model(input_ids=ids, labels=ids, use_cache=False)
        saved.append(Counter(storage.nbytes() for storage in storages.values()))
        del outputs
    assert saved[0] == saved[1]
    assert saved[0].total() > 10


class CountRealBytes(TorchDispatchMode):
    """What the operations of real tensors allocate and release, rounded as the caching allocator rounds."""

    def __init__(self, held):
        super().__init__()
        self.alive, self.live, self.peak = {}, 0, 0
        for tensor in held:
            self.count(tensor)

    def count(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // 512) * 512
        if key in self.alive or not size:
            return

        def release(_):
            del self.alive[key]
            self.live -= size

        self.alive[key] = weakref.ref(storage, release)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return out


def one_step(model, ids, optimizer, on_gpu, in_step, read=lambda: None):
    """What `read()` says after forward, backward and step."""
    with on_gpu:
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
    after_forward = read()
    with on_gpu:
        outputs.loss.backward()
    del outputs
    after_backward = read()
    with in_step:
        optimizer.step()
    after_step = read()
    optimizer.zero_grad()
    return after_forward, after_backward, after_step


class AskedFor:
    """Live and peak bytes asked for on a virtual GPU, without the rests that its allocator does not split off."""

    def __init__(self, gpu):
        self.sizes = {block: allocation.nbytes for block, allocation in gpu.meter.live_blocks().items()}
        self.live = self.peak = sum(self.sizes.values())
        gpu.meter.recorder = self

    def allocated(self, block, nbytes, *_):
        self.sizes[block] = nbytes
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def freed(self, block):
        self.live -= self.sizes.pop(block)

    def label(self, block, category):
        pass


@keeps_workspaces
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_live_and_peak_bytes_of_a_step(family, kind, cpu, virtual):
    """Every operation of a second step (the first makes state and workspaces), by two meters that share no code."""
    real, fake = both(family, virtual, cpu)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    optimizer = kind(real.parameters(), foreach=True)
    one_step(real, ids, optimizer, nullcontext(), nullcontext())
    # AdamW's step counters, tensors without a dimension, are on the CPU.
    state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
    meter = CountRealBytes([*real.parameters(), *real.buffers(), *state, ids])
    in_real = one_step(real, ids, optimizer, meter, meter, lambda: (meter.live, meter.peak))

    optimizer, ids = kind(fake.parameters(), foreach=True), virtual.place(ids)
    one_step(fake, ids, optimizer, virtual, nullcontext())
    asked, workspaces = AskedFor(virtual), 2 * cublas_workspace_bytes((7, 5))
    in_virtual = one_step(
        fake,
        ids,
        optimizer,
        virtual,
        nullcontext(),
        lambda: (asked.live - workspaces, asked.peak - workspaces),
    )
    assert in_virtual == in_real


def test_storage_bytes_counts_a_storage_once():
    tensor = torch.ones(100)
    assert storage_bytes([tensor, tensor[:10], tensor.view(10, 10)]) == 400
    assert storage_bytes(iter([])) == 0


def test_tied_weights_count_once(cpu, virtual):
    for model in both("llama", virtual, cpu):
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert storage_bytes(model.parameters()) == 4 * count_parameters(model)
    assert count_parameters(build_model(CONFIGS["llama"], torch.float32)) == count_parameters(model)
