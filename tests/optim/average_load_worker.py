"""Loads checkpoints with and without averages into optimizers with and without them, in all four ways: FOLDER."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import train
from checkpoint import Checkpointer
from tests.checkpointing.reload_worker import MODELS, WAYS
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import CheckpointConfig, Config, flatten
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.process_group import World, build_mesh, process_group
from torchtitan_lite.distributed.sharding import local_rows, optimizer_tensors, own_tensors
from torchtitan_lite.optim.optimizer import build_optimizer, set_learning_rate

DECAYS = 0.0, 0.9


class Trained:
    """A model after two steps, and its checkpointer in a way of saving."""

    def __init__(self, folder: Path, decay: float, seed: int, way: tuple[str, str], world: World) -> None:
        optim = {"ema_decay": decay, "name": "muon"}
        config = Config.model_validate({"model": MODELS["llama"], "run": {"device": "cpu"}, "optim": optim})
        self.model = train.sharded_model(config, 517, build_mesh(derive(config, world.world_size), world.device))
        materialise(self.model, world.device, seed)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.state = TrainState(step=2, config=flatten(config))
        set_learning_rate(self.optimizer, 0.01)
        kind, api = way
        saving = CheckpointConfig.model_validate({"state_dict": kind, "api": api})
        self.saves = Checkpointer(folder, self.model, self.optimizer, saving, world)

    def train(self) -> None:
        for _ in range(2):
            tokens = torch.arange(8).reshape(2, 4)
            self.model(tokens, tokens).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def rows(self) -> dict[str, Tensor]:
        """This rank's rows of everything."""
        content = own_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)
        return {name: local_rows(tensor)[0].clone() for name, tensor in content.items()}


def main(argv: Sequence[str]) -> int:
    with process_group(Config.model_validate({"run": {"device": "cpu", "threads": 1}}).run) as world:
        for way in WAYS:
            for saved in DECAYS:
                folder = Path(argv[0]) / f"{way} {saved}"
                source = Trained(folder, saved, 1, way, world)
                source.train()
                source.saves.save(source.state)
                outcome = source.saves.wait()
                assert outcome is not None
                assert not outcome.error, outcome.error
                expected = source.rows()
                for now in DECAYS:
                    target = Trained(folder, now, 2, way, world)
                    assert target.saves.load({}) is not None
                    found = target.rows()
                    wanted = {name: tensor for name, tensor in expected.items() if now or not name.startswith("ema.")}
                    if now and not saved:  # a new average starts from the weights
                        wanted |= {f"ema.{n}": expected[n] for n, p in target.model.named_parameters()}
                    assert found.keys() == wanted.keys(), f"{way}, saved with {saved}, loaded with {now}"
                    wrong = [name for name, tensor in wanted.items() if not found[name].equal(tensor)]
                    assert not wrong, f"{way}, saved with {saved}, loaded with {now}: {wrong}"
                    target.train()
                    assert any(name.startswith("ema.") for name in target.rows()) == bool(now)
    return 0
