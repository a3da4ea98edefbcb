"""Models of diffusers, where it is installed: their own checkpoints, turned on from outside."""

import pytest

from virtual_gpu.program.runner import run

pytest.importorskip("diffusers")

PROGRAM = """
import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

unet = UNet2DConditionModel(
    sample_size=32, block_out_channels=(32, 64, 64, 64), cross_attention_dim=64, norm_num_groups=8, attention_head_dim=8
)
unet.cuda().train()
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
text = CLIPTextModel(CLIPTextConfig(**sizes)).cuda().requires_grad_(False)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
for _ in range(3):
    words = text(torch.ones(4, 77, dtype=torch.int64, device="cuda"))[0]
    noise = unet(torch.randn(4, 4, 32, 32, device="cuda"), torch.tensor([3] * 4, device="cuda"), words).sample
    noise.float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_checkpoints_are_the_models_own(tmp_path):
    """The one model that is trained, not the frozen one before it; and what its own line holds."""
    found = {}
    edited = PROGRAM.replace("unet.cuda()", "unet.enable_gradient_checkpointing()\nunet.cuda()")
    for name, text, changes in (
        ("plain", PROGRAM, ()),
        ("changed", PROGRAM, ("checkpointing",)),
        ("edited", edited, ()),
    ):
        (tmp_path / "train.py").write_text(text)
        found[name] = run(str(tmp_path / "train.py"), [], changes=changes)
        assert found[name].error is None
    assert found["changed"].changed == {"checkpointing": 1}
    assert found["changed"].phases == found["edited"].phases != found["plain"].phases


def test_its_line_is_what_is_proposed(tmp_path):
    """Where the memory runs out: no LoRA of causal models, and diffusers' own name for the switch."""
    text = PROGRAM.replace("import torch\n", "import torch\ntorch.cuda.set_per_process_memory_fraction(0.012)\n", 1)
    (tmp_path / "train.py").write_text(text)
    report = run(str(tmp_path / "train.py"), [])
    assert report.oom and report.trained.diffusers and not report.trained.own and not report.trained.causal
    report.tried = [{"status": "fits", "changes": ("checkpointing",)}]
    assert "PyTorch: model.enable_gradient_checkpointing()" in report.to_write
