"""Prepared data is found again only for the same text and options: each key that it depends on is changed in turn."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import python, ranks, succeeded, tiny
from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.prepare.folder import prepare
from torchtitan_lite.data.prepare.job import Job
from torchtitan_lite.data.prepare.texts import Corpus, find
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.data.token_files import read_meta

CSV = "text,other,headline\n" + "".join(f"text {i},another {i * 7},title {i}\n" for i in range(300))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_text(CSV)
    (folder / "b.md").write_text("# another kind of text\n" * 300)
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return folder


# the keys of [data] and of [tokenizer], with PATH for the folder of the test
CAUSAL: dict[str, Any] = {"path": "PATH/in", "vocab_size": 400}
MORE = CAUSAL | {"text_suffixes": [".md"]}
GIVEN: dict[str, Any] = {"path": "PATH/in", "tokenizer": "PATH/tokenizer.json"}
PAIRS: dict[str, Any] = {
    **{"path": "PATH/in/a.csv", "vocab_size": 400, "objective": "pairs", "target_len": 9},
    **{"source_key": "text", "target_key": "headline"},
}
CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (CAUSAL, {"path": ["PATH/in", "PATH/in/b.md"], "text_suffixes": [".md"]}),
    (MORE | {"path": ["PATH/in/a.csv", "PATH/in/b.md"]}, {"path": ["PATH/in/b.md", "PATH/in/a.csv"]}),
    (MORE, {"path": "", "sources": {"PATH/in": 1, "PATH/in/b.md": 2}}),  # the tokenizer learns from both
    (CAUSAL, {"text_key": "other"}),
    (CAUSAL, {"text_key": ["text", "other"]}),
    (CAUSAL, {"on_error": "skip"}),
    (CAUSAL, {"text_suffixes": [".md"]}),
    (CAUSAL, {"val_fraction": 0.3}),
    (CAUSAL, {"objective": "span_corruption"}),
    (CAUSAL, {"vocab_size": 401}),
    (CAUSAL, {"tokenizer": "bytes"}),
    (GIVEN, {"end_token": "</s>"}),
    (GIVEN, {"begin_token": "</s>"}),
    (GIVEN, {"tokenizer": "bytes"}),
    (PAIRS, {"source_key": "other"}),
    (PAIRS, {"target_key": "other"}),
    (PAIRS, {"source_prefix": "summarize: "}),
    (PAIRS, {"val_fraction": 0.3}),
    (PAIRS, {"vocab_size": 401}),
]


def folder_of(values: dict[str, Any], tmp_path: Path) -> Path:
    values = json.loads(json.dumps(values).replace("PATH", str(tmp_path)))
    tokenizer = {"path": "tokenizer"} | {key: key for key in ("vocab_size", "end_token", "begin_token")}
    chosen = {name: values.pop(key) for name, key in tokenizer.items() if key in values}
    data = DataConfig.model_validate(values | {"cache_dir": str(tmp_path / "cache")})
    return prepare_all(data, TokenizerConfig.model_validate(chosen), lambda _: None).folder


@pytest.mark.parametrize(("base", "change"), CHANGES, ids=lambda values: " ".join(values))
def test_another_value_of_a_key_is_other_data(
    base: dict[str, Any], change: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    first = folder_of(base, tmp_path)
    made = sorted((tmp_path / "cache").iterdir())
    assert folder_of(base, tmp_path) == first
    assert sorted((tmp_path / "cache").iterdir()) == made, "it was made a second time"
    assert folder_of(base | change, tmp_path) != first
    # the first one is still found, also with a begin token that has no effect, because it is the end token
    assert folder_of(base | ({"begin_token": "<|endoftext|>"} if base == GIVEN else {}), tmp_path) == first


def touch(folder: Path) -> None:
    """An older file, which is not the newest one either."""
    info = (folder / "a.csv").stat()
    os.utime(folder / "a.csv", ns=(info.st_atime_ns, info.st_mtime_ns - 1))


def replace(folder: Path) -> None:
    """Other text of the same size, which has the old mtime: the ctime shows it."""
    info = (folder / "a.csv").stat()
    (folder / "a.csv").write_text(CSV.replace("title 7", "TITLE 7"))
    os.utime(folder / "a.csv", ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (folder / "a.csv").stat().st_size == info.st_size


@pytest.mark.parametrize(
    "change",
    [
        touch,
        replace,
        lambda folder: (folder / "a.csv").write_text(CSV + "more,more,more\n"),
        lambda folder: shutil.copy(folder / "a.csv", folder / "c.csv"),
        lambda folder: (folder / "a.csv").rename(folder / "z.csv"),
    ],
    ids=["mtime", "ctime", "size", "another file", "another name"],
)
def test_another_text_is_other_data(change: Callable[[Path], None], text: Path, tmp_path: Path) -> None:
    first = folder_of(CAUSAL, tmp_path)
    change(text)
    assert folder_of(CAUSAL, tmp_path) != first


# --- data that version 1.0 prepared ------------------------------------------------------------------------------

KEYS_OF_1_0: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("a450b487b8223487", ("a.txt", "b.jsonl"), {}),
    ("b82a9990c16c193b", ("a.tsv", ".b.txt"), {"keys": ("body",), "text_suffixes": (".md",)}),
    ("a7896f601c121c4e", ("a.tsv",), {"keys": ("s", "t"), "source_prefix": "to: "}),
]


def test_the_keys_of_1_0_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that version 1.0 made. Only text that is now read differently has another one."""
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_size=7, st_mtime_ns=8, st_ctime_ns=9))
    job = Job("", "", 400, sentinels=False, val_fraction=0.05)
    for key, names, more in KEYS_OF_1_0:
        corpus = Corpus(tuple(Path("/x") / name for name in names), **more, as_1_0=True)
        now = changed(corpus, as_1_0=False)
        assert job.made_from(corpus, [corpus])[:16] == key
        assert (job.made_from(now, [now])[:16] == key) == ("a.tsv" not in names)


