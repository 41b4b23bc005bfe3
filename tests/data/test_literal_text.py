"""Text that looks like a special token is encoded as text; no document contains the end mark."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data import tokenizer as tokenizers_
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.split import byte_level
from torchtitan_lite.data.prepare.summary import verify
from torchtitan_lite.data.token_files import TokenFiles, read_meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.scoring.likelihood import bytes_per_token

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789<>/"
TEXTS = [f"{i} a document that ends </s> or so it says {i}</s>" for i in range(200)]


def unigram(special: bool = True, metaspace: bool = True) -> Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in LETTERS + " \u2581")]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    if special:
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def bpe_with_added(special: bool) -> Tokenizer:
    tokenizer = byte_level()
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([AddedToken("</s>", special=special)])
    return tokenizer


def bpe_with_merges() -> Tokenizer:
    """Its merges spell the end mark."""
    vocabulary = {c: i for i, c in enumerate(LETTERS + " ")}
    for piece in ("<unk>", "</", "</s", "</s>", "</s>x"):
        vocabulary[piece] = len(vocabulary)
    merges = [("<", "/"), ("</", "s"), ("</s", ">"), ("</s>", "x")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return tokenizer


def word_level(unknown: bool = True) -> Tokenizer:
    words = dict.fromkeys(" ".join([*TEXTS[:150], "a document that ends"]).replace("</s>", " ").split())
    vocabulary = {word: i for i, word in enumerate([*words, "</s>", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>" if unknown else "<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "</s>", "##</s>", *LETTERS, *(f"##{c}" for c in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def lowercase() -> Tokenizer:
    """What is no end mark in the text may become one."""
    tokenizer = unigram()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


TOKENIZERS = {
    "unigram": unigram(),
    "unigram, not special": unigram(special=False),
    "unigram, no word boundaries": unigram(metaspace=False),
    "added, special": bpe_with_added(special=True),
    "added, not special": bpe_with_added(special=False),
    "merges": bpe_with_merges(),
    "word level": word_level(),
    "word piece": word_piece(),
    "lower case": lowercase(),
}


def prepared(tokenizer: Tokenizer, texts: list[str], folder: Path, *more: str) -> int:
    tokenizer.save(str(folder / "given.json"))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = ["--tokenizer", str(folder / "given.json"), "--end-token", "</s>"]
    return main([str(folder / "a.jsonl"), "--out", str(folder / "out"), *given, *more])


def documents(folder: Path) -> list[list[int]]:
    """The ids of each document, by what the index says."""
    meta, found = read_meta(folder), []
    for split in metas.SPLITS:
        stream = TokenFiles(folder, meta, split).read(0, meta.tokens(split)).tolist()
        ends = np.fromfile(folder / f"{split}.idx", np.int64).tolist()
        assert stream[0] == meta.end_token
        assert all(stream[end - 1] == meta.end_token for end in ends)
        found += [stream[first : end - 1] for first, end in zip([1, *ends[:-1]], ends, strict=True)]
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_document_has_an_end_mark_inside_and_other_documents_are_encoded_as_ever(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    texts = [text.upper() if name == "lower case" else text for text in TEXTS]
    others = [text.replace("</s>", "") for text in TEXTS]
    assert prepared(tokenizer, [*texts, *others], tmp_path) == 0
    meta = read_meta(tmp_path / "out")
    ids = documents(tmp_path / "out")
    assert meta.end_token == tokenizer.token_to_id("</s>")
    assert len(ids) == meta.documents == 400
    assert not any(meta.end_token in one for one in ids)
    assert not verify(tmp_path / "out")
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    assert {tuple(plain.encode(text, add_special_tokens=False).ids) for text in others} <= set(map(tuple, ids))
    said = [tokenizer.decode(one, skip_special_tokens=False).replace(" ", "") for one in ids]
    if name == "word level":
        assert meta.unknown_tokens >= 200
    elif name != "word piece":  # which has no spelling for what follows a word
        assert sorted(said) == sorted(text.replace(" ", "").lower() for text in [*texts, *others])


def test_other_special_entries_are_text_too_and_what_is_unknown_stays_so(tmp_path: Path) -> None:
    tokenizer = unigram()
    unknown = [f"{i} \u4e2d <unk> \u4e2d </s>" for i in range(50)]
    assert prepared(tokenizer, unknown, tmp_path) == 0
    assert read_meta(tmp_path / "out").unknown_tokens == 100
    shutil.rmtree(tmp_path / "out")
    texts = [f"{i} begins <s> and <unk> is known" for i in range(50)]
    assert prepared(tokenizer, texts, tmp_path) == 0
    meta = read_meta(tmp_path / "out")
    assert meta.unknown_tokens == 0
    assert not any({0, 1, 2} & set(one) for one in documents(tmp_path / "out"))
    said = [tokenizer.decode(one, skip_special_tokens=False) for one in documents(tmp_path / "out")]
    assert sorted(said) == sorted(texts)


def end_is_unknown() -> Tokenizer:
    vocabulary = {c: i for i, c in enumerate("ab0123456789 ")} | {"</s>": 20}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def nothing_spells_it() -> Tokenizer:
    """Without an entry for what is unknown, characters would be dropped."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate("ab0123456789 \u4e2d\U0001f600")} | {"</s>": 20}, []))
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "bad"), [(end_is_unknown, "ab x"), (nothing_spells_it, "ab </s> b"), (end_is_unknown, "ab </s>")]
)
def test_a_text_that_can_only_be_spelled_with_the_end_mark_is_refused(
    make: Callable[[], Tokenizer], bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"ab {i}" for i in range(100)]
    texts[41] = bad
    assert prepared(make(), texts, tmp_path) == 2
    assert re.search("a.jsonl: line 42: would be encoded with the end token .*can't spell it", capsys.readouterr().err)
    assert prepared(make(), texts, tmp_path, "--on-error", "skip") == 0
    assert sum(read_meta(tmp_path / "out").skipped.values()) == 1
    assert not verify(tmp_path / "out")


