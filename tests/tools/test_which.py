"""Which documents a step saw: held against what the loader gave, and against the lines of the original files."""

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from torchtitan_lite.checkpointing.compatibility import values_to_match
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.data.token_files import TokenFiles, read_meta
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.run import attempts
from torchtitan_lite.tools.incidents.record import read_record
from torchtitan_lite.tools.incidents.which import main as which

MARKER = "MARKER-OF-A-POISONED-DOCUMENT"


def text_of(i: int) -> str:
    """The texts have one to 20 lines; three of them have the marker, where it is not shown by their beginning."""
    lines = "".join(f"line {j} of document {i} is about {i * 7919 % 1009}\n" for j in range(1 + i * 13 % 20))
    return lines + (f"{MARKER}\n" if i in (40, 90, 91) else "")


TEXTS = [text_of(i) for i in range(150)]
PAIRS = [{"source": f"source {i} " * (i % 7 + 1), "target": f"target {i}"} for i in range(200)]
PAIR_KEYS = "--source-key=source", "--target-key=target"


def write_jsonl(file: Path, texts: list[str]) -> Path:
    # with an empty line after each text: documents and lines have other numbers
    content = "".join(json.dumps({"text": text}) + "\n\n" for text in texts).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def prepared(source: Path, out: Path, *more: str) -> Path:
    assert prepare([str(source), "--out", str(out), "--tokenizer", "bytes", *more]) == 0
    return out


def documents(folder: Path, split: str) -> Iterator[tuple[str, int, str]]:
    """The file, the line or row, and the text of each document, read from the files by their format alone."""
    files = json.loads((folder / "origins.json").read_bytes())
    origins = np.fromfile(folder / f"{split}.origins", np.int64).tolist()
    ends = np.fromfile(folder / f"{split}.idx", np.int64).tolist()
    tokens = np.fromfile(folder / f"{split}.bin", np.uint16)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for origin, begin, end in zip(origins, [1, *ends], ends, strict=False):
        yield files[origin >> 36][0], origin & (1 << 36) - 1, tokenizer.decode(tokens[begin : end - 1].tolist())


# --- preparation ------------------------------------------------------------------------------------------------


def test_every_document_knows_its_file_and_place(tmp_path: Path) -> None:
    """Line 2 i + 1 of a .jsonl with empty lines, the first line of a text in a table, or the row of a parquet file."""
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", TEXTS[:40])
    write_jsonl(tmp_path / "in/b.jsonl.gz", TEXTS[40:80])
    expected = [("a.jsonl", 2 * i + 1, text) for i, text in enumerate(TEXTS[:40])]
    expected += [("b.jsonl.gz", 2 * i + 1, text) for i, text in enumerate(TEXTS[40:80])]
    with (tmp_path / "in/c.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("id", "text"), *enumerate(TEXTS[80:110])])
    line = 2
    for text in TEXTS[80:110]:
        expected.append(("c.csv", line, text))
        line += text.count("\n") + 1
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[110:]}), tmp_path / "in/d.parquet")
    expected += [("d.parquet", row, text) for row, text in enumerate(TEXTS[110:], 1)]
    (tmp_path / "in/e.jsonl").write_text('{"text": "the only one"}\n{"text": broken\n{"text": "after a broken one"}\n')
    expected += [("e.jsonl", 1, "the only one"), ("e.jsonl", 3, "after a broken one")]
    out = prepared(tmp_path / "in", tmp_path / "out", "--val-fraction", "0.3", "--on-error=skip")
    found = [(Path(file).name, *more) for split in ("train", "val") for file, *more in documents(out, split)]
    assert sorted(found) == expected
    units = json.loads((out / "origins.json").read_bytes())
    lines = dict.fromkeys(("a.jsonl", "b.jsonl.gz", "c.csv", "e.jsonl"), "line")
    assert {Path(file).name: unit for file, unit in units} == lines | {"d.parquet": "row"}


# --- from steps to documents ------------------------------------------------------------------------------------


