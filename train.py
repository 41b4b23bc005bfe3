"""Train a Transformer with FSDP2: the whole way, from the command line to the last checkpoint.

    torchrun --nproc-per-node 2 train.py                         # two processes, on GPUs or on the CPU
    torchrun --nproc-per-node 2 train.py --explicit-prefetching
    torchrun --nproc-per-node 2 train.py --mixed-precision
    torchrun --nproc-per-node 2 train.py --dcp-api
    torchrun --nproc-per-node 2 train.py --config configs/debug.toml --train.steps=50
    python train.py                                              # a world of one

The same command again resumes the run. Read on from `run`.
"""

import gc
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from checkpoint import Checkpointer
from torchtitan_lite import models
from torchtitan_lite.checkpointing.compatibility import continued, fresh_state
from torchtitan_lite.checkpointing.preflight import require_equal_copies, require_finite
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config import cli
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded, to_toml_with_origins
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.data.loader import Loader, PrefetchingLoader
from torchtitan_lite.data.samples import open_samples
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.parallelize import (
    apply_activation_checkpointing,
    apply_compile,
    apply_fast_paths,
    apply_fsdp,
    before_micro_batch,
    unshard_first,
)
from torchtitan_lite.distributed.process_group import (
    World,
    build_mesh,
    env_int,
    exit_process,
    local_rank,
    print_once,
    process_group,
    sum_over_ranks,
)
from torchtitan_lite.errors import StuckError, UserError, run_cli
from torchtitan_lite.monitoring import run_folder
from torchtitan_lite.monitoring.console import duration, what_next
from torchtitan_lite.monitoring.metrics import Clock, Log
from torchtitan_lite.monitoring.watchdog import Watchdog
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.optimizer import build_optimizer, clip_gradients, freeze, learning_rate, set_learning_rate
from torchtitan_lite.terminal import print_error, print_line
from torchtitan_lite.training import checks, out_of_memory
from torchtitan_lite.training import start as starting
from torchtitan_lite.training.evaluate import Validation
from torchtitan_lite.training.garbage import on_schedule
from torchtitan_lite.training.preemption import Preemption, prepare_process
from torchtitan_lite.training.sampling import Prompts, sample
from torchtitan_lite.training.session import (
    Session,
    check_previous_step,
    closed_on_error,
    log_step,
    peak_tokens_per_second,
    report_save,
    save,
    source_lines,
    validate,
)


def build(config: Config, data: DataSet, world: World, log: Log, resume: str = "") -> Session:
    """Everything that a run works with, and the state that it starts from. Nothing in the run's folder changes.

    Args:
        resume: replaces `checkpoint.resume`, which is carried out once for each launch.
    """
    layout = derive(config, world.world_size)

    # 1. The mesh: which ranks share the shards of one model, and which hold copies.
    mesh = build_mesh(layout, world.device)

    # 2. The model. On the meta device it has shapes and no storage, so that any size can be cut up before a byte is
    #    allocated; then each rank gets the storage of its own shards, and fills it.
    model = sharded_model(config, data.vocab_size, mesh)
    materialise(model, world.device, config.run.seed, offload=config.fsdp.cpu_offload)

    # 3. The optimizer, after sharding: it holds the DTensors.
    optimizer = build_optimizer(model, config.optim)

    # 4. The data: which sequences come when is a function of the seed and one integer.
    samples = open_samples(data, "train", config.train.seq_len, config.data.packing)
    cut = config.train.micro_batch_size, world.rank, world.world_size
    loader = Loader(samples, *cut, config.run.seed, config.data.document_mask, pin=world.device.type == "cuda")
    prefetching = PrefetchingLoader(loader, world.device)
    validation, prompts = Validation.of(config, data, *cut), Prompts.of(config, data)

    # 5. The newest checkpoint, if the run's folder has one; else somebody else's weights, if the config names any.
    preemption = Preemption(config.run.max_minutes)
    watchdog = Watchdog(config.folder, world, config.run.timeout_minutes)
    saving = config.checkpoint.model_copy(update={"resume": resume or config.checkpoint.resume})
    checkpointer = Checkpointer(config.folder / "checkpoints", model, optimizer, saving, world)
    fresh = fresh_state(config, data, world, validation.identity())
    with closed_on_error(watchdog, prefetching), watchdog.loading("loading a checkpoint"):
        loaded = load_newest(config, checkpointer, fresh, log)
    state = continued(loaded, fresh) if loaded else fresh
    scaler = GradScaler(config.grad_scaler, config.fsdp.uses_float16, world.device, state.grad_scaler)
    max_skipped = config.train.max_skipped if config.train.on_nonfinite == "skip" else 0
    return Session(
        config=config,
        layout=layout,
        world=world,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        guard=FiniteGuard(optimizer, scaler, max_skipped, state.skipped),
        preemption=preemption,
        watchdog=watchdog,
        loader=prefetching,
        validation=validation,
        prompts=prompts,
        checkpointer=checkpointer,
        state=state,
        log=log,
        clock=Clock(),
        samples=samples,
        profile=profile(config, world),
        peak_tokens_per_second=peak_tokens_per_second(config, model, world),
        loaded=loaded,
    )


