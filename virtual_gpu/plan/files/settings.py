"""What every kind of file is told: the plan as arguments of the libraries, and the words about it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from ...models.adapters import add_adapters
from ...models.attention import REPEAT_KV
from ...models.build import build_model
from ...models.configs import is_given, load_config
from ..tensors import gpus_by_node
from .keeping import checkpointing

if TYPE_CHECKING:
    from ..plans import Plan
    from ..recipes import Recipe


def learning_rate(plan: Plan) -> float:
    """Where to begin. Weights in bf16 swallow most of a step of 1e-5, so there transformers' default, 5e-5.

    Of DPO and GRPO it is TRL's default, and with adapters ten times that (TRL's documentation, "Training adapters with
    PEFT").
    """
    recipe = plan.recipe
    if plan.request.objective != "sft":
        return 1e-6 if recipe.method == "full" else 1e-5
    if recipe.method != "full":
        return 2e-4
    return 5e-5 if recipe.caution else 1e-5


def lora_config(plan: Plan) -> dict[str, Any]:
    """The arguments of peft's LoraConfig, with the target layers by name; alpha = 2r, whatever the rank.

    No byte hangs on alpha: the book's 32 stands for its rank, 8, alone.
    """
    model = build_model(load_config(plan.request.model), torch.float16)  # all layers: they may differ
    rank = plan.request.lora_rank
    targets, saved = plan.request.lora_targets, plan.request.modules_to_save
    config = add_adapters(model, rank, targets, lora_alpha=2 * rank, modules_to_save=saved).peft_config["default"]
    names = ("r", "lora_alpha", "lora_dropout", "bias", "task_type", "fan_in_fan_out")
    found = {name: getattr(config, name) for name in names} | {"target_modules": sorted(config.target_modules)}
    found |= {"modules_to_save": [*saved]} if saved else {}
    return {name: getattr(value, "value", value) for name, value in found.items()}


def weights_dtype(recipe: Recipe) -> str:
    """torch's name of the type in which the weights are loaded."""
    if recipe.precision == "bf16" or (recipe.method != "full" and recipe.precision != "fp32"):
        return "bfloat16" if "bf16" in recipe.precision else "float16"
    return "float32"


def autocast_dtype(recipe: Recipe) -> str:
    """torch's name of the type in which a mixed precision computes; empty without autocast."""
    names = {"mixed_fp16": "float16", "mixed_bf16": "bfloat16"}
    return names.get(recipe.precision, "")


