"""A printed config loads as the same config."""

from pathlib import Path

from tests.config.parsing import parse, write
from torchtitan_lite.config import toml


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    config = parse("--optim.betas=[0.8, 0.9]", '--data.path=["tests/*.py"]', "--optim.max_norm=inf").config
    assert config.optim.betas == (0.8, 0.9)
    for text in (toml.to_toml(config), toml.to_toml_with_origins(toml.Loaded(config, {}))):
        file = write(tmp_path / "config.toml", text)
        assert parse("--config", str(file)).config == config
