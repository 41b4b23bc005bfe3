"""Text that looks like a special token is encoded as text; no document contains the end mark."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.summary import verify
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.data.token_files import TokenFiles, read_meta

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


PRODUCE_IT = {
    "unigram": unigram(),
    "unigram, not special": unigram(special=False),
    "unigram, no word boundaries": unigram(metaspace=False),
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


def test_text_that_spells_special_tokens_is_encoded_as_text(tmp_path: Path) -> None:
    tokenizer = bpe_with_added(special=True)
    texts = [f"{text} <|endoftext|></s>" for text in TEXTS]
    assert prepared(tokenizer, texts, tmp_path) == 0
    meta, ids = read_meta(tmp_path / "out"), documents(tmp_path / "out")
    assert meta.end_token == tokenizer.token_to_id("</s>")
    special = set(tokenizer.get_added_tokens_decoder())
    assert not any(special & set(one) for one in ids)
    assert sorted(tokenizer.decode(one, skip_special_tokens=False) for one in ids) == sorted(texts)
    assert not verify(tmp_path / "out")


@pytest.mark.parametrize("name", PRODUCE_IT)
def test_a_text_that_produces_the_end_token_is_refused_or_left_out(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary with the end token as a piece, or as an added token that is not special."""
    tokenizer = PRODUCE_IT[name]
    others = [text.replace("</s>", "") for text in TEXTS]
    bad = TEXTS[0].upper() if name == "lower case" else TEXTS[0]
    texts = [*others[:100], bad, *others[100:]]
    assert prepared(tokenizer, texts, tmp_path) == 2
    expected = "a.jsonl: line 101: would be encoded with the end token '</s>' inside (--end-token can name another one)"
    assert expected in capsys.readouterr().err
    assert prepared(tokenizer, texts, tmp_path, "--on-error", "skip") == 0
    meta, ids = read_meta(tmp_path / "out"), documents(tmp_path / "out")
    assert meta.skipped == {"a text that contains the end token": 1}
    assert not any(meta.end_token in one for one in ids)
    plain = [tuple(one.ids) for one in tokenizer.encode_batch(others, add_special_tokens=False)]
    assert sorted(map(tuple, ids)) == sorted(plain)


def test_an_end_mark_that_the_text_holds_is_refused(tmp_path: Path, refuses: Callable[..., str]) -> None:
    (tmp_path / "a.txt").write_text("a line\n" * 500)
    byte_level().save(str(tmp_path / "bytes.json"))
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "bytes.json")]
    assert "(--end-token can name another one)" in refuses(*command, "--end-token", "\u010a")
    assert main([*command, "--end-token", "\u0100"]) == 0, "NUL, which no line has"


def test_a_tokenizer_that_fails_on_a_text_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepared(word_level(unknown=False), TEXTS, tmp_path) == 2
    assert "can't encode unknown characters (WordLevel error: Missing [UNK] token" in capsys.readouterr().err
