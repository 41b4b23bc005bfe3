"""The effect of each knob: the number and order of collectives, dtypes, bytes."""

import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import call, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import train
from tests.cpu.shared_memory_cases import all_gather, reduce_scatter
from tests.distributed.knob_table import CASES, FEW_EXPERTS
from tests.distributed.knob_worker import muon_as_on_gpu, training
from tests.distributed.test_recompute_and_compile import Operators
from tests.helpers import meta_model, run_distributed
from torchtitan_lite.config.schema import FsdpConfig
from torchtitan_lite.data.loader import Batch, Loader
from torchtitan_lite.distributed import fsdp
from torchtitan_lite.distributed.evaluating import evaluating
from torchtitan_lite.distributed.fsdp import groups_of
from torchtitan_lite.distributed.process_group import Process, build_mesh
from torchtitan_lite.distributed.sharding import own_part, shard_dim
from torchtitan_lite.errors import NonFiniteError
from torchtitan_lite.optim import finite_guard
from torchtitan_lite.run.checks import check_patterns
from torchtitan_lite.run.session import Session, check_previous_step
from torchtitan_lite.tools.estimate.simulate import fake_world

bf16, fp16, fp32, SUM = torch.bfloat16, torch.float16, torch.float32, dist.ReduceOp.SUM
Build = Callable[..., Session]
LAYERS = ["layers.0", "layers.1", "layers.2"]
GROUPS = ["tok_embeddings", *LAYERS, "norm, output"]
ACCUMULATION = 3  # micro-batches of a step on 2 ranks; 2 on 4 ranks


on_4_ranks = pytest.mark.parametrize("build", [4], indirect=True)


def builder(process: Process) -> Build:
    """What builds a training of the table's first row from [fsdp] keys and the like."""

    def build(**more: Any) -> Session:
        values = {key.replace("__", "."): value for key, value in more.items()}
        return training(replace(CASES["llama"], ranks=process.world_size, set=values).config(), process)

    return build


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """On rank 0 of two ranks, or of four, without peers."""
    ranks = getattr(request, "param", 2)
    with fake_world(ranks):
        yield builder(Process(0, ranks, torch.device("cpu"), 1))


def refused(t: Session, section: str, **keys: Any) -> list[str]:
    """What the check of parameter names says before any model is built, with other keys of a section."""
    config = t.config.model_copy(update={section: getattr(t.config, section).model_copy(update=keys)})
    with patch.dict(os.environ, WORLD_SIZE=str(t.process.world_size)):
        return list(check_patterns(config).values())


@dataclass(frozen=True)
class Event:
    """Something that happened on this rank."""

    what: str  # "gather", "reduce", "all-reduce", "forward", "backward", "batch"
    group: str = ""
    ranks: int = 0
    dtype: torch.dtype | None = None


class _Written:
    """A collective of one group, written down: FSDP's all-gather or reduce-scatter."""

    def __init__(self, collective: Callable[..., Any], write: Callable[[Any, Tensor], None]) -> None:
        self.collective, self.write = collective, write

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)  # a world without peers fills in nothing

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **more: Any) -> Any:
        self.write(group, input_tensor)
        assert more.get("op", SUM) == SUM
        return self.collective(output_tensor, input_tensor, group=group, **more)


