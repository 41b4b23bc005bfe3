"""Decoders of every family against transformers: logits, gradients, steps of AdamW, greedy text, names and configs.

`python -m tests.huggingface.test_parity` prints the figures.
"""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.huggingface.test_hf import ROPE, TOKENS, ours
from torchtitan_lite.huggingface import configs, names, stacks
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import gated_delta
from torchtitan_lite.models.generation import Sampler, new_tokens

transformers = pytest.importorskip("transformers")

# head_dim is not dim / n_heads, where the family allows it; windows are shorter than the text of 50 tokens, or longer
SHAPE = {"vocab_size": 97, "hidden_size": 42, "num_hidden_layers": 5, "num_attention_heads": 6, "pad_token_id": None}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 75, "max_position_embeddings": 64, "head_dim": 10}
TIED = {"tie_word_embeddings": True}
MOE = SHAPE | {"num_experts": 12, "num_experts_per_tok": 2}
HYBRID = {key: value for key, value in SHAPE.items() if key != "head_dim"} | {"hidden_size": 60}
LINEAR, FULL = ["linear_attention"], ["full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", SHAPE | {"sliding_window": 7}),
    "mistral, window beyond the text, tied": ("Mistral", SHAPE | TIED | {"sliding_window": 60}),
    "mistral, no window": ("Mistral", SHAPE | {"sliding_window": None}),
    "llama": ("Llama", SHAPE),
    "llama, rope scaling, tied": ("Llama", SHAPE | TIED | {"rope_parameters": ROPE}),
    "qwen2": ("Qwen2", {key: value for key, value in SHAPE.items() if key != "head_dim"} | {"hidden_size": 48}),
    "qwen3": ("Qwen3", SHAPE),
    "gpt2": ("GPT2", {"vocab_size": 97, "n_embd": 42, "n_layer": 3, "n_head": 6, "n_positions": 64}),
    "qwen3, windows": ("Qwen3", SHAPE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "smollm3": ("SmolLM3", SHAPE | {"tie_word_embeddings": False}),
    "olmo2": ("Olmo2", SHAPE),
    "olmo3": ("Olmo3", SHAPE | {"sliding_window": 7}),
    "olmo3, window beyond the text, tied": ("Olmo3", SHAPE | TIED | {"sliding_window": 60}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"moe_intermediate_size": 27}),
    "qwen3_moe, normalized": ("Qwen3Moe", MOE | TIED | {"moe_intermediate_size": 27, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {key: value for key, value in MOE.items() if key != "head_dim"} | {"hidden_size": 48}),
    "olmoe, normalized": (
        "Olmoe",
        {key: value for key, value in MOE.items() if key != "head_dim"}
        | {"hidden_size": 48, "norm_topk_prob": True, "num_experts": 3, "num_experts_per_tok": 3},
    ),
    # heads of 10, with keys of 7 and values of 14
    "olmo_hybrid": ("OlmoHybrid", HYBRID | {"layer_types": FULL + 2 * LINEAR, "num_hidden_layers": 3}),
    "olmo_hybrid, no positions, tied": (
        "OlmoHybrid",
        HYBRID | TIED | {"layer_types": FULL + LINEAR, "num_hidden_layers": 2, "rope_theta": None},
    ),
    "gemma3": ("Gemma3Text", SHAPE | {"sliding_window": 7, "query_pre_attn_scalar": 10, "num_hidden_layers": 7}),
    "gemma3, window beyond the text, not tied": (
        "Gemma3Text",
        SHAPE | {"sliding_window": 60, "query_pre_attn_scalar": 10, "tie_word_embeddings": False},
    ),
    "smollm3, tied": ("SmolLM3", SHAPE | {"no_rope_layers": [0, 1, 1, 0, 1]}),
}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, relative to the norm."""
    return float((one - other).detach().norm() / other.detach().norm())


def save_as_released(model: Any, folder: Path) -> None:
    """Save a model of theirs; an OLMo Hybrid as in the released files.

    transformers 5.23 reads those, but saves attention layers with a name of the recurrent layers' norms, and cuts the
    convolutions of a layer into equal thirds, though those of the values are as long as the others together.
    """
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(".feedforward_layer_norm.weight")]:
        if name.replace("feedforward_layer_norm", "self_attn.q_proj") in weights:
            weights[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = weights.pop(name)
    for name in [name for name in weights if name.endswith(".linear_attn.q_conv1d.weight")]:
        names = [name.replace("q_conv1d", conv) for conv in ("q_conv1d", "k_conv1d", "v_conv1d")]
        whole = torch.cat([weights[one] for one in names])
        quarter = len(whole) // 4
        parts = whole.split([quarter, quarter, len(whole) - 2 * quarter])
        weights |= {one: part.contiguous() for one, part in zip(names, parts, strict=True)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def of_gradients(mine: Any, theirs: Any, folder: Path) -> float:
    """The largest difference. The gradient of a tensor changes its place and form as the tensor does."""
    copied = copy.deepcopy(theirs)
    copied.load_state_dict({name: p.grad for name, p in theirs.named_parameters()}, strict=False)
    save_as_released(copied, folder)
    expected, found = hf.open_weights(folder, mine.config), dict(mine.named_parameters())
    assert found.keys() == expected.keys()
    # without rotation the biases of keys change no attention: their gradients are rounding errors around 0
    zero = "wk.bias" if mine.config.family == "gpt" else "-"
    return max(difference(p.grad, expected[name]) for name, p in found.items() if zero not in name)


def compared(kind: str, values: dict[str, Any], folder: Path) -> dict[str, float]:
    """The largest differences between a random model of theirs and ours, after asserting what has to be equal."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    config._attn_implementation = config._experts_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_as_released(theirs, folder)
    found = hf.config_of(folder)
    weights = hf.open_weights(folder, found)
    mine = ours(found, weights)

    logits = theirs(TOKENS).logits
    figures = {"logits": difference(mine(TOKENS), logits)}
    prompt = TOKENS[0, :9].tolist()
    text = theirs.generate(TOKENS[:1, :9], max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert prompt + list(new_tokens(mine, prompt, 16, Sampler(temperature=0))) == text[0].tolist()

    each = stacks.unstack_experts(weights)  # experts are one tensor in memory, and a file has one for each of them
    parts = names.hf_names(each, found)
    out = {name: names.to_hf(part, each.__getitem__, found.family) for name, part in parts.items()}
    saved = load_file(folder / "model.safetensors")
    assert out.keys() == saved.keys()
    assert all(out[name].equal(tensor) for name, tensor in saved.items())
    exported = configs.to_hf_config(found, 97)
    assert configs.from_hf_config(exported) == configs.from_hf_config(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(exported))
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    assert type(again) is type(theirs)
    assert again(TOKENS).logits.equal(logits)

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6) for model in (mine, theirs)]
    targets = TOKENS.roll(-1, 1)
    losses = []
    for step in range(3):
        mean = torch.nn.functional.cross_entropy(theirs(TOKENS).logits.flatten(0, 1), targets.flatten())
        both = mine(TOKENS, targets) / targets.numel(), mean
        for loss in both:
            loss.backward()
        if not step:
            figures["gradients"] = of_gradients(mine, theirs, folder / "gradients")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append([loss.item() for loss in both])
    figures["losses"] = max(abs(one - other) / other for one, other in losses)
    save_as_released(theirs, folder)
    expected = hf.open_weights(folder, found)
    trained = dict(mine.named_parameters())
    assert trained.keys() == expected.keys()
    figures["weights"] = max(difference(trained[name], parameter) for name, parameter in expected.items())
    return figures


EXTENDED = {  # combinations of the others
    *("llama", "mistral, no window", "olmo3, window beyond the text, tied", "mistral, window beyond the text, tied"),
    *("qwen3", "olmoe", "olmo_hybrid, no positions, tied", "gemma3, window beyond the text, not tied", "smollm3, tied"),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.extended] * (c in EXTENDED)) for c in CASES])
def test_a_family_computes_what_transformers_computes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta, "CHUNK", 16)  # several in a text
    found = compared(*CASES[case], tmp_path)
    assert max(found["logits"], found["losses"]) < 1e-6, found
    assert found["gradients"] < 1e-5, found
    assert found["weights"] < 5e-5, found  # Adam enlarges differences of gradients around 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, values in CASES.items():
        with tempfile.TemporaryDirectory() as made:
            print(f"{name:40}", *(f"{key} {value:.1e} " for key, value in compared(*values, Path(made)).items()))
