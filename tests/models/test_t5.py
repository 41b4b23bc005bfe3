"""T5: parity with transformers through files, initial values, generation, and what it refuses."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchtitan_lite.checkpointing import dcp_storage
from torchtitan_lite.checkpointing.safetensors_file import specs_of
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.distributed import initialize
from torchtitan_lite.errors import CheckpointError, ConfigError
from torchtitan_lite.huggingface import configs, names
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import build, t5
from torchtitan_lite.models.generation import Sampler, beam_search, new_tokens
from torchtitan_lite.models.loss import IGNORE

SHAPE = {"family": "t5", "dim": 48, "n_heads": 6, "head_dim": 10, "hidden_dim": 80, "norm_eps": 1e-6}
SHAPE |= {"n_layers": 3, "n_decoder_layers": 2, "max_seq_len": 200}
V1_0 = {"gated": False, "tie_embeddings": True, "scale_output": True}


def make(seed: int = 0, vocab_size: int = 97, moved: float = 0.0, **more: Any) -> Any:
    """A model with initial values, or with every parameter `moved` away from them."""
    config = ModelConfig.model_validate(SHAPE | more)
    with torch.device("meta"):
        model = build(config, vocab_size)
    initialize.materialize(model, torch.device("cpu"), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if moved else ():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * moved)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Sources and targets of odd lengths beyond 128, with padding at the ends."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 97, (3, 151), generator=generator)
    targets = torch.randint(1, 97, (3, 143), generator=generator)
    tokens[1, 77:] = tokens[2, 5:] = t5.PAD
    targets[0, 100:] = targets[2, 1:] = IGNORE
    return tokens, targets


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm())


# --- the model by itself ----------------------------------------------------------------------------------------


def test_the_amount_of_padding_changes_nothing() -> None:
    model = make(moved=0.1)
    tokens, targets = batch()
    alone = model(tokens[2:, :5], targets[2:, :1], per_sequence=True)
    torch.testing.assert_close(model(tokens, targets, per_sequence=True)[2:], alone, rtol=1e-4, atol=1e-5)


def test_initial_values_have_the_published_distribution() -> None:
    stds = {"tok_embeddings": 1.0, "wq": (64 * 32) ** -0.5, "wo": (8 * 32) ** -0.5, "w2": 0.1}
    for name, p in make(vocab_size=2000, dim=64, n_heads=8, head_dim=32, hidden_dim=100).named_parameters():
        expected = stds.get(name.split(".")[-2], 1 / 8) if p.ndim > 1 else 0.0
        assert p.std().item() == pytest.approx(expected, rel=0.15 if "_bias" in name else 0.05), name
        assert p.ndim > 1 or (p == 1).all(), name


# --- what it refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"fsdp.param_dtype": "float16"}, 'can\'t compute in float16.*"bfloat16" works in its place'),
        ({"model.tie_embeddings": True}, "needs model.scale_output = true.*scale_output = true works"),
        ({"model.size": "t5-huge"}, "no such size of t5; known: 1M, .*t5-v1_1-xxl"),
    ],
)
def test_what_does_not_go_with_t5_is_refused(values: dict[str, Any], expected: str) -> None:
    given = {"model.family": "t5", "data.objective": "span_corruption"} | values
    with pytest.raises(ConfigError, match=expected):
        load.load(None, given)


# --- Hugging Face -----------------------------------------------------------------------------------------------


def theirs_of(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.T5ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


def their_folder(folder: Path, *, gated: bool, scaled: bool, own_head: bool) -> Path:
    """A random model that transformers has saved, with every parameter away from its initial value."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        **{"vocab_size": 97, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_layers": 3, "num_decoder_layers": 2},
        **{"num_heads": 6, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1},
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=scaled,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    if own_head:  # a model that transformers 5 constructs is always tied
        file = folder / "model.safetensors"
        save_file(load_file(file) | {"lm_head.weight": torch.randn(97, 48)}, file, metadata={"format": "pt"})
    return folder


def ours_of(folder: Path) -> Any:
    config = hf.config_of(folder)
    with torch.device("meta"):
        model = build(config, 1)
    initialize.materialize(model, torch.device("cpu"), 0)
    missing, unexpected = model.load_state_dict(hf.open_weights(folder, config), strict=False)
    assert not unexpected
    assert set(missing) <= ({"output.weight"} if config.tie_embeddings else set())
    return model.eval()


