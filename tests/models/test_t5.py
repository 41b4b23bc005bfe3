"""T5: parity with transformers through files, padding, initial values and generation."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.huggingface.test_hf import ours
from tests.huggingface.test_parity import difference
from torchtitan_lite.huggingface import configs, names
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import t5
from torchtitan_lite.models.generation import Sampler, beam_search, new_tokens
from torchtitan_lite.models.loss import IGNORE

transformers = pytest.importorskip("transformers")


def batch() -> tuple[Tensor, Tensor]:
    """Sources and targets of odd lengths beyond 128, with padding at the ends."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 97, (3, 151), generator=generator)
    targets = torch.randint(1, 97, (3, 143), generator=generator)
    tokens[1, 77:] = tokens[2, 5:] = t5.PAD
    targets[0, 100:] = targets[2, 1:] = IGNORE
    return tokens, targets


def theirs_of(folder: Path) -> Any:
    return transformers.T5ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


def their_folder(folder: Path, *, gated: bool, scaled: bool, own_head: bool) -> Path:
    """A random model that transformers has saved, with every parameter away from its initial value."""
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
    return ours(config, hf.open_weights(folder, config))


def test_the_amount_of_padding_changes_nothing(tmp_path: Path) -> None:
    model = ours_of(their_folder(tmp_path, gated=True, scaled=False, own_head=True))
    tokens, targets = batch()
    alone = model(tokens[2:, :5], targets[2:, :1], per_sequence=True)
    torch.testing.assert_close(model(tokens, targets, per_sequence=True)[2:], alone, rtol=1e-4, atol=1e-5)


# v1.1 and v1.0
@pytest.mark.parametrize(("gated", "scaled", "own_head"), [(True, False, True), (False, True, False)])
def test_a_folder_computes_the_same_and_goes_out_as_it_came_in(
    gated: bool, scaled: bool, own_head: bool, tmp_path: Path
) -> None:
    """Logits, loss and gradients; then transformers reads what an export writes."""
    folder = their_folder(tmp_path, gated=gated, scaled=scaled, own_head=own_head)
    model, theirs = ours_of(folder), theirs_of(folder)
    config = model.config
    assert (config.gated, config.scale_output, config.tie_embeddings) == (gated, scaled, not own_head)
    tokens, targets = batch()
    given = {"attention_mask": (tokens != t5.PAD).long(), "labels": targets}
    n, out = (targets != IGNORE).sum(), theirs(tokens, **given)
    assert difference(model(tokens, answer=t5.shifted(targets)), out.logits) < 1e-5
    loss = model(tokens, targets)
    assert loss.item() / n == pytest.approx(out.loss.item(), rel=1e-5)
    loss.backward()
    (out.loss * n).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    expected = names.from_hf(gradients, config)
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == expected.keys() - ({"output.weight"} if config.tie_embeddings else set())
    for name, gradient in found.items():
        assert difference(gradient, expected[name]) < 1e-4, name

    content = configs.to_hf_config(config, 97)
    # transformers 4 reads false as a head of its own, which is then in the file
    assert content["tie_word_embeddings"] == content["scale_decoder_outputs"] == scaled
    parts = names.hf_names(found, config)
    weights = {name: names.to_hf(part, model.get_parameter, "t5").detach() for name, part in parts.items()}
    assert weights.keys() == load_file(folder / "model.safetensors").keys()
    (folder / "config.json").write_text(json.dumps(content))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert hf.config_of(folder) == config
    assert theirs_of(folder)(tokens, **given).logits.equal(out.logits)


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
        ways = (1, 1.0), (3, 1.0), (3, -1.0), (4, 2.0)  # beams and length penalty
        for (beams, penalty), end in itertools.product(ways, {first[0], first[4], 1}):
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