def events_of_a_step(t: Session) -> list[Event]:
    """What happens in one step, in order."""
    events: list[Event] = []

    def computes(name: str) -> Callable[..., None]:
        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if tree_leaves(output)[0].requires_grad:
                tree_leaves(output)[0].register_hook(lambda _grad: events.append(Event("backward", name)))

        return after

    def issues(what: str, name: str) -> Callable[..., None]:
        return lambda group, tensor: events.append(Event(what, name, group.size(), tensor.dtype))

    def begins(name: str) -> Callable[..., None]:
        return lambda *_: events.append(Event("forward", name))

    for group in groups_of(t.model, t.config.fsdp):
        state = group.modules[0]
        assert isinstance(state, FSDPModule)
        state.set_custom_all_gather(_Written(all_gather, issues("gather", group.name)))  # type: ignore[arg-type]
        state.set_custom_reduce_scatter(_Written(reduce_scatter, issues("reduce", group.name)))  # type: ignore[arg-type]
        # FSDP's own hooks are called before these: what a forward waits for is written down before it
        group.modules[0].register_forward_pre_hook(begins(group.name))
        group.modules[-1].register_forward_hook(computes(group.name))
    honest, batch = dist.all_reduce, Loader.batch

    def all_reduce(tensor: Tensor, *op: Any, **kwargs: Any) -> Any:
        if group := kwargs.get("group"):  # of FSDP or float8; the loss is summed over the default group
            events.append(Event("all-reduce", "", group.size(), tensor.dtype))
            assert kwargs.get("op", SUM) == SUM
        return honest(tensor, *op, **kwargs)

    def recorded_batch(self: Loader, first: int, size: int) -> Batch:
        events.append(Event("batch"))
        return batch(self, first, size)

    with patch.object(dist, "all_reduce", all_reduce), patch.object(Loader, "batch", recorded_batch):
        train.train_step(t, 1)
    return events


def counted(t: Session, what: str) -> Counter[str]:
    """How often each group does something in one step."""
    return Counter(event.group for event in events_of_a_step(t) if event.what == what)


def per_micro_batch(layers: int, head: int) -> dict[str, int]:
    """The embeddings are never gathered for backward."""
    once = {"tok_embeddings": 1, "norm, output": head}
    return {name: ACCUMULATION * once.get(name, layers) for name in GROUPS}


# --- how much is gathered ---------------------------------------------------------------------------------------


def test_reshard_after_forward_gathers_twice_or_once(build: Build) -> None:
    assert counted(build(), "gather") == per_micro_batch(2, 1)
    assert counted(build(fsdp__reshard_after_forward=True), "gather") == per_micro_batch(2, 2)
    assert counted(build(fsdp__reshard_after_forward=False), "gather") == per_micro_batch(1, 1)
    assert counted(build(fsdp__sharding_strategy="SHARD_GRAD_OP"), "gather") == per_micro_batch(1, 1)


def test_several_blocks_are_gathered_and_reduced_as_one_group(build: Build) -> None:
    merged = build(fsdp__blocks_per_group=2, fsdp__reshard_after_forward=True)
    layers = {"layers.0, layers.1": 2, "layers.2": 2}
    expected = {"tok_embeddings": 1, **layers, "norm, output": 2}
    assert counted(merged, "gather") == {name: ACCUMULATION * n for name, n in expected.items()}
    assert counted(merged, "reduce") == dict.fromkeys(expected, ACCUMULATION)


def test_reshard_after_backward_keeps_what_was_gathered_until_the_step_ends(build: Build) -> None:
    kept = build(fsdp__reshard_after_backward=False, fsdp__reshard_after_forward=False)
    assert counted(kept, "gather") == dict.fromkeys(GROUPS, 1)
    assert all(isinstance(p, DTensor) for p in kept.model.parameters()), "stale parameters stay behind"
    assert counted(kept, "gather") == dict.fromkeys(GROUPS, 1), "the next step has to gather the updated ones"


@on_4_ranks
def test_reshard_to_some_ranks_gathers_over_them_in_backward(build: Build) -> None:
    events = events_of_a_step(build(fsdp__reshard_after_forward=2))
    sizes = [[event.ranks for event in events if event.what == "gather" and event.group == layer] for layer in LAYERS]
    assert sizes == [[4, 2] * 2] * len(LAYERS)
    assert len(dist.distributed_c10d._world.pg_map) <= 3, "those of one mesh, beside the world's"
    assert sum(event.what == "gather" and event.group == GROUPS[-1] for event in events) == 2, "the head stays whole"


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13")
def test_an_evaluation_before_training_leaves_parameters_sharded(build: Build) -> None:
    t = build()
    batch = t.loader.batch(0, 2).micro_batches[0]
    with torch.no_grad(), evaluating(t.model):
        t.model(batch.tokens, batch.targets)
    assert all(isinstance(p, DTensor) for p in t.model.parameters())
    assert counted(t, "gather") == per_micro_batch(2, 1), "none is left over for the first step"


