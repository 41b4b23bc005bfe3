"""What a person meant: misspelled options and keys, other spellings of a choice, paths."""

import os
import shlex
from pathlib import Path

import pytest
import tomli

import train
from tests.config.parsing import mistakes, one_of, parse
from torchtitan_lite.config import load, messages, paths, schema
from torchtitan_lite.config.sections.optim import OPTIMIZERS
from torchtitan_lite.config.sections.outputs import TRACKERS


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps=50"], "the nearest known one is --train.steps"),
        (["--name=x"], "the nearest known one is --run.name"),
        (["--lr=1e-3"], "the nearest known one is --optim.lr"),
        (["--path=x"], "the nearest known one is --data.path"),
        (["--every=3"], "the nearest known one is --log.every"),
        (["--batch_size=3"], "the nearest known one is --train.global_batch_size"),
        (["--wandb"], "the nearest known one is --log.trackers"),
        (["--dry_run"], "the nearest known one is --dry-run"),
        (["--world_size=64"], "torchrun sets the number of ranks: torchrun --nproc-per-node 2 train.py"),
        (["--nproc-per-node", "4"], "torchrun --nproc-per-node 2 train.py"),
        (["--gpus-per-node=8"], "torchrun sets the number of ranks: torchrun --nproc-per-node 2 train.py"),
        (["config=x.toml"], "options begin with two dashes: --config=x.toml"),
        (["configs/debug.toml"], "a config file is given as --config configs/debug.toml"),
        (["train.steps=5"], "options begin with two dashes: --train.steps=5"),
        (
            ["--log.trackers=wandb,tensorbord"],
            f"log.trackers[1]: {one_of(TRACKERS)}; the nearest is 'tensorboard'; "
            "docs/extending.md adds one of your own; e.g. --log.trackers=tensorboard",
        ),
        (["--optim.name=adamww"], f"{one_of(OPTIMIZERS)}; the nearest is 'adamw'; docs/extending.md"),
        (["--fsdp.sharding_strategy=shard_grad"], "the nearest is 'SHARD_GRAD_OP'"),
        (["--train.stepz", "400"], "--train.stepz=: unknown key; the nearest known one is train.steps"),
        (
            ["--optim.grups=[{match = '*'}]"],
            "--optim.grups=[{'match': '*'}]: unknown key; the nearest known one is optim.groups",
        ),
        (["--optim.steps=3"], "the nearest known one is train.steps"),
        (["--optim.seed=4"], "the nearest known one is run.seed"),
        (["--profiler.steps=4"], "the nearest known one is profile.steps"),
        (
            ["--optim.groups=[{match = 'layers.0.*'}, {match = '*', lr_factr = 1}]"],
            "optim.groups[1].lr_factr: extra inputs are not permitted; e.g. ",
        ),
        (["--optim.groups=3"], "e.g. '--optim.groups=[{ match = \"*norm*\", lr_factor = 0.5 }]'"),
        (["--profile.steps=ten"], "e.g. --profile.steps=10,12"),
        (
            ["--mixed-precision", "--fsdp.param_dtype=float16"],
            "--mixed-precision sets fsdp.param_dtype; leave --fsdp",
        ),
    ],
)
def test_a_hint_names_what_was_meant(argv: list[str], expected: str) -> None:
    text = mistakes(*argv)
    assert expected in text
    assert "1 problem:" in text, "the value of an unknown option is not a second problem"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layer.0.*", 'the nearest is "layers.0.*"'),
        ("tok_embedding.*", 'the nearest is "tok_embeddings.*"'),
        ("layers.1.atention.*", 'the nearest is "layers.1.attention.*"'),
    ],
)
@pytest.mark.parametrize("key", ["optim.freeze={!r}", "optim.groups=[{{match = {!r}}}]"])
def test_a_pattern_that_matches_nothing_gets_the_nearest(
    key: str, pattern: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--check-config", "--" + key.format(pattern)]) == 2
    assert expected in capsys.readouterr().err


def test_paths_are_found_and_their_problems_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK or path.name != "closed")
    files = {
        **{"foreign/meta.json": "{}", "torn/meta.json": "{", "damaged/meta.json": "{"},
        **dict.fromkeys(("ours/meta.json", "home/ours/meta.json"), '{"format_version": 1, "tokens_sha256": ""}'),
    }
    for name in (*files, "damaged/tokenizer.json", "damaged/train.idx", "x[1].txt", "x1.txt", "home/x2.txt", "closed"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(files.get(name, ""))
    unknown = "~nobody-of-this-name: the home folder is not known; write the path in full"
    found = {
        "prepared": [
            name for name in ("ours", "~/ours", "foreign", "torn", "damaged", "none") if paths.is_prepared(name)
        ],
        "kinds": [paths.kind_of(Path(name)) for name in ("ours", "closed", "/dev/null")],
        "matching": [[*map(str, paths.matching(name))] for name in ("x[1].txt", "**/x*.txt", "~/x2.txt", "none")],
        "problems": [paths.problem(name) for name in ("closed", "none", "~/x2.txt", "~nobody-of-this-name")],
        "unfound": [paths.unfound(name) for name in ("x*", "y*", "~nobody-of-this-name")],
    }
    assert found == {
        "prepared": ["ours", "~/ours", "damaged"],
        "kinds": ["a folder", "a file", "not a regular file"],
        "matching": [["x[1].txt"], ["home/x2.txt", "x1.txt", "x[1].txt"], [f"{tmp_path}/home/x2.txt"], []],
        "problems": [
            f"closed: permission denied to uid {os.geteuid()}",
            f"nothing at none (looked in {tmp_path})",
            "",
            unknown,
        ],
        "unfound": ["", "nothing found at y*", unknown],
    }


# --- spellings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--log.trackers=tensorboard", ["tensorboard"]),
        ("--optim.freeze=layers.0.*", ["layers.0.*"]),
        ("--sample.prompts=def ", ["def "]),
        ("--fsdp.sharding_strategy=full_shard", "FULL_SHARD"),
        ("--fsdp.param_dtype=bf16", "bfloat16"),
        ("--fsdp.output_dtype=FP32", "float32"),
        ("--model.family=GPT", "gpt"),
        ("--optim.name=AdamW", "adamw"),
        ("--run.device=CPU", "cpu"),
        ("--log.trackers=tensorboard, WandB", ["tensorboard", "wandb"]),
        ("--log.trackers=", []),
        ("--eval.tasks=brackets,my.jsonl", ["brackets", "my.jsonl"]),
        ("--optim.freeze=layers.[0,1].*,norm.*", ["layers.[0,1].*", "norm.*"]),
        ("--sample.prompts=One, two", ["One, two"]),
    ],
)
def test_a_choice_may_be_spelled_otherwise_and_commas_make_a_list(argument: str, value: object, tmp_path: Path) -> None:
    key, text = argument.removeprefix("--").split("=")
    section, name = key.split(".")
    (tmp_path / "a.toml").write_text(f'[{section}]\n{name} = "{text}"\n')
    for argv in ([argument], ["--config", str(tmp_path / "a.toml")]):
        assert getattr(getattr(parse(*argv).config, section), name) == value


@pytest.mark.parametrize("key", list(schema.known_keys()))
def test_an_example_for_the_shell_is_an_option(key: str) -> None:
    """A shell gives it back as one word, which means the value of the TOML example."""
    (word,) = shlex.split(messages.example(key).removeprefix("e.g. "))
    name, _, text = word.removeprefix("--").partition("=")
    assert name == key
    section, field = key.split(".")
    wanted = tomli.loads(messages.example(key, "a file").removeprefix("e.g. ").replace(key, "value", 1))["value"]
    found = getattr(type(schema.Config.model_fields[section].default)(**{field: load.parse_value(key, text)}), field)
    if key in ("optim.groups", "fsdp.precision_overrides"):
        found = [item.model_dump(exclude_unset=True) for item in found]
    assert (list(found) if isinstance(found, tuple) else found) == wanted
