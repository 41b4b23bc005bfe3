"""Experts: the router, the balance of their loads, and the operators of their products."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_model import EXPERTS, make
from torchtitan_lite.models import grouped_matmul
from torchtitan_lite.models.loss import IGNORE, LossOptions
from torchtitan_lite.models.transformer import Transformer

TOKENS = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
LAYERS, N_EXPERTS = 2, 5


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {name: grad for name, grad in found.items() if grad is not None}


def test_the_loss_of_routers_is_that_of_transformers_and_not_in_the_value() -> None:
    balance = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe").load_balancing_loss_func
    model: Any = make(EXPERTS)
    targets = TOKENS.roll(-1, 1)
    targets[1, 5:] = IGNORE
    valid = (targets != IGNORE).float()
    routed: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _args, out: routed.append(out[1])) for layer in model.layers]
    plain = model(TOKENS, targets)
    more = 0.3 * sum(balance((logits,), N_EXPERTS, 2, valid) for logits in routed)
    more += 0.1 * sum((logits.logsumexp(-1) ** 2 * valid.flatten()).sum() for logits in routed) / valid.sum()
    (plain + valid.sum() * more / LAYERS).backward()
    expected = gradients(model)
    for hook in hooks:
        hook.remove()
    model.losses = LossOptions(router_aux_loss=0.3, router_z_loss=0.1)
    loss = model(TOKENS, targets)
    assert loss.equal(plain)
    assert model.loads.sum(1).tolist() == [2 * 2 * valid.sum()] * LAYERS, (
        "of both micro-batches, without what is masked"
    )
    loss.backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    assert (model(TOKENS, torch.full_like(TOKENS, IGNORE)), model.balance(lambda loads: loads), model.loads) == (
        *(0, None, None),
    ), "a micro-batch may have no target, and the next step counts its own loads"


def test_the_bias_moves_towards_equal_loads_and_changes_no_weight() -> None:
    model: Any = make(EXPERTS.model_copy(update={"router_bias": True}))
    layer: Any = model.layers[0]
    router = layer.feed_forward.router
    loads = torch.tensor([[9.0, 1, 5, 5, 5], [0, 0, 0, 0, 25]])
    other = torch.tensor([[9.0, 0, 5, 5, 5], [0, 0, 0, 0, 5]])  # of another rank
    model.losses, model.loads = LossOptions(router_bias_rate=0.01), loads - other
    model.balance(lambda own: own + other)
    assert model.loads is None
    torch.testing.assert_close(router.bias, torch.tensor([-0.01, 0.01, 0, 0, 0]))
    model.loads = loads
    model.balance(lambda loads: loads, torch.ones(()))  # a step that was withheld
    torch.testing.assert_close(router.bias, torch.tensor([-0.01, 0.01, 0, 0, 0]))
    _, weights, chosen = router(torch.zeros(1, 32))  # equal scores: the bias decides
    assert chosen[0, 0] == 1
    assert weights.tolist() == [[pytest.approx(0.2), pytest.approx(0.2)]]
    assert model.get_buffer("layers.1.feed_forward.router.bias").tolist() == pytest.approx([0.01] * 4 + [-0.01])


@pytest.mark.parametrize("ends", [[7, 7, 30, 64], [0, 0, 0, 64], [16, 32, 48, 64]])
def test_grouped_matmul_of_a_gpu_equal_the_loop(ends: list[int]) -> None:
    """On a CPU, whose `torch.nn.functional.grouped_mm` has the same rules; one group has no rows."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 16), (4, 24, 16), (64, 24))
    )
    at = torch.tensor(ends, dtype=torch.int32)
    assert grouped_matmul._grouped_mm_takes(x, weight)
    for gpu, loop, args in (
        (grouped_matmul._matmul_on_cuda, grouped_matmul.loop_matmul, (x, weight, at)),
        (grouped_matmul._matmul_on_cuda, grouped_matmul.loop_matmul, (grad, weight.mT, at)),
        (grouped_matmul._gradient_on_cuda, grouped_matmul.loop_gradient, (grad, x, at)),
        (grouped_matmul._gradient_on_cuda, grouped_matmul.loop_gradient, (grad, x[:, :7].contiguous(), at)),
    ):
        torch.testing.assert_close(gpu(*args), loop(*args), rtol=2e-2, atol=2e-2)
    narrow = x[:, :7].contiguous()  # of rows that are not a multiple of 16 bytes: the loop
    of_each = weight[:, :, :7].contiguous()
    expected = torch.cat(
        [F.linear(narrow[a:b], of_each[g]) for g, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
    )
    torch.testing.assert_close(grouped_matmul._matmul_on_cuda(narrow, of_each, at), expected)
