"""Peaks of accelerators and FLOPs per token, for MFU and `plan`.

devices.toml lists the known accelerators, with a published source for each.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import tomli
import torch
from torch import nn

from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer


def multiplied_parameters(model: Transformer) -> int:
    """Return the number of parameters in matmuls of each token: all but untied embedding tables and idle experts."""
    looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} - {model.output.weight}
    return active_parameters(model) - sum(p.numel() for p in looked_up)


def active_parameters(model: Transformer) -> int:
    """Return the number of parameters without experts that do not compute a token."""
    n, used = model.config.n_experts, model.config.experts_per_token
    return sum(p.numel() // n * used if p.ndim == 3 else p.numel() for p in model.parameters())


def flops_per_token(model: Transformer, seq_len: int, target_len: int = 0) -> int:
    """Return FLOPs of forward and backward for one token, without recomputation.

    For an encoder-decoder, per target of `target_len`: see `_encoder_decoder_flops`.

    6 (N - N_embedding) + 12 L H Q T: 2 per matrix entry, and twice that in backward; then attention with L layers,
    H heads of width Q and T = seq_len, as if not causal. (PaLM, appendix B, arXiv 2204.02311; as in torchtitan. Tied
    embeddings count, as the output uses them, and experts that compute the token.) In a layer with a window, T is at
    most the window. Delta layers add their matmuls: see models/gated_delta.py.
    """
    config = model.config
    if len(config.stacks) > 1:
        return _encoder_decoder_flops(model, seq_len, target_len or seq_len) // (target_len or seq_len)
    windows = [window for window, kind in zip(config.windows, config.layer_kinds, strict=True) if kind != "delta"]
    seen = sum(min(window or seq_len, seq_len) for window in windows)
    attention = 12 * config.n_heads * config.dim_of_heads * seen
    recurrences = sum(getattr(module, "flops_per_token", 0) for module in model.layers.modules())
    return 6 * multiplied_parameters(model) + attention + recurrences


def _encoder_decoder_flops(model: Transformer, n: int, m: int) -> int:
    """Return FLOPs of forward and backward for n inputs and m targets, without recomputation.

    6 (N_encoder n + N_source n + N_decoder m) + 12 H Q (L_encoder n^2 + L_decoder (m^2 + n m)). N_source are the key
    and value matrices of cross-attention, which the n encoder outputs are multiplied with. N_decoder are the decoder's
    other matrices and the head. Attention as if not causal.
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


@dataclass(frozen=True)
class Device:
    """An accelerator. Bandwidths are per device and direction, in bytes per second. See also devices.toml.

    Args:
        driver_name: a pattern of the driver's whole name, without maker and family.
        bf16: whether it has bfloat16 matmuls; otherwise they are emulated, no faster than float32.
        tf32: whether torch can compute float32 matmuls in TF32.
        sustained: share of the peak that very large matmuls reach, fitted to published runs; None: no such runs.
    """

    name: str
    driver_name: str
    half_flops: float  # float16 and bfloat16, dense, per second
    fp32_flops: float  # torch computes float32 matmuls in float32 (no TF32), unless run.tf32 is true
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
        """FLOPs per second in TF32: half of bfloat16's in every datasheet since Ampere."""
        return self.half_flops / 2 if self.tf32 and self.bf16 else self.fp32_flops

    def computing(self, config: Config) -> "Device":
        """Return the device with the peaks for a run of this config."""
        emulated = config.fsdp.param_dtype == "bfloat16" and not self.bf16
        return replace(
            self,
            half_flops=self.fp32_flops if emulated else self.half_flops,
            fp32_flops=self.tf32_flops if config.run.tf32 else self.fp32_flops,
        )

    def peak_flops(self, dtype: str) -> float:
        """Return the FLOPs per second of matmuls in this dtype, e.g. "bfloat16"."""
        return self.fp32_flops if dtype == "float32" else self.half_flops


DEVICES = {
    name: Device(name, **{key: value for key, value in row.items() if key != "source"})
    for name, row in tomli.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")).items()
}


def named(reported: str) -> Device | None:
    """Return the device with this driver name, e.g. "NVIDIA H100 80GB HBM3"; None if unknown or ambiguous."""
    text = re.sub(r"^(nvidia |amd )?(geforce |instinct |tesla )?", "", " ".join(reported.lower().split()))
    return next((device for device in DEVICES.values() if re.fullmatch(device.driver_name, text)), None)


def peak_flops(config: Config, process: Process) -> float:
    """Return the nominal FLOPs per second of all devices of a run in its dtype; 0 if unknown."""
    if config.run.peak_tflops:
        return process.world_size * config.run.peak_tflops * 1e12
    device = named(torch.cuda.get_device_name(process.device)) if process.device.type == "cuda" else None
    return 0.0 if device is None else process.world_size * device.computing(config).peak_flops(config.fsdp.param_dtype)


def start_lines(config: Config, process: Process) -> list[str]:
    """Return the lines about slow matmuls and MFU at the start of a run on a GPU."""
    name, dtype, lines = torch.cuda.get_device_name(process.device), config.fsdp.param_dtype, list[str]()
    before_ampere = not torch.version.hip and torch.cuda.get_device_capability(process.device) < (8, 0)
    float16 = 'fsdp.param_dtype = "float16"'
    if dtype == "bfloat16" and before_ampere:
        lines.append(f"run     {name} emulates bfloat16, no faster than float32; {float16} uses its tensor cores")
    if dtype == "float32" and not config.run.tf32:
        faster = float16 if before_ampere else "--mixed-precision"
        lines.append(f"run     float32 matmuls do not use the tensor cores of {name}; {faster} is faster")
    if config.data.objective != "pairs" and not peak_flops(config, process):
        lines.append(
            f"run     MFU is not logged: the peak of {name} is not known; run.peak_tflops = its dense TFLOP/s gives it"
        )
    return lines
