"""examples/from_megatron.py and from_bin.py, on files written from the descriptions of their formats."""

import json
import random
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples import from_bin
from examples.from_megatron import main
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.data.token_files import TokenFiles, document_ends, documents, read_meta

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
END = 0  # of the tokenizer below
Documents = list[list[list[int]]]  # the sequences of each document


def write(prefix: Path, documents: Documents, dtype: str = "uint16", *, shuffled: bool = False) -> Path:
    """A .bin and .idx pair, written from the description of the format. `shuffled`: sequences in another order."""
    sequences = [sequence for document in documents for sequence in document]
    order = list(range(len(sequences)))
    if shuffled:
        random.Random(0).shuffle(order)
    pointers, at = [0] * len(sequences), 0
    with prefix.with_name(f"{prefix.name}.bin").open("wb") as stream:
        for i in order:
            pointers[i] = at
            at += stream.write(np.array(sequences[i], dtype).tobytes())
    ends = np.cumsum([0, *(len(document) for document in documents)])
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(ends))
    arrays = (np.array([len(s) for s in sequences], "<i4"), np.array(pointers, "<i8"), ends.astype("<i8"))
    prefix.with_name(f"{prefix.name}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return prefix


@pytest.fixture(scope="module")
def usual(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of several lengths, prepared from text: usual/ is the folder, usual.jsonl the text."""
    folder = tmp_path_factory.mktemp("megatron")
    lines = (text / "typing.txt").read_text().splitlines(keepends=True)
    parts = ("".join(lines[7 * i :][: (1, 3, 20, 60)[i % 4]]) for i in range(300))
    texts = [one for one in dict.fromkeys(parts) if one.strip()]
    (folder / "usual.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    assert prepare([str(folder / "usual.jsonl"), "--out", str(folder / "usual"), "--train-tokenizer", "517"]) == 0
    return folder / "usual"


def tokens_of(usual: Path) -> list[list[int]]:
    """The tokens of each document, in the order of the text."""
    tokenizer = Tokenizer.from_file(str(usual / "tokenizer.json"))
    assert tokenizer.token_to_id("<|endoftext|>") == END
    lines = usual.with_suffix(".jsonl").read_text().splitlines()
    return [list(one.ids) for one in tokenizer.encode_batch([json.loads(line)["text"] for line in lines])]


def words(usual: Path, out: Path, *prefixes: Path) -> list[str]:
    return [*map(str, prefixes), "--tokenizer", str(usual / "tokenizer.json"), "--out", str(out)]


def in_sentences(documents: list[list[int]]) -> Documents:
    """Several sequences a document, some of them empty, and an end token only after some documents."""
    rng, found = random.Random(2), []
    for document in documents:
        cuts = sorted(rng.choices(range(len(document) + 1), k=rng.choice((0, 1, 4))))
        parts = [document[a:b] for a, b in zip([0, *cuts], [*cuts, len(document)], strict=True)]
        found.append(parts + [[END]] * rng.choice((0, 1)))
    return found


WAYS: dict[str, Callable[[Path, list[list[int]]], list[Path]]] = {
    "sentences": lambda at, tokens: [write(at / "a", in_sentences(tokens), "int64")],
    "shuffled": lambda at, tokens: [write(at / "a", in_sentences(tokens), "int16", shuffled=True)],
    "two files, with and without end tokens": lambda at, tokens: [
        write(at / "a.b", [[[*document, END]] for document in tokens[:100]]),
        write(at / "c", [[document] for document in tokens[100:]], "int32"),
    ],
}


@pytest.mark.parametrize("way", WAYS)
def test_the_folder_is_that_of_the_text_prepared_the_usual_way(usual: Path, tmp_path: Path, way: str) -> None:
    """Equal tokens, ends and hashes: a run on one folder may resume on the other."""
    assert main(words(usual, tmp_path / "out", *WAYS[way](tmp_path, tokens_of(usual)))) == 0
    ours, theirs = asdict(read_meta(tmp_path / "out")), asdict(read_meta(usual))
    for name in ("origins.json", "train.origins", "val.origins"):
        del theirs["files"][name]
    assert {key for key in ours if ours[key] != theirs[key]} == {"made_from"}
    assert prepare(["--verify", str(tmp_path / "out")]) == 0


def test_end_tokens_within_a_document_cut_it_and_empty_documents_are_left_out(usual: Path, tmp_path: Path) -> None:
    given: Documents = [[[5, 6, END, 7], [8, END]], [[]], [], [[END]], [[9, END, END, 10]], [[END, 11]]]
    out, prefix = tmp_path / "out", write(tmp_path / "a", given, shuffled=True)
    assert main([*words(usual, out, prefix), "--val-fraction=0.5"]) == 0
    meta, found = read_meta(out), []
    for split in ("train", "val"):
        tokens = TokenFiles(out, meta, split).read(0, meta.tokens(split)).tolist()
        ends = document_ends(out, meta, split).tolist()
        assert tokens[0] == END
        found += [tokens[a : b - 1] for a, b in zip([1, *ends], ends, strict=False)]
    assert sorted(found) == [[5, 6], [7, 8], [9], [10], [11]]


def patched(offset: int, form: str, value: Any) -> Callable[[bytes], bytes]:
    """Another value in the .idx."""
    return lambda data: data[:offset] + struct.pack(form, value) + data[offset + struct.calcsize(form) :]


# of the file below, which has 4 sequences: lengths begin at byte 34, places at byte 50, and boundaries at byte 82
BAD_INDEX: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is not an index"),
    "other": (lambda data: b"TNTIDX\0\0" + data[8:], "is not an index"),
    "version": (patched(9, "<Q", 2), "is not an index of Megatron's version 1"),
    "float": (patched(17, "<B", 7), "for whole numbers"),
    "cut": (lambda data: data[:-1], "is truncated, damaged or of multimodal data: it has 105 bytes"),
    "modes": (lambda data: data + b"\0" * 4, "of multimodal data"),
    "negative": (patched(34, "<i", -1), "is damaged, or not the index of"),
    "long": (patched(34 + 12, "<i", 2**31 - 1), "is damaged, or not the index of"),
    "before": (patched(50, "<q", -2), "is damaged, or not the index of"),
    "first boundary": (patched(82, "<q", 1), "is damaged, or not the index of"),
    "decreasing": (patched(82 + 8, "<q", 9), "is damaged, or not the index of"),
    "last boundary": (patched(82 + 16, "<q", 3), "is damaged, or not the index of"),
    "short": (patched(34 + 12, "<i", 2), "is damaged, or not the index of"),
}


@pytest.mark.parametrize("case", BAD_INDEX)
def test_a_bad_index_is_refused(case: str, usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = BAD_INDEX[case]
    prefix = write(tmp_path / "a", [[[5, 6], [7, 8]], [[9], [10, 11, 12]]])
    index = tmp_path / "a.idx"
    index.write_bytes(change(index.read_bytes()))
    assert main(words(usual, tmp_path / "out", prefix)) == 2
    said = capsys.readouterr().err
    assert str(index) in said
    assert message in said
    assert not (tmp_path / "out/meta.json").exists()


@pytest.mark.parametrize(("dtype", "value"), [("uint16", 517), ("int32", -1), ("int64", 2**40)])
def test_tokens_outside_the_vocabulary_are_refused(
    dtype: str, value: int, usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(usual, tmp_path / "out", write(tmp_path / "a", [[[5, 6]], [[7, value, 8]]], dtype))) == 2
    assert "a.bin has a token outside the tokenizer's 517 entries" in capsys.readouterr().err


def write_bin(file: Path, tokens: list[int], header: tuple[int, int] | None) -> str:
    """A file of nanoGPT, or with magic number and version one of llm.c and modded-nanogpt."""
    file.write_bytes(
        np.array([*header, len(tokens), *[0] * 253] if header else [], "<i4").tobytes()
        + np.array(tokens, "<u4" if header == (20240801, 7) else "<u2").tobytes()
    )
    return str(file)


@pytest.mark.parametrize(
    ("before", "after", "header"),
    [([], [END], None), ([END], [], (20240520, 1)), ([517], [], (20240801, 7))],
    ids=["nanoGPT", "llm.c", "Llama 3"],
)
def test_token_files_become_the_folder_of_the_text_prepared_the_usual_way(
    before: list[int],
    after: list[int],
    header: tuple[int, int] | None,
    usual: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the end token after or before each document, or only a begin token; a document goes on in the next file."""
    theirs, files, tokenizer = read_meta(usual), list[str](), Tokenizer.from_file(str(usual / "tokenizer.json"))
    for split in ("train", "val"):
        tokens = [token for one in documents(usual, theirs, split) for token in (*before, *one, *after)]
        files += ["--held-out"] * (split == "val")
        files += [write_bin(tmp_path / f"{split}{a}", tokens[a:b], header) for a, b in ((0, 99), (99, None))]
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(from_bin, "BLOCK", 49)  # the first file ends with a block of one
    files += ["--tokenizer", str(tmp_path / "tokenizer.json"), *["--begin-token=<s>"] * (517 in before)]
    assert from_bin.main([*files, "--out", str(tmp_path / "ours")]) == 0
    ours = read_meta(tmp_path / "ours")
    assert [*documents(tmp_path / "ours", ours, "val")] == [*documents(usual, theirs, "val")]
    assert (ours.text_bytes, ours.tokens_sha256 == theirs.tokens_sha256) == (theirs.text_bytes, 517 not in before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<256i", 20240520, 2, 0, *[0] * 253), "has version 2 of its format; 1 of 20240520, 7 of"),
        (struct.pack("<256i", 20240520, 1, 9, *[0] * 253), "is empty, truncated or not a file of tokens: it has 1,024"),
        (b"", "is empty, truncated"),
        (struct.pack("<2H", 5, 517), "a file of train has a token outside the tokenizer's 517 entries"),
    ],
)
def test_a_bad_token_file_is_refused(
    content: bytes, message: str, usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "a.bin").write_bytes(content)
    assert from_bin.main([*words(usual, tmp_path / "out", file), "--held-out", str(file)]) == 2
    assert message in capsys.readouterr().err
    (tmp_path / "out").mkdir(exist_ok=True)  # nothing was written, unless a token is wrong
    file.write_bytes(struct.pack("<2H", 5, 6))
    assert from_bin.main([*words(usual, tmp_path / "out", file), "--held-out", str(file)]) == 2
    assert "out exists: delete it if" in capsys.readouterr().err
