"""Wrong options and damaged files at every front door give a message and an exit code, never a traceback.

Commands are called in this process, so an exception that reaches a test is a bug. The sample of cases is fixed.
"""

import contextlib
import json
import random
import shutil
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import checkpoint as dcp

import train
from torchtitan_lite import models, plan
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.dcp_storage import ShardWriter
from torchtitan_lite.checkpointing.safetensors_file import specs_of, write_tensors
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.storage import Manifest
from torchtitan_lite.checkpointing.tensor_names import by_name, own_tensors
from torchtitan_lite.config import cli, schema, toml
from torchtitan_lite.data.prepare import __main__
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.run import attempts
from torchtitan_lite.tools import checkpoints, generate, migrate_accelerate
from torchtitan_lite.tools.report import report

Main = Callable[[Sequence[str]], int]
MODEL = ["--model.dim=16", "--model.n_layers=1", "--model.n_heads=2", "--model.n_kv_heads=2", "--model.hidden_dim=16"]
MODEL += ["--tokenizer.vocab_size=257", "--model.max_seq_len=32", "--train.seq_len=32"]

WORDS = ["", "x", "-1", "0", "1.5", "1e12", "nan", "inf", "true", "[]", "[1, 2]", "['a']", "{a = 1}", "*", "~", "file"]


def sample(cases: Sequence[Any], n: int) -> list[Any]:
    """Some of the cases, always the same."""
    return random.Random(0).sample(cases, n)


def refused_or_fine(main: Main, argv: Sequence[str]) -> None:
    try:
        code: Any = main(argv)
    except SystemExit as error:  # argparse
        code = error.code
    assert code in (0, 1, 2), f"exit code {code} of {argv!r}"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command writes is not in the repository."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("{}")


# --- the config -------------------------------------------------------------------------------------------------


def test_wrong_values_on_the_command_line_never_raise() -> None:
    words = [f"--{key}={word}" for key in (*schema.known_keys(), "config", "train.x") for word in WORDS]
    for word in ("--config", *WORDS, *sample(words, 60)):
        refused_or_fine(train.main, ["--check-config", *MODEL, word])


