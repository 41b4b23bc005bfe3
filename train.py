"""Train a Transformer with FSDP2, from the command line to the last checkpoint. Read it from top to bottom.

    torchrun --nproc-per-node 2 train.py                         # two processes, on GPUs or on the CPU
    torchrun --nproc-per-node 2 train.py --explicit-prefetching  # or --mixed-precision, --dcp-api
    torchrun --nproc-per-node 2 train.py --config configs/debug.toml --train.steps=50
    python train.py                                              # one process

Running the same command again resumes the run.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite import cpu, models  # before torch: it may set a variable that OpenMP reads

# isort: split
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from checkpoint import WAYS
from torchtitan_lite.checkpointing.compatibility import fresh_state
from torchtitan_lite.checkpointing.find import config_to_resume
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import cli
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Batch, Loader, PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed import fsdp, recompute_and_compile
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import (
    Process,
    build_mesh,
    exit_process,
    process_group,
    set_group_timeouts,
)
from torchtitan_lite.environment import disable_automatic_gc, env_int, local_rank, prepare_process, world_size
from torchtitan_lite.errors import run_cli
from torchtitan_lite.optim import optimizer as optim
from torchtitan_lite.optim.finite_guard import FiniteGuard, Guard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.groups import freeze
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import attempts, checks, out_of_memory, phases, run_folder, start_and_end
from torchtitan_lite.run.between_steps import build_periodic_work
from torchtitan_lite.run.metrics import Log, Meter
from torchtitan_lite.run.preemption import Preemption
from torchtitan_lite.run.resumed import missed_evaluations, run_missed
from torchtitan_lite.run.saving import report_save
from torchtitan_lite.run.session import Session, build_profile, check_previous_step, due, forward_seed
from torchtitan_lite.run.watchdog import Watchdog
from torchtitan_lite.terminal import print_line


def main(argv: Sequence[str]) -> int:
    """Run the command line. User errors are printed once per machine.

    Returns:
        The exit code: 0, run.preempted_exit_code, 1, 2, 3 or 130 (docs/cluster.md says when).
    """
    return run_cli("train.py", lambda: launch(argv), local_rank())


def launch(argv: Sequence[str]) -> int:
    """Parse and check the config, prepare the data, and train. Returns the exit code."""
    prepare_process()
    command = cli.parse(
        argv,
        world_size=world_size(argv, torch.cuda.device_count()),
        local_world_size=env_int("LOCAL_WORLD_SIZE", 1),
        n_gpus=torch.cuda.device_count(),
        checks=checks.ALL,
        saved=config_to_resume,  # what decides what is learned stays as it was, even if defaults have changed
    )
    config = command.loaded.config
    with out_of_memory.with_advice(config):
        if not command.trains:
            from torchtitan_lite.tools import modes

            modes.run(command, build, train_step, sharded_model)
            return 0
        run_folder.require_writable(config.folder)
        for note in command.loaded.notes if local_rank() == 0 else ():
            print_line(f"note    {note}")
        loaded, data = start_and_end.prepared(command.loaded)  # before the process group, which has timeouts
        with process_group(config.run) as process:
            lock = run_folder.lock(config.folder)
            log = Log(config.folder, enabled=process.rank == 0)
            code = run(loaded, data, process, log)
            lock.release()
            return code


def run(loaded: Loaded, data: DataSet, process: Process, log: Log) -> int:
    """Build, take over the run's folder, and train. Writes the outcome to run.json. Returns the exit code."""
    config, s = loaded.config, None
    closing = contextlib.ExitStack()
    try:
        hosts = start_and_end.require_one_run(loaded, data, process)
        s = build(config, data, process, log)
        closing.callback(s.close)
        start_and_end.take_over(hosts, loaded, data, s)
        missed = missed_evaluations(s)  # due at the step that the run resumes from, but never finished
        if missed or s.state.step < config.train.steps:
            log.track(config.log, s.state)
            closing.callback(log.close)
        with s.preemption, s.watchdog.training(), out_of_memory.with_advice(config):
            run_missed(s, missed)
            if not s.preemption.agreed:
                train(s)
            return start_and_end.report_end(s)  # run.preempted_exit_code after a signal, 1 if a machine joins, else 0
    except Exception as error:
        start_and_end.report_failure(config, process, log, error, s)  # if all ranks failed, waits for a background save
        raise
    finally:
        closing.close()


