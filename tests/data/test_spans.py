"""Span corruption: every token once, fixed lengths, sentinels in order, and the same rows however a run is cut."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.config.parsing import mistakes
from tests.data.test_data import same_in_every_layout, stream_of
from tests.helpers import python
from torchtitan_lite.config.schema import Config, DataConfig, TrainConfig
from torchtitan_lite.config.sections.data import span_lengths
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.data.spans import SpanSamples, mask, replaced, sentinels

SEQ_LEN = 40
SPANS = DataConfig(objective="span_corruption")


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text whose tokenizer has pad and sentinels."""
    out = tmp_path_factory.mktemp("spans") / "out"
    assert main([str(text), "--out", str(out), "--train-tokenizer", "500", "--sentinels"]) == 0
    return out


@settings(max_examples=150, deadline=None)
@given(st.integers(3, 700), st.floats(0.01, 0.5), st.floats(1, 12), st.text(min_size=1, max_size=5))
def test_a_sample_has_every_token_once_and_fixed_lengths(seq_len: int, density: float, mean: float, key: str) -> None:
    lengths = span_lengths(seq_len, density, mean)
    assert lengths.inputs <= seq_len
    longer = span_lengths(lengths.inputs + 1, density, mean)
    assert longer.raw >= lengths.raw
    text = np.arange(1000, 1000 + lengths.raw)
    sentinels = np.arange(lengths.spans)[::-1].copy() + 10
    gaps = mask(lengths, key)
    inputs, targets = replaced(text, gaps, sentinels), replaced(text, ~gaps, sentinels)
    assert (len(inputs) + 1, len(targets) + 1) == (lengths.inputs, lengths.targets), "without the end mark"
    # the sentinels, in order and each once, on both sides
    for found in (inputs, targets):
        assert found[found < 1000].tolist() == sentinels.tolist()
    assert inputs[0] == 1000, "it starts with text"
    assert targets[0] == sentinels[0]
    # put together, the two are the text
    parts = dict(zip(sentinels.tolist(), np.split(targets, np.flatnonzero(targets < 1000))[1:], strict=True))
    joined = [t for token in inputs.tolist() for t in (parts[token][1:].tolist() if token < 1000 else [token])]
    assert joined == text.tolist()


def test_the_lengths_are_those_of_t5() -> None:
    assert span_lengths(512, 0.15, 3.0) == (568, 85, 28, 512, 114)
    assert span_lengths(512, 0.5, 3.0)[3:] == (512, 512), "T5 makes both sides equal at half"


def test_the_spans_of_a_sample_are_fixed_numbers() -> None:
    """A change here breaks every run in progress."""
    gaps = mask(span_lengths(40, 0.3, 2.0), "0/7/3")
    assert "".join(map(str, gaps.astype(int))) == "0110000000100001000000111000000000110001100111"


def test_rows_come_from_the_text_and_change_with_the_epoch(folder: Path) -> None:
    samples = SpanSamples(folder, "train", SEQ_LEN, SPANS)
    lengths, stream = samples.lengths, stream_of(folder, "train")
    rows = samples.draw(np.arange(samples.n_samples), None)
    assert rows.tokens.shape == (samples.n_samples, SEQ_LEN)
    assert rows.targets.shape == (samples.n_samples, lengths.targets)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, end = tokenizer.get_vocab_size() - 1, 1
    assert [tokenizer.token_to_id(name) for name in ("<pad>", "</s>", "<extra_id_0>")] == [0, end, first]
    for row in (0, 1, samples.n_samples - 1):
        tokens, targets = rows.tokens[row], rows.targets[row]
        assert tokens[lengths.inputs - 1] == targets[-1] == end
        assert not tokens[lengths.inputs :].any(), "pad"
        text = stream[1 + row * lengths.raw : 1 + (row + 1) * lengths.raw]
        kept = [t for t in (*tokens[: lengths.inputs - 1], *targets[:-1]) if t <= first - lengths.spans]
        assert sorted(kept) == sorted(text)
    n = samples.n_samples
    # the same text in the next epoch, with other gaps; few of the 228 choices of gaps coincide
    order = [samples.indices(np.arange(first, first + n), 3) for first in (0, n)]
    once, again = (
        samples.draw(np.arange(first, first + n), 3).tokens[np.argsort(order[i])] for i, first in enumerate((0, n))
    )
    assert (once != again).any(axis=1).mean() > 0.95
    # the gaps are a function of the seed, and of the sample's number in the run and in the text
    marks = sentinels(folder, lengths.spans)
    for seed, number in ((3, n + 5), (4, n + 5), (3, 5)):
        (index,), drawn = samples.indices(np.array([number]), seed).tolist(), samples.draw(np.array([number]), seed)
        raw, gaps = (
            np.array(stream[1 + index * lengths.raw :][: lengths.raw]),
            mask(lengths, f"{seed}/{number}/{index}"),
        )
        assert drawn.tokens[0, : lengths.inputs].tolist() == [*replaced(raw, gaps, marks), end]
        assert drawn.targets[0].tolist() == [*replaced(raw, ~gaps, marks), end]