def literal(value: Any) -> str:
    """A value as Python's source has it: what a model's name or a layer's holds stays data."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    text = ascii(value)
    plain = isinstance(value, str) and not {'"', "'", "\\"} & set(text[1:-1])
    return f'"{text[1:-1]}"' if plain else text


def loads_second(plan: Plan) -> bool:
    """Whether TRL loads a second model, if only to make its log probabilities first, and FSDP2 splits it."""
    refers = plan.request.pairs or plan.request.beta > 0
    return refers and plan.recipe.method == "full" and bool(plan.recipe.stage)


def json_text(values: dict[str, Any]) -> str:
    """A file of JSON."""
    return json.dumps(values, indent=2) + "\n"


def torchrun(gpus: int) -> str:
    """The command that starts so many ranks, on each machine the same; FIRST_MACHINE is to be named."""
    machines, each = gpus_by_node(gpus)
    several = f" --nnodes {machines} --rdzv_backend c10d --rdzv_endpoint FIRST_MACHINE:29500" if machines > 1 else ""
    return f"torchrun{several} --nproc_per_node {each}"


def accelerate_yaml(plan: Plan) -> str:
    """What `accelerate launch --config_file` reads."""
    machines, _ = gpus_by_node(plan.request.gpus)
    gpus, stage = plan.request.gpus, plan.recipe.stage
    mixed = plan.recipe.precision.removeprefix("mixed_") if plan.recipe.precision.startswith("mixed") else "no"
    kind = "FSDP" if stage else "MULTI_GPU" if gpus > 1 else "NO"
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: '{kind}'",
        f"mixed_precision: '{mixed}'",
        f"num_machines: {machines}",
        f"num_processes: {gpus}",
    ]
    if machines > 1:
        lines += [
            "machine_rank: 0  # on every other machine its own number",
            "main_process_ip: FIRST_MACHINE  # its address",
            "main_process_port: 29500",
        ]
    if stage:
        yes = {True: "true", False: "false"}
        here = plan.recipe.checkpointing and not plan.recipe.kept  # where blocks keep results, the script says it
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {yes[stage == 3]}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {yes[here]}",
            *(["  fsdp_activation_checkpointing_offload: true"] if plan.recipe.offload and here else []),
            # Nobody sends the weights of TRL's second model round (TRL 1.16, prepare_fsdp): each rank has to read them.
            f"  fsdp_cpu_ram_efficient_loading: {yes[not loads_second(plan)]}",
            f"  fsdp_offload_params: {yes[plan.recipe.cpu_offload]}",
            "  fsdp_state_dict_type: FULL_STATE_DICT",  # of a sharded one the Trainer saves no model
        ]
    if (copies := plan.recipe.replicas) > 1:
        lines += [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {copies}",
            f"  parallelism_config_dp_shard_size: {gpus // copies}",
        ]
    return "\n".join(lines) + "\n"


def docstring(plan: Plan) -> str:
    """What a script says of itself first: the plan, and what to know before training so."""
    return "\n".join(filter(None, [_english(plan), _caution(plan.recipe)]))


def _english(plan: Plan) -> str:
    recipe = plan.recipe
    parts = [plan.request.objective.upper()] if plan.request.objective != "sft" else []
    parts += [recipe.method, recipe.precision, recipe.optimizer, f"{plan.micro_batch} x {plan.accumulation}"]
    parts += [f"ZeRO-{recipe.stage}"] if recipe.stage else []
    parts += [f"HSDP, {recipe.replicas} copies"] if recipe.replicas > 1 else []
    parts += [f"tensor parallel {recipe.tensor_parallel}"] if recipe.tensor_parallel > 1 else []
    parts += ["sequence parallel"] if recipe.sequence_parallel else []
    parts += [f"context parallel {recipe.context_parallel}"] if recipe.context_parallel > 1 else []
    parts += [f"pipeline parallel {recipe.pipeline_parallel}"] if recipe.pipeline_parallel > 1 else []
    parts += [f"expert parallel {recipe.expert_parallel}"] if recipe.expert_parallel > 1 else []
    parts += [f"layers {' + '.join(map(str, plan.layers))} on the cards of one process"] if recipe.spread else []
    parts += ["CPU offload"] if recipe.cpu_offload else []
    parts += ["checkpointing"] if recipe.checkpointing else []
    parts += [f"keeps {' '.join(recipe.kept)}"] if recipe.kept else []
    needs = "transformers 5.17" + (", accelerate 1.15" if recipe.stage else "")
    parts += [f"checkpoints on the CPU ({needs})"] if recipe.offload else []
    parts += ["fused LM head"] if recipe.fused_lm_head else []
    parts += ["the reference's log probabilities made first"] if recipe.reference == "precomputed" else []
    parts += [] if recipe.rest_in_fp32 else ["the rest in 16 bits"]
    return ", ".join([*parts, f"{plan.request.gpus} x {plan.request.gpu}"])


def _caution(recipe: Recipe) -> str:
    return "\nWeights in bf16 round small updates away: see that the loss falls." if recipe.caution else ""


# -- parts of the scripts that have no configuration beside them -----------------------------------------------------

LAUNCH = "accelerate launch --config_file accelerate.yaml"
# Started plainly a script of a split plan would train all of the model on one GPU.
LAUNCHED = f"""if not args.cpu and os.environ.get("ACCELERATE_USE_FSDP") != "true":
    raise SystemExit("FSDP2 holds the model, as accelerate.yaml says: {LAUNCH} train.py ...")
"""
HEAD = """LENGTH = {length}  # tokens of a {sequence}
MICRO_BATCH = {micro_batch}  # {samples} that a GPU takes at once
ACCUMULATION = {accumulation}  # micro-batches of one optimizer step
LEARNING_RATE = {learning_rate}

