"""Train a Transformer with FSDP2, from the command line to the last checkpoint. Read it from top to bottom.

    torchrun --nproc-per-node 2 train.py                         # two processes, on GPUs or on the CPU
    torchrun --nproc-per-node 2 train.py --explicit-prefetching  # or --mixed-precision, --dcp-api
    torchrun --nproc-per-node 2 train.py --config configs/debug.toml --train.steps=50
    python train.py                                              # one process

The same command again resumes the run.
"""

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite import cpu, models  # before torch: it may set a variable that OpenMP reads

# isort: split
import torch
from torch.distributed.device_mesh import DeviceMesh

from checkpoint import Checkpointer
from torchtitan_lite.checkpointing.compatibility import fresh_state
from torchtitan_lite.checkpointing.find import config_to_resume
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import cli
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Batch, Loader, PrefetchingLoader
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.distributed import blocks, parallelize
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.process_group import (
    World,
    build_mesh,
    exit_process,
    limit_group_timeouts,
    process_group,
)
from torchtitan_lite.errors import run_cli
from torchtitan_lite.monitoring import attempts, run_folder
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.monitoring.watchdog import Watchdog
from torchtitan_lite.optim import optimizer as optim
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.process import env_int, local_rank
from torchtitan_lite.scoring.validation import Validation
from torchtitan_lite.terminal import print_error, print_line
from torchtitan_lite.training import checks, out_of_memory, start
from torchtitan_lite.training.callbacks import build_callbacks, garbage_on_schedule, make_up, missing
from torchtitan_lite.training.intact import settle
from torchtitan_lite.training.preemption import Preemption, launcher_note, prepare_process
from torchtitan_lite.training.session import Session, StepResult, Sums, due, stream


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. User errors are printed once per machine."""
    return run_cli("train.py", lambda: launch(argv), local_rank())


def launch(argv: Sequence[str]) -> int:
    """Parse and check the config, prepare the data, and train. Returns the exit code."""
    prepare_process()
    prints = local_rank() == 0
    try:
        command = cli.parse(
            argv,
            world_size=env_int("WORLD_SIZE", 1),
            local_world_size=env_int("LOCAL_WORLD_SIZE", 1),
            n_gpus=torch.cuda.device_count(),
            checks=checks.ALL,
            saved=config_to_resume,  # a run that resumes keeps its values, whatever today's defaults are
        )
        config = command.loaded.config
        with out_of_memory.explained(config), run_folder.made(config.folder, command.trains):
            if not command.trains:
                from torchtitan_lite.tools import modes

                modes.run(command, build, train_step, sharded_model)
                return 0
            for note in command.loaded.notes if prints else ():
                print_line(f"note    {note}")
            loaded, data = start.prepared(command.loaded)  # before there is a process group, which has timeouts
            with process_group(config.run) as world:
                lock = run_folder.lock(config.folder)
                log = Log(config.folder, speaks=world.rank == 0)
                code = run(loaded, data, world, log)
                lock.release()
                return code
    except KeyboardInterrupt:
        if prints:
            print_error(f"train.py: stopped; the same command resumes from the newest checkpoint{launcher_note()}")
        return 130


def run(loaded: Loaded, data: DataSet, world: World, log: Log) -> int:
    """Build, take over the run's folder, and train. Whatever happens is written to run.json. Returns the exit code."""
    config, s = loaded.config, None
    closing = contextlib.ExitStack()
    try:
        hosts = start.begin(loaded, data, world)
        s = build(config, data, world, log)
        closing.callback(s.close)
        start.take_over(hosts, loaded, data, s)
        due_before = missing(s)  # at the step that the run resumes from
        if due_before or s.state.step < config.train.steps:
            closing.enter_context(log.tracking(config.log, s.state))
        with s.preemption, s.watchdog.explained(), out_of_memory.explained(config):
            make_up(s, due_before)
            if not s.preemption.agreed:
                train(s)
            return start.report_end(s)
    except Exception as error:
        start.report_failure(config, world, log, error, s)
        raise
    finally:
        closing.close()


def build(config: Config, data: DataSet, world: World, log: Log) -> Session:
    """Build everything that a run works with, and load the state it starts from. The run's folder is not changed."""
    watchdog = Watchdog(config.folder, world, config.run)
    try:
        return build_watched(config, data, world, log, watchdog)
    except BaseException:
        watchdog.close()
        raise


