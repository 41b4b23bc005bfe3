"""Chooses the kind of samples by `[data] objective` and `packing`. Each kind is imported only when it is used.

causal            T tokens, and the targets shifted by one (samples.py); with packing "best_fit", whole documents
                  (packing.py)
span_corruption   T tokens of text with some spans removed, and the removed spans (spans.py)
pairs             a source and its target (pairs.py)
"""

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import PAIRS
from torchtitan_lite.errors import DataError


def open_samples(data: DataSet, split: str, config: Config) -> Mixture:
    """Open one split of all sources.

    Raises:
        DataError: a source has less than one sequence, or does not suit the objective.
        ConfigError: a source's weight is too small.
    """
    samples: list[Samples] = []
    for source in data.sources:
        if config.data.objective != "pairs" and PAIRS in source.meta.files:
            raise DataError(
                f'{source.folder} holds pairs; use data.objective = "pairs", or prepare the texts with --text-key'
            )
        if config.data.objective == "span_corruption":
            from torchtitan_lite.data.spans import SpanSamples

            samples.append(SpanSamples(source.folder, split, config.train.seq_len, config.data))
        elif config.data.objective == "pairs":
            from torchtitan_lite.data.pairs import PairSamples

            samples.append(PairSamples(source.folder, split, config))
        elif config.data.packing == "best_fit":
            from torchtitan_lite.data.packing import PackedSamples

            samples.append(PackedSamples(source.folder, split, config.train.seq_len))
        else:
            samples.append(Samples(source.folder, split, config.train.seq_len))
    return Mixture(samples, [source.weight for source in data.sources], [source.name for source in data.sources])
