"""The log of operators (tests/fake_cuda/operators.py) counts bytes as kernels move them, on any device."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fake_cuda.operators import OperatorLog

KIB = 1024


def test_each_input_and_output_counts_once() -> None:
    with FakeTensorMode(), OperatorLog() as log:
        a, b = torch.empty(16, 64), torch.empty(64, 32)
        product = a @ b
        product.add_(product)
        torch.softmax(product, -1)
        product.t().contiguous()
        a[:4].fill_(0)
        product.copy_(torch.empty(1, 32).expand(16, 32))
    moved = [(o.name.split(".")[1], o.read, o.written) for o in log.operators if o.bytes]
    assert moved == [
        ("mm", (4 + 8) * KIB, 2 * KIB),
        ("add_", 2 * KIB, 2 * KIB),
        ("_softmax", 2 * KIB, 2 * KIB),
        ("clone", 2 * KIB, 2 * KIB),
        ("fill_", 0, 1 * KIB),
        ("copy_", 128, 2 * KIB),
    ]
    assert log.bytes(without=["mm"]) == 15 * KIB + 128


def test_a_lookup_reads_only_its_rows() -> None:
    with FakeTensorMode(), OperatorLog() as log:
        table, index = torch.empty(1000, 256), torch.empty(4, dtype=torch.int64)
        torch.nn.functional.embedding(index, table)
        table.scatter_add_(1, index[:, None], torch.empty(4, 1))
    found = [(o.read, o.written) for o in log.operators if o.bytes]
    assert found == [(4 * KIB + 32, 4 * KIB), (32 + 16 + 16, 16)]


def test_a_backward_is_logged_too() -> None:
    with FakeTensorMode(), OperatorLog() as log:
        x = torch.empty(8, 8, requires_grad=True)
        (x @ x).sum().backward()
    assert [o.name for o in log.operators].count("aten.mm.default") == 3
    assert log.waits == []
