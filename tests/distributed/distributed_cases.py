"""Cases that test_distributed.py runs on 4 ranks in one process group: every function named case_*, in order.

Nothing else holds, of recorded_ranks.json: which rank verifies which file, and the words on seeds, texts, versions,
hosts and clocks that differ; read their diffs.
"""

import functools
import itertools
import math
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpoint import WAYS
from tests.helpers import meta_model
from tests.models.test_model import make
from tests.recorded import assert_recorded
from tests.test_recorded_limits import Stub, patched
from tests.test_recorded_places import together
from torchtitan_lite.checkpointing import full_state
from torchtitan_lite.checkpointing.before_save import require_equal_replicas, require_finite
from torchtitan_lite.checkpointing.find import verify_together
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.patterns import first_match
from torchtitan_lite.config.schema import (
    CheckpointConfig,
    Config,
    FsdpConfig,
    GradScalerConfig,
    ModelConfig,
    OptimConfig,
)
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows, Samples
from torchtitan_lite.distributed.exchange import on_all, on_rank0, values_of_ranks
from torchtitan_lite.distributed.fsdp import apply_fsdp
from torchtitan_lite.distributed.initialize import materialize, require_initialised
from torchtitan_lite.distributed.process_group import Process, sum_over_ranks
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    ReplicaMismatchError,
    StuckError,
    UnreadableError,
)
from torchtitan_lite.models import LossOptions, Transformer
from torchtitan_lite.models.gpt import GPT
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.groups import freeze
from torchtitan_lite.optim.optimizer import build_optimizer, clip_factor, gradient_norms, squared_norm
from torchtitan_lite.run import start_and_end
from torchtitan_lite.scoring.validation import Validation, evaluate

# 517 and 30 divide unevenly, and of 3 positions one of four ranks gets none
MODEL = ModelConfig(family="gpt", dim=30, n_heads=2, n_layers=2, max_seq_len=3)
LLAMA = ModelConfig(
    family="llama", dim=36, n_heads=6, n_kv_heads=2, hidden_dim=50, n_layers=1, max_seq_len=3, tie_embeddings=True
)
FAMILIES = {
    "gpt": MODEL,
    "gpt, tied": MODEL.model_copy(update={"tie_embeddings": True}),
    "llama, tied": LLAMA,
    "olmo_hybrid": LLAMA.model_copy(
        update={"family": "olmo_hybrid", "n_layers": 2, "layer_pattern": ["delta", "full"], "tie_embeddings": False}
    ),
    "llama, qk_norm, qkv_bias": LLAMA.model_copy(update={"tie_embeddings": False, "qk_norm": True, "qkv_bias": True}),
    "llama, induction_head": LLAMA.model_copy(
        update={"n_heads": 2, "head_dim": 18, "tie_embeddings": False, "qk_norm": True, "induction_head": True}
    ),
}
CPU = torch.device("cpu")
# the mesh is what matters, so one family has all of them
WHERE = {"gpt": ("3",), "gpt, tied": ("4",), "olmo_hybrid": ("4",), "llama, qk_norm, qkv_bias": ("2 x 2",)}
WHERE |= {"llama, induction_head": ("3",)}
MESHES = {
    "1": torch.tensor([0]),
    "2": torch.tensor([0, 1]),
    "3": torch.tensor([0, 1, 2]),
    "4": torch.tensor([0, 1, 2, 3]),
    "2 x 2": torch.tensor([[0, 1], [2, 3]]),
    "4 copies": torch.tensor([[0], [1], [2], [3]]),
}
COLUMNS = {
    "gpt": FsdpConfig(shard_columns=["pos_embeddings.*", "*.wo.weight", "*.w1.weight"]),
    "llama, induction_head": FsdpConfig(shard_columns=["*.wq.weight", "*.wo.weight"]),
}
COPIES = {"4": 1, "2 x 2": 2, "4 copies": 4}  # of each shard


def make_mesh(ranks: torch.Tensor) -> DeviceMesh:
    names = ("dp_shard",) if ranks.ndim == 1 else ("dp_replicate", "dp_shard")
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def sharded(
    mesh: DeviceMesh,
    config: FsdpConfig | None = None,
    seed: int = 7,
    family: ModelConfig = MODEL,
    frozen: Sequence[str] = (),
) -> Transformer:
    model = meta_model(family, 517)
    freeze(model, frozen)
    apply_fsdp(model, mesh, config or FsdpConfig())
    patched(lambda: materialize(model, CPU, seed), distributed__normal_values___CHUNK=1000)
    return model


