"""Text that looks like a special token is encoded as text; no document contains the end mark."""

import json
import string
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.summary import verify
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.data.token_files import documents, read_meta

TEXTS = [f"{i} a document that ends </s> or so it says {i}</s>" for i in range(200)]


def unigram() -> Tokenizer:
    """The end token is a piece of its vocabulary."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in string.printable + "\u2581")]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def bpe_with_added(special: bool) -> Tokenizer:
    tokenizer = byte_level()
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([AddedToken("</s>", special=special)])
    return tokenizer


def lowercase() -> Tokenizer:
    """What is no end mark in the text may become one."""
    tokenizer = unigram()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


PRODUCE_IT = {"a piece": unigram(), "added, not special": bpe_with_added(special=False), "lower case": lowercase()}


def prepared(tokenizer: Tokenizer, texts: list[str], folder: Path, *more: str) -> int:
    tokenizer.save(str(folder / "given.json"))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = ["--tokenizer", str(folder / "given.json"), "--end-token", "</s>"]
    return main([str(folder / "a.jsonl"), "--out", str(folder / "out"), *given, *more])


def ids_of(folder: Path) -> list[list[int]]:
    meta = read_meta(folder)
    return [*documents(folder, meta, "train"), *documents(folder, meta, "val")]


def test_text_that_spells_special_tokens_is_encoded_as_text(tmp_path: Path) -> None:
    tokenizer = bpe_with_added(special=True)
    texts = [f"{text} <|endoftext|></s>" for text in TEXTS]
    assert prepared(tokenizer, texts, tmp_path) == 0
    meta, ids = read_meta(tmp_path / "out"), ids_of(tmp_path / "out")
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
    meta, ids = read_meta(tmp_path / "out"), ids_of(tmp_path / "out")
    assert meta.skipped == {"a text that contains the end token": 1}
    assert not any(meta.end_token in one for one in ids)
    plain = [tuple(one.ids) for one in tokenizer.encode_batch(others, add_special_tokens=False)]
    assert sorted(map(tuple, ids)) == sorted(plain)


def test_a_tokenizer_that_fails_on_a_text_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, or where the text is that has something unknown."""
    for word, said in (
        ("a", "can't encode unknown characters (WordLevel error: Missing [UNK] token"),
        ("\u4e2d\U0001f600", f"{tmp_path}/a.jsonl: line 1, or after it: the tokenizer can't encode a text: WordLevel"),
    ):
        tokenizer = Tokenizer(models.WordLevel({word: 0, "</s>": 1}, unk_token="<none>"))
        assert prepared(tokenizer, TEXTS, tmp_path) == 2
        assert said in capsys.readouterr().err
