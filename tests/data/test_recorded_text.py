"""How text is read and what is said about it, recorded: each format, each command line, each damage and tokenizer.

Nothing else holds: places and hashes of documents, the words on most formats and damages, and the entries of a
tokenizer that is "trained"; read their diffs. test_damaged_tokens.py holds that damage is found, test_evaluate.py the
bytes of texts.
"""

import gzip
import itertools
import json
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from tests.data.test_recorded_data import (
    BYTES,
    MODULE,
    PAIR,
    PAIRS,
    RECORDS,
    SHARED,
    SHORT,
    T5,
    TOKENIZERS,
    facts,
    jsonl,
    lines,
    normal,
    placed,
    plain,
    said,
    table,
    write,
)
from tests.recorded import assert_recorded
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data import packing
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.data.prepare import documents as readers
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.documents import Document, documents
from torchtitan_lite.data.prepare.functions import functions
from torchtitan_lite.data.prepare.texts import Corpus, find, ignored_notes
from torchtitan_lite.data.prepare.tokenizer import as_text, train, unknown_token
from torchtitan_lite.data.spans import wrong_tokenizer
from torchtitan_lite.data.token_files import Meta, TokenFiles, document_ends, read_meta
from torchtitan_lite.scoring.likelihood import bytes_per_token