def build(config: Config, data: DataSet, process: Process, log: Log) -> Session:
    """Build all parts of a run, and load the state that it starts from. Does not change the run's folder."""
    s = Session(config, data, process, log)
    s.watchdog = Watchdog(config.folder, process, config.run)
    with contextlib.ExitStack() as on_error:
        on_error.callback(s.watchdog.close)
        s.profile = build_profile(config, process)  # before the model, for the stacks of a memory snapshot
        # 1. The mesh: which ranks shard one replica of the model, and which hold further replicas.
        mesh = build_mesh(config.fsdp, process.device)
        s.connected_s = start_and_end.connect(mesh, s.watchdog)

        # 2. The model: each rank has its rows of every parameter.
        s.model = build_model(config, data.vocab_size, mesh, process)
        s.model.register_forward_pre_hook(lambda *_: s.watchdog.forward())

        # 3. The optimizer, after sharding: its parameters are DTensors, so its moments are sharded like them.
        s.optimizer = optim.build_optimizer(s.model, config.optim)

        # 4. The work between steps. Its data, such as the validation set, is the same in all phases.
        s.periodic, evaluated = build_periodic_work(config, data, process)

        # 5. The run's newest checkpoint, else that of checkpoint.resume (a fork), else the weights of model.init_from.
        s.preemption = Preemption(config.run.max_minutes, config.folder / run_folder.JOINING)  # includes the load
        s.checkpointer = build_checkpointer(config, s.model, s.optimizer, process)
        s.state = fresh_state(config, data, process, **evaluated)
        with s.watchdog.loading("loading a checkpoint"):
            s.resumed = load_newest(config, s.checkpointer, s.state, log)
        if s.resumed:
            s.state = s.resumed.continued_by(s.state)

        # 6. The data: a batch's sequences are a function of the seed, state.segments and an integer, samples_consumed.
        s.phase, s.samples, s.state = phases.open_phase(config, data, s.state, s.state.step)
        if s.phase is not config:
            s.model.use_context(s.phase.model)

        # 7. The loss scale (float16), the guards that can withhold an update, and what is measured.
        averaged = fsdp.averaged_over(config.fsdp, process.world_size)
        scale = s.state.grad_scaler
        s.scaler = GradScaler(config.grad_scaler, config.fsdp.uses_float16, process.device, scale, averaged)
        s.guards = build_guards(config, process, s.state, s.scaler, s.checkpointer, log)
        s.meter = Meter(s.state, process.device, start_and_end.peak_tokens_per_second(s.phase, s.model, process))
        s.measure()
        s.loader = build_loader(s.phase, s.samples, process)
        on_error.pop_all()
    return s


def build_checkpointer(
    config: Config, model: models.Transformer, optimizer: Optimizer, process: Process
) -> Checkpointer:
    """Build what saves and loads checkpoints; with run.remote, also in a bucket."""
    remote = None
    if config.run.remote:
        from torchtitan_lite.checkpointing.remote import Remote

        remote = Remote(config, process, run_folder.job(), attempts.claim_of)
    return Checkpointer(
        config.folder / "checkpoints",
        model,
        optimizer,
        config.checkpoint,
        process,
        WAYS,
        best_of=attempts.best_step,
        remote=remote,
    )


def build_model(config: Config, vocab_size: int, mesh: DeviceMesh, process: Process) -> models.Transformer:
    """Build the sharded model with its initial values."""
    # First on the meta device, without storage. Then each rank allocates and fills its own shards.
    model = sharded_model(config, vocab_size, mesh, widen=cpu.widens(config, process))
    set_group_timeouts()  # no timeouts: the watchdog ends hanging runs
    materialize(model, process.device, config.run.seed, offload=config.fsdp.cpu_offload)
    return model


