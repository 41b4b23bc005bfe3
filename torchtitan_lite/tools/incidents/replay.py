"""`train.py --replay N`: compute step N again, and compare it bit for bit with what the run recorded.

The run's newest checkpoint before N is loaded, and the steps up to N are made in a temporary folder: the run is not
changed. Every step that was logged is compared: the loss, the gradient norm, and the loss of each rank; and where the
run has a checkpoint, all of its tensors. A replay needs what a bitwise resume needs, and is refused otherwise.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.compatibility import bitwise_setting
from torchtitan_lite.checkpointing.tensor_names import Parts, by_name, optimizer_tensors, own_tensors, prefix
from torchtitan_lite.config.schema import Config, default_of, flatten, resume_rule
from torchtitan_lite.config.toml import Loaded, format_value
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.agreement import from_rank0, outcome_on_rank0, require_agreement
from torchtitan_lite.distributed.process_group import process_group
from torchtitan_lite.errors import ConfigError, NonFiniteError, SpikeError, UserError
from torchtitan_lite.monitoring import records, run_folder
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.terminal import counted, print_line
from torchtitan_lite.tools.incidents.record import (
    changes_of,
    checkpoint_before,
)
from torchtitan_lite.training import out_of_memory
from torchtitan_lite.training.intact import settle
from torchtitan_lite.training.session import Session, StepResult
from torchtitan_lite.training.start import require_same_data

Step = Callable[[Session, int], StepResult]
_NEXT = (
    "Replay it once more: if two replays agree with each other, a fault hit the run; if they differ, this machine "
    "computes wrong"
)
_CAUSE = (
    "This follows from the data and from the weights that the replay began with, not from a fault of a machine since"
)


class DifferentError(UserError):
    """The replay differs from what the run recorded."""

    exit_code = 1


@dataclass(frozen=True)
class Recorded:
    """What a run says about the steps after a checkpoint."""

    start: int  # the step of the checkpoint; 0: the run's beginning
    last: int
    checkpoint: str  # its folder; empty: none
    steps: dict[int, dict[str, Any]]  # the logged ones, by step
    stopped: str = ""  # how the run ended, if at a loss or gradients that are not finite
    setting: Mapping[str, Any] = field(default_factory=dict)  # of a bitwise resume
    config: Mapping[str, Any] = field(default_factory=dict)  # by "section.key"
    notes: tuple[str, ...] = ()
    unsure: str = ""  # a sentence: why a difference may be none of the hardware


def run(n: int, loaded: Loaded, data: DataSet, build: Callable[..., Session], step: Step) -> None:
    """Replay up to step n, and say how it compares.

    Args:
        build: `train.build`.
        step: `train.train_step`.

    Raises:
        ConfigError: this can't be replayed here.
        DifferentError: a step differs from what was recorded.
    """
    config = loaded.config
    with process_group(config.run) as world:
        require_agreement(config, world)
        require_same_data(config, data, world)
        errors = UserError, OSError
        fields, error = outcome_on_rank0(world.rank, lambda: asdict(read(config, n)), world.untimed, errors)
        if fields is None:
            raise ConfigError(error)
        recorded = Recorded(**fields)
        if reasons := from_rank0(not_the_same(recorded, config, bitwise_setting(config, world))):
            raise ConfigError(reasons)
        with _elsewhere(config, recorded) as replayed:
            log = Log(replayed.folder, speaks=world.rank == 0)
            began = recorded.checkpoint or "the run's beginning: there is no complete checkpoint before"
            for line in (*recorded.notes, f"replay  steps {recorded.start + 1} to {recorded.last}, from {began}"):
                log.info(line)
            s = build(replayed, data, world, log)
            with contextlib.closing(s), s.watchdog.explained(), out_of_memory.explained(config):
                try:
                    result = compute(s, step, recorded, config.folder)
                except DifferentError:
                    if from_rank0(world.rank == 0 and has_changed(config, n, recorded)):
                        raise ConfigError(
                            f"--replay={n}: the run has changed its records meanwhile: it was started again; "
                            "give the command again"
                        ) from None
                    raise
            if world.rank == 0:
                print_line(f"equal   {result}")


@contextlib.contextmanager
def _elsewhere(config: Config, recorded: Recorded) -> Iterator[Config]:
    """The run in a temporary folder, from this checkpoint, without what else it writes."""
    folder, checkpoint = tempfile.mkdtemp(prefix="replay-"), recorded.checkpoint
    parts: dict[str, BaseModel] = {
        "run": config.run.model_copy(update={"out_dir": folder, "max_minutes": 0.0}),
        "checkpoint": config.checkpoint.model_copy(update={"resume": checkpoint}),
        "sample": config.sample.model_copy(update={"every": 0}),
        "profile": config.profile.model_copy(update={"steps": []}),
    }
    try:
        replayed = config.model_copy(update=parts)
        run_folder.make(replayed.folder)
        yield replayed
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- what was recorded ------------------------------------------------------------------------------------------


def read(config: Config, n: int) -> Recorded:
    """What the run recorded, up to step n or to the first logged one after it.

    Raises:
        ConfigError: the run did not make this step, or has no record of it.
    """
    folder = config.folder.absolute()
    steps = _logged(folder / "metrics.jsonl")
    status = _json(folder / "run.json")
    stopped = str(status.get("reason", "")) if re.match(r"step \d+: .* not finite", str(status.get("reason"))) else ""
    known = {*steps, *(int(number) for number in re.findall(r"^step (\d+)", stopped))}
    if not 1 <= n <= max(known, default=0):
        raise ConfigError(f"--replay={n}: {folder} has recorded the steps up to {max(known, default=0)}")
    last = min(step for step in known if step >= n)
    checkpoint, damaged = checkpoint_before(folder, n)
    start = storage.read_state(checkpoint).step if checkpoint else 0
    if checkpoint is None and config.checkpoint.resume:
        raise ConfigError(
            f"--replay={n}: the run began from {config.checkpoint.resume}, and has no checkpoint of its own before"
        )
    between = {step: record for step, record in steps.items() if start < step <= last}
    if not between and not stopped:
        raise ConfigError(f"--replay={n}: {folder / 'metrics.jsonl'} has no record of the steps {start + 1} to {n}")
    values, unsure = _values(config, status, checkpoint, range(start + 1, last + 1), between, n)
    setting = {key: value for key, value in values.items() if "." not in key}
    keys = {key: value for key, value in values.items() if "." in key}
    notes = tuple(f"note    {note}" for note in damaged)
    return Recorded(
        start=start,
        last=last,
        checkpoint=str(checkpoint or ""),
        steps=between,
        stopped=stopped,
        setting=setting,
        config=keys,
        notes=notes,
        unsure=unsure,
    )


def has_changed(config: Config, n: int, recorded: Recorded) -> bool:
    """Whether the run says something else by now about the steps that were compared."""
    try:
        now = read(config, n)
    except (UserError, OSError):
        return True
    return any(now.steps.get(step) != record for step, record in recorded.steps.items())


def _values(
    config: Config,
    status: Mapping[str, Any],
    checkpoint: Path | None,
    made: range,
    between: Mapping[int, Mapping[str, Any]],
    n: int,
) -> tuple[dict[str, Any], str]:
    """The values that these steps were made with, and Recorded.unsure. Keys with a dot are of the config.

    A checkpoint has the values of the attempt that saved it. changes.jsonl has what resumes have changed in between.

    Args:
        made: the steps of the replay, from the one after `checkpoint`.
        between: the logged ones.

    Raises:
        ConfigError: a resume changed a value in between, so no command repeats them all.
    """
    folder, start, last = config.folder.absolute(), made.start - 1, made.stop - 1
    changes = changes_of(folder)
    for step, changed in changes:
        pairs = {key: pair for key, pair in changed.items() if "." not in key or _matters(key)}
        if config.optim.schedule == "constant":
            pairs.pop("train.steps", None)
        if start < step < last and pairs:
            raise _mixed(n, made, f"after step {step}: {_shown(pairs)}")

    # 1. The checkpoint before, and what resumes have changed since.
    earlier = storage.read_state(checkpoint) if checkpoint else None
    next_saved = next((step for step in storage.find_steps(folder / "checkpoints") if step >= n), None)
    values: dict[str, Any] = {**earlier.config, **earlier.bitwise_setting} if earlier else {}
    for step, changed in changes if earlier else ():
        if start <= step < (next_saved or last):
            values |= {key: now for key, (_, now) in changed.items()}

    # 2. The checkpoint after, or else run.json, without what resumes have changed after these steps.
    unsure = ""
    if next_saved is not None:
        later = storage.read_state(storage.step_folder(folder / "checkpoints", next_saved))
        before, values = values, {**later.config, **later.bitwise_setting}
        # an older version did not record when the setting changed
        unknown = {k: [before[k], now] for k, now in values.items() if "." not in k and before.get(k, now) != now}
        if unknown:
            unsure = (
                f"Between step {start} and {next_saved} a resume has changed {_shown(unknown)}, and the run does not "
                "record after which step, so this may be the cause. "
            )
    else:
        facts = {"world_size": status.get("world_size"), "torch": (status.get("versions") or {}).get("torch")}
        values |= status.get("setting") or {key: value for key, value in facts.items() if value is not None}
    for step, changed in reversed(changes):
        if last <= step < (next_saved or float("inf")):
            values |= {key: before for key, (before, _) in changed.items()}

    # 3. The world size, which an older version did not record, is the number of losses in a record.
    sizes = {step: len(record["rank_losses"]) for step, record in between.items() if record.get("rank_losses")}
    if not sizes:
        return values, unsure
    size = sizes[min(sizes)]
    if change := next((step for step in sizes if sizes[step] != size), None):
        raise _mixed(n, made, f"before step {change}: {_shown({'world_size': [size, sizes[change]]})}")
    if values.get("world_size", size) != size:
        same = earlier is not None and earlier.bitwise_setting.get("world_size") == size
        setting = dict(earlier.bitwise_setting) if earlier and same else {"world_size": size}
        values = {key: value for key, value in values.items() if "." in key} | setting
    return values, unsure


def _mixed(n: int, made: range, change: str) -> ConfigError:
    return ConfigError(
        f"--replay={n}: the steps {made.start} to {made.stop - 1}, which follow the newest complete checkpoint before, "
        f"were not made with the same values. A resume has changed them {change}. So no command repeats all of them "
        "bit for bit; a step before the change, or after a later checkpoint, can be replayed"
    )


def _shown(pairs: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{key} {before} -> {now}" for key, (before, now) in pairs.items())


def _matters(key: str) -> bool:
    """Whether a key of the config changes a step, and is no part of the bitwise setting."""
    return resume_rule(key).changes_steps


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _logged(file: Path) -> dict[int, dict[str, Any]]:
    """The records of steps, by step."""
    steps: dict[int, dict[str, Any]] = {}
    for record in records.read(file):
        if _is_of_step(record):
            steps[record["step"]] = record
        elif _is_of_step(record.get("spike")):  # the last step of a run that it stopped
            steps.setdefault(record["step"], {"step": record["step"], **record["spike"]})
    return steps


def _is_of_step(record: Any) -> bool:
    """Whether a record has the loss of a step, and all that is compared is numbers."""
    if not isinstance(record, dict) or "loss" not in record or not isinstance(record.get("rank_losses", []), list):
        return False
    numbers = [record["loss"], record.get("grad_norm"), *record.get("rank_losses", [])]
    return all(number is None or type(number) in (int, float) for number in numbers)


def not_the_same(recorded: Recorded, config: Config, setting: Mapping[str, Any]) -> str:
    """Why the steps can't be repeated bit for bit here; empty if they can."""
    lines = [
        f"{key} was {recorded.setting[key]}, and is {value} here"
        for key, value in setting.items()
        if recorded.setting.get(key, value) != value
    ]
    here = json.loads(json.dumps(flatten(config), default=str))
    # a key that is newer than the checkpoint had its default
    before = json.loads(json.dumps({key: default_of(key) for key in here}, default=str)) | dict(recorded.config)
    lines += [
        f"{key} was {format_value(before[key])}, and is {format_value(here[key])} here"
        for key in filter(_matters, here)
        if recorded.config and before[key] != here[key]
    ]
    sizes = {step: len(record["rank_losses"]) for step, record in recorded.steps.items() if "rank_losses" in record}
    lines += [
        f"step {step} was made by {counted(size, 'rank')}, and here are {setting['world_size']}"
        for step, size in sizes.items()
        if size != setting["world_size"] and "world_size" not in recorded.setting
    ]
    for step, record in recorded.steps.items():
        rate = learning_rate(config.optim, step, config.train.steps)
        if not lines and record.get("lr", rate) != rate:
            lines.append(f"step {step} had the learning rate {record['lr']}, and has {rate} here")
    if not lines:
        return ""
    head = "a replay needs the command, the number of processes, the kind of CPU and the torch of the run:"
    return "\n  ".join([head, *lines])


