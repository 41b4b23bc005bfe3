"""The folder that `export` writes for each architecture, recorded: every file, key and tensor.

Nothing else holds: the dtype of each tensor, and tokenizer_config.json but for the begin token; read their diffs. Names
and weights are those of transformers in test_parity.py and test_t5.py, texts those in test_exported_text.py.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers import meta_model
from tests.huggingface.test_exported_text import SHAPES
from tests.recorded import assert_recorded
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.safetensors_file import specs_of, write_tensors
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import model_tensors
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import flatten
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.huggingface import weights

SMALL = {"dim": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 37, "dropout": 0.25, "vocab_size": 67}
MORE: dict[str, dict[str, Any]] = {
    "gpt, a head of its own": {"model__family": "gpt", "model__tie_embeddings": False},
    "llama, tied, averages in bfloat16": {
        "model__family": "llama",
        "model__tie_embeddings": True,
        "model__qk_norm": False,
    },
    "t5, version 1.0": {"model__family": "t5", "data__objective": "span_corruption", "model__gated": False},
}


def test_each_exported_folder_is_the_recorded_one(tmp_path: Path) -> None:
    """From a checkpoint whose tensors count upwards, and whose end mark is "A"; the folder named `out` was empty.

    Those of `MORE` began from a model with marks of its own, and the first has the begin mark "B".
    """
    found: dict[str, Any] = {}
    for name, values in (SHAPES | MORE).items():
        family = values.get("model__family", name)
        given = {"model.family": family, "train.seq_len": 24} | {f"model.{key}": value for key, value in SMALL.items()}
        given |= {key.replace("__", "."): value for key, value in values.items()}
        config = load.load(None, given, elsewhere=True).config
        tensors = model_tensors(meta_model(config.model, config.model.vocab_size))
        run = tmp_path / name
        (run / ".out.tmp/left").mkdir(parents=True)  # by an export that was killed
        tokenizer = byte_level(sentinels=family == "t5")
        tokenizer.save(str(run / "tokenizer.json"))
        folder = storage.new_folder(run / "checkpoints", 3)
        dtype = torch.bfloat16 if "bfloat16" in name else torch.float64
        counted = {
            key: (torch.arange(t.numel()) + 7 * i).reshape(t.shape).sin().to(dtype)
            for i, (key, t) in enumerate(tensors.items())
        }
        averages = {f"state.{key}.ema": 2 * tensor for key, tensor in counted.items()}
        files = {
            file: write_tensors(folder / file, specs_of(tensors), tensors.__getitem__)
            for file, tensors in ((storage.MODEL, counted), (storage.OPTIMIZER, averages))
        }
        storage.commit(
            folder,
            TrainState(
                3,
                end_token=tokenizer.token_to_id("A") or 0,
                begin_tokens=[tokenizer.token_to_id("B") or 0] if "head" in name else [],
                imported={"bos_token_id": 7, "eos_token_id": [8, 9]} if name in MORE else {},
                config=flatten(config),
            ),
            "full",
            1,
            files,
        )
        out = run / "out"
        out.mkdir()
        found[name] = {
            "returned": weights.export(run, out, ema="averages" in name),
            "beside": sorted(file.name for file in run.iterdir()),
        }
        for file in out.glob("*.json"):
            found[name][file.name] = json.loads(file.read_text())
        tokens = found[name].pop("tokenizer.json")
        found[name] |= {"files": sorted(file.name for file in out.iterdir()), "post": str(tokens["post_processor"])}
        found[name] |= {"config.json": json.dumps(found[name]["config.json"])}
        found[name]["tensors"] = [
            f"{key} {str(t.dtype)[6:]} {[*t.shape]} {t.flatten()[1]:.4f} {t.flatten()[-2]:.4f}"
            for key, t in sorted(load_file(out / "model.safetensors").items())
        ]
    assert_recorded(found, Path(__file__).with_name("recorded_folders.json"), rel=1e-3)