def config_of(path: Path | dict[str, float], **values: Any) -> Config:
    """A tiny run: steps of 6 samples, more than two epochs of them."""
    tree: dict[str, dict[str, Any]] = {
        "data": {"sources": path} if isinstance(path, dict) else {"path": str(path)},
        "train": {"seq_len": 64, "steps": 500, "global_batch_size": 6},
        "model": {"max_seq_len": 80},
        "run": {"seed": 3},
    }
    for key, value in values.items():
        section, name = key.split("__")
        tree[section][name] = value
    return Config.model_validate(tree)


def begin(run: Path, config: Config, step: int = 0, samples: int = 0, forked_from: str = "") -> Path:
    """The next attempt of a run."""
    run.mkdir(exist_ok=True)
    about: dict[str, Any] = {"command": [], "config": flatten(config), "setting": {}, "forked_from": forked_from}
    about |= {"must_match": values_to_match(config, prepare_all(config.data, config.tokenizer, print)), "world_size": 1}
    about |= {"hosts": [], "versions": {}, "git": {}, "device": "cpu", "time": 0.0, "tasks": {}}
    number = len(attempts.read(run)) + 1
    attempts.add(run, {"attempt": number, "step": step, "samples": samples, **about})
    return run


def seen(run: Path, *arguments: str) -> dict[str, Any]:
    out = run / "which.json"
    assert which([str(run), *arguments, "--json", str(out)]) == 0
    return dict(json.loads(out.read_bytes()))


def batch_of(config: Config, step: int) -> list[tuple[list[int], list[int]]]:
    """The tokens and targets of each sample of a step, as the loader gives them to one rank."""
    samples = open_samples(prepare_all(config.data, config.tokenizer, print), "train", config)
    first, size = sum(config.train.batch_size(n) for n in range(1, step)), config.train.batch_size(step)
    loader = Loader(samples, micro_batch_size=1, rank=0, world_size=1, seed=config.run.seed)
    micro_batches = loader.batch(first, size).micro_batches
    return [(micro.tokens[0].tolist(), micro.targets[0].tolist()) for micro in micro_batches]


def read_parts(rows: list[dict[str, Any]], folder: Path) -> list[list[int]]:
    """The tokens of each part, from the token files."""
    stream = TokenFiles(folder, read_meta(folder), "train")
    for row in rows:
        assert row["stop"] - row["begin"] == row["end"] - row["first"]
        assert 0 <= row["first"] < row["end"] <= row["tokens"]
    return [stream.read(row["begin"], row["stop"]).tolist() for row in rows]


def check_concat(parts: list[list[int]], tokens: list[int], targets: list[int], end: int) -> None:
    together = [token for part in parts for token in part]
    assert together in ([*tokens, targets[-1]], [*tokens[1:], targets[-1]])
    assert len(together) > len(tokens) or tokens[0] == end


def check_best_fit(parts: list[list[int]], tokens: list[int], targets: list[int], end: int) -> None:
    at = 0
    for part in parts:  # a piece from within a document is read with the token before it
        predicted = part if targets[at : at + len(part)] == part else part[1:]
        assert targets[at : at + len(predicted)] == predicted
        at += len(predicted)
    assert set(targets[at:]) <= {IGNORE}


def check_spans(parts: list[list[int]], tokens: list[int], targets: list[int], end: int) -> None:
    text = Counter(token for part in parts for token in part if token != end)
    assert text == Counter(token for token in (*tokens, *targets) if 3 <= token < 259 and token != end)


def check_pairs(parts: list[list[int]], tokens: list[int], targets: list[int], end: int) -> None:
    source, target = parts
    assert [*source, end] == [token for token in tokens if token][: len(source) + 1]
    assert [*target, end] == [token for token in targets if token != IGNORE]


