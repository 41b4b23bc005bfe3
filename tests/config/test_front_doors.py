"""Front doors: messages about unreadable input, unused keys, and printed configs that load again."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import train
from tests.helpers import ranks, start, tiny
from torchtitan_lite import errors
from torchtitan_lite.config import cli, load, paths, schema, toml
from torchtitan_lite.data.prepare import __main__, split
from torchtitan_lite.errors import CheckpointError, ConfigError, UserError, run_cli
from torchtitan_lite.huggingface import names
from torchtitan_lite.tools import generate, migrate_accelerate


def parse(*argv: str, world_size: int = 1) -> toml.Loaded:
    return cli.parse(argv, world_size=world_size, n_gpus=0).loaded


def mistakes(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    return str(caught.value)


# --- the one place ----------------------------------------------------------------------------------------------


def _raise(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (PermissionError(13, "Permission denied", "/a/b"), 2, "x: /a/b: Permission denied: this process runs as uid"),
        (OSError(36, "File name too long", "a" * 5000), 2, "(5,000 characters): File name too long: a name has at"),
        (OSError(28, "No space left on device", "/a"), 1, "x: /a: No space left on device: free some space"),
        (OSError(5, "Input/output error"), 1, "x: Input/output error"),
        (UnicodeDecodeError("utf-8", b"a\xe9", 1, 2, "no"), 2, "x: byte 0xe9 at position 1 is not utf-8"),
        (UnicodeEncodeError("ascii", "\u00e9", 0, 1, "no"), 2, "can't be written as ascii; try PYTHONIOENCODING=utf-8"),
        (RecursionError("deep"), 2, "x: the input is nested too deeply"),
        (MemoryError(), 2, "x: out of memory"),
        (RuntimeError("alloc_cpu.cpp: you tried to allocate 5 bytes\nmore"), 2, "x: out of memory: alloc_cpu.cpp"),
        (OverflowError("timeout"), 2, "x: a number is too large: timeout"),
        (UserError("this and that"), 2, "x: this and that"),
        (errors.SaveError("late"), 1, "x: late"),
        (KeyboardInterrupt(), 130, "x: stopped"),
    ],
)
def test_an_input_error_is_a_message_without_a_traceback(
    error: BaseException, code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("x", _raise(error)) == code
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyError("a"), TypeError(), AttributeError("a"), ValueError("a"), OSError(9, "bad")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_cli("x", _raise(error))


def test_the_line_that_met_the_error_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.yaml").write_text("a: 1")
    monkeypatch.setattr(migrate_accelerate, "translate", lambda content: [None] * (1 << 63))
    assert migrate_accelerate.main([str(tmp_path / "one.yaml")]) == 2
    message = capsys.readouterr().err
    assert "migrate: a number is too large: " in message
    assert "[torchtitan_lite/tools/migrate_accelerate.py:" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disks_and_closed_pipes_end_a_command_without_a_traceback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    lines = [
        "import sys",
        "from torchtitan_lite.errors import run_cli",
        "sys.exit(run_cli('x', lambda: print('y' * 9) or 0))",
    ]
    program.write_text("\n".join(lines))
    full = start(["bash", "-c", f"{sys.executable} {program} >/dev/full"])
    assert (full.returncode, full.stderr.count("x: No space left on device")) == (1, 1), full.stderr
    gone = start(["bash", "-c", f"exec {sys.executable} {program} > >(exec sleep 0)"])
    for result in (full, gone):
        assert "Traceback" not in result.stderr
        assert "Exception ignored" not in result.stderr


# --- training ---------------------------------------------------------------------------------------------------

as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become another")


@as_root
@pytest.mark.parametrize("key", ["data.path", "model.init_from", "tokenizer.path", "checkpoint.resume"])
def test_a_folder_of_another_user_is_an_error(key: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file.txt").write_text("text")
    os.chown(theirs, 54321, 54321)
    theirs.chmod(0o700)
    for path in (theirs, theirs / "file.txt"):
        argv = [f"--{key}={path}", "--check-config"]
        result = ranks(1, *argv, entry="tests.config.door_worker", env={"DOOR": "restricted"})
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr
        assert key in result.stderr
        assert str(path) in result.stderr
        assert "ermission denied" in result.stderr


@pytest.mark.extended
def test_a_user_without_a_name_and_a_home_is_told_what_to_set(tmp_path: Path) -> None:
    given = [f"--run.out_dir={tmp_path}", "--run.device=cpu"]
    result = ranks(1, "--inspect", *given, entry="tests.config.door_worker", env={"DOOR": "homeless"})
    assert result.returncode == 2, result.stderr
    assert "there is no default folder, because HOME is not set" in result.stderr
    assert "data.cache_dir =" in result.stderr
    result = ranks(1, "--check-config", "--data.path=~/x", entry="tests.config.door_worker", env={"DOOR": "homeless"})
    assert result.returncode == 2
    assert "has no name; write the path in full" in result.stderr


def test_several_ranks_print_one_message(text: Path, tmp_path: Path) -> None:
    result = ranks(2, *tiny(text, tmp_path), entry="tests.config.door_worker", env={"DOOR": "denied"})
    assert result.returncode != 0
    assert result.stderr.count("train.py: /their/text.txt: Permission denied") == 1
    assert "Traceback" not in result.stderr


def test_too_little_memory_to_build_is_a_message(text: Path, tmp_path: Path) -> None:
    result = ranks(1, *tiny(text, tmp_path), entry="tests.config.door_worker", env={"DOOR": "huge"})
    assert result.returncode == 1
    assert "train.py: out of memory: " in result.stderr
    assert "\n  try --" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", ""), ("LOCAL_RANK", "x"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "-1")]
)
def test_an_invalid_environment_is_an_error(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert train.main(["--run.timeout_minutes=1", "--check-config"]) == (0 if name == "LOCAL_RANK" else 2)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--run.timeout_minutes=1e12"], "should be less than or equal to 525600"),
        (["--checkpoint.resume=" + "x" * 5000], "File name too long"),
        (["--run.name=" + "x" * 300], "should be the plain name of a folder, of at most 200 bytes"),
        (["--run.name=a\0b"], "should have no NUL character"),
        (["--run.name=a\udcff"], "should be UTF-8"),
        (["--data.path=~nobody2/x"], "there is no user nobody2; write the path in full"),
        (["--run.out_dir=~nobody2/x"], "there is no user nobody2; write the path in full"),
        (["--run.seed=" + "9" * 30], "should be a number of at most 64 bits"),
        (["--model.n_layers=1000000000"], "should be less than or equal to 2048"),
        (["--sample.temperature=1e-40"], "should be 0 (greedy), or at least 1e-06"),
    ],
)
def test_unusable_values_are_errors(argv: list[str], expected: str) -> None:
    assert expected in mistakes(*argv)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"max_position_embeddings": None}, "config.json lacks 'max_position_embeddings', which is null"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 should be above 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small' should be a number"),
        ({"model_type": ["llama"]}, "model_type = ['llama'] should be a text"),
        ({"rope_parameters": 3}, "rope_parameters = 3 should be a table"),
        ({"num_hidden_layers": 10**9}, "n_layers = 1000000000: Input should be less than or equal to 2048"),
    ],
)
def test_an_invalid_hugging_face_config_is_an_error(changed: dict[str, Any], expected: str) -> None:
    good = {"model_type": "llama", "vocab_size": 9, "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
    good |= {"intermediate_size": 8, "max_position_embeddings": 16}
    assert names.from_hf_config(good)["max_seq_len"] == 16
    with pytest.raises(CheckpointError) as caught:
        names.from_hf_config(good | changed)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "option", ["--temperature=1e-40", "--temperature=nan", "--seed=-1", "--top-p=0", "--seed=" + "9" * 30]
)
def test_generate_refuses_invalid_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["no_such_run", "--prompt=a", option]) == 2
    assert option.split("=")[0] in capsys.readouterr().err


# --- ~ ----------------------------------------------------------------------------------------------------------


def test_every_path_expands_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.toml").write_text('[run]\nout_dir = "~/runs"\n')
    (tmp_path / "mine.toml").write_text('base = "~/base.toml"\n')
    (tmp_path / "text.txt").write_text("some text\n" * 500)
    split.byte_level().save(str(tmp_path / "tokenizer.json"))
    loaded = parse("--config=~/mine.toml", "--data.path=~/text.txt", "--tokenizer.path=~/tokenizer.json")
    assert loaded.config.folder == tmp_path / "runs/mine"
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["~/text.txt", "--out=~/data", "--tokenizer=bytes"]) == 0
    assert (tmp_path / "data/meta.json").is_file()
    assert __main__.main(["--verify=~/data"]) == 0
    assert not (tmp_path / "~").exists()
    assert paths.expand("~/a") == tmp_path / "a"


# --- what is printed loads ----------------------------------------------------------------------------------------

_NAMES = st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=20)
_POSITIVE = st.floats(min_value=1e-300, max_value=1e300)
_GROUP = st.fixed_dictionaries(
    {"match": st.text(max_size=9)}, optional={"lr_factor": _POSITIVE, "weight_decay": _POSITIVE}
)
_OVERRIDE = st.fixed_dictionaries(
    {"match": st.text(max_size=9)}, optional={"param_dtype": st.sampled_from(["bfloat16", "float16"])}
)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "run.name": _NAMES,
    "run.out_dir": st.text(max_size=9),
    "run.seed": st.integers(0, 2**63 - 1),
    "model.family": st.sampled_from(["gpt", "llama"]),
    "model.size": st.sampled_from(["1M", "3M"]),
    "model.rope_factor": st.sampled_from([1.0, 8.0]),
    "optim.name": st.sampled_from(["adamw", "sgd"]),
    "optim.momentum": st.floats(0.1, 0.9),
    "optim.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(list),
    "optim.max_norm": st.one_of(_POSITIVE, st.just(float("inf"))),
    "optim.freeze": st.lists(st.text(max_size=9), max_size=2),
    "optim.groups": st.lists(_GROUP, max_size=2),
    "fsdp.precision_overrides": st.lists(_OVERRIDE, max_size=2),
    "fsdp.sharding_strategy": st.sampled_from(["", "FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"]),
    "sample.prompts": st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3),
    "data.text_key": st.text(max_size=9),
    "log.wandb_project": st.text(max_size=9),
    "profile.steps": st.sampled_from([[], [1, 2]]),
}


@hypothesis_settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
@given(
    chosen=st.fixed_dictionaries({}, optional=_VALUES),
    mixed=st.dictionaries(_NAMES, _POSITIVE, max_size=3),
    origin=st.text(max_size=9),
    levels=st.lists(st.integers(-1, 1), min_size=len(_VALUES), max_size=len(_VALUES)),
    local=st.sampled_from([1, 4]),
)
@pytest.mark.extended
def test_what_is_printed_loads_and_gives_the_same_config(
    tmp_path: Path, chosen: dict[str, Any], mixed: dict[str, float], origin: str, levels: list[int], local: int
) -> None:
    values = {key: load.ConfigValue(v, origin, level) for (key, v), level in zip(chosen.items(), levels, strict=False)}
    try:
        for name in mixed:
            (tmp_path / name).touch()
    except OSError:  # a name of dots, or too long
        assume(False)
    if mixed:
        values["data.sources"] = load.ConfigValue({str(tmp_path / name): w for name, w in mixed.items()}, origin)
    try:
        loaded = load.load(None, values, world_size=8, local_world_size=local)
    except ConfigError:
        assume(False)
    file = tmp_path / "printed" / "config.toml"
    file.parent.mkdir(exist_ok=True)
    for text in (toml.to_toml_with_origins(loaded), toml.to_toml(loaded.config)):
        assert tomli.loads(text)
        file.write_text(text, encoding="utf-8")
        again = load.load(file, {}, world_size=8, local_world_size=local)
        assert again.config == loaded.config


# --- everything at once -------------------------------------------------------------------------------------------


def test_patterns_and_prompts_are_reported_with_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--optim.freeze=['no', 'nope']", "--optim.groups=[{match = 'none'}, {match = 'nil'}]", "--train.steps=x"]
    argv += ["--fsdp.precision_overrides=[{match = 'nix', param_dtype = 'bfloat16'}]", "--sample.prompts=['']"]
    assert train.main(["--check-config", *argv]) == 2
    message = capsys.readouterr().err
    assert "the configuration has 7 problems" in message
    for pattern in ("no", "nope", "none", "nil", "nix"):
        assert f'"{pattern}" matches no parameter' in message
    assert "sample.prompts: '' has 0 tokens, and should have 1 to 1023" in message
    assert "--train.steps=x: should be a valid integer" in message


def test_prompts_are_checked_with_an_existing_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split.byte_level().save(str(tmp_path / "tokenizer.json"))
    argv = ["--check-config", "--model.max_seq_len=8", "--train.seq_len=8", "--sample.prompts=['12345678', '1234567']"]
    assert train.main([*argv, f"--tokenizer.path={tmp_path / 'tokenizer.json'}"]) == 2
    message = capsys.readouterr().err
    assert "sample.prompts: '12345678' has 8 tokens, and should have 1 to 7: model.max_seq_len = 8" in message
    assert "'1234567' has" not in message
    (tmp_path / "tokenizer.json").write_text("{}")
    assert train.main([*argv, f"--tokenizer.path={tmp_path / 'tokenizer.json'}"]) == 2
    assert "can't be read as a tokenizer.json" in capsys.readouterr().err


# --- keys that nothing reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--optim.momentum=0.8"], 'optim.momentum = 0.8 has no effect without optim.name = "sgd"'),
        (
            ["--optim.name=sgd", "--optim.eps=1e-6"],
            'optim.eps = 1e-06 has no effect without optim.name = "adamw" or "muon"',
        ),
        (["--optim.decay_ratio=0.3"], 'optim.decay_ratio = 0.3 has no effect without optim.schedule = "wsd"'),
        (
            ["--optim.schedule=constant", "--optim.min_lr_ratio=0"],
            'has no effect without optim.schedule = "cosine", "linear" or "wsd"',
        ),
        (
            ["--train.batch_schedule=[[0, 8]]", "--train.global_batch_size=16"],
            "train.global_batch_size = 16 has no effect without a train.batch_schedule that begins after step 0",
        ),
        (["--model.rope_high_freq_factor=5"], "has no effect without model.rope_factor above 1"),
        (["--train.max_skipped=3"], 'has no effect without train.on_nonfinite = "skip" or spike.action'),
        (["--log.wandb_project=x"], 'has no effect without log.trackers = ["wandb"]'),
        (["--profile.memory_snapshot"], "has no effect without profile.steps, e.g. [10, 12]"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(argv: list[str], expected: str) -> None:
    assert f"{expected}; leave it out, or set that" in mistakes(*argv)


def test_an_inherited_key_that_nothing_reads_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.toml").write_text('[optim]\nname = "sgd"\nmomentum = 0.8\n[model]\nrope_theta = 5e5\n')
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n[model]\nfamily = "gpt"\n')
    loaded = parse(f"--config={tmp_path / 'mine.toml'}", "--optim.name=adamw")
    assert loaded.config.optim.momentum == 0.9
    assert loaded.origins["optim.momentum"] == loaded.origins["model.rope_theta"] == "default"
    assert [note.split(": ", 1)[1] for note in loaded.notes] == [
        'model.rope_theta = 500000.0 has no effect without model.family = "llama"; it stays at its default',
        'optim.momentum = 0.8 has no effect without optim.name = "sgd"; it stays at its default',
    ]
    assert train.main(["--check-config", f"--config={tmp_path / 'mine.toml'}", "--optim.name=adamw"]) == 0
    assert "note    " in capsys.readouterr().out
    # the same file decides both, or a later one sets what an earlier one does not read: a mistake
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n[optim]\nname = "adamw"\nmomentum = 0.7\n')
    assert "mine.toml: optim.momentum = 0.7 has no effect" in mistakes(f"--config={tmp_path / 'mine.toml'}")
    (tmp_path / "base.toml").write_text("[optim]\nmomentum = 0.8\n")
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n')
    assert "base.toml: optim.momentum = 0.8 has no effect" in mistakes(f"--config={tmp_path / 'mine.toml'}")


def test_what_a_cadence_of_0_switches_off_is_noted_and_kept() -> None:
    loaded = parse("--eval.every=0", "--eval.samples=5")
    assert loaded.config.eval.samples == 5
    assert loaded.notes == ["command line: eval.samples = 5 has no effect without eval.every above 0"]


def test_rules_of_use_name_keys_that_exist() -> None:
    known = schema.known_keys()
    rules = schema.usage_rules()
    for key, rule in rules:
        assert {key, *rule.decided_by.split()} <= known.keys()
    of_one = {k for k, field in known.items() if str(field.description).startswith(("gpt:", "llama:", "sgd:", "wsd:"))}
    assert of_one - {"model.family"} <= {key for key, _ in rules}
