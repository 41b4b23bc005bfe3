"""Megatron's .bin and .idx files, read in place: `data.prepare --from-megatron`."""

import json
import os
import random
import shlex
import shutil
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.helpers import ROOT, losses, python, ranks, records, succeeded, tiny
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.megatron_index import read_index
from torchtitan_lite.data.token_files import IN_PLACE, TokenFiles, document_ends, read_meta
from torchtitan_lite.errors import DataError

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
    lines = "".join(file.read_text() for file in sorted(text.iterdir())).splitlines(keepends=True)
    rng, texts = random.Random(1), []
    while lines:
        n = rng.choice((1, 3, 20, 60))
        texts.append("".join(lines[:n]))
        lines = lines[n:]
    texts = [one for one in dict.fromkeys(texts) if one.strip()][:300]
    (folder / "usual.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    command = (str(folder / "usual.jsonl"), "--out", str(folder / "usual"), "--train-tokenizer", "517")
    succeeded(python(*command, script="-m torchtitan_lite.data.prepare"))
    return folder / "usual"


def tokens_of(usual: Path) -> list[list[int]]:
    """The tokens of each document, in the order of the text."""
    tokenizer = Tokenizer.from_file(str(usual / "tokenizer.json"))
    assert tokenizer.token_to_id("<|endoftext|>") == END
    lines = usual.with_suffix(".jsonl").read_text().splitlines()
    return [list(one.ids) for one in tokenizer.encode_batch([json.loads(line)["text"] for line in lines])]


def prepared(usual: Path, out: Path, *prefixes: Path, more: tuple[str, ...] = ()) -> Path:
    words = ["--from-megatron", *map(str, prefixes), "--tokenizer", str(usual / "tokenizer.json"), "--out", str(out)]
    assert main([*words, *more]) == 0
    return out


@pytest.fixture
def refused(usual: Path, tmp_path: Path, refuses: Callable[..., str]) -> Callable[..., str]:
    """As `refuses`, with a tokenizer."""

    def message(*words: object) -> str:
        out = tmp_path / "refused"
        said = refuses(*words, "--tokenizer", usual / "tokenizer.json", "--out", out)
        assert said.startswith("prepare: ")
        assert not out.exists()
        return said

    return message


def stream(folder: Path, split: str) -> tuple[list[int], list[int]]:
    """All tokens of a split, read in pieces of an odd size, and the ends of its documents."""
    meta = read_meta(folder)
    files, n = TokenFiles(folder, meta, split), meta.tokens(split)
    tokens = np.concatenate([files.read(i, min(i + 1237, n)) for i in range(0, n, 1237)])
    assert tokens.dtype == (np.uint16 if meta.vocab_size <= 2**16 else np.uint32)
    return tokens.tolist(), document_ends(folder, meta, split).tolist()


def with_ends(documents: list[list[int]]) -> Documents:
    return [[[*document, END]] for document in documents]


# --- the same as text -----------------------------------------------------------------------------------------------


def in_sentences(documents: list[list[int]]) -> Documents:
    """Several sequences a document, some of them empty, and an end token only after some documents."""
    rng, found = random.Random(2), []
    for document in documents:
        cuts = sorted(rng.choices(range(len(document) + 1), k=rng.choice((0, 1, 4))))
        parts = [document[a:b] for a, b in zip([0, *cuts], [*cuts, len(document)], strict=True)]
        found.append(parts + [[END]] * rng.choice((0, 1)))
    return found


WAYS: dict[str, Callable[[Path, list[list[int]]], list[Path]]] = {
    "append-eod": lambda at, tokens: [write(at / "a", with_ends(tokens))],
    "no eod": lambda at, tokens: [write(at / "a", [[document] for document in tokens], "int32")],
    "sentences": lambda at, tokens: [write(at / "a", in_sentences(tokens), "int64")],
    "shuffled": lambda at, tokens: [write(at / "a", in_sentences(tokens), "int16", shuffled=True)],
    "two files": lambda at, tokens: [
        write(at / "a.b", with_ends(tokens[:100])),
        write(at / "c", [[document] for document in tokens[100:]], "int32"),
    ],
}


@pytest.mark.parametrize("way", WAYS)
def test_the_folder_has_the_stream_of_text_prepared_the_usual_way(usual: Path, tmp_path: Path, way: str) -> None:
    out = prepared(usual, tmp_path / "out", *WAYS[way](tmp_path, tokens_of(usual)))
    for split in ("train", "val"):
        assert stream(out, split) == stream(usual, split)
    ours, theirs = asdict(read_meta(out)), asdict(read_meta(usual))
    differ = {key for key in ours if ours[key] != theirs[key]}
    assert differ == {"format_version", "files", "tokens_sha256", "made_from", "shard_tokens"}
    assert ours["format_version"] == IN_PLACE
    DataSet.of({"one": (0.5, usual), "other": (0.5, out)})  # they can be mixed
    assert main(["--verify", str(out)]) == 0
    copied = sum(file.stat().st_size for file in out.iterdir() if file.name.endswith((".idx", ".extents")))
    documents, tokens = read_meta(usual).documents, sum(map(read_meta(usual).tokens, ("train", "val")))
    assert copied <= 40 * documents * (5 if way == "shuffled" else 1)
    assert not list(out.glob("*.bin"))
    assert tokens > 50 * documents  # the tokens themselves are not in the folder


def test_training_by_the_commands_of_the_page_equals_training_on_the_text_bit_for_bit(
    usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "docs/data.md").read_text().split("## Megatron's files\n")[1]
    prepare, train = (shlex.split(line) for line in section.split("```sh\n")[1].split("```")[0].splitlines())
    assert prepare[:3] == ["python", "-m", "torchtitan_lite.data.prepare"]
    assert train[:4] == ["torchrun", "--nproc-per-node", "2", "train.py"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    shutil.copy(usual / "tokenizer.json", tmp_path / "old")
    write(tmp_path / "old/text_document", in_sentences(tokens_of(usual)))
    assert main(prepare[3:]) == 0
    command = tiny(usual, tmp_path, run__name="text", train__steps=4, eval__every=2, checkpoint__every=0)
    succeeded(ranks(2, *command))
    succeeded(ranks(2, *command, *(word.replace("data/old", str(tmp_path / "data/old")) for word in train[4:])))
    assert losses(tmp_path / "old") == losses(tmp_path / "text")
    keys = "val_loss", "val_bits_per_byte"
    ours, theirs = ([[r.get(key) for key in keys] for r in records(tmp_path / name)] for name in ("old", "text"))
    assert sum(one != [None, None] for one in theirs) == 2
    assert ours == theirs


# --- documents ------------------------------------------------------------------------------------------------------


def documents_in(folder: Path) -> list[list[int]]:
    """The documents of both splits, sorted, without end tokens."""
    found = []
    for split in ("train", "val"):
        tokens, ends = stream(folder, split)
        assert tokens[0] == END
        assert all(tokens[end - 1] == END for end in ends)
        found += [tokens[a : b - 1] for a, b in zip([1, *ends], ends, strict=False)]
    return sorted(found)


def test_end_tokens_within_a_document_cut_it_and_empty_documents_are_left_out(
    usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: Documents = [[[5, 6, END, 7], [8, END]], [[]], [], [[END]], [[9, END, END, 10]], [[END, 11]]]
    out = prepared(usual, tmp_path / "out", write(tmp_path / "a", given, shuffled=True))
    assert documents_in(out) == [[5, 6], [7, 8], [9], [10], [11]]
    assert "6 documents in the files; cut at end tokens, and without empty ones, 5" in capsys.readouterr().out


# --- files that can't be used ---------------------------------------------------------------------------------------


def test_one_of_two_documents_is_held_out(usual: Path, tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[[5, 6]], [[7, 8]]])
    meta = read_meta(prepared(usual, tmp_path / "out", prefix, more=("--val-fraction", "1e-9")))
    assert (meta.documents, meta.val_documents) == (2, 1)


def patched(offset: int, form: str, value: Any) -> Callable[[bytes], bytes]:
    """Another value in the .idx."""
    return lambda data: data[:offset] + struct.pack(form, value) + data[offset + struct.calcsize(form) :]


# of the file below: 4 sequences, 3 boundaries
LENGTHS, POINTERS, ENDS = 34, 34 + 16, 34 + 16 + 32
BAD_INDEX: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is not an index of Megatron"),
    "other": (lambda data: b"PK\3\4" + data, "is not an index of Megatron"),
    "legacy": (lambda data: b"TNTIDX\0\0" + data[8:], "has Megatron's old format TNTIDX"),
    "header": (lambda data: data[:20], "was truncated: it has 20 bytes"),
    "version": (patched(9, "<Q", 2), "has version 2 of Megatron's format"),
    "float": (patched(17, "<B", 7), "the dtype 7 is float32, which tokens can't be"),
    "dtype": (patched(17, "<B", 99), "the dtype 99 is unknown"),
    "cut": (lambda data: data[:-1], "was truncated or damaged: it has 105 bytes"),
    "longer": (lambda data: data + b"\0", "is damaged, or has another format"),
    "modes": (lambda data: data + b"\0" * 4, "multimodal data can't be read"),
    "huge": (patched(18, "<Q", 2**63), "was truncated or damaged"),
    "negative length": (patched(LENGTHS, "<i", -1), "sequence 0 has -1 tokens"),
    "long": (patched(LENGTHS + 12, "<i", 2**31 - 1), "sequence 3 has 2147483647 tokens"),
    "negative pointer": (patched(POINTERS, "<q", -2), "sequence 0 has 2 tokens of 2 bytes from byte -2 on"),
    "odd pointer": (patched(POINTERS + 8, "<q", 3), "sequence 1 has"),
    "far pointer": (patched(POINTERS + 24, "<q", 2**62), "one of the two was truncated or damaged"),
    "first boundary": (patched(ENDS, "<q", 1), "3 document boundaries should increase from 0 to 4"),
    "decreasing": (patched(ENDS + 8, "<q", 9), "document boundaries should increase"),
    "last boundary": (patched(ENDS + 16, "<q", 3), "document boundaries should increase"),
}


@pytest.mark.parametrize("case", BAD_INDEX)
def test_a_bad_index_is_refused(case: str, refused: Callable[..., str], tmp_path: Path) -> None:
    change, message = BAD_INDEX[case]
    prefix = write(tmp_path / "a", [[[5, 6], [7, 8]], [[9], [10, 11, 12]]])
    index = tmp_path / "a.idx"
    index.write_bytes(change(index.read_bytes()))
    said = refused("--from-megatron", prefix)
    assert str(index) in said
    assert message.replace(",", "") in said.replace(",", "")


@pytest.mark.parametrize(("dtype", "value"), [("uint16", 517), ("int32", -1), ("int64", 2**40)])
def test_bad_tokens_are_refused(dtype: str, value: int, refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused("--from-megatron", write(tmp_path / "a", [[[5, 6]], [[7, value, 8]]], dtype))
    at = 3 * np.dtype(dtype).itemsize
    assert f"a.bin: token 3 (at byte {at}) is {value}, but the vocabulary has 517 entries" in said
    assert "the file was made with another tokenizer, or is damaged" in said


def test_files_that_do_not_belong_together_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[[5, 6]], [[7, 8]]])
    (tmp_path / "a.bin").write_bytes(b"12345")
    assert "one of the two was truncated" in refused("--from-megatron", prefix)
    (tmp_path / "a.bin").write_bytes(b"1234567890")
    assert "the last sequence ends at byte 8, but" in refused("--from-megatron", prefix)
    said = refused("--from-megatron", tmp_path)
    common = "takes the common name of a .bin and an .idx file"
    assert f"is a folder; --from-megatron {common}: it has {prefix}" in said
    (tmp_path / "a.bin").unlink()
    assert f"a.bin does not exist; --from-megatron {common}" in refused("--from-megatron", prefix)
    assert "/ is a folder" in refused("--from-megatron", "/")
    one = write(tmp_path / "one", [[[5, 6]]])
    assert "the files have 1 document with text" in refused("--from-megatron", one)


