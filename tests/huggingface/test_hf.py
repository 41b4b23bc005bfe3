"""Hugging Face folders: what `export` and `import` make, and which folders a run begins from."""

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from torch import Tensor

from tests.data.test_data import stream_of
from tests.helpers import checkpoint, losses, python, ranks, refused, succeeded, tiny
from tests.models.test_model import make
from torchtitan_lite.config.schema import Config, ModelConfig
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import documents, read_meta
from torchtitan_lite.errors import CheckpointError, UserError
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import Transformer
from torchtitan_lite.tools import generate
from torchtitan_lite.tools.checkpoints import section
from torchtitan_lite.tools.load_model import open_model

transformers = pytest.importorskip("transformers")

SHAPE = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"rope_theta": 100.0, "original_max_position_embeddings": 32}  # some wavelengths are blended
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SHAPE | {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}),
}


@pytest.fixture(scope="module", params=CASES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model of theirs."""
    kind, values = CASES[request.param]
    folder = tmp_path_factory.mktemp("theirs")
    config = getattr(transformers, f"{kind}Config")(**values)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words({f"w{i}": i for i in range(97)}).save(str(folder / "tokenizer.json"))
    return folder


def words(entries: dict[str, int]) -> Tokenizer:
    return Tokenizer(WordLevel(entries, unk_token="w0"))


def ours(config: ModelConfig, weights: Mapping[str, Tensor]) -> Transformer:
    model = make(config, vocab_size=1)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"output.weight"} if config.tie_embeddings else set())
    return model.eval()


MODEL = "model.safetensors"
TOKENS = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(1))


LLAMA = {"model__family": "llama", "model__n_kv_heads": 1, "model__hidden_dim": 48, "model__tie_embeddings": True}
LLAMA |= {"model__qk_norm": False, "model__rope_theta": 5e5, "train__steps": 4, "train__micro_batch_size": 6}


def test_a_run_is_exported_and_trained_on(text: Path, tmp_path: Path) -> None:
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="first", **LLAMA)))
    exported = tmp_path / "new/exported"
    succeeded(python("export", str(tmp_path / "first"), str(exported), script="checkpoint.py"))
    (tmp_path / "link").symlink_to("nowhere")
    for there, error in ("link", NotADirectoryError), ("first/config.toml", CheckpointError):
        with pytest.raises(error):
            hf.export(tmp_path / "first", tmp_path / there)
    assert not [*tmp_path.glob(".*"), *tmp_path.glob("new/.*")], "nothing is left beside"
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == 0, "our end mark"

    # a run goes on from there, from a run, and from a checkpoint, with the same losses
    elsewhere = shutil.copytree(checkpoint(tmp_path / "first", 4), tmp_path / "elsewhere")
    forks = []
    for i, source in enumerate([exported, tmp_path / "first", elsewhere]):
        given = {"tokenizer__path": exported} if source == elsewhere else {}  # it has none
        more = LLAMA | given | {"run__name": f"fork{i}", "model__init_from": source}
        output = succeeded(ranks(1, *tiny(text, tmp_path, **more)))
        assert f"starts from the weights of {source}" in output
        assert "different tokenizer" not in output
        forks.append(losses(tmp_path / f"fork{i}"))
    assert forks[0] == forks[1] == forks[2]
    assert forks[0][1][0] < losses(tmp_path / "first")[1][0] - 0.005

    # the config of an import has a rate of its own, and the first end token that the tokenizer has
    about, written = json.loads((exported / "config.json").read_text()), tmp_path / "mine.toml"
    (exported / "config.json").write_text(json.dumps(about | {"eos_token_id": [-1, None, "1", 10**6, 0]}))
    assert hf.end_tokens(exported) == (-1, 10**6, 0)
    succeeded(python("import", str(exported), str(written), script="checkpoint.py"))
    assert 'end_token = "<|endoftext|>"\n' in written.read_text()
    more = {"run__name": "continued", "train__steps": 2, "optim__warmup_steps": 1}
    kept = [o for o in tiny(text, tmp_path, **more) if not o.startswith(("--model.", "--optim.lr", "--optim.name"))]
    assert "optim.lr = " not in succeeded(ranks(2, "--config", str(written), *kept))
    assert losses(tmp_path / "continued")[1][0] == pytest.approx(forks[0][1][0], rel=1e-6)


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
    words({"w0": 0}).save(str(tmp_path / "hf/tokenizer.json"))
    assert re.search(
        expected,
        refused(ranks(1, *tiny(text, tmp_path, model__init_from=tmp_path / "hf", model__tie_embeddings=True))),
    )


@pytest.mark.parametrize("own_head", [False, True])
def test_a_head_is_tied_only_if_it_equals_the_embeddings(own_head: bool, tmp_path: Path) -> None:
    """Whatever config.json says: transformers 5 keeps a head that differs, too."""
    values = CASES["llama"][1]
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


def test_sharded_folders_are_read(theirs: Path, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(theirs).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected, found = (hf.open_weights(folder, hf.config_of(theirs)) for folder in (theirs, tmp_path))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_import_opens_the_weights_and_says_what_a_start_would_say(theirs: Path, tmp_path: Path) -> None:
    plain: dict[str, bytes | None] = {file.name: file.read_bytes() for file in theirs.iterdir()}
    weights = load_file(theirs / MODEL)
    name = next(name for name in weights if ".mlp." in name)
    cases: dict[str, tuple[dict[str, bytes | None], str]] = {  # folder -> its other files, and what is said
        **{
            f"in {name}": ({MODEL: None, name: b""}, f"{name} has the weights in a different format: from_pret")
            for name in ("model.bin", "model.pt", "model.pth", "model.gguf", "tf_model.h5", "flax_model.msgpack")
        },
        "shard": ({hf.INDEX: b'{"weight_map": {"a": "a.safetensors"}}'}, "a.safetensors can't .*index.json names it"),
        "adapter": ({"config.json": None, "adapter_config.json": b""}, "is of a LoRA adapter: merge_and_unload"),
        "unmerged": (
            {MODEL: save(weights | {"a.lora_A": torch.ones(1)})},
            "corresponds to .*a.lora_A; peft's merge_and",
        ),
        "few": (
            {MODEL: save({n: weights[n] for n in weights if n != name})},
            r"is - in .* here\n  its config and its w",
        ),
        "heads": (
            {"config.json": re.sub(b'(n_head|num_attention_heads)": [0-9]+', rb'\1": 5', plain["config.json"] or b"")},
            "describes a model that can't be built:\n  .*n_heads",
        ),
        "cut": ({MODEL: (theirs / MODEL).read_bytes()[:-1]}, "safetensors can't be read: Error while deserializing"),
        "pointer": ({MODEL: b"version https://git-lfs.github.com/spec/v1"}, "is a pointer of Git LFS; git lfs pull"),
        "renamed": ({MODEL: None, "consolidated.safetensors": b""}, "consolidated.safetensors is not read, because"),
        "part": ({MODEL: None, "model-1-of-2.safetensors": b""}, "model-1-of-2.safetensors is not read, because"),
        "diverged": ({MODEL: save(weights | {name: weights[name] * torch.nan})}, ""),  # import reads no values
        **{
            name: (
                {"config.json": None, f"{sub}/config.json": b""},
                f"{sub}/config.json is of a model: name its folder",
            )
            for name, sub in (("above", "snapshots"), ("cached", "snapshots/sub"))
        },
        "nothing": (dict.fromkeys(plain), "nothing/config.json: .*hf download NAME"),
        "untold": ({"tokenizer.json": None}, "there is no file .*tokenizer.json: name .* with --tokenizer=FILE"),
        "other": ({"tokenizer.json": None, "spm.model": b"\n\x0e\n\x05<unk>\x15"}, r"from_pretrained\('.*other'\)"),
        "padded": (
            {"tokenizer.json": words({**{f"w{i}": i for i in range(97)}, "[PAD]": 97}).to_str().encode()},
            r"98 entries, and the model 97 embeddings, none of them for \[PAD\]: ",
        ),
        "wrapped": (
            {
                MODEL: save(
                    {
                        "base_model.model.module."
                        + name.replace(".0.", ".0._fsdp_wrapped_module._checkpoint_wrapped_module.").replace(
                            ".mlp", "._orig_mod.mlp"
                        ): weights[name]
                        for name in weights
                    }
                )
            },
            "",
        ),
    }
    for folder, (changes, message) in cases.items():
        (tmp_path / folder / "snapshots/sub").mkdir(parents=True)
        for file, content in (plain | changes).items():
            _ = content is None or (tmp_path / folder / file).write_bytes(content)
        with pytest.raises(UserError, match=f"(?s){message}") if message else contextlib.nullcontext():
            [*section(tmp_path / folder)]
    assert [
        f'path = "{theirs}"' in [*section(tmp_path / "untold", theirs)],
        *(
            message
            in str(hf.check_source(Config(model=hf.config_of(folder).model_copy(update={"init_from": str(folder)}))))
            for folder, message in (
                (tmp_path / "untold", "own with --tokenizer.path="),
                (tmp_path / "other", "from_pre"),
            )
        ),
    ] == [True] * 3
    for folder, message in (
        ("adapter", "is of a LoRA adapter: merge_and_unload"),
        ("diverged", "1 tensor of it with NaN or infinite values"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_model(tmp_path / folder, torch.device("cpu"), torch.float32)


def test_another_context_is_accepted_where_positions_are_computed(theirs: Path) -> None:
    config = hf.config_of(theirs)
    for n in (32, 128):
        with (
            pytest.raises(CheckpointError, match=rf"max_seq_len is 64 in the checkpoint and {n} here")
            if config.family == "gpt"
            else contextlib.nullcontext()
        ):
            hf.find_weights(theirs, config.model_copy(update={"max_seq_len": n}))


# --- the begin token ----------------------------------------------------------------------------------------------

NAMED = {"bos_token_id": 257, "eos_token_id": 258}


def with_marks(folder: Path, first: str = "", **files: dict[str, Any]) -> Tokenizer:
    """Write a tokenizer that puts `first` before a text, and JSON files.

    It has bytes, the special tokens <s> (id 257) and </s> (id 258), and a word (id 259).
    """
    tokenizer = byte_level()
    assert (tokenizer.add_special_tokens(["<s>", "</s>"]), tokenizer.add_tokens(["<word>"])) == (2, 1)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A".split(), special_tokens=[("<s>", 257)]
    )
    for name, content in {"tokenizer": json.loads(tokenizer.to_str()), **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return tokenizer


@pytest.mark.parametrize(
    ("files", "first", "expected"),
    [
        ({"config": {"model_type": "qwen2"}}, "<s>", [257]),
        ({"config": {"model_type": "llama", **NAMED}}, "", [257]),
        ({"config": {"model_type": "mistral", "eos_token_id": [258]}, "generation_config": NAMED}, "", [257]),
        ({"config": {"model_type": "llama", **NAMED}, "generation_config": {"bos_token_id": 0}}, "", [257]),
        ({"config": {"model_type": "qwen2", **NAMED}}, "", []),
        ({"config": {"model_type": "qwen2", **NAMED}, "tokenizer_config": {"add_bos_token": True}}, "", [257]),
        ({"config": {"model_type": "llama", **NAMED}, "tokenizer_config": {"add_bos_token": False}}, "", []),
        (
            {"config": {"model_type": "llama", **NAMED}, "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}},
            "",
            [],
        ),
        ({"config": {"model_type": "gemma3_text", "bos_token_id": 258, "eos_token_id": [7, 258]}}, "", []),
        ({"config": {"model_type": "gemma3_text", **NAMED}}, "", [257]),
        *(
            ({"config": {"model_type": "llama", "bos_token_id": token, "eos_token_id": 258}}, "", [])
            for token in (5, 259)  # a byte, a word
        ),
    ],
)
def test_the_begin_token_is_that_of_the_pretraining(
    files: dict[str, Any], first: str, expected: list[int], tmp_path: Path
) -> None:
    assert hf.begin_tokens(tmp_path, with_marks(tmp_path, first, **files)) == expected
    assert [hf.tokenizer_notes(tmp_path, tmp_path / "tokenizer.json", token) for token in (None, 257, 258)] == [
        *([], []),
        [
            f"the weights of {tmp_path} were trained on documents that begin with '<s>' (id 257), and these do not: "
            "--tokenizer.begin_token='<s>' adds it to a text; prepare a folder again with --begin-token"
        ]
        * len(expected),
    ]


@pytest.mark.parametrize(
    ("kind", "bos", "eos"), [("Llama", 257, 258), ("Qwen2", 257, [258, 7]), ("Olmo2", None, [258])]
)
def test_a_begin_token_is_kept_from_the_import_to_the_export(
    kind: str, bos: int | None, eos: int | list[int], tmp_path: Path
) -> None:
    """Llama has it in documents, prompts and exported text. The others only name one, which an export keeps.

    The end token is that of the import too, although the tokenizer has <|endoftext|>. An export keeps further ones.
    """
    texts = ["".join("abc defg hij klm"[(i + 3) * j % 16] for j in range(9 + i % 9)) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    config = getattr(transformers, f"{kind}Config")(
        **SHAPE | {"vocab_size": 260, "bos_token_id": bos, "eos_token_id": eos}
    )
    config.pad_token_id, theirs = None, tmp_path / "theirs"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(theirs)
    tokenizer, first = with_marks(theirs), [257] if kind == "Llama" else []
    succeeded(python("import", str(theirs), str(tmp_path / "mine.toml"), script="checkpoint.py"))
    more: dict[str, Any] = {
        **{"run__name": "run", "train__steps": 2, "train__seq_len": 24, "train__micro_batch_size": 6},
        **{
            "sample__every": 2,
            "sample__prompts": "abc",
            "sample__temperature": 0,
            "sample__max_tokens": 9,
            "optim__warmup_steps": 1,
        },
        **{"data__packing": "best_fit", "data__document_mask": True, "data__val_fraction": 0.3},
        "optim__warmup_steps": 1,
    }
    options, run, out = tiny(tmp_path / "text.jsonl", tmp_path, **more), tmp_path / "run", tmp_path / "out"
    kept = [option for option in options if not re.match("--(model|tokenizer|optim.name|run.name)", option)]
    for name, start in (("first", theirs), ("run", tmp_path / "first")):
        succeeded(ranks(1, f"--config={tmp_path}/mine.toml", *kept, f"--run.name={name}", f"--model.init_from={start}"))

    opened = open_model(run, torch.device("cpu"), torch.float32)
    folder, marks = opened.own_data().folder, (258, *first)
    parts = ([*one, *marks] for one in documents(folder, read_meta(folder), "train"))
    assert stream_of(folder, "train") == sum(parts, [marks[-1]])
    for kind_of_samples in (Samples, PackedSamples):
        rows = kind_of_samples(folder, "train", 24).draw(np.arange(9), None)
        assert set(rows.tokens[rows.begins & (rows.targets >= 0)].tolist()) == {marks[-1]}

    succeeded(python("export", str(run), str(out), script="checkpoint.py"))
    exported = open_model(out, torch.device("cpu"), torch.float32)
    words, ours = (json.loads((out / f"{name}.json").read_text()) for name in ("tokenizer_config", "config"))
    assert (ours["bos_token_id"], ours["eos_token_id"], words["add_bos_token"]) == (bos, eos, bool(first))
    assert opened.begin == exported.begin == (*first,)
    assert (*opened.ends,) == (258,) == exported.ends[:1]
    assert transformers.PreTrainedTokenizerFast.from_pretrained(out)("abc")["input_ids"] == [
        *first,
        *tokenizer.encode("abc", add_special_tokens=False).ids,
    ]
    greedy = {
        tuple(generate.tokens_of(one, generate.encode(one, "abc"), generate.Options(9, temperature=0)))
        for one in (opened, exported)
    }
    assert {tokenizer.decode(one) for one in greedy} == {json.loads((run / "samples.jsonl").read_text())["text"]}