def assert_the_same(ours: Any, theirs: Any) -> None:
    """Logits, loss and gradients."""
    tokens, targets = batch()
    n = (targets != IGNORE).sum()
    out = theirs(tokens, attention_mask=(tokens != t5.PAD).long(), labels=targets)
    assert distance(ours(tokens, answer=t5.shifted(targets)), out.logits) < 1e-5
    loss = ours(tokens, targets)
    assert loss.item() / n == pytest.approx(out.loss.item(), rel=1e-5)
    loss.backward()
    (out.loss * n).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    expected = names.drop_tied(names.from_hf(gradients, "t5"), ours.config)
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert distance(gradient, expected[name]) < 1e-4, name


# v1.1 and v1.0
@pytest.mark.parametrize(("gated", "scaled", "own_head"), [(True, False, True), (False, True, False)])
def test_an_imported_folder_computes_the_same(gated: bool, scaled: bool, own_head: bool, tmp_path: Path) -> None:
    folder = their_folder(tmp_path, gated=gated, scaled=scaled, own_head=own_head)
    model = ours_of(folder)
    assert (model.config.gated, model.config.scale_output) == (gated, scaled)
    assert model.config.tie_embeddings != own_head
    assert_the_same(model, theirs_of(folder))


def exported(folder: Path, model: Any) -> Path:
    """Written as `checkpoint.py export` does, from a model instead of a checkpoint."""
    folder.mkdir()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    weights = dcp_storage.LazyTensors(specs_of(parameters), parameters.__getitem__)
    (folder / "config.json").write_text(json.dumps(configs.to_hf_config(model.config, 97)))
    hf._write_model(folder / "model.safetensors", weights, "t5")
    return folder


@pytest.mark.parametrize("more", [{}, V1_0], ids=["v1.1", "v1.0"])
def test_an_exported_model_computes_the_same(more: dict[str, Any], tmp_path: Path) -> None:
    model = make(moved=0.1, **more).eval()
    folder = exported(tmp_path / "out", model)
    content = json.loads((folder / "config.json").read_text())
    # transformers 4 reads false as a head of its own, which is then in the file
    assert content["tie_word_embeddings"] == content["scale_decoder_outputs"] == model.config.scale_output
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (not model.config.scale_output)
    assert_the_same(model, theirs_of(folder))
    again = ours_of(folder)
    assert again.config == model.config.model_copy(update={"vocab_size": 97})
    assert all(p.equal(again.get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.parametrize("key", ["scale_output", "tie_embeddings"])
def test_a_tied_head_that_is_not_scaled_or_the_reverse_cannot_be_exported(key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.tie_embeddings and model\.scale_output differ"):
        exported(tmp_path / "out", make(**{key: True}))


def test_names_of_the_first_checkpoints_are_read(tmp_path: Path) -> None:
    """t5-small and others repeat the embeddings, and hold a table that no block reads."""
    folder = their_folder(tmp_path, gated=False, scaled=True, own_head=False)
    expected = hf.open_weights(folder, hf.config_of(folder))
    file = folder / "model.safetensors"
    weights = load_file(file)
    copies = {f"{stack}.embed_tokens.weight": weights["shared.weight"].clone() for stack in ("encoder", "decoder")}
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(32, 6)}
    save_file(weights | copies | unused | {"lm_head.weight": weights["shared.weight"].clone()}, file)
    assert hf.open_weights(folder, hf.config_of(folder)).keys() == expected.keys()


# --- generation -------------------------------------------------------------------------------------------------


def test_generated_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = their_folder(tmp_path, gated=True, scaled=False, own_head=True)
    theirs, ours = theirs_of(folder), ours_of(folder)
    generator = torch.Generator().manual_seed(3)
    ended = 0
    for length in (3, 140):
        source = torch.randint(2, 97, (1, length), generator=generator)
        prompt = source[0].tolist()
        first = list(new_tokens(ours, prompt, 15, Sampler(temperature=0)))
        # the end is a token that the model is likely to draw
        for beams, penalty, end in itertools.product((1, 3, 4), (1.0, -1.0, 2.0), {first[0], first[4], 1}):
            out = theirs.generate(
                source, num_beams=beams, length_penalty=penalty, max_new_tokens=15, do_sample=False, eos_token_id=end
            )[0, 1:].tolist()
            expected = out[: out.index(end)] if end in out else out
            ended += end in out
            if beams == 1:
                found = list(new_tokens(ours, prompt, 15, Sampler(temperature=0), (end,)))
            else:
                found = beam_search(ours, prompt, 15, beams, (end,), penalty)
            assert found == expected, (length, beams, penalty, end)
    assert ended > 0, "no answer has met its end token"