BOM = b"\xef\xbb\xbf"
GOOD = b'{"text": "good"}\n'
ZSTD = pyarrow.compress(GOOD, "zstd", asbytes=True)
TWO = ("text", "headline")
# a file, its content, and the keys
READ: list[tuple[str, Any, tuple[str | list[str], ...]]] = [
    ("a.txt", b"", ("text",)),
    ("a.txt", BOM + b"one\n\ntwo", ("text",)),
    ("a.txt", b"x" * 700 + b"\n" + b"y" * 300 + b"\n" + "é".encode() * 900 + b"\nend", ("text",)),
    ("a.txt", b"x" * 1022 + "中".encode() * 4 + b"\n\n\nlast\n", ("text",)),
    ("a.txt", b"good\n" * 3 + b"gr\xfc\nmore\n", ("text",)),
    ("a.txt", b"\n" * 1030 + b"\x80", ("text",)),
    ("a.txt", b"text", TWO),
    ("a.txt.GZ", gzip.compress(b"one\ntwo\n"), ("text",)),
    ("a.JSONL", BOM + GOOD + b"\r\n  \n" + b'{"text": "b", "id": 3}', ("text",)),
    ("a.jsonl", GOOD + b'{"text": "cut\n' + GOOD, ("text",)),
    ("a.jsonl", GOOD + b'{"text": "\xff"}\n', ("text",)),
    ("a.jsonl", GOOD + b"[" * 1900 + b"\n", ("text",)),
    ("a.jsonl", GOOD + b'{"body": "x", "id": 1}\n["text"]\n3\n"text"\n{}\nnull\n', ("text",)),
    ("a.jsonl", b'{"text": "one", "x": "\\ud83d"}\n{"text": "\\ud83d"}\n{"text": " "}\n{"text": ""}\n', ("text",)),
    ("a.jsonl", b'{"text": [1, 2]}\n{"text": null}\n{"text": 1.5}\n{"text": {"a": "' + b"b" * 90 + b'"}}\n', ("text",)),
    ("a.jsonl", jsonl(*({"text": "x" * n} for n in (1987, 1988, 1989, 9000))) + GOOD, ("text",)),
    ("a.jsonl", jsonl({str(i) * 20: i for i in range(12)}), ("text",)),
    ("a.jsonl", jsonl({"text": "a", "headline": "b"}, {"text": "a"}, {"headline": "b", "text": "ü"}), TWO),
    ("a.jsonl", jsonl({"text": "", "headline": "b"}, {"text": "a", "headline": " \n "}), TWO),
    ("a.jsonl", jsonl({"text": " c ", "headline": 3}, {"text": " c ", "headline": " d"}), TWO),
    ("a.jsonl.gz", gzip.compress(GOOD * 2), ("text",)),
    ("a.jsonl.ZST", ZSTD + ZSTD, ("text",)),
    ("a.jsonl.zst", b"plain text", ("text",)),
    ("a.jsonl.zst", pyarrow.compress(GOOD * 500, "zstd", asbytes=True)[:-6], ("text",)),
    ("a.jsonl.gz", gzip.compress(GOOD * 500)[:-12], ("text",)),
    ("a.jsonl.gz", gzip.compress(GOOD)[:12] + b"garbage!" * 9, ("text",)),
    ("a.parquet", {"text": ["a", "b", "z" * 2001], "headline": ["y" * 2000, "z" * 2001, "d"]}, TWO),
    ("a.parquet", b"PAR1" + b"\0" * 100, ("text",)),
    ("a.parquet", pyarrow.table([["a"], ["b"]], names=["text", "text"]), ("text",)),
    ("a.csv", b"\n\nid,text\n1,a\n\n2,\"b \"\"c\"\"\n, d\"\n3,e", ("text",)),
    ("a.csv", BOM + b"id;text;x\r\n1;a, b;\r\n2;c;d\r\n", ("text",)),
    ("a.csv", b"\nid|text\n1|a,b;c\n2|d|e\n3\n", ("text",)),
    ("a.csv", b"id\ttext\n1\ta,b\n", ("text", "id")),
    ("a.csv", b"text,text\na,b\n", ("text",)),
    ("a.csv", BOM + b"\r\nid,text,more\r\n\r\n1,\"a\r\n\r\nb\"\r\n\r\n2,c\r\n\r\n\r\n", ("text",)),
    ("a.csv", b"id;body\n1;a, b; c\n2;\"a; b\t|\"\n", ("body",)),
    ("a.csv", b"id;body\n1;\"a, b; c\"\n2;\"a; b\t|\"\n", ("body", "id")),
    ("a.csv", b"id,body\n1,x\n", ("text",)),
    ("a.csv", b"text,other\na,b\n", TWO),
    ("a.csv", b"text,headline,id\na,b\nHello, world,c,1\n\"a\nb\",c,d\n,e,f\n", TWO),
    ("a.csv", b'id,text\n1,good\n2,"never\nclosed', ("text",)),
    ("a.csv", b"id,text\n1,good\n2,gr\xfc\n", ("text",)),
    *(("a.csv", b"id,text\n1,a\n2," + b"z" * n + b"\n", ("text",)) for n in (1998, 1999)),
    ("a.csv", b"text\n\"" + b"z\n" * 1001 + b"\"\n", ("text",)),
    ("a.txt", "\u00e9".encode() * 1001, ("text",)),
    ("a.tsv", b"id,text\ttext\n1,x\ta,b\n", ("text",)),
    ("a.tsv", b"id,text\n1,x\n", ("text",)),
    ("a.parquet", {"text": ["a", None, "", "b"], "id": [1, 2, 3, 4]}, ("text",)),
    ("a.parquet", {"text": [1, 2]}, ("text",)),
    ("a.parquet", {"text": [b"a"]}, ("text",)),
    ("a.parquet", {"body": ["a"], "id": [1]}, ("text",)),
    ("a.tsv", b'id\ttext\r\n1\t"Hi," he said\r\n\r\n2\t"open\n3\tc "d\re"\n4\t"all"\n', ("text",)),
    ("a.tsv", b'id\ttext\n1\ta\n2\t"b\n\nc"\n3\td\n', ("text",)),
    ("a.tsv", b'text\tid\n"a\nb"\t1\n', ("text",)),
    ("a.tsv", b'id\ttext\tlang\n1\t"a\nb\nc"\ten\n', ("text",)),
    ("a.tsv", b'"id"\t"text"\n"1"\t"a"\n', ("text",)),
    ("a.tsv", b'id\ttext\n1\ta\n2\n3\tb\tc\n4\td\n', ("text",)),
    ("a.tsv", b"id\ttext\n1\tgr\xfc\n", ("text",)),
    ("a.csv", b'id,text\n1,"never closed\n2,b\n', ("text",)),
    ("a.csv", b"id,gr\xfc,text\n1,a,b\n", ("text",)),
    ("a.csv", b"id,text\n\n1,gr\xfc\n", ("text",)),
    ("a.json", GOOD * 2, ("text",)),
    ("a.ndjson.gz", gzip.compress(GOOD), ("text",)),
    ("a.JSONLines", BOM + b"\n" + GOOD, ("text",)),
    ("a.json", b'{\n "text": "a"\n}\n', ("text",)),
    ("a.json", b'{"version": 1, "data": [\n {"text": "a"}\n]}\n', ("text",)),
    ("a.json.gz", gzip.compress(b'[{"text": "' + b"a" * 3000 + b'"}, {"text": "b"}]'), ("text",)),
    ("a.json", b"[\r\n{}]\n", ("text",)),
    ("a.jsonl", b'[{"text": "a"},\n{"text": "b"}]\n', ("text",)),
    ("a.jsonl", b'{"text": "cut\n' + GOOD, ("text",)),
    ("wiki_00", b"{{Infobox}}\n[1] and more\n", ("text",)),
    ("wiki_00", GOOD, ("text",)),
    ("part-00000.gz", gzip.compress(b"one\n"), ("text",)),
    ("a.jsonl", jsonl({"body": "a"}, {"text": "b", "body": None}, {"id": 3}, {"text": None}), (["body", "text"],)),
    ("a.jsonl", jsonl({"a": {"b": {"c": "x"}}}, {"a.b.c": "y", "a": 3}, {"a": {"b": 1}}, {"a": None}, 3), ("a.b.c",)),
    ("a.csv", b"id,meta.text\n1,a\n", (["text", "meta.text"],)),
    ("a.csv", b"id,body\n1,a\n", (["text", "abstract"],)),
    ("a.parquet", pyarrow.table({"a": [{"b": "x", "c": 1}, None], "b.c": ["y", "z"]}), ("a.b", "b.c")),
    ("a.parquet", pyarrow.table({"a": [{"b": "x"}, None, {"b": None}], "c": ["", "z", "w"]}), (["a.b", "c"],)),
    ("a.parquet", {"body": ["a"], "id": ["1"]}, (["text", "abstract"],)),
    ("a.tsv", b'id\ttext\n1\ta\n2\t"s ""hi"""\n3\t"a" or "b"\n4\t""hi""\n5\t"""hi"" b"\n"6""x"\tc\n7\t"\n', ("text",)),
    ("a.txt", "\ufeffa\nb".encode("utf-16-le"), ()),
    ("a.txt", "\ufeffa\nb".encode("utf-16-be"), ()),
    *(("a.jsonl", b'{"text": "' + b"z" * n + b'"}', ("text",)) for n in (1988, 1989)),  # no line end
    ("a.parquet", {"text": ["\u00e9" * 1000, "\u00e9" * 1001]}, ("text",)),
]  # fmt: skip