def profile(config: Config, world: World) -> Any:
    """The profiler, if `[profile]` asks for one."""
    if not config.profile.steps:
        return None
    from torchtitan_lite.monitoring.profiler import Profile

    return Profile(config.profile, config.folder, world)


def load_newest(config: Config, checkpointer: Checkpointer, fresh: TrainState, log: Log) -> TrainState | None:
    """Load the checkpoint that the run resumes from, or the weights that it starts from. Returns the saved state."""
    try:
        loaded = checkpointer.load(fresh.identity)
    finally:
        for note in checkpointer.notes:
            log.info(f"note    {note}")
    if config.model.init_from and not loaded:
        from torchtitan_lite.huggingface import weights

        source = Path(config.model.init_from)
        checkpointer.load_weights(lambda verify: weights.open_weights(source, config.model, verify))
    return loaded


def run(loaded_config: Loaded, data: DataSet, world: World, log: Log) -> None:
    """Build, say what it is, train, and leave behind how it ended."""
    config = loaded_config.config
    try:
        s = starting.start(loaded_config, data, world, log, build)
    except Exception as error:
        run_folder.write_status(config.folder, world, "failed", None, str(error) or repr(error))
        raise
    if s is None:
        return
    trackers = None
    if config.log.trackers and world.rank == 0:
        from torchtitan_lite.monitoring.trackers import Trackers

        trackers = Trackers(config.log, config.folder, s.state)
        log.attach(trackers)
    try:
        with s.preemption, s.watchdog.explained(), out_of_memory.explained(config), on_schedule(config.speed.gc_every):
            train(s)
    except Exception as error:
        # an error that all ranks have: a save in the background can still end well
        if isinstance(error, UserError) and not isinstance(error, StuckError):
            report_save(s, wait=True)
        run_folder.write_status(config.folder, world, "failed", s.state.step, str(error) or repr(error))
        raise
    finally:
        if trackers is not None:
            trackers.close()
        s.close()


def sharded_model(config: Config, vocab_size: int, mesh: DeviceMesh) -> models.Transformer:
    """The model on the meta device, cut up: every parameter is a DTensor that knows its rows, and has no storage."""
    with torch.device("meta"):
        model = models.build(config.model, vocab_size)
    freeze(model, config.optim.freeze)
    apply_fast_paths(model, config.speed)
    apply_activation_checkpointing(model, config.activation_checkpointing)
    apply_compile(model, config.compile)
    apply_fsdp(model, mesh, config.fsdp)
    if config.speed.shared_memory and mesh.size() > 1:
        from torchtitan_lite.distributed.shared_memory import apply_shared_memory

        apply_shared_memory(model, mesh)
    return model


def train(s: Session) -> None:
    """Train from the step after `s.state` to the last one."""
    config, log = s.config, s.log
    log.start_bar(s.state.step, config.train.steps)
    first, logged = s.state.step, s.state.tokens
    for step in range(first + 1, config.train.steps + 1):
        s.watchdog.step(step)
        if s.profile is not None:
            s.profile.begin(step)
        loss, grad_norm = train_step(s, step)
        last = step == config.train.steps or s.preemption.agreed
        if due(step, config.log.every) or last:
            check_previous_step(s)
            log_step(s, step, loss.item(), grad_norm.item(), n_tokens=s.state.tokens - logged, first=first)
            logged = s.state.tokens
        if config.eval.every and (due(step, config.eval.every) or step == config.train.steps):
            with s.clock.paused():
                validate(s, step)
        if due(step, config.checkpoint.every) or last:
            check_previous_step(s)
            require_finite(s.model, step)
            require_equal_copies(s.model, s.optimizer, step)
            with s.clock.paused():
                save(s, last=last)
        if config.sample.every and not s.preemption.agreed and (due(step, config.sample.every) or last):
            with s.clock.paused():
                sample(s.model, s.prompts, step, stream(config.run.seed, step, 0, 0), s.world, log)
        report_save(s, wait=False)
        if s.profile is not None:
            with s.clock.paused():
                if said := s.profile.end(step, last=last):
                    log.info(said)
        if due(step, config.speed.gc_every):
            gc.collect()
        log.advance_bar()
        if last:
            break
    log.close()
    seconds = time.perf_counter() - s.clock.started
    if s.state.step < config.train.steps:
        why = s.preemption.reason or "another rank was asked to"
        log.info(
            f"left    after step {s.state.step} of {config.train.steps} ({why}); the same command goes on from there"
        )
        run_folder.write_status(config.folder, s.world, "preempted", s.state.step, why)
        return
    run_folder.write_status(config.folder, s.world, "complete", s.state.step)
    for line in source_lines(s):
        log.info(line)
    log.info(f"done    {s.state.step - first} steps in {duration(seconds)}; {what_next(config, s.state.step)}")