def test_checkpointing_beside_prefetching_gathers_no_group_again(build: Build) -> None:
    for mode in ("full", "selective"):
        t = build(activation_checkpointing__mode=mode, fsdp__explicit_prefetching=True)
        assert counted(t, "gather") == per_micro_batch(2, 1)


def test_compiled_blocks_do_not_pass_by_the_hooks_of_fsdp(build: Build) -> None:
    torch._dynamo.reset()
    counters.clear()
    events = events_of_a_step(build(compile__enabled=True, compile__backend="eager"))
    assert Counter(event.group for event in events if event.what == "gather") == per_micro_batch(2, 1)
    assert Counter(event.group for event in events if event.what == "reduce") == dict.fromkeys(GROUPS, ACCUMULATION)
    assert counters["stats"]["unique_graphs"] == 1


# --- the mesh ---------------------------------------------------------------------------------------------------


@on_4_ranks
def test_copies_of_shards_reduce_within_and_then_between(build: Build) -> None:
    t = build(fsdp__dp_replicate=2)
    assert all(p.placements == (Replicate(), Shard(0)) for p in t.model.parameters() if isinstance(p, DTensor))
    events = events_of_a_step(t)
    n = 2 * len(GROUPS)  # 2 micro-batches
    assert [e.ranks for e in events if e.what == "reduce"] == [2] * n
    assert [e.ranks for e in events if e.what == "all-reduce"] == [2] * n
    assert {e.ranks for e in events if e.what == "gather"} == {2}


@on_4_ranks
def test_gradients_are_plain_sums_on_every_mesh(build: Build) -> None:
    """Without a division, but in float16: there FSDP2 divides by the number of ranks, which the loss makes up for."""
    keys: dict[str, Any]
    for keys in ({}, {"fsdp__dp_replicate": 2}, {"fsdp__reduce_dtype": "float16"}):
        t = build(**keys)
        events_of_a_step(t)  # whose reductions are sums
        for module in t.model.layers:
            group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
            assert group.gradient_divide_factor == (None if t.scaler.enabled else 1), "the default is the world size"
        assert t.scaler.scaled(torch.ones(())) == t.scaler.scale * (4 if t.scaler.enabled else 1)


@on_4_ranks
def test_all_reduce_last_reduces_between_copies_once_a_step(build: Build) -> None:
    for sync, reduces in (("all_reduce_last", 2), ("last", 1)):
        kinds = Counter(e.what for e in events_of_a_step(build(fsdp__dp_replicate=2, fsdp__grad_sync=sync)))
        assert (kinds["reduce"], kinds["all-reduce"]) == (reduces * len(GROUPS), len(GROUPS))


@on_4_ranks
def test_without_shards_every_rank_holds_everything(build: Build) -> None:
    for keys in ({"fsdp__dp_shard": 1}, {"fsdp__sharding_strategy": "NO_SHARD"}):
        t = build(**keys)
        assert all(own_part(p)[0].shape == p.shape for p in t.model.parameters())
        events = events_of_a_step(t)
        assert not [e for e in events if e.what == "gather"], "nothing to gather"
        assert {e.ranks for e in events if e.what == "all-reduce"} == {4}


@on_4_ranks
def test_matrices_are_split_by_columns_where_a_pattern_matches(build: Build) -> None:
    t = build(fsdp__shard_columns=["*.wk.weight", "output.*"])
    by_columns = set()
    for name, p in t.model.named_parameters():
        assert isinstance(p, DTensor)
        assert p.placements in ((Shard(0),), (Shard(1),))
        by_columns |= {name} if p.placements == (Shard(1),) else set()
    assert by_columns == {f"layers.{i}.attention.wk.weight" for i in range(3)} | {"output.weight"}
    assert own_part(t.model.get_parameter("layers.0.attention.wk.weight"))[0].shape == (12, 9)
    once = {"tok_embeddings": 1, "norm, output": 1}
    assert counted(t, "gather") == {name: 2 * once.get(name, 2) for name in GROUPS}, "in the same collectives"
    few = build(**FEW_EXPERTS, fsdp__shard_columns=["*.wk.weight"]).model
    split = {name.rpartition("layers.")[2][2:] for name, p in few.named_parameters() if shard_dim(p)}
    assert split == {"attention.wk.weight", *(f"feed_forward.w{i}.weight" for i in (1, 2, 3))}, "both kinds"
    for pattern, expected in (
        ("*norm.weight", "matches no matrix"),
        ("*.w2.weight", r"w2.weight has 50 columns, which fsdp.dp_shard = 4 does not divide; fsdp.dp_shard = 2 works"),
        ("layer.*", "matches no matrix: the nearest is"),
    ):
        assert re.search(expected, refused(t, "fsdp", shard_columns=[pattern])[0])


