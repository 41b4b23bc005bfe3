"""What a step of optim.muon computes and sends. It follows the backward pass: nothing hides it.

products     five iterations of three products, for each matrix that a rank owns
all-to-all   the rows of its matrices come in, and go back
all-gather   with copies: this rank's rows of all matrices, of which each copy has orthogonalised some
"""

from collections import Counter

from torch import nn

from torchtitan_lite.config.derive import Layout
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.optim.groups import freeze, parameter_groups
from torchtitan_lite.optim.muon import ITERATIONS, dtype_of_iteration
from torchtitan_lite.tools.estimate.work import Collective, Product, Work

EXCHANGED, GATHERED = "all-to-all, muon", "all-gather, muon"  # kinds of collectives


def muon_step(
    model: nn.Module, config: OptimConfig, layout: Layout, *, on_gpu: bool
) -> tuple[Counter[Work], Counter[Collective]]:
    """The products and collectives of a rank with its share of the matrices of each shape, rounded up.

    Args:
        model: on the meta device, not sharded.
    """
    work: Counter[Work] = Counter()
    sent: Counter[Collective] = Counter()
    freeze(model, config.freeze)
    width = dtype_of_iteration(on_gpu=on_gpu).itemsize
    groups = [group["params"] for group in parameter_groups(model, config) if group.get("muon")]
    for (*experts, rows, columns), n in Counter(tuple(p.shape) for group in groups for p in group).items():
        if experts:  # each rank holds whole ones
            owned = n * -(-experts[0] // layout.dp_shard)
        else:
            owned = -(-n // (layout.dp_shard * layout.dp_replicate))
            n_bytes = rows * columns * width
            if layout.dp_shard > 1:
                sent[Collective(EXCHANGED, owned * n_bytes, layout.dp_shard)] += 2
            if layout.dp_replicate > 1:
                sent[Collective(GATHERED, n * n_bytes // layout.dp_shard, layout.dp_replicate)] += 1
        short, long = sorted((rows, columns))
        for product in ((short, short, long), (short, short, short), (short, long, short)):
            work[Product("optimizer", 1, *product, width)] += owned * ITERATIONS
    return work, sent
