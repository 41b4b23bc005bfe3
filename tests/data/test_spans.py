"""Span corruption: every token once, fixed lengths, sentinels in order, and the same rows however a run is cut."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.data.test_data import batches, stream_of
from tests.helpers import python
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.load import ConfigValue, load
from torchtitan_lite.config.schema import Config, DataConfig, TokenizerConfig, TrainConfig, conflicts
from torchtitan_lite.config.section import Machine
from torchtitan_lite.config.sections.data import span_lengths
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.prepare import split
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.spans import SpanSamples, mask, replaced
from torchtitan_lite.errors import ConfigError, DataError

SEQ_LEN = 40
SPANS = DataConfig(objective="span_corruption")


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text whose tokenizer has pad and sentinels."""
    out = tmp_path_factory.mktemp("spans") / "out"
    assert main([str(text), "--out", str(out), "--train-tokenizer", "500", "--sentinels"]) == 0
    return out


@settings(max_examples=150, deadline=None)
@given(
    st.integers(3, 700),
    st.floats(0.01, 0.5),
    st.floats(1, 12),
    st.text(min_size=1, max_size=5),
)
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


def test_every_composition_is_equally_likely() -> None:
    """Three spans of five tokens have six divisions."""
    lengths = span_lengths(11, 0.4, 1.5)
    assert (lengths.noise, lengths.spans) == (5, 3)
    counts: dict[tuple[int, ...], int] = {}
    for i in range(1200):
        gaps = mask(lengths, str(i)).astype(int)
        ends = np.flatnonzero(np.diff(np.concatenate(([0], gaps, [0]))) == -1)
        begins = np.flatnonzero(np.diff(np.concatenate(([0], gaps, [0]))) == 1)
        counts[tuple(ends - begins)] = counts.get(tuple(ends - begins), 0) + 1
    assert len(counts) == 6
    assert 140 < min(counts.values()) <= max(counts.values()) < 260


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


def test_a_mixture_of_the_folder_draws_the_same_rows_in_every_layout(folder: Path) -> None:
    config = Config(data=SPANS.model_copy(update={"path": str(folder)}), train=TrainConfig(seq_len=SEQ_LEN))
    samples = open_samples(prepare_all(config.data, config.tokenizer, print), "train", config)
    assert samples.target_len == config.target_len == span_lengths(SEQ_LEN, 0.15, 3.0).targets
    whole = samples.draw(np.arange(5, 15), 3)
    for world_size, micro_batch in ((1, 10), (2, 3), (3, 2), (4, 1)):
        found = batches(samples, 5, 10, world_size=world_size, micro_batch_size=micro_batch, seed=3)
        micros = [micro for parts in zip(*(b.micro_batches for b in found), strict=True) for micro in parts]
        tokens, targets = (torch.cat([getattr(m, what) for m in micros]) for what in ("tokens", "targets"))
        np.testing.assert_array_equal(tokens[:10], whole.tokens)
        np.testing.assert_array_equal(targets[:10], whole.targets)
        assert not tokens[10:].any(), "pad"
        assert (targets[10:] == -100).all()
        assert {b.global_tokens for b in found} == {10 * samples.target_len}


def test_the_tokenizer_of_the_cache_depends_on_the_objective(text: Path, tmp_path: Path) -> None:
    data = DataConfig(path=str(text), cache_dir=str(tmp_path))
    objectives = data, data.model_copy(update={"objective": "span_corruption"})
    plain, spans = (prepare_all(one, TokenizerConfig(vocab_size=500), lambda _: None) for one in objectives)
    assert plain.folder != spans.folder
    assert plain.vocab_size == spans.vocab_size == 500
    vocabularies = [Tokenizer.from_file(str(d.folder / "tokenizer.json")) for d in (plain, spans)]
    assert [v.token_to_id("<extra_id_99>") for v in vocabularies] == [None, 400]


def test_text_that_looks_like_a_sentinel_stays_text(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"<extra_id_0> <pad> </s> {i}"}) + "\n" for i in range(40))
    )
    out = tmp_path / "out"
    assert main([str(tmp_path / "text.jsonl"), "--out", str(out), "--tokenizer", "bytes", "--sentinels"]) == 0
    stream = stream_of(out, "train")
    assert max(stream) < 258
    assert 0 not in stream


def test_a_tokenizer_without_sentinels_is_refused(text: Path, tmp_path: Path) -> None:
    assert main([str(text), "--out", str(tmp_path / "out"), "--train-tokenizer", "400"]) == 0
    with pytest.raises(DataError, match=r"the tokenizer has no <pad> with id 0, .*--sentinels"):
        SpanSamples(tmp_path / "out", "train", SEQ_LEN, SPANS)


