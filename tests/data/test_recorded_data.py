"""What text becomes, recorded: documents, prepared folders, the samples of each rank, and every message about data.

Nothing else holds: the drawn "spans", "packed" pieces and "mixtures", the samples of each config, its "which" and its
notes; read their diffs. test_data.py has numbers of the order of samples; test_loading.py and test_spans.py hold
shares, epochs and that no token is lost.
"""

import gzip
import json
import re
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.recorded import assert_recorded
from torchtitan_lite.config.load import load
from torchtitan_lite.config.schema import Config, DataConfig
from torchtitan_lite.config.sections.data import Reader, span_lengths
from torchtitan_lite.data import packing, pairs, spans, token_files
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.loader import Batch, Loader, MicroBatch, PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.data.order import sample_indices
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.documents import Unusable
from torchtitan_lite.data.prepare.texts import Corpus
from torchtitan_lite.data.prepare.tokenizer import byte_level, train
from torchtitan_lite.data.token_files import File, Meta
from torchtitan_lite.errors import ConfigError, DataError, UserError
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.tools import which
from torchtitan_lite.tools.past_steps import Made, Record

RECORDS = Path(__file__).parent
WORDS = [
    "a",
    "river",
    "of",
    "stone",
    "light",
    "grün",
    "über",
    "東京",
    "café",
    "house",
    "tree",
    "small",
    "box",
    "(f",
    "[x]",
    "{y}",
    "7",
    "42",
    "end.",
    "yes,",
    "no;",
    "ok",
]
Contents = Mapping[str, bytes | Mapping[str, list[str]]]


def words(chance: Random, n: int) -> str:
    return " ".join(chance.choices(WORDS, k=n))


def lines(n: int, longest: int, seed: int = 7) -> list[str]:
    chance = Random(seed)
    return [f"{i} {words(chance, chance.randint(1, longest))}" for i in range(n)]


def plain(n: int, seed: int = 7, end: str = "\n") -> bytes:
    """Text with empty lines."""
    return "".join(line + end * (1 + (i % 5 == 3)) for i, line in enumerate(lines(n, 9, seed))).encode()


def jsonl(*rows: Any, **columns: Sequence[Any]) -> bytes:
    rows += tuple(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)).encode()


def table(separator: str, **columns: Sequence[str]) -> bytes:
    n, cells = len(columns), [cell for row in zip(*columns.values(), strict=True) for cell in row]
    quoted = cells if separator == "\t" else ['"' + cell.replace('"', '""') + '"' for cell in cells]
    rows = [quoted[i : i + n] for i in range(0, len(quoted), n)]
    return "".join(separator.join(row) + "\n" for row in [[*columns], *rows]).encode()


def read_list(stream: BinaryIO, corpus: Corpus) -> Iterator[tuple[int, Sequence[Any] | Unusable]]:
    """A reader of our own: a document for each entry of a list."""
    for number, line in enumerate(stream.read().decode().splitlines(), 1):
        # of pairs, the first word is the source
        yield (
            number,
            line[2:].split(" ", len(corpus.keys) - 1) if line[:2] == "- " else Unusable("not an entry", f"is {line!r}"),
        )


