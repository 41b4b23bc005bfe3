"""speed.float8, emulated on CPUs: the real steps on two ranks, what FSDP2 gathers, and a real resume."""

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.knob_table import VOCABULARY, Case
from tests.distributed.knob_worker import measure, training
from tests.helpers import losses, meta_model, ranks, run_distributed, succeeded, tiny
from torchtitan_lite import models
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed import float8, fsdp
from torchtitan_lite.distributed.evaluating import evaluating
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh
from torchtitan_lite.run.checks import check_patterns

needs_torchao = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed")
SHAPE = {"model.dim": 32, "model.n_heads": 2, "model.n_kv_heads": 1, "model.hidden_dim": 48}
ON = SHAPE | {"fsdp.param_dtype": "bfloat16", "speed.float8": True}
AT_ONCE = {
    "activation_checkpointing.mode": "selective",
    "fsdp.explicit_prefetching": True,
    "fsdp.blocks_per_group": 2,
    "fsdp.reshard_after_forward": False,
    "fsdp.reshard_after_backward": False,
}
ROWS: dict[str, dict[str, Any]] = {
    "bfloat16": ON | {"speed.float8": False},
    "float8": ON,
    "float8, other options": ON | AT_ONCE,
    "float8, compiled": ON | {"compile.enabled": True, "compile.backend": "aot_eager"},
}
TOLERANCE = 2e-3  # relative, of the loss; measured 6.2e-4


@patch.object(logging.getLogger("torchao"), "handle")
def steps(process: Process, name: str, said: Mock) -> tuple[list[tuple[float, float]], list[Any], list[int]]:
    """Losses and norms; name, shape, dtype and type of each shard; the number of converted layers, and of warnings."""
    t = training(Case(process.world_size, ROWS[name]).config(), process)
    curve = measure(t, 3)["curve"]  # the third has the samples of the first
    with torch.no_grad():
        shards = [
            (key, tuple(value.shape), str(value.dtype), type(value.to_local()).__name__)
            for key, value in t.model.state_dict().items()
        ]
    return curve, shards, [[type(m).__name__ for m in t.model.modules()].count("Float8Linear"), said.call_count]


def all_steps(process: Process, names: list[str]) -> list[Any]:
    """On two ranks."""
    return [steps(process, name) for name in names]


@needs_torchao
@pytest.mark.parametrize("more", [[], pytest.param(["float8, compiled"], marks=pytest.mark.extended)], ids=len)
def test_steps_are_close_to_bfloat16_and_names_and_shards_the_same(more: list[str]) -> None:
    names = ["bfloat16", "float8", *(more or ["float8, other options"])]
    plain, ours, other = run_distributed(all_steps, 2, names)[0]
    assert ours[1] == plain[1] == other[1]
    assert {(dtype, kind) for *_, dtype, kind in ours[1]} == {("torch.float32", "Tensor")}
    assert (plain[2], ours[2]) == ([0, 0], [3 * 7, 0]), (
        "wq, wk, wv, wo, w1, w2, w3 of each block, not the head; torchao warns of nothing"
    )
    for (loss, *_), (expected, *_) in zip(ours[0], plain[0], strict=True):
        assert loss != expected
        assert loss == pytest.approx(expected, rel=TOLERANCE)
    assert ours[0][-1][0] < ours[0][0][0]
    if more:
        assert [loss for loss, *_ in other[0]] == pytest.approx([loss for loss, *_ in ours[0]], rel=TOLERANCE)
    else:
        assert other[0] == ours[0], "the other options change no bit"


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(2 * 16).view(2, 16)
    loss = model(tokens, tokens)
    loss.backward()
    found = [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]  # type: ignore[union-attr]
    model.zero_grad()
    return found


def by_torchao(config: Config, process: Process) -> models.Transformer:
    """With torchao's own shards."""
    own: Any = importlib.import_module("torchao.float8")
    model = meta_model(config.model, VOCABULARY)
    for layer in model.layers:
        chosen = own.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
        own.convert_to_float8_training(layer, config=chosen)
    fsdp.apply_fsdp(model, build_mesh(config.fsdp, process.device), config.fsdp)
    materialize(model, process.device, seed=7)
    return model


def require_gathered_in_float8(process: Process) -> None:
    """What is gathered, that its scale is that of the weights at the time, and the gradients."""
    plain = {f"speed.{key}": False for key in ("chunked_loss", "block_attention", "fused_functions", "widen_matmuls")}
    config = Case(process.world_size, ON | plain | {"fsdp.dp_replicate": 2}).config()
    model, other = training(config, process).model, by_torchao(config, process)
    seen = []
    layer: Any = model.get_submodule("layers.1.attention.wk")
    layer.register_forward_pre_hook(lambda module, _: seen.append((module.weight._data.dtype, module.weight._scale)))
    computed = patch.object(float8, "update_scales", wraps=float8.update_scales).start()
    for factor in (1.0, 3.0, 0.1, 0.0):  # as an update, a swap with averages or a checkpoint changes weights in place
        with torch.no_grad():
            for one in (model, other):
                for parameter in one.parameters():
                    parameter.mul_(factor)
        assert isinstance(layer.weight, DTensor)
        largest = layer.weight.full_tensor().detach().abs().max().double()
        for mine, theirs in zip(gradients(model), gradients(other), strict=True):
            assert mine.equal(theirs)
        with torch.no_grad(), evaluating(model):
            model(torch.ones(1, 4, dtype=torch.int64))
        assert seen == [(torch.float8_e4m3fn, (448 / largest.clamp(min=1e-12)).float())] * 2, (
            "in training and in validation"
        )
        seen.clear()
    assert computed.call_count == 4, "once for training and validation"


@needs_torchao
def test_weights_are_gathered_in_float8_as_by_torchao_bit_for_bit() -> None:
    """On two copies of two shards: the scale is that of both."""
    run_distributed(require_gathered_in_float8, 4)


@needs_torchao
@pytest.mark.extended
def test_a_resume_is_bit_for_bit(text: Path, tmp_path: Path) -> None:
    """With everything that reads or writes shards: Muon, averages, frozen weights, validation, samples."""
    more: dict[str, Any] = {"train__steps": 4, "checkpoint__every": 2, "eval__every": 2, "optim__schedule": "constant"}
    more |= {"optim__name": "muon", "optim__ema_decay": 0.9, "optim__freeze": "layers.0.attention.*"}
    more |= {"fsdp__param_dtype": "bfloat16", "speed__float8": True, "sample__every": 4, "sample__max_tokens": 3}
    said = succeeded(ranks(2, *tiny(text, tmp_path, run__name="whole", **more)))
    assert "speed.float8 = true" in said
    saved = tmp_path / "whole/checkpoints/step-00000002"
    said = succeeded(ranks(2, *tiny(text, tmp_path, run__name="second", checkpoint__resume=saved, **more)))
    assert "not bit for bit" not in said
    assert {step: losses(tmp_path / "whole")[step] for step in (3, 4)} == losses(tmp_path / "second")


def test_shapes_that_do_not_work_are_refused_before_any_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", Mock())
    (wrong,) = check_patterns(Case(2, ON | {"model.hidden_dim": 40}).config()).values()
    assert "layers.0.feed_forward.w1 is 40 x 32, but sizes have to be multiples of 16 (and 8 more)" in wrong
    monkeypatch.setenv("WORLD_SIZE", "3")
    (wrong,) = check_patterns(Case(2, ON).config()).values()
    assert "wq has 32 rows, which fsdp.dp_shard = 3 does not divide (and 14 more); speed.float8 = false works" in wrong
