"""Muon: the same update on any mesh, bit for bit, and its formula."""

import pytest
import torch
from torch import Tensor, nn

from tests.checkpointing.reload_worker import MESHES, fsdp
from tests.helpers import meta_model, run_distributed
from tests.optim import on_ranks
from tests.optim.on_ranks import MODEL
from torchtitan_lite.config.derive import Layout
from torchtitan_lite.config.schema import ModelConfig, OptimConfig
from torchtitan_lite.distributed.overrides import column_placement
from torchtitan_lite.models import build
from torchtitan_lite.optim import muon
from torchtitan_lite.optim.groups import parameter_groups
from torchtitan_lite.optim.guarded import set_learning_rate
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.tools.estimate.work import EXCHANGED, GATHERED, muon_step


def expected(mesh: str) -> tuple[int, int, int]:
    """Exchanges of a step, the most bytes of matrices that `plan` lets a rank get in them, and those of rank 0's state.

    The state is one momentum of each matrix of a block, two moments and a count of the others.
    """
    n, copies = MESHES[mesh]
    model = meta_model(MODEL, 517)
    _, sent = muon_step(model, OptimConfig(name="muon"), Layout(copies, n // copies, 1, 0, 0), on_gpu=False)
    owned = sum(c.bytes for c in sent if c.kind == EXCHANGED)
    assert sum(n for c, n in sent.items() if c.kind == GATHERED) == (copies > 1)
    calls, total, columns = 2 * (n > copies), 0, fsdp(mesh)["shard_columns"]
    placement = column_placement(model, columns, n // copies)
    for name, p in model.named_parameters():
        part = p.T if placement and placement(p) else p
        elements = -(-len(part) // (n // copies)) * part[0].numel()
        total += 4 * elements if p.ndim == 2 and name.startswith("layers.") else 8 * elements + 4
    return calls, owned, total


@pytest.fixture(scope="module")
def by_mesh() -> dict[str, list[list[dict[str, Tensor]]]]:
    """Results of each rank, for no step and for the last one withheld: 1 and 3 ranks, and 2 copies of 2 shards and of
    1, with uneven and empty shards, by rows and by columns.
    """
    return {mesh: run_distributed(on_ranks.muon, MESHES[mesh][0], mesh, (0, 3)) for mesh in ("1", "3c", "2x2", "2x1")}


def test_updates_are_the_same_on_any_mesh_bit_for_bit(by_mesh: dict[str, list[list[dict[str, Tensor]]]]) -> None:
    one = by_mesh["1"][0][0]
    momenta = [name for name in one if name.startswith("momentum.")]
    assert len(momenta) == 5 * 7, "the matrices of the blocks, and no other parameter"
    weights = [name.replace("momentum.", "weight.") for name in momenta]  # AdamW's may differ in the last bit
    for mesh, by_rank in by_mesh.items():
        other = by_rank[0][0]
        calls, owned, state = expected(mesh)
        assert (int(other["calls"]), int(other["state"])) == (3 * calls, state), mesh
        most = max(int(rank[0]["owned"]) for rank in by_rank)  # by columns, `plan` does not know how much is padding
        assert most == owned or (mesh == "3c" and 0.9 * owned < most < 1.1 * owned), mesh
        assert not [name for name in momenta + weights if not one[name].equal(other[name])], mesh


def test_a_withheld_update_changes_nothing(by_mesh: dict[str, list[list[dict[str, Tensor]]]]) -> None:
    """Not even with NaN in the gradients."""
    (every, one), (_, sharded) = by_mesh["1"][0], by_mesh["3c"][0]
    assert all(value.isfinite().all() for value in sharded.values())
    momenta = [name for name in sharded if name.startswith("momentum.")]
    for name in momenta + [name.replace("momentum.", "weight.") for name in momenta]:
        assert sharded[name].equal(one[name]), name
    assert not any(every[name].equal(one[name]) for name in momenta)


def reference(weight: Tensor, gradients: list[Tensor], config: OptimConfig, scale: float) -> Tensor:
    """Steps of Jordan's algorithm in float64."""
    weight, momentum = weight.double(), torch.zeros_like(weight).double()
    for gradient in gradients:
        update = scale * on_ranks.muon_update(momentum, gradient.double(), config.muon_momentum)
        weight = weight - config.lr * (update + config.weight_decay * weight)
    return weight.float()


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24)])
@pytest.mark.parametrize(("on_gpu", "tolerance"), [(False, 1e-5), (True, 4e-2)])
def test_a_step_is_that_of_the_paper(
    shape: tuple[int, int], on_gpu: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtype of a CPU and of a GPU."""
    dtype = muon.dtype_of_iteration(on_gpu=on_gpu)
    monkeypatch.setattr(muon, "dtype_of_iteration", lambda **_: dtype)
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ParameterList([torch.randn(shape)])
    config = OptimConfig(name="muon", lr=0.02, weight_decay=0.1)
    optimizer, weight = build_optimizer(model, config), model.get_parameter("layers.0")
    gradients = list(torch.randn(3, *shape))
    before = weight.detach().clone()
    expected = reference(before, gradients, config, 0.2 * max(shape) ** 0.5)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    assert (weight - expected).norm() < tolerance * (expected - before).norm()


def test_groups_have_their_own_rate_and_decay_and_zero_gradients_only_decay() -> None:
    """Of a matrix with its own group, a stack of which one expert had no tokens, and one without a gradient."""
    model, generator = nn.Module(), torch.Generator().manual_seed(0)
    model.layers = nn.ParameterList(torch.randn(n, 4, 6, generator=generator).squeeze(0) for n in (1, 1, 3, 1))
    own = [{"match": "layers.1", "lr_factor": 0.5, "weight_decay": 0.3}]
    config = OptimConfig.model_validate({"name": "muon", "weight_decay": 0.1, "groups": own})
    optimizer, before = build_optimizer(model, config), [p.detach().clone() for p in model.parameters()]
    set_learning_rate(optimizer, 0.04)
    grads = [torch.randn(p.shape, generator=generator) for p in before[:3]]
    grads[2][1] = 0
    for p, grad in zip(model.parameters(), grads, strict=False):
        p.grad = grad.clone()
    optimizer.step()
    usual, slow = (config.model_copy(update={"lr": lr, "weight_decay": wd}) for lr, wd in ((0.04, 0.1), (0.02, 0.3)))
    one, other, first, last = (
        reference(weight, [grad], settings, 0.2 * 6**0.5)
        for weight, grad, settings in (
            *((before[0], grads[0], usual), (before[1], grads[1], slow)),
            *((before[2][i], grads[2][i], usual) for i in (0, 2)),
        )
    )
    expected = [one, other, torch.stack([first, before[2][1] * (1 - 0.04 * 0.1), last]), before[3]]
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_batch_of_matrices_is_that_of_each(shape: tuple[int, int]) -> None:
    """As on a GPU."""
    torch.manual_seed(0)
    batch = torch.randn(3, *shape, dtype=torch.float64)
    one_by_one = torch.stack([muon.newton_schulz(matrix) for matrix in batch])
    torch.testing.assert_close(muon.newton_schulz(batch), one_by_one, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("owners", "large", "expected"), [(1, 0, [16, 2]), (1, 2, [1, 1, 18]), (2, 2, [2, 18]), (9, 2, [20])]
)
def test_an_exchange_is_at_most_64_mib_but_for_a_larger_matrix(owners: int, large: int, expected: list[int]) -> None:
    """Of an owner, in float32: 16 matrices of 4 MiB, and of 128 MiB one."""
    with torch.device("meta"):
        matrices = [nn.Parameter(torch.empty(shape)) for shape in 18 * [(1024, 1024)] + large * [(8192, 4096)]]
    assert [len(exchange) for exchange in muon.exchanges(matrices, owners)] == expected


def test_owners_have_equally_much_to_compute() -> None:
    """As far as single matrices allow: 9 is 9, 5 + 3 + 1, and 4 + 4."""
    assert muon.balanced([9, 5, 4, 4, 3, 1], 3) == [[0], [1, 4, 5], [2, 3]]


@pytest.mark.parametrize(("more", "group", "expected"), [
    ({}, 1.0, {"tok_embeddings": 3.0, "pos_embeddings": 1.0, "output": 1.0}),
    ({}, 0.5, {"tok_embeddings": 1.5, "pos_embeddings": 1.0, "output": 1.0}),
    ({"tie_embeddings": True}, 1.0, {"tok_embeddings": 1.0, "pos_embeddings": 1.0}),
    ({"family": "resformer"}, 1.0, {"tok_embeddings": 3.0, "value_embeddings": 3.0, "output": 1.0}),
    ({"family": "olmo_hybrid", "layer_pattern": ["delta", "full"]}, 1.0,
     {"tok_embeddings": 3.0, "output": 1.0, **{f"layers.0.delta.conv_{x}": 1.0 for x in "qkv"}}),
])  # fmt: skip
def test_embeddings_learn_faster_unless_they_are_tied(
    more: dict[str, object], group: float, expected: dict[str, float]
) -> None:
    """Of the matrices that are not orthogonalised: those outside of the blocks, and convolutions."""
    shape = {"family": "gpt", "dim": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 8, "tie_embeddings": False}
    model = build(ModelConfig.model_validate(shape | more), 64)
    groups = [{"match": "tok_embeddings*", "lr_factor": group}]
    chosen = parameter_groups(model, OptimConfig.model_validate({"name": "muon", "groups": groups}))
    of = {id(p): (one["muon"] or p.ndim == 1, one["lr_factor"]) for one in chosen for p in one["params"]}
    found = {name.removesuffix(".weight"): of[id(p)] for name, p in model.named_parameters()}
    assert found == {name: (name not in expected, expected.get(name, 1.0)) for name in found}
    plain = parameter_groups(model, OptimConfig(name="adamw"))
    assert {chosen["lr_factor"] for chosen in plain} == {1.0}