def build_loader(config: Config, samples: Mixture, process: Process) -> PrefetchingLoader:
    """Build what loads this rank's batches, the next one in a thread."""
    loader = Loader(
        samples,
        micro_batch_size=config.train.micro_batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.run.seed,
        document_mask=config.data.document_mask,
        pin=process.device.type == "cuda",
    )
    return PrefetchingLoader(loader, process.device)


def build_guards(
    config: Config, process: Process, state: TrainState, scaler: GradScaler, checkpointer: Checkpointer, log: Log
) -> list[Guard]:
    """Build the guard against non-finite updates and, with [spike], the guard against loss spikes."""
    skipped = list(state.skipped)  # the guards share it
    max_skipped = config.train.max_skipped if config.train.on_nonfinite == "skip" else 0
    guards: list[Guard] = [FiniteGuard(scaler, skipped, max_skipped)]
    if config.spike.action != "off":
        from torchtitan_lite.run import spikes

        guards.append(spikes.build_guard(config, process, state, skipped, checkpointer, log))
    return guards


def sharded_model(config: Config, vocab_size: int, mesh: DeviceMesh, *, widen: bool = False) -> models.Transformer:
    """Build the model on the meta device and shard it: every parameter is a DTensor without storage."""
    with torch.device("meta"):
        model = models.build(config.model, vocab_size, models.LossOptions.from_config(config))
    freeze(model, config.optim.freeze)
    if config.speed.float8:
        from torchtitan_lite.distributed import float8

        float8.convert(model, mesh)
    # On a CPU, faster versions replace these; each has its own config key. Only the summation order differs, and in
    # 16 bits the rounding of intermediate results:
    #     of the model     attend: matmuls over blocks of queries, cpu/attention.py      speed.block_attention
    #                      nn.RMSNorm, rotate: fewer passes over memory, cpu/fused.py    speed.fused_functions
    #                      cross_entropy: in chunks that fit the cache, cpu/loss.py      speed.chunked_loss
    #                      nn.Linear, multiply, attend, cross_entropy: float32 if the
    #                      CPU has no 16-bit matmuls, cpu/float32_matmuls.py                       speed.widen_matmuls
    #     of FSDP2         collectives of one machine: cpu/shared_memory.py              speed.shared_memory
    if mesh.device_type == "cpu":
        cpu.apply(model, config.speed, widen=widen)
    # The order matters: checkpointing replaces a block's forward, compilation takes the result, and fully_shard puts
    # its hooks (all-gather before, reshard after) around both.
    recompute_and_compile.apply_activation_checkpointing(model, config.activation_checkpointing)
    dynamic_shapes = config.data.objective == "pairs" or (False if config.train.phases else None)
    recompute_and_compile.apply_compile(model, config.compile, dynamic_shapes=dynamic_shapes)
    fsdp.apply_fsdp(model, mesh, config.fsdp)
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
    """Train from the step after `s.state` to the last one, or until the ranks agree to stop.

    A stop first logs and saves, unless the ranks agree to it after a save. The next start runs what else was due at
    that step (`run_missed`).
    """
    config, steps = s.config, s.config.train.steps
    if config.speed.gc_every:
        disable_automatic_gc()
    for step in s.log.progress(s.state.step + 1, steps):
        s.watchdog.step(step)
        if s.profile:
            s.profile.start(step)
        record = train_step(s, step)

        if s.preemption.agreed or any(work.due(step, steps) for work in s.periodic):
            check_previous_step(s)  # check this step now (the device runs out of work); else the next step checks it
        with s.meter.paused():
            for work in s.periodic:  # log, validate, score tasks, save, sample
                # `check_previous_step` sets `agreed`, here or within `train_step`; so does a synchronous save
                if work.due(step, steps, stops=s.preemption.agreed):
                    work.run(s, record)
            if s.checkpointer.finished() or s.checkpointer.remote:
                report_save(s.checkpointer, s.log, wait=False)  # one in the background may have ended
            if s.profile and (line := s.profile.stop(step, last=s.preemption.agreed or step == steps)):
                s.log.info(line)
            if due(step, config.speed.gc_every):
                gc.collect()
        if s.preemption.agreed:
            break


