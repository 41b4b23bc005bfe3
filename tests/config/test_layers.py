"""Defaults, sizes, files with `base`, options and shorthands: which value applies, and where it came from."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

import train
from tests.config.parsing import parse, write
from tests.helpers import ROOT, python, succeeded
from torchtitan_lite.config import cli, load, schema, toml
from torchtitan_lite.config.derive import Layout, derive
from torchtitan_lite.run import console
from torchtitan_lite.tools import config_reference


def test_file_on_base_on_size_on_defaults_and_command_line_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base is next to its file, else in the working directory; editors on Windows write a byte order mark."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    write(tmp_path / "base.toml", '[model]\nfamily = "gpt"\nn_layers = 3\n[train]\nsteps = 50\nseq_len = 64\n')
    write(tmp_path / "size.toml", "[train]\nseq_len = 7\n")  # not the one next to the file
    write(tmp_path / "configs/size.toml", '\ufeffbase = "base.toml"\n[model]\nsize = "10M"\n')
    file = write(tmp_path / "configs/mine.toml", 'base = "size.toml"\n[model]\nn_heads = 10\n[train]\nsteps = 60\n')
    loaded = parse("--config", str(file), "--train.micro_batch_size=3", "--mixed-precision")
    flat, origins = schema.flatten(loaded.config), {key: Path(name).name for key, name in loaded.origins.items()}
    expected = {
        **{"model.dim": (320, 'size "10M"'), "model.n_layers": (8, 'size "10M"'), "model.n_heads": (10, "mine.toml")},
        **{
            "train.steps": (60, "mine.toml"),
            "train.seq_len": (64, "base.toml"),
            "run.name": ("mine", "name of the file"),
        },
        **{"train.micro_batch_size": (3, "command line"), "fsdp.param_dtype": ("bfloat16", "command line")},
    }
    assert {key: (flat[key], origins[key]) for key in expected} == expected
    note = f'model.n_layers: size "10M" of {tmp_path}/configs/size.toml overrides the values below it'
    assert toml.to_toml_with_origins(loaded).startswith(
        f'# note: {note}\n[run]\nname = "mine"{" " * 31} # name of the '
    )


def test_which_values_a_resume_keeps() -> None:
    """Those that decide what a run learns, and that neither the command nor its size or family gives."""
    own = {"run.seed": 3, "model.norm_eps": 0.1, "train.steps": 9, "optim.name": "adamw", "optim.lr": 0.5}
    others = {"log.every": 7, "data.cache_dir": "x", "gone.key": 1, "optim.eps": 0.1}
    saved = Mock(return_value=schema.flatten(load.load(None, {}).config) | others | own | {"optim.muon_momentum": 0.7})
    given = {"run.out_dir": "o", "run.name": "n", "checkpoint.resume": "r", "optim.eps": 1e-6}
    for more, dropped in (({}, "none"), ({"model.size": "3M"}, "model."), ({"model.family": "gpt"}, "")):
        loaded = load.load(None, given | more, saved=saved, elsewhere=True)
        kept = {key: value for key, value in own.items() if not key.startswith(dropped)}
        found = {key: value for key, value in schema.flatten(loaded.config).items() if key in (own | others)}
        expected = load.load(None, given | more | kept, elsewhere=True).config
        assert (loaded.kept, found) == ([*kept], {key: schema.flatten(expected)[key] for key in found})
    saved.assert_called_with(Path("o/n"), "r")


@pytest.mark.parametrize(
    ("strategy", "more", "expected"),
    [
        ("FULL_SHARD", [], (True, 1, 8)),
        ("SHARD_GRAD_OP", [], (False, 1, 8)),
        ("HYBRID_SHARD", [], (True, 2, 4)),
        ("_HYBRID_SHARD_ZERO2", [], (False, 2, 4)),
        ("HYBRID_SHARD", ["--fsdp.dp_replicate=4"], (True, 4, 2)),
        ("HYBRID_SHARD", ["--fsdp.dp_shard=2"], (True, 4, 2)),
        ("NO_SHARD", [], (False, 8, 1)),
        ("FULL_SHARD", ["--fsdp.reshard_after_forward=true", "--fsdp.dp_shard=8"], (True, 1, 8)),
        ("SHARD_GRAD_OP", ["--fsdp.reshard_after_forward=default", "--fsdp.dp_shard=-1"], (False, 1, 8)),
    ],
)
def test_fsdp1_strategies_become_their_fsdp2_options(
    strategy: str, more: list[str], expected: tuple[bool, int, int]
) -> None:
    """On two machines of four ranks each."""
    argv = [f"--fsdp.sharding_strategy={strategy}", *more]
    loaded = cli.parse(argv, world_size=8, n_gpus=0, local_world_size=4).loaded
    layout = derive(loaded.config, 8)
    assert (loaded.config.fsdp.reshard_after_forward, layout.dp_replicate, layout.dp_shard) == expected
    assert loaded.origins["fsdp.reshard_after_forward"] in ("fsdp.sharding_strategy", "command line")


PAIRS = ["--data.objective=pairs", "--data.source_key=a", "--data.target_key=b", "--data.target_len=8"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [  # on six ranks: the mesh, micro-batches of a step, padding sequences of the last one, tokens of a step
        (["--train.global_batch_size=36"], Layout(1, 6, 2, 0, 36 * 64)),
        (["--train.global_batch_size=37", "--fsdp.dp_replicate=3"], Layout(3, 2, 3, 17, 37 * 64)),
        (["--train.global_batch_size=5", "--fsdp.dp_replicate=-1", "--fsdp.dp_shard=3"], Layout(2, 3, 1, 13, 5 * 64)),
        (["--train.batch_schedule=[[0, 2], [9, 20], [10, 99]]", "--train.steps=10"], Layout(1, 6, 2, 16, 20 * 64)),
        (["--train.batch_schedule=[[3, 4], [5, 9], [20, 99]]", "--train.steps=8"], Layout(1, 6, 1, 9, 9 * 64)),
        (
            ["--model.family=t5", "--data.objective=span_corruption", "--train.global_batch_size=18"],
            Layout(1, 6, 1, 0, 18 * 14),
        ),
        (["--model.family=t5", *PAIRS, "--train.global_batch_size=18"], Layout(1, 6, 1, 0, 18 * 8)),
        ([*PAIRS, "--train.global_batch_size=18"], Layout(1, 6, 1, 0, 18 * 72)),
    ],
)
def test_the_mesh_and_the_micro_batches_of_a_step(options: list[str], expected: Layout) -> None:
    config = parse(*options, "--train.seq_len=64", "--train.micro_batch_size=3", world_size=6).config
    sizes = map(config.train.batch_size, range(1, config.train.steps + 1))
    assert (derive(config, 6), config.train.samples) == (expected, sum(sizes))


KEPT = "fsdp.reshard_after_forward = false"
MORE = f'{KEPT}, fsdp.reshard_after_backward = false and fsdp.grad_sync = "last" (sums in a different order)'


@pytest.mark.parametrize(
    ("options", "world_size", "keys"),
    [
        (["--train.global_batch_size=4"], 1, KEPT),
        (["--train.global_batch_size=5"], 1, MORE),
        (["--train.global_batch_size=4", "--fsdp.reshard_after_forward=true"], 1, ""),
        (["--train.global_batch_size=5"], 2, ""),
        (["--train.global_batch_size=5", "--fsdp.dp_replicate=2"], 2, KEPT),
    ],
)
def test_keys_that_save_copies_are_named_if_nothing_is_sharded(options: list[str], world_size: int, keys: str) -> None:
    config = parse(*options, "--train.micro_batch_size=4", world_size=world_size).config
    line = f"fsdp    nothing is sharded: if memory allows, {keys} would avoid copies of the parameters (see plan)"
    assert console.copies_lines(config, derive(config, world_size)) == ([line] if keys else [])


def test_help_lists_the_usual_keys_or_every_key_with_meaning_and_default() -> None:
    text = " ".join(succeeded(python("--help-all")).split())
    for key, field in schema.known_keys().items():
        assert f"--{key}" in text
        assert field.description, f"{key} has no help"
        assert f"{field.description} (default: " in text
    usual = succeeded(python("--help"))
    assert len(re.findall(r"^  --[a-z_]+\.[a-z_]+", usual, re.MULTILINE)) == 30
    assert "--help-all" in usual


def test_the_reference_is_made_from_the_config() -> None:
    page = (ROOT / "docs/config.md").read_text()
    assert page == "\n".join(config_reference.lines()) + "\n", (
        "python -m torchtitan_lite.tools.config_reference > docs/config.md"
    )


@pytest.mark.parametrize("option", ["--check-config", "--print-config"])
def test_a_look_at_a_config_leaves_no_folder(option: str, tmp_path: Path) -> None:
    assert train.main([option, f"--run.out_dir={tmp_path / 'runs'}"]) == 0
    assert not list(tmp_path.iterdir())


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    config = parse("--optim.betas=[0.8, 0.9]", '--data.path=["tests/*.py"]', "--optim.max_norm=inf").config
    assert config.optim.betas == (0.8, 0.9)
    for text in (toml.to_toml(config), toml.to_toml_with_origins(toml.Loaded(config, {}))):
        file = write(tmp_path / "config.toml", text)
        assert parse("--config", str(file)).config == config
