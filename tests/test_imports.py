"""What a plain run imports: a start of train.py on the CPU with the defaults, on prepared data, with a save."""

import json
import re
import sys
from pathlib import Path

from tests.helpers import ROOT, TINY, options, python, start, succeeded

# by folder, the modules that it needs; another one is imported where it is asked for, inside a function
PLAIN = """
.:                      commands cpu data environment errors files models progress terminal
checkpointing:          before_save compatibility find full_state safetensors_file save shards state storage
                        tensor_names torch_storage
config:                 cli derive families load paths patterns phases registry rules schema section toml
config.rules:           data fsdp local model run train
config.sections:        data fsdp log model optim outputs run speed train
cpu:                    attention fused loss
data:                   dataset loader mixture open_samples order samples segments token_files
distributed:            evaluating exchange fsdp initialize lost normal_values overrides process_group
                        recompute_and_compile sharding
models:                 attention cache chunked_loss induction kernels llama loss masks rotary transformer
optim:                  finite_guard grad_scaler groups guarded muon optimizer step_record
run:                    attempts between_steps checks console metrics out_of_memory phases preemption rank_seconds
                        resumed run_folder saving session source_losses start_and_end watchdog
scoring:                likelihood statistics validation
"""
# packages that no plain run needs
NOT_LOADED = {"plotly", "pyarrow", "tensorboard", "torchao", "wandb", "transformers"}
_RUN = """
import json, sys
import train
from torchtitan_lite.distributed import process_group
def exit_process(code=0):
    print("LOADED " + json.dumps(sorted(sys.modules)))
    real(code)
real, train.exit_process, process_group.exit_process = process_group.exit_process, exit_process, exit_process
train.exit_process(train.main(sys.argv[1:]))
"""


def test_a_plain_run_imports_these_modules(text: Path, tmp_path: Path) -> None:
    words = [str(text), "--out", str(tmp_path / "data"), "--train-tokenizer", "400"]
    succeeded(python(*words, script="-m torchtitan_lite.data.prepare"))
    values = TINY | {"data.path": tmp_path / "data", "run.out_dir": tmp_path, "train.steps": 2, "optim.warmup_steps": 1}
    values |= {"model.family": "llama", "optim.name": "muon"}
    said = succeeded(start([sys.executable, "-c", _RUN, *options(values), "--run.name=run"]))
    assert "saved " in said
    (listed,) = re.findall(r"^LOADED (.*)$", said, re.M)
    loaded = set(json.loads(listed))
    expected, folder = set[str](), ""
    for line in PLAIN.strip().splitlines():
        folder = line[:24].strip().removesuffix(":") or folder
        expected |= {f"{folder}.{name}".strip(".") for name in line[24:].split()}
    modules = {name.removeprefix("torchtitan_lite.") for name in loaded if name.startswith("torchtitan_lite.")}
    modules = {name for name in modules if _has_content(name)}
    assert modules == expected, f"more: {sorted(modules - expected)}, fewer: {sorted(expected - modules)}"
    assert not NOT_LOADED & loaded


def _has_content(module: str) -> bool:
    path = ROOT / "torchtitan_lite" / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or bool((path / "__init__.py").read_text().strip())