parser = argparse.ArgumentParser()
parser.add_argument({data})
parser.add_argument("--model", {model})
parser.add_argument("--output", default="out")
parser.add_argument("--max-steps", type=int, default=-1, help="fewer than the data make")
parser.add_argument("--cpu", action="store_true", help="rehearse in fp32 without a GPU")
args = parser.parse_args()
"""
BLOCKS = """tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
ids = tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"]
blocks = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
"""
FOUR_BITS = """    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
{storage}    ),
"""
# Bytes (the default) FSDP2 cannot split: accelerate would leave them whole on every GPU.
STORAGE = "        bnb_4bit_quant_storage=dtype,\n"

_TEXT = '"--text", required=True, help="a text file to learn"'


def head(plan: Plan, data: str = _TEXT, sequence: str = "block", samples: str = "blocks") -> str:
    """The plan's numbers, and the arguments that every script takes.

    data: of the argument that names what is learned. sequence, samples: what the numbers count.
    """
    model = plan.request.model
    return HEAD.format(
        sequence=sequence,
        samples=samples,
        data=data,
        length=plan.request.length,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        learning_rate=learning_rate(plan),
        model="required=True" if is_given(model) else f"default={literal(model)}",
    )


_REPEAT_KV = f"""# Grouped heads on a GPU before Ampere: repeated, they take sdpa's memory-efficient kernel.
{REPEAT_KV}
"""
_FUSE_HEAD = "add_fused_lm_head(model)  # TRL's: the loss from tiles of the logits\n"


def imports(plan: Plan) -> tuple[str, str]:
    """The lines for grouped heads and for a fused head: imported with transformers', and after them."""
    repeated = "from transformers.integrations import sdpa_attention\n" if plan.request.repeats_kv else ""
    return repeated, "from trl.trainer import add_fused_lm_head\n" if plan.recipe.fused_lm_head else ""


def repeat_kv(plan: Plan) -> str:
    """The line that lets sdpa repeat grouped heads; empty where the card takes them as they are."""
    return _REPEAT_KV if plan.request.repeats_kv else ""


def fuse_head(recipe: Recipe) -> str:
    """The line that gives the model TRL's head; empty without."""
    return _FUSE_HEAD if recipe.fused_lm_head else ""


def loading(plan: Plan, place: str = "") -> str:
    """The model out of its files. place: the variable of the device to which weights that stay whole go straight."""
    recipe = plan.recipe
    bits = FOUR_BITS.format(storage=STORAGE if recipe.stage else "") if recipe.method == "qlora" else ""
    return f"""{repeat_kv(plan)}model = AutoModelForCausalLM.from_pretrained(
    args.model,
    dtype=dtype,
    trust_remote_code=False,
{bits}{device_map(recipe, place)})
"""


def device_map(recipe: Recipe, place: str) -> str:
    """The line that says where `from_pretrained` puts the weights; empty for transformers' own choice. See `loading`.

    FSDP2 takes what it splits to the card piece by piece. 4-bit weights, whole on it, might not fit.
    """
    if recipe.stage:
        place = '"cpu"' if recipe.method == "qlora" else ""
    return f'    device_map={{"": {place}}},\n' if place else ""


def trained_part(plan: Plan) -> str:
    """What is done to the model before it trains: a fused head, checkpointing, and the adapters on it."""
    found = fuse_head(plan.recipe) + checkpointing(plan)
    if upcasts(plan.recipe):
        found += "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n"
    return found + (f"{lora(plan)}model = get_peft_model(model, adapters)\n" if plan.recipe.method != "full" else "")


def upcasts(recipe: Recipe) -> bool:
    """Whether peft makes fp32 of what is not 4-bit."""
    return recipe.method == "qlora" and recipe.rest_in_fp32 and not recipe.stage


def of_launch(recipe: Recipe) -> dict[str, str]:
    """The lines of a script that accelerate.yaml splits: it refuses to begin without it."""
    return {"modules": "import os\n", "launched": LAUNCHED} if recipe.stage else {"modules": "", "launched": ""}


def lora(plan: Plan) -> str:
    """The adapters: peft's LoraConfig with the plan's arguments."""
    given = "".join(f"    {name}={literal(value)},\n" for name, value in lora_config(plan).items())
    return f"adapters = LoraConfig(\n{given})\n"


def from_peft(recipe: Recipe, *names: str) -> str:
    """The line that imports what adapters need; empty without them."""
    return f"from peft import {', '.join(names)}\n" if recipe.method != "full" else ""
