"""Bytes that the loss moves outside its matrix products, without a GPU: `python -m benchmarks.loss_bytes`.

Counted on FakeTensors: what each operator reads and writes, views excluded. The GPU kernel is one operator: its logits
are read and written once. (It reads each row a second time, from the L2 cache.)
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_lite.models import loss as head

TOKENS, VOCABULARY, DIM = 8192, 128_256, 2048
PRODUCTS = ("mm", "addmm")


class Traffic(TorchDispatchMode):
    """Bytes read and written by each operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = str(function).removeprefix("aten.").removesuffix(".default")
        if function.is_view or "empty" in name or name.startswith(("prim.", "scatter")):
            return out  # a scatter touches one logit of each row
        given = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | kwargs
        changed = {a.name for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        only_written = changed if name.endswith("out") or name in ("copy_", "zero_", "fill_.Scalar") else set()
        read = [value for key, value in given.items() if key not in only_written]
        written = {id(t): t for t in tree_leaves((out, [given[key] for key in changed if key in given]))}
        self.bytes[name] += sum(t.nbytes for t in (*tree_leaves(read), *written.values()) if isinstance(t, Tensor))
        return out

    def elementwise(self) -> int:
        """Without the matrix products."""
        return sum(n for name, n in self.bytes.items() if name.split(".")[0] not in PRODUCTS)


def traffic(*, kernel: bool, tokens: int = TOKENS, vocabulary: int = VOCABULARY, dim: int = DIM) -> Traffic:
    """Of forward and backward of a bfloat16 head, as on a GPU, by the kernel or by plain operators."""
    on_gpu = patch.object(head, "KERNEL_ON", {"cpu"} if kernel else set())
    with FakeTensorMode(), on_gpu, patch.dict(head.CHUNK, {"cpu": head.CHUNK["cuda"]}):
        x = torch.empty(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, dim, dtype=torch.bfloat16, requires_grad=True)
        with Traffic() as found:
            head.chunked_cross_entropy(x, weight, torch.empty(1, tokens, dtype=torch.int64)).backward()
    return found


def main() -> None:
    """Print both."""
    print(f"{TOKENS:,} tokens, vocabulary {VOCABULARY:,}, dim {DIM:,}, bfloat16\n\n| | GB |\n|---|---:|")
    for name, kernel in (("plain operators", False), ("the GPU kernel", True)):
        found = traffic(kernel=kernel)
        print(f"| {name} | {found.elementwise() / 1e9:.1f} |")
        for operator, n in found.bytes.most_common(8):
            print(f"| `{operator}`{' (product)' if operator.split('.')[0] in PRODUCTS else ''} | {n / 1e9:.1f} |")


if __name__ == "__main__":
    main()