def texts_of(corpus: Corpus) -> list[str]:
    """Documents and problems, with their places."""
    found = []
    for item in documents(corpus):
        if isinstance(item, Document):
            texts = " > ".join(
                text if len(text) < 60 else f"{text[:8]!r}..{text[-8:]!r} x {len(text)}" for text in item.texts
            )
            found.append(f"{item.place}: {texts!r}, {item.n_bytes} bytes, {item.hash:x}"[:150])
        else:
            found.append(f"[{item.reason}] {item.message(corpus)}")
    return found


def test_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 2,000 bytes."""
    monkeypatch.setattr(readers, "LONGEST", 2000)
    found = {}
    for number, (name, content, keys) in enumerate(READ):
        write(tmp_path / name, content)
        corpus = Corpus((tmp_path / name,), keys, source_prefix="to: " * (len(keys) == 2))
        found[f"{number} {name} {' '.join(map(str, keys))}"] = [normal(text, tmp_path) for text in texts_of(corpus)]
    assert_recorded(found, RECORDS / "recorded_text.json")


# --- the command that prepares ----------------------------------------------------------------------------------

LITERAL = jsonl(text=[f"{i} ends </s> or so {word}" for i, word in enumerate(("a", "b", "<|endoftext|>", "d"))])
TEXTS: dict[str, bytes | Mapping[str, list[Any]]] = {
    "a/one.jsonl": jsonl(text=SHORT[:20], body=lines(20, 3, seed=20)),
    "a/two.txt": plain(70, seed=21),
    "a/x.md": b"# a title\n" * 300,
    "a/LICENSE": b"free",
    "held.jsonl": jsonl(text=["held out", SHORT[3], "held as well"], body=["h", "hh", "hhh"]),
    "bad/a.txt": b"good\n" * 3 + b"gr\xfc\n",
    "bad/b.jsonl": GOOD + b'{"text": "cut\n[1]\n{"text": null}\n{"body": 1}\n{"\\ud800": 1}\n' + jsonl(text=SHORT[20:]),
    "bad/c.csv": b"id,text\n1,a\n2\n3,b\n" + b"4,gr\xfc\n",
    "bad/d.csv": b"id\n1\n",
    "tiny/a.txt": b"tiny\n",
    "one.jsonl": GOOD,
    "held/a.jsonl": jsonl(text=["held out", "as well"]),
    "held/b.bin": b"",
    "more/c.md": b"# held out\n",
    "copies.jsonl": GOOD * 3,
    "few.txt": b"too little to learn from\n" * 200,
    "same.jsonl": jsonl(text=[SHORT[3], "held out"], body=["1", "2"]),
    "literal.jsonl": LITERAL,
    "upper.jsonl": jsonl(text=["a b", "c d", "e </S> f", "g"]),
    "pairs.csv": table(",", **PAIR),
    "bad_pairs.jsonl": jsonl({"text": "a", "headline": "b"}, {"text": "a"}, {"text": "", "headline": "c"}, *SHORT[:2]),
    "other/a.bin": b"",
    "other/b.bin": b"",
    "other/README": b"",
    "blank/a.txt": b"",
    "blank/b.txt": b"",
    "blank/c.jsonl": jsonl(text=SHORT[:9]),
    "blank/.c.jsonl": jsonl(text=SHORT[:9]),
    "blank/.ipynb_checkpoints/c.jsonl": jsonl(text=SHORT[:9]),
    "empty/a.txt": b"",
    **{f"{name}/{i}.{i}": b"" for name, n in (("many", 11), ("ten", 10)) for i in range(n)},
}
# what follows `python -m torchtitan_lite.data.prepare`; @ is the folder
COMMANDS = """
@/a/one.jsonl --out @/out1 --tokenizer bytes
@/a/one.jsonl --out @/out1 --tokenizer bytes
@/a/one.jsonl --out @/out1 --tokenizer bytes --text-key body
@/a/one.jsonl --out @/a --tokenizer bytes
@/a --out @/new/er/out2 --train-tokenizer 310 --val-fraction 0.3
@/a --text-suffixes .md .PY --text-suffixes .rst --out @/out3 --tokenizer @/letters.json
@/a/*.[jt]* @/a/one.jsonl --out @/out4 --train-tokenizer 420 --sentinels --val-fraction 0.4
@/a/one.jsonl --text-key body --held-out @/held.jsonl --out @/out5 --tokenizer bytes --sentinels
@/a/one.jsonl --held-out @/held.jsonl --out @/out6 --tokenizer bytes
@/a/one.jsonl --held-out @/held.jsonl --out @/out6 --tokenizer bytes --on-error skip
@/a --held-out @/held --out @/out37 --tokenizer bytes
@/a/one.jsonl --text-suffixes .md --held-out @/more --out @/out51 --tokenizer bytes
@/same.jsonl --held-out @/held.jsonl --out @/out7 --tokenizer bytes --on-error skip
@/bad --out @/out8 --tokenizer bytes
@/bad --out @/out8 --tokenizer bytes --on-error skip
@/bad/d.csv --out @/out9 --tokenizer bytes
@/literal.jsonl --out @/out10 --tokenizer @/ends.json --end-token </s>
@/literal.jsonl --out @/out11 --tokenizer @/not_special.json --end-token </s>
@/literal.jsonl --out @/out12 --tokenizer @/piece.json --on-error skip
@/literal.jsonl @/a/one.jsonl --out @/out31 --tokenizer @/piece.json --on-error skip
@/upper.jsonl --out @/out13 --tokenizer @/lower.json
@/upper.jsonl @/a/one.jsonl --out @/out13 --tokenizer @/lower.json --on-error skip
@/literal.jsonl --out @/out14 --tokenizer @/drops.json
@/literal.jsonl --out @/out15 --tokenizer @/words.json
@/literal.jsonl --out @/out16 --tokenizer @/endless.json
@/literal.jsonl --out @/out17 --tokenizer @/ends.json --end-token <bye>
@/literal.jsonl --out @/out17 --tokenizer @/ends.json --begin-token <bye>
@/literal.jsonl --out @/out17 --tokenizer @/not_special.json --begin-token </s>
@/literal.jsonl --out @/out19 --tokenizer @/llama.json
@/tiny --out @/out20 --tokenizer bytes
@/one.jsonl --out @/out21 --tokenizer bytes
@/one.jsonl --out @/out21 --tokenizer bytes --val-fraction 0.999
@/a --out @/out35 --tokenizer bytes --val-fraction 1e-9
@/a --out @/out36 --tokenizer bytes --val-fraction 0.999999999999
@/copies.jsonl --out @/out22 --tokenizer bytes
@/few.txt --out @/out23 --train-tokenizer 500
@/few.txt --out @/out24 --train-tokenizer 300 --sentinels
@/a/two.txt --out @/out50 --tokenizer bytes --val-fraction 0.5
@/pairs.csv --source-key text --target-key headline --source-prefix to:_ --out @/out25 --tokenizer bytes --sentinels
@/pairs.csv --source-key text --target-key headline --out @/out26 --train-tokenizer 370
@/bad_pairs.jsonl @/pairs.csv --source-key text --target-key headline --out @/out27 --tokenizer bytes
@/bad_pairs.jsonl @/pairs.csv --source-key text --target-key headline --out @/out27 --tokenizer bytes --on-error skip
@/a --source-key text --target-key headline --out @/out28 --tokenizer bytes
@/other --out @/out29
@/many --out @/out29
@/ten --out @/out29
@/a --out @/out33 --train-tokenizer 300 --end-token <bye>
@/a --out @/out34 --tokenizer bytes --sentinels --end-token <pad>
@/nowhere --out @/out29
user/name --out @/out29
wikitext --out @/out29
https://example.com/text.txt --out @/out29
@/blank --out @/out38 --tokenizer bytes
@/blank/a.txt @/blank/c.jsonl --out @/out39 --tokenizer bytes
@/empty --out @/out40 --tokenizer bytes
@/a/one.jsonl @/pairs.csv --text-key body,headline --out @/out41 --tokenizer bytes
@/literal.jsonl --out @/out42 --source-key text --target-key text.more
@/other/README --out @/out29
@/*.none @/a --out @/out29
@/a --text-suffixes md --out @/out29
@/a --text-suffixes .csv --out @/out29
@/a --text-suffixes .gz --out @/out29
@/a --text-suffixes none_such:Reader --out @/out29
@/a --text-suffixes json:dumps --out @/out29
@/a
--out @/out30
@/a --out .
@/a --out @/x/..
@/a --out @/out30 --val-fraction 0
@/a --out @/out30 --val-fraction 1
@/a --out @/out30 --val-fraction nan
@/a --out @/out30 --train-tokenizer 256
@/a --out @/out30 --train-tokenizer 2147483648
@/a --out @/out30 --sentinels --tokenizer @/ends.json
@/a --out @/out30 --tokenizer @/none.json
@/a --out @/out30 --source-key a
@/a --out @/out30 --target-key a
@/a --out @/out30 --source-prefix x
@/a --out @/out30 --source-key a --target-key a
@/a --out @/out30 --source-key a --target-key b --text-key c
--verify @/out1
--verify @/out25
--verify @/none
--verify @/a
--verify @/a/one.jsonl
"""


def prepared_texts(folder: Path) -> None:
    for name, content in TEXTS.items():
        write(folder / name, content)
    for name, make in TOKENIZERS.items():
        make().save(str(folder / f"{name}.json"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared_texts(tmp_path)
    found: dict[str, Any] = {}
    for command in COMMANDS.strip().splitlines():
        words = [
            placed(word, tmp_path).replace("_", " ") if "to:" in word else placed(word, tmp_path)
            for word in command.split()
        ]
        code = main(words)
        said = capsys.readouterr()
        shown = [f"exit code {code}", *(said.out + said.err).splitlines()]
        out = Path(words[words.index("--out") + 1]) if "--out" in words else Path("-")
        if code == 0 and out.is_dir():
            shown += facts(read_meta(out), out)
            shown += (out / "skipped.log").read_text().splitlines() if (out / "skipped.log").exists() else []
            shown += [(out / "pairs.json").read_text()] if (out / "pairs.json").exists() else []
        found[command + " (again)" * (command in found)] = [normal(line, tmp_path) for line in shown]
    left = sorted(
        path.name for path in tmp_path.iterdir() if path.name not in {name.partition("/")[0] for name in TEXTS}
    )
    found["folders"] = " ".join(name for name in left if not name.endswith(".json"))
    assert_recorded(found, RECORDS / "recorded_commands.json")


# --- tokenizers, finding, damage and wrong data -----------------------------------------------------------------


OTHER_FORMATS = {  # the beginnings of the files
    "binary.json": b"\xff",
    "spm.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2\n\x0c\n\x03<s>\x15\0\0\0\0\x18\3",
    "unigram.model": b"\n\x10\n\x07\xe2\x96\x81the\x15\x8d\x97\x4e\xc0",
    "a.tiktoken": b"IQ== 0\nIg== 1\nIw== 2\n",
    "tekken.json": b'{"config": {"pattern": "[a-z]+", "num_vocab_tokens": 150000}, "vocab": [',
    "vocab.json": b'{"<pad>": 0, "a\\"": 1}',
    "merges.txt": b"#version: 0.2\n\xc4\xa0 t\n",
    "vocab.txt": b"[PAD]\n[unused0]\n",
    "tokenizer_config.json": b'{"model_max_length": 512, "tokenizer_class": "LlamaTokenizer"}',
    "pointer.json": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "page.json": b"<!doctype html><html>",
    "folder.model/x": b"",
}


def retrained(texts: list[str], n: int, sentinels: bool) -> str:
    entries = train(texts, n, sentinels=sentinels).get_vocab(with_added_tokens=True)
    names = [f"{name} {i}" for name, i in sorted(entries.items(), key=lambda entry: entry[1])]
    return " ".join([*names[:4], "..", *names[257:]])


def test_tokenizers(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for name, make in TOKENIZERS.items():
        (tmp_path / f"{name}.json").write_text(make().to_str())
        tokenizer = as_text(bpe.load(tmp_path / f"{name}.json").to_str())
        end = str(said(tmp_path, bpe.end_token, tokenizer))
        known = int(end) if end.isdigit() else None
        found[name] = [
            end,
            said(tmp_path, bpe.end_token, tokenizer, "<eos>"),
            said(tmp_path, unknown_token, tokenizer, -1 if known is None else known),
            said(tmp_path, bpe.shown, tokenizer, 1),
        ]
        lengths = itertools.groupby(bytes_per_token(tokenizer, () if known is None else (known,)).tolist())
        found[name] += [bpe.size(tokenizer), " ".join(f"{n}x{len([*same])}" for n, same in lengths)]
        assert bytes_per_token(tokenizer, [0])[0] == 0, "an end token, also the first entry"
    (tmp_path / "no.json").write_text("{}")
    for name, content in OTHER_FORMATS.items():
        write(tmp_path / f"{name} alone" / name, content)
    found["wrong"] = [
        said(tmp_path, bpe.load, tmp_path / name)
        for name in ("no.json", "none", *(f"{name} alone{file}" for name in OTHER_FORMATS for file in ("", f"/{name}")))
    ]
    (tmp_path / "words.json").rename(tmp_path / "tokenizer.json")
    assert bpe.load(tmp_path).to_str() == bpe.load(tmp_path / "tokenizer.json").to_str(), "a folder that has one"
    learned: list[tuple[list[str], int, bool]] = [
        *((SHORT, 270, False), (["ab " * 9], 258, False), (["ab " * 9], 300, False), ([], 257, False)),
        *((["ab " * 9, "x" * 2500], 262, False), (SHORT, 361, True), ([], 357, True)),
    ]
    found["trained"] = [said(tmp_path, retrained, *one) for one in learned]
    assert_recorded(found, RECORDS / "recorded_tokenizers.json")


TREE = [
    "a.txt",
    "B.TXT",
    "c.Jsonl.GZ",
    "d.PARQUET",
    "e.CSV.zst",
    "sub/f.tsv",
    "sub/deep/g.txt",
    "x.md",
    "README",
    "sub/z.py.gz",
    "sub/z.arrow",
    ".cache/a.txt",
    "sub/._f.tsv",
    "sub/deep/h.json",
]
ENTRIES: list[tuple[Any, tuple[str, ...]]] = [
    ("@", ()),
    ("@", (".MD", ".py", ".md")),
    (["@/sub", "@/*.txt", "@/a.txt", "@/link.txt"], ()),
    ("@/link", ()),
    ("@/sub/**/*.t*", ()),
    ("@/[x]", ()),
    (["@/a.txt", ""], ()),
    (["@/a.txt", "@/no*"], ()),
    (["@/sub", "@/sub/deep/more"], ()),
    (["@/.cache", "@/sub/._f.tsv"], ()),
    ("@/sub/deep", (".json",)),
    ("@/x.md", ()),
    ("@/README", (".md",)),
    ("@/no*", ()),
    ("@/sub/deep/more", ()),
    ("~nobody-of-this-name/text", ()),
    ("@/" + "x" * 300, ()),
    *(("@", (suffix,)) for suffix in ("md", ".csv", ".zst", ".a/b", "", ". x", "mod:Own")),
    (["@/sub", "@/sub"], ()),
    ("@/sub/lost.csv", ()),
    ("@/a.txt/more", ()),
]
DAMAGE: list[tuple[str, Any]] = [
    *(("meta.json", content) for content in (b"", b"{", b"\xff", b"[1]", b'{"format_version": 6}')),
    *(("meta.json", {key: value}) for key, value in (("documents", "many"), ("train_tokens", -1), ("more", 1))),
    ("meta.json", {"files": []}),
    *(("meta.json", {"format_version": version}) for version in (3, None, "x" * 300)),
    ("meta.json", {"skipped": {"a": 1.5}}),
    *(("train.bin", change) for change in (b"cut", lambda b: b[::-1], lambda b: b[:-1] + b"\2", lambda b: b + b"\0")),
    *((name, None) for name in ("meta.json", "val.bin", "train.idx", "tokenizer.json")),
    ("train.idx", lambda b: b[8:] + b[:8]),
    *((name, None) for name in ("origins.json", "val.origins")),
]  # fmt: skip
IDX = {"an end before": [3, 3, 9], "the first": [1, 9], "not the last": [3, 8], "right": [3, 9]}
WRONG: dict[str, dict[str, Any]] = {
    "tokenizer, prepared": {"data.path": "@/prepared", **BYTES},
    "end token, prepared": {"data.sources": {"@/prepared": 1}, "tokenizer.end_token": "<eos>"},
    "tokenizers of sources": {"data.sources": {"@/prepared": 1, "@/pairs": 2}},
    "end tokens of sources": {"data.sources": {"@/prepared": 1, "@/usual": 2}},
    "begin tokens of sources": {"data.sources": {"@/prepared": 1, "@/begun": 2}},
    "the third of sources": {"data.sources": {"@/prepared": 1, "@/./prepared": 1, "@/usual": 2}},
    "pairs as texts": {"data.path": "@/pairs"},
    "pairs as spans": {"data.path": "@/pairs", **T5},
    "texts as pairs": {"data.path": "@/prepared", "data.objective": "pairs", "data.target_len": 5},
    "pairs of text": {"data.path": ["@/a", "@/held.jsonl"], "data.objective": "pairs", "data.target_len": 5},
    "no file of pairs": {**PAIRS},
    "no pad": {**PAIRS, "data.path": "@/pairs.csv", **BYTES, "model.family": "t5"},
    "another pad": {"data.path": "@/a", **T5, "tokenizer.path": "@/late_pad.json"},
    "no sentinels": {"data.path": "@/a", **T5, **BYTES},
    "too many spans": {"data.path": "@/a", **T5, "train.seq_len": 2500},
    "too short": {"data.path": "@/a/one.jsonl", **BYTES, "train.seq_len": 5000},
    "too short for spans": {"data.path": "@/a/one.jsonl", **T5, "train.seq_len": 200},
    "a weight": {"data.sources": {"@/prepared": 3, "@/a/one.jsonl": 1e-5}},
    "no room": {"data.path": "@/few.txt", "tokenizer.vocab_size": 258},
    "a cache": {"data.path": "@/few.txt", "data.cache_dir": "@/few.txt"},
    "unread": {"data.sources": {"@/a": 1, "@/bad/a.txt": 1}, **BYTES},
    "no text": {"data.path": "@/none", **BYTES},
}