@pytest.mark.extended
def test_random_damage_is_refused_or_read(usual: Path, tmp_path: Path) -> None:
    """Flipped bytes of an index: a DataError, or documents that are within the file."""
    prefix = write(tmp_path / "a", in_sentences(tokens_of(usual)[:20]))
    good, rng = (tmp_path / "a.idx").read_bytes(), random.Random(3)
    outcomes = set()
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "a.idx").write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        try:
            index = read_index(prefix)
            for number in range(index.n_documents):
                assert all(first >= 0 and n > 0 for first, n in index.extents(number))
            outcomes.add("read")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from-megatron a --train-tokenizer 400", "leave out --train-tokenizer"),
        ("my_text --from-megatron a --text-key body", "leave out --text-key, my_text"),
        ("--from-megatron a a.bin", "names the same files twice"),
        ("--from-megatron a --from-megatron a.bin", "names the same files twice"),
        ("--from-megatron nosuch", "nosuch.idx does not exist"),
        ("--from-megatron a --end-token <end>", "has no entry <end>"),
        ("--from-megatron a --val-fraction 2", "--val-fraction 2.0 should be between 0 and 1"),
    ],
)
def test_options_that_do_not_suit_are_refused(
    words: str, message: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", [[[5, 6]], [[7, 8]]])
    assert message in refused(*words.split())


def test_a_command_without_a_tokenizer_is_refused(tmp_path: Path, refuses: Callable[..., str]) -> None:
    prefix = write(tmp_path / "a", [[[5, 6]], [[7, 8]]])
    assert "needs the tokenizer that the files were made with" in refuses(
        "--from-megatron", str(prefix), "--out", tmp_path / "out"
    )


# --- later ----------------------------------------------------------------------------------------------------------


def test_the_same_command_again_changes_nothing_and_another_one_is_refused(
    usual: Path, tmp_path: Path, refuses: Callable[..., str], refused: Callable[..., str]
) -> None:
    prefix = write(tmp_path / "a", with_ends(tokens_of(usual)))
    partial = tmp_path / "out.partial"
    partial.mkdir()  # of a command that was killed
    (partial / "train.position").write_bytes(b"\0" * 8)
    out = prepared(usual, tmp_path / "out", prefix)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "out"]
    meta, made = read_meta(out), (out / "meta.json").stat().st_mtime_ns
    assert prepared(usual, tmp_path / "out", tmp_path / "a.idx") == out
    assert (out / "meta.json").stat().st_mtime_ns == made
    words = ["--from-megatron", str(prefix), "--tokenizer", str(usual / "tokenizer.json"), "--out", str(out)]
    assert "exists, and was made from other files or options" in refuses(*words, "--val-fraction", "0.2")
    assert read_meta(out) == meta
    (tmp_path / "refused.partial").mkdir()
    (tmp_path / "refused.partial/thesis.txt").touch()
    said = refused("--from-megatron", prefix)
    assert "contains thesis.txt, which is not part of a preparation" in said


