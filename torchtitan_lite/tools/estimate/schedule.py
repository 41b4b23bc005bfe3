"""The learning rate and batch size of a run's steps, as a chart: `python -m torchtitan_lite.plan --print-schedule`.

The values come from the functions that the training loop calls.
"""

from torchtitan_lite.config.schema import Config, TrainConfig
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.terminal import counted

COLUMNS, ROWS = 64, 9
SHOWN = 6  # of the changes of a step schedule


def schedule_lines(config: Config) -> list[str]:
    """The chart, and a table of the steps at which something changes."""
    train, optim = config.train, config.optim
    if not train.steps or (optim.schedule == "step" and not isinstance(optim.step_every, int)):
        return ["schedule unknown: the length of an epoch needs prepared data in data.path"]
    shown = [1 + i * (train.steps - 1) // max(COLUMNS - 1, 1) for i in range(COLUMNS)]
    rates = [learning_rate(optim, step, train.steps) for step in shown]
    highest = max(rates)
    levels = [round((ROWS - 1) * rate / highest) for rate in rates]
    warmup = f", {counted(optim.warmup_steps, 'step')} of warm-up" if optim.warmup_steps else ""
    lines = [f"learning rate: {optim.schedule} over {counted(train.steps, 'step')}{warmup}", ""]
    for level in reversed(range(ROWS)):
        value = highest * level / (ROWS - 1)
        label = f"{value:.2e}" if level in (0, (ROWS - 1) // 2, ROWS - 1) else ""
        lines.append(f"  {label:>8} |" + "".join("*" if at == level else " " for at in levels).rstrip())
    last = f"step {train.steps:,}"
    lines.append(f"  {'':>8} +{'-' * COLUMNS}")
    lines.append(f"  {'':>8}  {'step 1':<{COLUMNS - len(last)}}{last}")
    if train.batch_schedule:
        lines.append(f"  {'batch':>8}  {_sizes(train, shown)}")
    lines += ["", f"  {'step':>12}  {'learning rate':>13}  {'batch':>9}  {'sequences so far':>16}"]
    for step, note in corners(config).items():
        rate = learning_rate(optim, step, train.steps)
        until = train.model_copy(update={"steps": step}).samples
        lines.append(f"  {step:>12,}  {rate:>13.4e}  {train.batch_size(step):>9,}  {until:>16,}  {note}".rstrip())
    return lines


def _sizes(train: TrainConfig, shown: list[int]) -> str:
    """The batch size below the column where it begins, where there is room."""
    text, before = "", 0
    for column, step in enumerate(shown):
        size = train.batch_size(step)
        if size != before and len(text) <= column:
            text = f"{text:-<{column}}{size}"
            before = size
    return f"{text:-<{COLUMNS}}"


def corners(config: Config) -> dict[int, str]:
    """The steps at which something begins or ends, in order, with a note."""
    train, optim = config.train, config.optim
    notes: dict[int, list[str]] = {1: ["the first step"]}
    if optim.warmup_steps:
        notes.setdefault(optim.warmup_steps, []).append("the end of the warm-up")
    if optim.schedule == "wsd":
        last = max(int(train.steps - optim.decay_ratio * train.steps), 1)
        notes.setdefault(last, []).append("the last step before the decay")
    if optim.schedule == "step":
        changes = range(optim.step_every + 1, train.steps + 1, optim.step_every)
        for step in changes[:SHOWN]:
            notes.setdefault(step, []).append(f"times {optim.step_gamma:g}")
        if len(changes) > SHOWN:
            notes.setdefault(changes[-1], []).append(f"the last of {len(changes):,} changes")
    for after, _ in train.batch_schedule:
        if 0 < after < train.steps and train.batch_size(after) != train.batch_size(after + 1):
            notes.setdefault(after + 1, []).append("another batch size")
    notes.setdefault(train.steps, []).append("the last step")
    return {step: ", ".join(texts) for step, texts in sorted(notes.items())}
