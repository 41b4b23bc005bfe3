"""Train a Transformer with FSDP2, from the command line to the last checkpoint. Start reading at `run`.

    torchrun --nproc-per-node 2 train.py                         # two processes, on GPUs or on the CPU
    torchrun --nproc-per-node 2 train.py --explicit-prefetching  # or --mixed-precision, --dcp-api
    torchrun --nproc-per-node 2 train.py --config configs/debug.toml --train.steps=50
    python train.py                                              # one process

The same command again resumes the run.
"""

import gc
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Batch, Loader, PrefetchingLoader
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.distributed import parallelize
from torchtitan_lite.distributed.initialize import materialise
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
from torchtitan_lite.errors import StuckError, UserError, is_stall, run_cli
from torchtitan_lite.monitoring import run_folder
from torchtitan_lite.monitoring.console import source_lines, what_next
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.monitoring.watchdog import Watchdog, explained
from torchtitan_lite.optim import optimizer as optim
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.terminal import counted, duration, print_error, print_line
from torchtitan_lite.training import checks, out_of_memory
from torchtitan_lite.training import start as starting
from torchtitan_lite.training.evaluate import Validation
from torchtitan_lite.training.garbage import on_schedule
from torchtitan_lite.training.preemption import Preemption, launcher_note, prepare_process
from torchtitan_lite.training.session import (
    Session,
    check_previous_step,
    closed_on_error,
    log_step,
    report_save,
    save,
    validate,
)


def build(config: Config, data: DataSet, world: World, log: Log, resume: str = "") -> Session:
    """Build everything that a run works with, and load the state it starts from. The run's folder is not changed.

    Args:
        resume: overrides `checkpoint.resume`, which is obeyed once per launch.
    """
    layout = derive(config, world.world_size)

    # 1. The mesh: which ranks shard one copy of the model, and which hold further copies.
    mesh = build_mesh(layout, world.device)

    # 2. The model: sharded on the meta device, without storage. Each rank then allocates and fills its own shards.
    model = sharded_model(config, data.vocab_size, mesh, widen=parallelize.widens(config, world))
    materialise(model, world.device, config.run.seed, offload=config.fsdp.cpu_offload)

    # 3. The optimizer, after sharding: it holds the DTensors.
    optimizer = optim.build_optimizer(model, config.optim)

    # 4. The data: the order of sequences is a function of the seed and one integer.
    samples = open_samples(data, "train", config)
    per_rank = config.train.micro_batch_size, world.rank, world.world_size
    loader = Loader(
        samples,
        micro_batch_size=config.train.micro_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        seed=config.run.seed,
        document_mask=config.data.document_mask,
        pin=world.device.type == "cuda",
    )
    prefetching = PrefetchingLoader(loader, world.device)
    validation, options = Validation.of(config, data, *per_rank), starting.options(config, data, world)

    # 5. The newest checkpoint of the run, else the weights that model.init_from names.
    preemption = Preemption(config.run.max_minutes)
    watchdog = Watchdog(config.folder, world, config.run.timeout_minutes)
    model.register_forward_pre_hook(lambda *_: watchdog.forward())
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
        **options,
        checkpointer=checkpointer,
        state=state,
        log=log,
        samples=samples,
        peak_tokens_per_second=starting.peak_tokens_per_second(config, model, world),
        loaded=loaded,
    )


def load_newest(config: Config, checkpointer: Checkpointer, fresh: TrainState, log: Log) -> TrainState | None:
    """Load the checkpoint to resume from, or the weights to start from. Returns the saved state, if any."""
    try:
        loaded = checkpointer.load(fresh.identity)
    finally:
        for note in checkpointer.notes:
            log.info(f"note    {note}")
    if config.model.init_from and not loaded:
        from torchtitan_lite.checkpointing.initial_weights import load_weights
        from torchtitan_lite.huggingface import weights

        source = Path(config.model.init_from)
        load_weights(checkpointer, lambda verify: weights.open_weights(source, config.model, verify))
    return loaded


