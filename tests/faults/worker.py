"""Faults in train.py: FAULT="action:rank:step[:site[:times]]", several with commas between.

From this step on, where the rank comes to the site, the action happens, `times` times (1). Actions:

kill       SIGKILL, in the first attempt only (torchrun --max-restarts)
halve      a file of the folder that is being deleted goes, then SIGKILL
error      OSError "no space left"
eio        OSError "input/output error"
full       from now on no file of this rank can grow beyond 4 KiB (RLIMIT_FSIZE)
raise      an error that nobody expects
exit       the process leaves with 0
hang       it waits for ever
device     its GPU computes for ever; without a GPU: as hang
slow       it waits for FAULT_SECONDS
term       SIGTERM to itself
vanish     the run's folder is renamed
flip       a bit of a parameter flips, in the memory of this rank
flip_after a higher one flips, after the site
nan        the loss of the first micro-batch is NaN
poison     a weight of this rank is NaN, in the feed-forward layer of block 1
nan_grad   from now on the gradients of block 1's outputs are NaN
wrong      the loss of the first micro-batch is too large
wrong_grad and its gradient only
"""

import errno
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import train
from torchtitan_lite.checkpointing import safetensors_file, save, storage
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.data.loader import PrefetchingLoader
from torchtitan_lite.distributed.process_group import exit_process
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.environment import env_int
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.gpt import TransformerBlock
from torchtitan_lite.run import between_steps, run_folder, sampling, start_and_end, tasks

# where a fault can be: the function that is about to be called
SITES: dict[str, tuple[Any, str]] = {
    "step": (train, "train_step"),
    "batch": (PrefetchingLoader, "batch"),
    "forward": (Transformer, "forward"),
    "block": (TransformerBlock, "forward"),
    "eval": (between_steps, "evaluate"),
    "sample": (sampling, "sample"),
    "task": (tasks.Tasks, "score"),
    "lock": (run_folder, "lock"),
    "connect": (start_and_end, "sum_over_ranks"),
    "hash": (storage, "sha256_of"),
    "space": (storage, "require_space"),
    "save": (Checkpointer, "save"),
    "begin": (storage, "new_folder"),
    "write": (safetensors_file.TensorWriter, "write"),
    "sync": (safetensors_file, "flush_to_disk"),
    "commit": (storage, "commit"),
    "manifest": (storage, "_hash_of"),
    "before rename": (storage, "sync_folder"),
    "after rename": (save, "to_keep"),
    "delete": (shutil, "rmtree"),
}
now = 0  # the step that this rank is at


def install(faults: str) -> None:
    """Put the faults in place."""
    for fault in faults.split(","):
        action, rank, step, site, times = (*fault.split(":"), *("step", "1")[len(fault.split(":")) - 3 :])
        if env_int("RANK", 0) == int(rank):
            _at_site(action, int(step), site, int(times))
    _follow_steps()


def _follow_steps() -> None:
    honest = train.train_step

    def train_step(s: Any, step: int) -> Any:
        global now
        now = step
        return honest(s, step)

    train.train_step = train_step


def _at_site(action: str, step: int, site: str, times: int) -> None:
    owner, name = SITES[site]
    honest = getattr(owner, name)
    fired = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal fired
        if fired < times and now >= step and not (action == "kill" and env_int("TORCHELASTIC_RESTART_COUNT", 0)):
            fired += 1
            # tests assert that this was said: a fault that does not happen proves nothing
            print(f"FAULT {action} fired on rank {env_int('RANK', 0)} at step {now}, {site}", flush=True)
            instead = ACTIONS[action](args)
            if instead is not None:
                return instead(honest(*args, **kwargs))
        return honest(*args, **kwargs)

    setattr(owner, name, faulty)


def _signal(number: signal.Signals) -> Callable[[Any], None]:
    return lambda _: os.kill(os.getpid(), number)


def _os_error(number: int) -> Callable[[Any], None]:
    def fail(_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _halve(args: Any) -> None:
    next(Path(args[0]).glob("*.*")).unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def _full(_: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _raise(_: Any) -> None:
    raise ZeroDivisionError("a bug in somebody's loader")


def _vanish(_: Any) -> None:
    folder = Path(os.environ["FAULT_FOLDER"])
    folder.rename(folder.with_name("gone"))


def _flip(args: Any, bit: int = 3) -> None:
    with torch.no_grad():
        model = getattr(args[0], "trained", args[0]).model  # of a session, or of a checkpointer
        own_part(model.output.weight)[0].view(torch.int32)[0, 0] ^= 1 << bit


def _flip_after(args: Any) -> Callable[[Any], Any]:
    def instead(result: Any) -> Any:
        _flip(args, 22)
        return result

    return instead


def _poison(args: Any) -> None:
    own_part(args[0].model.layers[1].feed_forward.w2.weight.detach())[0][0, 0] = torch.nan


def _nan_grad(args: Any) -> None:
    args[0].model.layers[1].register_full_backward_pre_hook(
        lambda _, gradients: tuple(g * torch.nan for g in gradients)
    )


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "kill": _signal(signal.SIGKILL),
    "halve": _halve,
    "error": _os_error(errno.ENOSPC),
    "eio": _os_error(errno.EIO),
    "full": _full,
    "raise": _raise,
    "exit": lambda _: os._exit(0),
    "hang": lambda _: time.sleep(10_000),
    "device": lambda _: torch.cuda._sleep(1 << 60) if torch.cuda.is_available() else time.sleep(10_000),
    "slow": lambda _: time.sleep(float(os.environ["FAULT_SECONDS"])),
    "term": _signal(signal.SIGTERM),
    "vanish": _vanish,
    "flip": _flip,
    "flip_after": _flip_after,
    "nan": lambda _: lambda loss: loss * torch.nan,
    "poison": _poison,
    "nan_grad": _nan_grad,
    "wrong": lambda _: lambda loss: loss * 1.01,
    "wrong_grad": lambda _: lambda loss: loss.register_hook(lambda gradient: 1.5 * gradient) and loss,
}

if __name__ == "__main__":
    install(os.environ["FAULT"])
    exit_process(train.main(sys.argv[1:]))
