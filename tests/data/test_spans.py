"""Span corruption: every token once, fixed lengths, sentinels in order, and the same rows however a run is cut."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_data import same_in_every_layout
from tests.helpers import python
from torchtitan_lite.config.schema import Config, DataConfig, TrainConfig
from torchtitan_lite.config.sections.data import span_lengths
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.data.spans import mask, replaced

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


def test_the_spans_of_a_sample_are_fixed_numbers() -> None:
    """A change here breaks every run in progress."""
    gaps = mask(span_lengths(40, 0.3, 2.0), "0/7/3")
    assert "".join(map(str, gaps.astype(int))) == "0110000000100001000000111000000000110001100111"


def test_a_mixture_of_the_folder_draws_the_same_rows_in_every_layout(folder: Path) -> None:
    config = Config(data=SPANS.model_copy(update={"path": str(folder)}), train=TrainConfig(seq_len=SEQ_LEN))
    samples = open_samples(prepare_all(config.data, config.tokenizer, print), "train", config)
    assert samples.sources[0].target_len == config.target_len == span_lengths(SEQ_LEN, 0.15, 3.0).targets
    same_in_every_layout(samples)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--data.objective=span_corruption", "the tokenizer has no <pad> with id 0"),
        ("--data.objective=pairs --data.target_len=9", "the tokenizer has no <pad> with id 0"),
        (
            "--data.objective=span_corruption --tokenizer.path=SPANS --train.seq_len=2500",
            "a sample has 139 spans, but the tokenizer has 100 sentinels (<extra_id_0> to <extra_id_138> are needed",
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
