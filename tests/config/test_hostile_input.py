"""Hostile input at every front door gives a message and an exit code, never a traceback.

Commands are called in this process, so an exception that reaches a test is a bug. Seeds are fixed. The default suite
runs a small sample of the cases, `pytest -m slow` one twenty times as large.
"""

import contextlib
import hashlib
import json
import random
import shutil
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import train
from torchtitan_lite import models, plan
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.safetensors_file import specs_of, write_tensors
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.storage import Manifest
from torchtitan_lite.checkpointing.tensor_names import own_tensors
from torchtitan_lite.config import cli, schema, toml
from torchtitan_lite.data.prepare import __main__
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.monitoring import attempts
from torchtitan_lite.tools import checkpoints, generate, migrate_accelerate
from torchtitan_lite.tools.report import report

Main = Callable[[Sequence[str]], int]
MODEL = ["--model.dim=16", "--model.n_layers=1", "--model.n_heads=2", "--model.n_kv_heads=2", "--model.hidden_dim=16"]
MODEL += ["--tokenizer.vocab_size=257", "--model.max_seq_len=32", "--train.seq_len=32"]

WORDS = [
    *("", " ", "x", "x" * 5000, "..", "/", ".", "~", "~nobody2/x", "/dev/null", "/proc/self/mem", "a//b", "file/x"),
    *("nan", "inf", "-inf", "-1", "0", "1", "2", "1e-40", "1e400", "1e12", "-5", "9" * 400, "9" * 5000),
    *("true", "false", "null", "[]", "[[]]", "{}", "[" * 500, "[1, 'a']", "['a']", "{a = 1}"),
    *("[{}]", "[{match = '['}]", "1979-05-27", "'''", '"', "\u00e9\u4e2d", "\U0001f600", "a\nb"),
    *("\x1b[31m", "*", "[", "step-" + "9" * 30, "step--1", "[10, 5]", "[1, 2, 3]"),
    *("{'' = 1.0}", "{'a' = nan}", "['*', '*']", "file", "link"),
]  # fmt: skip
VALUES: list[Any] = [
    *(0, 1, -1, 2**31, 2**63, 10**400, 1e308, -0.0, 1e-320, float("nan"), float("inf"), True, False),
    *("", "x", "x" * 5000, "\x7f\x1b", "~nobody2", [], [[]], [0], [""], [1e400, "a"], [[[[[1]]]]]),
    *({}, {"a": {}}, {"a": 1}, {"match": "["}, [{}], [{"match": 1}], [{"match": "*", "lr_factor": -1}], {"": 1.0}),
]
JSON: list[Any] = [
    *(None, True, 0, 1, -1, 3, 2**31, 2**63, 10**400, 1.5, -1e308, float("nan"), float("inf")),
    *("", "x", "../x", "/etc/passwd", "x" * 5000, "a\0b", "\udcff", [], {}, [None], [[1]], {"a": None}, [2**62, 2**62]),
]


def sample(cases: Sequence[Any], n: int) -> list[Any]:
    """Some of the cases, always the same."""
    return list(cases) if len(cases) <= n else random.Random(0).sample(cases, n)


def refused_or_fine(main: Main, argv: Sequence[str]) -> None:
    try:
        code: Any = main(argv)
    except SystemExit as error:  # argparse
        code = error.code
    assert code in (0, 1, 2), f"exit code {code} of {argv!r}"


