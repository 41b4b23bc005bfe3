"""`python -m tests.fake_cuda MODULE ARGUMENTS` runs MODULE.main(ARGUMENTS) on the stand-in for a CUDA device."""

import importlib
import os
import sys

from tests.fake_cuda import library

library.load()

from tests.fake_cuda import stand_ins  # noqa: E402  # imports torch

stand_ins.install()
code = importlib.import_module(sys.argv[1]).main(sys.argv[2:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # torch's own tear-down would look for a driver