# --- reduce-scatters --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="needs torch 2.13")
def test_reduce_scatters_have_buffers_and_a_group_of_their_own(build: Build) -> None:
    for buffers, separate in ((1, False), (1, True), (2, False), (3, True)):
        keys = {"separate_reduce_scatter_group": separate, "reduce_scatter_buffers": buffers}
        t = build(**{f"fsdp__{key}": value for key, value in keys.items()}, speed__shared_memory=False)
        inputs: list[Any] = []
        alive: list[int] = []  # inputs of reduce-scatters that exist at each one
        groups: set[Any] = set()

        def write(group: Any, tensor: Tensor, inputs: Any = inputs, alive: Any = alive, groups: Any = groups) -> None:
            inputs.append(weakref.ref(tensor.untyped_storage()))
            alive.append(sum(buffer() is not None for buffer in inputs))
            groups.add(group)

        for module in t.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_Written(reduce_scatter, write))  # type: ignore[arg-type]
        train.train_step(t, 1)
        assert max(alive) == buffers, (buffers, alive)
        (group,) = groups
        mesh = next(p.device_mesh for p in t.model.parameters() if isinstance(p, DTensor))
        assert (group == mesh.get_group()) != separate


# --- accumulation -----------------------------------------------------------------------------------------------


def test_gradients_are_summed_with_every_micro_batch_or_the_last(build: Build) -> None:
    assert counted(build(), "reduce") == dict.fromkeys(GROUPS, ACCUMULATION)
    last = build(fsdp__grad_sync="last")
    assert counted(last, "reduce") == dict.fromkeys(GROUPS, 1)
    assert counted(last, "reduce") == dict.fromkeys(GROUPS, 1), "in the next step too"
    assert all(p.grad is None for p in last.model.parameters())


# --- prefetching ------------------------------------------------------------------------------------------------


def test_all_gathers_are_issued_as_far_ahead_as_promised(build: Build) -> None:
    for depth in (0, 1, 2, 3):
        explicit = {"explicit_prefetching": True, "forward_prefetch": depth, "backward_prefetch": depth}
        keys = {f"fsdp__{key}": value for key, value in explicit.items() if depth}
        # one micro-batch, and everything is gathered again in backward
        events = events_of_a_step(build(**keys, fsdp__reshard_after_forward=True, train__global_batch_size=2))
        kinds = [(e.what, e.group) for e in events if e.what in ("gather", "forward", "backward")]
        end = kinds.index(("forward", GROUPS[-1])) + 1
        forward, backward = kinds[:end], kinds[end:]
        assert [g for what, g in forward if what == "gather"] == GROUPS
        again = GROUPS[:0:-1]  # but for the embeddings
        assert [g for what, g in backward if what == "gather"] == again
        for pass_, kind, order, n, ahead in (
            (forward, "forward", GROUPS, len(GROUPS), depth),
            (backward, "backward", GROUPS[::-1], len(again), depth or 1),  # without lists FSDP gathers one group ahead
        ):
            for i, name in enumerate(order):
                gathered = sum(what == "gather" for what, _ in pass_[: pass_.index((kind, name))])
                assert gathered == min(i + 1 + ahead, n), (depth, name, pass_)


def test_the_first_all_gather_is_issued_before_the_batch_is_fetched(build: Build) -> None:
    for explicit in (False, True):
        events = events_of_a_step(build(fsdp__explicit_prefetching=explicit))
        batch = events.index(Event("batch"))
        before = [event.group for event in events[:batch] if event.what == "gather"]
        assert before == (["tok_embeddings"] if explicit else []), before


