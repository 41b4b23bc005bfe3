"""Peaks of accelerators and FLOPs per token, for MFU and for the time bound of `plan`.

Peaks are dense, bandwidths nominal. The comments name the published source of each figure. Check the current edition
before you rely on one, above all for h20, b300, gb200 and gb300.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchtitan_lite.config.schema import Config, ModelConfig
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.models import Transformer


def multiplied_parameters(model: Transformer) -> int:
    """Parameters that each token is multiplied with: all but embedding tables that are not also the output.

    Of experts (E, M, N), only those that compute the token.
    """
    looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} - {model.output.weight}
    return active_parameters(model) - sum(p.numel() for p in looked_up)


def active_parameters(model: Transformer) -> int:
    """Parameters without those of experts that do not compute a token."""
    of_experts = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    idle = of_experts - of_experts * model.config.experts_per_token // model.config.n_experts
    return sum(p.numel() for p in model.parameters()) - idle


def flops_per_token(model: Transformer, seq_len: int, target_len: int = 0) -> int:
    """FLOPs of forward and backward for one token, without recomputation.

    Of an encoder-decoder, for one of the `target_len` targets: see `_of_encoder_decoder`.

    6 (N - N_embedding) + 12 L H Q T: 2 per matrix entry, and twice that in backward; then attention with L layers,
    H heads of width Q and T = seq_len, as if not causal. (PaLM, appendix B, arXiv 2204.02311; as in torchtitan. Tied
    embeddings count, because they are multiplied with, and of experts those that compute the token.) In a layer with a
    window, T is at most the window. Layers of the kind delta add their products: see models/gated_delta.py.
    """
    config = model.config
    if len(config.stacks) > 1:
        return _of_encoder_decoder(model, seq_len, target_len or seq_len) // (target_len or seq_len)
    windows = [window for window, kind in zip(config.windows, config.layer_kinds, strict=True) if kind != "delta"]
    seen = sum(min(window or seq_len, seq_len) for window in windows)
    attention = 12 * config.n_heads * config.dim_of_heads * seen
    recurrences = sum(getattr(module, "flops_per_token", 0) for module in model.layers.modules())
    return 6 * multiplied_parameters(model) + attention + recurrences


def _of_encoder_decoder(model: Transformer, n: int, m: int) -> int:
    """FLOPs of forward and backward for n inputs and m targets, without recomputation.

    6 (N_encoder n + N_source n + N_decoder m) + 12 H Q (L_encoder n^2 + L_decoder (m^2 + n m)): N_source are the
    matrices of keys and values of the attention to the encoder's output, which its n outputs are multiplied with, and
    N_decoder all others of the decoder, and the head. Attention as if not causal.
    """
    config = model.config
    n_encoder, n_decoder = config.stacks
    on_inputs = sum(
        p.numel()
        for name, p in model.layers.named_parameters()
        if int(name.split(".")[0]) < n_encoder or ".cross_attention.wk." in name or ".cross_attention.wv." in name
    )
    on_targets = multiplied_parameters(model) - on_inputs
    scores = n_encoder * n * n + n_decoder * (m * m + n * m)
    return 6 * (on_inputs * n + on_targets * m) + 12 * config.n_heads * config.dim_of_heads * scores


def formula(model: ModelConfig) -> str:
    """What `flops_per_token` computes, for people."""
    if len(model.stacks) > 1:
        return "of the encoder's inputs and the decoder's targets, by target"
    notes = [", T at most the window"] if any(model.windows) else []
    notes += [", N active"] if model.has_experts else []
    notes += [", L those with attention, + H (18 K V + 64 (12 K + 10 V)) for each other"] * (
        "delta" in model.layer_kinds
    )
    return "6 (N - N_embedding) + 12 L H Q T" + "".join(notes)


@dataclass(frozen=True)
class Device:
    """One accelerator. Bandwidths are per device and direction, in bytes per second.

    Args:
        driver_name: a pattern for the driver's name, without maker and family. All of the name has to match: a suffix
            (PCIe, NVL, D, Laptop GPU, Max-Q, MIG 1g.10gb, 40GB) makes it another device with other figures.
        bf16: whether it has products of bfloat16; without, they are emulated, at the rate of float32 at best.
        tf32: whether torch computes float32 products in TF32 if it is asked to.
        sustained: share of the peak that very large products reach, fitted to published runs; None: there are none.
            Above 1 where the clock is above that of the datasheet.
    """

    name: str
    driver_name: str
    half_flops: float  # of float16 and bfloat16, dense, per second
    fp32_flops: float  # torch computes float32 products in float32 (no TF32), unless run.tf32 is true
    memory_gib: float  # as the driver reports
    memory_bandwidth: float
    intra_node: float  # between devices of a machine
    inter_node: float  # a device's share of the machine's network
    per_node: int = 8
    bf16: bool = True
    tf32: bool = True
    sustained: float | None = None

    @property
    def tf32_flops(self) -> float:
        """FLOPs per second in TF32: half of bfloat16's in every datasheet since Ampere's."""
        return self.half_flops / 2 if self.tf32 and self.bf16 else self.fp32_flops

    def computing(self, config: Config) -> "Device":
        """With the peaks at which a run of this config computes."""
        emulated = config.fsdp.param_dtype == "bfloat16" and not self.bf16
        return replace(
            self,
            half_flops=self.fp32_flops if emulated else self.half_flops,
            fp32_flops=self.tf32_flops if config.run.tf32 else self.fp32_flops,
        )

    def peak_flops(self, dtype: str) -> float:
        """FLOPs per second of products of this dtype, e.g. "bfloat16"."""
        return self.fp32_flops if dtype == "float32" else self.half_flops


def _row(
    name: str, driver_name: str, half: float, fp32: float, gib: float, memory: float, intra: float, inter: float,
    **more: Any,
) -> Device:  # fmt: skip
    """A row of the table: TFLOP/s of 16-bit and of float32 products, GiB, then GB/s of memory, links and network."""
    return Device(name, driver_name, half * 1e12, fp32 * 1e12, gib, memory * 1e9, intra * 1e9, inter * 1e9, **more)


# Network: one port per GPU of 400 Gbit/s (50 GB/s); 800 for b300 and gb300, 200 for a100, 50 for v100 (datasheets of
# NVIDIA DGX and AMD platforms of 8). PCIe cards: 16 lanes, as NVLink bridges span only 2 or 4 cards, and a shared 100
# Gbit/s port. A machine is what NVLink spans: 72 GPUs for gb200 and gb300.
_PCIE3, _PCIE4, _PCIE5, _PORT = 16, 32, 64, 12.5 / 8
DEVICES = {
    d.name: d
    for d in (
        # NVIDIA A100 datasheet (2021), SXM4 80 GB: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways
        _row("a100", r"a100[- ]sxm4?[- ]80 ?gb|a100 80 ?gb", 312, 19.5, 79.3, 2039, 300, 25, sustained=0.76),
        # NVIDIA H100 datasheet (2023), SXM: 989 TFLOPS (half of the sparse), 3.35 TB/s, NVLink 900 GB/s both ways
        _row("h100", r"h100( sxm5?)?( 80 ?gb)?( hbm3)?", 989, 67, 79.6, 3350, 450, 50, sustained=0.62),
        # NVIDIA H200 datasheet (2024), SXM: as H100, 141 GB at 4.8 TB/s
        _row("h200", r"h200( sxm5?)?( 141 ?gb)?( hbm3e)?", 989, 67, 140.4, 4800, 450, 50, sustained=0.72),
        # NVIDIA GH200 datasheet (2024), 96 GB HBM3: as H100, 4 TB/s; one GPU a machine, NVLink goes to its CPU
        _row("gh200", r"gh200( 480gb)?", 989, 67, 95.0, 4000, 50, 50, per_node=1, sustained=0.62),
        # NVIDIA DGX B200 datasheet (2024), an eighth: 2.25 PFLOPS, 180 GB at 8 TB/s, NVLink 1.8 TB/s both ways
        _row("b200", r"b200( 180 ?gb)?", 2250, 75, 179.0, 8000, 900, 50),
        # NVIDIA DGX B300 and HGX B300 datasheets (2025), an eighth: 2.25 PFLOPS, 288 GB (270 usable) at 8 TB/s
        _row("b300", r"b300( sxm6( ac)?)?( 288 ?gb)?", 2250, 75, 268.0, 8000, 900, 100),
        # NVIDIA GB200 NVL72 datasheet (2024), a 72nd: 2.5 PFLOPS (half of the sparse), 186 GB at 8 TB/s
        _row("gb200", r"gb200", 2500, 80, 185.0, 8000, 900, 50, per_node=72),
        # NVIDIA GB300 NVL72 datasheet (2025), a 72nd: 2.5 PFLOPS (half of the sparse), 279 GB at 8 TB/s
        _row("gb300", r"gb300", 2500, 80, 277.0, 8000, 900, 100, per_node=72),
        # AMD Instinct MI300X datasheet (2023): 1,307.4 TFLOPS, 192 GiB at 5.3 TB/s, 7 links of 128 GB/s both ways. "VF"
        # is a whole GPU in a virtual machine. (TF32 is left out: hipBLASLt needs a switch of its own for it.)
        _row(
            "mi300x", r"mi300x( oam| vf)?( 192 ?gb)?", 1307.4, 163.4, 191.9, 5300, 448, 50, tf32=False, sustained=0.31
        ),
        # AMD Instinct MI325X datasheet (2024): as MI300X, 256 GiB at 6 TB/s
        _row("mi325x", r"mi325x( oam| vf)?( 256 ?gb)?", 1307.4, 163.4, 255.9, 6000, 448, 50, tf32=False),
        # AMD Instinct MI350X and MI355X datasheets (2025): 2.3 and 2.5 PFLOPS, 288 GiB at 8 TB/s, 7 links of 153.6 GB/s
        _row("mi350x", r"mi350x( oam| vf)?( 288 ?gb)?", 2306.9, 144.2, 287.9, 8000, 537.6, 50, tf32=False),
        _row("mi355x", r"mi355x( oam| vf)?( 288 ?gb)?", 2516.6, 157.3, 287.9, 8000, 537.6, 50, tf32=False),
        # A100 datasheets (2020, 2021): 40 GB at 1,555 GB/s; PCIe 80 GB at 1,935 GB/s, PCIe 4.0 x16 64 GB/s both ways
        _row("a100-40gb", r"a100[- ]sxm4?[- ]40 ?gb", 312, 19.5, 39.4, 1555, 300, 25, sustained=0.76),
        _row("a100-pcie", r"a100 80 ?gb pcie", 312, 19.5, 79.3, 1935, _PCIE4, _PORT),
        _row("a100-pcie-40gb", r"a100[- ]pcie[- ]40 ?gb", 312, 19.5, 39.4, 1555, _PCIE4, _PORT),
        # H100 datasheet (2022), PCIe: 756 TFLOPS (half of the sparse), 2 TB/s, PCIe 5.0 x16 128 GB/s both ways
        _row("h100-pcie", r"h100 pcie( 80 ?gb)?", 756, 51, 79.6, 2000, _PCIE5, _PORT),
        # H100 datasheet (2024), NVL: 835 TFLOPS (half of the sparse), 94 GB at 3.9 TB/s
        _row("h100-nvl", r"h100 nvl( 94 ?gb)?", 835, 60, 93.6, 3900, _PCIE5, _PORT),
        # H200 datasheet (2024), NVL: as H100 NVL, 141 GB at 4.8 TB/s
        _row("h200-nvl", r"h200 nvl( 141 ?gb)?", 835, 60, 140.4, 4800, _PCIE5, _PORT),
        # NVIDIA H20, no public datasheet; as the trade press quotes it: 148 TFLOPS, 96 GB at 4 TB/s, NVLink as H100
        _row("h20", r"h20( 96 ?gb)?", 148, 44, 95.6, 4000, 450, 50),
        # NVIDIA L40S (2023), L40 (2022) and L4 (2023) datasheets: 362, 181.05 and 121 TFLOPS (half of the sparse), 864,
        # 864 and 300 GB/s, PCIe 4.0 x16 64 GB/s both ways
        _row("l40s", r"l40s( 48 ?gb)?", 362, 91.6, 45.0, 864, _PCIE4, _PORT),
        _row("l40", r"l40( 48 ?gb)?", 181.05, 90.5, 45.0, 864, _PCIE4, _PORT),
        _row("l4", r"l4( 24 ?gb)?", 121, 30.3, 22.5, 300, _PCIE4, _PORT),
        # NVIDIA A40, A30 and A10 datasheets (2021), dense: 149.7, 165 and 125 TFLOPS, 696, 933 and 600 GB/s, PCIe 4.0
        _row("a40", r"a40( 48 ?gb)?", 149.7, 37.4, 45.0, 696, _PCIE4, _PORT),
        _row("a30", r"a30( 24 ?gb)?", 165, 10.3, 23.6, 933, _PCIE4, _PORT),
        _row("a10", r"a10( 24 ?gb)?", 125, 31.2, 22.5, 600, _PCIE4, _PORT),
        # NVIDIA A10G datasheet for AWS (2021): 70 TFLOPS, 600 GB/s
        _row("a10g", r"a10g( 24 ?gb)?", 70, 35, 22.5, 600, _PCIE4, _PORT),
        # NVIDIA RTX Blackwell PRO whitepaper (2025), RTX PRO 6000 Workstation Edition: 503.8 TFLOPS, 96 GB at
        # 1,792 GB/s, PCIe 5.0 x16 128 GB/s both ways
        _row(
            "rtxpro6000",
            r"rtx pro 6000 blackwell workstation edition",
            503.8,
            125,
            95.6,
            1792,
            _PCIE5,
            _PORT,
            sustained=0.82,
        ),
        # NVIDIA RTX 6000 Ada datasheet (2022): 1,457 TFLOPS of sparse float8, a quarter of it; 960 GB/s
        _row("rtx6000ada", r"rtx 6000 ada generation", 364.25, 91.1, 48.0, 960, _PCIE4, _PORT),
        # NVIDIA Ampere GA102 whitepaper (2021): 154.8 and 71 TFLOPS with fp32 accumulation, 768 and 936 GB/s
        _row("rtxa6000", r"rtx a6000", 154.8, 38.7, 48.0, 768, _PCIE4, _PORT),
        _row("rtx3090", r"rtx 3090( 24 ?gb)?", 71, 35.6, 24.0, 936, _PCIE4, _PORT),
        # NVIDIA RTX Blackwell whitepaper (2025): 209.5 TFLOPS with fp32 accumulation, 32 GB at 1,792 GB/s, PCIe 5.0 x16
        _row("rtx5090", r"rtx 5090( 32 ?gb)?", 209.5, 104.8, 31.8, 1792, _PCIE5, _PORT),
        # NVIDIA Ada architecture whitepaper (2022): 165.2 TFLOPS with fp32 accumulation, 1,008 GB/s, PCIe 4.0 x16
        _row("rtx4090", r"rtx 4090( 24 ?gb)?", 165.2, 82.6, 24.0, 1008, _PCIE4, _PORT, sustained=1.04),
        # NVIDIA V100 datasheet (2020), float16: SXM2 125 TFLOPS, 900 GB/s, NVLink 300 GB/s both ways; PCIe 112 TFLOPS
        _row("v100", r"v100-sxm2-32 ?gb", 125, 15.7, 31.7, 900, 150, 6.25, bf16=False),
        _row("v100-16gb", r"v100-sxm2-16 ?gb", 125, 15.7, 15.8, 900, 150, 6.25, bf16=False),
        _row("v100-pcie", r"v100-pcie-32 ?gb", 112, 14, 31.7, 900, _PCIE3, _PORT, bf16=False),
        _row("v100-pcie-16gb", r"v100-pcie-16 ?gb", 112, 14, 15.8, 900, _PCIE3, _PORT, bf16=False),
        # NVIDIA T4 datasheet (2019), float16: 65 TFLOPS, 320 GB/s, PCIe 3.0 x16 32 GB/s both ways
        _row("t4", r"t4( 16 ?gb)?", 65, 8.1, 14.7, 320, _PCIE3, _PORT, bf16=False),
    )
}


def named(reported: str) -> Device | None:
    """The device with this driver name, e.g. "NVIDIA H100 80GB HBM3"; None if unknown or ambiguous."""
    text = re.sub(r"^(nvidia |amd )?(geforce |instinct |tesla )?", "", " ".join(reported.lower().split()))
    return next((device for device in DEVICES.values() if re.fullmatch(device.driver_name, text)), None)


def peak_flops(config: Config, world: World) -> float:
    """Nominal FLOPs per second of all devices of a run in its dtype; 0 if unknown."""
    if config.run.peak_tflops:
        return world.world_size * config.run.peak_tflops * 1e12
    device = named(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    return 0.0 if device is None else world.world_size * device.computing(config).peak_flops(config.fsdp.param_dtype)


def start_lines(config: Config, world: World) -> list[str]:
    """What the start of a run on a GPU says about the speed of its products, and about MFU."""
    slow = slow_products(
        world.device,
        config.fsdp.param_dtype,
        tf32=config.run.tf32,
        options=("--mixed-precision", "run.tf32 = true", 'fsdp.param_dtype = "float16"'),
    )
    lines = [f"run     {slow}"] if slow else []
    if config.data.objective != "pairs" and not peak_flops(config, world):
        name = torch.cuda.get_device_name(world.device)
        lines.append(
            f"run     MFU is not logged: the peak of {name} is not known; run.peak_tflops = its dense TFLOP/s gives it"
        )
    return lines


def slow_products(gpu: torch.device, dtype: str, *, tf32: bool, options: tuple[str, str, str]) -> str:
    """Why products of a dtype are slower than they could be on this GPU, and the fix; empty if they are not.

    Args:
        options: for bfloat16, for TF32 and for float16.
    """
    name = torch.cuda.get_device_name(gpu)
    device = named(name)
    before_ampere = not torch.version.hip and torch.cuda.get_device_capability(gpu) < (8, 0)
    if dtype == "bfloat16" and before_ampere:
        return f"{name} emulates bfloat16, no faster than float32; {options[2]} uses its tensor cores"
    has_tf32 = not before_ampere and not torch.version.hip and (device is None or device.tf32)
    if dtype != "float32" or (tf32 and has_tf32):
        return ""
    rates = (
        f"at {device.fp32_flops / 1e12:g} of {device.half_flops / 1e12:g} TFLOP/s" if device else "without tensor cores"
    )
    fixes = [options[2]] if before_ampere else [options[0], *([options[1]] if has_tf32 else [])]
    return f"float32 products run {rates}; {' or '.join(fixes)} is faster"
