"""The keys that are given without effect are one note."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import train
from tests.config.parsing import parse
from torchtitan_lite.config import load, schema
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.sections.optim import OPTIMIZERS


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--optim.name=adamw", "--optim.muon_momentum=0.8"],
            'optim.muon_momentum = 0.8 needs optim.name = "muon"',
        ),
        (
            ["--optim.name=sgd", "--optim.eps=1e-6"],
            'optim.eps = 1e-06 needs optim.name = "adamw" or "muon"',
        ),
        (["--optim.decay_ratio=0.3"], 'optim.decay_ratio = 0.3 needs optim.schedule = "wsd"'),
        (
            ["--optim.schedule=constant", "--optim.min_lr_ratio=0"],
            'needs optim.schedule = "cosine", "linear" or "wsd"',
        ),
        (
            ["--train.batch_schedule=[[0, 8]]", "--train.global_batch_size=16"],
            "train.global_batch_size = 16 needs a train.batch_schedule that begins after step 0",
        ),
        (["--model.rope_high_freq_factor=5"], "needs model.rope_factor above 1"),
        (["--train.max_skipped=3"], 'needs train.on_nonfinite = "skip" or spike.action = "skip"'),
        (["--log.wandb_project=x"], 'needs log.trackers = ["wandb"]'),
        (["--profile.steps=[100,102]", "--train.steps=40"], "needs train.steps that reach them"),
        (
            ["--spike.action=log", "--spike.loss_deviations=0", "--spike.norm_deviations=0"],
            'spike.action = "log" needs spike.loss_deviations or spike.norm_deviations above 0',
        ),
        (["--profile.memory_snapshot"], "needs profile.steps, e.g. [10, 12]"),
    ],
)
def test_a_key_that_nothing_reads_is_noted(argv: list[str], expected: str) -> None:
    (note,) = parse(*argv).notes
    assert note.startswith("without effect: command line: ")
    assert expected in note


def test_all_keys_without_effect_are_one_note_with_the_origin_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.toml").write_text('[optim]\nname = "muon"\nmuon_momentum = 0.8\n[model]\nrope_theta = 5e5\n')
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n[model]\nfamily = "gpt"\n')
    command = [f"--config={tmp_path / 'mine.toml'}", "--optim.name=adamw", "--eval.every=0", "--eval.samples=128"]
    (note,) = parse(*command).notes
    head, *parts = note.split(f"{tmp_path / 'base.toml'}: ")
    assert head == "without effect: "
    assert parts[0].startswith("model.rope_theta = 500000.0 needs model.family = ")
    assert parts[1].startswith('optim.muon_momentum = 0.8 needs optim.name = "muon"; command line: eval.samples = 128')
    assert train.main(["--check-config", *command]) == 0
    assert "note    without effect: " in capsys.readouterr().out


# values with which a rule does not hold, where the defaults are not such values
_SIZES_OF_INDUCTION = (
    "model.tie_embeddings model.n_layers model.dim model.head_dim model.n_heads model.layer_pattern model.window"
)
_WITHOUT: dict[str, dict[str, Any]] = {
    "optim.schedule": {"optim.schedule": "constant"},
    "train.batch_schedule": {"train.batch_schedule": [[0, 8]]},
    "train.epochs": {"train.epochs": 2.0},
    "model.layer_pattern": {"model.layer_pattern": ["full"]},
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
_OTHER: dict[str, Any] = {
    **{"optim.betas": [0.8, 0.9], "sample.prompts": ["x"], "data.text_suffixes": [".md"]},
    **{"model.layer_pattern": ["full"], "optim.step_every": 3, "optim.step_gamma": 0.5, "profile.steps": [10, 12]},
}


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
    """For each rule of the key: the note names what it needs."""
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
        values = {**without, key: _other_value(key)}
        (said,) = load.load(None, values).notes
        assert f"command line: {key} = " in said
        assert f" needs {rule.needs}" in said
