"""Private names of torch that the package uses, and what happens in a version of torch that lacks them."""

import ast
import functools
import importlib
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.compat import VERSIONS
from tests.cpu.shared_memory_cases import gradients
from tests.cpu.shared_memory_cases import sharded as two_layers
from tests.distributed.distributed_cases import loss_of, make_mesh, sharded
from tests.helpers import ROOT, python, run_distributed
from torchtitan_lite.config.schema import (
    ActivationCheckpointingConfig,
    FsdpConfig,
    ModelConfig,
    OptimConfig,
    ProfileConfig,
)
from torchtitan_lite.cpu import attention, shared_memory, widened
from torchtitan_lite.distributed import blocks, process_group
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.post_forward import one_mesh
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import run_cli
from torchtitan_lite.models import build
from torchtitan_lite.monitoring.profiler import Profile
from torchtitan_lite.optim import guarded, muon
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.tools.estimate import simulate
from torchtitan_lite.tools.estimate.work import _is_view

ERROR = "an error that names it and torch's version"
COMPARED = "only compared with: it no longer matches"
GLOO, SLOWER, UNKNOWN = "gloo", "the same values, slower", "torch's default is assumed"
WITHOUT = {
    # process groups and FSDP
    "_world": "groups of the mesh keep torch's timeouts, with a warning",
    "_get_backend": UNKNOWN,
    "_timeout": UNKNOWN,
    "_get_fsdp_state": GLOO,
    "_fsdp_param_group": GLOO,
    "_set_unshard_async_op": "all-gathers do not overlap with computing",
    "torch.distributed.fsdp._fully_shard._fully_shard": "process groups for each group of parameters",
    "_get_post_forward_mesh_info": "process groups for each group of parameters",
    "_local_tensor": ERROR,
    # operators
    "_softmax_backward_data": SLOWER,
    "_scaled_dot_product_": "selective checkpointing recomputes attention",
    "_is_avx512_bf16_supported": SLOWER,
    "_is_amx_tile_supported": SLOWER,
    "_is_mkldnn_bf16_supported": SLOWER,
    "_is_mkldnn_fp16_supported": SLOWER,
    "_foreach_add_": ERROR,  # torch's own optimizers call these
    "_foreach_copy_": ERROR,
    "_foreach_div": ERROR,
    "_foreach_div_": ERROR,
    "_foreach_mul": ERROR,
    "_foreach_mul_": ERROR,
    "_foreach_norm": ERROR,
    "_foreach_sub": ERROR,
    "_foreach_sub_": ERROR,
    "_init_group": ERROR,
    # the simulated step of `plan`
    "torch._subclasses.fake_tensor.FakeTensorMode": ERROR,
    "torch.utils._python_dispatch.TorchDispatchMode": ERROR,
    "_schema": ERROR,
    "torch.distributed.fsdp._fully_shard._fsdp_param": "plans for many ranks take longer",
    "_allgather_base_": COMPARED,
    "_reduce_scatter_base_": COMPARED,
    "_unsafe_view": COMPARED,
    "_foreach_zero_": COMPARED,
    # the rest
    "_record_memory_history": "no memory snapshot, with a note",
    "_dump_snapshot": "no memory snapshot, with a note",
    "_orig_mod": "ttl refuses a compiled model",
    "torch._dynamo": COMPARED,
    "torch._inductor": COMPARED,
}
NOT_TORCHS = {"_exit", "_current_frames", "_replace", "_option_string_actions"}  # but Python's
NOT_TORCHS |= {"_stream"}  # ours, used by another file
NOT_TORCHS |= {"_precomputed_scale"}  # torchao's


