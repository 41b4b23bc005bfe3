"""[fsdp] and [grad_scaler]: the mesh, when parameters are gathered and gradients reduced, and in which dtypes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, PositiveInt

from torchtitan_lite.config.section import BITS, Dtype, Resume, Section, UsedIf, used_with


def _reshard(value: Any) -> Any:
    if value == "default" or (isinstance(value, int) and (isinstance(value, bool) or value > 1)):
        return value
    raise ValueError('should be "default", true, false, or a number of ranks above 1')


class PrecisionOverride(Section):
    match: str
    """pattern of parameter names, e.g. "layers.0.*"; the first matching override applies"""
    param_dtype: Dtype | None = None
    """replaces [fsdp] param_dtype; absent: unchanged"""
    reduce_dtype: Dtype | None = None
    """replaces [fsdp] reduce_dtype; absent: unchanged"""
    output_dtype: Dtype | None = None
    """replaces [fsdp] output_dtype; absent: unchanged"""


_PREFETCHING = used_with("fsdp.explicit_prefetching", True)


class FsdpConfig(Section):
    sharding_strategy: Literal["", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"] = (
        Field(default="", examples=["FULL_SHARD"])
    )
    """FSDP1's name for dp_replicate, dp_shard and reshard_after_forward; empty: use those keys"""
    dp_replicate: Annotated[int, BITS] = Field(default=-1, ge=-1)
    """replicas of the sharded model (HSDP); -1: world size / dp_shard, or 1 if that is -1 too"""
    dp_shard: int = Field(default=-1, ge=-1)
    """ranks per replica; -1: world size / dp_replicate; 1: no sharding"""
    shard_columns: Annotated[list[str], BITS] = Field(default=[], examples=[["layers.*.attention.wk.weight"]])
    """patterns of matrices to shard by columns (dim 1), such as those with fewer rows than ranks"""
    blocks_per_group: Annotated[PositiveInt, BITS] = 1
    """blocks gathered and reduced together: more need fewer collectives and more memory"""
    reshard_after_forward: Annotated[bool | int | Literal["default"], PlainValidator(_reshard)] = "default"
    """after forward: free gathered parameters (true), keep them for backward (false), or keep them sharded over \
this many ranks; default: true for all but the head"""
    reshard_after_backward: bool = True
    """after backward: free gathered parameters; false: keep them for the next micro-batch"""
    grad_sync: Annotated[Literal["every", "last", "all_reduce_last"], BITS] = "every"
    """reduce gradients after every micro-batch, or the last (more memory); all_reduce_last: reduce_scatter after \
every one, all_reduce between replicas after the last"""
    param_dtype: Annotated[Dtype, BITS] = "float32"
    """dtype of the parameters in forward and backward (stored and updated in float32)"""
    reduce_dtype: Annotated[Dtype, BITS] = "float32"
    """dtype of the gradient reduction"""
    output_dtype: Annotated[Literal["", Dtype], BITS] = ""
    """dtype of each group's output; empty: its param_dtype"""
    cast_forward_inputs: Annotated[bool, BITS] = False
    """let FSDP cast floating-point inputs of groups; llama's rotary tables then lose precision"""
    precision_overrides: Annotated[list[PrecisionOverride], BITS] = Field(
        default=[], examples=[[{"match": "layers.0.*", "param_dtype": "float32"}]]
    )
    """dtypes of selected groups: [[fsdp.precision_overrides]] match = "layers.0.*", with any of the dtypes"""
    cpu_offload: Annotated[bool, BITS] = False  # the optimizer then runs on the host
    """keep parameters, gradients and optimizer state on the host (GPUs)"""
    pin_memory: Annotated[bool, used_with("fsdp.cpu_offload", True)] = True
    """with cpu_offload: in pinned memory, so that transfers overlap computation"""
    explicit_prefetching: bool = False
    """issue the first all-gather before the batch is fetched, and prefetch by explicit lists"""
    forward_prefetch: Annotated[PositiveInt, _PREFETCHING] = 2
    """with explicit_prefetching: groups to prefetch in forward"""
    backward_prefetch: Annotated[PositiveInt, _PREFETCHING] = 2
    """with explicit_prefetching: groups to prefetch in backward"""
    separate_reduce_scatter_group: bool = False
    """reduce-scatter in a process group of its own (GPUs; needs torch 2.13)"""
    comm_memory: Literal["default", "pool", "symmetric"] = "default"
    """buffers of collectives: from NCCL's pool, or all-gathers' in symmetric memory (GPUs; symmetric: torch 2.12)"""
    reduce_scatter_buffers: PositiveInt = 1
    """input buffers of reduce-scatters in flight; with more, backward waits less (GPUs; needs torch 2.13)"""

    def mesh_shape(self, world_size: int) -> tuple[int, int]:
        """Return dp_replicate and dp_shard; -1 becomes all remaining ranks."""
        replicate, shard = self.dp_replicate, self.dp_shard
        if replicate == -1:
            replicate = 1 if shard == -1 else max(world_size // max(shard, 1), 1)
        if shard == -1:
            shard = max(world_size // max(replicate, 1), 1)  # `rules` refuses 0
        return replicate, shard

    def dtypes(self, *keys: str) -> set[str | None]:
        """Return the values of these keys in this section and its overrides."""
        return {getattr(section, key) for section in (self, *self.precision_overrides) for key in keys}

    @property
    def uses_float16(self) -> bool:
        """Whether any dtype is float16, whose narrow range needs loss scaling."""
        return "float16" in self.dtypes("param_dtype", "reduce_dtype", "output_dtype")


_FLOAT16 = UsedIf("fsdp.uses_float16", 'a dtype "float16" in [fsdp]')


class GradScalerConfig(Section):
    on_resume: ClassVar[Resume] = Resume("allowed", "the scale itself is restored")

    init_scale: Annotated[float, _FLOAT16] = Field(default=65536.0, ge=1, le=2.0**100)
    """float16: initial loss scale; halved on overflow, and below 1 the run stops"""
    growth_interval: Annotated[PositiveInt, _FLOAT16] = 2000
    """float16: double the scale after this many steps without overflow"""


# --- FSDP1's sharding strategies --------------------------------------------------------------------------------

# The [fsdp] keys that each strategy sets (source: the migration guide in PyTorch's FSDP2 tutorial) unless they are
# given; a given key that contradicts the strategy is an error. As in FSDP1, a hybrid strategy shards within one
# machine, unless dp_replicate or dp_shard is set.
STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"reshard_after_forward": True, "dp_replicate": 1},
    "SHARD_GRAD_OP": {"reshard_after_forward": False, "dp_replicate": 1},
    "HYBRID_SHARD": {"reshard_after_forward": True},
    "_HYBRID_SHARD_ZERO2": {"reshard_after_forward": False},
    "NO_SHARD": {"reshard_after_forward": False, "dp_shard": 1},
}


def strategy_keys(given: Mapping[str, Any], local_world_size: int) -> dict[str, Any]:
    """Return the keys that a strategy sets: those that are absent, -1 or "default" in `given`, by "section.key"."""
    strategy = str(given.get("fsdp.sharding_strategy", "")).upper()
    keys = {f"fsdp.{key}": value for key, value in STRATEGIES.get(strategy, {}).items()}
    if "HYBRID" in strategy and given.get("fsdp.dp_shard", -1) == given.get("fsdp.dp_replicate", -1) == -1:
        keys["fsdp.dp_shard"] = local_world_size
    return {key: value for key, value in keys.items() if given.get(key, -1) in (-1, "default")}
