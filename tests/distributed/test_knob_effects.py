"""Shows each effect of knob_effects.py as a test."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.distributed import knob_effects
from tests.distributed.knob_effects import EFFECTS, OF_TWO_PROCESSES
from tests.distributed.knob_table import CASES
from tests.distributed.knob_worker import training
from tests.helpers import run_distributed
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.run.session import Session
from torchtitan_lite.tools.estimate.simulate import fake_world

MARKS = {
    "many_kinds_of_blocks_can_be_compiled_and_validated": pytest.mark.extended,  # compiles every kind of block
    "reduce_scatters_have_buffers_and_a_group_of_their_own": pytest.mark.skipif(
        not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="needs torch 2.13"
    ),
}


def builder(process: Process) -> Callable[..., Session]:
    """What builds a training of the table's first row from [fsdp] keys and the like."""

    def build(**more: Any) -> Session:
        values = {key.replace("__", "."): value for key, value in more.items()}
        return training(replace(CASES["llama"], ranks=process.world_size, set=values).config(), process)

    return build


@pytest.mark.parametrize(("ranks", "name"), [
    pytest.param(n, run.__name__, marks=MARKS.get(run.__name__, [])) for n, runs in EFFECTS.items() for run in runs
])  # fmt: skip
def test_each_knob_has_its_effect(ranks: int, name: str) -> None:
    with fake_world(ranks):
        getattr(knob_effects, name)(builder(Process(0, ranks, torch.device("cpu"), 1)))


def all_effects(process: Process) -> None:
    """Of two processes; the traceback of the first that fails names it."""
    for run in OF_TWO_PROCESSES:
        run(builder(process))


def test_effects_on_numbers_and_time_are_those_of_two_processes() -> None:
    run_distributed(all_effects, 2)
