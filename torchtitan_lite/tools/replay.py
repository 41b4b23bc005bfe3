"""`train.py --replay N`: re-runs step N, and compares it bit for bit with the run's records.

A replay loads the newest checkpoint before N, and runs the steps up to N in a temporary folder; the run is not changed.
It compares every logged step: loss, gradient norm, each rank's loss. It is refused unless everything that a step's
numbers depend on is as in the attempt that made the step. So only the hardware can cause a difference, or what a note
names.
"""

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from torchtitan_lite import __version__
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.compatibility import bitwise_setting, values_to_match
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config, flatten, known_keys, resume_rule
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.exchange import on_rank0, values_of_ranks
from torchtitan_lite.distributed.process_group import process_group
from torchtitan_lite.environment import command_with
from torchtitan_lite.errors import ConfigError, NonFiniteError, SpikeError, UserError
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import attempts as history
from torchtitan_lite.run import out_of_memory, run_folder
from torchtitan_lite.run.attempts import Attempt
from torchtitan_lite.run.between_steps import finite
from torchtitan_lite.run.metrics import Log
from torchtitan_lite.run.session import Session, check_previous_step
from torchtitan_lite.run.start_and_end import require_agreement
from torchtitan_lite.terminal import counted, print_line
from torchtitan_lite.tools.dry_run import in_temporary_folder
from torchtitan_lite.tools.past_steps import checkpoint_before, require_own_step

Step = Callable[[Session, int], StepRecord]
Numbers = Mapping[str, Any]
_COMPARED = "loss", "grad_norm", "rank_losses"
_STOPPED = "stopped"  # key of the reason of a non-finite step that ended the run
_NOT_FINITE = r"step (\d+): (.*not finite|gradients still overflow)"  # of a NonFiniteError
_HARDWARE = (
    "Replay it once more: if two replays agree with each other, a fault hit the run; if they differ, this machine "
    "computes incorrectly"
)
_CAUSE = "This follows from the data and the weights at the start of the replay, not from a later hardware fault"


class DifferentError(UserError):
    """The replay differs from the run's records."""

    exit_code = 1


@dataclass(frozen=True)
class Recorded:
    """The run's records of the steps after a checkpoint."""

    start: int  # the step of the checkpoint; 0: the run's beginning
    last: int
    checkpoint: str  # its folder; empty: none
    steps: Mapping[str, Numbers]  # recorded steps: values of _COMPARED, or _STOPPED
    notes: Sequence[str]
    advice: str  # what a difference would mean


def run(n: int, loaded: Loaded, data: DataSet, build: Callable[..., Session], step: Step) -> None:
    """Replay up to step n, and report the comparison.

    Args:
        build: `train.build`.
        step: `train.train_step`.

    Raises:
        ConfigError: the step can't be replayed here.
        DifferentError: a step differs from its record.
    """
    config = loaded.config
    with process_group(config.run) as process:
        require_agreement(config, data, process)
        setting = bitwise_setting(config, process)  # a collective, so not inside `on_rank0`
        here = numbers_of(flatten(config), values_to_match(config, data), setting)
        recorded = Recorded(**on_rank0(lambda: read(config, n, here), process.untimed))
        with in_temporary_folder(config, {"checkpoint.resume": recorded.checkpoint}) as replayed:
            log = Log(replayed.folder, enabled=process.rank == 0)
            began = recorded.checkpoint or "the run's beginning: there is no complete checkpoint before"
            for note in recorded.notes:
                log.info(f"note    {note}")
            log.info(f"replay  steps {recorded.start + 1} to {recorded.last}, from {began}")
            s = build(replayed, data, process, log)
            with contextlib.closing(s), s.watchdog.training(), out_of_memory.with_advice(config):
                result = compute(s, step, recorded)
            if process.rank == 0:
                print_line(f"equal   {result}")


# --- the run's records ------------------------------------------------------------------------------------------