def test_a_mixture_of_the_folder_draws_the_same_rows_in_every_layout(folder: Path) -> None:
    config = Config(data=SPANS.model_copy(update={"path": str(folder)}), train=TrainConfig(seq_len=SEQ_LEN))
    samples = open_samples(prepare_all(config.data, config.tokenizer, print), "train", config)
    assert samples.sources[0].target_len == config.target_len == span_lengths(SEQ_LEN, 0.15, 3.0).targets
    same_in_every_layout(samples)


def test_text_that_looks_like_a_sentinel_stays_text(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"<extra_id_0> <pad> </s> {i}"}) + "\n" for i in range(40))
    )
    out = tmp_path / "out"
    assert main([str(tmp_path / "text.jsonl"), "--out", str(out), "--tokenizer", "bytes", "--sentinels"]) == 0
    stream = stream_of(out, "train")
    assert max(stream) < 258
    assert 0 not in stream


CONFLICTS = [
    ("--data.objective=span_corruption", 'model.family = "llama" is a decoder; data.objective = "causal" works'),
    ("--model.family=t5 --data.objective=causal", '"span_corruption" works on text, and "pairs" on sources'),
    ("--model.family=t5 --data.objective=span_corruption --train.seq_len=2", "train.seq_len = 3 works"),
    ("--data.objective=pairs", "data.target_len = 32"),
    (
        "--data.objective=pairs --data.target_len=800 --train.seq_len=512",
        "are longer than model.max_seq_len = 1024; model.max_seq_len = 1312 works",
    ),
    (
        "--data.objective=pairs --data.target_len=8 --data.packing=best_fit",
        'data.packing = "best_fit" is for data.objective = "causal"',
    ),
    (
        "--data.objective=pairs --data.target_len=8 --data.document_mask",
        'data.document_mask = true is for data.objective = "causal"',
    ),
]


@pytest.mark.parametrize(("options", "expected"), CONFLICTS)
def test_a_combination_that_does_not_work_names_one_that_does(options: str, expected: str) -> None:
    assert expected in mistakes(*options.split())


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--data.objective=span_corruption", "the tokenizer has no <pad> with id 0"),
        ("--data.objective=pairs --data.target_len=9", "the tokenizer has no <pad> with id 0"),
        (
            "--data.objective=span_corruption --tokenizer.path=SPANS --train.seq_len=2500",
            "a sample has 139 spans, but the tokenizer has 100 sentinels",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_the_text_is_prepared(
    more: str, expected: str, folder: Path, text: Path, tmp_path: Path
) -> None:
    byte_level().save(str(tmp_path / "plain.json"))
    command = ["--model.family=t5", "--model.max_seq_len=4096", "--sample.every=0", f"--run.out_dir={tmp_path}"]
    command += [f"--data.path={text}", f"--tokenizer.path={tmp_path}/plain.json", f"--data.cache_dir={tmp_path}/cache"]
    result = python(*command, *more.replace("SPANS", str(folder / "tokenizer.json")).split())
    assert result.returncode == 2
    assert expected in result.stderr
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "default").exists(), "nor a folder of the run"
