"""Rules of the mesh, of sharding strategies, of offloading, and of float8."""

import json
import math

from torchtitan_lite.config.schema import Config, Machine, Rules
from torchtitan_lite.config.sections.fsdp import STRATEGIES


def strategy_rules(config: Config, machine: Machine) -> Rules:
    """Yield the keys that contradict the strategy."""
    strategy = config.fsdp.sharding_strategy
    for key, meant in STRATEGIES.get(strategy, {}).items():
        if getattr(config.fsdp, key) not in (meant, "default", -1):
            yield (
                f"fsdp.{key} fsdp.sharding_strategy",
                f'sharding_strategy = "{strategy}" means {key} = {json.dumps(meant)}; leave one of the two out',
            )


def rules(config: Config, machine: Machine) -> Rules:
    """Yield the broken rules of the mesh and of offloading."""
    fsdp, world_size = config.fsdp, machine.world_size
    replicate, shard = fsdp.mesh_shape(world_size)
    if replicate * shard != world_size:
        works = replicate if replicate and world_size % replicate == 0 else 1
        yield (
            "fsdp.dp_shard fsdp.dp_replicate",
            f"fsdp.dp_replicate = {replicate} x fsdp.dp_shard = {shard} does not give the world size "
            f"{world_size}; fsdp.dp_replicate = {works} with fsdp.dp_shard = {world_size // works} works",
        )
        return
    ranks = fsdp.reshard_after_forward
    if not isinstance(ranks, bool | str) and (shard % ranks or ranks >= shard):
        divisors = [str(n) for n in range(2, shard) if shard % n == 0]
        yield (
            "fsdp.reshard_after_forward fsdp.dp_shard",
            f"fsdp.reshard_after_forward = {ranks} should divide dp_shard = {shard} and be less than it; "
            f"{' or '.join([*divisors, 'true'])} works",
        )
    if fsdp.shard_columns and not isinstance(ranks, bool | str):
        yield (
            "fsdp.shard_columns fsdp.reshard_after_forward",
            f"fsdp.reshard_after_forward = {ranks} keeps rows of each parameter, which torch can't gather again for "
            "fsdp.shard_columns; reshard_after_forward = true works",
        )
    if fsdp.grad_sync == "all_reduce_last" and (replicate == 1 or shard == 1):
        yield (
            "fsdp.grad_sync fsdp.dp_replicate fsdp.dp_shard",
            f'fsdp.grad_sync = "all_reduce_last" needs replicas of a sharded model, but dp_replicate = '
            f'{replicate} and dp_shard = {shard}; "every" or "last" works',
        )
    if fsdp.cpu_offload:
        yield from _offload_rules(config, machine, replicate)


def _offload_rules(config: Config, machine: Machine, replicate: int) -> Rules:
    """Yield the settings that cpu_offload does not support."""
    refused = {
        "run.device": (
            config.run.device == "cpu" or machine.n_gpus == 0,
            "moves parameters between a GPU and the host, but this run uses no GPU; fsdp.cpu_offload = false works",
        ),
        "fsdp.dp_replicate": (
            replicate > 1,
            f"with fsdp.dp_replicate = {replicate} is not proven to give the right gradients: "
            "https://github.com/pytorch/pytorch/pull/180665 measured wrong ones, without an error; "
            "fsdp.dp_replicate = 1 works",
        ),
        "optim.name": (
            config.optim.name == "muon",
            'keeps gradients on the host, and optim.name = "muon" exchanges them between GPUs; '
            'fsdp.cpu_offload = false works, or optim.name = "adamw"',
        ),
    }
    for key, (broken, text) in refused.items():
        if broken:
            yield f"fsdp.cpu_offload {key}", f"fsdp.cpu_offload = true {text}"


def float8_rules(config: Config, machine: Machine) -> Rules:
    """Yield the settings that float8 does not support."""
    if not config.speed.float8:
        return
    fsdp, micro_batch = config.fsdp, config.train.micro_batch_size
    # the weight-gradient matmul sums over the tokens; batches of pairs are padded to a multiple of 8 columns
    lengths = {8} if config.data.objective == "pairs" else {config.input_len, config.target_len}
    dtypes = fsdp.dtypes("param_dtype") - {None, "bfloat16"}
    refused = {
        "train.micro_batch_size": (
            any(micro_batch * length % 16 for length in lengths),
            "needs a multiple of 16 tokens in a micro-batch, which train.micro_batch_size = "
            f"{micro_batch} does not give; multiples of {16 // math.gcd(16, *lengths)} work",
        ),
        "fsdp.param_dtype fsdp.precision_overrides": (
            dtypes,
            'needs fsdp.param_dtype = "bfloat16" for all groups, as its matmuls return bfloat16, but some have '
            f'"{min(map(str, dtypes), default="")}"; fsdp.param_dtype = "bfloat16" works, without an override',
        ),
        "fsdp.reshard_after_forward": (
            not isinstance(fsdp.reshard_after_forward, bool | str),
            f"can't gather again in backward with fsdp.reshard_after_forward = {fsdp.reshard_after_forward}; "
            "true, false or default works",
        ),
        "fsdp.shard_columns": (
            fsdp.shard_columns,
            "gathers rows, but fsdp.shard_columns splits matrices by columns; fsdp.shard_columns = [] works",
        ),
        "fsdp.cpu_offload": (
            fsdp.cpu_offload,
            "casts shards on the GPU, but fsdp.cpu_offload = true keeps them on the host; "
            "fsdp.cpu_offload = false works",
        ),
    }
    for keys, (broken, text) in refused.items():
        if broken:
            yield f"speed.float8 {keys}", f"speed.float8 = true {text}, or speed.float8 = false"