def read(config: Config, n: int, here: Numbers) -> Recorded:
    """Read the run's records up to step n, or to the first logged step after it.

    Args:
        here: `numbers_of` for this command.

    Raises:
        ConfigError: the run did not make this step, or made it with values that differ from `here`.
    """
    folder = config.folder.absolute()
    attempts = history.since_fork(history.of_run(folder)[1])
    require_own_step(folder, attempts, n, "--replay")
    steps: dict[int, Numbers] = {}
    for record in history.records(folder):
        values = record.get("spike", record)  # a spike that ended the run has its own record
        if "loss" in values:
            steps[record["step"]] = {key: values.get(key) for key in _COMPARED}
    if stop := re.match(_NOT_FINITE, attempts[-1].reason):
        steps[int(stop[1])] = {_STOPPED: _sentence(stop.string)}
    if not 1 <= n <= max(steps, default=0):
        raise ConfigError(f"--replay={n}: {folder} has recorded the steps up to {max(steps, default=0)}")
    checkpoint, notes = checkpoint_before(folder, attempts, n)
    start = storage.read_state(checkpoint).step if checkpoint else 0
    made = range(start + 1, min(step for step in steps if step >= n) + 1)
    makers = [attempt for attempt in attempts if any(history.of_step(attempts, step) is attempt for step in made)]
    for maker in makers:
        _require_same(n, made, maker, here)
    return Recorded(
        start=start,
        last=made[-1],
        checkpoint=str(checkpoint or ""),
        steps={str(step): record for step, record in steps.items() if step in made},
        notes=notes,
        advice=_advice(makers, here, config.model.init_from if start == 0 else ""),
    )


def numbers_of(config: Mapping[str, Any], must_match: Numbers, setting: Numbers) -> dict[str, Any]:
    """Return everything that the numbers of a step depend on, as JSON types.

    Args:
        config: by "section.key".
        must_match, setting: see checkpointing/compatibility.py.
    """
    keys = {key: value for key, value in config.items() if resume_rule(key).changes in ("steps", "start")}
    order = {"data.sources": [*config["data.sources"]]}  # must_match has their weights and text
    content: dict[str, Any] = json.loads(json.dumps({**keys, **order, **must_match, **setting}))
    return content


def _require_same(n: int, made: range, maker: Attempt, here: Numbers) -> None:
    """Raise ConfigError if an attempt made its part of these steps with values that differ from this command's."""
    then = numbers_of(maker.config, maker.must_match, maker.setting)
    began = made.start == 1 and maker.step == 0  # else it has not read keys that only a start reads
    keys = [key for key in here if began or key not in known_keys() or resume_rule(key).changes != "start"]
    different = [key for key in keys if then.get(key) != here[key]]
    if different:
        head = (
            f"--replay={n}: the steps {made.start} to {made[-1]}, after the newest complete checkpoint before, need "
            f"the command, processes, CPU type and torch of the run. They differ from attempt {maker.attempt}:"
        )
        lines = [f"{key} was {json.dumps(then.get(key))}, and is {json.dumps(here[key])} here" for key in different]
        command = command_with(maker.command, {"replay": f"{n}"}, maker.world_size, len(maker.hosts))
        raise ConfigError("\n  ".join([head, *lines, f"replay it with the command of that attempt:\n    {command}"]))


def _advice(makers: Sequence[Attempt], here: Numbers, init_from: str) -> str:
    """Return what a difference means: a hardware fault, unless something else differs."""
    code = {"torchtitan_lite": __version__, **run_folder.git_state(Path(__file__).parents[2])}
    made_by = ({"torchtitan_lite": attempt.versions["torchtitan_lite"], **attempt.git} for attempt in makers)
    changes = {
        f"{key} {then.get(key)} -> {code[key]}" for then in made_by for key in code if then.get(key) != code[key]
    }
    causes = {
        "without run.deterministic a GPU may add in a different order each time": not here["deterministic"],
        f"the code differs from the run's ({', '.join(sorted(changes))})": changes,
        "the code has uncommitted changes": code.get("dirty"),
        f"the weights in {init_from} may have changed, the run recorded no hash of them": init_from,
    }
    found = [cause for cause, applies in causes.items() if applies]
    return (f"This may be the cause: {'; '.join(found)}. If not: " if found else "") + _HARDWARE


