"""Published facts of common GPUs: memory, compute capability, tensor-core rate and memory bandwidth.

Where the numbers come from, and what they leave open:

- ``memory_bytes`` is what PyTorch calls ``total_memory`` and an out-of-memory message calls "total capacity". It moves
  by some tens of MiB with the driver and with ECC (a T4: 14.56 to 14.76 GiB); one published value is kept.
- ``usable_bytes`` is ``memory_bytes`` less what the process holds outside PyTorch (the CUDA context, loaded kernels):
  "this process has A GiB in use" less "B allocated by PyTorch" less "C reserved but unallocated" of one published
  message. Such messages round to 0.01 GiB, and the context differs with CUDA version and kernels loaded.
- Rates are dense, without structured sparsity, and for a sum kept in fp32, which is how PyTorch trains; they and the
  bandwidth were read in pages that quote the vendor's datasheet, named beside it. None: no published value was found.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1024**2


@dataclass(frozen=True)
class GPUSpec:
    """One GPU: memory in bytes, rates in dense TFLOP/s, bandwidth in bytes a second, and a source for each group."""

    name: str
    device_name: str
    memory_bytes: int
    usable_bytes: int | None
    compute_capability: tuple[int, int]
    fp16_tflops: float | None
    bf16_tflops: float | None
    bandwidth_bytes_per_s: int
    source: tuple[str, ...]

    @property
    def capacity_bytes(self) -> int:
        """Bytes that PyTorch can allocate: the usable ones where they were published, else all."""
        return self.usable_bytes or self.memory_bytes


CATALOG: dict[str, GPUSpec] = {
    "T4": GPUSpec(
        name="T4",
        device_name="Tesla T4",
        memory_bytes=15_828_320_256,
        usable_bytes=15_828_320_256 - 100 * _MIB,
        compute_capability=(7, 5),
        fp16_tflops=65.0,
        bf16_tflops=None,
        bandwidth_bytes_per_s=320_000_000_000,
        source=(
            "memory: device queries on Colab, 15828320256 bytes = 15095 MiB = 14.74 GiB; nvidia-smi says 15360 MiB: "
            "https://github.com/robbyant-research/MagicQuill/issues/57",
            "usable: 14.67 GiB in use, 14.55 GiB allocated, 23.38 MiB reserved on a Colab T4: "
            "https://github.com/hpcaitech/Open-Sora/issues/697",
            "rate, bandwidth: 65 TFLOP/s, 320 GB/s (Turing has no bf16 tensor cores): "
            "https://sysrqmts.com/en/gpus/nvidia/tesla/t4, after NVIDIA's T4 datasheet",
        ),
    ),
    "L4": GPUSpec(
        name="L4",
        device_name="NVIDIA L4",
        memory_bytes=22_559 * _MIB,
        usable_bytes=22_559 * _MIB - 251 * _MIB,
        compute_capability=(8, 9),
        fp16_tflops=121.0,
        bf16_tflops=121.0,
        bandwidth_bytes_per_s=300_000_000_000,
        source=(
            "memory: 'total capacity of 22.03 GiB' in several published messages of an L4, to the nearest 5 MiB; no "
            "exact byte count found",
            "usable: 21.96 GiB in use, 21.65 GiB allocated, 66.83 MiB reserved, capacity 22.03 GiB, on Kaggle's "
            "L4 (run log in a public GitHub repository; address not recorded)",
            "rate, bandwidth: 242 TFLOP/s with sparsity, hence 121 dense, 300 GB/s: "
            "https://grokipedia.com/page/NVIDIA_L4_vs_L40S, after NVIDIA's L4 datasheet",
        ),
    ),
    "A100-40GB": GPUSpec(
        name="A100-40GB",
        device_name="NVIDIA A100-SXM4-40GB",
        memory_bytes=42_405_855_232,
        usable_bytes=42_405_855_232 - 501 * _MIB,
        compute_capability=(8, 0),
        fp16_tflops=312.0,
        bf16_tflops=312.0,
        bandwidth_bytes_per_s=1_555_000_000_000,
        source=(
            "memory: device queries, 42405855232 bytes = 40441 MiB = 39.49 GiB (39.38 to 39.56 GiB elsewhere)",
            "usable: 14.25 GiB in use, 12.87 GiB allocated, 912.01 MiB reserved, capacity 39.50 GiB: "
            "https://github.com/TianheWu/CoSeR/issues/10",
            "rate, bandwidth: 312 TFLOP/s, 1.555 TB/s: https://glennklockwood.com/garden/processors/A100, after "
            "NVIDIA's A100 datasheet",
        ),
    ),
    "A100-80GB": GPUSpec(
        name="A100-80GB",
        device_name="NVIDIA A100-SXM4-80GB",
        memory_bytes=85_097_971_712,
        usable_bytes=85_097_971_712 - 409 * _MIB,
        compute_capability=(8, 0),
        fp16_tflops=312.0,
        bf16_tflops=312.0,
        bandwidth_bytes_per_s=2_039_000_000_000,
        source=(
            "memory: device queries of an A100 80GB (PCIe), 85097971712 bytes = 79.25 GiB (from 79.14 elsewhere)",
            "usable: 16.54 GiB in use, 15.94 GiB allocated, 205.65 MiB reserved, capacity 79.25 GiB: "
            "https://github.com/HiDream-ai/VAREdit/issues/6",
            "rate, bandwidth: 312 TFLOP/s, 2.039 TB/s (SXM; PCIe has 1.935): "
            "https://www.thundercompute.com/blog/nvidia-a100-specs-full-guide, "
            "https://glennklockwood.com/garden/processors/A100, after NVIDIA's A100 datasheet",
        ),
    ),
    "H100": GPUSpec(
        name="H100",
        device_name="NVIDIA H100 80GB HBM3",
        memory_bytes=81_090 * _MIB,
        usable_bytes=81_090 * _MIB - 601 * _MIB,
        compute_capability=(9, 0),
        fp16_tflops=989.4,
        bf16_tflops=989.4,
        bandwidth_bytes_per_s=3_350_000_000_000,
        source=(
            "memory: get_device_properties of an H100 80GB HBM3 prints total_memory=81090MB = 79.19 GiB (79.11 GiB: "
            "https://github.com/vllm-project/vllm/issues/27508)",
            "usable: 79.13 GiB in use, 77.91 GiB allocated, 648.28 MiB reserved, capacity 79.19 GiB, on an H100 PCIe "
            "(run log in a public GitHub repository; address not recorded)",
            "rate, bandwidth: 989.4 TFLOP/s, 3.35 TB/s (SXM5): https://glennklockwood.com/garden/processors/h100, "
            "after NVIDIA's H100 datasheet",
        ),
    ),
    "H200": GPUSpec(
        name="H200",
        device_name="NVIDIA H200",
        memory_bytes=150_110_011_392,
        usable_bytes=150_110_011_392 - 522 * _MIB,
        compute_capability=(9, 0),
        fp16_tflops=989.4,
        bf16_tflops=989.4,
        bandwidth_bytes_per_s=4_800_000_000_000,
        source=(
            "memory: device queries, 150110011392 bytes = 143156 MiB = 139.80 GiB; nvidia-smi: 143771 MiB (measured)",
            "usable: 139.20 GiB in use, 2.05 GiB allocated, 136.64 GiB reserved, capacity 139.81 GiB (run log in a "
            "public GitHub repository; address not recorded)",
            "rate, bandwidth: 989 TFLOP/s, the H100's, 4.8 TB/s: "
            "https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html, after NVIDIA's H200 datasheet",
        ),
    ),
    "V100": GPUSpec(
        name="V100",
        device_name="Tesla V100-SXM2-16GB",
        memory_bytes=16_935_682_048,
        usable_bytes=16_935_682_048 - 383 * _MIB,
        compute_capability=(7, 0),
        fp16_tflops=125.0,
        bf16_tflops=None,
        bandwidth_bytes_per_s=900_000_000_000,
        source=(
            "memory: total_memory = 16935682048 in published code, the 15.77 GiB of published messages of a 16 GB card "
            "(older drivers: 16160 MB = 15.78 GiB)",
            "usable: 15.75 GiB in use, 14.89 GiB allocated, 497.13 MiB reserved, capacity 15.77 GiB (run log in a "
            "public GitHub repository, address not recorded, the card not named)",
            "rate: 125 TFLOP/s: https://developer.nvidia.com/programming-tensor-cores-cuda-9-0; bandwidth: 900 GB/s, "
            "as public code quotes NVIDIA's V100 datasheet (Volta has no bf16)",
        ),
    ),
    "RTX 3060": GPUSpec(
        name="RTX 3060",
        device_name="NVIDIA GeForce RTX 3060",
        memory_bytes=12_622_168_064,
        usable_bytes=12_466_913_280,
        compute_capability=(8, 6),
        fp16_tflops=None,
        bf16_tflops=None,
        bandwidth_bytes_per_s=360_000_000_000,
        source=(
            "memory: device query, 12622168064 bytes = 12037 MiB = 11.76 GiB (11.62 to 11.76 GiB elsewhere)",
            "usable: 12466913280 bytes free before the run, same report (in a public GitHub repository; "
            "address not recorded)",
            "rate: no dense figure with fp32 accumulation found published (NVIDIA advertises 101 tensor TFLOP/s, with "
            "sparsity); bandwidth: 360 GB/s: https://pcpartdb.com/gpus/view/nvidia-geforce-rtx-3060-12-gb-ga104",
        ),
    ),
    "RTX 3090": GPUSpec(
        name="RTX 3090",
        device_name="NVIDIA GeForce RTX 3090",
        memory_bytes=25_447_170_048,
        usable_bytes=25_447_170_048 - 304 * _MIB,
        compute_capability=(8, 6),
        fp16_tflops=71.0,
        bf16_tflops=71.0,
        bandwidth_bytes_per_s=936_000_000_000,
        source=(
            "memory: device queries, 25447170048 bytes = 24268 MiB = 23.70 GiB, and transformers' documentation "
            "(total_memory=24268MB)",
            "usable: 20.50 GiB in use, 20.02 GiB allocated, 187.61 MiB reserved on an RTX 3090: "
            "https://github.com/bytedance/X-Portrait/issues/7",
            "rate, bandwidth: 71 TFLOP/s with fp32 accumulation (142 with fp16), 936 GB/s, as public code and tables "
            "quote NVIDIA's GA102 whitepaper, appendix A; bf16 runs at fp16's rate",
        ),
    ),
    "RTX 4090": GPUSpec(
        name="RTX 4090",
        device_name="NVIDIA GeForce RTX 4090",
        memory_bytes=25_393_692_672,
        usable_bytes=25_393_692_672 - 504 * _MIB,
        compute_capability=(8, 9),
        fp16_tflops=165.2,
        bf16_tflops=165.2,
        bandwidth_bytes_per_s=1_008_000_000_000,
        source=(
            "memory: device queries, 25393692672 bytes = 24217 MiB = 23.65 GiB; nvidia-smi says 24564 MiB: "
            "https://github.com/RLinf/RLinf/issues/255",
            "usable: 14.56 GiB in use, 13.86 GiB allocated, 213.20 MiB reserved, capacity 23.64 GiB: "
            "https://github.com/3DTopia/Phidias-Diffusion/issues/8",
            "rate, bandwidth: 165.2 TFLOP/s with fp32 accumulation, 1008 GB/s: "
            "https://hmc-tech.com/gpus/nvidia-geforce-rtx-4090-vs-nvidia-rtx-pro-5000-blackwell",
        ),
    ),
    "RTX 5090": GPUSpec(
        name="RTX 5090",
        device_name="NVIDIA GeForce RTX 5090",
        memory_bytes=32_113 * _MIB,
        usable_bytes=32_113 * _MIB - 619 * _MIB,
        compute_capability=(12, 0),
        fp16_tflops=209.5,
        bf16_tflops=209.5,
        bandwidth_bytes_per_s=1_792_000_000_000,
        source=(
            "memory: 'total capacity of 31.36 GiB', to the nearest 5 MiB, no exact byte count found: "
            "https://github.com/TrajectoryCrafter/TrajectoryCrafter/issues/20",
            "usable: 26.89 GiB in use, 25.95 GiB allocated, 343.86 MiB reserved, same message (0.58 GiB outside: "
            "https://github.com/Wan-Video/Wan2.1/issues/465)",
            "rate: 209.5 TFLOP/s with fp32 accumulation: "
            "https://forums.developer.nvidia.com/t/rtx-5090-peak-bf16-tensor-tflops/350543; bandwidth: 1792 GB/s: "
            "https://www.spheron.network/blog/nvidia-rtx-5090-specs/",
        ),
    ),
}
