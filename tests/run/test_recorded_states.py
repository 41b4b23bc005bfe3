"""What each command says of a run in an unusual state, and what it leaves: recorded_states.json, by state.

Nothing else holds: what each command says of these states, and which files it leaves; read their diffs. A row that is
missing is that of "whole"; hashes are left out. test_checkpoint.py and test_faults.py hold that damage is found and
nothing saved is lost.
"""

import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch import distributed

import train
from tests.helpers import checkpoint, ranks, succeeded
from tests.recorded import assert_recorded
from tests.tools.test_recorded_commands import COMMANDS, Place, write_texts
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.run import attempts
from torchtitan_lite.tools.report import report

TRAIN = """ --run.out_dir=FOLDER --run.device=cpu --run.threads=1 --model.family=llama --model.dim=8 --model.n_layers=1
--model.n_heads=1 --model.max_seq_len=16 --train.seq_len=16 --train.micro_batch_size=2 --train.global_batch_size=2
--optim.name=sgd --optim.lr=0.5 --optim.warmup_steps=2 --optim.schedule=constant --eval.every=2 --eval.samples=2
--checkpoint.every=2 --checkpoint.keep_latest=0 --log.every=1 --sample.every=0 --data.path=FOLDER/data"""
SOURCES = {  # runs, each with the checkpoints of the steps 2, 4 and 6; the best is that of step 4
    "run": "--run.name=run --train.steps=6",
    "parts": "--run.name=parts --train.steps=6 --checkpoint.state_dict=sharded --model.tie_embeddings=false",
    "begun": "--run.name=begun --train.steps=8 --checkpoint.resume=FOLDER/run --optim.lr=0.25",
}
# commands that write nothing into the run, and those that train; of the run RUN
LOOKS = """
status RUN
report RUN --table
checkpoint verify RUN
checkpoint inspect RUN
checkpoint export RUN hf
checkpoint export RUN hf --best
generate RUN --prompt x --max-tokens=1
generate RUN --best --prompt x --max-tokens=1
which RUN --step=5
train GIVEN LONGER --check-config"""
SHORT = """
status RUN
report RUN --table
checkpoint verify RUN
generate RUN --prompt x --max-tokens=1
train GIVEN LONGER --check-config"""
UNCHECKED = SHORT.replace(" --check-config", "")
DATA = "evaluate RUN\nwhich RUN --step=5\ntrain GIVEN LONGER --check-config"
FORKS = "\ntrain GIVEN --run.name=fork --checkpoint.resume=FOLDER/RUN --train.steps=7 --optim.lr=0.1"
WEIGHTS = "\ntrain GIVEN --run.name=new --model.init_from=FOLDER/RUN --train.steps=1 --optim.warmup_steps=0"
AGAIN = "\ntrain GIVEN LONGER"
REPLAY = "\ntrain GIVEN --replay=6"
ALL = LOOKS + "\nevaluate RUN" + REPLAY + FORKS + WEIGHTS + AGAIN

Change = Callable[[Path], Any]


def file(step: int, name: str = "model.safetensors") -> Callable[[Path], Path]:
    return lambda run: checkpoint(run, step) / name


def flip(where: Callable[[Path], Path]) -> Change:
    """Another last byte of a file."""
    return lambda run: where(run).write_bytes(where(run).read_bytes()[:-1] + b"#")


def gone(*names: str) -> Change:
    return lambda run: [(shutil.rmtree if (run / name).is_dir() else os.unlink)(run / name) for name in names]


def moved(old: str, new: str) -> Change:
    return lambda run: (run / old).rename(run / new)