@pytest.fixture(params=[1, pytest.param(20, marks=pytest.mark.slow)])
def amount(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile names may become files: not in the repository."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("{}")
    Path("link").symlink_to("link")


# --- the config -------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_hostile_values_on_the_command_line_never_raise(amount: int) -> None:
    words = [f"--{key}={word}" for key in (*schema.known_keys(), "config", "train.x") for word in WORDS]
    words += [*WORDS, *(f"--{word}" for word in WORDS if word), "--config", "--config=/dev/full"]
    for word in ("--config=/dev/full", "--config", *sample(words, 150 * amount)):
        refused_or_fine(train.main, ["--check-config", *MODEL, word])


def test_hostile_values_in_a_file_never_raise(tmp_path: Path, amount: int) -> None:
    file = tmp_path / "config.toml"
    cases = [(key, value) for key in [*schema.known_keys(), "base.x", "no.such"] for value in VALUES]
    for key, value in sample(cases, 100 * amount):
        section, name = key.split(".")
        file.write_text(tomli_w.dumps({section: {name: value}}), encoding="utf-8")
        refused_or_fine(train.main, ["--check-config", f"--config={file}", *MODEL])


def test_damaged_config_files_never_raise(tmp_path: Path, amount: int) -> None:
    file = tmp_path / "config.toml"
    good = toml.to_toml(cli.parse(["--run.name=a"], world_size=1, n_gpus=0).loaded.config).encode()
    extra = [f"base = {toml.format_value(word)}\n".encode() for word in WORDS]
    extra += [
        b"base = 'config.toml'",
        b"base = 3",
        b"base = []",
        b'"train.steps" = 5',
        b"train = 5",
        b"[train.steps.a]",
    ]
    for content in [*sample(extra, 20 * amount), *sample(list(mangled(good)), 20 * amount)]:
        file.write_bytes(content)
        refused_or_fine(train.main, ["--check-config", f"--config={file}"])


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_an_environment_without_a_world_size_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # what another rank than the first does before it speaks
    for word in ("", " ", "x", "-1", "0", "1.5", "9" * 30, "\u00b2"):
        monkeypatch.setenv(name, word)
        assert train.main(["--check-config"]) == (2 if name.endswith("WORLD_SIZE") else 0)


# --- the other commands -----------------------------------------------------------------------------------------

TEXT = "".join(random.Random(1).choices(string.ascii_lowercase + "  \n", k=6000))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint of each kind, a Hugging Face export, a prepared folder, and what else is read."""
    run = tmp_path_factory.mktemp("fuzz") / "run"
    run.mkdir()
    config = cli.parse([*MODEL, "--run.name=run"], world_size=1, n_gpus=0).loaded.config
    model = own_tensors(models.build(config.model, 257))
    folder = storage.begin(run / "checkpoints", 1)
    records = {
        file: write_tensors(folder / file, specs_of(tensors), tensors.__getitem__)
        for file, tensors in (
            (storage.MODEL, model),
            (storage.OPTIMIZER, {f"exp_avg.{name}": tensor for name, tensor in model.items()}),
        )
    }
    identity = {f"model.{key}": value for key, value in config.model.resolved().items()}
    state = TrainState(step=1, identity=identity, config=schema.flatten(config))
    full = storage.commit(folder, state, "full", 1, records)
    checkpoints.convert(full, run.parent / "sharded")
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
    about = {"format_version": 1, "status": "complete", "step": 2, "reason": "", "time": 0}
    (run / "run.json").write_text(json.dumps(about))
    lists: dict[str, Any] = {"command": [], "hosts": [], "setting": {}, "tasks": {}, "versions": {}, "git": {}}
    numbers = {"attempt": 0, "time": 0, "step": 0, "samples": 0, "world_size": 1, "device": "cpu"}
    attempts.add(run, {**numbers, **lists, "config": schema.flatten(config)})
    (run.parent / "text.txt").write_text(TEXT)
    assert __main__.main([str(run.parent / "text.txt"), "--out", str(run.parent / "data"), "--tokenizer", "bytes"]) == 0
    (run.parent / "accelerate.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  a: 1\n")
    return run


def test_hostile_options_of_other_commands_never_raise(run: Path, amount: int) -> None:
    generating = ["max-tokens", "temperature", "top-k", "top-p", "seed", "device", "dtype", "tokenizer", "prompt"]
    planning = ["world-size", "device", "peak-tflops", "memory-gib", "memory-gbs", "intra-node-gbs", "per-node"]
    preparing = ["val-fraction", "on-error", "text-key", "end-token", "tokenizer", "verify", "train-tokenizer"]
    cases: list[tuple[Main, list[str]]] = []
    for word in WORDS:
        cases += [(generate.main, [str(run), "--prompt=a b", "--max-tokens=2", f"--{o}={word}"]) for o in generating]
        cases += [(plan.main, [*MODEL, "--world-size=2", f"--{option}={word}"]) for option in planning]
        cases += [(__main__.main, ["text.txt", "--out=out", f"--{option}={word}"]) for option in preparing]
        cases += [(generate.main, [word, "--prompt=a"]), (migrate_accelerate.main, [word])]
        cases += [(checkpoints.main, ["export", str(run), word]), (report.main, [word])]
        cases += [(checkpoints.main, [what, word]) for what in ("verify", "inspect", "import")]
        cases += [(checkpoints.main, [what, word, "out"]) for what in ("convert", "export", "import")]
    for main, argv in sample(cases, 100 * amount):
        refused_or_fine(main, argv)
        for left in ("out", ".out.work"):
            shutil.rmtree(left, ignore_errors=True)


# --- hostile files ----------------------------------------------------------------------------------------------


def mangled(good: bytes, amount: int = 60) -> Iterator[bytes]:
    """Bytes that are almost the good ones, and bytes that are not like them at all."""
    rng = random.Random(2)
    yield from (b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf" + good, b"[" * 100_000)
    yield from (b'{"a":' * 5000, b"- " * 5000, b"9" * 5000)
    yield from (b"null", b"[]", b"{}", b'"x"', b"1", b"\n\n", good + b"\0", good[:-1], good[: len(good) // 2], good * 2)
    for _ in range(amount):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((0, 1, 1, 8))] = rng.randbytes(rng.choice((0, 1, 1, 4)))
        yield bytes(data)


def altered(tree: Any, values: Sequence[Any]) -> Iterator[Any]:
    """A JSON tree with one thing changed: each value by each hostile one, each key left out, each key added."""
    if isinstance(tree, dict):
        for key, inner in tree.items():
            rest = {k: v for k, v in tree.items() if k != key}
            yield rest
            yield {**rest, f"{key}2": inner}
            yield from ({**tree, key: other} for other in (*values, *altered(inner, values)))
    elif isinstance(tree, list):
        yield from (tree[1:], [*tree, None])
        for i, inner in enumerate(tree):
            yield from ([*tree[:i], other, *tree[i + 1 :]] for other in (*values, *altered(inner, values)))


def versions(file: Path, amount: int) -> Iterator[bytes]:
    """Hostile content for a file that is JSON, or safetensors: the length of a header in JSON, the header, and data."""
    good = file.read_bytes()
    begin = 8 if file.suffix == ".safetensors" else 0
    end = begin + int.from_bytes(good[:8], "little") if begin else len(good)
    for other in sample(list(altered(json.loads(good[begin:end]), JSON)), 12 * amount):
        text = json.dumps(other).encode()
        yield len(text).to_bytes(begin, "little") + text + good[end:] if begin else text
    yield from sample(list(mangled(good)), 4 * amount)


def recommit(folder: Path) -> None:
    """Make a checkpoint's manifest that of the files as they are now: whoever is hostile can hash."""
    path = folder / storage.MANIFEST
    content = json.loads(path.read_text())
    for name, record in content["files"].items():
        data = (folder / name).read_bytes()
        record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sign(path, content)


def sign(path: Path, content: Any) -> None:
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key != "sha256"}
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content))