def run(loaded_config: Loaded, data: DataSet, world: World, log: Log) -> None:
    """Build the session, train, and write the final status to run.json."""
    config = loaded_config.config
    try:
        s = starting.start(loaded_config, data, world, log, build)
    except Exception as error:
        status = run_folder.write_status(config.folder, world, "failed", None, str(error) or repr(error))
        log.notify("stall" if is_stall(error) else "failure", None, status)
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
            train(s) if s.spikes is None else s.spikes.train(s, train, compute)
    except Exception as error:
        # every rank has raised this error, so a background save can still complete
        if isinstance(error, UserError) and not isinstance(error, StuckError):
            report_save(s, wait=True)
        run_folder.write_status(config.folder, world, "failed", s.state.step, str(error) or repr(error))
        log.notify("stall" if is_stall(error) else "failure", s.state.step)
        raise
    finally:
        if trackers is not None:
            trackers.close()
        s.close()


def sharded_model(config: Config, vocab_size: int, mesh: DeviceMesh, *, widen: bool = False) -> models.Transformer:
    """Build the model on the meta device and shard it: every parameter is a DTensor without storage."""
    with torch.device("meta"):
        model = models.build(config.model, vocab_size)
    optim.freeze(model, config.optim.freeze)
    model.output.z_loss = config.train.z_loss
    parallelize.apply_fast_paths(model, config.speed, widen=widen)
    parallelize.apply_activation_checkpointing(model, config.activation_checkpointing)
    parallelize.apply_compile(model, config.compile)
    parallelize.apply_fsdp(model, mesh, config.fsdp)
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
        if due(step, config.log.every):
            s.loss_since.zero_()
        if config.eval.every and (due(step, config.eval.every) or step == config.train.steps):
            with s.clock.paused():
                validate(s, step)
        if s.tasks is not None and s.tasks.due(step):
            last = last or s.preemption.agreed  # then the resume from this step scores them
            with s.clock.paused():
                s.tasks.score(s, step)
        if due(step, config.checkpoint.every) or last:
            check_previous_step(s)
            require_finite(s.model, step)
            require_equal_copies(s.model, s.optimizer, step)
            with s.clock.paused():
                save(s, last=last)
        if config.sample.every and not s.preemption.agreed and (due(step, config.sample.every) or last):
            from torchtitan_lite.training.sampling import sample

            with s.clock.paused():
                sample(s.model, s.prompts, step, stream(config.run.seed, step, 0, 0), s.world, log)
        report_save(s, wait=False)
        if s.profile is not None:
            with s.clock.paused():
                if line := s.profile.end(step, last=last):
                    log.info(line)
        if due(step, config.speed.gc_every):
            gc.collect()
        log.advance_bar()
        if last:
            break
    log.close()
    report_end(s, first)


def report_end(s: Session, first: int) -> None:
    """Log whether the run completed or was preempted, and write it to run.json."""
    config, step = s.config, s.state.step
    if step < config.train.steps:
        why = s.preemption.reason or "another rank was asked to"
        then = f"the same command resumes from there{launcher_note(why)}"
        s.log.info(f"stopped after step {step} of {config.train.steps} ({why}); {then}")
        run_folder.write_status(config.folder, s.world, "preempted", step, why)
        return
    run_folder.write_status(config.folder, s.world, "complete", step)
    s.log.notify("completion", step)
    for line in source_lines(s.samples, s.state):
        s.log.info(line)
    seconds = time.perf_counter() - s.clock.started
    s.log.info(f"done    {counted(step - first, 'step')} in {duration(seconds)}; {what_next(config, step)}")


