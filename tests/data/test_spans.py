"""Span corruption: every token once, fixed lengths, sentinels in order. data/test_recorded_data.py has rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from torchtitan_lite.config.sections.data import span_lengths
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.data.spans import mask, replaced


@settings(max_examples=150, deadline=None)
@given(st.integers(3, 700), st.floats(0.01, 0.5), st.floats(1, 12), st.text(min_size=1, max_size=5))
def test_a_sample_has_every_token_once_and_fixed_lengths(seq_len: int, density: float, mean: float, key: str) -> None:
    lengths = span_lengths(seq_len, density, mean)
    assert lengths.inputs <= seq_len
    assert span_lengths(lengths.inputs + 1, density, mean).raw >= lengths.raw
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


@pytest.mark.parametrize("objective", ["span_corruption", "pairs --data.target_len=9"])
def test_a_tokenizer_that_does_not_fit_is_refused_before_the_text_is_prepared(
    objective: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_level().save(str(tmp_path / "plain.json"))
    command = ["--model.family=t5", "--sample.every=0", f"--run.out_dir={tmp_path}", f"--data.path={text}"]
    command += [f"--tokenizer.path={tmp_path}/plain.json", f"--data.cache_dir={tmp_path}/cache"]
    assert train.main([*command, *f"--data.objective={objective}".split()]) == 2
    assert "the tokenizer has no <pad> with id 0" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["plain.json"], "nor a folder of the run"
