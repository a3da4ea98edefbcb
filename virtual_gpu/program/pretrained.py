"""transformers' `from_pretrained` without weights: the configuration says what they would be, and where they go."""

from __future__ import annotations

import os
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..host.meter import MAPPED
from ..language import tr
from ..models.build import unless_virtual
from ..models.configs import bundled, resolve_model_id
from ..rules.registry import version
from . import quantized
from .device import ProgramGPU
from .imports import Imports
from .patches import Patches
from .watch import Watch

SINCE = "4.56"  # of transformers
_FOR_THE_HUB = (
    "cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "trust_remote_code", "subfolder",
    "_from_pipeline", "_from_auto", "_commit_hash", "gguf_file", "code_revision", "user_agent",
)  # fmt: skip


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """Replace, in transformers, what looks for files of weights and reads them; the rest of its loading runs as it is.

    A configuration comes from a folder, from the bundled architectures, or from the hub and its cache.
    """

    of_files: dict[str, torch.dtype] = {}  # name → the type of the weights in its files, where its config says one

    def config(module: ModuleType) -> None:
        if not _is_followed():
            return
        kind = getattr(module, "PreTrainedConfig", None) or module.PretrainedConfig  # transformers 5, 4
        found = kind.get_config_dict.__func__

        def get_config_dict(cls: Any, name: Any, **kwargs: Any) -> tuple[dict, dict]:
            known, rest = _bundled(name), {key: value for key, value in kwargs.items() if key not in _FOR_THE_HUB}
            if known is None:
                known, rest = found(cls, name, **kwargs)
            named = getattr(torch, str(known.get("dtype") or known.get("torch_dtype")), None)
            of_files[str(name)] = named if isinstance(named, torch.dtype) else torch.float32
            return known, rest

        patches.set(kind, "get_config_dict", classmethod(get_config_dict))

    def models(module: ModuleType) -> None:
        if not _is_followed():
            return
        get_dtype, kind = module._get_dtype, module.PreTrainedModel
        in_five = hasattr(module, "LoadStateDictInfo")

        def dtype_of(*args: Any) -> Any:
            *cls, dtype, files, config = args[:3] if in_five else args[:4]
            if dtype == "auto" and getattr(config, "dtype", None) is None:
                name = config.name_or_path or config.model_type
                watch.note(
                    tr(
                        ko=f"{name}: 설정에 dtype이 없어 float32로 두었다",
                        en=f"{name}: its configuration names no dtype: float32",
                    )
                )
                dtype = torch.float32
            return get_dtype(*cls, dtype, files, config, *args[len(cls) + 3 :])

        def load(model: Any, state_dict: Any, files: Any, load_config: Any, expected_keys: Any = None) -> Any:
            _place(module, model, load_config, watch.gpu, of_files.get(str(model.config.name_or_path), torch.float32))
            kept = {"error_msgs": list, "conversion_errors": dict}
            names = [field.name for field in fields(module.LoadStateDictInfo)]
            info = module.LoadStateDictInfo(**{name: kept.get(name, set)() for name in names})
            return info, None

        def load_in_four(cls: Any, model: Any, state_dict: Any, files: Any, name: Any, **how: Any) -> tuple:
            stays = how.get("keep_in_fp32_regex")
            for called, parameter in model.named_parameters() if stays is not None else ():
                if stays.search(called):
                    parameter.data = parameter.data.to(torch.float32)
            device_map, quantizer = how.get("device_map"), how.get("hf_quantizer")
            load_config = SimpleNamespace(
                device_map=device_map, hf_quantizer=quantizer, dtype_plan=None, weight_mapping=None,
                # it has the file read to the one device that there is, and casts there
                casts_on_the_device=quantizer is None and list(device_map or {}) == [""],
            )  # fmt: skip
            _place(module, model, load_config, watch.gpu, of_files.get(str(name), torch.float32))
            return model, [], [], [], None, []

        patches.set(module, "_get_dtype", dtype_of)
        if in_five:
            patches.set(module, "_get_resolved_checkpoint_files", lambda *args, **kwargs: (None, None))
            patches.set(kind, "_load_pretrained_model", staticmethod(load))
            patches.set(kind, "_finalize_model_loading", staticmethod(lambda model, load_config, info: info))
        else:
            patches.set(module, "_get_resolved_checkpoint_files", lambda *args, **kwargs: ([""], None))
            patches.set(kind, "_load_pretrained_model", classmethod(load_in_four))
        for name in ("resolve_revision", "maybe_load_adapters", "find_adapter_config_file"):
            _local_first(patches, module, name)

    def generation(module: ModuleType) -> None:
        if not hasattr(module.GenerationMixin, "adjust_generation_fn"):
            return
        adjust = module.GenerationMixin.adjust_generation_fn

        def adjust_generation_fn(model: Any, config: Any, auto: Any, pipeline: Any, name: Any, **kwargs: Any) -> None:
            if _bundled(name) is None:
                adjust(model, config, auto, pipeline, name, **kwargs)

        patches.set(module.GenerationMixin, "adjust_generation_fn", adjust_generation_fn)

    def auto(module: ModuleType) -> None:
        for name in ("resolve_revision", "find_adapter_config_file"):
            _local_first(patches, module, name)

    def tokenizers(module: ModuleType) -> None:
        kind = module.PreTrainedTokenizerBase
        made = kind._from_pretrained.__func__

        def from_files(cls: Any, files: dict, name: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(files.values()) and not os.path.isdir(str(name)):
                raise OSError(_no_tokenizer(name))
            return made(cls, files, name, *args, **kwargs)

        patches.set(kind, "_from_pretrained", classmethod(from_files))

    def diffusers(module: ModuleType) -> None:
        def from_pretrained(cls: Any, name: Any, *, torch_dtype: Any = None, **kwargs: Any) -> Any:
            kwargs = {key: value for key, value in kwargs.items() if key in ("subfolder", "revision", "cache_dir")}
            model = cls.from_config(cls.load_config(name, **kwargs))
            return (model if torch_dtype is None else model.to(torch_dtype)).eval()

        patches.set(module.ModelMixin, "from_pretrained", classmethod(from_pretrained))

    # bitsandbytes keeps a table on the device that it quantized on first: a run's own ends with the run
    imports.after("bitsandbytes.functional", lambda module: patches.set(module, "name2qmap", {}))
    # and what the Trainer asks for the embeddings' state, which it would apply to every optimizer of later programs
    optimizers = "bitsandbytes.optim.optimizer"
    imports.after(optimizers, lambda module: patches.set(module.GlobalOptimManager, "_instance", None))
    imports.after("diffusers.models.modeling_utils", diffusers)
    imports.after("transformers.configuration_utils", config)
    imports.after("transformers.utils.import_utils", lambda module: _run_as_eager(patches, module))
    imports.after("transformers.modeling_utils", models)
    imports.after("transformers.tokenization_utils_base", tokenizers)
    imports.after("transformers.generation.utils", generation)
    imports.after("transformers.models.auto.auto_factory", auto)
    imports.after("transformers.models.auto.configuration_auto", lambda m: _local_first(patches, m, "resolve_revision"))


def _no_tokenizer(name: Any) -> str:
    """Without its files transformers 5 makes a tokenizer all the same, by which every text has no token."""
    return tr(
        ko=f"{name}의 토크나이저가 이 컴퓨터에 없고, 허브에서도 받지 못했다(네트워크가 없거나 HF_HUB_OFFLINE이다). "
        f"virtual_gpu에는 설정만 들어 있다. 네트워크가 있을 때 한 번 받아 두거나(hf download {name} "
        '--include "*token*" "vocab*" "merges*") 토크나이저가 든 폴더를 준다.',
        en=f"The tokenizer of {name} is not on this machine and the hub gave none (no network, or HF_HUB_OFFLINE). "
        "virtual_gpu brings its configuration, not its tokenizer: fetch it once where there is a network (hf download "
        f'{name} --include "*token*" "vocab*" "merges*"), or name a folder that has one.',
    )


def _is_followed() -> bool:
    """Whether this transformers loads as is known here; an earlier one reads its files, and all of it runs as it is."""
    import transformers

    return version(transformers.__version__) >= version(SINCE)


def _run_as_eager(patches: Patches, module: ModuleType) -> None:
    is_fake_tensor = getattr(module, "is_fake_tensor", None)
    if is_fake_tensor is not None:
        patches.set(module, "is_fake_tensor", unless_virtual(is_fake_tensor))


def _bundled(name: Any) -> dict | None:
    """A configuration that comes with the instrument; folders go before it."""
    if name is None or os.path.isdir(str(name)):
        return None
    entry = bundled(resolve_model_id(str(name)))
    if entry is None:
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    # a config.json of the hub names its class, and TRL loads a reference model by that
    named = CLASSES.get(entry["config"]["model_type"])
    return {"dtype": entry["dtype"], **({"architectures": [named]} if named else {}), **entry["config"]}


def _local_first(patches: Patches, module: ModuleType, name: str) -> None:
    """Do not ask the hub about what is bundled."""
    ask = getattr(module, name, None)
    if ask is None:
        return

    def asked(model: Any, *args: Any, **kwargs: Any) -> Any:
        if _bundled(model) is None:
            return ask(model, *args, **kwargs)
        if name == "resolve_revision":
            return args[0] if args else kwargs.get("revision")
        return (None, model, {}) if name == "maybe_load_adapters" else None

    patches.set(module, name, asked)


def _place(module: ModuleType, model: Any, load_config: Any, gpu: ProgramGPU, of_file: torch.dtype) -> None:
    """Give every meta tensor of a model its place by the device map; without one, on the CPU, untouched zeros.

    On the host the files are mapped while they are read. What stays on the CPU in the files' type stays a page of them
    (transformers 5, core_model_loading.py, `_materialize_copy`), anything else is a copy in RAM.
    """
    device_map = load_config.device_map
    model.tie_weights()  # what is tied is not in the files, and has no place of its own
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    places = module.expand_device_map(device_map, names) if device_map else dict.fromkeys(names, torch.device("cpu"))
    if device_map:
        read = module.expand_device_map(device_map, list(model.state_dict()))
        module.caching_allocator_warmup(model, read, load_config.hf_quantizer)
    in_files = sum(
        _here(p).numel() * (of_file if p.is_floating_point() else p.dtype).itemsize for p in model.parameters()
    )
    reading = gpu.host.meter.allocate(in_files, MAPPED)
    still_of_files: list[torch.Tensor] = []
    placed: dict[int, torch.Tensor] = {}
    for name in _in_loading_order(model, load_config):
        tensor = model.get_parameter_or_buffer(name)
        if tensor.device.type != "meta":
            continue
        path, _, own_name = name.rpartition(".")
        part, device = model.get_submodule(path), torch.device(places[name])
        is_parameter = own_name in part._parameters
        dtype = _dtype(name, tensor, load_config) if is_parameter else tensor.dtype
        if own_name == "weight" and quantized.kept_tensors(part):
            value = quantized.quantize(part, tensor, device)
        elif device.type == "cpu":
            maps = is_parameter and dtype == of_file
            kind = None if maps else "parameters" if is_parameter else "buffers"
            value = gpu.host.unwritten(_here(tensor).shape, dtype, kind)
            if maps:
                still_of_files.append(value)
        else:
            read = of_file if is_parameter and getattr(load_config, "casts_on_the_device", False) else dtype
            value = torch.zeros(_here(tensor).shape, dtype=read, device=device).to(dtype)
        if isinstance(tensor, DTensor):
            value = DTensor.from_local(
                value, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                stride=tensor.stride(),
            )  # fmt: skip
        if is_parameter:
            value = torch.nn.Parameter(value, tensor.requires_grad and value.is_floating_point())
            quantized.know(value, part, own_name)
        placed[id(tensor)] = value
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: placed[id(tensor)] for name, tensor in tensors.items() if id(tensor) in placed})
    gpu.host.meter.free(reading)
    for value in still_of_files:
        gpu.host.count(value, MAPPED, unfilled=True)
    model.tie_weights()


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that several ranks share (`distributed_config`) this rank's part, which is all that it reads."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _in_loading_order(model: Any, load_config: Any) -> list[str]:
    """The names of a model's parameters and buffers as transformers 5 gives them their places; 4, as a file has them.

    By the names that they have in the files, whose numbers count as numbers; what no file holds comes at the end.
    Source: convert_and_load_state_dict_in_model and dot_natural_key in transformers/core_model_loading.py,
    _move_missing_keys_from_meta_to_device in modeling_utils.py; an H100's loading (benchmarks/claims) asked so.
    """
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    saved = model.state_dict().keys()
    try:
        from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return sorted(names, key=lambda name: (name not in saved, name))

    mapping = load_config.weight_mapping or []
    to_files = [entry.reverse_transform() for entry in reversed(mapping) if isinstance(entry, WeightRenaming)]

    def place(name: str) -> tuple:
        return name not in saved, dot_natural_key(rename_source_key(name, to_files, [])[0])

    return sorted(names, key=place)


def _dtype(name: str, tensor: torch.Tensor, load_config: Any) -> torch.dtype:
    for part, dtype in (load_config.dtype_plan or {}).items():
        if part in name.split("."):
            return dtype
    return tensor.dtype