LIST = Reader(".lst", "tests.data.test_recorded_data:read_list")
SOURCES, TARGETS = lines(23, 7, seed=3), [f"t{i} {line}" for i, line in enumerate(lines(23, 3, seed=4))]
PAIR = {"id": [*map(str, range(23))], "text": SOURCES, "headline": TARGETS}
SHORT = lines(37, 4)
MODULE = '''"""A module."""
import x

def f(x):
    """Add one. More."""
    return x + 1

class A:
    async def g(self):
        """Ask
        twice? Yes.

        Later."""
        @cached
        def h(): ...
        return 2

    def none(self):
        return 3

    def only(self):
        """Has no body."""

def same(x):
    """Add one, again."""
    return x + 1
'''
FILES: Contents = {
    "plain/one.txt": plain(60),
    "plain/sub/two.txt.gz": gzip.compress(plain(40, seed=8, end="\r\n")),
    "plain/three.TXT": b"\xef\xbb\xbf" + plain(20, seed=9),
    "plain/four.md": plain(20, seed=10),
    "plain/Makefile": b"all:\n",
    "plain/LICENSE": b"free\n",
    "long/one.txt": plain(500, seed=11) + "é".encode() * 2001 + b"\nend without newline",
    "lines.jsonl": jsonl(id=[*range(37)], body=SHORT),
    "more.jsonl.zst": pyarrow.compress(jsonl(text=lines(21, 6, seed=5)), "zstd", asbytes=True),
    "table.csv.gz": gzip.compress(table(";", id=PAIR["id"], body=SOURCES)),
    "table.tsv": table("\t", body=SOURCES, id=PAIR["id"]),
    "rows.parquet": {"n": [*map(str, range(30))], "text": lines(30, 5, seed=6)},
    "own/a.lst": b"".join(b"- " + line.encode() + b"\n" for line in lines(25, 5, seed=12)),
    "own/b.txt": plain(9, seed=13),
    "own/c.rst": b"not read",
    "own/d.rst": b"nor this",
    "mixed/a.jsonl": jsonl(*({"text": "not this", "body": line} for line in lines(11, 4)), {"text": "the other"}, [1]),
    "mixed/b.json.gz": gzip.compress(b'{"meta": {"text": "nested"}}\n{"meta": 3}\n'),
    "mixed/c.csv": b"id,text\n1,a table\n2\n",
    "mixed/wiki_00": b"a line\n",
    "mixed/.d.jsonl": jsonl(body=["hidden"]),
    "mixed/e.txt": b"",
    "held.jsonl": jsonl(body=["held out", "held as well", SHORT[4]]),
    "pairs.csv": table(",", **PAIR),
    "pairs.jsonl": jsonl(**{key: values[::-1] for key, values in PAIR.items()}),
    "pairs.parquet": PAIR,
    "lib/a.py": "".join([MODULE, *(f'def f(x):\n    "Add {i}."\n    return x + {i}\n' for i in range(9))]).encode(),
    "lib/sub/b.py": b'x = 1\n\x0c\ndef late(x, y):\n    """Without end"""\n    return (x,\n            y)\n',
    "lib/empty.py": b"",
    "lib/test/c.py": b'def f(x):\n    """Skipped."""\n    return -x\n',
}  # fmt: skip


def bpe_with(*ends: str, special: bool = True) -> Tokenizer:
    """A token per byte, and more that may end a document."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(end, special=special) for end in ends])
    return tokenizer


def letters(unknown: str | None = "<unk>", last: int = 21) -> Tokenizer:
    """A vocabulary of a few letters."""
    vocabulary = {letter: i for i, letter in enumerate(" aeinorstuhlg")} | {"</s>": 20, "<unk>": last}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return tokenizer


def unigram(lower: bool = False) -> Tokenizer:
    """The end token is a piece of its vocabulary."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz<>/0123\u2581")]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def padded() -> Tokenizer:
    tokenizer = bpe_with("<eos>")
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=90)
    return tokenizer


