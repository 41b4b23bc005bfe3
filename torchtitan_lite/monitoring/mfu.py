"""Peaks of accelerators and FLOPs per token, for MFU and for the time bound of `plan`.

Peaks are dense, bandwidths nominal. The comments name the published source of each figure. Check the current edition
before you rely on one, above all for b300, gb200 and gb300.
"""

import re
from dataclasses import dataclass

import torch
from torch import nn

from torchtitan_lite.config.schema import Config, ModelConfig
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.models import Transformer


def multiplied_parameters(model: Transformer) -> int:
    """Parameters that each token is multiplied with: all but embedding tables that are not also the output."""
    looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} - {model.output.weight}
    return sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in looked_up)


def flops_per_token(model: Transformer, seq_len: int, target_len: int = 0) -> int:
    """FLOPs of forward and backward for one token, without recomputation.

    Of an encoder-decoder, for one of the `target_len` targets: see `_of_encoder_decoder`.

    6 (N - N_embedding) + 12 L H Q T: 2 per matrix entry, and twice that in backward; then attention with L layers,
    H heads of width Q and T = seq_len, as if not causal. (PaLM, appendix B, arXiv 2204.02311; as in torchtitan. Tied
    embeddings count, because they are multiplied with.)
    """
    config = model.config
    if len(config.stacks) > 1:
        return _of_encoder_decoder(model, seq_len, target_len or seq_len) // (target_len or seq_len)
    attention = 12 * config.n_layers * config.n_heads * config.dim_of_heads * seq_len
    return 6 * multiplied_parameters(model) + attention


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
    return "6 (N - N_embedding) + 12 L H Q T"


@dataclass(frozen=True)
class Device:
    """One accelerator. Bandwidths are per device and direction, in bytes per second.

    Args:
        driver_name: a pattern for the driver's name, without maker and family. All of the name has to match: a suffix
            (PCIe, NVL, D, Laptop GPU, Max-Q, MIG 1g.10gb, 40GB) makes it another device with other figures.
        sustained: share of the peak that very large products reach, fitted to published runs; None: there are none.
    """

    name: str
    driver_name: str
    bf16_flops: float  # dense, per second; float16 is the same
    fp32_flops: float  # torch computes float32 products in float32 (no TF32) by default
    memory_gib: float  # as the driver reports
    memory_bandwidth: float
    intra_node: float  # between devices of a machine
    inter_node: float  # a device's share of the machine's network
    per_node: int = 8
    sustained: float | None = None

    def peak_flops(self, dtype: str) -> float:
        """FLOPs per second of products of this dtype, e.g. "bfloat16"."""
        return self.fp32_flops if dtype == "float32" else self.bf16_flops