def test_a_run_of_1_0_resumes_with_its_data(text: Path, tmp_path: Path) -> None:
    """Version 1.0 read the hidden file and no JSON lines, and the .tsv with quotation marks."""
    for name, content in (
        (".c.csv", CSV),
        ("d.json", "".join(f'{{"text": "line {i}"}}\n' for i in range(9))),
        ("e.tsv", CSV.replace(",", "\t")),
    ):
        (text / name).write_text(content)
    data = DataConfig(path=str(text), cache_dir=str(tmp_path / "cache"))
    tokenizer = TokenizerConfig(path=str(tmp_path / "tokenizer.json"))
    before, job = find(str(text), as_1_0=True), Job.from_config(tokenizer, data.val_fraction, sentinels=False)
    assert [file.name for file in before.files] == [".c.csv", "a.csv", "e.tsv"]
    (note,) = prepare_all(data, tokenizer, print).notes
    assert note.startswith("2 other files not read: 1 x hidden, 1 x .md")
    old = tmp_path / "cache" / job.made_from(before, [before])[:16]
    prepare(before, job, old, "stop", [before])
    more = {"run__name": "a", "checkpoint__every": 2, "optim__warmup_steps": 1, "tokenizer__path": tokenizer.path}
    succeeded(ranks(1, *tiny(old, tmp_path, train__steps=2, **more)))
    history, used = tmp_path / "a/attempts.jsonl", read_meta(old).tokens_sha256
    made = history.read_text()  # an earlier attempt had other data
    history.write_text(made.replace(used, "other").replace('"attempt": 1', '"attempt": 0') + made)
    more["data__cache_dir"] = data.cache_dir
    assert "resumed after step 2" in succeeded(ranks(2, *tiny(text, tmp_path, train__steps=4, **more)))
    assert str(text / ".c.csv") in succeeded(python(str(tmp_path / "a"), "--step=3", script="-m torchtitan_lite.which"))
    succeeded(python(str(tmp_path / "a"), script="-m torchtitan_lite.evaluate"))
    others = [
        prepare_all(each, tokenizer, print, {"data": "another"}).folder
        for each in (data, data.model_copy(update={"path": str(text / "d.json")}))
    ]
    assert old not in others, "another text; and one of which 1.0 could read nothing"
    touch(text)
    refused = ranks(1, *tiny(text, tmp_path, train__steps=6, **more))
    assert "its values differ from this command's" in refused.stderr
