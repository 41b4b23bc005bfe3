"""The settings that train.py gives the allocator of CUDA memory: `allocator_worker.py [NAME=VALUE ...]`.

For each environment it forks a process that runs train.py up to its first use of CUDA, which is a stand-in.
"""

import os
import sys

import torch

import train


def first_use() -> int:
    """In place of `torch.cuda.device_count`."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # from the environment, now
    if read is None:  # torch 2.11 does not tell: print what it will read
        settings = next(value for name, value in os.environ.items() if name.endswith("ALLOC_CONF"))
    else:
        settings = read()
    print(settings, flush=True)
    raise SystemExit(0)


torch.cuda.device_count = first_use
for given in sys.argv[1:]:
    print(given, end=": ", flush=True)
    child = os.fork()
    if not child:
        if given:
            name, value = given.split("=")
            os.environ[name] = value
        train.main([])
    os.waitpid(child, 0)