def config_of(keys: dict[str, Any], folder: Path) -> Config:
    """Without the rules, which are those of other tests."""
    values: dict[str, dict[str, Any]] = {}
    for name, value in placed({**SHARED, **keys}, folder).items():
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    return Config.model_validate(values)


def opened(config: Config) -> str:
    data = prepare_all(config.data, config.tokenizer, lambda _: None)
    return str([samples.n_samples for samples in open_samples(data, "train", config).sources])


def indexed(folder: Path, meta: Meta, ends: list[int]) -> str:
    (folder / "val.idx").write_bytes(b"".join(end.to_bytes(8, "little") for end in ends))
    return str(document_ends(folder, replace(meta, val_tokens=9), "val").tolist())


def test_finding_and_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    for name in (*TREE, "[x]/h.txt"):
        write(tree / name, f"the text of {name}".encode())
    for name, target in (("link", "."), ("link.txt", "a.txt"), ("sub/lost.csv", "none")):
        (tree / name).symlink_to(tree / target)
    found: dict[str, Any] = {"finding": {}, "damage": {}, "wrong": {}}

    def listed(entry: Any, suffixes: tuple[str, ...]) -> str:
        corpus = find(placed(entry, tree), text_suffixes=suffixes)
        return " ".join(str(file.relative_to(tree)) for file in corpus.files) + "".join(
            f"; {note}" for note in ignored_notes([corpus, corpus])
        )

    for number, (entry, suffixes) in enumerate(ENTRIES):
        name = f"{number} {str(entry)[:60]} {' '.join(suffixes)}"
        found["finding"][name] = said(tmp_path, listed, entry, suffixes)

    monkeypatch.setattr("torchtitan_lite.data.token_files._SPOT_BYTES", 2)  # so that they don't cover a small file
    prepared_texts(tmp_path)
    made = [
        "--tokenizer @/ends.json --end-token </s> --out @/prepared",
        "--tokenizer @/ends.json --out @/usual",
        "--tokenizer @/ends.json --end-token </s> --begin-token <eos> --out @/begun",
    ]
    for command in (
        *(f"@/a/one.jsonl {options}" for options in made),
        "@/pairs.csv --source-key text --target-key id --tokenizer bytes --out @/pairs",
    ):
        assert main(placed(command, tmp_path).split()) == 0
    capsys.readouterr()
    folder = tmp_path / "damaged"
    for number, (name, change) in enumerate(DAMAGE):
        file = shutil.copytree(tmp_path / "prepared", folder) / name
        before = file.read_bytes()
        if isinstance(change, dict):
            change = json.dumps(json.loads(before) | change).encode()
        file.unlink() if change is None else file.write_bytes(change if isinstance(change, bytes) else change(before))
        title = f"{number} {name}"
        found["damage"][title] = [said(tmp_path, lambda: facts(read_meta(folder), folder)[1])]
        main(["--verify", str(folder)])
        found["damage"][title] += [normal(line, tmp_path) for line in "".join(capsys.readouterr()).splitlines()]
        shutil.rmtree(folder)
    shutil.copytree(tmp_path / "prepared", folder)
    meta = read_meta(folder)
    for name, ends in IDX.items():
        found["damage"][name] = said(tmp_path, indexed, folder, meta, ends)
    (folder / "val.bin").write_bytes((folder / "val.bin").read_bytes()[:-6] + b"\x03\x01\x02\x01")
    stream = TokenFiles(folder, meta, "val")
    for first, end in ((0, 3), (meta.val_tokens - 4, meta.val_tokens - 1), (0, meta.val_tokens)):
        found["damage"][f"tokens {first} to {end}"] = said(tmp_path, stream.read, first, end)
    packed = tmp_path / "prepared", read_meta(tmp_path / "prepared"), 12
    index = packing.pack(*packed)
    for name, change in (("train.rows", b"1"), ("val.pieces", None), ("hashes.json", b"[]"), ("hashes.json", None)):
        kept = (index / name).read_bytes()
        (index / name).unlink() if change is None else (index / name).write_bytes(change)
        found["damage"][f"packed {name} {change!r}"] = said(tmp_path, packing.pack, *packed)
        (index / name).write_bytes(kept)
    for name, keys in WRONG.items():
        found["wrong"][name] = said(tmp_path, opened, config_of(keys, tmp_path))
        found["wrong"][name] += "".join(
            f"; {k}: {normal(v, tmp_path)}" for k, v in wrong_tokenizer(config_of(keys, tmp_path)).items()
        )
    for name in ("a", "sub/b", "test/c", "x/tests/d", "idlelib/idle_test/e", "site-packages/f", "dist-packages/g"):
        write(tmp_path / f"lib/{name}.py", MODULE.replace("x", name[0]).encode())
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    found["functions"] = functions(tmp_path).files[0].read_text()
    assert_recorded(found, RECORDS / "recorded_damage.json")
