"""Pairs: from csv, jsonl and parquet to the rows of an encoder-decoder or a decoder; bad pairs; the default pairs."""

import itertools
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from tests.data.test_data import same_in_every_layout, stream_of
from torchtitan_lite.config.schema import Config, DataConfig, ModelConfig, TokenizerConfig, TrainConfig
from torchtitan_lite.data import pairs as pairs_module
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.pairs import PairSamples, questions
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.token_files import document_ends, read_meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.models.loss import IGNORE

ROWS = [(f'the {i}-th text, "quoted",\nof {"many words " * (i % 9)}', f"text {i}") for i in range(300)]
GOOD = '{"text": "a", "headline": "b"}\n'
KEYS = ["--source-key", "text", "--target-key", "headline", "--tokenizer", "bytes"]


def config_of(path: Path, family: str = "t5", *, seq_len: int = 64, target_len: int = 10, **values: Any) -> Config:
    data = DataConfig(path=str(path), objective="pairs", target_len=target_len, **values)
    return Config(data=data, model=ModelConfig(family=family), train=TrainConfig(seq_len=seq_len))


def written(suffix: str, folder: Path) -> Path:
    file = folder / f"pairs{suffix}"
    sources, targets = zip(*ROWS, strict=True)
    table = pyarrow.table({"id": range(len(ROWS)), "headline": targets, "text": sources})
    if suffix == ".csv":
        pyarrow.csv.write_csv(table, file)
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        pyarrow.parquet.write_table(table, file)
    return file


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    assert main([str(written(".jsonl", folder)), *KEYS, "--val-fraction", "0.2", "--out", str(folder / "out")]) == 0
    return folder / "out"