def test_more_spans_than_sentinels_are_refused(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"a sample has 111 spans, but the tokenizer has 100 sentinels .*data.mean_span"
    ):
        SpanSamples(folder, "train", 2000, SPANS)


def test_too_short_a_text_and_too_small_a_vocabulary_are_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    short = SPANS.model_copy(update={"mean_span_length": 30.0})
    with pytest.raises(
        DataError, match=r"the val text of .* has [\d,]+ tokens, but a sample of train.seq_len = 100000"
    ):
        SpanSamples(folder, "val", 100_000, short.model_copy(update={"mean_span_length": 3000.0}))
    config = SPANS.model_copy(update={"path": str(text), "cache_dir": str(tmp_path)})
    with pytest.raises(DataError, match=r"tokenizer.vocab_size = 300 has no room .* tokenizer.vocab_size = 358 works"):
        prepare_all(config, TokenizerConfig(vocab_size=300), print)


CONFLICTS = [
    ({"data.objective": "span_corruption"}, 'model.family = "llama" is a decoder; data.objective = "causal" works'),
    ({"model.family": "both"}, '"span_corruption" works on text, and "pairs" on sources'),
    ({"model.family": "both", "data.objective": "span_corruption", "train.seq_len": 2}, "train.seq_len = 3 works"),
    ({"data.objective": "pairs"}, "data.target_len = 32"),
    (
        {"data.objective": "pairs", "data.target_len": 800, "train.seq_len": 512},
        "are longer than model.max_seq_len = 1024; model.max_seq_len = 1312 works",
    ),
    (
        {"data.objective": "pairs", "data.target_len": 8, "data.packing": "best_fit"},
        'data.packing = "best_fit" is for data.objective = "causal"',
    ),
    (
        {"data.objective": "pairs", "data.target_len": 8, "data.document_mask": True},
        'data.document_mask = true is for data.objective = "causal"',
    ),
    ({"data.target_len": 8}, 'data.target_len = 8 has no effect without data.objective = "pairs"'),
    ({"data.noise_density": 0.2}, "data.noise_density = 0.2 has no effect without"),
]


@pytest.mark.parametrize(("values", "expected"), CONFLICTS, ids=lambda value: str(value)[:60])
def test_a_combination_that_does_not_work_names_one_that_does(
    values: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "both", replace(FAMILIES["llama"], encoder_decoder=True))
    if "model.family" in values:  # the schema accepts only registered families
        config = Config()
        sections = {key.split(".")[0] for key in values}
        update = {
            s: getattr(config, s).model_copy(
                update={k.split(".")[1]: v for k, v in values.items() if k.startswith(s + ".")}
            )
            for s in sections
        }
        assert any(expected in message for message in conflicts(Machine())(config.model_copy(update=update)).values())
        return
    with pytest.raises(ConfigError) as error:
        load(None, {key: ConfigValue(value, "--x") for key, value in values.items()})
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--data.objective=span_corruption"], "the tokenizer has no <pad> with id 0"),
        (["--data.objective=pairs", "--data.target_len=9"], "the tokenizer has no <pad> with id 0"),
        (
            ["--data.objective=span_corruption", "--tokenizer.path=SPANS", "--train.seq_len=2500"],
            "a sample has 139 spans, but the tokenizer has 100 sentinels",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_the_text_is_prepared(
    more: list[str], expected: str, folder: Path, text: Path, tmp_path: Path
) -> None:
    plain = split.byte_level()
    plain.save(str(tmp_path / "plain.json"))
    cache = tmp_path / "cache"
    command = [f"--data.path={text}", f"--tokenizer.path={tmp_path / 'plain.json'}", f"--data.cache_dir={cache}"]
    command += ["--model.family=t5", f"--run.out_dir={tmp_path}", "--model.max_seq_len=4096", "--sample.every=0"]
    result = python(*command, *(word.replace("SPANS", str(folder / "tokenizer.json")) for word in more))
    assert result.returncode == 2
    assert expected in result.stderr
    assert not cache.exists()
    assert not (tmp_path / "default").exists(), "nor a folder of the run"


def test_a_long_word_does_not_stall_the_training_of_a_tokenizer() -> None:
    """Without white space: the trainer's time would be quadratic in its length, minutes for this one."""
    letters = np.random.default_rng(0).integers(97, 123, 200_000).astype(np.uint8).tobytes().decode()
    began = time.process_time()
    tokenizer = split.train([letters, "and words " * 100], 600)
    assert time.process_time() - began < 20, "about 1 s, and 60 s before"
    assert tokenizer.decode(tokenizer.encode(letters).ids) == letters
    # texts without such words give the tokenizer that they gave before
    assert split._LONG_WORD.split("a " * 5000 + "b" * 999) == ["a " * 5000 + "b" * 999]
