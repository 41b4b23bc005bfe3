"""Rules of the name, the exit code and the device of a run, and of the profiled steps."""

from pathlib import Path

from torchtitan_lite.config.schema import Config, Machine, Rules


def rules(config: Config, machine: Machine) -> Rules:
    """Yield the broken rules of name, exit code, device and profiled steps."""
    name, device = config.run.name, config.run.device
    if name in ("", "..") or Path(name).name != name:
        yield "run.name", f'run.name = "{name}" should be the plain name of a folder, e.g. run.name = "first"'
    if (code := config.run.preempted_exit_code) in (1, 2):
        yield (
            "run.preempted_exit_code",
            f"run.preempted_exit_code = {code} is the exit code of a failure; run.preempted_exit_code = 75 works",
        )
    if device == "cuda" and machine.n_gpus == 0:
        yield "run.device", 'run.device = "cuda", but torch sees no GPU here; run.device = "cpu" works'
    if device != "cpu" and 1 < machine.n_gpus < machine.local_world_size:  # 1: perhaps a different one in each process
        yield (
            "run.device",
            f"{machine.local_world_size} processes on this machine, and torch sees {machine.n_gpus} GPUs; "
            f'--nproc-per-node {machine.n_gpus} works, and so does run.device = "cpu"',
        )
    steps, ranks = config.profile.steps, config.profile.ranks
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        yield "profile.steps", f"profile.steps = {steps} should be a first and a last step, e.g. [10, 12]"
    if min(ranks, default=0) >= machine.world_size:
        yield (
            "profile.ranks",
            f"profile.ranks = {ranks}, but the ranks are 0 to {machine.world_size - 1}; profile.ranks = [0] works",
        )
