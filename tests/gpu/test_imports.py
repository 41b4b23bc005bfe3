"""Every module can be imported by a CUDA build of torch on a machine without a driver, e.g. to check a config there."""

import sys

import pytest

from tests.helpers import ROOT, start, succeeded

_IMPORTS = """
import importlib, sys
from unittest.mock import patch
import torch

def no_driver(*_, **__):
    raise RuntimeError("Found no NVIDIA driver on your system.")

found = dict(is_flash_attention_available=lambda: True, is_mem_efficient_attention_available=lambda: True)
with patch.multiple(torch.backends.cuda, **{k: v for k, v in found.items() if hasattr(torch.backends.cuda, k)}):
    with patch.multiple(torch.cuda, _lazy_init=no_driver, get_device_capability=no_driver, current_device=no_driver):
        for name in sys.argv[1:]:
            importlib.import_module(name)
print("imported", len(sys.argv) - 1)
"""
# they need a package that not everybody has, which is no matter of the driver
OPTIONAL = {"torchtitan_lite.models.loss_kernel"}


@pytest.mark.extended
def test_every_module_can_be_imported_without_a_driver() -> None:
    files = (ROOT / "torchtitan_lite").rglob("*.py")
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    names = {name for name in names if not name.endswith("__main__")} - OPTIONAL
    # a process of its own: those that tests fork have imported most modules already
    assert f"imported {len(names)}" in succeeded(start([sys.executable, "-c", _IMPORTS, *sorted(names)]))