def test_an_end_mark_that_the_text_holds_is_refused(tmp_path: Path, refuses: Callable[..., str]) -> None:
    (tmp_path / "a.txt").write_text("a line\n" * 500)
    byte_level().save(str(tmp_path / "bytes.json"))
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "bytes.json")]
    assert "choose one that no text contains (tokenizer.end_token or --end-token)" in refuses(
        *command, "--end-token", "\u010a"
    )
    assert main([*command, "--end-token", "\u0100"]) == 0, "NUL, which no line has"


def test_a_tokenizer_that_fails_on_a_text_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepared(word_level(unknown=False), TEXTS, tmp_path) == 2
    assert "can't encode unknown characters (WordLevel error: Missing [UNK] token" in capsys.readouterr().err


def test_the_end_mark_stands_for_no_bytes() -> None:
    tokenizer = bpe_with_added(special=False)
    end = tokenizer.token_to_id("</s>")
    assert bytes_per_token(tokenizer)[end] == 4
    assert bytes_per_token(tokenizer, end)[end] == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "EOF while parsing"),
        (b"\xff\xfe{}", "byte 0 is not UTF-8"),
        (b"[" * 200_000, "recursion limit|expected"),
        (b"[1, 2, 3]", "expected"),
        (b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "."),
        (b"\0" * 100, "expected value"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error(content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"t\.json can't be read as a tokenizer\.json: .*({expected})"):
        tokenizers_.load(tmp_path / "t.json")


def test_a_path_that_is_no_tokenizer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, expected in (
        (tmp_path / "pipe", "it is a FIFO"),
        (tmp_path, "it is a folder"),
        (tmp_path / "nothing", "No such file"),
        (Path("~nobody-of-this-name/t.json"), "is unknown"),
    ):
        with pytest.raises(DataError, match=expected):
            tokenizers_.load(path)
    byte_level().save(str(tmp_path / "t.json"))
    monkeypatch.setattr(tokenizers_, "_LONGEST", 1000)
    with pytest.raises(DataError, match="the limit is 1,000"):
        tokenizers_.load(tmp_path / "t.json")