def train_step(s: Session, step: int) -> StepRecord:
    """Run one optimizer step: forward and backward per micro-batch, one all-reduce of sums, clipping, the update."""
    if s.state.step in s.config.train.boundaries(s.state.phases):
        from torchtitan_lite.run import next_phase

        next_phase.enter(s, step, build_loader, build_guards)
    config = s.phase
    if config.fsdp.explicit_prefetching:
        fsdp.unshard_first(s.model)  # this all-gather overlaps with fetching the batch
    with s.meter.timing("data_s"):
        size = config.train.batch_size(step)  # of all ranks together
        # samples_consumed, moved past any range of data.skip_samples that the batch would overlap
        first = config.data.position(s.state.samples_consumed, size)
        batch = s.loader.batch(first, size)
    s.watchdog.computing()
    logged, next_logged = (n == config.train.steps or due(n, config.log.every) for n in (step, step + 1))
    with s.rank_seconds.step(timed=next_logged):
        loss = forward_backward(s, step, batch)
    check_previous_step(s)  # the guards must know it first; the device has this step's work, so it does not idle
    replicas = s.blocks.replicas
    norms = optim.gradient_norms(s.model)
    record = StepRecord(  # sums the parts of all ranks: the one small all-reduce of a step
        step,
        samples=(first, first + size),
        targets=batch.global_tokens,
        loss=loss,
        # Each rank has only its shards' gradients, so the squared norm is summed over ranks. With HSDP that sum counts
        # every replica, so each rank divides its part by the number of replicas.
        squared_norm=optim.squared_norm(norms, replicas),
        loss_scale=s.scaler.scale,
        stop=s.preemption.requested(),
        blocks=s.blocks.names,
        squares=s.blocks.squares(norms, weights=logged and config.log.norms),
        parts=[m.parts(s.model, replicas=replicas, loss_scale=s.scaler.scale) for m in s.metrics if logged],
        process=s.process,
    )
    s.meter.add_loss(record.loss_sum, record.targets)
    with s.meter.timing("optimizer_s"):
        withheld = torch.stack([guard.withholds(record) for guard in s.guards]).any()
        lr = optim.learning_rate(config.optim, step, config.train.steps)
        factor = optim.clip_factor(record.grad_norm, config.optim.max_norm, s.scaler.scale)
        # changes nothing if `withheld` is true; decided on the device, without waiting
        s.optimizer.update(step, lr, factor, withheld, measure=logged and config.log.norms)
        record.squares.update(s.blocks.of_update(s.optimizer))  # a second small all-reduce, if measured
        s.scaler.update(~record.finite)

    s.pending, s.state = record, s.state.after_step(first + size, batch.source_tokens)
    return record


def forward_backward(s: Session, step: int, batch: Batch) -> Tensor:
    """Accumulate the gradients of a batch. Returns this rank's summed loss, a scalar tensor."""
    device, process = s.process.device, s.process
    loss_sum = torch.zeros((), device=device)
    for i, micro in enumerate(batch.micro_batches):
        # Seeds dropout from the step, so there is no random state to save. (torch.manual_seed is slower.)
        seed = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
        seed(forward_seed(s.config.run.seed, step, i, process.rank))
        # By default each backward reduces, and gradients accumulate as shards. grad_sync can defer the reduction.
        fsdp.before_micro_batch(s.model, s.config.fsdp, last=i == len(batch.micro_batches) - 1)
        loss = s.model(**micro.on(device))  # summed over this rank's targets
        s.source_losses.add(micro, first=i == 0)
        # Gradients are summed over ranks, so each rank divides by the global batch's number of valid targets. Its own
        # number would be wrong, because masking makes them differ between ranks.
        s.scaler.scaled(loss / batch.global_tokens).backward()
        loss_sum += loss.detach()
    return loss_sum


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