@contextlib.contextmanager
def restored(file: Path) -> Iterator[None]:
    before = file.read_bytes()
    try:
        yield
    finally:
        file.write_bytes(before)


def look_at(folder: Path) -> None:
    """Every command that opens a checkpoint."""
    refused_or_fine(checkpoints.main, ["verify", str(folder)])
    refused_or_fine(checkpoints.main, ["inspect", str(folder)])
    refused_or_fine(checkpoints.main, ["convert", str(folder), "converted"])
    refused_or_fine(checkpoints.main, ["export", str(folder), "exported"])
    tokenizer = folder.parent.parent / "run/tokenizer.json"
    tokenizer = tokenizer if tokenizer.is_file() else folder.parent.parent / "tokenizer.json"
    refused_or_fine(generate.main, [str(folder), "--prompt=a", "--max-tokens=1", f"--tokenizer={tokenizer}"])
    for left in ("converted", "exported"):
        shutil.rmtree(left, ignore_errors=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("sharded", name) for name in (storage.MANIFEST, storage.STATE, "index.json")),
        *(pytest.param("run/checkpoints", n, marks=pytest.mark.extended) for n in (storage.MANIFEST, storage.STATE)),
        *(pytest.param(kind, "*.safetensors", marks=pytest.mark.extended) for kind in ("sharded", "run/checkpoints")),
    ],
)
def test_hostile_files_in_a_checkpoint_never_raise(run: Path, kind: str, name: str, amount: int) -> None:
    folder = storage.step_folder(run.parent / kind, 1)
    file = min(folder.glob(name))
    with restored(file), restored(folder / storage.MANIFEST):
        for content in versions(file, amount):
            file.write_bytes(content)
            if name == storage.MANIFEST:
                with contextlib.suppress(ValueError, RecursionError):
                    sign(file, json.loads(content))
            else:
                recommit(folder)
            look_at(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.extended
def test_a_hostile_hugging_face_folder_never_raises(run: Path, name: str, amount: int) -> None:
    folder = run.parent / "hf"
    file = folder / name
    if name.endswith("index.json"):
        weights = {"model.embed_tokens.weight": "model.safetensors", "lm_head.weight": "model.safetensors"}
        file.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))
    with restored(file):
        for content in versions(file, amount):
            file.write_bytes(content)
            refused_or_fine(checkpoints.main, ["import", str(folder)])
            refused_or_fine(generate.main, [str(folder), "--prompt=a", "--max-tokens=1"])
            options = [f"--model.init_from={folder}", f"--tokenizer.path={folder / 'tokenizer.json'}"]
            refused_or_fine(train.main, ["--check-config", *MODEL, *options])
    if name.endswith("index.json"):
        file.unlink()


def test_hostile_prepared_data_never_raises(run: Path, amount: int) -> None:
    file = run.parent / "data/meta.json"
    with restored(file):
        for content in versions(file, amount):
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
