"""What a step of optim.muon computes and sends, of the rank that owns most. It follows the backward pass: nothing hides
it.

    products     five iterations of three products, for each matrix that the rank owns
    all-to-all   the rows of its matrices come in, and go back
    all-gather   with copies: this rank's rows of all matrices, of which each copy has orthogonalised some
"""

from collections import Counter
from collections.abc import Sequence

from torch import nn

from torchtitan_lite.config.derive import Layout
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.distributed.overrides import column_placement
from torchtitan_lite.optim.groups import freeze, parameter_groups
from torchtitan_lite.optim.muon import ITERATIONS, dtype_of_iteration, exchanges
from torchtitan_lite.tools.estimate.work import Collective, Product, Work

EXCHANGED, GATHERED = "all-to-all, muon", "all-gather, muon"  # kinds of collectives


def muon_step(
    model: nn.Module, config: OptimConfig, layout: Layout, *, on_gpu: bool, shard_columns: Sequence[str] = ()
) -> tuple[Counter[Work], Counter[Collective]]:
    """The products and collectives of the rank that owns most elements; both empty with another optimizer.

    Args:
        model: on the meta device, not sharded.
    """
    work: Counter[Work] = Counter()
    sent: Counter[Collective] = Counter()
    if config.name != "muon":
        return work, sent
    freeze(model, config.freeze)
    width = dtype_of_iteration(on_gpu=on_gpu).itemsize
    ranks, copies, first = layout.dp_shard, layout.dp_replicate, 0
    placement = column_placement(model, shard_columns, ranks)
    owners = ranks * copies

    def split_dim(matrix: nn.Parameter) -> int:
        return 1 if placement and placement(matrix) else 0

    stacks: list[tuple[int, int, int]] = []  # rows, columns, matrices of this rank
    exchanged: list[tuple[int, int, int, int]] = []  # rows, columns, the rank that owns the first matrix, matrices
    for group in parameter_groups(model, config):
        for matrices in exchanges(group["params"], owners, split_dim) if group["muon"] else ():
            # of the matrix or, if it is split by columns, of its transpose: the products have the same sizes
            rows, columns = matrices[0].shape[-2:]
            if matrices[0].ndim == 3:
                n = len(matrices) * len(matrices[0])
                if split_dim(matrices[0]) == 0:  # whole experts of each rank: none is exchanged
                    stacks.append((rows, columns, len(matrices) * -(-len(matrices[0]) // ranks)))
                else:
                    exchanged.append((rows, columns, first % owners, n))
            elif split_dim(matrices[0]) == 0:
                exchanged.append((rows, columns, first % owners, len(matrices)))
            else:
                exchanged.append((columns, rows, first % owners, len(matrices)))
            first += len(matrices)
    elements: Counter[int] = Counter()  # by rank, of those that own a matrix: a world may have far more ranks
    for rows, columns, start, n_matrices in exchanged:
        for i in range(n_matrices):
            elements[(start + i) % owners] += rows * columns
    most = min(elements, key=lambda rank: (-elements[rank], rank), default=0)
    for rows, columns, start, n_matrices in exchanged:
        n = len(range((most - start) % owners, n_matrices, owners))
        if ranks > 1:
            sent[Collective(EXCHANGED, n * rows * columns * width, ranks)] += 2
        if copies > 1:
            gathered = -(-n_matrices // copies) * copies * -(-rows // ranks) * columns * width
            sent[Collective(GATHERED, gathered, copies)] += 1
        _add_products(work, rows, columns, n, width)
    for rows, columns, n in stacks:
        _add_products(work, rows, columns, n, width)
    return work, sent


def _add_products(work: Counter[Work], rows: int, columns: int, n_matrices: int, width: int) -> None:
    short, long = sorted((rows, columns))
    times = n_matrices * ITERATIONS
    work[Product("optimizer", 1, short, short, long, width)] += times
    work[Product("optimizer", 1, short, short, short, width)] += times
    work[Product("optimizer", 1, short, long, short, width)] += times