# --- comparing --------------------------------------------------------------------------------------------------


def compute(s: Session, step: Step, recorded: Recorded, folder: Path) -> str:
    """Make the steps and compare each. Collective. Returns a sentence about what was compared.

    Raises:
        DifferentError: on every rank, at the first difference.
    """
    checkpoints = from_rank0(storage.find_steps(folder / "checkpoints"))
    compared, tensors, equal = 0, 0, recorded.start
    try:
        for number in range(recorded.start + 1, recorded.last + 1):
            s.watchdog.step(number)
            loss, grad_norm = step(s, number)
            if number in recorded.steps or number == recorded.last:
                with contextlib.suppress(SpikeError):  # the last step of a run that it stopped
                    settle(s)
            if record := recorded.steps.get(number):
                again = {"loss": loss.item(), "grad_norm": grad_norm.item(), "rank_losses": s.guard.rank_losses}
                if difference := differs(record, again, equal):
                    raise DifferentError(f"step {number} differs: {difference}. {recorded.unsure}{_unsure(s)}{_NEXT}")
                compared, equal = compared + 1, number
            if number in checkpoints:
                saved = storage.step_folder(folder / "checkpoints", number)
                tensors += _compare_tensors(s, saved, equal, recorded.unsure)
    except NonFiniteError as error:
        now, then = (text.split(". ")[0] for text in (str(error), recorded.stopped))
        if now != then:
            raise DifferentError(
                f"{now}; the run recorded {then or 'no such thing'}. {recorded.unsure}{_NEXT}"
            ) from None
        return f"bit for bit, and not finite again: {now}. {_CAUSE}"
    if recorded.stopped and recorded.stopped.startswith(f"step {recorded.last}:"):
        raise DifferentError(f"step {recorded.last} is finite here; the run recorded: {recorded.stopped}. {_NEXT}")
    what = f"loss, gradient norm and each rank's loss of {counted(compared, 'step')}"
    if not all("rank_losses" in record for record in recorded.steps.values()):
        what = f"loss and gradient norm of {counted(compared, 'step')}"
    also = f", and {counted(tensors, 'tensor')} of a checkpoint" if tensors else ""
    return f"bit for bit: {what}{also}. {_CAUSE}"