def build_watched(config: Config, data: DataSet, world: World, log: Log, watchdog: Watchdog) -> Session:
    """The parts, in their order."""
    # 1. The mesh: which ranks shard one copy of the model, and which hold further copies.
    mesh = build_mesh(config.fsdp, world.device)

    # 2. The model: sharded on the meta device, without storage. Each rank then allocates and fills its own shards.
    model = sharded_model(config, data.vocab_size, mesh, widen=cpu.widens(config, world))
    limit_group_timeouts()  # none: the watchdog ends what hangs
    model.register_forward_pre_hook(lambda *_: watchdog.forward())
    materialise(model, world.device, config.run.seed, offload=config.fsdp.cpu_offload)

    # 3. The optimizer, after sharding: it holds the DTensors, so its moments are sharded as the parameters are.
    optimizer = optim.build_optimizer(model, config.optim)

    # 4. The data: which sequences a batch has is a function of the seed and one integer, state.samples_consumed.
    samples = open_samples(data, "train", config)
    loader = PrefetchingLoader(
        Loader(
            samples,
            micro_batch_size=config.train.micro_batch_size,
            rank=world.rank,
            world_size=world.world_size,
            seed=config.run.seed,
            document_mask=config.data.document_mask,
            pin=world.device.type == "cuda",
        ),
        world.device,
    )
    validation = Validation.of(config, data, config.train.micro_batch_size, world.rank, world.world_size)
    callbacks = build_callbacks(config, data, world, model, validation)

    # 5. The newest checkpoint of the run, else the weights that model.init_from names.
    preemption = Preemption(config.run.max_minutes, config.folder / run_folder.JOINING)
    best_of = functools.partial(attempts.best_step, config.folder)
    checkpointer = Checkpointer(config.folder / "checkpoints", model, optimizer, config.checkpoint, world, best_of)
    questions = {name: digest for callback in callbacks for name, digest in callback.questions.items()}
    fresh = fresh_state(config, data, world, validation.identity(), questions)
    with watchdog.loading("loading a checkpoint"):
        resumed = load_newest(config, checkpointer, fresh, log)
    state = resumed.continued_by(fresh) if resumed else fresh

    # 6. The guards: a loss scale for float16, updates that are not finite, and loss spikes.
    scaler = GradScaler(config.grad_scaler, config.fsdp.uses_float16, world.device, state.grad_scaler)
    max_skipped = config.train.max_skipped if config.train.on_nonfinite == "skip" else 0
    guard = FiniteGuard(optimizer, scaler, max_skipped, state.skipped)
    spikes = None
    if config.spike.action != "off":
        from torchtitan_lite.optim.spike_guard import SpikeGuard

        spikes = SpikeGuard(config.spike, config.optim.warmup_steps, state.spikes)
    return Session(
        config=config,
        world=world,
        dp_replicate=config.fsdp.mesh(world.world_size)[0],
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        guard=guard,
        samples=samples,
        loader=loader,
        preemption=preemption,
        watchdog=watchdog,
        checkpointer=checkpointer,
        log=log,
        state=state,
        resumed=resumed,
        spikes=spikes,
        callbacks=callbacks,
    )


def sharded_model(config: Config, vocab_size: int, mesh: DeviceMesh, *, widen: bool = False) -> models.Transformer:
    """Build the model on the meta device and shard it: every parameter is a DTensor without storage."""
    with torch.device("meta"):
        model = models.build(config.model, vocab_size, models.LossOptions.of(config))
    optim.freeze(model, config.optim.freeze)
    if config.speed.float8:
        from torchtitan_lite.distributed import float8

        float8.convert(model, mesh)
    if mesh.device_type == "cpu":
        cpu.apply(model, config.speed, widen=widen)
    # The order matters: checkpointing replaces a block's forward, compilation takes the result, and fully_shard puts
    # its hooks (all-gather before, reshard after) around both.
    blocks.apply_activation_checkpointing(model, config.activation_checkpointing)
    blocks.apply_compile(model, config.compile, all_lengths=config.data.objective == "pairs")
    parallelize.apply_fsdp(model, mesh, config.fsdp)
    if config.speed.float8:
        float8.gather_in_float8(model)
    if config.speed.shared_memory:
        cpu.apply_shared_memory(model, mesh)
    return model


def load_newest(config: Config, checkpointer: Checkpointer, fresh: TrainState, log: Log) -> TrainState | None:
    """Load the checkpoint to resume from, or the weights to start from. Returns the saved state, if any."""
    try:
        saved = checkpointer.load(fresh.values)
        if config.model.init_from and not saved:
            from torchtitan_lite.huggingface import weights

            find = functools.partial(weights.find_weights, Path(config.model.init_from), config.model)
            checkpointer.load_weights(find, lambda folder: weights.open_weights(folder, config.model))
        return saved
    finally:
        for note in checkpointer.notes:
            log.info(f"note    {note}")


