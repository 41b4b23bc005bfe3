"""One process of benchmarks/scale.py: train.py, which counts its communication by phase. The report goes to $COUNTS.

python -m benchmarks.scale_rank OPTIONS...   (under torchrun)
"""

import json
import os
import pickle
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).parent.parent
# FSDP's and our collectives; some were renamed in torch 2.13
COLLECTIVES = [
    *("all_reduce", "all_gather", "broadcast", "barrier", "gather", "scatter", "all_to_all_single", "send", "recv"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single"),
]
OBJECTS = "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"  # pickles
STORE = "set", "get", "wait", "add", "check", "compare_set", "multi_get"


def counting(report: Path) -> None:
    """Count in this process, by phase. Rank 0 writes its counts to `report` at the end."""
    import train
    from torchtitan_lite.run import between_steps, saving

    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    phase = "start"

    def counted(honest: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            counts[phase][what] += 1
            counts[phase]["bytes"] += sum(n_bytes(value) for value in (*given, *named.values()))
            counts[phase]["pickles"] += len(pickle.dumps(given[0])) if honest.__name__ in OBJECTS else 0
            if given and isinstance(given[0], Tensor) and given[0].dtype == torch.float64:  # only a step's sums
                counts[phase]["float64"] += n_bytes(given[0])
            return honest(*given, **named)

        return call

    for name in filter(lambda name: hasattr(dist, name), [*COLLECTIVES, *OBJECTS]):
        setattr(dist, name, counted(getattr(dist, name), "collectives"))
    for owner in (dist.TCPStore, dist.PrefixStore):  # type: ignore[attr-defined]
        for name in STORE:
            setattr(owner, name, counted(getattr(owner, name), "requests"))
    step, save, train_all = train.train_step, saving.save, train.train

    def train_step(s: Any, number: int) -> Any:
        nonlocal phase
        phase = "step" if number > 1 else "first step"  # the first one sets up more
        result = step(s, number)
        phase = "between"
        return result

    def saved(s: Any) -> None:
        nonlocal phase
        phase = "save"
        save(s)
        phase = "between"

    def whole(s: Any) -> None:
        train_all(s)
        if s.process.rank == 0:
            report.write_text(json.dumps(counts), encoding="utf-8")

    replaced: list[tuple[Any, str, Any]] = [(train, "train_step", train_step), (between_steps, "save", saved)]
    for module, name, function in (*replaced, (train, "train", whole)):
        setattr(module, name, function)


def n_bytes(value: Any) -> int:
    """Return the bytes of the tensors in an argument."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(n_bytes, value)) if isinstance(value, list | tuple) else 0


def main(argv: Sequence[str]) -> int:
    """Run train.py, with counts."""
    sys.path.insert(0, str(ROOT))
    import train

    counting(Path(os.environ["COUNTS"]))
    return train.main(argv)


if __name__ == "__main__":
    from torchtitan_lite.distributed.process_group import exit_process

    exit_process(main(sys.argv[1:]))