def train_step(s: Session, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step.

    Returns:
        the mean loss per token of the global batch, and the norm of its gradient before clipping, both () and still on
        the device: reading them would make the host wait.
    """
    if s.config.fsdp.explicit_prefetching:
        unshard_first(s.model)  # this all-gather is issued before the batch is fetched, to overlap with that
    with s.clock.timing("data_s"):
        batch = s.loader.batch(s.state.samples_consumed, s.config.train.global_batch_size)
    s.watchdog.computing()

    device, world = s.world.device, s.world
    loss_sum = torch.zeros((), device=device)
    for i, micro in enumerate(batch.micro_batches):
        # Dropout is a function of this, so that there is no random state to save.
        torch.manual_seed(stream(s.config.run.seed, step, i, world.rank))
        before_micro_batch(s.model, s.config.fsdp, last=i == len(batch.micro_batches) - 1)
        loss = s.model(*micro.on(device))
        # FSDP averages gradients over the ranks; the loss is a sum over all of them, divided once by all tokens.
        s.scaler.scaled(loss * (world.world_size / batch.global_tokens)).backward()
        loss_sum += loss.detach()

    s.scaler.unscale_(s.model)
    grad_norm = clip_gradients(s.model, s.config.optim.max_norm)
    totals = torch.zeros(2 + world.world_size, device=device)
    totals[0] = loss_sum
    totals[1] = float(s.preemption.requested())
    totals[2 + world.rank] = (~loss_sum.isfinite()).float()
    sum_over_ranks(totals)

    check_previous_step(s)  # the step before: by now the device is done with it
    set_learning_rate(s.optimizer, learning_rate(s.config.optim, step, s.config.train.steps))
    with s.clock.timing("optimizer_s"):
        s.guard.update(step, totals[2:], grad_norm)
    s.preemption.share(totals[1])

    s.state = replace(
        s.state,
        step=step,
        val_loss=None,
        tokens=s.state.tokens + batch.global_tokens,
        samples_consumed=s.state.samples_consumed + s.config.train.global_batch_size,
    )
    return totals[0] / batch.global_tokens, grad_norm


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens now; 0 is never."""
    return every > 0 and step % every == 0


def stream(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """A seed of its own for each forward of a run."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}/{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code; what a person can act on is printed once per machine."""
    return run_cli("train.py", lambda: start(argv), info=lambda text: print_once(text, local_rank()))


def start(argv: Sequence[str]) -> int:
    """Parse, check and prepare, before there is a process group; then train. Returns the exit code."""
    prepare_process()
    speaks = local_rank() == 0
    try:
        sizes = {"world_size": env_int("WORLD_SIZE", 1), "local_world_size": env_int("LOCAL_WORLD_SIZE", 1)}
        model_checks = [checks.check_patterns, checks.check_prompts]
        command = cli.parse(argv, n_gpus=torch.cuda.device_count(), checks=model_checks, **sizes)
        config = command.loaded.config
        if command.print_config or command.check_config:
            fine = [f"note    {note}" for note in command.loaded.notes]
            fine.append(f"the configuration is fine; its run is in {config.folder}")
            if speaks:
                print(to_toml_with_origins(command.loaded) if command.print_config else "\n".join(fine))
            return 0
        for note in command.loaded.notes if speaks else ():
            print_line(f"note    {note}")
        if not command.inspect and not command.dry_run:
            run_folder.make(config.folder)
        with out_of_memory.explained(config):
            prepare_and_run(command)
    except KeyboardInterrupt:
        if speaks:
            print_error("train.py: stopped; the same command goes on from the newest checkpoint")
        return 130
    return 0


def prepare_and_run(command: cli.Command) -> None:
    """Prepare the data, and do what the command asks for."""
    config = command.loaded.config
    data = prepare_all(config.data, config.tokenizer, print_line)
    if config.data.packing == "best_fit":
        from torchtitan_lite.data.packing import pack_all

        pack_all(data, config.train.seq_len, print_line)
    if command.dry_run:
        from torchtitan_lite.tools import dry_run

        dry_run.run(command.loaded, data, build, train_step)
        return
    with process_group(config.run) as world:
        if command.inspect:
            from torchtitan_lite.tools import inspect

            mesh = build_mesh(derive(config, world.world_size), world.device)
            model = sharded_model(config, data.vocab_size, mesh)
            if world.rank == 0:
                print(inspect.describe(model, config.fsdp))
            return
        lock = run_folder.lock(config.folder, world)
        run(command.loaded, data, world, Log(config.folder, speaks=world.rank == 0))
        lock.release()


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