def written(name: str, text: str) -> Change:
    def change(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    return change


def edited(name: str, old: str, new: str) -> Change:
    return lambda run: (run / name).write_text(re.sub(old, new, (run / name).read_text(), flags=re.S))


def several(*changes: Change) -> Change:
    return lambda run: [change(run) for change in changes]


KILLED = several(edited("run.json", "complete", "running"), edited("attempts.jsonl", r"\n[^\n]*\n$", "\n"))
STEP = "checkpoints/step-0000000"
TORN = "checkpoints/.tmp-step-00000008-0a1b2c3d/model.safetensors"
OTHER = "FOLDER/pairs.jsonl --text-key q --tokenizer bytes --out FOLDER/data"
# by name: the run, what happens to it, and the commands
STATES: dict[str, tuple[str, Change, str]] = {
    "whole": ("run", several(), ALL + FORKS.replace("fork ", "averaged --optim.ema_decay=0.6 ")),
    "the newest has another byte": ("run", flip(file(6)), ALL),
    "the newest lacks its optimizer": (
        "run",
        gone(f"{STEP}6/optimizer.safetensors"),
        SHORT + AGAIN + " --optim.lr=0.1",
    ),
    "the newest has a file of a wrong size": ("run", lambda run: os.truncate(file(6)(run), 99), SHORT),
    "the newest has another state": ("run", flip(file(6, "state.json")), UNCHECKED),
    "the newest has half a manifest": ("run", lambda run: os.truncate(file(6, "manifest.json")(run), 200), SHORT),
    "the newest lacks its manifest": ("run", several(KILLED, gone(f"{STEP}6/manifest.json")), SHORT + WEIGHTS + AGAIN),
    "killed in a save": (
        "run",
        several(KILLED, gone(f"{STEP}6"), written(TORN, "half"), written(TORN.replace("tmp", "trash"), "half")),
        LOOKS + AGAIN,
    ),
    "killed in the first save": ("run", several(KILLED, gone("checkpoints"), written(TORN, "half")), LOOKS + AGAIN),
    "no checkpoint yet": ("run", gone("checkpoints"), SHORT),
    "the newest two are damaged": (
        "run",
        several(flip(file(6)), gone(f"{STEP}4/state.json")),
        LOOKS + REPLAY + AGAIN + " --checkpoint.keep_latest=1",
    ),
    "all are damaged": (
        "run",
        several(flip(file(6)), flip(file(4, "manifest.json")), gone(f"{STEP}2/model.safetensors")),
        ALL,
    ),
    "only a folder without a manifest": (
        "run",
        several(gone(f"{STEP}2", f"{STEP}4", f"{STEP}6/manifest.json"), written("checkpoints/step-9/notes", "")),
        SHORT,
    ),
    "the best is deleted": ("run", gone(f"{STEP}4"), LOOKS),
    "the best is damaged": ("run", flip(file(4)), LOOKS + REPLAY),
    "in use": (
        "run",
        several(KILLED, written(".lock-holder", "process 7 on n1"), lambda run: FileLock(run / ".lock").acquire()),
        LOOKS + FORKS + AGAIN,
    ),
    "it failed, and would again": (
        "run",
        several(
            edited("run.json", "complete(.*)false", r"failed\1true"), edited("run.json", '""', '"step 6: a spike"')
        ),
        SHORT + "\ntrain GIVEN\ntrain GIVEN --retry",
    ),
    "it failed, without attempts": (
        "run",
        several(edited("run.json", "complete(.*)false", r"failed\1true"), gone("attempts.jsonl")),
        "train GIVEN",
    ),
    "without run.json": ("run", gone("run.json"), SHORT + AGAIN),
    "half a run.json": ("run", lambda run: os.truncate(run / "run.json", 9), SHORT),
    "without attempts": ("run", gone("attempts.jsonl"), SHORT + AGAIN),
    "without records": ("run", gone("metrics.jsonl"), LOOKS),
    "a record is cut off": ("run", lambda run: os.truncate(run / "metrics.jsonl", 2000), SHORT + AGAIN),
    "without config.toml and tokenizer": (
        "run",
        gone("config.toml", "tokenizer.json"),
        LOOKS + "\nevaluate RUN" + WEIGHTS,
    ),
    "its data is moved": ("run", moved("../data", "../other"), DATA + REPLAY + AGAIN),
    "its data is other text": (
        "run",
        several(gone("../data"), lambda run: prepared(run.parent, OTHER)),
        DATA + REPLAY + FORKS + AGAIN,
    ),
    "its data is damaged": ("run", lambda run: os.truncate(run / "../data/train.bin", 500), DATA + AGAIN),
    "its data lacks meta.json": ("run", gone("../data/meta.json"), DATA + AGAIN),
    "a shard has another byte": ("parts", flip(file(6, "shard-00000-of-00001.safetensors")), LOOKS),
    "a shard is gone": ("parts", gone(f"{STEP}6/shard-00000-of-00001.safetensors"), SHORT + AGAIN),
    "a fork whose source is gone": ("begun", gone("../run"), LOOKS + REPLAY.replace("6", "8") + AGAIN),
    "a fork whose checkpoint is damaged": ("begun", flip(file(8)), LOOKS + REPLAY.replace("6", "8") + FORKS + AGAIN),
    "a fork with a folder without a manifest": ("begun", gone(f"{STEP}8/manifest.json"), SHORT),
    "it is finished, and a save was cut off": ("run", written(TORN, "half"), "train GIVEN"),
    "a fork before its first save, whose source is damaged": (
        "begun",
        several(KILLED, gone("checkpoints"), lambda run: flip(file(6))(run.parent / "run")),
        SHORT + REPLAY.replace("6", "8") + AGAIN,
    ),
    "a fork before its first save, whose source is gone": (
        "begun",
        several(gone("checkpoints", "../run")),
        SHORT + AGAIN,
    ),
}
# what no state changes, in the lines of a start, of a step and of `inspect`
DROPPED = r"(?m)^(torchtitan|model |batch |data  |fsdp |next |done |eval |     |\.{3} ).*\n?|  grad_norm.*|[0-9a-f]{64}"


def prepared(folder: Path, line: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert prepare(Place(folder).words(line)) == 0


def contents(folder: Path) -> dict[str, bytes]:
    """The files, without those that every start writes."""
    return {
        str(one.relative_to(folder)): one.read_bytes()
        for one in folder.rglob("*")
        if one.is_file() and one.name not in ("train.log", ".lock", ".lock-holder")
    }


def changed(made: dict[str, bytes], before: dict[str, bytes], now: dict[str, bytes]) -> list[str]:
    """New (+), lost (-) and other (~) files by folder; those that are as they were made have a =."""
    found: dict[str, list[str]] = {}
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            above, _, own = name.rpartition("/")
            sign = "+" if name not in before else "-" if name not in now else "~"
            found.setdefault(f"{sign} {above}: ", []).append(own + "=" * (made.get(name) == now.get(name)))
    return [key + " ".join(names) for key, names in found.items()]


def shorter(result: Any) -> Any:
    if isinstance(result, dict):
        return {key: shorter(value) for key, value in result.items()}
    return re.sub(DROPPED, "", result) if isinstance(result, str) else result


def main(argv: list[str]) -> int:
    """All of it in this one process: `FOLDER`, which gets said.json. A row that is as in a whole run is left out."""
    made, folder = Path(argv[0]) / "made", Path(argv[0]) / "place"
    folder.mkdir()
    write_texts(folder)
    prepared(folder, "FOLDER/news.jsonl --tokenizer=bytes --val-fraction=0.05 --out FOLDER/data")
    place, commands = Place(folder), COMMANDS | {"train": train.main, "report": report.main}
    for name, options in SOURCES.items():
        sys.argv = ["train.py", f"--run.name={name}"]
        place.call("train", train.main, f"{TRAIN} {options}")
        edited("metrics.jsonl", r'"step": 4, "val_loss": \d', '"step": 4, "val_loss": 1')(folder / name)
    folder.rename(made)
    whole, found = contents(made), dict[str, dict[str, Any]]()
    for state, (name, change, lines) in STATES.items():
        shutil.rmtree(folder, ignore_errors=True)
        os.chdir(shutil.copytree(made, folder))
        held, said = change(folder / name), found.setdefault(state, {})
        before = contents(folder)
        given = {
            "RUN": name,
            "GIVEN": f"{TRAIN} {SOURCES[name]}",
            "LONGER": f"--train.steps={9 if name == 'begun' else 7}",
        }
        for line in lines.strip().splitlines():
            command, words = line.split(" ", 1)
            sys.argv = ["train.py", f"--run.name={name}"]
            for key, text in given.items():
                words = words.replace(key, text)
            place.call(command, commands[command], words)
            if distributed.is_initialized():  # after an error, which would end the process
                distributed.destroy_process_group()
            now, (_, result) = contents(folder), place.said.popitem()
            shown = [shorter(result), *changed(whole, before, now)]
            if shown != found["whole"].get(line):
                said[line] = shown
            for new in ("hf", "fork", "new"):
                shutil.rmtree(folder / new, ignore_errors=True)
            before = {key: content for key, content in now.items() if (folder / key).exists()}
        said["attempts"] = [
            f"{each.step}, {each.ended or 'killed'} {each.last_step} {each.forked_from}"
            for each in attempts.read(folder / name)
        ]
        del held
    (Path(argv[0]) / "said.json").write_text(json.dumps(found).replace(str(folder), "FOLDER"))
    return 0


def test_each_command_in_each_state(tmp_path: Path) -> None:
    succeeded(ranks(1, str(tmp_path), entry="tests.run.test_recorded_states"))
    found = json.loads((tmp_path / "said.json").read_text())
    assert_recorded(found, Path(__file__).with_name("recorded_states.json"))