def train(s: Session) -> None:
    """Train from the step after `s.state` to the last one, or until the run is preempted."""
    steps = s.config.train.steps
    s.log.start_bar(s.state.step, steps)
    with garbage_on_schedule(s.config.speed.gc_every):
        for step in range(s.state.step + 1, steps + 1):
            s.watchdog.step(step)
            for callback in s.callbacks:
                if callback.before:
                    callback.before(step)
            result = train_step(s, step)
            reads = s.stopping or any(callback.reads_step and due(step, callback.every) for callback in s.callbacks)
            if reads:
                settle(s)  # now, and wait for the device; otherwise the next step does it, without waiting
            for callback in s.callbacks:  # training/callbacks.py: log, validate, score tasks, save, sample, profile
                last = step == steps or (s.preemption.agreed and callback.when_preempted)
                if last or due(step, callback.every):
                    with s.meter.paused():
                        callback.after(s, result)
            s.log.advance_bar()
            if s.preemption.agreed:
                break
    s.log.close()


def train_step(s: Session, step: int) -> StepResult:
    """One optimizer step: forward and backward of each micro-batch, one all-reduce of sums, clipping, the update."""
    config = s.config
    if config.fsdp.explicit_prefetching:
        parallelize.unshard_first(s.model)  # this all-gather overlaps with fetching the batch
    with s.meter.timing("data_s"):
        size = config.train.batch_size(step)
        first = config.data.position(s.state.samples_consumed, size)  # further on where data.skip_samples says so
        batch = s.loader.batch(first, size)
    s.watchdog.computing()
    sums = forward_backward(s, step, batch)
    loss, grad_norm = sums.loss.float() / batch.global_tokens, sums.squared_norm.sqrt().float() / s.scaler.scale
    result = StepResult(loss, grad_norm)
    # the fused AdamW gets the factor as `grad_scale`, and applies it to the gradients as it reads them
    optim.clip_gradients(s.optimizer, grad_norm, config.optim.max_norm, s.scaler.scale)

    settle(s)  # of the previous step, which the device has finished by now: the host does not wait
    s.meter.add_loss(sums.loss, batch.global_tokens)
    optim.set_learning_rate(s.optimizer, optim.learning_rate(config.optim, step, config.train.steps))
    with s.meter.timing("optimizer_s"):
        suspect = None if s.spikes is None else s.spikes.suspect(step, loss, grad_norm)
        s.guard.update(step, sums.rank_losses, grad_norm, suspect)
        s.model.balance(sums.loads, s.optimizer.found_inf)
    s.loads = sums.loads
    s.preemption.share(sums.stop_requests)

    s.state = s.state.after_step(first + size, batch.global_tokens)
    return result


def forward_backward(s: Session, step: int, batch: Batch) -> Sums:
    """Accumulate the gradients of a batch. Returns the sums over all ranks."""
    device, world = s.world.device, s.world
    loss_sum = torch.zeros((), device=device)
    s.model.loads = None
    for i, micro in enumerate(batch.micro_batches):
        # Seeds dropout from the step, so no random state has to be saved. (torch.manual_seed is slower.)
        seed = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
        seed(stream(s.config.run.seed, step, i, world.rank))
        # By default backward reduces each micro-batch, and gradients accumulate as shards. grad_sync can put it off.
        parallelize.before_micro_batch(s.model, s.config.fsdp, last=i == len(batch.micro_batches) - 1)
        loss = s.model(*micro.on(device))  # summed over this rank's targets
        # FSDP2's reduce-scatter AVERAGES gradients over ranks. The gradient of the mean loss per token is their SUM,
        # divided by the valid targets of the global batch; so the average is multiplied by the number of ranks. No rank
        # divides by its own number of targets: with masked targets the ranks have different numbers.
        s.scaler.scaled(loss * (world.world_size / batch.global_tokens)).backward()
        loss_sum += loss.detach()
    # A rank holds the gradients of its own shards, so their norm is a sum over ranks. With HSDP, each shard has copies.
    squared_norm = optim.squared_norm(s.model, s.dp_replicate)
    return Sums.over_ranks(loss_sum, squared_norm, s.model.loads, stop=s.preemption.requested(), world=world)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
