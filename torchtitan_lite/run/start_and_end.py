"""The start and the end of an attempt to train.

An attempt can fail for many reasons: wrong values, missing weights, a full disk. So `take_over` changes the run's
folder last. An attempt that fails earlier is refused: it leaves a trace only in train.log.
"""

import hashlib
import json
import platform
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite import __version__, errors, progress
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.config.toml import Loaded, format_value, to_toml_with_origins
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.data.token_files import PAIRS
from torchtitan_lite.distributed.exchange import on_rank0, values_of_ranks
from torchtitan_lite.distributed.process_group import Process, sum_over_ranks
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import EXIT_WOULD_REPEAT, BusyError, ConfigError, RepeatError, StuckError, UserError
from torchtitan_lite.files import write_durably
from torchtitan_lite.models import Transformer
from torchtitan_lite.run import attempts, run_folder
from torchtitan_lite.run.console import start_lines, what_next
from torchtitan_lite.run.metrics import Log
from torchtitan_lite.run.preemption import launcher_note
from torchtitan_lite.run.resumed import missed_evaluations
from torchtitan_lite.run.run_folder import JOINS
from torchtitan_lite.run.saving import report_save
from torchtitan_lite.run.session import Session
from torchtitan_lite.run.watchdog import Watchdog
from torchtitan_lite.terminal import counted, duration, print_line


def prepared(loaded: Loaded, folder: Path | None = None) -> tuple[Loaded, DataSet]:
    """Prepare the data, and convert epochs to steps. Without a process group: collectives of other ranks would time
    out. With `run.remote`, first fetches the run's history.

    Args:
        folder: of the run, if it was moved.
    """
    if loaded.config.url and folder is None:
        from torchtitan_lite.bucket import Bucket

        Bucket(loaded.config.url).fetch_run(loaded.config.folder)
    used = [attempt.must_match for attempt in attempts.read(folder or loaded.config.folder)]
    config, later = loaded.config, loaded.config.train.later_sources
    data = prepare_all(config.data, config.tokenizer, print_line, used[-1] if used else {}, later)
    if loaded.config.in_epochs or loaded.config.data.packing == "best_fit":
        from torchtitan_lite.run import epochs

        loaded = epochs.resolved(loaded, data)
    return loaded, data


def connect(mesh: DeviceMesh, watchdog: Watchdog) -> float:
    """All-reduce one element in each group of the mesh, and in the world. Returns the seconds.

    NCCL connects a group in its first collective. Otherwise that is in the first step, after compiling.

    Raises:
        StuckError: names the group and its machines. A hang ends after run.start_timeout_minutes.
    """
    started, hosts = time.perf_counter(), values_of_ranks(socket.gethostname())
    for axis in (*(mesh.mesh_dim_names or ()), None):
        group = mesh.get_group(axis) if axis else None
        who = _ranks(dist.get_process_group_ranks(group), hosts)
        with watchdog.loading(f"connecting {axis or 'the world'} of {who}"), progress.working("its first all-reduce"):
            sum_over_ranks(torch.zeros(1, device=mesh.device_type), group).item()
    return time.perf_counter() - started


def require_one_run(loaded: Loaded, data: DataSet, process: Process) -> list[str]:
    """Check that the run's folder has this version, and that all ranks have the same run. Returns their hosts.

    Raises:
        UserError: on every rank.
    """
    if refused := on_rank0(lambda: run_folder.why_not_again(loaded, loaded.config.folder), process.untimed):
        raise RepeatError(refused)
    hosts = require_agreement(loaded.config, data, process)
    require_shared(loaded.config.folder, loaded.config)
    return hosts


def require_shared(folder: Path, config: Config) -> None:
    """Check that all machines see the run's folder, or its existing parent; with run.remote, that only one does.

    With full checkpoints and fixed ranks of machines, only rank 0 needs the folder. With an --rdzv-id, the next
    attempt's rank 0 may be on any machine, and would begin again at step 0. Collective.

    Raises:
        ConfigError: on every rank.
    """
    where = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    file = Path(on_rank0(lambda: tempfile.mkstemp(prefix=".shared-", dir=where)[1]))
    looks_for = folder / file.name if config.run.remote else file  # with run.remote, paths may differ
    found = values_of_ranks([socket.gethostname(), local_rank() == 0, looks_for.exists()])
    on_rank0(file.unlink)
    if config.run.remote and sum(first and sees for _, first, sees in found) > 1:
        raise ConfigError(
            f"run.out_dir: {folder} is on a disk that several machines share; with run.remote, each needs its own, for "
            "example --run.out_dir=/tmp/runs"
        )
    blind = [host for host, _, sees in found if not (sees or config.run.remote)]
    if blind and (config.checkpoint.state_dict == "sharded" or run_folder.job() != "none"):
        names = ", ".join(dict.fromkeys(blind))
        raise ConfigError(f"run.out_dir: {where} of rank 0 is not shared: {names} can't see a file in it")


