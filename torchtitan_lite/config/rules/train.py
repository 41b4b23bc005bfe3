"""Rules of the lengths of sequences, of epochs, and of the warm-up."""

import itertools

from torchtitan_lite.config.schema import Config, Machine, OptimConfig, Rules


def rules(config: Config, machine: Machine) -> Rules:
    """Yield the broken rules of sequence lengths, epochs and warm-up."""
    train, model = config.train, config.model
    if train.seq_len > model.max_seq_len:
        yield (
            "train.seq_len model.max_seq_len",
            f"train.seq_len = {train.seq_len} is longer than model.max_seq_len = {model.max_seq_len}; "
            f"model.max_seq_len = {config.input_len} works",
        )
    if train.phases or any(size != train.batch_size(1) for _, size in train.batch_schedule):
        changes = "train.phases" if train.phases else "train.batch_schedule"
        for key in config.in_epochs:
            works = "train.steps" if key == "train.epochs" else f"{key} = 100"
            yield (
                f"{key} {changes}",
                f"{key} is in epochs, which need one batch size, but {changes} changes it; {works} works",
            )
    if train.batch_schedule and any("global_batch_size" in phase.get("train", {}) for phase in train.phases):
        yield (
            "train.phases train.batch_schedule",
            "train.batch_schedule and train.phases both change the batch size; leave it out of one of them",
        )
    if any(one >= other for one, other in itertools.pairwise([0, *train.boundaries(), train.steps])):
        yield (
            "train.phases train.steps",
            f"train.phases begin after the steps {train.boundaries()}, which should rise and be below train.steps = "
            f"{train.steps}",
        )
    if not train.epochs:  # else run/epochs.py checks, when the number of steps is known
        yield from warmup_rules(config.optim, train.steps)


def warmup_rules(optim: OptimConfig, steps: int) -> Rules:
    """Yield the broken rules between a schedule and the number of steps."""
    longest = _longest_warmup(optim, steps)
    if optim.warmup_steps >= steps:
        yield (
            "optim.warmup_steps train.steps",
            f"optim.warmup_steps = {optim.warmup_steps} takes up all of train.steps = {steps}; "
            f"warmup_steps = {min(steps // 10, longest)} works",
        )
    elif optim.warmup_steps > longest:
        yield (
            "optim.warmup_steps optim.decay_ratio train.steps",
            f"optim.warmup_steps = {optim.warmup_steps} reaches into the decay, the last optim.decay_ratio = "
            f"{optim.decay_ratio} of train.steps = {steps}; warmup_steps = {longest} works",
        )


def _longest_warmup(optim: OptimConfig, steps: int) -> int:
    return int(steps - optim.decay_ratio * steps) if optim.schedule == "wsd" else steps - 1


def fitting_warmup(config: Config) -> Config:
    """Return the config with a default warm-up that fits its steps."""
    optim, steps = config.optim, config.train.steps
    if not dict(warmup_rules(optim, steps)):
        return config
    return config.changed({"optim.warmup_steps": min(steps // 10, _longest_warmup(optim, steps))})
