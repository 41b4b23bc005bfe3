"""Wrong options and damaged files give a message and an exit code, never a traceback.

Commands are called in this process, so an exception that reaches a test is a bug. The sample of cases is fixed.
"""

import random
import shutil
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import train
from tests.helpers import TINY, options, python, refused
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config import schema
from torchtitan_lite.data.prepare import __main__
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.tools import checkpoints, generate, migrate_accelerate
from torchtitan_lite.tools.report import report

Main = Callable[[Sequence[str]], int]
MODEL = options(TINY)

WORDS = ["", "x", "-1", "0", "1.5", "1e12", "nan", "inf", "true", "[]", "[1, 2]", "['a']", "{a = 1}", "*", "~", "file"]


def sample(cases: Sequence[Any], n: int) -> list[Any]:
    """Some of the cases, always the same."""
    return random.Random(0).sample(cases, n)


def code_of(main: Main, argv: Sequence[str]) -> int:
    try:
        code: Any = main(argv)
    except SystemExit as error:  # argparse
        code = error.code
    assert code in (0, 1, 2), f"exit code {code} of {argv!r}"
    return int(code)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command writes is not in the repository, and "~" is no large folder in which it looks for text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("file").write_text("{}")


# --- the config -------------------------------------------------------------------------------------------------


def test_wrong_values_on_the_command_line_never_raise() -> None:
    words = [f"--{key}={word}" for key in (*schema.known_keys(), "config", "train.x") for word in WORDS]
    for word in ("--config", *WORDS, *sample(words, 60)):
        code_of(train.main, ["--check-config", *MODEL, word])


# --- the other commands -----------------------------------------------------------------------------------------

TEXT = "".join(random.Random(1).choices(string.ascii_lowercase + "  \n", k=6000))


@pytest.fixture(scope="module")
def run(finished: Path, sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside this run: one with sharded checkpoints, a Hugging Face export, a prepared folder, a text and a YAML."""
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(sharded, folder / "sharded")
    run = Path(shutil.copytree(finished, folder / "run"))
    hf.export(run, folder / "hf")
    (folder / "text.txt").write_text(TEXT)
    assert __main__.main([str(folder / "text.txt"), "--out", str(folder / "data"), "--tokenizer", "bytes"]) == 0
    (folder / "accelerate.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  a: 1\n")
    return run


# --- damaged files ----------------------------------------------------------------------------------------------


def damaged(good: bytes) -> list[bytes]:
    """An empty file, one that was cut off, what a download may give instead, and a flipped bit."""
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    return [b"", good[:middle], b"<!DOCTYPE html>", b"{}", b"[]", flipped]


def commands(folder: Path) -> list[tuple[Main, list[str], tuple[int, ...]]]:
    """The commands that read a folder, and their exit codes if a file in it is damaged."""
    speak, checked = ["--prompt=a", "--max-tokens=1"], ["--check-config", *MODEL]
    if folder.name == "data":
        return [
            (__main__.main, ["--verify", str(folder)], (0, 1, 2)),
            (train.main, [*checked, f"--data.path={folder}"], (0, 1, 2)),
        ]
    if folder.name == "hf":
        weights = [f"--model.init_from={folder}", f"--tokenizer.path={folder / 'tokenizer.json'}"]
        return [
            (checkpoints.main, ["import", str(folder)], (0, 1, 2)),
            (generate.main, [str(folder), *speak], (0, 1, 2)),
            (train.main, [*checked, *weights], (0, 1, 2)),
        ]
    run = folder.parent.parent
    return [
        (checkpoints.main, ["verify", str(folder)], (1,)),
        (checkpoints.main, ["inspect", str(folder)], (0, 1, 2)),
        (checkpoints.main, ["export", str(folder), f"out-{run.name}"], (1, 2)),
        (generate.main, [str(folder), *speak, f"--tokenizer={run / 'tokenizer.json'}"], (1, 2)),
    ]


FULL, SHARDED = "run/checkpoints/step-00000004", "sharded/checkpoints/step-00000004"
FILES = [
    *(f"{FULL}/{name}" for name in (storage.MANIFEST, storage.STATE, "*.safetensors")),
    *(f"{SHARDED}/{name}" for name in (storage.MANIFEST, storage.STATE, "*.safetensors")),
    *("hf/config.json", "hf/tokenizer.json", "hf/model.safetensors", "data/meta.json"),
]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_never_raises_and_a_damaged_checkpoint_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    """By every command that opens it."""
    file = min(Path(shutil.copytree(run.parent, tmp_path / "damaged")).glob(name))
    for content in damaged(file.read_bytes()):
        file.write_bytes(content)
        for main, words, codes in commands(file.parent):
            assert code_of(main, words) in codes


def test_what_is_whole_is_read_by_every_command(run: Path) -> None:
    """Otherwise the tests above would be meaningless."""
    for folder in (FULL, SHARDED, "hf", "data"):
        for main, words, _ in commands(run.parent / folder):
            assert main(words) == 0, words
    assert generate.main([str(run), "--prompt=a", "--max-tokens=1"]) == 0
    assert report.main([str(run), "--out=report.html"]) == 0
    assert migrate_accelerate.main([str(run.parent / "accelerate.yaml")]) == 0


DOORS = "evaluate", "generate", "migrate", "plan", "report", "status", "which", "data.prepare"


@pytest.mark.parametrize("name", [*(f"-m torchtitan_lite.{door}" for door in DOORS), "train.py", "checkpoint.py"])
def test_a_front_door_ends_with_the_exit_code_of_its_command(name: str) -> None:
    refused(python("--nosuch=1", script=name))