def train_step(s: Session, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step.

    Returns:
        the mean loss per token of the global batch, and the gradient norm before clipping. Both are () tensors on the
        device: reading them would synchronise the host.
    """
    if s.config.fsdp.explicit_prefetching:
        parallelize.unshard_first(s.model)  # this all-gather overlaps with fetching the batch
    with s.clock.timing("data_s"):
        size = s.config.train.batch_size(step)
        first = s.config.data.position(s.state.samples_consumed, size)
        batch = s.loader.batch(first, size)
    s.watchdog.computing()
    totals = compute(s, step, batch)
    s.add_loss(totals[0], batch.global_tokens)
    loss, grad_norm = totals[0].float() / batch.global_tokens, totals[1].sqrt().float() / s.scaler.scale
    optim.clip_gradients(s.optimizer, grad_norm, s.config.optim.max_norm, s.scaler.scale)

    check_previous_step(s)  # the device has finished that step by now, so this does not wait
    optim.set_learning_rate(s.optimizer, optim.learning_rate(s.config.optim, step, s.config.train.steps))
    with s.clock.timing("optimizer_s"):
        suspect = None if s.spikes is None else s.spikes.suspect(s, step, loss, grad_norm)
        s.guard.update(step, totals[3:], grad_norm, suspect)
    s.preemption.share(totals[2])

    skipped = [[step - 1, s.state.samples_consumed, first]] if first > s.state.samples_consumed else []
    s.state = replace(
        s.state,
        step=step,
        val_loss=None,
        tokens=s.state.tokens + batch.global_tokens,
        samples_consumed=first + size,
        jumps=[*s.state.jumps, *skipped],
    )
    return loss, grad_norm


def compute(s: Session, step: int, batch: Batch) -> torch.Tensor:
    """Forward and backward of a step.

    Returns:
        sums over ranks, (3 + world_size,) float64: the loss, the squared gradient norm, the requests to stop, and the
        loss of each rank.
    """
    device, world = s.world.device, s.world
    loss_sum = torch.zeros((), device=device)
    for i, micro in enumerate(batch.micro_batches):
        # Seeds dropout from the step, so no random state has to be saved. (torch.manual_seed is slower.)
        seed = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
        seed(stream(s.config.run.seed, step, i, world.rank))
        parallelize.before_micro_batch(s.model, s.config.fsdp, last=i == len(batch.micro_batches) - 1)
        loss = s.model(*micro.on(device))
        # FSDP averages gradients over ranks. We want the sum over ranks divided by the tokens of the global batch.
        s.scaler.scaled(loss * (world.world_size / batch.global_tokens)).backward()
        loss_sum += loss.detach()

    # one small all-reduce for all that ranks share in a step
    totals = torch.zeros(3 + world.world_size, dtype=torch.float64, device=device)
    totals[0], totals[1] = loss_sum, optim.squared_norm(s.model, s.layout.dp_replicate)
    totals[2:3].fill_(float(s.preemption.requested()))  # totals[2] = 1.0 would make the host wait for the device
    totals[3 + world.rank] = loss_sum  # the sums of the others add 0
    return sum_over_ranks(totals)


def due(step: int, every: int) -> bool:
    """Whether a step is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0


def stream(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """A distinct seed for each forward pass of a run."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}/{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. User errors are printed once per machine."""
    return run_cli("train.py", lambda: start(argv), info=lambda text: print_once(text, local_rank()))


def start(argv: Sequence[str]) -> int:
    """Parse and check the config, then prepare the data and train. Returns the exit code."""
    prepare_process()
    prints = local_rank() == 0
    try:
        sizes = {"world_size": env_int("WORLD_SIZE", 1), "local_world_size": env_int("LOCAL_WORLD_SIZE", 1)}
        model_checks = [checks.check_patterns, checks.check_prompts, checks.check_init_from]
        command = cli.parse(argv, n_gpus=torch.cuda.device_count(), checks=model_checks, **sizes)
        config = command.loaded.config
        if command.print_config or command.check_config:
            lines = [f"note    {note}" for note in command.loaded.notes]
            lines.append(f"the configuration is fine; its run is in {config.folder}")
            if prints:
                print(to_toml_with_origins(command.loaded) if command.print_config else "\n".join(lines))
            return 0
        for note in command.loaded.notes if prints else ():
            print_line(f"note    {note}")
        with out_of_memory.explained(config), run_folder.made(config.folder, command.trains):
            prepare_and_run(command)
    except KeyboardInterrupt:
        if prints:
            print_error(f"train.py: stopped; the same command resumes from the newest checkpoint{launcher_note()}")
        return 130
    return 0


def prepare_and_run(command: cli.Command) -> None:
    """Prepare the data, then train, inspect, replay or make a dry run."""
    loaded, data = starting.prepared(command.loaded)
    config = loaded.config
    if not command.trains:
        from torchtitan_lite.tools import instead

        instead.run(command, loaded, data, build, train_step, sharded_model)
        return
    with process_group(config.run) as world, explained(world):
        lock = run_folder.lock(config.folder, world)
        log = Log(config.folder, speaks=world.rank == 0)
        with log.notifying(config.run.name, config.log.notify):
            run(loaded, data, world, log)
        lock.release()


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
