"""The settings that train.py gives the allocator of CUDA memory: `allocator_worker.py [NAME=VALUE ...]`.

For each environment it forks a process that runs train.py up to its first use of CUDA, which is a stand-in.
"""

import os
import sys

import torch

import train


def first_use() -> int:
    """In place of `torch.cuda.device_count`."""
    print(torch._C._accelerator_getAllocatorSettings(), flush=True)  # read from the environment now
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