LLAMA = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "\u2581": 3, "<0xC3>": 4, "<0x9F>": 5, "\u4e2d": 6, "plain": 8}
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "t5": lambda: byte_level(sentinels=True),
    "four": lambda: Tokenizer.from_str(byte_level(sentinels=True).to_str().replace("<extra_id_4>", "<other>")),
    "ends": lambda: bpe_with("</s>", "<eos>"),
    "not_special": lambda: bpe_with("</s>", "\u4e2d\u4e2d", special=False),
    "padded": padded,
    "late_pad": lambda: bpe_with("</s>", "<pad>"),
    "letters": letters,
    "wide": lambda: letters(last=70_000),
    "drops": lambda: letters(None),
    "piece": unigram,
    "lower": lambda: unigram(lower=True),
    "words": lambda: Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="<none>")),
    "unknown_end": lambda: Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="</s>")),
    "endless": lambda: Tokenizer(models.WordLevel({"a": 0, "b": 2}, unk_token="b")),
    "llama": lambda: Tokenizer(models.BPE(LLAMA, [], unk_token="<unk>", byte_fallback=True)),
    "trained": lambda: train(SHORT, 270),
    "trained_t5": lambda: train([*SHORT, "x" * 2500], 370, sentinels=True),
}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        columns = pyarrow.table(dict(content)) if isinstance(content, Mapping) else content
        pyarrow.parquet.write_table(columns, path, row_group_size=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts and tokenizers above."""
    base = tmp_path_factory.mktemp("recorded")
    for name, content in FILES.items():
        write(base / name, content)
    for name, make in TOKENIZERS.items():
        make().save(str(base / f"{name}.json"))
    return base


def normal(said: str, folder: Path) -> str:
    """A message without what differs between machines and versions of libraries."""
    said = said.replace(str(folder), "FOLDER").replace(str(Path.cwd()), "HERE")
    for name in TOKENIZERS:
        if (file := folder / f"{name}.json").exists():
            said = said.replace(bpe.sha256(Tokenizer.from_file(str(file)))[:12], f"<{name}>")
    said = re.sub(r"(?<=tokenizer )[0-9a-f]{12}|(?<=cache/)[0-9a-f]{16}|(?<=functions-)[0-9a-f]{16}", "HASH", said)
    return re.sub(r"((?:zst|gz|parquet): can't be read: )(?!no column|has ).*?(; correct|$)", r"\1...\2", said)


def said(folder: Path, call: Callable[..., object], *args: Any) -> Any:
    """What a call returns, as text or a list of texts, or its error with the kind."""
    try:
        found = call(*args)
    except UserError as error:
        return normal(f"{type(error).__name__}: {error}", folder)
    return [normal(str(one), folder) for one in found] if isinstance(found, list) else normal(str(found), folder)


def facts(meta: Meta, folder: Path) -> list[str]:
    """A prepared folder without hashes that depend on versions."""
    known = {name: value for name, value in vars(meta).items() if "sha256" not in name and value is not None}
    del known["made_from"], known["files"]
    files = sorted(file.name for file in folder.iterdir() if not file.name.startswith("packed"))
    sizes = [f"{name} {meta.files[name].bytes}" if name.endswith(".bin") else name for name in files]
    return [", ".join(f"{key} {value}" for key, value in known.items()), ", ".join(sizes)]


# --- configs ----------------------------------------------------------------------------------------------------

BYTES: dict[str, Any] = {"tokenizer.path": "@/bytes.json"}
SENTINELS: dict[str, Any] = {"tokenizer.path": "@/t5.json"}
T5: dict[str, Any] = {"model.family": "t5", "data.objective": "span_corruption", **SENTINELS}
COLUMNS: dict[str, Any] = {"data.source_key": "text", "data.target_key": "headline"}
PAIRS: dict[str, Any] = {"data.objective": "pairs", "data.target_len": 5, **SENTINELS, **COLUMNS}
BODY: dict[str, Any] = {"data.text_key": "body", "data.val_fraction": 0.25}
# the keys that differ from SHARED; @ is the folder of the texts
SHARED: dict[str, Any] = {"train.seq_len": 9, "sample.every": 0, "data.cache_dir": "@/cache", "data.val_fraction": 0.2}
CONFIGS: dict[str, dict[str, Any]] = {
    "files of a folder": {"data.path": "@/plain", **BYTES},
    "long text, trained": {"data.path": "@/long", "tokenizer.vocab_size": 290, "train.seq_len": 8},
    "several, one twice": {"data.path": ["@/plain/three.TXT", "@/plain/*.[tT]*", "@/own"], **BYTES},
    "more suffixes": {"data.path": "@/plain", "data.text_suffixes": [".MD"], "data.document_mask": True, **BYTES},
    "jsonl": {"data.path": "@/lines.jsonl", "data.document_mask": True, **BODY, **BYTES},
    "jsonl, best_fit": {"data.path": "@/lines.jsonl", "data.packing": "best_fit", **BODY, **BYTES, "train.seq_len": 16},
    "jsonl, best_fit, mask": {
        **{"data.path": "@/lines.jsonl", "data.packing": "best_fit", "data.document_mask": True},
        **{**BODY, "tokenizer.vocab_size": 270, "train.seq_len": 13},
    },
    "best_fit in windows of 5": {"data.path": "@/rows.parquet", "data.packing": "best_fit", **BYTES},
    "zst": {"data.path": "@/more.jsonl.zst", **BYTES},
    "csv": {"data.path": "@/table.csv.gz", **BODY, **BYTES},
    "tsv": {"data.path": "@/table.tsv", **BODY, **BYTES, "data.val_fraction": 0.05},
    "parquet": {"data.path": "@/rows.parquet", **BYTES},
    "an own reader": {"data.path": "@/own", "data.text_suffixes": ["tests.data.test_recorded_data:LIST"], **BYTES},
    "several keys, with errors": {
        **{"data.path": "@/mixed", "data.text_key": ["body", "text", "meta.text"], "data.text_suffixes": [""], **BYTES},
        **{"data.on_error": "skip", "data.cache_dir": "~/new/cache"},
    },
    "a tokenizer": {"data.path": "@/rows.parquet", "tokenizer.path": "@/ends.json"},
    "an end token": {"data.path": "@/rows.parquet", "tokenizer.path": "@/padded.json", "tokenizer.end_token": "<eos>"},
    "unknown tokens": {"data.path": "@/table.tsv", "tokenizer.path": "@/letters.json", **BODY},
    "ids above 65,535": {"data.path": "@/table.tsv", "tokenizer.path": "@/wide.json", **BODY},
    "mixture, trained": {
        **{"data.sources": {"@/lines.jsonl": 3, "@/table.tsv": 1.5}, "tokenizer.vocab_size": 280, **BODY},
        "data.document_mask": True,
    },
    "mixture with a prepared folder": {"data.sources": {"@/rows.parquet": 0.7, "@/prepared": 0.3}},
    "mixture with begin tokens": {
        **{"data.sources": {"@/rows.parquet": 0.5, "@/mixed": 0.2, "@/begun": 0.3}, "data.on_error": "skip"},
        **{"data.text_key": ["text", "body"], "data.document_mask": True},
    },
    "mixture, best_fit": {
        **{"data.sources": {"@/lines.jsonl": 2, "@/table.tsv": 0.5, "@/prepared": 0.25}, **BODY},
        "data.packing": "best_fit",
    },
    "prepared": {"data.path": "@/prepared", "run.seed": 5},
    "prepared, with its tokenizer": {
        **{"data.path": "~/prepared", "tokenizer.path": "~/ends.json", "tokenizer.end_token": "</s>"},
    },
    "spans": {"data.path": "@/rows.parquet", **T5, "train.seq_len": 12},
    "many spans": {
        **{"data.path": "@/plain", **T5, "data.noise_density": 0.4, "data.mean_span_length": 1.5},
        **{"train.seq_len": 13, "tokenizer.path": "@/four.json"},  # as many sentinels as spans
    },
    "spans of half": {"data.path": "@/table.tsv", **BODY, **T5, "data.noise_density": 0.5, "train.seq_len": 14},
    "mixture of spans, trained": {
        **{"data.sources": {"@/lines.jsonl": 1, "@/table.tsv": 2}, **BODY, **T5},
        **{"tokenizer.path": "", "tokenizer.vocab_size": 375, "data.noise_density": 0.25},
    },
    "pairs": {"data.path": "@/pairs.csv", "model.family": "t5", **PAIRS},
    "pairs of a decoder": {"data.path": "@/pairs.jsonl", **PAIRS, "data.source_prefix": "to: "},
    "pairs in windows of 7": {
        **{"data.path": "@/pairs.parquet", "model.family": "t5", **PAIRS, "train.seq_len": 25},
        "data.target_len": 30,
    },
    "blind pairs": {"data.path": "@/pairs.csv", "model.family": "t5", **PAIRS, "data.blind_source": True},
    "blind pairs of a decoder": {"data.path": "@/pairs.csv", **PAIRS, "data.blind_source": True, "run.seed": 3},
    "mixture of pairs": {"data.sources": {"@/pairs.csv": 1, "@/prepared_pairs": 3}, "model.family": "t5", **PAIRS},
    "pairs of an own reader, trained": {
        **{"data.path": "@/own/a.lst", "data.text_suffixes": ["tests.data.test_recorded_data:LIST"]},
        **{"model.family": "t5", **PAIRS, "tokenizer.path": "", "tokenizer.vocab_size": 370},
    },
    "default text": {**BYTES},
    "default pairs": {"data.objective": "pairs", "data.target_len": 7, "model.family": "t5", **SENTINELS},
}
COMMANDS = {  # that make what some configs read
    "begun": "@/more.jsonl.zst --tokenizer @/ends.json --end-token </s> --begin-token <eos> --val-fraction 0.3",
    "prepared": "@/more.jsonl.zst --tokenizer @/ends.json --end-token </s> --val-fraction 0.3",
    "prepared_pairs": "@/pairs.csv --source-key text --target-key id --tokenizer bytes --sentinels --val-fraction 0.2",
}
PATCHES: dict[str, list[tuple[Any, ...]]] = {
    "mixture, trained": [("torchtitan_lite.data.prepare.tokenizer.TRAINED_ON_BYTES", 1000)],  # a part of the text
    "best_fit in windows of 5": [(packing, "_WINDOW", 5)],
    "pairs in windows of 7": [(pairs, "WINDOW", 7), (pairs, "BLOCK", 2)],
}


def placed(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {placed(key, folder): placed(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [placed(item, folder) for item in value]
    return value.replace("@", str(folder)) if isinstance(value, str) else value


def letters_of(folder: Path, end: int) -> Callable[[Iterable[int]], str]:
    """A function that shows tokens: a letter for each, if they are bytes."""
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    special = {"\u0120": "_", bpe.PAD: "~", bpe.END_OF_DOCUMENT: "^"} | {
        bpe.sentinel(i): chr(0x2460 + i) for i in range(20)
    }
    shown = {i: special.get(name, name) for name, i in vocabulary.items()} | {end: "|", IGNORE: "-"}
    if sum(len(name) == 1 for name in vocabulary) < 256 or sum(len(name) in (2, 3) for name in vocabulary):
        return lambda tokens: " ".join(shown[i] if shown[i] in "~_|-" else str(i) for i in tokens)
    return lambda tokens: "".join(shown[i] for i in tokens)


def row_texts(micro: MicroBatch, text_of: Callable[[Iterable[int]], str]) -> str:
    parts = [micro.tokens, micro.targets, *([] if micro.positions is None else [micro.positions])]
    rows = zip(*(part.tolist() for part in parts), strict=True)
    return " / ".join(" > ".join([*map(text_of, row[:2]), *("".join(map(str, at)) for at in row[2:])]) for row in rows)


def batches(samples: Mixture, config: Config, text_of: Callable[[Iterable[int]], str]) -> list[str]:
    """The first batch, one into the second epoch, and one of it: of one rank, and of each of two and of three."""
    found, n = [], samples.n_samples
    is_format = config.data.text_key == "text" and config.data.objective == "causal" and len(samples.sources) == 1
    is_format = is_format and not config.data.document_mask and config.data.packing == "concat"
    loader = partial(Loader, samples, micro_batch_size=2, seed=config.run.seed, document_mask=config.data.document_mask)
    for first, size, world in ((0, 5, 1), (n - 2, 7, 2), (n + 3, 4, 3))[: 1 if is_format else 3]:
        for rank in range(world):
            batch = loader(rank=rank, world_size=world).batch(first, size)
            found += [
                f"samples {first} to {first + size - 1}, rank {rank} of {world}, {batch.global_tokens} tokens",
                *(row_texts(micro, text_of) for micro in batch.micro_batches),
                *[
                    f"sources {torch.cat([torch.as_tensor(micro.sources) for micro in batch.micro_batches]).tolist()}, "
                    f"tokens {[*batch.source_tokens.values()]}"
                ]
                * (len(samples.sources) > 1),
            ]
    return found


def recorded_config(config: Config, folder: Path) -> dict[str, Any]:
    said: list[str] = []
    data = prepare_all(config.data, config.tokenizer, said.append)
    text_of = letters_of(data.folder, data.end_token)
    found: dict[str, Any] = {"said": [*said, *data.notes]} if said or data.notes else {}
    for source in data.sources:
        found[f"{source.weight} of {source.name}"] = facts(source.meta, source.folder)
    hashes = (f"{key} {value}" for key, value in data.hashes().items())
    found["of all"] = [*hashes, f"{data.tokens('train')} {data.tokens('val')} {data.vocab_size} {data.end_token}"]
    for split in ("train", "val"):
        mixture = open_samples(data, split, config)
        for name, samples in zip(mixture.names, mixture.sources, strict=True):
            n = samples.n_samples
            shape = f"{n} samples of {samples.mean_tokens:.4f} tokens, {samples.seq_len} > {samples.target_len}"
            numbers = np.array([*range(min(n, 12)), *range(n, n + min(n, 12))])
            order = " ".join(map(str, samples.indices(numbers, config.run.seed).tolist()))
            found[f"{split} of {name}"] = [shape, order, *samples.notes]
        if split == "train":
            found["batches"] = batches(mixture, config, text_of)
        else:
            loader = Loader(mixture, micro_batch_size=3, rank=0, world_size=1, seed=0)
            found["val batch"] = [row_texts(micro, text_of) for micro in loader.batch(0, 3).micro_batches]
            found["of all"].append(f"{mixture.longest_prefix(4)} {mixture.longest_prefix(10**6)}")
    n = open_samples(data, "train", config).n_samples
    mixed = open_samples(data, "train", config), config.run.seed
    steps = {3: Made(range(4, 5), *mixed), 4: Made(range(n - 1, n + 1), *mixed)}  # into the second epoch
    sources = {source.folder: source for source in data.sources}
    record = Record([], config, data, sources, steps)
    found["which"] = [
        row.line() for row in which.rows(record, {s.folder: which.Documents(s) for s in data.sources}, range(3, 5))
    ]
    if config.data.objective == "pairs":
        asked = pairs.questions(open_samples(data, "val", config), 9, 0)
        prefix = pairs.source_prefix(data.folder)
        found["questions"] = [prefix, *(" > ".join(map(text_of, q)) for q in asked)]
    return json.loads(normal(json.dumps(found, ensure_ascii=False), folder))


def test_data_of_configs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder / "lib")})
    monkeypatch.setenv("HOME", str(folder))
    for out, command in COMMANDS.items():
        assert main([*placed(command, folder).split(), "--out", str(folder / out)]) == 0, capsys.readouterr().err
    found = {}
    for name, keys in CONFIGS.items():
        config = load(None, placed(SHARED | keys, folder)).config
        with monkeypatch.context() as patched:
            for patch in PATCHES.get(name, ()):
                patched.setattr(*patch)
            found[name] = recorded_config(config, folder)
    assert_recorded(found, RECORDS / "recorded_samples.json")


# --- numbers ----------------------------------------------------------------------------------------------------

WEIGHTS: list[list[float]] = [
    [0.7, 0.3],
    [140, 60],
    [2, 1, 1],
    [1, 1, 1],
    [5],
    [0.1, 0.25, 3.05],
    [1e-3, 2],
    [3, 1e-6],
    [1e-9, 4, 1],
]
SPANS = [(512, 0.15, 3.0), (512, 0.5, 3.0), (2, 0.15, 3), (3, 0.15, 3), (40, 0.3, 2.0), (9, 0.01, 1.0), (30, 0.5, 12.5)]
SKIPS: list[list[list[int]]] = [[], [[10, 20]], [[3, 5], [12, 14], [16, 25]]]


@dataclass
class Asked:
    """A loader that notes what it is asked for, and in which thread."""

    calls: list[str]

    def batch(self, first: int, size: int) -> Batch:
        self.calls.append(f"{first} {size} {threading.current_thread().name}")
        if first == 99:
            raise DataError(f"sample {first} can't be read")
        return Batch([], first)


def prefetched(asked: Sequence[tuple[int, ...]]) -> list[str]:
    calls: list[str] = []
    ahead = PrefetchingLoader(Asked(calls), torch.device("cpu"))  # type: ignore[arg-type]
    found = []
    for batch in asked:
        try:
            found.append(f"got {ahead.batch(*batch).global_tokens}")
        except DataError as error:
            found.append(str(error))
    ahead.close()
    return [*found, *calls]


def mixed(weights: list[float]) -> str:
    try:
        mixture = Mixture([], weights, [*map(str, range(len(weights)))])
    except ConfigError as error:
        return str(error)
    n = len(mixture.table)
    numbers = np.array([0, 1, n - 1, n, 2 * n + 1, 10**12 + 7])
    which, places = mixture.locate(numbers)
    parts = [
        n,
        mixture.table[:24],
        mixture.counts,
        [*mixture.positions(n // 2).values()],
        [*mixture.positions(3 * n + 1).values()],
        which,
        places,
    ]
    return " / ".join(" ".join(map(str, np.atleast_1d(part).tolist())) for part in parts)


def packed(lengths: list[int], seq_len: int) -> str:
    """The pieces of each sequence: the first token and the length."""
    pieces = packing._pieces(1, 1 + np.cumsum(lengths), seq_len)
    return " / ".join(" ".join(f"{a}+{n}" for a, n in row.tolist()) for row in packing._rows(pieces, seq_len))


def gaps(seq_len: int, density: float, mean: float) -> list[str]:
    lengths = span_lengths(seq_len, density, mean)
    masks = [spans.mask(lengths, key).astype(int).tolist() for key in ("0/7/3", "0/8/3", "None/7/3")]
    return [str(tuple(lengths)), *("".join(map(str, mask))[:80] for mask in masks)]


def test_numbers(tmp_path: Path) -> None:
    orders = [(1, 0), (2, 7), (3, 7), (4, 1), (5, 2), (16, 3), (17, 3), (100, -1), (1000, 0)]
    some = [0, 1, 2, 3, 4, 17, 99, 999, 1000, 10**15]
    text, marks = np.arange(20, 32), np.array([9, 8, 7, 6])
    cut = np.array([0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1], np.bool_)
    used, shapes = np.eye(24, dtype=np.bool_), [(0, 9), (1, 9), (8, 20), (9, 20), (20, 20), (0, 0)]
    loads = [(0, 4), (4, 4), (8, 4, 18), (12, 4, 18), (16, 2, 18), (50, 3), (53, 7), (99, 1), (60, 2, 62), (53, 3)]
    found = {
        "order": {f"{n}, {seed}": str(sample_indices(np.array(some), n, seed).tolist()) for n, seed in orders},
        "mixtures": {str(weights): mixed(weights) for weights in WEIGHTS},
        "spans": {str(one): gaps(*one) for one in SPANS},
        "replaced": [str(spans.replaced(text, one, marks)) for one in (cut, ~cut)],
        "packed": [packed([3, 9, 4, 1, 7, 2, 2, 5, 16, 8], n) for n in (1, 4, 7, 8, 20)],
        "skipped": {
            str(skips): str([DataConfig(skip_samples=skips).position(first, 4) for first in range(32)])
            for skips in SKIPS
        },
        "columns": str([pairs._columns(used[:n, :width]) for n, width in shapes]),
        "prefetched": prefetched(loads),
        # what is prepared is still good in a later version
        "hashes": [
            (tmp_path / "a").write_bytes(bytes(range(256)) * 1500),
            token_files.spots(tmp_path / "a"),
            token_files.tokens_hash({f"{n}.{end}": File(9, f"of {n}", "") for n in "ba" for end in ("idx", "bin")}),
        ],
        "byte sizes": [str(token_files.token_dtype(n)) for n in (257, 2**16, 2**16 + 1)],
    }
    assert_recorded(found, RECORDS / "recorded_numbers.json")
