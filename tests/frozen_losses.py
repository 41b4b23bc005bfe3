"""The first losses of each optimizer in float32, on one thread: `python -m tests.frozen_losses [FILE]` writes the file.

The file has the config too, with every value that the losses depend on: defaults may change, and these numbers stay.
The real train_step runs; only the text is made up.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import train
from benchmarks.bare_session import bare_session
from tests.distributed.knob_table import VOCABULARY, FixedSamples
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh, exit_process, process_group

FILE = Path(__file__).with_suffix(".json")


def config_of(sections: dict[str, dict[str, Any]]) -> Config:
    given = {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    return load.load(None, given, world_size=1, n_gpus=0, local_world_size=1).config


def losses(config: Config, process: Process) -> list[float]:
    """The losses of the run's steps."""
    model = train.sharded_model(config, VOCABULARY, build_mesh(config.fsdp, process.device))
    materialize(model, process.device, config.run.seed)
    loader = Loader(
        FixedSamples(config.train.seq_len),
        micro_batch_size=config.train.micro_batch_size,
        rank=0,
        world_size=1,
        seed=config.run.seed,
    )
    session = bare_session(config, process, model, loader)
    return [train.train_step(session, step).loss.item() for step in range(1, config.train.steps + 1)]


def main(argv: Sequence[str]) -> int:
    content = json.loads(FILE.read_text())
    common = content["config"]
    with process_group(config_of(common).run) as process:
        for name, optimizer in content["optimizers"].items():
            config = config_of(common | {"optim": common["optim"] | optimizer | {"name": name}})
            content["losses"][name] = [round(loss, 6) for loss in losses(config, process)]
    Path(argv[0] if argv else FILE).write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