def plain(seed: int = 7, family: ModelConfig = MODEL) -> Transformer:
    return make(family, seed, 517)


def case_initial_parameters_and_gradients_are_the_same_on_every_mesh() -> None:
    meshes = {name: make_mesh(ranks) for name, ranks in MESHES.items()}
    for family, config in FAMILIES.items():
        reference = plain(family=config)
        assert not plain(8, config).output.weight.equal(reference.output.weight), "another seed"
        parameters = dict(reference.named_parameters())
        loss_of(reference).backward()
        columns = ["2 x 2, columns"] if family in COLUMNS else []
        for name in [*meshes, *columns]:
            mesh = meshes[name.removesuffix(", columns")]
            if name not in columns and (dist.get_rank() not in MESHES[name] or name not in WHERE.get(family, MESHES)):
                continue
            model = sharded(mesh, COLUMNS[family] if name in columns else None, family=config)
            where = f"{family}, mesh {name}"
            assert all(b.equal(dict(reference.named_buffers())[key]) for key, b in model.named_buffers()), where
            loss_of(model).backward()
            found = dict(model.named_parameters())
            assert found.keys() == parameters.keys(), where
            for key, parameter in found.items():
                assert isinstance(parameter, DTensor)
                dim = int(name in columns and first_match(key, COLUMNS[family].shard_columns) is not None)
                per_rank = -(-parameter.shape[dim] // mesh.size(mesh.ndim - 1))
                assert parameter.to_local().shape[dim] <= per_rank, f"{where}: {key} is not sharded"
                assert parameter.full_tensor().equal(parameters[key]), f"{where}: {key} differs"
                assert isinstance(parameter.grad, DTensor), f"{where}: {key} has no gradient"
                torch.testing.assert_close(
                    parameter.grad.full_tensor(), parameters[key].grad, rtol=1e-4, atol=1e-6, msg=f"{where}: {key}"
                )


def case_the_gradient_of_a_parameter_outside_of_all_groups_is_summed_too() -> None:
    """As an own model may have one, which the root then owns."""

    def with_shift(model: Any) -> Any:
        model.shift = torch.nn.Parameter(torch.zeros(MODEL.dim, device=model.norm.weight.device))
        model.norm.register_forward_pre_hook(lambda _, given: (given[0] + model.shift,))
        return model

    model = with_shift(meta_model(MODEL, 517))
    apply_fsdp(model, make_mesh(MESHES["2 x 2"]), FsdpConfig())
    materialize(model, CPU, 7)
    reference = with_shift(plain())
    for each in (model, reference):
        loss_of(each).backward()
    torch.testing.assert_close(model.shift.grad.full_tensor(), reference.shift.grad)


def _fail(error: Exception) -> NoReturn:
    raise error


def case_an_error_of_one_rank_is_raised_on_all() -> None:
    rank = dist.get_rank()
    group = [dist.new_group(members) for members in ([0], [1, 3], [2])][(0, 1, 2, 1)[rank]]
    with pytest.raises(UnreadableError, match="disk 7$") as same:
        on_rank0(lambda: _fail(UnreadableError("disk 7")))
    assert same.value.secondary == (rank != 0)
    with pytest.raises(ZeroDivisionError if rank == 0 else StuckError, match="by zero"):
        on_rank0(lambda: 1 // 0)
    failures = {1: CheckpointError("a"), 2: ZeroDivisionError("b"), 3: OSError("c")}
    with pytest.raises(ZeroDivisionError if rank == 2 else CheckpointError) as caught:
        on_all(lambda: _fail(failures[rank]) if rank in failures else None)
    assert str(caught.value) == ("b" if rank == 2 else "rank 1: a; rank 2: b; rank 3: c"), "a bug keeps its traceback"
    # an error of the first rank within an action of all is told once; that of a single rank is its own
    with pytest.raises(DataError, match="^rank 0: of both$" if rank % 2 else "^of both$"):
        on_all(lambda: on_rank0(lambda: _fail(DataError("of both")), group), group)


def case_messages_of_any_length_arrive() -> None:
    """In steps of 7 bytes, which any cut of 8 bytes would show; a different rank's is the longest each time."""
    for n in (*range(0, 1100, 7), *(2**k + more for k in (11, 12, 13, 16) for more in (-9, -8, -3, -2, -1, 0, 1))):
        texts = ["x" * (n - (of + n) % 4) + str(of) for of in range(4)]
        assert values_of_ranks(texts[dist.get_rank()]) == texts
        assert on_rank0(lambda n=n: "x" * n) == "x" * n  # type: ignore[misc]


def case_a_block_that_is_not_initialised_is_found() -> None:
    """The public FSDP2 example's reset_parameters never reaches its blocks."""

    class Forgetful(GPT):
        def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            skip = sys._getframe(1).f_code.co_name == "reset_parameters"
            for name, parameter in super().named_parameters(*args, **kwargs):  # type: ignore[arg-type]
                if not (skip and name.startswith("layers.")):
                    yield name, parameter

    with torch.device("meta"):
        model = Forgetful(MODEL, 517, LossOptions())
    apply_fsdp(model, make_mesh(MESHES["4"]), FsdpConfig())
    with pytest.raises(RuntimeError, match="layers.0.attention.wq.weight has values that are not finite") as caught:
        materialize(model, CPU, 7)
    assert "output.weight" not in str(caught.value)
    for dtype in (torch.float32, torch.int16):
        with torch.device("meta"):
            incomplete = GPT(MODEL, 517, LossOptions())
            incomplete.register_buffer("forgotten", torch.empty(3, dtype=dtype))
        with pytest.raises(RuntimeError, match="forgotten has values that are not finite"):
            materialize(incomplete, CPU, 7)
    infinite = plain()
    infinite.get_parameter("norm.weight").data[5] = -math.inf
    with pytest.raises(RuntimeError, match="norm.weight has values that are not finite"):
        require_initialised(infinite)


def loss_of(model: Transformer, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(517, (2, 3), generator=generator)
    weight = model.tok_embeddings.weight
    ranks = weight.device_mesh.size() if isinstance(weight, DTensor) else 1  # with the same tokens, and a sum over them
    return model(tokens, tokens) / ranks


def case_only_one_group_and_the_head_are_whole_at_a_time() -> None:
    model = sharded(make_mesh(MESHES["4"]))
    whole: dict[str, list[str]] = {}

    def note(name: str):  # type: ignore[no-untyped-def]
        def hook(*_: object) -> None:
            whole[name] = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]

        return hook

    model.get_submodule("layers.0.feed_forward.w1").register_forward_hook(note("layers.0"))
    model.output.register_forward_hook(note("output"))
    loss_of(model).backward()
    assert all(name.startswith("layers.0.") for name in whole["layers.0"]), whole
    assert set(whole["output"]) == {"norm.weight", "norm.bias", "output.weight"}, whole


def case_one_rank_that_cannot_prepare_a_save_fails_it_for_all() -> None:
    """The next save succeeds. Then two machines, of 1 and 3 ranks, verify it on the disk of the first."""
    model = sharded(make_mesh(MESHES["4"]))
    optimizer = build_optimizer(model, OptimConfig(name="adamw"))
    process = Process(dist.get_rank(), 4, CPU, 1)
    folder = Path(on_rank0(tempfile.mkdtemp))
    # of a full one, rank 0 has the copies
    for api, kind, rank, part in (
        ("dcp", "sharded", 2, "fill"),
        ("dtensor", "full", 0, "fill"),
        ("dtensor", "full", 0, "reserve"),
    ):
        way = CheckpointConfig.model_validate({"api": api, "state_dict": kind, "async_save": True})
        checkpointer = Checkpointer(folder / kind, model, optimizer, way, process, WAYS)
        assert checkpointer.group not in (process.untimed, None, dist.group.WORLD), "of its own"
        honest = getattr(checkpointer.copies, part)
        for step in (1, 2):
            fails = step == 1 and process.rank == rank
            setattr(checkpointer.copies, part, (lambda _: bytes(2**62)) if fails else honest)
            checkpointer.save(TrainState(step=step))
            saved = checkpointer.wait()
            assert saved is not None
            assert saved.error == (f"rank {rank}: MemoryError()" if step == 1 else "")
        dist.barrier()
        assert [found.name for found in (folder / kind).iterdir()] == ["step-00000002"]
    mine = replace(process, local_world_size=3 if process.rank else 1)
    here = folder / ("nowhere" if process.rank else "full") / "step-00000002"
    assert verify_together(here, "full", mine) == []
    dist.barrier()
    if process.rank == 0:
        shutil.rmtree(folder)


def case_a_rank_without_memory_for_a_message_fails_the_save_of_all() -> None:
    optimizer = build_optimizer(model := sharded(make_mesh(MESHES["2 x 2"])), OptimConfig(name="sgd"))
    folder, honest = Path(on_rank0(tempfile.mkdtemp)), vars(full_state)["own_part"]
    saver = Checkpointer(folder, model, optimizer, CheckpointConfig(), Process(dist.get_rank(), 4, CPU, 1), WAYS)
    for step, rank in enumerate((1, 0, -1)):
        vars(full_state)["own_part"] = (lambda *_: bytes(2**62)) if dist.get_rank() == rank else honest
        saver.save(TrainState(step=step))
        saved = saver.wait()
        assert saved is not None
        assert saved.error == ("" if rank < 0 else f"rank {rank}: MemoryError()")
    vars(full_state)["own_part"] = honest
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def case_rows_are_sent_and_gathered_as_by_torch() -> None:
    """In one message, in which some parts begin at odd bytes: few rows, one column for each rank, a transposed view."""
    process = Process(dist.get_rank(), 4, CPU, 1)
    split = {
        "rows": (torch.arange(15.0).view(5, 3), 0),
        "one": (torch.tensor([7], dtype=torch.int8), 0),
        "columns": (torch.arange(20.0).view(5, 4), 1),
        "transposed": (torch.arange(12.0).view(6, 2).T, 0),
    }
    whole = {key: tensor for key, (tensor, _) in split.items()} | {
        "step": torch.tensor(3.0),
        "replicated": torch.ones(3),
    }
    for mesh in map(make_mesh, map(MESHES.__getitem__, COPIES)):
        replicas = [Replicate()] * (mesh.ndim - 1)
        expected = {
            k: distribute_tensor(t.contiguous(), mesh, [*replicas, Shard(dim)]) for k, (t, dim) in split.items()
        }
        own: dict[str, torch.Tensor] = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        own["step"] = torch.tensor(0.0)
        own["replicated"] = distribute_tensor(torch.zeros(3), mesh, [*replicas, Replicate()])
        full_state.scatter(own, lambda key: whole[key].double(), mesh, process)
        assert all(own_part(own[key])[0].equal(tensor.to_local()) for key, tensor in expected.items())
        found: dict[str, bool] = {}

        def compare(part: dict[str, torch.Tensor], found: dict[str, bool] = found) -> None:
            found.update({key: tensor.is_meta or tensor.equal(whole[key]) for key, tensor in part.items()})

        # the first is on another device than those that are sent, as the step counts of torch's AdamW are
        every = {"elsewhere": torch.empty(2, device="meta")} | own
        full_state.gather(every, mesh, compare, None)
        assert found == (dict.fromkeys(every, True) if process.rank == 0 else {})
        with pytest.raises(CheckpointError, match="disk 7$"):  # of rank 0, on every rank
            full_state.gather(own, mesh, lambda _: _fail(CheckpointError("disk 7")), None)


def case_weights_of_another_run_reach_every_rank() -> None:
    """Sent by rank 0, and read by each rank of one machine."""

    def found() -> tuple[Path, list[str]]:
        return Path("unused"), []

    for name, on_one_machine in itertools.product(("gpt", "llama, tied"), (False, True)):
        family = FAMILIES[name]
        process = Process(dist.get_rank(), 4, CPU, 1, local_world_size=4 if on_one_machine else 1)
        reference = {key: p.detach().bfloat16() for key, p in plain(seed=3, family=family).named_parameters()}
        model = sharded(make_mesh(MESHES["2 x 2"]), COLUMNS.get(name), seed=4, family=family)
        checkpointer = Checkpointer(
            Path("unused"), model, build_optimizer(model, OptimConfig(name="adamw")), CheckpointConfig(), process, WAYS
        )
        checkpointer.load_weights(found, lambda _, reference=reference: reference)  # type: ignore[misc]
        for key, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.full_tensor().equal(reference[key].float()), f"{name}: {key}"
        with pytest.raises(CheckpointError, match=" is - in the checkpoint and "):
            checkpointer.load_weights(found, lambda _: {})
        parameters = dict(model.named_parameters())
        with pytest.raises(CheckpointError, match="disk 7$"):  # of rank 0, on every rank
            full_state.scatter(parameters, lambda _: _fail(CheckpointError("disk 7")), checkpointer.mesh, process)


def case_clipping_is_that_of_torch() -> None:
    """Parameters after two steps, against torch's own clipping and optimizers on a whole model.

    With a small eps, AdamW would make steps of the noise in gradients that are exactly 0 in theory.
    """
    adamw, sgd = {"name": "adamw", "eps": 1e-3}, {"name": "sgd", "weight_decay": 0.3}
    for mesh, optim, max_norm, scale in (
        ("4", adamw, 0.3, 0.0),
        ("2 x 2", adamw, 0.3, 1024.0),
        ("4", adamw, math.inf, 1024.0),
        ("4 copies", sgd, 0.3, 1024.0),
    ):
        _clipped_as_by_torch(mesh, OptimConfig.model_validate(optim | {"max_norm": max_norm}), scale)


def _clipped_as_by_torch(mesh: str, config: OptimConfig, scale: float) -> None:
    frozen = ["layers.1.*"] if scale else []
    model, reference = sharded(make_mesh(MESHES[mesh]), frozen=frozen), plain()
    freeze(reference, frozen)
    optimizer = build_optimizer(model, config)
    trained = [p for p in reference.parameters() if p.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    its_optimizer = (
        torch.optim.AdamW(groups, lr=1e-3, betas=config.betas, eps=config.eps, foreach=False)
        if config.name == "adamw"
        else torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
    )
    scaler = GradScaler(GradScalerConfig(init_scale=scale or 1.0), enabled=scale > 0, device=CPU)
    for number in (1, 2):
        loss_of(reference, number).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), config.max_norm)
        its_optimizer.step()
        its_optimizer.zero_grad()
        scaler.scaled(loss_of(model, number)).backward()
        squared = squared_norm(gradient_norms(model), COPIES[mesh])
        own = torch.nn.utils.get_total_norm([own_part(p.grad)[0] for p in model.parameters() if p.grad is not None])
        assert squared.equal(own.double().square() / COPIES[mesh]), "not bit for bit"
        norm = sum_over_ranks(squared).sqrt().float() / scaler.scale
        factor = clip_factor(norm, config.max_norm, scaler.scale)
        optimizer.update(number, 1e-3, factor, torch.tensor(False))
        torch.testing.assert_close(norm, expected, rtol=3e-6, atol=0)
        assert norm > 2 * 0.3, "nothing is clipped"
    weights = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = parameter.full_tensor()
        torch.testing.assert_close(whole, weights[key], rtol=1e-5, atol=2e-6, msg=f"{mesh} {key}")


def case_parameters_that_are_not_finite_are_not_saved() -> None:
    model = sharded(make_mesh(MESHES["4"]))
    require_finite(model, 1)
    if dist.get_rank() > 1:
        name = ("layers.1.attention.wo.weight", "output.weight")[dist.get_rank() - 2]
        own_part(model.get_parameter(name).detach())[0][0, 0] = math.inf
    with pytest.raises(NonFiniteError, match="step 5: not finite: 2 parameters, the first is layers.1.attention.wo"):
        require_finite(model, 5)


def case_replicas_that_differ_are_not_saved() -> None:
    """Both ranks of the second replica, then the first of them: in a moment, then in the weights as well."""
    model = sharded(make_mesh(MESHES["2 x 2"]))
    optimizer = build_optimizer(model, OptimConfig(name="adamw"))
    loss_of(model, seed=1).backward()
    optimizer.step()
    require_equal_replicas(model, optimizer, 6)
    weight = model.get_parameter("layers.1.attention.wo.weight")
    host = socket.gethostname()
    wo = "layers.1.attention.wo.weight"
    for tensor, name in ((optimizer.state[weight]["exp_avg"], f"state.{wo}.exp_avg"), (weight.detach(), wo)):
        part = own_part(tensor)[0]
        intact = part.clone()
        part[0, 0] += 1.0 * (dist.get_rank() in (2, 3))
        for others, ranks in (((), f"2 ({host}), 3 ({host})"), ((3,), f"2 ({host})")):
            if dist.get_rank() in others:
                part.copy_(intact)
            bad = "2 tensors" if name == wo else "1 tensor"
            bad = f"{bad}, the first is {name}. A bit flipped in memory"
            with pytest.raises(ReplicaMismatchError) as caught:
                require_equal_replicas(model, optimizer, 6)
            said = f"step 6: replicas of the model differ: rank {ranks} from the first replica, in {bad}"
            assert str(caught.value).startswith(said), str(caught.value)


class Uneven(Samples):
    """Sequences of 1, 2 or 3 targets."""

    def __init__(self) -> None:
        self.seq_len = self.target_len = 3

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        rows = Rows.empty(len(run_samples), 3)
        for row, i in enumerate(run_samples.tolist()):
            rows.tokens[row] = (i, i + 1, i + 2)
            rows.targets[row, : i % 3 + 1] = rows.tokens[row, : i % 3 + 1]
        return rows

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        return int((run_samples % 3 + 1).sum())


def case_a_validation_sums_over_ranks_and_knows_its_standard_error() -> None:
    """Against the textbook's formula for a ratio, on 10 sequences of uneven lengths over 4 ranks of 1 a round."""
    model = sharded(make_mesh(MESHES["4"]))
    model.output.chunked = True
    lengths = torch.arange(517) % 3 + 1
    drawn = Uneven().draw(np.arange(10), None)
    tokens, targets = torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.targets)
    reference = plain().eval()
    with torch.no_grad():
        nats = [float(reference(tokens[i : i + 1], targets[i : i + 1])) for i in range(10)]
    known = [row[row != IGNORE] for row in targets]
    of_all = torch.cat(known)
    share = of_all.bincount().double() / len(of_all)
    unigram = float(-torch.xlogy(share, share).sum()) / math.log(2) * len(of_all) / float(lengths[of_all].sum())
    for micro_batch_size in (1, 2, 3):
        samples = Mixture([Uneven()], [1.0], ["one"])
        loader = Loader(samples, micro_batch_size=micro_batch_size, rank=dist.get_rank(), world_size=4, seed=None)
        validation = Validation(loader, 10, lengths, samples)
        score = evaluate(model, validation, CPU)
        for found, stderr, sizes, unit in (
            (score.loss, score.loss_stderr, [float(len(k)) for k in known], 1.0),
            (score.bits_per_byte, score.bits_per_byte_stderr, [float(lengths[k].sum()) for k in known], math.log(2)),
        ):
            ratio = sum(nats) / sum(sizes)
            residuals = [y - ratio * x for y, x in zip(nats, sizes, strict=True)]
            expected = math.sqrt(10 / 9 * sum(r * r for r in residuals)) / sum(sizes)
            assert abs(found * unit - ratio) < 1e-5
            assert abs(stderr * unit - expected) < 1e-5
            assert expected > 1e-3
        assert abs(score.unigram_bits_per_byte - unigram) < 1e-9
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert model.training