# Network: one port per GPU of 400 Gbit/s (50 GB/s); 800 for b300 and gb300, 200 for a100 (datasheets of NVIDIA DGX and
# AMD platforms of 8). PCIe cards: 16 lanes, and a shared 100 Gbit/s port. A machine is what NVLink spans: 72 GPUs for
# gb200 and gb300.
DEVICES = {
    d.name: d
    for d in (
        # NVIDIA A100 datasheet (2021), SXM4 80 GB: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways
        Device(
            "a100", r"a100[- ]sxm4?[- ]80 ?gb|a100 80 ?gb", 312e12, 19.5e12, 79.3, 2.039e12, 300e9, 25e9, sustained=0.76
        ),
        # NVIDIA H100 datasheet (2023), SXM: 989 TFLOPS (half of the sparse), 3.35 TB/s, NVLink 900 GB/s both ways
        Device("h100", r"h100( sxm5?)?( 80 ?gb)?( hbm3)?", 989e12, 67e12, 79.6, 3.35e12, 450e9, 50e9, sustained=0.59),
        # NVIDIA H200 datasheet (2024), SXM: as H100, 141 GB at 4.8 TB/s
        Device("h200", r"h200( sxm5?)?( 141 ?gb)?( hbm3e)?", 989e12, 67e12, 140.4, 4.8e12, 450e9, 50e9, sustained=0.59),
        # NVIDIA GH200 datasheet (2024), 96 GB HBM3: as H100, 4 TB/s; one GPU a machine, NVLink goes to its CPU
        Device("gh200", r"gh200( 480gb)?", 989e12, 67e12, 95.0, 4e12, 50e9, 50e9, per_node=1, sustained=0.59),
        # NVIDIA DGX B200 datasheet (2024), an eighth: 2.25 PFLOPS, 180 GB at 8 TB/s, NVLink 1.8 TB/s both ways
        Device("b200", r"b200( 180 ?gb)?", 2250e12, 75e12, 179.0, 8e12, 900e9, 50e9),
        # NVIDIA DGX B300 and HGX B300 datasheets (2025), an eighth: 2.25 PFLOPS, 288 GB (270 usable) at 8 TB/s
        Device("b300", r"b300( sxm6( ac)?)?( 288 ?gb)?", 2250e12, 75e12, 268.0, 8e12, 900e9, 100e9),
        # NVIDIA GB200 NVL72 datasheet (2024), a 72nd: 2.5 PFLOPS (half of the sparse), 186 GB at 8 TB/s
        Device("gb200", r"gb200", 2500e12, 80e12, 185.0, 8e12, 900e9, 50e9, per_node=72),
        # NVIDIA GB300 NVL72 datasheet (2025), a 72nd: 2.5 PFLOPS (half of the sparse), 279 GB at 8 TB/s
        Device("gb300", r"gb300", 2500e12, 80e12, 277.0, 8e12, 900e9, 100e9, per_node=72),
        # AMD Instinct MI300X datasheet (2023): 1,307.4 TFLOPS, 192 GiB at 5.3 TB/s, 7 links of 128 GB/s both ways
        Device("mi300x", r"mi300x( oam)?( 192 ?gb)?", 1307.4e12, 163.4e12, 191.9, 5.3e12, 448e9, 50e9),
        # AMD Instinct MI325X datasheet (2024): as MI300X, 256 GiB at 6 TB/s
        Device("mi325x", r"mi325x( oam)?( 256 ?gb)?", 1307.4e12, 163.4e12, 255.9, 6e12, 448e9, 50e9),
        # NVIDIA L40S datasheet (2023): 362 TFLOPS, 864 GB/s, PCIe 4.0 x16 64 GB/s both ways
        Device("l40s", r"l40s( 48 ?gb)?", 362e12, 91.6e12, 45.0, 0.864e12, 32e9, 12.5e9 / 8),
        # NVIDIA RTX Blackwell PRO whitepaper (2025), RTX PRO 6000 Workstation Edition: 503.8 TFLOPS, 96 GB at
        # 1,792 GB/s, PCIe 5.0 x16 128 GB/s both ways
        Device(
            "rtxpro6000",
            r"rtx pro 6000 blackwell workstation edition",
            503.8e12,
            125e12,
            95.6,
            1.792e12,
            64e9,
            12.5e9 / 8,
        ),
        # NVIDIA RTX Blackwell whitepaper (2025): 209.5 TFLOPS with fp32 accumulation, 32 GB at 1,792 GB/s, PCIe 5.0 x16
        Device("rtx5090", r"rtx 5090( 32 ?gb)?", 209.5e12, 104.8e12, 31.8, 1.792e12, 64e9, 12.5e9 / 8),
        # NVIDIA Ada architecture whitepaper (2022): 165.2 TFLOPS with fp32 accumulation, 1,008 GB/s, PCIe 4.0 x16
        Device("rtx4090", r"rtx 4090( 24 ?gb)?", 165.2e12, 82.6e12, 24.0, 1.008e12, 32e9, 12.5e9 / 8),
    )
}


def named(reported: str) -> Device | None:
    """The device with this driver name, e.g. "NVIDIA H100 80GB HBM3"; None if unknown or ambiguous."""
    text = re.sub(r"^(nvidia |amd )?(geforce |instinct )?", "", " ".join(reported.lower().split()))
    return next((device for device in DEVICES.values() if re.fullmatch(device.driver_name, text)), None)


def peak_flops(config: Config, world: World) -> float:
    """Nominal FLOPs per second of all devices of a run in its dtype; 0 if unknown."""
    device = named(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    return 0.0 if device is None else world.world_size * device.peak_flops(config.fsdp.param_dtype)