# --- comparing --------------------------------------------------------------------------------------------------


def compute(s: Session, step: Step, recorded: Recorded) -> str:
    """Run the steps and compare each. Collective. Returns a sentence about what was compared.

    Raises:
        DifferentError: on every rank, at the first difference.
    """
    compared, equal, stopped = 0, recorded.start, ""
    for number in range(recorded.start + 1, recorded.last + 1):
        s.watchdog.step(number)
        before = s.state
        numbers = step(s, number).numbers
        try:
            with contextlib.suppress(SpikeError):  # the last step of a run that a spike stopped
                check_previous_step(s)
        except NonFiniteError as error:
            stopped = _sentence(str(error))
        if not all(map(math.isfinite, numbers.rank_losses)):
            s.log.info(f"replay  step {number}: {first_not_finite(s, step, number, before)}")
        then = recorded.steps.get(str(number), {})
        if stopped != then.get(_STOPPED, ""):
            was, now = (reason or f"step {number} is finite" for reason in (then.get(_STOPPED, ""), stopped))
            raise DifferentError(f"{now} here; the run recorded: {was}. {recorded.advice}")
        if stopped:
            return f"bit for bit, and not finite again: {stopped}. {_CAUSE}"
        if then:
            values = finite(numbers.loss), finite(numbers.grad_norm), [*map(finite, numbers.rank_losses)]
            if difference := differs(then, dict(zip(_COMPARED, values, strict=True)), number, equal):
                raise DifferentError(f"step {number} differs: {difference}. {recorded.advice}")
            compared, equal = compared + 1, number
    return f"bit for bit: the losses and the gradient norm of {counted(compared, 'step')}. {_CAUSE}"


def first_not_finite(s: Session, step: Step, number: int, before: TrainState) -> str:
    """Repeat a step whose loss is not finite, and name the first module whose output is not. Collective.

    Its update was withheld, so nothing but the scaler has changed. Compiled blocks run without compilation, because
    their modules would not call the hooks.
    """
    found, names = list[str](), {module: name for name, module in s.model.named_modules()}

    def look(module: nn.Module, _args: Any, output: Any) -> None:
        tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
        if not all(tensor.isfinite().all() for tensor in tensors):
            found.append(names.get(module) or "the model, in its loss")

    scaler, s.scaler, s.state = s.scaler, copy.copy(s.scaler), before
    with register_module_forward_hook(look), torch.compiler.set_stance("force_eager"):
        step(s, number)
    s.scaler, s.pending = scaler, None
    ranks = [f"{name[0]} (rank {rank})" for rank, name in enumerate(values_of_ranks(found)) if name]
    named = ", ".join(ranks) or "none: computed again, all outputs are finite"
    return f"the first module whose output is not finite: {named}"


def _sentence(text: str) -> str:
    return text.split(". ")[0]


def differs(then: Numbers, now: Numbers, step: int, equal: int) -> str:
    """Return how a step differs from its record; empty if it is equal.

    Args:
        then, now: the values of _COMPARED.
        equal: the last step that compared equal, or where the replay began.
    """
    pairs = enumerate(zip(then["rank_losses"] or [], now["rank_losses"], strict=False))
    ranks = [f"rank {i}: the sum of its losses was {was}, and is {new}" for i, (was, new) in pairs if was != new]
    if 0 < len(ranks) < len(now["rank_losses"]):
        return f"{'; '.join(ranks)}; equal on all other ranks"
    both = ", ".join(
        f"{name} was {then[key]}, and is {now[key]}"
        for key, name in (("loss", "the loss"), ("grad_norm", "the gradient norm"))
        if then[key] != now[key]
    )
    if len(ranks) > 1:
        later = f" or of one up to step {step - 1}" if equal + 1 < step else ""
        return f"{both}; on all ranks, so the parameters had differed before: the update of step {equal}{later}"
    return both
