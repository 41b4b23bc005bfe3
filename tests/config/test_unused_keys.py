"""A value that nothing reads is refused, or with the layer that made it useless, noted and reset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import train
from tests.config.parsing import mistakes, parse
from torchtitan_lite.config import load, schema
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.sections.optim import OPTIMIZERS
from torchtitan_lite.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--optim.name=adamw", "--optim.muon_momentum=0.8"],
            'optim.muon_momentum = 0.8 has no effect without optim.name = "muon"',
        ),
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
        (["--train.max_skipped=3"], 'has no effect without train.on_nonfinite = "skip" or spike.action = "skip"'),
        (["--log.wandb_project=x"], 'has no effect without log.trackers = ["wandb"]'),
        (["--profile.steps=[100,102]", "--train.steps=40"], "has no effect without train.steps that reach them"),
        (
            ["--spike.action=log", "--spike.loss_deviations=0", "--spike.norm_deviations=0"],
            "spike.action = log has no effect without spike.loss_deviations or spike.norm_deviations above 0",
        ),
        (["--profile.memory_snapshot"], "has no effect without profile.steps, e.g. [10, 12]"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(argv: list[str], expected: str) -> None:
    assert f"{expected}; leave it out, or set that" in mistakes(*argv)


def test_an_inherited_key_that_nothing_reads_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.toml").write_text('[optim]\nname = "muon"\nmuon_momentum = 0.8\n[model]\nrope_theta = 5e5\n')
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n[model]\nfamily = "gpt"\n')
    loaded = parse(f"--config={tmp_path / 'mine.toml'}", "--optim.name=adamw")
    assert loaded.config.optim.muon_momentum == 0.9
    assert loaded.origins["optim.muon_momentum"] == loaded.origins["model.rope_theta"] == "default"
    of_model, of_optimizer = (note.split(": ", 1)[1] for note in loaded.notes)
    assert of_model.startswith("model.rope_theta = 500000.0 has no effect without model.family = ")
    assert of_model.endswith("; it stays at its default")
    assert (
        of_optimizer == 'optim.muon_momentum = 0.8 has no effect without optim.name = "muon"; it stays at its default'
    )
    assert train.main(["--check-config", f"--config={tmp_path / 'mine.toml'}", "--optim.name=adamw"]) == 0
    assert "note    " in capsys.readouterr().out
    # the same file decides both, or a later one sets what an earlier one does not read: a mistake
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n[optim]\nname = "adamw"\nmuon_momentum = 0.7\n')
    assert "mine.toml: optim.muon_momentum = 0.7 has no effect" in mistakes(f"--config={tmp_path / 'mine.toml'}")
    (tmp_path / "base.toml").write_text('[optim]\nname = "adamw"\nmuon_momentum = 0.8\n')
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n')
    assert "base.toml: optim.muon_momentum = 0.8 has no effect" in mistakes(f"--config={tmp_path / 'mine.toml'}")


def test_what_a_cadence_of_0_switches_off_is_noted_and_kept() -> None:
    loaded = parse("--eval.every=0", "--eval.samples=5", "--checkpoint.keep_best")
    assert loaded.config.eval.samples == 5
    assert loaded.notes == [
        "command line: eval.samples = 5 has no effect without eval.every above 0",
        "command line: checkpoint.keep_best = True has no effect without eval.every above 0",
    ]


# values with which a rule does not hold, where the defaults are not such values
_SIZES_OF_INDUCTION = (
    "model.tie_embeddings model.n_layers model.dim model.head_dim model.n_heads model.layer_pattern model.window"
)
_WITHOUT: dict[str, dict[str, Any]] = {
    "optim.schedule": {"optim.schedule": "constant"},
    "train.batch_schedule": {"train.batch_schedule": [[0, 8]]},
    "train.epochs": {"train.epochs": 2.0},
    "eval.every": {"eval.every": 0},
    "eval.tasks": {"eval.tasks": []},
    "train.steps": {"train.steps": 4},
    "checkpoint.every": {"checkpoint.every": 0},
    "spike.loss_deviations spike.norm_deviations": {"spike.loss_deviations": 0.0, "spike.norm_deviations": 0.0},
    "sample.every": {"sample.every": 0},
    "checkpoint.keep_latest": {"checkpoint.keep_latest": 0},
    f"model.qk_norm {_SIZES_OF_INDUCTION}": {"model.qk_norm": False},
    "tokenizer.path data.path data.sources": {"data.path": "prepared"},
    "data.path data.sources": {"data.path": "prepared"}
    | {"data.objective": "pairs", "data.target_len": 8, "data.source_key": "s", "data.target_key": "t"},
}
_OTHER: dict[str, Any] = {"optim.betas": [0.8, 0.9], "sample.prompts": ["x"], "data.text_suffixes": [".md"]}
_OTHER |= {"model.layer_pattern": ["full"]}
_OTHER |= {"optim.step_every": 3, "optim.step_gamma": 0.5, "profile.steps": [10, 12]}


def _other_value(key: str) -> Any:
    """A valid value that is not the default."""
    field = schema.known_keys()[key]
    if key in _OTHER:
        return _OTHER[key]
    if get_origin(field.annotation) is Literal:
        return next(choice for choice in get_args(field.annotation) if choice != field.default)
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, float) and field.default < 1:
        return field.default / 2 or 0.5
    return field.default + 1 if isinstance(field.default, int | float) else f"{field.default}x"


@pytest.mark.parametrize("key", dict.fromkeys(key for key, _ in schema.usage_rules()))
def test_every_key_that_is_only_used_with_another_says_so(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each rule of the key: an error or a note, which names what it needs, and none where that is set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared/meta.json").write_text('{"format_version": 1, "tokens_sha256": ""}')
    for rule in (rule for other, rule in schema.usage_rules() if other == key):
        without = _WITHOUT.get(rule.decided_by, {}) if rule.holds(load.load(None, {}).config) else {}
        for choice, registry in (("model.family", FAMILIES), ("optim.name", OPTIMIZERS)):
            if rule.decided_by == choice:
                without = {
                    choice: next(name for name, entry in registry.items() if key.split(".")[1] not in entry.keys)
                }
        values = {k: load.ConfigValue(value, "test") for k, value in {**without, key: _other_value(key)}.items()}
        said: Sequence[str]
        try:
            said = load.load(None, values).notes
        except ConfigError as error:
            said = str(error).split("\n  ")
            assert rule.refuse
        expected = f"has no effect without {rule.needs}"
        assert any(line.startswith(f"test: {key} = ") and expected in line for line in said), said


def test_rules_of_use_name_keys_that_exist() -> None:
    known = schema.known_keys()
    rules = schema.usage_rules()
    assert {f"model.{key}" for family in FAMILIES.values() for key in family.keys} <= known.keys()
    assert {f"optim.{key}" for optimizer in OPTIMIZERS.values() for key in optimizer.keys} <= known.keys()
    for key, rule in rules:
        assert {key, *rule.decided_by.split()} <= known.keys()
    of_one = {k for k, field in known.items() if str(field.description).startswith(("gpt:", "llama:", "muon:", "wsd:"))}
    assert of_one - {"model.family", "optim.name"} <= {key for key, _ in rules}
