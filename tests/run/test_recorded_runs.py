"""Four runs, and what their folders hold: every record, every file and tensor of a checkpoint, and their sums.

Nothing else holds: the keys of each record and of state.json, which files are there, and the sums of weights and
optimizer state after four steps; read their diffs. test_resume.py holds that such runs repeat,
test_plain_loading.py and test_reload.py that shards can be read.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.helpers import ranks, succeeded, tiny
from tests.recorded import assert_recorded

# what differs from one machine, or one launch, to the next
CHANGING = re.compile(
    "(.*_)?time|(rank_)?seconds|goodput|mfu|state.json|.*_s|tokens_per_second|peak_memory_gib|sha256|torch|torchtitan_lite|python|hosts?|git|cpu"
    "|instructions|widen_matmuls"
)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts, fp16, Muon, averages, two texts": (2, {
        "model__family": "qwen3_moe", "model__n_experts": 4, "model__n_layers": 1,
        "fsdp__param_dtype": "float16", "optim__name": "muon",
        "optim__ema_decay": 0.9, "checkpoint__state_dict": "sharded", "data__path": "",
        "data__sources": "{ 'FOLDER/one.jsonl' = 3.0, 'FOLDER/two.txt' = 1.0 }",
    }),
    "dropout, a full state by DCP, best fit": (1, {
        "model__dropout": 0.1, "checkpoint__api": "dcp", "data__packing": "best_fit", "optim__schedule": "wsd",
        "checkpoint__keep_latest": 1, "eval__every": 3, "sample__every": 3, "log__every": 3, "train__z_loss": 0.1,
        "run__peak_tflops": 1.0,
    }),
    "pairs": (2, {
        "model__family": "t5", "data__path": "FOLDER/one.jsonl", "data__objective": "pairs", "data__source_key": "text",
        "data__target_key": "head", "data__target_len": 5,  "model__dropout": 0.1,
    }),
    "replicas, sharded by DCP, frozen": (2, {
        "model__family": "olmo_hybrid", "fsdp__dp_replicate": 2, "fsdp__param_dtype": "float16",
        "checkpoint__state_dict": "sharded",
        "checkpoint__api": "dcp", "optim__freeze": "['layers.0.*']", "checkpoint__async_save": True,
        "optim__groups": "[{match = '*norm*', lr_factor = 0.5, weight_decay = 0.3}]",
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two made-up texts."""
    folder = tmp_path_factory.mktemp("recorded")
    chance = random.Random(3)
    words = ["".join(chance.choices("aeinorstuäß語", k=chance.randint(2, 7))) for _ in range(300)]
    documents = [" ".join(chance.choices(words, k=5 + i % 50)) for i in range(200)]
    lines = [json.dumps({"text": text, "head": " ".join(text.split()[-4:])}) for text in documents[:140]]
    (folder / "one.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "two.txt").write_text("\n\n".join(documents[140:]), encoding="utf-8")
    return folder


def masked(value: Any, folders: dict[str, str]) -> Any:
    """Without what changes. A null stays."""
    if isinstance(value, dict):
        given = {masked(key, folders): item for key, item in value.items() if key != "config"}
        return {
            key: "#" if CHANGING.fullmatch(key) and item is not None else masked(item, folders)
            for key, item in given.items()
        }
    if isinstance(value, list):
        return [masked(item, folders) for item in value]
    for folder, name in folders.items() if isinstance(value, str) else ():
        value = value.replace(folder, name)
    return value


def content(file: Path, folders: dict[str, str]) -> Any:
    """What a file says: JSON, and of tensors dtype, shape and the sum of their absolute values."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
            return {"metadata": opened.metadata()} | {
                name: f"{str(t.dtype).removeprefix('torch.')} {[*t.shape]} {t.double().abs().sum():.4g}"
                for name, t in tensors.items()
                if "wk.bias" not in name  # the softmax cancels it: its gradient is rounding
            }
    text = file.read_text("utf-8")
    if file.suffix == ".jsonl":
        records = [masked(json.loads(line), folders) for line in text.splitlines()]
        # a save in the background is reported when it is done
        return (
            sorted(records, key=lambda record: (record.get("step", 0), [*record]))
            if file.stem == "metrics"
            else records
        )
    found = masked(json.loads(text), folders)
    if file.name == "manifest.json" and "layout" in found:
        tensors = found["layout"]["tensors"]
        found["layout"]["tensors"] = {name: " ".join(map(str, entry)) for name, entry in tensors.items()}
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_folder_of_a_run_is_the_recorded_one(name: str, folder: Path, tmp_path: Path) -> None:
    n, more = RUNS[name]
    given = {
        key: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value for key, value in more.items()
    }
    common = {"run__name": "run", "train__steps": 4, "eval__every": 2, "checkpoint__every": 2, "sample__every": 4}
    succeeded(ranks(n, *tiny(folder, tmp_path, **(common | given))))
    run = tmp_path / "run"
    files = {str(file.relative_to(run)): file for file in sorted(run.rglob("*")) if file.is_file()}
    found: dict[str, Any] = {"files": [*files]}
    for path, file in files.items():
        whole = "step-00000002" not in path or file.name == "manifest.json"  # the same again at step 4
        if file.suffix in (".json", ".jsonl", ".safetensors") and path != "tokenizer.json" and whole:
            found[path] = content(file, {str(folder): "TEXTS", str(tmp_path): "OUT"})
    assert_recorded(found, Path(__file__).parent / "recorded_runs" / f"{n}, {name}.json", rel=5e-3)
