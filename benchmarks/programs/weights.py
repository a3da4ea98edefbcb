"""python -m benchmarks.programs.weights FOLDER NAME: random weights for a configuration of `stand_ins`.

A virtual GPU reads no weights; a real one wants files. They are made on the card, as large as the true ones, and hold
what a fresh model of the architecture that the program loads holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

MODELS = {  # folder below FOLDER/work → the class of transformers that it is loaded as
    "gpt2": "AutoModelForCausalLM",
    "bert-base-cased": "AutoModelForSequenceClassification",
    "bert-one": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "qwen3-0.6b": "AutoModelForCausalLM",
    "meta-llama/Llama-3.2-3B": "AutoModelForCausalLM",
    "vit": "AutoModelForImageClassification",
    "sd15": "",
}


def make(folder: Path, name: str) -> None:
    """Write the weights of one of MODELS beside its configuration."""
    place, device = folder / "work" / name, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if name == "sd15":
        _stable_diffusion(place, device)
        return
    import transformers

    config = transformers.AutoConfig.from_pretrained(place)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    with device:
        model = getattr(transformers, MODELS[name]).from_config(config, dtype=dtype)
    model.tie_weights()
    kept = (place / "config.json").read_bytes()
    model.to("cpu").save_pretrained(place)
    (place / "config.json").write_bytes(kept)  # the very one that the virtual GPU reads


def _stable_diffusion(place: Path, device: torch.device) -> None:
    import diffusers
    import transformers

    text = place / "text_encoder"
    kept = (text / "config.json").read_bytes()
    with device:
        encoder = transformers.CLIPTextModel(transformers.CLIPTextConfig.from_pretrained(text))
    encoder.to("cpu").save_pretrained(text)
    (text / "config.json").write_bytes(kept)
    for part, kind in (("unet", diffusers.UNet2DConditionModel), ("vae", diffusers.AutoencoderKL)):
        kept = (place / part / "config.json").read_bytes()
        with device:
            model = kind.from_config(kind.load_config(place / part))
        model.to("cpu").save_pretrained(place / part)
        (place / part / "config.json").write_bytes(kept)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve(), sys.argv[2])