def on_the_cpu_explicit_all_gathers_run_beside_the_computation(build: Build) -> None:
    """In a trace: gloo's own thread is at it after the call that issued it has returned."""
    for explicit in (False, True):
        t = build(fsdp__explicit_prefetching=explicit, speed__shared_memory=False)
        train.train_step(t, 1)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            train.train_step(t, 2)
        spans = [(e.name, e.time_range.start, e.time_range.end) for e in trace.events()]
        calls = [(start, end) for name, start, end in spans if name.startswith("FSDP::all_gather (")]
        transfers = [(start, end) for name, start, end in spans if name == "gloo:all_gather"]
        assert len(calls) == len(transfers) > 0
        beside = sum(not any(start <= begun and done <= end for start, end in calls) for begun, done in transfers)
        assert (beside > 0) == explicit, (explicit, beside, len(transfers))


# --- offloading: needs a GPU (ON_CUDA of knob_table.py) ---------------------------------------------------------


def test_pinned_pooled_and_symmetric_memory_are_asked_for_as_configured(build: Build) -> None:
    t = build()
    for keys, expected in (
        ({}, OffloadPolicy()),
        ({"comm_memory": "symmetric"}, OffloadPolicy()),
        ({"comm_memory": "pool"}, OffloadPolicy()),
        ({"cpu_offload": True}, CPUOffloadPolicy(pin_memory=True)),
        ({"cpu_offload": True, "pin_memory": False}, CPUOffloadPolicy(pin_memory=False)),
    ):
        model = meta_model(t.config.model, 517)
        with patch.object(fsdp, "fully_shard") as shard, patch.object(fsdp, "_fsdp") as module:
            config = FsdpConfig.model_validate(keys)
            fsdp.apply_fsdp(model, build_mesh(config, torch.device("cpu")), config)
        assert module().set_symm_mem_for_comm.call_count == len(GROUPS) * (keys.get("comm_memory") == "symmetric")
        pooled = module().set_allocate_memory_from_process_group_for_comm.call_args_list
        assert pooled == [call(True)] * len(GROUPS) * (keys.get("comm_memory") == "pool")
        *of_groups, of_root = shard.call_args_list
        assert "offload_policy" not in of_root.kwargs, "the root has no parameters"
        assert [call.kwargs["offload_policy"] for call in of_groups] == [expected] * len(GROUPS)


# --- precision --------------------------------------------------------------------------------------------------


