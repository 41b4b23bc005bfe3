"""Parity with Hugging Face: logits and gradients of random small models, and weights that go in and out."""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers import checkpoint, losses, python, ranks, succeeded, tiny
from torchtitan_lite.checkpointing.safetensors_file import specs_of
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.distributed import initialize
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.huggingface import names
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.models.llama import rotary_tables
from torchtitan_lite.tools import checkpoints

transformers = pytest.importorskip("transformers")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,  # so that some wavelengths are in the band that is blended
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SHAPE | {"rms_norm_eps": 1e-5}),
    "llama, rope scaling, tied": ("Llama", SHAPE | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SHAPE),
    "qwen3": ("Qwen3", SHAPE | {"head_dim": 10}),
    "gpt2": ("GPT2", {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}),
}


@pytest.fixture(scope="module", params=CASES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model of theirs, with every parameter away from its initial value, and its folder."""
    kind, values = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    config._attn_implementation = "eager"
    model_class = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp(request.param.split(",")[0])
    model.save_pretrained(folder)
    return model, folder


def config_of(folder: Path, **more: Any) -> ModelConfig:
    values = names.from_hf_config(json.loads((folder / "config.json").read_text()))
    return ModelConfig.model_validate(values | more)


def ours(config: ModelConfig, weights: Mapping[str, Tensor]) -> Transformer:
    with torch.device("meta"):
        model = build(config, 1)
    initialize.materialise(model, torch.device("cpu"), 0)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"output.weight"} if config.tie_embeddings else set())
    return model.eval()


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max() / other.detach().abs().max())


TOKENS = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients_match_transformers(theirs: tuple[Any, Path]) -> None:
    model, folder = theirs
    config = config_of(folder)
    mine = ours(config, hf.open_weights(folder, config))
    logits = model(TOKENS).logits
    assert relative(mine(TOKENS), logits) < 1e-5

    targets = TOKENS.roll(-1, 1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    mine(TOKENS, targets).backward()
    # the gradient of a tensor changes place as the tensor does
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected = names.drop_tied(names.from_hf(gradients, config.family), config)
    found = {name: p.grad for name, p in mine.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient is not None
        # without rotation the biases of keys change no attention: their gradients are rounding errors around 0
        if not (config.family == "gpt" and name.endswith("wk.bias")):
            assert relative(gradient, expected[name]) < 1e-5, name


def test_exported_weights_equal_the_imported_ones(theirs: tuple[Any, Path]) -> None:
    model, folder = theirs
    config = config_of(folder)
    weights = hf.open_weights(folder, config)
    parts = names.hf_names(weights, config.family)
    out = {name: names.to_hf(ours, weights.__getitem__, config.family) for name, ours in parts.items()}
    state = {name: tensor for name, tensor in model.state_dict().items() if name in out}
    assert out.keys() == {name for name, _ in model.named_parameters()}
    assert all(out[name].equal(state[name]) for name in out)


def test_the_exported_config_equals_the_imported_one(theirs: tuple[Any, Path]) -> None:
    _, folder = theirs
    config = config_of(folder)
    again = names.from_hf_config(names.to_hf_config(config, config.vocab_size))
    assert again == names.from_hf_config(json.loads((folder / "config.json").read_text()))


LLAMA = {
    "model__family": "llama",
    "model__n_kv_heads": 1,
    "model__hidden_dim": 48,
    "model__tie_embeddings": True,
    "model__rope_theta": 5e5,
}


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt", marks=pytest.mark.extended)])
def test_a_run_is_exported_and_trained_on(family: str, text: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = (LLAMA if family == "llama" else {}) | {"train__steps": 4}
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="first", **more)))
    exported = tmp_path / "exported"
    output = succeeded(python("export", str(tmp_path / "first"), str(exported), script="checkpoint.py"))
    made = "LlamaForCausalLM" if family == "llama" else "GPT2LMHeadModel"
    assert f"exported to {exported}: transformers.{made}.from_pretrained reads it" in output

    # transformers computes the same
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager").eval()
    config = config_of(exported)
    mine = ours(config, hf.open_weights(checkpoint(tmp_path / "first", 4), ModelConfig.model_validate(saved(tmp_path))))
    tokens = TOKENS[:, :32]
    assert relative(mine(tokens), model(tokens).logits) < 1e-5
    prompt = TOKENS[:1, :6]
    generated = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    text_of_ours = prompt
    for _ in range(20):
        text_of_ours = torch.cat([text_of_ours, mine(text_of_ours)[:, -1:].argmax(-1)], dim=1)
    assert generated.equal(text_of_ours), "other text"
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
        assert "another tokenizer" not in output
        first.append(losses(tmp_path / f"fork{i}"))
    assert all(curve == first[0] for curve in first)

    # the config of an import has a rate of its own
    note = "note    optim.lr = 0.004 is the default, for training from random weights"
    written = tmp_path / "mine.toml"
    output = succeeded(python("import", str(exported), str(written), script="checkpoint.py"))
    assert f"wrote {written}: train.py --config {written} --data.path=my_text" in output
    refused = python("import", str(exported), str(written), script="checkpoint.py")
    assert refused.stderr == f"checkpoint.py: {written} exists already; name a new file\n"
    kept = [o for o in tiny(text, tmp_path, run__name="fork0") if not o.startswith(("--model.", "--optim."))]
    assert f"{note}" in python("--check-config", *tiny(text, tmp_path, model__init_from=exported, **more)).stdout
    again = tiny(text, tmp_path, run__name="fork0", model__init_from=exported, **more)
    assert note not in python("--check-config", *again).stdout, "it has started"
    small = [*kept, "--train.steps=3", "--optim.warmup_steps=1", "--run.name=continued"]
    output = succeeded(ranks(1, "--config", str(written), *small))
    assert "optim.lr = " not in output
    assert losses(tmp_path / "continued")[1][0] == pytest.approx(first[0][1][0], rel=1e-6)
    assert first[0][1][0] < losses(tmp_path / "first")[1][0] - 0.005
    assert set(first[0]) == {1, 2, 3, 4}


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.extended), "gpt"])
@pytest.mark.extended
def test_a_large_export_has_several_files(family: str, text: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = LLAMA if family == "llama" else {}
    succeeded(
        ranks(2, *tiny(text, tmp_path, run__name="run", train__steps=3, checkpoint__state_dict="sharded", **more))
    )
    hf.export(tmp_path / "run", tmp_path / "one")
    hf.export(tmp_path / "run", tmp_path / "many", max_shard_bytes=50_000)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert not list(tmp_path.glob(".*")), "nothing is left beside"
    one, many = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many"))
    assert all(many.state_dict()[name].equal(tensor) for name, tensor in one.state_dict().items())
    with pytest.raises(CheckpointError, match="many exists already"):
        hf.export(tmp_path / "run", tmp_path / "many")


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.extended
def test_a_folder_is_imported_as_a_config_on_two_ranks(kind: str, text: Path, tmp_path: Path) -> None:
    """Each rank reads its rows; the first loss is that of the model, whatever the number of ranks."""
    architecture, values = CASES[kind]
    config = getattr(transformers, f"{architecture}Config")(**values | {"vocab_size": 600})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    written = tmp_path / "mine.toml"
    output = succeeded(python("import", str(tmp_path / "hf"), str(written), script="checkpoint.py"))
    assert f"wrote {written}: train.py --config {written}" in output
    assert python("import", str(tmp_path / "hf"), str(written), script="checkpoint.py").returncode == 2, "it is there"
    arguments = [option for option in tiny(text, tmp_path, train__steps=3) if not option.startswith("--model.")]
    first = []
    for n in (1, 2):
        succeeded(ranks(n, "--config", str(written), *arguments, f"--run.name=r{n}", "--train.seq_len=16"))
        first.append(losses(tmp_path / f"r{n}")[1][0])
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    fresh = [option for option in arguments if "init_from" not in option] + ["--model.init_from="]
    succeeded(ranks(1, "--config", str(written), *fresh, "--run.name=fresh", "--train.seq_len=16"))
    assert abs(losses(tmp_path / "fresh")[1][0] - first[0]) > 1e-4, "the weights were not used"


def saved(tmp_path: Path) -> dict[str, Any]:
    state = json.loads((checkpoint(tmp_path / "first", 4) / "state.json").read_text())
    return {key.removeprefix("model."): value for key, value in state["config"].items() if key.startswith("model.")}


@pytest.mark.extended
def test_init_from_another_model_is_refused(theirs: tuple[Any, Path], text: Path, tmp_path: Path) -> None:
    _, folder = theirs
    result = ranks(1, *tiny(text, tmp_path, run__name="run", model__init_from=folder))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "model.dim is 48 in the checkpoint and 32 here" in result.stderr
    assert "model.n_heads is 6 in the checkpoint and 2 here" in result.stderr


def test_init_from_with_another_vocabulary_names_both(text: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=2, n_positions=37)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    result = ranks(1, *tiny(text, tmp_path, model__init_from=tmp_path / "hf", model__tie_embeddings=True))
    assert result.returncode == 2
    assert "tok_embeddings.weight is (400, 32) in the checkpoint and (517, 32) here" in result.stderr
    assert "set [model], and its vocab_size or [tokenizer] path" in result.stderr


def test_rope_scaling_blends_intermediate_wavelengths() -> None:
    """The test of parity above would not notice if no wavelength were in the band."""
    values = names.from_hf_config(transformers.LlamaConfig(**CASES["llama, rope scaling, tied"][1]).to_dict())
    scaled, plain = (
        rotary_tables(ModelConfig.model_validate(values | {"rope_factor": factor}))[0][1].acos()
        for factor in (8.0, 1.0)
    )
    ratios = plain / scaled  # of the angles at position 1
    assert ratios.min() == pytest.approx(1, abs=1e-3)
    assert ((ratios > 1.05) & (ratios < 7.5)).any()


def test_half_precision_weights_are_imported(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = theirs
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    config = config_of(folder)
    weights = hf.open_weights(tmp_path, config)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert relative(ours(config, weights)(TOKENS), ours(config, hf.open_weights(folder, config))(TOKENS)) < 0.1


def test_export_needs_a_checkpoint_and_a_new_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is neither a checkpoint nor a run with one"):
        hf.export(tmp_path, tmp_path / "out")


def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(transformers.LlamaConfig(**SHAPE).to_dict()))
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names \.\./outside\.safetensors, which is not a file of this folder"):
        hf.open_weights(tmp_path, config_of(tmp_path))


def test_sharded_folders_are_read(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = theirs
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = config_of(folder)
    one, other = hf.open_weights(folder, config), hf.open_weights(tmp_path, config)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("limit", ["a byte", "the first tensor", "the first two tensors", "all"])
def test_a_file_of_an_export_has_at_most_the_given_size(limit: str, theirs: tuple[Any, Path], tmp_path: Path) -> None:
    """Or one tensor. Two tensors that fit exactly are in one file."""
    _, folder = theirs
    config = config_of(folder)
    weights = hf.open_weights(folder, config)
    parts = names.hf_names(weights, config.family)
    sizes = [4 * names.to_hf(ours, weights.__getitem__, config.family).numel() for ours in parts.values()]
    n_fitting = {"a byte": 0, "the first tensor": 1, "the first two tensors": 2, "all": len(sizes)}[limit]
    max_bytes = sum(sizes[:n_fitting]) or 1
    hf._write_shards(tmp_path, weights, specs_of(weights), config.family, max_bytes)
    files = [sorted(load_file(file)) for file in sorted(tmp_path.glob("model*.safetensors"))]
    assert files[0] == sorted(list(parts)[: max(n_fitting, 1)])
    for tensors in files:
        assert len(tensors) == 1 or sum(sizes[list(parts).index(name)] for name in tensors) <= max_bytes
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    again = hf.open_weights(tmp_path, config)
    assert again.keys() == weights.keys()
    assert all(again[name].equal(weights[name]) for name in weights)


def test_import_prints_a_config_that_works(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    """With a recipe for continued pretraining, not that of the default experiment."""
    _, folder = theirs
    output = succeeded(python("import", str(folder), script="checkpoint.py"))
    (tmp_path / "c.toml").write_text(f'{output}\n[tokenizer]\npath = "{tmp_path / "c.toml"}"\n')
    config = load.load(tmp_path / "c.toml", {}).config
    assert hf.open_weights(folder, config.model)
    assert (config.optim.name, config.optim.lr) == ("adamw", 2e-5)
    assert config.train.seq_len == config.model.max_seq_len == 64
    assert config.train.global_batch_size * config.train.seq_len == 65_536
    assert "65,536 tokens per step" in output
    assert "arXiv:" in output


@pytest.mark.parametrize(
    ("values", "seq_len"),
    [
        ({"size": "124M", "family": "gpt", "max_seq_len": 1024}, 1024),
        ({"size": "1B", "max_seq_len": 131_072}, 4096),
        ({"size": "8B", "max_seq_len": 131_072}, 8192),
    ],
)
def test_the_length_of_an_import_fits_into_the_memory_of_its_training_state(
    values: dict[str, Any], seq_len: int
) -> None:
    lines = list(checkpoints.recipe(ModelConfig.model_validate(values | {"vocab_size": 50_000})))
    (line,) = (line for line in lines if line.startswith("seq_len"))
    assert line.startswith(f"seq_len = {seq_len}  # ")
    assert f"micro_batch_size = {2 if seq_len == 1024 else 1}  #" in "\n".join(lines)