def _unsure(s: Session) -> str:
    if s.world.device.type == "cuda" and not s.config.run.deterministic:
        return "Without run.deterministic, a GPU may add in another order each time, so this proves nothing. "
    return ""


def differs(record: Mapping[str, Any], again: Mapping[str, Any], equal: int) -> str:
    """How a step differs from its record; empty if it is equal.

    Args:
        equal: the last step that was compared and equal, or where the replay began.
    """
    then, now = (_comparable(values) for values in (record, again))
    step = int(record["step"])
    ranks = [
        rank for rank, pair in enumerate(zip(then["rank_losses"], now["rank_losses"], strict=False)) if len({*pair}) > 1
    ]
    if ranks and len(ranks) < len(now["rank_losses"]):
        each = "; ".join(
            f"rank {rank}: the sum of its losses was {then['rank_losses'][rank]}, and is {now['rank_losses'][rank]}"
            for rank in ranks
        )
        return f"{each}; equal on all other ranks"
    both = ", ".join(
        f"{name} was {then[key]}, and is {now[key]}"
        for key, name in (("loss", "the loss"), ("grad_norm", "the gradient norm"))
        if then[key] != now[key]
    )
    if not both and not ranks:
        return ""
    if len(ranks) > 1 and step > equal:
        first = f"step {equal}" if equal + 1 >= step else f"a step from {equal} to {step - 1}"
        return f"{both}; on all ranks, so the parameters had differed before: the update of {first}"
    if not ranks and then["rank_losses"]:
        return f"{both}; the loss of each rank is equal, so it was a backward pass or a sum over ranks"
    return both


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what is not finite is None in a record."""
    plain = {key: values.get(key) for key in ("loss", "grad_norm")} | {"rank_losses": values.get("rank_losses") or []}
    finite: Callable[[Any], Any] = lambda x: x if x is None or abs(x) < float("inf") else None  # noqa: E731
    return {key: [*map(finite, v)] if isinstance(v, list) else finite(v) for key, v in plain.items()}


def _compare_tensors(s: Session, checkpoint: Path, equal: int, unsure: str) -> int:
    """Compare all parameters and moments with a checkpoint of this step. Collective. Returns their number.

    Raises:
        DifferentError: on every rank: one differs.
    """
    parts = {
        storage.MODEL: own_tensors(s.model),
        storage.OPTIMIZER: optimizer_tensors(s.model, s.optimizer),
    }
    saved: dict[str, Callable[[], Tensor]] = {}
    if s.world.rank == 0:
        with contextlib.suppress(UserError, OSError):  # the run has deleted it meanwhile
            saved = _saved(checkpoint, parts)
    if not from_rank0(bool(saved)):
        return 0
    different = []
    for name, value in by_name(parts).items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if s.world.rank == 0 and not _same_bits(whole.cpu(), saved[name]()):
            different.append(name)
    n = len(by_name(parts))
    if different := from_rank0(different):
        raise DifferentError(
            f"after step {equal} {len(different):,} of {n:,} tensors differ from {checkpoint}, first {different[0]}: "
            f"the update differed, or the checkpoint was changed. {unsure}{_unsure(s)}{_NEXT}"
        )
    return n


def _saved(checkpoint: Path, parts: Parts) -> dict[str, Callable[[], Tensor]]:
    """Readers of a checkpoint's tensors, by name in a sharded state dict."""
    if storage.read_manifest(checkpoint).state_dict == "sharded":
        from torchtitan_lite.checkpointing import dcp_storage

        whole = dcp_storage.WholeTensors(checkpoint, "")
        return {name: lambda name=name: whole[name] for name in whole}  # type: ignore[misc]
    return {
        f"{prefix(file)}{name}": lambda file=file, name=name: storage.open_tensors(  # type: ignore[misc]
            checkpoint / file
        ).get_tensor(name)
        for file, tensors in parts.items()
        for name in tensors
    }


def _same_bits(one: Tensor, other: Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))