Check = Callable[[list[list[int]], list[int], list[int], int], None]
CASES: dict[str, tuple[dict[str, Any], Check]] = {
    "concat": ({}, check_concat),
    "best_fit": ({"data__packing": "best_fit", "data__document_mask": True}, check_best_fit),
    "batch_schedule": ({"train__batch_schedule": [[3, 4], [20, 9]]}, check_concat),
    "span_corruption": ({"data__objective": "span_corruption", "model__family": "t5"}, check_spans),
    "pairs": ({"data__objective": "pairs", "data__target_len": 16, "model__family": "t5"}, check_pairs),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("which")
    return prepared(write_jsonl(folder / "in.jsonl", TEXTS), folder / "out")


@pytest.mark.parametrize("case", [*CASES, "mixture"])
def test_a_step_holds_what_the_loader_gives(case: str, texts: Path, tmp_path: Path) -> None:
    """Some steps of several passes, against what the loader gives, and against the lines of the text."""
    more, check = CASES.get(case, ({}, check_concat))
    lines: dict[str, dict[int, Any]] = {"in.jsonl": {2 * i + 1: text for i, text in enumerate(TEXTS)}}
    path: Path | dict[str, float] = texts
    if case == "span_corruption":
        path = prepared(write_jsonl(tmp_path / "in.jsonl", TEXTS), tmp_path / "out", "--sentinels")
    elif case == "pairs":
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
        path = prepared(tmp_path / "in.jsonl", tmp_path / "out", *PAIR_KEYS)
        lines["in.jsonl"] = dict(enumerate(PAIRS, 1))
    elif case == "mixture":
        other = prepared(write_jsonl(tmp_path / "b.jsonl", [f"other {t}" for t in TEXTS]), tmp_path / "b")
        path = {str(texts): 0.7, str(other): 0.3}
        lines["b.jsonl"] = {line: f"other {text}" for line, text in lines["in.jsonl"].items()}
    config = config_of(path, **more)
    samples = open_samples(prepare_all(config.data, config.tokenizer, print), "train", config).n_samples
    assert samples < 498 * 6, "one pass only"
    run, seen_files = begin(tmp_path / "run", config), set()
    for step in (1, 2, 25, 499):
        content = seen(run, "--step", str(step))
        ((_, first, stop),) = content["steps"]
        for sample, (tokens, targets) in zip(range(first, stop), batch_of(config, step), strict=True):
            rows = [row for row in content["documents"] if row["sample"] == sample]
            (folder,) = {Path(row["source"]) for row in rows}
            check(read_parts(rows, folder), tokens, targets, read_meta(folder).end_token)
            for row in rows:
                seen_files.add(file := Path(row["file"]).name)
                text = lines[file][row["place"]]
                text = text[row["side"]] if row["side"] else text
                assert row["text"]
                assert text[row["first"] :].startswith(row["text"])
    assert seen_files == lines.keys()


def test_a_text_is_found_at_the_steps_that_hold_its_documents(texts: Path, tmp_path: Path) -> None:
    for case in ("best_fit", "batch_schedule"):
        config = config_of(texts, **(CASES[case][0] | {"train__steps": 150}))
        run = begin(tmp_path / case, config)
        found = seen(run, "--find", MARKER)["documents"]
        every = seen(run, "--step", "1", "--to", "150")["documents"]
        lines = {2 * i + 1 for i in (40, 90, 91)}
        held_out = {place for _, place, text in documents(texts, "val") if MARKER in text}
        assert {row["place"] for row in found} == lines - held_out
        assert found == [row for row in every if row["place"] in lines], case


def test_each_step_is_of_the_last_attempt_that_began_before_it(texts: Path, tmp_path: Path) -> None:
    """A resume with other sizes, one after a killed attempt, and one from an older checkpoint, as the newest is bad."""
    sizes = {1: 6, 2: 4, 3: 8, 4: 5}
    configs = {n: config_of(texts, train__global_batch_size=size) for n, size in sizes.items()}
    run = begin(tmp_path / "run", configs[1])

    def starts(*steps: int) -> list[int]:
        record = read_record(run)
        assert all(len(record.samples[step]) in sizes.values() for step in steps)
        return [record.samples[step].start for step in steps]

    assert starts(1, 11, 12) == [0, 60, 66]
    begin(run, configs[2], 10, 60)
    assert starts(1, 10, 11, 12) == [0, 54, 60, 64]
    begin(run, configs[3], 10, 60)
    with (run / attempts.FILE).open("a") as file:
        file.write('{"attempt": 4, "st')  # killed as it began
    assert starts(1, 10, 11, 12) == [0, 54, 60, 68]
    begin(run, configs[4], 4, 24)
    assert starts(1, 4, 5, 10, 11) == [0, 18, 24, 49, 54]
    assert seen(run, "--step", "3", "--to", "6")["steps"] == [[3, 12, 18], [4, 18, 24], [5, 24, 29], [6, 29, 34]]