def case_ranks_that_share_a_gpu_or_a_local_rank_are_refused() -> None:
    """Each process sees one GPU; or has LOCAL_RANK=0, by torchrun's --virtual-local-rank."""
    rank, host = dist.get_rank(), socket.gethostname()
    data = Stub(tokenizer_sha256="", hashes=dict, later=(), vocab_size=0)
    process = Process(rank, 4, torch.device("cuda", 0), 1, 4)
    for uuid, local, said in (
        (rank, rank, f"['{host}']"),
        (rank % 3, rank, f"ranks 0, 3 ({host}) share a GPU (0); start one process for each GPU"),
        (
            rank,
            max(rank - 1, 0),
            "several processes of a machine have LOCAL_RANK=0: run torchrun without --virtual-local-rank",
        ),
    ):
        assert said in str(
            patched(
                functools.partial(start_and_end.require_agreement, Config(), data, process),
                run__start_and_end__torch__cuda__get_device_properties=lambda _, uuid=uuid: Stub(uuid=uuid),
                run__start_and_end__local_rank=lambda local=local: local,
            )
        )


def case_one_rank_that_is_not_like_the_others() -> None:
    """Another disk, clock, text or signal than rank 0's: recorded_ranks.json has what each rank makes of it."""
    found = values_of_ranks(together(dist.get_rank()))
    if dist.get_rank() == 0:
        of_ranks = {name: [each[name] for each in found] for name in found[0]}
        said = {name: {"all": each[0]} if each == each[:1] * 4 else each for name, each in of_ranks.items()}
        assert_recorded(said, Path(__file__).with_name("recorded_ranks.json"))


def all_cases(_process: Process, only: str = "") -> None:
    """The traceback of the first that fails names it."""
    for name, case in list(globals().items()):
        if name.startswith("case_") and only in name:
            case()
