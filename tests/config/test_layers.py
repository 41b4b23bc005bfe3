"""Values that a resume keeps, the help, paths, and examples for a shell."""

import os
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
import tomli

from tests.config.parsing import only_built_in
from tests.helpers import ROOT, python, succeeded
from torchtitan_lite.config import load, messages, paths, schema
from torchtitan_lite.tools import config_reference


def test_which_values_a_resume_keeps() -> None:
    """Those that decide what a run learns, and that neither the command nor its size or family gives."""
    own = {"run.seed": 3, "model.norm_eps": 0.1, "train.steps": 9, "optim.name": "adamw", "optim.lr": 0.5}
    others = {"log.every": 7, "data.cache_dir": "x", "gone.key": 1, "optim.eps": 0.1, "optim.step_every": 9}
    saved = Mock(return_value=schema.flatten(load.load(None, {}).config) | others | own | {"optim.muon_momentum": 0.7})
    given = {
        "run.out_dir": "~/o",
        "run.name": "n",
        "run.remote": "s3://b/",
        "checkpoint.resume": "r",
        "optim.eps": 1e-6,
    }
    for more, dropped in (
        ({}, "none"),
        ({"model.family": "LLaMA"}, "none"),
        ({"model.size": "1M"}, "none"),
        ({"model.size": "3M"}, "model."),
        ({"model.family": "gpt"}, ""),
    ):
        loaded = load.load(None, given | more, saved=saved, elsewhere=True)
        kept = {key: value for key, value in own.items() if not key.startswith(dropped)}
        found = {key: value for key, value in schema.flatten(loaded.config).items() if key in (own | others)}
        expected = load.load(None, given | more | kept, elsewhere=True).config
        assert (loaded.kept, found) == ([*kept], {key: schema.flatten(expected)[key] for key in found})
    saved.assert_called_with(Path.home() / "o/n", "r", "s3://b/n")


def test_help_lists_the_usual_keys_or_every_key_with_meaning_and_default() -> None:
    text = " ".join(succeeded(python("--help-all")).split())
    for key, field in schema.known_keys().items():
        assert f"--{key}" in text
        assert field.description, f"{key} has no help"
        assert f"{field.description} (default: " in text
    usual = succeeded(python("--help"))
    assert len(re.findall(r"^  --[a-z_]+\.[a-z_]+", usual, re.MULTILINE)) == 30
    assert "--help-all" in usual


def test_the_reference_is_made_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    only_built_in(monkeypatch)
    assert (ROOT / "docs/config.md").read_text() == "\n".join(config_reference.lines()) + "\n", (
        "python -m torchtitan_lite.tools.config_reference > docs/config.md"
    )


# the first six are no folders of this machine
NAMES = ["wikitext", "org/data-set_1.0", "https://example.com/a.txt", "hf://datasets/org/data"]
NAMES += ["https:/huggingface.co/datasets/org/data", "org.name/Model-3.2-1B"]
NAMES += ["a.txt", "home/none", "a/b/c", "/none", "org/*.txt", "none/"]


def test_paths_are_found_and_their_problems_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK or path.name != "closed")
    files = [f"{folder}/{name}" for folder in ("ours", "home/ours") for name in ("meta.json", "tokenizer.json")]
    for name in (*files, "foreign/meta.json", "x[1].txt", "x1.txt", "home/x2.txt", "closed"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    unknown = f"at ~nobody-of-this-name (looked in {tmp_path})"
    found = {
        "prepared": [name for name in ("ours", "~/ours", "foreign", "none") if paths.is_prepared(name)],
        "matching": [[*map(str, paths.matching(name))] for name in ("x[1].txt", "**/x*.txt", "~/x2.txt", "none")],
        "problems": [
            paths.problem(name) for name in ("closed", "none", "~/x2.txt", "~nobody-of-this-name", "closed/x")
        ],
        "unfound": [paths.unfound(name) for name in ("x*", "y*", "closed/x/y", "~nobody-of-this-name", "a" * 300)],
        "elsewhere": [name for name in NAMES if "; nothing is downloaded here" in paths.unfound(name)],
    }
    assert found == {
        "prepared": ["ours", "~/ours"],
        "matching": [["x[1].txt"], ["home/x2.txt", "x1.txt", "x[1].txt"], [f"{tmp_path}/home/x2.txt"], []],
        "problems": [
            f"closed: permission denied to uid {os.geteuid()}",
            f"nothing at none (looked in {tmp_path})",
            "",
            f"nothing {unknown}",
            "[Errno 20] Not a directory: 'closed/x'",
        ],
        "unfound": [
            "",
            *(f"nothing found at {name} (looked in {tmp_path})" for name in ("y*", "closed/x/y")),
            f"nothing found {unknown}",
            f"{'a' * 300} can't be read: File name too long",
        ],
        "elsewhere": NAMES[:6],
    }


@pytest.mark.parametrize("key", list(schema.known_keys()))
def test_an_example_for_the_shell_is_an_option(key: str) -> None:
    """A shell gives it back as one word, which means the value of the TOML example."""
    (word,) = shlex.split(messages.example(key).removeprefix("e.g. "))
    name, _, text = word.removeprefix("--").partition("=")
    assert name == key
    section, field = key.split(".")
    wanted = tomli.loads(messages.example(key, "a file").removeprefix("e.g. ").replace(key, "value", 1))["value"]
    for own in wanted if key == "log.metrics" else ():
        schema.REGISTRIES[key].add(own)
    found = getattr(type(schema.Config.model_fields[section].default)(**{field: load.parse_value(key, text)}), field)
    if key in ("optim.groups", "fsdp.precision_overrides"):
        found = [item.model_dump(exclude_unset=True) for item in found]
    assert (list(found) if isinstance(found, tuple) else found) == wanted
