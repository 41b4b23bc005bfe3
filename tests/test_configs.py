"""Every shipped config: it is parsed, and runs two steps or, where it is too big, is sharded on the meta device."""

from pathlib import Path

import pytest

from tests.helpers import ROOT, losses, python, ranks, succeeded, tiny
from torchtitan_lite import settings

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
BIG = [file for file in CONFIGS if settings.load(file, {}).config.model.dim >= 512]
# the model and the optimizer are the config's; text and batch are ours, to be done in seconds
OURS = {"data.path", "tokenizer.vocab_size", "run.out_dir", "run.device", "run.threads"}
OURS |= {"train.steps", "eval.samples", "sample.every"}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_config_is_complete(file: Path) -> None:
    for world_size in (1, 2, 8):
        config = settings.load(file, {}, world_size=world_size).config
        assert config.run.name == file.stem
    assert file.read_text().startswith("# "), "a config says in a comment what it is for"


@pytest.mark.parametrize("file", [file for file in CONFIGS if file not in BIG], ids=lambda file: file.stem)
def test_small_configs_run_two_steps(file: Path, text: Path, tmp_path: Path) -> None:
    more = {"train__steps": 2, "train__micro_batch_size": 2, "train__global_batch_size": 4, "optim__warmup_steps": 1}
    keep = (*OURS, "train.micro_batch_size", "train.global_batch_size", "optim.warmup_steps", "log.every")
    command = [option for option in tiny(text, tmp_path, **more) if option.split("=")[0].removeprefix("--") in keep]
    output = succeeded(ranks(1, "--config", str(file), *command))
    assert f"the run is in {tmp_path / file.stem}" in output
    assert set(losses(tmp_path / file.stem)) == {1, 2}


def test_big_configs_are_sharded_over_8_ranks() -> None:
    lines = succeeded(python(*map(str, BIG), script="tests/fake_world.py")).splitlines()
    assert len(lines) == len(BIG) >= 2
    for line in lines:
        _, total, mine = line.split()
        assert int(total) > 100e6
        assert int(mine) / int(total) == pytest.approx(1 / 8, rel=0.01)
