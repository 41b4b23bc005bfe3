"""An exported run in transformers: the tokenizer gives the ids of training, and greedy text is ours."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import python, ranks, succeeded, tiny
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.huggingface import configs

transformers = pytest.importorskip("transformers")

# one letter in two spellings, signs that normalizers change, digits, white space of several kinds, several scripts
TEXT = "caf\u00e9 cafe\u0301 \u212b \ufb01 x\u00b2 12345 3.14\tif  a:\r\n\n    return\u00a0b \u4e2d\U0001f600 don't  "
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"model__n_kv_heads": 1},
    "qwen2": {"model__family": "llama", "model__n_kv_heads": 1, "model__qkv_bias": True, "model__qk_norm": False},
    "qwen3": {"model__family": "llama", "model__n_kv_heads": 1, "model__qk_norm": True, "model__head_dim": 8},
    "mistral": {"model__window": 9},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {"model__window": 9},
    "olmo_hybrid": {"model__n_layers": 4},
    "gemma3": {"model__window": 9},
    "qwen3_moe": {"model__n_experts": 3},
    "olmoe": {"model__n_experts": 3, "model__n_kv_heads": 2},
    "t5": {"data__objective": "span_corruption", "train__seq_len": 24},
}
assert SHAPES.keys() >= {kind.ours["family"] for kind in configs.KINDS.values()}


MORE = {"llama", "mistral", "smollm3", "olmo2", "olmo3", "olmo_hybrid", "qwen3_moe", "olmoe"}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.extended] * (k in MORE)) for k in SHAPES])
def test_transformers_reads_and_writes_the_text_of_training(kind: str, text: Path, tmp_path: Path) -> None:
    shape = {"model__family": kind, "model__hidden_dim": 48, "train__steps": 12} | SHAPES[kind]
    shape |= {"optim__name": "adamw", "optim__lr": 0.02, "train__global_batch_size": 2}
    if kind == "gpt":
        del shape["model__hidden_dim"]
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="run", **shape)))
    out = tmp_path / "exported"
    said = succeeded(python("export", str(tmp_path / "run"), str(out), script="checkpoint.py"))
    is_forced = "load a different one with transformers.PreTrainedTokenizerFast" in said
    assert is_forced == (kind == "qwen2"), "transformers builds Qwen2Tokenizer whatever tokenizer_config.json says"
    read = transformers.PreTrainedTokenizerFast if is_forced else transformers.AutoTokenizer

    trained = bpe.load(tmp_path / "run/tokenizer.json")
    theirs = read.from_pretrained(out)
    end = bpe.end_token(trained)
    ids = trained.encode(TEXT, add_special_tokens=False).ids
    assert theirs(TEXT)["input_ids"] == ids + ([end] if kind == "t5" else [])
    assert theirs.decode(ids) == TEXT
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.model_max_length) == (end, 0 if kind == "t5" else end, 37)

    prompt, option = ("import sys", "--source" if kind == "t5" else "--prompt")
    greedy = ["--temperature=0", "--max-tokens=12", f"{option}={prompt}"]
    ours = succeeded(python(str(tmp_path / "run"), *greedy, script="-m torchtitan_lite.generate")).removesuffix("\n")
    if kind == "t5":
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(out)
        made = model.generate(**theirs(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
        assert theirs.decode(made[0], skip_special_tokens=True) == ours
        return
    generator = transformers.pipeline("text-generation", model=str(out), tokenizer=theirs if is_forced else None)
    made = generator(prompt, max_new_tokens=12, do_sample=False)
    assert made[0]["generated_text"] == ours
