"""Rules of the name and the device of a run, and of the profiled steps."""

from pathlib import Path

from torchtitan_lite.config.schema import Config, Machine, Rules


def rules(config: Config, machine: Machine) -> Rules:
    """Yield the broken rules of name, device and profiled steps."""
    name, device = config.run.name, config.run.device
    if name in ("", "..") or Path(name).name != name:
        yield "run.name", f'run.name = "{name}" should be the plain name of a folder, e.g. run.name = "first"'
    if device == "cuda" and machine.n_gpus == 0:
        yield "run.device", 'run.device = "cuda", but torch sees no GPU here; run.device = "cpu" works'
    if device != "cpu" and 1 < machine.n_gpus < machine.local_world_size:  # 1: perhaps a different one in each process
        yield (
            "run.device",
            f"{machine.local_world_size} processes on this machine, and torch sees {machine.n_gpus} GPUs; "
            f'--nproc-per-node {machine.n_gpus} works, and so does run.device = "cpu"',
        )
    steps = config.profile.steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        yield "profile.steps", f"profile.steps = {steps} should be a first and a last step, e.g. [10, 12]"