def test_damaged_config_files_never_raise(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    good = toml.to_toml(cli.parse(["--run.name=a"], world_size=1, n_gpus=0).loaded.config).encode()
    wrong = [b"base = 'config.toml'", b"base = 3", b"base = []", b'"train.steps" = 5', b"train = 5", b"[train.steps.a]"]
    for content in [*wrong, *damaged(good)]:
        file.write_bytes(content)
        refused_or_fine(train.main, ["--check-config", f"--config={file}"])


# --- the other commands -----------------------------------------------------------------------------------------

TEXT = "".join(random.Random(1).choices(string.ascii_lowercase + "  \n", k=6000))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint of each kind, a Hugging Face export, a prepared folder, and what else is read."""
    run = tmp_path_factory.mktemp("fuzz") / "run"
    run.mkdir()
    config = cli.parse([*MODEL, "--run.name=run"], world_size=1, n_gpus=0).loaded.config
    model = own_tensors(models.build(config.model, 257))
    moments = {f"exp_avg.{name}": tensor for name, tensor in model.items()}
    folder = storage.new_folder(run / "checkpoints", 1)
    records = {
        file: write_tensors(folder / file, specs_of(tensors), tensors.__getitem__)
        for file, tensors in (
            (storage.MODEL, model),
            (storage.OPTIMIZER, moments),
        )
    }
    must_match = {f"model.{key}": value for key, value in config.model.resolved().items()}
    state = TrainState(step=1, must_match=must_match, config=schema.flatten(config))
    storage.commit(folder, state, "full", 1, records)
    folder = storage.new_folder(run.parent / "sharded", 1)
    writer = ShardWriter(folder)
    dcp.save(by_name({storage.MODEL: model, storage.OPTIMIZER: moments}), storage_writer=writer, no_dist=True)
    storage.commit(folder, state, "sharded", 1, writer.records)
    byte_level().save(str(run / "tokenizer.json"))
    hf.export(run, run.parent / "hf")
    (run / "config.toml").write_text(toml.to_toml_with_origins(toml.Loaded(config, {})))
    step = {
        "loss": 2.0,
        "mean_loss": 2.0,
        "seconds": 1.0,
        "time": 5.0,
        "lr": 0.1,
        "tokens": 8,
        "tokens_per_second": 8.0,
    }
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **step}) + "\n" for n in (1, 2)))
    about = {"format_version": attempts.FORMAT_VERSION, "status": "complete", "step": 2, "reason": "", "time": 0}
    (run / "run.json").write_text(json.dumps(about))
    lists: dict[str, Any] = {"command": [], "hosts": [], "setting": {}, "tasks": {}, "versions": {}, "git": {}}
    numbers = {"attempt": 0, "time": 0, "step": 0, "samples": 0, "world_size": 1, "device": "cpu"}
    attempts.add(run, {**numbers, **lists, "config": schema.flatten(config)})
    (run.parent / "text.txt").write_text(TEXT)
    assert __main__.main([str(run.parent / "text.txt"), "--out", str(run.parent / "data"), "--tokenizer", "bytes"]) == 0
    (run.parent / "accelerate.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  a: 1\n")
    return run


def test_wrong_options_of_other_commands_never_raise(run: Path) -> None:
    generating = ["max-tokens", "temperature", "top-k", "top-p", "seed", "device", "dtype", "tokenizer", "prompt"]
    planning = ["world-size", "device"]
    preparing = ["val-fraction", "on-error", "text-key", "end-token", "tokenizer", "verify", "train-tokenizer"]
    cases: list[tuple[Main, list[str]]] = []
    for word in WORDS:
        cases += [(generate.main, [str(run), "--prompt=a b", "--max-tokens=2", f"--{o}={word}"]) for o in generating]
        cases += [(plan.main, [*MODEL, "--world-size=2", f"--{option}={word}"]) for option in planning]
        cases += [(__main__.main, ["text.txt", "--out=out", f"--{option}={word}"]) for option in preparing]
        cases += [(generate.main, [word, "--prompt=a"]), (migrate_accelerate.main, [word])]
        cases += [(checkpoints.main, ["export", str(run), word]), (report.main, [word])]
        cases += [(checkpoints.main, [what, word]) for what in ("verify", "inspect", "import")]
        cases += [(checkpoints.main, [what, word, "out"]) for what in ("export", "import")]
    for main, argv in sample(cases, 100):
        refused_or_fine(main, argv)
        for left in ("out", ".out.work"):
            shutil.rmtree(left, ignore_errors=True)


# --- damaged files ----------------------------------------------------------------------------------------------


def damaged(good: bytes) -> list[bytes]:
    """An empty file, one that was cut off, what a download may give instead, and a flipped bit."""
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    return [b"", good[:middle], b"<!DOCTYPE html>", b"{}", b"[]", flipped]


@contextlib.contextmanager
def restored(file: Path) -> Iterator[bytes]:
    before = file.read_bytes()
    try:
        yield before
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in ("sharded", "run/checkpoints") for name in (storage.MANIFEST, storage.STATE)),
        *(("sharded", "index.json"), ("sharded", "*.safetensors"), ("run/checkpoints", "*.safetensors")),
    ],
)
def test_a_damaged_checkpoint_is_refused(run: Path, kind: str, name: str) -> None:
    """By every command that opens one."""
    folder = storage.step_folder(run.parent / kind, 1)
    file = min(folder.glob(name))
    with restored(file) as good:
        for content in damaged(good):
            file.write_bytes(content)
            assert checkpoints.main(["verify", str(folder)]) == 1
            refused_or_fine(checkpoints.main, ["inspect", str(folder)])
            assert checkpoints.main(["export", str(folder), "out"]) in (1, 2)
            words = [str(folder), "--prompt=a", "--max-tokens=1", f"--tokenizer={run / 'tokenizer.json'}"]
            assert generate.main(words) in (1, 2)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_hugging_face_folder_never_raises(run: Path, name: str) -> None:
    folder = run.parent / "hf"
    file = folder / name
    with restored(file) as good:
        for content in damaged(good):
            file.write_bytes(content)
            refused_or_fine(checkpoints.main, ["import", str(folder)])
            refused_or_fine(generate.main, [str(folder), "--prompt=a", "--max-tokens=1"])
            options = [f"--model.init_from={folder}", f"--tokenizer.path={folder / 'tokenizer.json'}"]
            refused_or_fine(train.main, ["--check-config", *MODEL, *options])


def test_damaged_prepared_data_never_raises(run: Path) -> None:
    file = run.parent / "data/meta.json"
    with restored(file) as good:
        for content in damaged(good):
            file.write_bytes(content)
            refused_or_fine(__main__.main, ["--verify", str(file.parent)])
            refused_or_fine(train.main, ["--check-config", *MODEL, f"--data.path={file.parent}"])


def test_the_fixture_is_read_by_every_command(run: Path) -> None:
    """Valid input is accepted; otherwise the tests above would be meaningless."""
    full, sharded = (storage.step_folder(run.parent / kind, 1) for kind in ("run/checkpoints", "sharded"))
    assert isinstance(storage.read_manifest(full), Manifest)
    for folder in (full, sharded):
        assert checkpoints.main(["verify", str(folder)]) == 0
        assert checkpoints.main(["inspect", str(folder)]) == 0
    assert generate.main([str(run), "--prompt=a", "--max-tokens=1"]) == 0
    assert generate.main([str(run.parent / "hf"), "--prompt=a", "--max-tokens=1"]) == 0
    assert report.main([str(run), "--out=report.html"]) == 0
    assert migrate_accelerate.main([str(run.parent / "accelerate.yaml")]) == 0
    assert __main__.main(["--verify", str(run.parent / "data")]) == 0
    assert train.main(["--check-config", *MODEL]) == 0
