"""What a run has seen of each source of a mixture."""

from collections.abc import Sequence

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.samples import Mixture
from torchtitan_lite.terminal import counted


def seen(samples: Mixture, n: int, jumps: Sequence[Sequence[int]] = ()) -> dict[str, dict[str, float]]:
    """Tokens and epochs of each source in a run's first n samples (best_fit: by a sequence's mean tokens).

    Args:
        jumps: of TrainState: samples that were skipped.
    """
    counts = samples.consumed(n)
    for _, first, end in jumps:
        skipped = zip(samples.consumed(min(end, n)), samples.consumed(min(first, n)), strict=True)
        counts = [count - (upto - before) for count, (upto, before) in zip(counts, skipped, strict=True)]
    return {
        name: {"tokens": round(count * source.mean_tokens), "epochs": round(count / source.n_samples, 4)}
        for name, source, count in zip(samples.names, samples.sources, counts, strict=True)
    }


def planned_lines(config: Config, data: DataSet, samples: Mixture) -> list[str]:
    """The share and the epochs of each source, for the start of a run."""
    lines = []
    for source, of in zip(data.sources, seen(samples, config.train.samples).values(), strict=True):
        share = source.weight / sum(s.weight for s in data.sources)
        lines.append(
            f"data    {100 * share:5.1f} % {source.name}: {source.meta.train_tokens:,} tokens, {of['epochs']:.2f} "
            f"epochs in {counted(config.train.steps, 'step')}"
        )
    return lines
