"""The parts of a session that only some runs have, and their checks: prompts, tasks, the profiler, spikes."""

from typing import Any

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import DataError


def build_options(config: Config, data: DataSet, world: World) -> dict[str, Any]:
    """The parts that this config asks for. Collective. Raises UserError: a part does not suit the run."""
    found: dict[str, Any] = {}
    if config.sample.every:
        from torchtitan_lite.training.sampling import Prompts

        found["prompts"] = Prompts.of(config, data)
    if config.tasks:
        from torchtitan_lite.training.tasks import Tasks

        found["tasks"] = Tasks.of(config, data)
    if config.profile.steps:
        from torchtitan_lite.monitoring.profiler import Profile

        found["profile"] = Profile(config.profile, config.folder, world)
    if config.spike.action != "off" or config.spike.recheck:
        from torchtitan_lite.training.spikes.watch import Spikes

        found["spikes"] = Spikes(config.spike)
    return found


def broken_rules(config: Config) -> dict[str, str]:
    """The broken rules about tasks, and about a tokenizer that exists already, for the objective and the prompts."""
    if config.data.objective != "causal" and config.tokenizer.path:
        from torchtitan_lite.data.spans import wrong_tokenizer

        if found := wrong_tokenizer(config):
            return found
    if config.tasks:
        from torchtitan_lite.training.tasks import wrong_tasks

        if found := wrong_tasks(config):
            return found
    if not config.sample.every:
        return {}
    from torchtitan_lite.training.sampling import known_tokenizer, wrong_prompts

    try:
        tokenizer = known_tokenizer(config)
    except DataError as error:
        return {"tokenizer.path": str(error)}
    return {f"sample.prompts {n}": wrong for n, wrong in enumerate(wrong_prompts(config, tokenizer))}