def files() -> list[Path]:
    return [*sorted((ROOT / "torchtitan_lite").rglob("*.py")), ROOT / "train.py", ROOT / "checkpoint.py"]


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(tree: ast.AST) -> Iterator[str]:
    """Functions, classes and variables that a file defines, also as attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] * (isinstance(node.value, ast.Name) and node.value.id == "self")


def private_names_of(tree: ast.AST) -> Iterator[str]:
    """Of torch: imported, as attributes, and in strings of two words or more, for `getattr` and the like."""
    own = {*own_names(tree)} - {"_init_group"} | NOT_TORCHS  # our optimizer overrides one of torch's
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [module + alias.name for alias in node.names]
            yield from (name for name in names if name.startswith("torch.") and is_private(name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in own:
            dotted = re.fullmatch(r"torch(\.\w+)+", node.value) and is_private(node.value)
            if dotted or re.fullmatch(r"_[a-z0-9]+(_[a-z0-9]+)+_?(\.\w+)?", node.value):
                yield node.value


def test_each_private_name_is_listed() -> None:
    """With what happens without it, which the other tests here show."""
    found = {name for file in files() for name in private_names_of(ast.parse(file.read_text(encoding="utf-8")))}
    assert found - WITHOUT.keys() == set(), "new: is there a public name, or what happens without it?"
    assert WITHOUT.keys() - found == set(), "no longer used"


# --- an error ---------------------------------------------------------------------------------------------------


def explained(action: Callable[[], Any], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        action()
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.16.0+cpu")
        assert run_cli("x", main) == 2
    said = capsys.readouterr().err
    first, last = (version.rpartition(".")[0] for version in (VERSIONS[0], VERSIONS[-1]))
    assert f"x: torch 2.16.0+cpu lacks what this needs (tested: {first} to {last}): " in said
    assert name in said


def test_with_a_tested_torch_a_missing_name_is_a_bug_that_keeps_its_traceback() -> None:
    with pytest.raises(AttributeError, match="_bias"):
        run_cli("x", lambda: int(nn.Linear(1, 1)._bias))  # type: ignore[arg-type]


NEEDED = [name for name, text in WITHOUT.items() if text == ERROR and re.match("_f|_i", name)]


@pytest.mark.parametrize("name", sorted({*NEEDED} - {"_foreach_div_", "_foreach_norm"}))  # only of `ttl`, and of float8
def test_an_update_that_lacks_a_name_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(3, 3, bias=False)])
    parameter = model.get_parameter("layers.0.weight")
    parameter.grad = torch.ones(3, 3)
    monkeypatch.setattr(muon, "dtype_of_iteration", lambda **_: torch.bfloat16)  # as on a GPU: it casts
    optimizer: Any = build_optimizer(model, OptimConfig(name="adamw" if name == "_init_group" else "muon"))
    optimizer.grad_scale = torch.ones(())
    optimizer.found_inf = None if name == "_foreach_sub_" else torch.zeros(())
    if name == "_init_group":  # ours calls torch's
        monkeypatch.setattr(torch.optim, "AdamW", type("AdamW", (), {"__module__": "torch.optim.adamw"}))
    else:
        monkeypatch.delattr(torch, name)
    if name == "_foreach_mul_":
        explained(lambda: guarded.multiply_gradients([parameter], torch.ones(())), name, capsys)
    explained(optimizer.step, name, capsys)


@pytest.mark.parametrize("name", [name for name in WITHOUT if name.startswith("torch.") and WITHOUT[name] == ERROR])
def test_a_plan_that_lacks_a_name_names_it(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.rpartition(".")
    script = tmp_path / "lacking.py"
    script.write_text(
        f"import sys, torch, {module}\ndelattr({module}, '{attribute}')\ntorch.__version__ = '2.16.0'\n"
        "from torchtitan_lite import plan\nsys.exit(plan.main(sys.argv[1:]))\n"
    )
    result = python("--config", "configs/debug.toml", script=str(script))
    assert result.returncode == 2, result.stderr
    assert "plan: torch 2.16.0 lacks what this needs (tested: 2.11 to 2.15): cannot import name" in result.stderr
    assert attribute in result.stderr


def test_an_operator_without_a_schema_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator: Any = torch.ops.aten.relu.default
    monkeypatch.delattr(operator, "_schema")
    explained(lambda: _is_view(operator), "_schema", capsys)


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    """Also with private names, and public ones of torch."""
    for place, name in ((Profile, "_no_such_name"), (torch, "no_such_name")):
        with pytest.raises(AttributeError):
            run_cli("x", functools.partial(getattr, place, name))


# --- the same, by another way -----------------------------------------------------------------------------------


def trained(optimizer: Any, model: Any) -> list[Tensor]:
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def without_names(world: World) -> list[str]:
    """On two ranks. Returns the warnings of rank 0."""
    mesh = make_mesh(torch.tensor([0, 1]))
    fsdp = FsdpConfig(forward_prefetch=1, backward_prefetch=1)
    runs = []
    for lacks in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if lacks:
                patch.delattr(FSDPModule, "_set_unshard_async_op")
                patch.delattr(guarded.AdamW, "_init_group")  # as if torch did not call ours
            model = sharded(mesh, fsdp)
            runs.append(trained(build_optimizer(model, OptimConfig(lr=1e-3)), model))
    assert all(one.equal(other) for one, other in zip(*runs, strict=True))

    pair = process_group.build_mesh(FsdpConfig(dp_replicate=2), world.device)
    copies = two_layers(pair)
    expected = gradients(two_layers(pair))
    shared = shared_memory.SharedMemory(pair.get_group("dp_replicate"))
    for name in ("_get_fsdp_state", "_fsdp_param_group"):
        with pytest.MonkeyPatch.context() as patch:
            owner = FSDPModule if name == "_get_fsdp_state" else type(copies._get_fsdp_state())
            if name in vars(owner):  # else it is an attribute of each state: torch 2.11
                patch.delattr(owner, name)
                shared_memory._set_custom_all_reduce(copies, shared)
    assert all(one.equal(other) for one, other in zip(gradients(copies), expected, strict=True))

    group: Any = dist.new_group()  # as those of a mesh are made
    before = shared_memory._timeout_s(group)
    process_group.limit_group_timeouts(7)
    assert (before, shared_memory._timeout_s(group)) == (1800, 420)
    assert world.untimed is not None
    assert shared_memory._timeout_s(world.untimed) > 10**6
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.delattr(type(dist.distributed_c10d._world), "pg_map")
        process_group.limit_group_timeouts(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist.ProcessGroup, "_get_backend")
        assert shared_memory._timeout_s(group) == 1800
    assert shared_memory._timeout_s(group) == 420
    return [str(warning.message) for warning in said]


def test_two_ranks_compute_the_same_without_the_names() -> None:
    one, other = run_distributed(without_names, 2)
    assert other == []
    (said,) = one
    assert f"torch {torch.__version__} has no _world.pg_map" in said
    assert "instead of run.timeout_minutes = 3" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_gradient(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = q, k, v = [torch.randn(2, 70, heads, 8).to(dtype).requires_grad_() for heads in (4, 2, 2)]

    def found() -> list[Tensor]:
        return list(torch.autograd.grad(attention.block_attention(q, k, v).float().square().sum(), leaves))

    expected = found()
    monkeypatch.delattr(torch, "_softmax_backward_data")
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found(), expected, rtol=tolerance, atol=tolerance)


def test_attention_that_checkpointing_does_not_know_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = build(ModelConfig(dim=32, n_heads=4, n_layers=1, max_seq_len=16), 50)
    materialise(model, torch.device("cpu"), 1)
    tokens = torch.arange(16)[None]

    def found() -> list[Any]:
        model.zero_grad()
        model(tokens, tokens).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = found()
    monkeypatch.setattr(blocks, "ATTENTION", set())
    blocks.apply_activation_checkpointing(model, ActivationCheckpointingConfig(mode="selective"))
    torch.testing.assert_close(found(), expected)


def test_a_cpu_whose_instructions_are_unknown_multiplies_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert "bfloat16" in widened.slow_dtypes()
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert widened.slow_dtypes() == ("bfloat16", "float16")


def test_meshes_and_plans_do_not_need_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor their modules."""
    fsdp: Any = importlib.import_module("torch.distributed.fsdp._fully_shard")
    monkeypatch.delattr(fsdp._fully_shard, "_get_post_forward_mesh_info")
    monkeypatch.delattr(fsdp._fsdp_param, "_chunk_with_empty")
    with one_mesh(), simulate.fake_world(8):
        assert dist.get_world_size() == 8
    for name in ("_fully_shard", "_fsdp_param"):
        monkeypatch.setitem(sys.modules, f"torch.distributed.fsdp._fully_shard.{name}", None)
        monkeypatch.delattr(fsdp, name)
    with one_mesh(), simulate.fake_world(8):
        assert dist.get_world_size() == 8


@pytest.mark.parametrize("name", ["_record_memory_history", "_dump_snapshot"])
def test_a_profile_says_that_it_has_no_memory_snapshot(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda.memory, name)
    config = ProfileConfig(steps=[1, 1], memory_snapshot=True)
    profile = Profile(config, tmp_path, World(0, 1, torch.device("cuda"), 1))
    profile.begin(1)
    torch.ones(3).sum()
    assert f"; no memory snapshot: torch {torch.__version__} lacks" in profile.end(1)