def decoded(folder: Path, split: str) -> list[tuple[str, str]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [1, *document_ends(folder, read_meta(folder), split).tolist()]
    stream = stream_of(folder, split)
    texts = [tokenizer.decode(stream[a : b - 1]) for a, b in itertools.pairwise(ends)]
    return list(zip(texts[::2], texts[1::2], strict=True))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_every_pair_is_stored_once_and_together(suffix: str, tmp_path: Path) -> None:
    file, out = written(suffix, tmp_path), tmp_path / "out"
    prefix = "summarize: "
    assert main([str(file), *KEYS, "--source-prefix", prefix, "--val-fraction", "0.2", "--out", str(out)]) == 0
    train, val = decoded(out, "train"), decoded(out, "val")
    assert sorted(train + val) == sorted((prefix + source, target) for source, target in ROWS)
    assert 20 < len(val) < 110
    keys = {"source_key": "text", "target_key": "headline", "source_prefix": prefix}
    assert json.loads((out / "pairs.json").read_bytes()) == keys
    assert main(["--verify", str(out)]) == 0


def test_rows_of_an_encoder_decoder(prepared: Path) -> None:
    samples = PairSamples(prepared, "train", config_of(prepared))
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    found = decoded(prepared, "train")
    rows = samples.draw(np.arange(samples.n_samples), None)
    assert rows.tokens.shape == (len(found), 64)
    assert rows.targets.shape == (len(found), 10)
    for row, (source, target) in enumerate(found):
        wanted = [*tokenizer.encode(source).ids[:63], 1]
        assert rows.tokens[row].tolist() == wanted + [0] * (64 - len(wanted))
        wanted = [*tokenizer.encode(target).ids[:9], 1]
        assert rows.targets[row].tolist() == wanted + [IGNORE] * (10 - len(wanted))
    assert samples.n_targets(np.arange(samples.n_samples), None) == (rows.targets != IGNORE).sum()
    long = sum(len(source.encode()) > 63 for source, _ in found)
    cut = f"{len(found):,} pairs; {long:,} sources cut to 64 tokens and 0 targets cut to 10 tokens"
    assert samples.notes == (cut,)


def test_rows_of_a_decoder_have_a_loss_on_the_target_only(prepared: Path) -> None:
    config = config_of(prepared, "llama")
    assert config.input_len == config.target_len == 74
    samples = PairSamples(prepared, "train", config)
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    rows = samples.draw(np.arange(samples.n_samples), None)
    assert rows.tokens.shape == rows.targets.shape == (samples.n_samples, 74)
    for row, (source, target) in enumerate(decoded(prepared, "train")):
        first, then = tokenizer.encode(source).ids[:63], [*tokenizer.encode(target).ids[:9], 1]
        together = [1, *first, 1, *then]
        assert rows.tokens[row, : len(together) - 1].tolist() == together[:-1]
        known = rows.targets[row] != IGNORE
        assert rows.targets[row][known].tolist() == then
        assert np.flatnonzero(known)[0] == len(first) + 1, "the end mark after the source predicts the first token"
    assert samples.n_targets(np.arange(samples.n_samples), None) == (rows.targets != IGNORE).sum()


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_questions_are_sources_as_in_training_with_whole_targets(family: str, prepared: Path) -> None:
    samples = PairSamples(prepared, "val", config_of(prepared, family, target_len=5))
    encode, beginning = Tokenizer.from_file(str(prepared / "tokenizer.json")).encode, [1] * (family == "llama")
    pairs = [(encode(source).ids, encode(target).ids) for source, target in decoded(prepared, "val")]
    found = samples.questions(np.arange(len(pairs)), None)
    assert found == [([*beginning, *source[:63], 1], target) for source, target in pairs]
    assert samples.mean_tokens == sum(len(source) + len(target) + 2 for source, target in pairs) / len(pairs)
    assert questions(Mixture([samples], [1.0], [""]), 10**6, 3) == samples.questions(np.arange(len(pairs)), 3) != found


def test_blind_sources_are_empty(prepared: Path) -> None:
    blind = PairSamples(prepared, "train", config_of(prepared, blind_source=True, target_len=7))
    n, long = blind.n_samples, sum(len(target) > 6 for _, target in decoded(prepared, "train"))
    cut = f"{n} pairs; 0 sources cut to 64 tokens and {long} targets cut to 7 tokens"
    assert blind.notes == (f"{cut}; data.blind_source leaves every source empty",)
    rows = PairSamples(prepared, "train", config_of(prepared, blind_source=True)).draw(np.arange(5), None)
    assert rows.tokens[:, 0].tolist() == [1] * 5
    assert not rows.tokens[:, 1:].any()
    seen = PairSamples(prepared, "train", config_of(prepared)).draw(np.arange(5), None)
    assert rows.targets.tolist() == seen.targets.tolist()


def test_an_epoch_has_every_pair_once_in_blocks_of_similar_length_in_random_order(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs_module, "WINDOW", 100)
    monkeypatch.setattr(pairs_module, "BLOCK", 10)
    samples = PairSamples(prepared, "train", config_of(prepared, seq_len=256))
    n = samples.n_samples
    assert n > 200
    epochs = [samples.indices(np.arange(first, first + n), 3) for first in (0, n, 2 * n)]
    assert all(sorted(epoch.tolist()) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    for i in range(0, n - n % 100, 100):
        windows = [set(epoch[i : i + 100].tolist()) for epoch in epochs]
        assert windows[0] != windows[1] != windows[2] != windows[0], "a window has the same pairs in another epoch"
    # one sample at a time is the same
    assert [int(samples.indices(np.array([i]), 3)[0]) for i in range(n + 5)] == [*epochs[0].tolist(), *epochs[1][:5]]
    spreads = [np.ptp(samples.lengths(epochs[0][i : i + 10])[:, 0]) for i in range(0, 100, 10)]
    assert np.mean(spreads) < 15, "of lengths from 25 to 125"

    def order(first: int, seed: int) -> tuple[int, ...]:
        """The places of a window's blocks among the sorted ones, by the shortest pair of each."""
        lengths = samples.lengths(samples.indices(np.arange(first, first + 100), seed)).tolist()
        shortest = [min(map(tuple, lengths[at : at + 10])) for at in range(0, 100, 10)]
        return tuple(sorted(range(10), key=lambda block: (shortest[block], block)))

    orders = {tuple(range(10)), order(0, 3), order(100, 3), order(0, 4), order(n, 3), order(2 * n, 3)}
    assert len(orders) == 6, "of each window, seed and epoch its own, and random"
    val = PairSamples(prepared, "val", config_of(prepared))
    assert np.ptp(val.lengths(val.indices(np.arange(10), 0), cut=False)[:, 0]) > 30, "validation is not sorted"


def test_a_batch_is_the_same_in_every_layout_but_for_padding(prepared: Path) -> None:
    config = config_of(prepared, target_len=32, seq_len=200)
    samples = open_samples(prepare_all(config.data, config.tokenizer, print), "train", config)
    widths = {micro.tokens.shape[1] for micro in same_in_every_layout(samples)}
    assert all(width % 8 == 0 and width < 200 for width in widths)
    for i, pair in enumerate(samples.sources[0].indices(np.arange(30), 3).tolist()):
        drawn = samples.draw(np.array([i]), 3)
        ends = [len(side.encode()) + 1 for side in decoded(prepared, "train")[pair]]
        assert [drawn.tokens.shape[1], drawn.targets.shape[1]] == [-(-end // 8) * 8 for end in ends]


def test_the_default_pairs_are_functions_and_the_first_sentences_of_their_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    others = (
        'x = 1\n\x0c\ndef f(x):\n    """Add one. More."""\n    @cache\n    def g(): ...\n    return x + 1\n',
        'async def h():\n    """Ask\n    twice? Yes.\n\n    Later."""\n    return 2\n',
    )
    functions = [f'def f{i}(x):\n    """Add {i}."""\n    return x + {i // 2}\n' for i in range(100)]
    (tmp_path / "lib/a.py").write_text("".join([*others, *functions]))
    (tmp_path / "lib/other.py").write_text("def f(:  # of another version\n")
    for name in ("test", "x/tests", "idlelib/idle_test", "site-packages", "dist-packages"):
        (tmp_path / "lib" / name).mkdir(parents=True)
        (tmp_path / "lib" / name / "c.py").write_text('def f(x):\n    """Skipped."""\n    return -x\n')
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    config = DataConfig(objective="pairs", target_len=32, cache_dir=str(tmp_path / "cache"))
    said: list[str] = []
    data = prepare_all(config, TokenizerConfig(path="bytes"), said.append)
    assert [source.name for source in data.sources] == ["functions of Python's standard library"]
    folder = data.folder
    wanted = [
        *((f"return x + {i}", f"Add {2 * i}.") for i in range(50)),  # each body once, with the first docstring
        *(("@cache\ndef g(): ...\nreturn x + 1", "Add one."), ("return 2", "Ask twice?")),
    ]
    found = decoded(folder, "train") + decoded(folder, "val")
    assert sorted(found) == sorted(wanted)
    (file,) = (tmp_path / "cache").glob("functions-*.jsonl")
    before = file.stat().st_mtime_ns
    assert prepare_all(config, TokenizerConfig(path="bytes"), said.append).folder == folder
    assert file.stat().st_mtime_ns == before
    (tmp_path / "lib/b.py").write_text('def f(x):\n    """Add more."""\n    return x + 1000\n')
    assert prepare_all(config, TokenizerConfig(path="bytes"), said.append).folder != folder


BAD: list[tuple[str, str | bytes, str]] = [
    (
        "a.csv",
        "text,other\na,b\n",
        'no column "headline": its columns are text, other; --text-key (data.text_key), or --source-key and',
    ),
    ("a.csv", "text,headline\na,b\nc\n", "line 3: has 1 columns, its header has 2"),
    ("a.csv", "text,headline\nHello, world,Title one\n", "line 2: has 3 columns, its header has 2"),
    ("a.csv", "text,text,headline\na,b,c\n", 'has 2 columns "text"; which one holds the text is ambiguous'),
    ("a.csv", "text,headline\na,b\nc,\n", 'line 3: "headline" should be text, but is ""'),
    ("a.csv", b"text,headline\na,b\n\xff,d\n", "can't be read after line 2: 'utf-8' codec"),
    ("a.csv", 'text,headline\n" ",b\n', 'line 2: "text" should be text, but is " "'),
    ("a.jsonl", GOOD + '{"text": "a"}\n', 'line 2: no "headline": its keys are text; --text-key'),
    ("a.jsonl", '{"text": "", "headline": "b"}\n', 'line 1: "text" should be text, but is ""'),
    ("a.jsonl", '{"text": "a", "headline": " \\n "}\n', 'line 1: "headline" should be text, but is " \\n "'),
    ("a.jsonl", '{"text": "a", "headline": null}\n', 'line 1: "headline" should be text, but is null'),
    ("a.jsonl", b'{"text": "\xff", "headline": "b"}\n', "line 1: not JSON"),
    ("a.jsonl", "[1]\n", 'line 1: no "text": it is not an object'),
    ("a.txt", "text", "has no columns; pairs are read from .jsonl, .csv, .tsv and .parquet"),
]


@pytest.mark.parametrize(("name", "content", "expected"), BAD)
def test_a_bad_pair_is_refused_with_its_place_or_skipped_and_counted(
    name: str, content: str | bytes, expected: str, tmp_path: Path, refuses: Callable[..., str]
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "good.jsonl").write_text("".join(json.dumps({"text": s, "headline": t}) + "\n" for s, t in ROWS[:50]))
    command = [str(tmp_path / name), str(tmp_path / "good.jsonl"), *KEYS, "--out", str(tmp_path / "out")]
    assert expected in refuses(*command)
    assert main([*command, "--on-error", "skip"]) == 0
    assert sum(read_meta(tmp_path / "out").skipped.values()) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--source-key a", "pairs need two keys or columns"),
        ("--source-prefix x", "pairs need two keys or columns"),
        ("--source-key a --target-key a", "pairs need two keys or columns"),
        ("--source-key a --target-key b --text-key c", "--text-key is for texts"),
    ],
)
def test_wrong_keys_are_refused(options: str, expected: str, tmp_path: Path, refuses: Callable[..., str]) -> None:
    assert expected in refuses(str(written(".csv", tmp_path)), *options.split(), "--out", tmp_path / "out")


def test_other_data_is_refused(prepared: Path, text: Path, tmp_path: Path) -> None:
    causal = Config(data=DataConfig(path=str(prepared)))
    with pytest.raises(DataError, match='holds pairs; use data.objective = "pairs"'):
        open_samples(prepare_all(causal.data, TokenizerConfig(), print), "train", causal)
    assert main([str(text), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    with pytest.raises(DataError, match=r'holds texts, but data.objective = "pairs" needs sources with targets'):
        PairSamples(tmp_path / "out", "train", config_of(tmp_path / "out"))
    with pytest.raises(
        DataError,
        match=f"prepared pairs, and {text} is not: run python -m torchtitan_lite.data.prepare {text} --source-k",
    ):
        prepare_all(config_of(text).data, TokenizerConfig(), print)
    file = written(".csv", tmp_path)
    plain = ["--tokenizer", str(tmp_path / "out/tokenizer.json")]
    assert main([str(file), *KEYS[:4], *plain, "--out", str(tmp_path / "decoders")]) == 0
    with pytest.raises(DataError, match=r"the tokenizer has no <pad> with id 0"):
        PairSamples(tmp_path / "decoders", "train", config_of(tmp_path / "decoders"))
    PairSamples(tmp_path / "decoders", "train", config_of(tmp_path / "decoders", "llama"))


def test_a_source_is_on_one_side_only_whatever_its_targets_are(tmp_path: Path) -> None:
    """Three pairs of each source, with the same three targets."""
    pairs = [(f"source {i}", target) for i in range(60) for target in ("one", "two", "three")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": s, "headline": t}) + "\n" for s, t in pairs))
    out = tmp_path / "out"
    assert main([str(tmp_path / "a.jsonl"), *KEYS, "--val-fraction", "0.4", "--out", str(out)]) == 0
    train, val = ({source for source, _ in decoded(out, split)} for split in ("train", "val"))
    assert (len(train) + len(val), train & val) == (60, set())
    assert 10 < len(val) < 40
