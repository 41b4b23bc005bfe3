"""What accelerators can do at best, as their makers say: dense bfloat16 without sparsity, and nominal bandwidths."""

import argparse
from dataclasses import dataclass, replace

from torchtitan_lite.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One accelerator and what connects it. Bandwidths are per device and direction, in bytes per second."""

    name: str
    bf16_flops: float  # dense, per second; float16 is the same
    fp32_flops: float  # torch computes float32 products in float32 (no TF32) by default
    memory_gib: float  # what the driver reports
    memory_bandwidth: float
    intra_node: float  # between the devices of a machine
    inter_node: float  # a device's share of the machine's network
    per_node: int = 8


# Network: one 400 Gbit/s port (50 GB/s) a GPU for h100, h200 and b200, 200 Gbit/s (25 GB/s) for a100, as in the
# datasheets of NVIDIA's DGX A100, H100, H200 and B200; PCIe cards: 16 lanes, and a shared 100 Gbit/s port.
DEVICES = {
    d.name: d
    for d in (
        # NVIDIA A100 datasheet (2021), SXM4 80 GB: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways
        Device("a100", 312e12, 19.5e12, 79.3, 2.039e12, 300e9, 25e9),
        # NVIDIA H100 datasheet (2023), SXM: 989 TFLOPS (half of the sparse), 3.35 TB/s, NVLink 900 GB/s both ways
        Device("h100", 989e12, 67e12, 79.6, 3.35e12, 450e9, 50e9),
        # NVIDIA H200 datasheet (2024), SXM: as H100, 141 GB at 4.8 TB/s
        Device("h200", 989e12, 67e12, 140.4, 4.8e12, 450e9, 50e9),
        # NVIDIA DGX B200 datasheet (2024), an eighth: 2.25 PFLOPS, 180 GB at 8 TB/s, NVLink 1.8 TB/s both ways
        Device("b200", 2250e12, 75e12, 179.0, 8e12, 900e9, 50e9),
        # NVIDIA L40S datasheet (2023): 362 TFLOPS, 864 GB/s, PCIe 4.0 x16 64 GB/s both ways
        Device("l40s", 362e12, 91.6e12, 45.0, 0.864e12, 32e9, 12.5e9 / 8),
        # NVIDIA Ada architecture whitepaper (2022): 165.2 TFLOPS with fp32 accumulation, 1,008 GB/s, PCIe 4.0 x16
        Device("rtx4090", 165.2e12, 82.6e12, 24.0, 1.008e12, 32e9, 12.5e9 / 8),
    )
}


def named(reported: str) -> Device | None:
    """The device whose name a driver reports, e.g. "NVIDIA H100 80GB HBM3"; None where it is another or uncertain."""
    text = reported.lower().replace(" ", "")
    if "pcie" in text or "nvl" in text or "a100-sxm4-40gb" in text:
        return None  # variants with other figures
    return next((device for name, device in DEVICES.items() if name in text), None)


# --- options of a command --------------------------------------------------------------------------------------

# by option: field, unit, help
OWN = {
    "peak-tflops": ("bf16_flops", 1e12, "dense TFLOPs per second in the dtype that is computed in"),
    "memory-gib": ("memory_gib", 1.0, "memory of a device, GiB"),
    "memory-gbs": ("memory_bandwidth", 1e9, "bandwidth of that memory, GB per second"),
    "intra-node-gbs": ("intra_node", 1e9, "bandwidth between devices of a machine, GB per second and direction"),
    "inter-node-gbs": ("inter_node", 1e9, "a device's share of the network, GB per second and direction"),
    "per-node": ("per_node", 1, "devices of a machine"),
}


def device_of(given: argparse.Namespace) -> Device | None:
    """The named device, with own figures in place of its; None for the CPU.

    Raises:
        ConfigError: the name is not known, and there are not figures enough to do without.
    """
    values = {
        field: getattr(given, flag.replace("-", "_")) * unit
        for flag, (field, unit, _) in OWN.items()
        if getattr(given, flag.replace("-", "_")) is not None
    }
    bad = [flag for flag, (field, _, _) in OWN.items() if field in values and not 0 < values[field] < float("inf")]
    if bad:
        raise ConfigError("; ".join(f"--{flag} should be above 0 and finite" for flag in bad))
    if "bf16_flops" in values:
        values["fp32_flops"] = values["bf16_flops"]
    if "per_node" in values:
        values["per_node"] = int(values["per_node"])
        if values["per_node"] < 1:
            raise ConfigError(f"--per-node={given.per_node} should be 1 or more")
    if given.device == "cpu" and not values:
        return None
    if given.device in DEVICES:
        return replace(DEVICES[given.device], **values)
    missing = [flag for flag, (field, _, _) in OWN.items() if field not in values and field != "per_node"]
    if missing:
        raise ConfigError(
            f"--device={given.device} is not known: {', '.join(DEVICES)} and cpu are. For another give its figures: "
            + " ".join(f"--{flag}=N" for flag in missing)
        )
    return Device(given.device, **({"per_node": 8} | values))
