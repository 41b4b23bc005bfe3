"""The table of dtypes in distributed/fsdp.py is measured, and so are the sums in float32."""

import functools
import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.knob_table import CASES
from tests.distributed.knob_worker import training
from tests.distributed.test_knob_effects import events_of_a_step
from torchtitan_lite import cpu
from torchtitan_lite.cpu import fused
from torchtitan_lite.distributed import fsdp
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.models import attention, chunked_loss, llama, transformer
from torchtitan_lite.models.loss import summed_cross_entropy
from torchtitan_lite.optim import muon
from torchtitan_lite.optim.optimizer import gradient_norms, squared_norm
from torchtitan_lite.run.session import Session
from torchtitan_lite.tools.estimate.simulate import fake_world

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "--mixed-precision": {"fsdp.param_dtype": "bfloat16"},
    "float16": {"fsdp.param_dtype": "float16"},
    "float8 (with bfloat16)": {"fsdp.param_dtype": "bfloat16", "speed.float8": True},
}
SHAPE = {"optim.name": "muon", "model.dim": 32, "model.n_heads": 2, "model.n_kv_heads": 1, "model.hidden_dim": 48}


def table() -> dict[str, dict[str, str]]:
    """By config: the dtype of each tensor, as the docstring says."""
    (lines,) = re.findall(r"\n    dtype  .*?\n\n", fsdp.__doc__ or "", re.S)
    (_, *configs), *rows = (re.split(r"  +", line.strip()) for line in lines.strip().splitlines())
    return {config: {row[0]: row[i] for row in rows} for i, config in enumerate(configs, 1)}


def measured(t: Session) -> dict[str, str]:
    """The dtype of each tensor in a step."""
    found: dict[str, set[torch.dtype]] = defaultdict(set)

    def seen(name: str, *tensors: Any) -> None:
        found[name] |= {tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)}

    def spied(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def spy(*args: Any, **kwargs: Any) -> Any:
            seen(name, *args)
            return function(*args, **kwargs)

        return spy

    model, optimizer = t.model, t.optimizer
    blocks: Any = model.layers
    for block in blocks:
        block.attention.attend = spied("queries, keys, values", block.attention.attend)
        block.register_forward_pre_hook(lambda _, args: seen("residual stream", args[0]))
        block.register_forward_pre_hook(
            lambda _, args, kwargs: seen("rotary tables, rotation", kwargs["cos"], kwargs["sin"]), with_kwargs=True
        )
        block.register_forward_hook(lambda _, args, output: seen("residual stream", output))

    def gathered(module: Any, _args: Any) -> None:
        weight = module.weight
        seen("gathered parameter", getattr(weight, "_data", weight))
        weight.register_hook(lambda grad: seen("gradient of gathered", grad))

    model.get_submodule("layers.1.attention.wq").register_forward_pre_hook(gathered)
    model.register_forward_hook(lambda _, args, output: seen("loss", output))

    def after(*_: Any) -> None:
        seen("gradient, this rank's rows", *(own_part(p.grad)[0] for p in model.parameters() if p.grad is not None))

    optimizer.register_step_pre_hook(after)
    with (
        patch.object(cpu.loss, "_softmax_minus_onehot", spied("logits", cpu.loss._softmax_minus_onehot)),
        patch.object(transformer, "summed_cross_entropy", spied("logits", summed_cross_entropy)),
        patch.object(muon, "newton_schulz", spied("Muon's iteration on a CPU", muon.newton_schulz)),
    ):
        found["reduction"] = {e.dtype for e in events_of_a_step(t) if e.what == "reduce" and e.dtype}
    seen("parameter, this rank's rows", *(own_part(p)[0] for p in model.parameters()))
    seen("moments, momentum", *(value for state in optimizer.state.values() for value in state.values()))
    found["Muon's iteration on a GPU"] = {muon.dtype_of_iteration(on_gpu=True)}
    found["logits"] -= {torch.int64}
    return {name: ", ".join(sorted(str(dtype)[6:] for dtype in dtypes)) for name, dtypes in found.items()}


@pytest.mark.parametrize("config", CONFIGS)
def test_each_tensor_has_the_dtype_of_the_table(config: str) -> None:
    if "float8" in config and not importlib.util.find_spec("torchao"):
        pytest.skip("torchao is not installed")
    assert table().keys() == CONFIGS.keys()
    with fake_world(2):
        t = training(
            replace(CASES["llama"], set=SHAPE | CONFIGS[config]).config(), Process(0, 2, torch.device("cpu"), 1)
        )
        assert measured(t) == table()[config]


def test_norms_sum_in_float32_and_rotations_are_float32() -> None:
    """To half a unit in the last place of the result: a sum in bfloat16 would be off by more than 100 of them."""
    torch.manual_seed(0)
    x = (torch.randn(8, 4096) + 3).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    for kind in (nn.RMSNorm, fused.RMSNorm):
        assert (kind(4096, 1e-5).bfloat16()(x) - exact).abs().max() <= 2**-8 * exact.abs().max()
    centred = x.double() - x.double().mean(-1, keepdim=True)
    exact = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert (nn.LayerNorm(4096, 1e-5).bfloat16()(x) - exact).abs().max() <= 2**-8 * exact.abs().max()
    heads, (cos, sin) = torch.randn(1, 64, 2, 16).bfloat16(), (torch.randn(64, 8).repeat(1, 2) for _ in range(2))
    for rotate in (llama.rotate, fused.rotate):
        assert rotate(heads, cos, sin).equal(rotate(heads.float(), cos, sin).bfloat16())


def test_attention_and_the_loss_sum_in_float32() -> None:
    """A sum of 1,024 equal probabilities in bfloat16 would end at 256 times one of them."""
    q, k, v = torch.zeros(1, 1024, 1, 16), torch.zeros(1, 1024, 1, 16), torch.ones(1, 1024, 1, 16)
    for attend in (attention.attend, cpu.attention.attend):
        assert (attend(q.bfloat16(), k.bfloat16(), v.bfloat16()) - 1).abs().max() <= 2**-8
    x, targets = torch.zeros(1, 1024, 16).bfloat16(), torch.zeros(1, 1024, dtype=torch.int64)
    for loss in (chunked_loss.chunked_cross_entropy, cpu.loss.chunked_cross_entropy):
        found, _ = loss(x, torch.zeros(1000, 16).bfloat16(), targets)
        assert found.item() == pytest.approx(1024 * torch.tensor(1000.0).log().item(), rel=1e-5)


def test_micro_batches_accumulate_in_float32() -> None:
    """Of 64 micro-batches whose gradients are equal, a bfloat16 sum would lose some."""
    with fake_world(1):
        config = replace(CASES["llama"], ranks=1, set=SHAPE | {"fsdp.param_dtype": "bfloat16"}).config()
        t = training(config, Process(0, 1, torch.device("cpu"), 1))
        tokens = torch.arange(16)[None]
        norms = []
        for n in (1, 64):
            for _ in range(n):
                t.model(tokens, tokens).backward()
            norms.append(squared_norm(gradient_norms(t.model), 1).sqrt().item())
            t.optimizer.zero_grad()
    assert norms[1] == pytest.approx(64 * norms[0], rel=1e-5)
    assert squared_norm(gradient_norms(torch.nn.Linear(1, 1)), 1) == 0
