"""Bytes that a GPU moves, counted without one: `python -m benchmarks.bytes`. Needs g++, which builds the stand-in.

The real code runs on FakeTensors of device cuda (tests/fake_cuda), and a log adds up what each operator reads and
writes. Matrix products are listed apart: they are bound by arithmetic, everything else by memory.

`python -m benchmarks.bytes kernel` compiles the kernel of the loss for GPUs, and prints what its loads and stores move
at a time and what it spills. Needs torch for CUDA, which brings Triton and its tools, but no GPU and no driver.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENS, DIM, VOCABULARY = 8192, 2048, 128256
GB = 1e9
UPDATE = ("torchtitan_lite/optim/muon.py", "torchtitan_lite/optim/guarded.py")
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_dot_product", "flex_attention")


def loss(chunked: bool, vocabulary: int = VOCABULARY, dim: int = DIM) -> tuple[float, float, float]:
    """GB of elementwise traffic, of products, and of the largest tensor, forward and backward, in bfloat16."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.fake_cuda.operators import OperatorLog
    from torchtitan_lite.models.chunked_loss import chunked_cross_entropy
    from torchtitan_lite.models.loss import summed_cross_entropy

    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(1, TOKENS, dim, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, dim, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(1, TOKENS, dtype=torch.int64)
        with OperatorLog() as log:
            way = chunked_cross_entropy if chunked else lambda x, w, t: summed_cross_entropy(x @ w.T, t)
            way(x, weight, targets).backward()
    elementwise = log.bytes(without=PRODUCTS)
    return elementwise / GB, (log.bytes() - elementwise) / GB, max(o.written for o in log.operators) / GB


def mask(length: int) -> tuple[float, float]:
    """MB that making a document mask moves, and those of the largest tensor."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.fake_cuda.operators import OperatorLog
    from torchtitan_lite.models.attention import within_documents

    with FakeTensorMode(), torch.device("cuda"), OperatorLog() as log:
        within_documents(torch.empty(1, length, dtype=torch.int64), dense=False)
    return log.bytes() / 1e6, max(o.written for o in log.operators) / 1e6


def shared_heads(dtype: str) -> float:
    """MB of keys and values that attention of Llama 3 8 B copies for each block and 8,192 tokens, forward."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.fake_cuda.operators import OperatorLog
    from torchtitan_lite.models.attention import attend

    with FakeTensorMode(), torch.device("cuda"):
        q = torch.empty(1, TOKENS, 32, 128, dtype=getattr(torch, dtype))
        k, v = (torch.empty(1, TOKENS, 8, 128, dtype=getattr(torch, dtype)) for _ in range(2))
        with OperatorLog() as log:
            attend(q, k, v)
    return log.bytes(without=PRODUCTS) / 1e6


def fsdp(world_size: int, **options: Any) -> float:
    """Bytes that FSDP's copies and casts move for each parameter and micro-batch, without its collectives."""
    from tests.fake_cuda.step import config_of, logged_step

    values = {
        **{"model.family": "llama", "model.dim": 512, "model.n_heads": 4, "model.n_layers": 2},
        **{"model.max_seq_len": 128, "train.seq_len": 128, "train.micro_batch_size": 1, "run.device": "cuda"},
        **{"tokenizer.vocab_size": 4096, "fsdp.param_dtype": "bfloat16"},
        **{f"fsdp.{key}": value for key, value in options.items()},
    }
    copied, parameters = [], 0
    for n in (2, 3):  # micro-batches: the difference is what one more costs
        config = config_of(values | {"train.global_batch_size": n * world_size}, world_size)
        log = logged_step(config, world_size, 4096)
        of_fsdp = [o for o in log.operators if "/fsdp/" in o.within and not o.name.startswith("c10d")]
        copied.append(sum(o.bytes for o in of_fsdp))
    parameters = 2 * 4096 * 512 + 2 * (4 * 512**2 + 3 * 512 * config.model.dim_of_ffn + 2 * 512) + 512
    return (copied[1] - copied[0]) / parameters


def projections(widths: Sequence[int], *, fused: bool) -> float:
    """MB that several products of 8,192 tokens and FSDP's separate weights move, forward and backward, in bfloat16.

    Args:
        widths: outputs of each product, from 2,048 inputs.
        fused: one product with a copy of the weights, which is made again in backward: kept, it would hold as much
            memory as the weights that FSDP frees.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.fake_cuda.operators import OperatorLog

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.save_for_backward(x, *weights)
            return (x @ torch.cat(weights).T).split(list(widths), -1)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, *weights = ctx.saved_tensors
            grad = torch.cat(grads, -1)
            return grad @ torch.cat(weights), *(grad.T @ x).split(list(widths))

    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
        weights = [torch.empty(n, DIM, dtype=torch.bfloat16, requires_grad=True) for n in widths]
        grads = [torch.empty(TOKENS, n, dtype=torch.bfloat16) for n in widths]
        apply: Any = Fused.apply
        with OperatorLog() as log:
            outputs = apply(x, *weights) if fused else [x @ weight.T for weight in weights]
            torch.autograd.backward(outputs, grads)
    return log.bytes() / 1e6


def update(optimizer: str, world_size: int, dp_replicate: int = 1) -> tuple[int, float]:
    """Operators, and GB that those other than products move, of one update of GPT-2 124M on rank 0."""
    from tests.fake_cuda.step import config_of, logged_step

    values: dict[str, Any] = {
        **{"model.family": "gpt", "model.size": "124M", "model.max_seq_len": 128, "train.seq_len": 128},
        **{"train.micro_batch_size": 1, "train.global_batch_size": world_size, "run.device": "cuda"},
        **{"tokenizer.vocab_size": 50304, "fsdp.dp_replicate": dp_replicate, "optim.name": optimizer},
    }
    log = logged_step(config_of(values, world_size), world_size, 50304)
    ours = [o for o in log.operators if o.where.startswith(UPDATE) or o.within.startswith("torch/optim/")]
    log.operators = [o for o in ours if o.bytes]
    return len(log.operators), log.bytes(without=PRODUCTS) / GB


def kernel() -> int:
    """Compile the kernel of the loss as Triton does for logits of 50,257 and 50,304 columns in bfloat16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchtitan_lite.models import loss_kernel

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    names = loss_kernel._kernel.arg_names
    for columns in (50257, 50304):
        types = {"logits": "*bf16", "targets": "*i64", "losses": "*fp32", "z_loss": "fp32"}
        types |= {"n_columns": "i32", "row_stride": "i32"}
        block = min(triton.next_power_of_2(columns), loss_kernel.MAX_BLOCK)
        constants = {"IGNORE": -100, "WRITE": True, "BLOCK": block}
        aligned = {"logits", "targets", "losses", *(("n_columns", "row_stride") if columns % 16 == 0 else ())}
        attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned}
        source = ASTSource(
            loss_kernel._kernel, {name: types.get(name, "constexpr") for name in names}, constants, attributes
        )
        for architecture in (80, 90, 100):
            target = GPUTarget("cuda", architecture, 32)
            built = triton.compile(source, target=target, options={"num_warps": max(block // 1024, 4)})
            accesses = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", built.asm["ptx"])
            ((vector, bits), _), *_ = Counter(accesses).most_common(1)  # those of the logits
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                Path(file.name).write_bytes(built.asm["cubin"])
                usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
            spilled = re.findall(r"STACK:(\d+)", usage.stdout)[0]
            at_a_time = int(vector or 1) * int(bits) // 8
            print(f"{columns:,} columns, sm_{architecture}: {at_a_time} bytes at a time, {spilled} bytes spilled")
    return 0


def main(_argv: Sequence[str]) -> int:
    rows = []
    for vocabulary, dim in ((VOCABULARY, DIM), (50257, 768), (50304, 768)):
        rows.append((f"loss of 8,192 tokens, vocabulary {vocabulary:,}, dim {dim:,}, bfloat16", ""))
        for name, chunked in (("in chunks", True), ("of all logits", False)):
            elementwise, products, largest = loss(chunked, vocabulary, dim)
            what = f"{elementwise:.2f} GB elementwise, {products:.2f} GB products, largest tensor {largest:.2f} GB"
            rows.append((f"  {name}", what))
    rows.append(("document mask, 1 sequence", ""))
    for length in (8192, 32768):
        moved, largest = mask(length)
        rows.append((f"  {length:,} tokens", f"{moved:,.1f} MB, largest tensor {largest:.2f} MB"))
    rows.append(("shared heads copied, Llama 3 8 B, 8,192 tokens, one block", ""))
    rows += [(f"  {dtype}", f"{shared_heads(dtype):,.1f} MB") for dtype in ("bfloat16", "float32")]
    rows.append(("FSDP's copies, for each parameter and micro-batch", ""))
    gathered = {"reshard_after_forward": False, "reshard_after_backward": False}
    for world_size, where in ((1, "one GPU"), (8, "8 GPUs")):
        for name, options in (
            *((where, {}), (f"{where}, kept gathered", gathered)),
            (f'{where}, kept gathered, grad_sync = "last"', gathered | {"grad_sync": "last"}),
        ):
            rows.append((f"  {name}", f"{fsdp(world_size, **options):.1f} bytes"))
    rows.append(("products of 8,192 tokens, dim 2,048, forward and backward", ""))
    for name, widths in (("q, k and v of Llama 3.2 1B", (2048, 512, 512)), ("its w1 and w3", (8192, 8192))):
        for fused in (False, True):
            way = "as one product" if fused else "each"
            rows.append((f"  {name}, {way}", f"{projections(widths, fused=fused):,.0f} MB"))
    rows.append(("update of GPT-2 124M, without products", ""))
    for name, mesh in (("one GPU", (1, 1)), ("8 GPUs", (8, 1)), ("8 GPUs, 2 copies", (8, 2))):
        for optimizer in ("adamw", "muon"):
            operators, moved = update(optimizer, *mesh)
            rows.append((f"  {name}, {optimizer}", f"{operators:,} operators, {moved:.1f} GB"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in rows))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["kernel"]:
        sys.exit(kernel())
    from tests.fake_cuda import library

    if why := library.unavailable():
        sys.exit(why)
    sys.exit(subprocess.run([sys.executable, "-m", "tests.fake_cuda", "benchmarks.bytes"], check=False).returncode)
