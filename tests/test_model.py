"""The model by itself: no processes, no shards."""

import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import ROOT
from torchtitan_lite import init
from torchtitan_lite.config import ModelConfig, OptimConfig
from torchtitan_lite.loss import IGNORE, bits_per_byte
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.optim import build_optimizer, learning_rate
from torchtitan_lite.sizes import GPT

SMALL = ModelConfig(dim=32, n_heads=2, n_layers=2, max_seq_len=16)


def make(config: ModelConfig = SMALL, seed: int = 0) -> Transformer:
    with torch.device("meta"):
        model = build(config, 97)
    init.materialise(model, torch.device("cpu"), seed)
    return model


def test_no_model_imports_torch_distributed() -> None:
    for file in (ROOT / "torchtitan_lite/models").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            assert not any(name.startswith(("torch.distributed", "torchtitan_lite.parallelize")) for name in names), (
                file
            )


def test_the_package_never_imports_the_front_doors() -> None:
    for file in (ROOT / "torchtitan_lite").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            assert not {"train", "checkpoint"} & set(names), file


def test_a_token_sees_only_those_before_it() -> None:
    model = make()
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    one, other = model(tokens), model(changed)
    assert one.shape == (2, 16, 97)
    assert one[:, :9].equal(other[:, :9])
    assert not one[:, 9:].equal(other[:, 9:])


def test_loss_is_the_sum_over_the_targets_that_count() -> None:
    model = make()
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(1))
    targets[1, 3:] = IGNORE
    picked = F.log_softmax(model(tokens), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -picked[targets != IGNORE].sum()
    torch.testing.assert_close(model(tokens, targets), expected)


def test_a_masked_sequence_contributes_nothing() -> None:
    model = make()
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    loss = model(tokens, torch.full((1, 16), IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_dropout_drops_in_training_only() -> None:
    model = make(SMALL.model_copy(update={"dropout": 0.5}))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    assert not model(tokens).equal(model(tokens))
    model.eval()
    assert model(tokens).equal(model(tokens))


def test_initial_values() -> None:
    model = make(ModelConfig(dim=128, n_heads=2, n_layers=8, max_seq_len=512))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (1 if "norm.weight" in name else 0)).all(), name
        else:
            residual = name.endswith(("wo.weight", "w2.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.001, name
    rows = model.get_parameter("layers.0.attention.wq.weight")
    assert len({tuple(row.tolist()) for row in rows}) == len(rows), "rows are copies of each other"


def test_loss_at_the_start_is_that_of_guessing() -> None:
    tokens = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(0))
    assert make()(tokens, tokens).item() / tokens.numel() == pytest.approx(math.log(97), rel=0.02)


def test_splitmix64_gives_the_published_numbers() -> None:
    """The first outputs of the reference implementation for the seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    bits = init.splitmix64(1234567, torch.arange(4))
    assert [int(b) % 2**64 for b in bits] == expected


def test_initial_values_never_change() -> None:
    """A run is reproducible by a later version only if these numbers stay."""
    first = make(seed=3).output.weight.flatten()[:3].tolist()
    assert first == [0.00024976918939501047, -0.040128130465745926, 0.03604385629296303]


@pytest.mark.parametrize("name", GPT)
def test_named_sizes_have_the_size_of_their_name(name: str) -> None:
    """GPT-2's own vocabulary and context; its output matrix is its embedding, so one of ours is left out."""
    with torch.device("meta"):
        model = build(ModelConfig.model_validate(GPT[name]), 50257)
    millions = float(name.removesuffix("M"))
    if millions < 100:  # named after the matrices of the layers
        count = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
        assert count / 1e6 == pytest.approx(millions, rel=0.25)
    else:
        count = sum(p.numel() for p in model.parameters()) - model.output.weight.numel()
        assert round(count / 1e6) == millions


def test_learning_rate() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 110) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_decay_is_for_matrices_only() -> None:
    model = make()
    matrices, others = build_optimizer(model, OptimConfig(weight_decay=0.3)).param_groups
    assert matrices["weight_decay"] == 0.3
    assert others["weight_decay"] == 0
    assert all(p.ndim == 2 for p in matrices["params"])
    assert all(p.ndim == 1 for p in others["params"])
    assert len(matrices["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_a_constant_matrix_is_found() -> None:
    model = make()
    with torch.no_grad():
        model.get_parameter("layers.1.feed_forward.w2.weight").fill_(0.5)
    with pytest.raises(RuntimeError, match=r"layers\.1\.feed_forward\.w2\.weight is constant"):
        init.prove(model)


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(2) * 80, 10) == pytest.approx(8)


def test_files_stay_readable() -> None:
    """A newcomer should know their room: no file of the training path is longer than 350 lines."""
    for file in [ROOT / "train.py", ROOT / "checkpoint.py", *Path(ROOT / "torchtitan_lite").rglob("*.py")]:
        assert len(file.read_text().splitlines()) <= 350, file