def machines_line(before: Sequence[attempts.Attempt], hosts: Sequence[str]) -> str:
    """Describe which machines joined and left since the last attempt; empty if there is none or no change."""
    last = before[-1].hosts if before else hosts
    changes = [f"{host} joined" for host in hosts if host not in last]
    changes += [f"{host} left" for host in last if host not in hosts]
    return f"start   since attempt {before[-1].attempt}: {', '.join(changes)}" if changes else ""


def require_agreement(config: Config, data: DataSet, process: Process) -> list[str]:
    """Compare versions, config and data between all ranks. Returns the host names in the order of their ranks.

    Raises:
        ConfigError: on every rank, with each differing value and its ranks (ranks with the most common values raise
            BusyError); or the model's vocabulary is smaller than the tokenizer's; or processes share a GPU.
    """
    values = {
        "torchtitan_lite": __version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": process.device.type,
        **{key: value for key, value in flatten(config).items() if key != "run.out_dir" or not config.run.remote},
        "the tokenizer, by its hash": data.tokenizer_sha256,
        **{f"the text of {key}, by its hash": digest for key, digest in data.hashes().items()},
        **{f"the text of {source.name}, by its hash": source.meta.tokens_sha256 for source in data.later},
    }
    own = {key: repr(value) for key, value in values.items()}
    # exchange all values only if hashes differ: with 16,384 ranks, each would read 100 MB
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    gpu = torch.cuda.get_device_properties(process.device).uuid if process.device.type == "cuda" else process.rank
    own_place = socket.gethostname(), str(gpu), local_rank() == 0, 1 / process.local_world_size
    hosts, gpus, first, share, digests = zip(*values_of_ranks([*own_place, digest]), strict=True)
    if sum(first) > round(sum(share)):
        raise ConfigError("several processes of a machine have LOCAL_RANK=0: run torchrun without --virtual-local-rank")
    processes = Counter(gpus)
    if same := [rank for rank, uuid in enumerate(gpus) if processes[uuid] > 1]:
        raise ConfigError(f"{_ranks(same, hosts)} share a GPU ({gpus[same[0]]}); start one process for each GPU")
    if any(other != digest for other in digests):
        lines = ["the ranks differ in config, data or versions:"]
        of_ranks = values_of_ranks(own)
        for key in dict.fromkeys(key for theirs in of_ranks for key in theirs):
            ranks_of: dict[str, list[int]] = {}
            for rank, theirs in enumerate(of_ranks):
                ranks_of.setdefault(theirs.get(key, "missing"), []).append(rank)
            if len(ranks_of) > 1:
                shown = (f"{value} on {_ranks(ranks, hosts)}" for value, ranks in ranks_of.items())
                lines.append(f"{key}: {'; '.join(shown)}")
        # a restarting torchrun then ends only the machines with uncommon values, and continues without them
        error = BusyError if digest == max(digests, key=digests.count) else ConfigError
        raise error("\n  ".join(lines))
    if 0 < config.model.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the tokenizer's {data.vocab_size} entries; "
            "model.vocab_size = 0 takes the tokenizer's"
        )
    return list(dict.fromkeys(hosts))


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return e.g. "rank 3 (node1)", or "ranks 8, 9 and 6 more (node1, node2)"."""
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({where})"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''} ({where})"


def log_start(loaded_config: Loaded, data: DataSet, s: Session) -> None:
    """Log what runs, from where it starts, and notes about both."""
    config = s.config
    s.log.info(start_lines(s))
    if s.resumed and loaded_config.kept:
        values = flatten(config)
        kept = ", ".join(f"{key} = {format_value(values[key])}" for key in loaded_config.kept)
        source = s.checkpointer.forked_from or "the checkpoint"
        s.log.info(f"resume  {kept}: kept from {source} (not set here; the defaults differ)")
    if config.model.init_from and not s.resumed and s.process.rank == 0:
        from torchtitan_lite.huggingface.weights import tokenizer_notes

        for note in tokenizer_notes(
            Path(config.model.init_from),
            data.folder / "tokenizer.json",
            # prepare_all has a note on a begin token of the config
            None if config.tokenizer.begin_token else data.sources[0].meta.marks[-1],
        ):
            s.log.info(f"note    {note}")


def take_over(hosts: Sequence[str], loaded_config: Loaded, data: DataSet, s: Session) -> None:
    """Log the start, and take over the run's folder for this attempt.

    Raises:
        UserError: on every rank. The attempt is not in attempts.jsonl.
    """
    config, process, log, step = s.config, s.process, s.log, s.state.step
    watchdog, checkpointer = s.watchdog, s.checkpointer
    finished = step >= config.train.steps
    log_start(loaded_config, data, s)
    if process.rank == 0 and (changed := machines_line(attempts.read(config.folder), hosts)):
        log.info(changed)
    if s.resumed and not checkpointer.forked_from and len(s.state.segments) > max(len(s.resumed.segments), 1):
        raise ConfigError(
            f"a text of phase {len(s.state.phases) + 1} has changed since it began; restore it, or fork the run: "
            "--run.name=NEW --checkpoint.resume=RUN"
        )
    if not finished:
        with watchdog.loading("checking the free disk space"):
            on_rank0(lambda: storage.remove_leftovers(checkpointer.folder), process.untimed)
            checkpointer.require_space()

    def change_folder() -> int:
        if not finished:
            write_durably(config.folder / "config.toml", to_toml_with_origins(loaded_config).encode())
            for name in ("tokenizer.json", PAIRS):
                if (data.folder / name).is_file():
                    write_durably(config.folder / name, (data.folder / name).read_bytes())
        fork = checkpointer.forked_from
        about = {
            **{"step": step, "samples": s.state.samples_consumed, "config": s.state.config},
            **{"forked_from": str(fork.absolute() if fork else ""), "setting": s.state.bitwise_setting},
            **{"must_match": s.state.must_match, "tasks": s.state.tasks, "segments": s.state.segments},
            **{"phases": s.state.phases, "claim": checkpointer.remote.claim if checkpointer.remote else ""},
            **run_folder.facts(process, hosts),
        }
        number = run_folder.record_start(config.folder, about)
        if checkpointer.remote:
            checkpointer.remote.upload_small_files()  # a lost machine must not take the history along
        return number

    with watchdog.loading("changing the files of the run"):
        log.attempt = on_rank0(change_folder, process.untimed)

    def on_abort(why: str) -> None:
        run_folder.record_end(config.folder, process, log.attempt, "failed", s.state.step, why)

    s.preemption.on_abort = watchdog.on_abort = on_abort


def report_end(s: Session) -> int:
    """Log and record whether the run completed or was preempted. Returns the exit code. Collective."""
    config, step, log, meter = s.config, s.state.step, s.log, s.meter
    if s.checkpointer.remote:
        s.checkpointer.remote.report(log, wait=True)
    rest = missed_evaluations(s) if s.preemption.agreed else []
    if step < config.train.steps or rest:
        why = min(filter(None, values_of_ranks(s.preemption.reason)))  # "SIG..." comes first
        names = " and ".join(one.name for one in rest)
        then = f"resumes from there{f', with the {names} still due' if rest else ''}{launcher_note(why)}"
        log.info(f"stopped after step {step} of {config.train.steps} ({why}); the same command {then}")
        run_folder.record_end(config.folder, s.process, log.attempt, "preempted", step, why)
        codes = {JOINS: StuckError.exit_code}  # torchrun starts all machines again
        return codes.get(why, config.run.preempted_exit_code if why.startswith("SIG") else 0)
    run_folder.record_end(config.folder, s.process, log.attempt, "complete", step)
    if meter.first_step == step:
        log.info(f"finished: step {step} of train.steps = {config.train.steps}; {what_next(config)}")
        return 0
    seconds = time.perf_counter() - meter.started
    n_steps = counted(step - meter.first_step, "step")
    log.info(f"done    {n_steps} in {duration(seconds)}, {attempts.goodput_line(config.folder)}; {what_next(config)}")
    return 0


def report_failure(config: Config, process: Process, log: Log, error: Exception, s: Session | None) -> None:
    """Record a failure. Without a session, the attempt was refused."""
    if s is not None and isinstance(error, UserError) and not isinstance(error, StuckError):
        # every rank has raised this error, so a background save can still complete
        report_save(s.checkpointer, log, wait=True, ends=True)
    step = 0 if s is None else s.state.step
    repeats = isinstance(error, UserError) and error.exit_code == EXIT_WOULD_REPEAT
    run_folder.record_end(config.folder, process, log.attempt, "failed", step, errors.text_of(error), repeats)


def peak_tokens_per_second(config: Config, model: Transformer, process: Process) -> float:
    """Return tokens per second at all devices' nominal peak, for MFU; 0 if unknown or for rows of varying length."""
    if config.data.objective == "pairs" or (process.device.type != "cuda" and not config.run.peak_tflops):
        return 0.0
    from torchtitan_lite.run.mfu import flops_per_token, peak_flops

    return peak_flops(config, process) / flops_per_token(model, config.input_len, config.target_len)
