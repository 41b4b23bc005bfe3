"""16-bit matmuls in float32, for CPUs without 16-bit instructions: the same numbers, and a choice that is recorded."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.test_recompute_and_compile import made
from tests.helpers import checkpoint, losses, ranks, succeeded, tiny
from torchtitan_lite.config.schema import Config, ModelConfig, SpeedConfig
from torchtitan_lite.cpu import float32_matmuls, widens
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer

# what oneDNN then offers is what a CPU with AVX2 has
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SIZES: dict[str, Any] = {"dim": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 24}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_rounded_once(dtype: torch.dtype, bias: bool) -> None:
    """Output and gradients are those of float64 on the same 16-bit inputs, rounded."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(3, 7, 40).to(dtype), torch.randn(24, 40).to(dtype), torch.randn(3, 7, 24).to(dtype)
    inputs = [x.requires_grad_(), weight.requires_grad_(), *([torch.randn(24).to(dtype).requires_grad_()] * bias)]
    found = float32_matmuls.linear(*inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = nn.functional.linear(*exact)
    grads = torch.autograd.grad(found, inputs, grad)
    pairs = [(found, expected), *zip(grads, torch.autograd.grad(expected, exact, grad.double()), strict=True)]
    for i, whole in enumerate(grads):  # the others are frozen
        one = [t.detach().requires_grad_(i == j) for j, t in enumerate(inputs)]
        assert torch.autograd.grad(float32_matmuls.linear(*one), one[i], grad)[0].equal(whole)
    for mine, theirs in pairs:
        assert mine.dtype == dtype
        wrong = mine != theirs.to(dtype)  # a sum in float32 may fall on the other side of a tie
        assert wrong.float().mean() < 0.01
        torch.testing.assert_close(mine.double(), theirs, rtol=torch.finfo(dtype).eps, atol=1e-4)


def model_of(family: str, *, widen: bool, chunked: bool) -> Transformer:
    experts: dict[str, Any] = {"n_experts": 3, "experts_per_token": 3} if family == "qwen3_moe" else {}
    config = ModelConfig(family=family, **SIZES, **experts)
    return made(config, speed=SpeedConfig(chunked_loss=chunked), widen=widen).bfloat16()


class Products16(TorchDispatchMode):
    """Records products of 16-bit matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        multiplies = any(part in function.__name__ for part in ("mm", "matmul", "attention"))
        if multiplies and any(t.dtype.itemsize == 2 for t in args if isinstance(t, torch.Tensor)):
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "chunked", "documents"),
    [
        ("gpt", True, False),
        ("gpt", False, True),
        ("llama", True, True),
        ("llama", False, False),
        ("t5", True, False),
        ("qwen3_moe", True, False),
    ],
)
def test_a_model_computes_the_same_under_the_same_names(family: str, chunked: bool, documents: bool) -> None:
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([*range(10), *range(13)]).repeat(2, 1) if documents else None
    plain, wide = (model_of(family, widen=widen, chunked=chunked) for widen in (False, True))
    assert list(wide.state_dict()) == list(plain.state_dict())
    values = []
    for model in (plain, wide):
        with Products16() as products:
            loss = model(tokens[:, :-1], tokens[:, 1:], None, positions)
            loss.backward()
        assert bool(products.found) == (model is plain), products.found
        values.append((loss, torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])))
    (loss, grads), (wide_loss, wide_grads) = values
    assert wide_loss.item() == pytest.approx(loss.item(), rel=2e-3)
    assert (wide_grads - grads).norm() < 0.05 * grads.norm()


@pytest.mark.parametrize(("machine", "avx512", "amx", "bfloat16", "float16", "slow"), [
    ("aarch64", False, False, False, False, []),
    ("x86_64", False, False, True, False, ["bfloat16", "float16"]),  # oneDNN emulates bfloat16
    ("AMD64", True, False, True, False, ["float16"]),
    ("x86_64", False, True, True, True, []),
    ("x86_64", True, True, False, True, ["bfloat16"]),
])  # fmt: skip
def test_a_cpu_is_slow_in_a_dtype_without_instructions(
    machine: str, avx512: bool, amx: bool, bfloat16: bool, float16: bool, slow: list[str]
) -> None:
    has: dict[str, Any] = {
        "_is_mkldnn_bf16_supported.return_value": bfloat16,
        "_is_mkldnn_fp16_supported.return_value": float16,
    }
    with (
        patch("platform.machine", return_value=machine),
        patch("torch.cpu._is_avx512_bf16_supported", return_value=avx512),
        patch("torch.cpu._is_amx_tile_supported", return_value=amx),
        patch.object(torch.ops, "mkldnn", Mock(**has)),
    ):
        assert float32_matmuls.slow_dtypes() == slow


@pytest.mark.parametrize(("fsdp", "on", "device", "expected"), [
    ({}, True, "cpu", False),
    ({"param_dtype": "float16"}, True, "cpu", False),
    ({"param_dtype": "bfloat16"}, True, "cpu", True),
    ({"param_dtype": "bfloat16"}, True, "cuda", False),
    ({"param_dtype": "bfloat16"}, False, "cpu", False),
    ({"precision_overrides": [{"param_dtype": "bfloat16", "match": "layers.0.*"}]}, True, "cpu", True),
])  # fmt: skip
def test_matmuls_are_widened_if_a_dtype_in_use_is_slow(
    fsdp: dict[str, Any], on: bool, device: str, expected: bool
) -> None:
    config = Config.model_validate({"fsdp": fsdp, "speed": {"widen_matmuls": on}})
    with patch.object(float32_matmuls, "slow_on_rank0", return_value=["bfloat16"]):
        assert widens(config, Process(0, 1, torch.device(device), 1)) == expected


SAID = "its matmuls in float32: this CPU has no 16-bit matmul instructions"


@pytest.mark.extended
def test_the_way_is_logged_recorded_and_switched_off(text: Path, tmp_path: Path) -> None:
    """The same run with and without: nearly the same losses; a resume in the other way says so."""
    curves = []
    for on in (True, False):
        name = f"widen_{on}".lower()
        more = {"run__name": name, "fsdp__param_dtype": "bfloat16", "speed__widen_matmuls": on}
        command = tiny(text, tmp_path, train__steps=4, checkpoint__every=2, **more)
        assert (SAID in succeeded(ranks(2, *command, env=AVX2))) == on
        curves.append(losses(tmp_path / name))
    for step, (loss, norm) in curves[0].items():
        assert loss == pytest.approx(curves[1][step][0], rel=2e-3)
        assert norm == pytest.approx(curves[1][step][1], rel=2e-2)
    assert curves[0] != curves[1]
    shutil.rmtree(checkpoint(tmp_path / "widen_true", 4))
    again = [option for option in command if not option.startswith(("--run.name", "--speed"))]
    assert "not bit for bit: widen_matmuls True -> False" in succeeded(
        ranks(2, *again, "--run.name=widen_true", "--speed.widen_matmuls=false", env=AVX2)
    )
    shutil.rmtree(checkpoint(tmp_path / "widen_true", 4))
    assert "not bit for bit" not in succeeded(ranks(2, *again, "--run.name=widen_true", env=AVX2))
    assert losses(tmp_path / "widen_true") == curves[0]
