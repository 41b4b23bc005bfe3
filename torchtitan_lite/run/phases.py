"""The phases of a run: the config, mixture and samples of each step (docs/phases.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.segments import active, open_segment


def open_phase(config: Config, data: DataSet, state: TrainState, step: int) -> tuple[Config, Mixture, TrainState]:
    """Return the config and mixture of a step, which is the state's or the next one, and the state with its segment."""
    n = sum(after < step for after in config.train.boundaries(state.phases))
    phase, begun = config.phase(n), [*state.phases, *[state.step] * (n - len(state.phases))]
    mixture, segments = open_segment(data.mixed(phase), phase, state.segments, state.samples_consumed)
    tokens = dict(state.source_tokens)
    if state.tokens and not tokens:  # version 1.0 did not count the tokens of sources
        read = mixture.positions(state.samples_consumed)
        tokens = {key: state.tokens * n // sum(read.values()) for key, n in read.items()}
        tokens[next(iter(tokens))] += state.tokens - sum(tokens.values())
    return phase, mixture, replace(state, segments=segments, phases=begun, source_tokens=tokens)


# steps of a run in one phase, its config, the targets of each source by key, and the state at the end
Part = tuple[range, Config, dict[str, int], TrainState]


def planned(config: Config, data: DataSet, state: TrainState) -> Sequence[Part]:
    """Return the phases of the steps after the state; of a finished run, one without steps.

    With best_fit or skipped samples, the targets are estimates.
    """
    parts = list[Part]()
    while not parts or state.step < config.train.steps:
        begin, position = state.step, state.samples_consumed
        phase, mixture, state = open_phase(config, data, state, begin + 1)
        last = min([after for after in config.train.boundaries(state.phases) if after > begin] + [config.train.steps])
        end = position + phase.train.samples(begin, max(last, begin))
        sizes, before = zip(mixture.positions(end).items(), mixture.sources, strict=True), mixture.positions(position)
        tokens = {key: round((n - before[key]) * source.mean_tokens) for (key, n), source in sizes}
        state = replace(state.after_step(end, tokens), step=max(last, begin))
        parts.append((range(begin + 1, last + 1), phase, tokens, state))
    return parts


def place_lines(state: TrainState) -> list[str]:
    """Return where each source of the newest segment begins, and how much of it the run has read before."""
    *_, before, now = ({"sources": {}}, *state.segments)
    lines = []
    for key, each in active(now).items():
        n, cut = state.source_tokens.get(key, 0), before["sources"].get(key, each)["cut"]
        where = f"continues after {n:,} tokens" if n else "begins"
        again = f"begins a new epoch of {each['tokens']:,} tokens; the run has read {n:,} tokens of this text before"
        lines.append(f"data    {each['name']}: {where if cut == each['cut'] else again}")
    return lines


def steps(config: Config, data: DataSet, state: TrainState) -> Iterator[tuple[int, range, Config, Mixture]]:
    """Yield each step after the state, with its samples of the run, and the config and mixture of its phase."""
    begin = state.step
    for step in range(begin + 1, config.train.steps + 1):
        if state.step in (begin, *config.train.boundaries(state.phases)):
            phase, mixture, state = open_phase(config, data, state, step)
        size = phase.train.batch_size(step)
        first = phase.data.position(state.samples_consumed, size)
        state = state.after_step(first + size, {})
        yield step, range(first, first + size), phase, mixture
