"""Parity with Hugging Face: logits and gradients of random small models, and weights that go in and out."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers import checkpoint, losses, python, ranks, succeeded, tiny
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.distributed import initialize
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.huggingface import configs, names
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import Transformer, build

transformers = pytest.importorskip("transformers")

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"rope_theta": 100.0, "original_max_position_embeddings": 32}  # some wavelengths are blended
SHAPE = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SHAPE | {"rms_norm_eps": 1e-5}),
    "llama, rope scaling, tied": ("Llama", SHAPE | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SHAPE),
    "qwen3": ("Qwen3", SHAPE | {"head_dim": 10}),
    "gpt2": ("GPT2", {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}),
}


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.model_validate(configs.from_hf_config(json.loads((folder / "config.json").read_text())))


class Theirs(NamedTuple):
    """A random model of theirs, with every parameter away from its initial value, its folder, and both as ours."""

    model: Any
    folder: Path
    config: ModelConfig
    weights: Mapping[str, Tensor]


@pytest.fixture(scope="module", params=CASES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    kind, values = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp(request.param.split(",")[0])
    model.save_pretrained(folder)
    return Theirs(model, folder, config_of(folder), hf.open_weights(folder, config_of(folder)))


def ours(config: ModelConfig, weights: Mapping[str, Tensor]) -> Transformer:
    with torch.device("meta"):
        model = build(config, 1)
    initialize.materialize(model, torch.device("cpu"), 0)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"output.weight"} if config.tie_embeddings else set())
    return model.eval()


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max() / other.detach().abs().max())


def equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(some[name].equal(others[name]) for name in some)


TOKENS = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients_match_transformers(theirs: Theirs) -> None:
    config, mine, logits = theirs.config, ours(theirs.config, theirs.weights), theirs.model(TOKENS).logits
    assert relative(mine(TOKENS), logits) < 1e-5

    targets = TOKENS.roll(-1, 1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    mine(TOKENS, targets).backward()
    # the gradient of a tensor changes place as the tensor does
    gradients = {name: p.grad for name, p in theirs.model.named_parameters()}
    expected = names.drop_tied(names.from_hf(gradients, config.family), config)
    found = {name: p.grad for name, p in mine.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient is not None
        # without rotation the biases of keys change no attention: their gradients are rounding errors around 0
        if not (config.family == "gpt" and name.endswith("wk.bias")):
            assert relative(gradient, expected[name]) < 1e-5, name


def test_weights_and_config_go_out_as_they_came_in(theirs: Theirs) -> None:
    model, folder, config, weights = theirs
    parts = names.hf_names(weights, config.family)
    out = {name: names.to_hf(ours, weights.__getitem__, config.family) for name, ours in parts.items()}
    assert equal(out, dict(model.named_parameters()))
    again = configs.from_hf_config(configs.to_hf_config(config, config.vocab_size))
    assert again == configs.from_hf_config(json.loads((folder / "config.json").read_text()))


LLAMA = {"model__family": "llama", "model__n_kv_heads": 1, "model__hidden_dim": 48, "model__tie_embeddings": True}
LLAMA |= {"model__qk_norm": False}


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt", marks=pytest.mark.extended)])
def test_a_run_is_exported_and_trained_on(family: str, text: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = (LLAMA | {"model__rope_theta": 5e5} if family == "llama" else {}) | {"train__steps": 4}
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="first", **more)))
    exported = tmp_path / "exported"
    output = succeeded(python("export", str(tmp_path / "first"), str(exported), script="checkpoint.py"))
    made = "LlamaForCausalLM" if family == "llama" else "GPT2LMHeadModel"
    assert f"exported to {exported}: transformers.{made}.from_pretrained reads it" in output

    # transformers computes the same
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager").eval()
    state = json.loads((checkpoint(tmp_path / "first", 4) / "state.json").read_text())["config"]
    saved = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    weights = hf.open_weights(checkpoint(tmp_path / "first", 4), ModelConfig.model_validate(saved))
    mine = ours(config_of(exported), weights)
    tokens = TOKENS[:, :32]
    assert relative(mine(tokens), model(tokens).logits) < 1e-5
    prompt = TOKENS[:1, :6]
    generated = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    text_of_ours = prompt
    for _ in range(20):
        text_of_ours = torch.cat([text_of_ours, mine(text_of_ours)[:, -1:].argmax(-1)], dim=1)
    assert generated.equal(text_of_ours), "other text"
    assert not list(tmp_path.glob(".*")), "nothing is left beside"
    with pytest.raises(CheckpointError, match="exists already"):
        hf.export(tmp_path / "first", exported)
    assert (exported / "tokenizer.json").is_file()
    assert model.config.eos_token_id == 0  # our end mark

    # and a run goes on from there, from a run, and from a checkpoint, with the same first loss, at step 1
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(checkpoint(tmp_path / "first", 4), elsewhere)
    sources = [exported, tmp_path / "first", elsewhere]
    first = []
    for i, source in enumerate(sources if family == "llama" else sources[:1]):
        command = tiny(text, tmp_path, run__name=f"fork{i}", model__init_from=source, **more)
        output = succeeded(ranks(1, *command))
        assert f"starts from the weights of {source}" in output
        assert "different tokenizer" not in output
        first.append(losses(tmp_path / f"fork{i}"))
    assert all(curve == first[0] for curve in first)

    # the config of an import has a rate of its own
    note = "note    optim.lr = 0.008 is the default, for training from random weights"
    written = tmp_path / "mine.toml"
    output = succeeded(python("import", str(exported), str(written), script="checkpoint.py"))
    assert f"wrote {written}: train.py --config {written} --data.path=my_text" in output
    refused = python("import", str(exported), str(written), script="checkpoint.py")
    assert refused.stderr == f"checkpoint.py: {written} exists already; name a new file\n"
    kept = [o for o in tiny(text, tmp_path, run__name="fork0") if not o.startswith(("--model.", "--optim."))]
    fresh = [o for o in tiny(text, tmp_path, model__init_from=exported, **more) if not o.startswith("--optim.lr=")]
    assert note in python("--check-config", *fresh).stdout
    assert note not in python("--check-config", *fresh, "--run.name=fork0").stdout, "it has started"
    small = [*kept, "--train.steps=3", "--optim.warmup_steps=1", "--run.name=continued"]
    output = succeeded(ranks(2, "--config", str(written), *small))
    assert "optim.lr = " not in output
    assert losses(tmp_path / "continued")[1][0] == pytest.approx(first[0][1][0], rel=1e-6)
    assert first[0][1][0] < losses(tmp_path / "first")[1][0] - 0.005
    assert set(first[0]) == {1, 2, 3, 4}


OTHER_VOCABULARY = r"tok_embeddings\.weight is \(400, 32\) in the checkpoint and \(517, 32\) here"


@pytest.mark.parametrize(
    ("vocab_size", "dim", "expected"),
    [
        (517, 48, r"model\.dim is 48 in the checkpoint and 32 here"),
        (400, 32, OTHER_VOCABULARY + r"(?s:.*)set the \[model\] keys to the folder's values, and model.vocab_size"),
    ],
)
def test_init_from_another_model_or_vocabulary_names_both(
    vocab_size: int, dim: int, expected: str, text: Path, tmp_path: Path
) -> None:
    config = transformers.GPT2Config(vocab_size=vocab_size, n_embd=dim, n_layer=2, n_head=2, n_positions=37)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    result = ranks(1, *tiny(text, tmp_path, model__init_from=tmp_path / "hf", model__tie_embeddings=True))
    assert result.returncode == 2
    assert re.search(expected, result.stderr)


@pytest.mark.parametrize("own_head", [False, True])
def test_a_head_is_tied_only_if_it_equals_the_embeddings(own_head: bool, tmp_path: Path) -> None:
    """Whatever config.json says: transformers 5 keeps a head that differs, too."""
    values = CASES["llama, rope scaling, tied"][1]
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights["model.embed_tokens.weight"] + float(own_head)
    save_file(weights | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    config = hf.config_of(tmp_path)
    assert config.tie_embeddings != own_head
    assert hf.open_weights(tmp_path, config).get("output.weight", head).equal(head)
    with pytest.raises(CheckpointError, match=r"model\.tie_embeddings is (True|False) in the checkpoint"):
        hf.find_weights(tmp_path, config.model_copy(update={"tie_embeddings": own_head}))


def test_sharded_folders_are_read(theirs: Theirs, tmp_path: Path) -> None:
    theirs.model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert equal(hf.open_weights(tmp_path, theirs.config), theirs.weights)


def test_import_prints_a_config_that_works(theirs: Theirs, tmp_path: Path) -> None:
    """With a recipe for continued pretraining, not that of the default experiment."""
    output = succeeded(python("import", str(theirs.folder), script="checkpoint.py"))
    (tmp_path / "c.toml").write_text(f'{output}\n[tokenizer]\npath = "{tmp_path / "c.toml"}"\n')
    config = load.load(tmp_path / "c.toml", {}).config
    assert hf.find_weights(theirs.folder, config.model)[0] == theirs.folder
    assert (config.optim.name, config.optim.lr) == ("adamw", 2e-5)
    assert config.train.seq_len == config.model.max_seq_len == 64
    assert config.train.global_batch_size * config.train.seq_len == 65_536
    assert "65,536 tokens per step" in output
    assert "arXiv:" in output


def test_a_shorter_context_is_accepted_where_positions_are_computed(theirs: Theirs) -> None:
    shorter, longer = (theirs.config.model_copy(update={"max_seq_len": n}) for n in (32, 128))
    learned = theirs.config.family == "gpt"
    for config in (longer, *([shorter] * learned)):
        with pytest.raises(
            CheckpointError, match=rf"max_seq_len is 64 in the checkpoint and {config.max_seq_len} here"
        ):
            hf.find_weights(theirs.folder, config)
    assert learned or hf.find_weights(theirs.folder, shorter)[0] == theirs.folder