def test_files_that_are_moved_changed_or_truncated_later(
    usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write(tmp_path / "a", with_ends(tokens_of(usual)))
    out, tokens = prepared(usual, tmp_path / "out", prefix), tmp_path / "a.bin"
    meta, content = read_meta(out), tokens.read_bytes()
    opened = TokenFiles(out, meta, "train")
    assert opened.read(0, 2)[0] == END

    os.truncate(tokens, 100)
    with pytest.raises(DataError, match=r"a\.bin ends before token [\d,]+: it was truncated after the run started"):
        opened.read(0, meta.train_tokens)
    with pytest.raises(DataError, match=r"a\.bin has 100 bytes instead of"):
        read_meta(out)
    tokens.rename(tmp_path / "moved.bin")
    with pytest.raises(DataError, match=r"No such file or directory: '.*a\.bin'"):
        read_meta(out)

    changed = bytearray(content)  # an end token, far from those that a start looks at
    place = 2 * (len(tokens_of(usual)[0]))
    changed[place : place + 2] = b"\5\0"
    tokens.write_bytes(changed)
    capsys.readouterr()
    assert main(["--verify", str(out)]) == 2
    said = capsys.readouterr().err
    assert "has changed since it was made" in said or "its SHA-256 is not the one in meta.json" in said
    tokens.write_bytes(content)
    assert main(["--verify", str(out)]) == 0


def test_moved_files_that_are_prepared_again_are_the_same_data(usual: Path, tmp_path: Path) -> None:
    tokens = tokens_of(usual)[:50]
    out = prepared(usual, tmp_path / "out", write(tmp_path / "a", with_ends(tokens)), write(tmp_path / "b", [tokens]))
    (tmp_path / "moved").mkdir()
    for file in (*tmp_path.glob("*.bin"), *tmp_path.glob("*.idx")):
        file.rename(tmp_path / "moved" / file.name)
    again = prepared(usual, tmp_path / "again", tmp_path / "moved/a", tmp_path / "moved/b.bin")
    other = prepared(usual, tmp_path / "other", tmp_path / "moved/b", tmp_path / "moved/a")
    assert read_meta(again).tokens_sha256 == json.loads((out / "meta.json").read_text())["tokens_sha256"]
    assert read_meta(other).tokens_sha256 != read_meta(again).tokens_sha256


def test_damaged_extents_are_named(usual: Path, tmp_path: Path) -> None:
    out = prepared(usual, tmp_path / "out", write(tmp_path / "a", with_ends(tokens_of(usual))))
    meta = read_meta(out)
    extents = np.fromfile(out / "train.extents", "<i8").reshape(4, -1)
    for row, value in ((0, -5), (1, 2**60), (1, 0), (2, 7), (3, -1)):
        damaged = extents.copy()
        damaged[row, 0] = value
        damaged.tofile(out / "train.extents")
        with pytest.raises(DataError, match=r"train\.extents is damaged: piece 0"):
            TokenFiles(out, meta, "train").read(0, 50)
    (out / "train.extents").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"train\.extents or megatron\.json is damaged"):
        TokenFiles(out, meta, "train")
    extents.tofile(out / "train.extents")
    for files in ([{"path": "a", "dtype": "float32"}], [{"path": 1, "dtype": "int8"}], None):
        (out / "megatron.json").write_text(json.dumps({"files": files}) if files else "")
        with pytest.raises(DataError, match=r"megatron\.json is damaged"):
            TokenFiles(out, meta, "train")
