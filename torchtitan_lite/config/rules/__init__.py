"""Rules between keys: each yields the keys involved, and a message with what is wrong and what works."""

from torchtitan_lite.config.rules import data, fsdp, local, model, run, train
from torchtitan_lite.config.schema import Config, Machine

RULES = run.rules, model.rules, data.rules, train.rules, fsdp.strategy_rules, fsdp.rules, fsdp.float8_rules


def broken_rules(config: Config, machine: Machine, *, elsewhere: bool = False) -> dict[str, str]:
    """Return the broken rules between keys: {"the keys involved": what is wrong and what works}.

    Args:
        elsewhere: skip checks of this machine's files, packages and compiler, as the run is for a different machine.
    """
    rules = RULES if elsewhere else (*RULES, local.path_rules, local.package_rules)
    return {keys: message for rule in rules for keys, message in rule(config, machine)}