def dtypes_of(t: Session) -> tuple[dict[str, tuple[torch.dtype, ...]], list[Event]]:
    """Of each group's first module inside forward: a weight, the first input, other inputs, the output; and events."""
    seen: dict[str, tuple[torch.dtype, ...]] = {}

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            seen[name] = next(module.parameters()).dtype, *(tensor.dtype for tensor in tensors)

        return hook

    def after(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: seen.update({name: (*seen[name], tree_leaves(output)[0].dtype)})

    looked_at = ("tok_embeddings", *LAYERS, "norm", "output", "layers.0.feed_forward.w1", "layers.1.feed_forward.w1")
    handles = []
    for name in looked_at:
        module = t.model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    events = events_of_a_step(t)
    for handle in handles:
        handle.remove()
    for parameter in t.model.parameters():
        assert isinstance(parameter, DTensor)
        assert (parameter.placements, parameter.dtype) == ((Shard(0),), fp32)
    moments = [value for state in t.optimizer.state.values() for value in state.values()]
    assert all(value.dtype == fp32 for value in moments)
    return seen, events


def test_computation_communication_and_sums_have_their_dtypes(build: Build) -> None:
    for param, reduce in ((bf16, fp32), (bf16, bf16), (fp32, bf16), (fp16, fp16), (fp32, fp32)):
        names = {"fsdp__param_dtype": str(param)[6:], "fsdp__reduce_dtype": str(reduce)[6:]}
        seen, events = dtypes_of(build(**names))
        assert seen["layers.1.feed_forward.w1"] == (param, param, param)
        assert seen["layers.1"] == (param, param, fp32, fp32, param), "rotary tables stay float32"
        assert seen["output"] == (param, param, torch.int64, fp32), "targets in, and the loss stays float32"
        assert {e.dtype for e in events if e.what == "gather"} == {param}
        assert {e.dtype for e in events if e.what == "reduce"} == {reduce}


def test_the_first_layer_can_stay_in_float32(build: Build) -> None:
    override = {"match": "layers.0.*", "param_dtype": "float32"}
    seen, events = dtypes_of(build(fsdp__param_dtype="bfloat16", fsdp__precision_overrides=[override]))
    assert seen["tok_embeddings"] == (bf16, torch.int64, bf16)
    assert seen["layers.0"] == (fp32, fp32, fp32, fp32, fp32)
    assert seen["layers.0.feed_forward.w1"] == (fp32, fp32, fp32)
    assert seen["layers.1"] == (bf16, bf16, fp32, fp32, bf16)
    assert {e.group for e in events if e.what == "gather" and e.dtype == fp32} == {"layers.0"}


def test_what_groups_hand_on_can_stay_in_float32(build: Build) -> None:
    t = build(fsdp__param_dtype="bfloat16", fsdp__output_dtype="float32")
    inside = []
    t.model.get_submodule("layers.1.feed_forward").register_forward_hook(lambda _m, _i, o: inside.append(o.dtype))
    seen, _ = dtypes_of(t)
    assert set(inside) == {bf16}
    assert seen["layers.1"] == (bf16, bf16, fp32, fp32, fp32)
    assert seen["output"] == (bf16, bf16, torch.int64, fp32)
    plain = build(fsdp__param_dtype="bfloat16", fsdp__output_dtype="float32", speed__chunked_loss=False)
    assert dtypes_of(plain)[0]["output"] == (bf16, bf16, fp32), "logits"
    assert dtypes_of(build(fsdp__output_dtype="bfloat16"))[0]["output"][-1] == fp32, "a loss is not rounded"


def test_cast_forward_inputs_casts_the_rotary_tables_as_well(build: Build) -> None:
    seen, _ = dtypes_of(build(fsdp__param_dtype="bfloat16", fsdp__cast_forward_inputs=True))
    assert seen["layers.1"] == (bf16,) * 5


def test_an_override_has_to_match_a_group_as_a_whole(build: Build) -> None:
    def overridden(*matches: str) -> Session:
        return build(fsdp__precision_overrides=[{"match": match, "param_dtype": "bfloat16"} for match in matches])

    for matches, expected in (
        (
            ["layers.0.attention.*"],
            "attention_norm.weight and layers.0.attention.wq.weight would get different dtypes, but group 'layers.0'",
        ),
        (
            ["output.*"],
            "overrides: norm.weight and output.weight would get different dtypes, but group 'norm, output' is gathered "
            "and cast together; a pattern has to match all of: norm.weight, output.weight$",
        ),
        (["layers.1.ffn_norm.*"], "all of: layers.1.attention_norm.weight, (layers.1.[a-z0-9_.]*, ){7}layers.1.feed_f"),
        (["layer.0.*"], "matches no parameter: the nearest is"),
        (["*", "layers.0.*"], "earlier patterns match all of its parameters"),
    ):
        assert re.search(expected, "".join(refused(overridden(*matches), "fsdp")))
    ordered = [
        {"match": "layers.0.*", "reduce_dtype": "bfloat16"},
        {"match": "*", "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    ]
    seen, events = dtypes_of(build(fsdp__precision_overrides=ordered))
    assert seen["layers.0"][0] == fp32, "the first that matches counts"
    assert {e.group for e in events if e.what == "reduce" and e.dtype == bf16} == {"layers.0"}
    seen, _ = dtypes_of(overridden("norm.*", "output.*"))
    assert seen["output"] == (bf16, bf16, torch.int64, fp32)
    assert seen["layers.2"][0] == fp32


# --- float16 ----------------------------------------------------------------------------------------------------


def an_overflow_is_a_counted_skip_and_too_many_stop_the_run(build: Build) -> None:
    t = build(fsdp__param_dtype="float16", grad_scaler__init_scale=2.0**40)
    before = [own_part(p)[0].clone() for p in t.model.parameters()]
    for step in (1, 2):
        record = train.train_step(t, step)
        check_previous_step(t)
        assert record.loss.isfinite()
        assert not record.grad_norm.isfinite()
        assert t.scaler.skipped_steps == step
        assert t.scaler.scale.item() == 2.0 ** (40 - step)
        assert all(a.equal(own_part(b)[0]) for a, b in zip(before, t.model.parameters(), strict=True))
    train.train_step(t, 3)
    with (
        patch.object(finite_guard, "MIN_SCALE", 2.0**38),
        pytest.raises(NonFiniteError, match="step 3: gradients still overflow float16 with a loss scale of 1.37"),
    ):
        check_previous_step(t)


def the_scale_grows_when_nothing_overflows_and_survives_a_checkpoint(build: Build) -> None:
    t = build(fsdp__param_dtype="float16", grad_scaler__growth_interval=2, grad_scaler__init_scale=1024.0)
    scales = []
    for step in range(1, 6):
        train.train_step(t, step)
        check_previous_step(t)
        scales.append(t.scaler.scale.item())
    assert scales == [1024, 2048, 2048, 4096, 4096]
    assert t.scaler.state_dict() == {"scale": 4096.0, "good_steps": 1, "skipped_steps": 0}

    def resumed(saved: dict[str, Any]) -> dict[str, Any]:
        again = type(t.scaler)(t.config.grad_scaler, True, torch.device("cpu"), saved)
        again.update(torch.tensor(False))
        return again.state_dict()

    assert resumed(t.scaler.state_dict() | {"skipped_steps": 7}) == {
        "scale": 8192.0,
        "good_steps": 0,
        "skipped_steps": 7,
    }
    # a count beyond the interval, which was longer before; up to a largest scale
    assert [resumed({"scale": 2.0**n, "good_steps": 900})["scale"] for n in (1, 99, 100)] == [4, 2.0**100, 2.0**100]
    for keys in (
        {"fsdp__output_dtype": "float16"},
        {"fsdp__reduce_dtype": "float16"},
        {"fsdp__precision_overrides": [{"match": "layers.1.*", "param_dtype": "float16"}]},
    ):
        assert build(**keys).scaler.enabled, keys


def a_loss_that_is_not_finite_stops_a_float16_run(build: Build) -> None:
    t = build(fsdp__param_dtype="float16")
    with torch.no_grad():
        own_part(t.model.get_parameter("norm.weight"))[0].fill_(torch.inf)
    train.train_step(t, 1)
    with pytest.raises(NonFiniteError, match="step 1: the loss is not finite on rank 0, 1"):
        check_previous_step(t)


def small_gradients_survive_float16_because_the_loss_is_scaled(build: Build) -> None:
    """A loss of a millionth of its size: without a scale nearly every gradient would be zero."""
    t = build(fsdp__param_dtype="float16", fsdp__reduce_dtype="float16", optim__max_norm=1e9)
    honest = t.model.forward
    t.model.forward = lambda *args: honest(*args) * 1e-6  # type: ignore[method-assign]
    kept = {}
    for scale in (1.0, 65536.0):
        t.scaler.scale.fill_(scale)
        batch = t.loader.batch(0, 2).micro_batches[0]
        t.scaler.scaled(t.model(batch.tokens, batch.targets)).backward()
        grads = [own_part(p.grad)[0] for p in t.model.parameters() if p.grad is not None]
        kept[scale] = sum(int((g != 0).sum()) for g in grads)
        t.optimizer.zero_grad()
    assert kept[65536.0] > 2 * kept[1.0], kept


# --- blocks -----------------------------------------------------------------------------------------------------


def test_blocks_are_checkpointed_as_configured(build: Build) -> None:
    for mode, every, expected in (("none", 1, 3), ("full", 1, 6), ("selective", 1, 6), ("full", 2, 5)):
        t = build(**{"activation_checkpointing__mode": mode, "activation_checkpointing__every": every})
        batch = t.loader.batch(0, 2).micro_batches[0]
        with Operators() as operators:
            t.model(batch.tokens, batch.targets).backward()
        assert operators.counts["silu"] == expected, (mode, every)


@pytest.mark.extended  # compiles every kind of block
def test_many_kinds_of_blocks_can_be_compiled_and_validated(build: Build) -> None:
    overrides = [{"match": f"layers.{i}.*", "param_dtype": d} for i, d in ((0, "bfloat16"), (1, "float16"))]
    torch._dynamo.reset()
    t = build(
        **{"compile__enabled": True, "compile__backend": "eager", "fsdp__precision_overrides": overrides},
        optim__freeze=["tok_embeddings.*", "layers.0.*"],
    )
    train.train_step(t, 1)
    batch = t.loader.batch(0, 2).micro_batches[0]
    with torch.no_grad():
        t.model.eval()(batch.tokens, batch.targets)
    assert torch._dynamo.config.recompile_limit >= 12


# --- parameters -------------------------------------------------------------------------------------------------


def test_tied_ends_are_one_group_and_gathered_once(build: Build) -> None:
    t = build(model__tie_embeddings=True)
    counts = counted(t, "gather")
    assert counts["tok_embeddings, norm, output"] == ACCUMULATION
    assert all(counts[layer] == 2 * ACCUMULATION for layer in LAYERS)
    assert t.model.tok_embeddings.weight is t.model.output.weight
    t = build(model__tie_embeddings=True, fsdp__explicit_prefetching=True, fsdp__forward_prefetch=1)
    order = [event.group for event in events_of_a_step(t) if event.what == "gather"]
    assert order[:4] == ["tok_embeddings, norm, output", *LAYERS], order


def test_frozen_parameters_have_no_gradient_and_no_state(build: Build) -> None:
    t = build(optim__freeze=["layers.1.*", "tok_embeddings.*"])
    assert counted(t, "reduce") == {name: ACCUMULATION for name in GROUPS if name not in ("layers.1", "tok_embeddings")}
    with_state = {name for name, p in t.model.named_parameters() if t.optimizer.state.get(p)}
    assert with_state == {name for name, p in t.model.named_parameters() if p.requires_grad}
    for patterns, expected in (
        (["layer.*"], "matches no parameter"),
        (["*"], r"optim.freeze = \['\*'\] leaves no parameter to train"),
    ):
        assert re.search(expected, "".join(refused(t, "optim", freeze=patterns)))


def test_muon_exchanges_matrices_of_all_shapes_twice_a_step(build: Build) -> None:
    """In the dtype of its matmuls, whatever the number of micro-batches and the dtype of the computation."""
    for param_dtype, place, dtype in (
        ("float32", nullcontext(), fp32),
        ("bfloat16", nullcontext(), fp32),
        ("float32", muon_as_on_gpu(), bf16),
    ):
        t = build(optim__name="muon", fsdp__param_dtype=param_dtype)
        with place, patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
            train.train_step(t, 1)
        sent = [call.args[0].dtype for call in exchange.call_args_list]
        assert sent == [dtype] * 2, "the shapes are 36 x 36, 12 x 36, 50 x 36 and 36 x 50"
        kept = {name: {key for key in t.optimizer.state[p] if key != "step"} for name, p in t.model.named_parameters()}
        matrices = {name for name, keys in kept.items() if keys == {"momentum_buffer"}}
        assert matrices == {n for n, p in t.model.named_parameters() if p.ndim == 2 and n.startswith("layers.")}
        assert all(keys == {"exp_avg", "exp_avg_sq"} for name, keys in kept.items() if name not in matrices)


def effects_of_two_processes(process: Process) -> None:
    """Those that need what the other rank computes, or its time. The traceback of the first that fails names it."""
    for run in (
        on_the_cpu_explicit_all_gathers_run_beside_the_computation,
        an_overflow_is_a_counted_skip_and_too_many_stop_the_run,
        the_scale_grows_when_nothing_overflows_and_survives_a_checkpoint,
        a_loss_that_is_not_finite_stops_a_float16_run,
        small_gradients_survive_float16_because_the_loss_is_scaled,
    ):
        run(builder(process))


def test_effects_on_numbers_and_time_are_those_of_two_processes() -> None:
    run_distributed(effects_of_two_processes, 2)
