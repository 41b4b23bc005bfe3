"""The API: `import torchtitan_lite as ttl`, docs/notebook.md, and the losses of a run in a plain loop."""

import contextlib
import functools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchtitan_lite as ttl
from tests.docs.pages import blocks
from tests.helpers import ROOT, TINY, checkpoint, losses, ranks, run_python, succeeded, tiny
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.tools.evaluation.documents import Texts
from torchtitan_lite.tools.generate import Options

CELLS = blocks((ROOT / "docs/notebook.md").read_text(), "python")
STEPS = 5
MORE: dict[str, Any] = {
    **{"train__steps": STEPS, "eval__every": STEPS, "checkpoint__every": STEPS},
    **{"model__family": "llama", "optim__max_norm": 0.5, "run__seed": 3, "train__z_loss": 1e-3},
    **{"optim__freeze": ["layers.1.attention.wo.*"], "data__packing": "best_fit", "data__document_mask": True},
}


@pytest.fixture(scope="module")
def place(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: a text, the configs, and a run on one process."""
    folder = tmp_path_factory.mktemp("api")
    shutil.copytree(text, folder / "my_text")
    (folder / "configs").mkdir()
    values = [f"{key} = {json.dumps(value)}" for key, value in TINY.items()]
    (folder / "configs/debug.toml").write_text("\n".join(values))  # smaller than the one that the page names
    succeeded(ranks(1, *tiny(folder / "my_text", folder / "runs", run__name="default", **MORE)))
    with contextlib.chdir(folder):
        yield folder
    assert not dist.is_initialized()


def tiny_config(**more: Any) -> Any:
    values = TINY | {"data.path": "my_text"} | {key.replace("__", "."): value for key, value in (MORE | more).items()}
    return ttl.load_config(overrides=values)


def plain_loop(config: Any) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, as metrics.jsonl has them."""
    found: dict[int, tuple[float, float]] = {}
    data = ttl.open_data(config)
    build, loop = CELLS[1:3]  # of the page
    loop += "\n    found[step] = float(total / batch.global_tokens), float(norm)"
    exec(f"{build}\n{loop}", {"torch": torch, "ttl": ttl, "config": config, "data": data, "found": found})
    return found


# --- what it computes -----------------------------------------------------------------------------------------------


def test_a_plain_loop_has_the_losses_of_a_run_bit_for_bit(place: Path) -> None:
    found, run = plain_loop(tiny_config()), losses(place / "runs/default")
    assert min(norm for _, norm in run.values()) > MORE["optim__max_norm"]  # so gradients are clipped
    assert found == run
    assert plain_loop(ttl.load_config("runs/default/config.toml")) == run


OTHERS: dict[str, dict[str, Any]] = {
    "experts": {
        **{"model__family": "qwen3_moe", "model__n_experts": 4, "train__router_z_loss": 0.01},
        **{"model__router_bias": True, "train__router_aux_loss": 0.1, "train__router_bias_rate": 0.1},
        **{"optim__name": "sgd", "optim__lr": 0.1},
    },
    "muon": {"optim__name": "muon"},
    "sgd": {"optim__name": "sgd", "optim__lr": 0.1, "model__tie_embeddings": True},
    "streams": {"data__packing": "concat", "data__document_mask": False},
    "schedule": {"train__batch_schedule": [[2, 4]], "activation_checkpointing__mode": "full"},
}


@pytest.mark.parametrize("name", ["experts", *(pytest.param(n, marks=pytest.mark.extended) for n in [*OTHERS][1:])])
def test_a_plain_loop_with_other_values(place: Path, tmp_path: Path, name: str) -> None:
    more = OTHERS[name]
    given = {key: str(value).lower() if isinstance(value, bool) else value for key, value in (MORE | more).items()}
    succeeded(ranks(1, *tiny(place / "my_text", tmp_path, run__name="run", **given)))
    assert plain_loop(tiny_config(**more)) == losses(tmp_path / "run")
    model, _ = ttl.load_model(tmp_path / "run", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.buffers()} == {torch.float32}, "biases of routers, too"


@pytest.mark.filterwarnings("ignore:without effect.* train.steps = 5 needs train.epochs = 0")
def test_data_knows_its_sizes_and_marks_and_begins_at_any_step(place: Path) -> None:
    def tokens(first_step: int = 1, **more: Any) -> dict[int, list[Any]]:
        data = ttl.open_data(tiny_config(**more))
        return {step: [m.tokens.tolist() for m in batch.micro_batches] for step, batch in data.batches(first_step)}

    every = tokens(train__batch_schedule=[[2, 4]])
    assert [sum(map(len, batch)) for batch in every.values()] == [6, 6, 4, 4, 4]
    assert tokens(3, train__batch_schedule=[[2, 4]]) == {step: every[step] for step in (3, 4, 5)}
    assert tokens(data__skip_samples=[[0, 6]])[1] == tokens()[2]
    data = ttl.open_data(tiny_config(train__epochs=0.05))
    steps = data.config.train.steps
    assert [step for step, _ in data.batches(steps - 1)] == [steps - 1, steps] != [STEPS - 1, STEPS]
    assert (data.tokenizer.end_tokens, data.tokenizer.vocab_size, data.tokenizer.config) == ((0,), 517, data.config)


def test_scores_and_text_are_those_of_the_commands(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their functions, which get every argument; without dropout and gradients, and the model stays in training."""
    model, tokenizer = ttl.load_model("runs/default")
    assert tokenizer.config
    assert tokenizer.config.run.name == "default", "scores have its windows"
    model.train()
    seen: list[Any] = []

    def tokens_of(opened: Any, *given: Any) -> list[int]:
        seen.append((*given, opened.config, model.training, torch.is_grad_enabled()))
        return [70, 71]

    def scores_of(opened: Any, texts: Texts, process: Any, note: Any) -> list[Any]:
        seen.append((texts, process.world_size, opened.config, model.training, torch.is_grad_enabled()))
        note("a note")
        return []

    monkeypatch.setattr("torchtitan_lite.tools.generate.tokens_of", tokens_of)
    monkeypatch.setattr("torchtitan_lite.tools.evaluation.evaluate.scores_of", scores_of)
    how: dict[str, Any] = {"max_tokens": 9, "temperature": 3.0, "top_k": 5, "top_p": 0.9, "seed": 4}
    said, prompt = ttl.generate(model, tokenizer, "def ", **how), tokenizer.encode("def ")
    assert f"def {said}" == tokenizer.decode([*prompt, 70, 71])
    assert seen.pop() == (prompt, Options(**how), tokenizer.config, False, False)
    ttl.generate(model.eval(), tokenizer, "def ")
    assert seen.pop()
    assert not model.training, "it stays as it is"
    model.train()
    prefixed, how = replace(tokenizer, source_prefix="to: "), {"beams": 3, "length_penalty": 2.0}
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, model.config.family, FAMILIES["t5"])
        assert ttl.generate(model, prefixed, "def ", **how) == tokenizer.decode([70, 71])
    assert seen.pop()[:2] == ([*tokenizer.encode("to: def "), *tokenizer.end_tokens], Options(**how))
    how = {"split": "train", "text_key": ["b"], "text_suffixes": [".md"], "documents": 3, "seq_len": 8, "batch_size": 2}
    data = ttl.open_data(tiny_config(optim__lr=0.5))
    given: Any
    for given, texts, config in (
        ([Path("a.txt"), Path("b")], ["a.txt", "b"], tokenizer.config),
        ("c", ["c"], tokenizer.config),
        (data, [str(data.dataset.folder)], data.config),
    ):
        with pytest.warns(UserWarning, match="^a note$"):
            ttl.evaluate(model, tokenizer, given, **how)
        assert (*seen.pop(), model.training) == (Texts(data=texts, **how), 1, config, False, False, True)


def test_a_config_of_many_gpus_loads_and_notes_are_warnings(place: Path, tmp_path: Path) -> None:
    """Also notes on a newer checkpoint that is damaged."""
    Path("mesh.toml").write_text('[fsdp]\nsharding_strategy = "HYBRID_SHARD"\ndp_shard = 4\n[optim]\nlr = 0.5\n')
    config = ttl.load_config(Path("mesh.toml"), {"data.path": Path("my_text")})
    assert (config.fsdp, config.optim.lr, config.data.path) == (ttl.load_config().fsdp, 0.5, "my_text")
    blocks_of = {"activation_checkpointing__mode": "full", "compile__enabled": True, "compile__backend": "eager"}
    block: Any = ttl.build_model(tiny_config(**blocks_of), 517).layers[0]
    assert (block.forward.__name__, bool(block._compiled_call_impl)) == ("checkpointed", True)
    run = shutil.copytree("runs/default", tmp_path / "run")
    newest = shutil.copytree(checkpoint(run, STEPS), checkpoint(run, STEPS + 1))
    (newest / "model.safetensors").write_bytes(b"")
    from_run, in_bfloat16 = tiny_config(model__init_from=str(run)), tiny_config(fsdp__param_dtype="bfloat16")
    for expected, call in (
        ("model.window = 5 needs", lambda: ttl.load_config(overrides={"model.family": "gpt", "model.window": 5})),
        ("the model computes in float32, not in fsdp.param_dtype", lambda: ttl.build_model(in_bfloat16, 517)),
        (f"damaged: {newest}", lambda: ttl.load_model(run)),
        (f"damaged: {newest}", lambda: ttl.build_model(from_run, 517)),
    ):
        with pytest.warns(UserWarning, match=re.escape(expected)) as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__], expected


def test_weights_of_a_run_and_of_a_published_model(place: Path) -> None:
    succeeded(run_python(["checkpoint.py", "export", str(place / "runs/default"), str(place / "exported")]))
    model, tokenizer = ttl.load_model("runs/default")
    published, same = ttl.load_model(place / "exported")
    tokens = torch.tensor([tokenizer.encode("def main(arguments)")])
    assert same.encode(tokenizer.decode(tokens[0].tolist())) == same.encode("def main(arguments)") == tokens[0].tolist()
    torch.testing.assert_close(published(tokens), model(tokens))
    for source in ("runs/default", "exported"):
        started = ttl.build_model(tiny_config(model__init_from=source), tokenizer.vocab_size)
        for name, parameter in started.named_parameters():
            assert parameter.equal(model.get_parameter(name)), (source, name)
    file = Path("exported/tokenizer.json").rename("elsewhere.json")
    half, _ = ttl.load_model("exported", dtype=torch.bfloat16, tokenizer=file)
    dtypes = {tensor.dtype for tensor in half.parameters()}, {tensor.dtype for tensor in half.buffers()}
    assert (*dtypes, half.training) == ({torch.bfloat16}, {torch.float32}, False)
    (model(tokens, tokens) / 5).backward()  # it can be trained
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("ttl.load_config(overrides={'train.stepz': 5})", "overrides: [train] stepz = 5: unknown key"),
        ("ttl.load_config('nosuch.toml')", "nosuch.toml: can't be read as TOML: No such file"),
        ("ttl.load_config(overrides={'model.init_from': 'nosuch', 'run.name': 'new'})", "model.init_from"),
        ("ttl.load_config(overrides={'model.init_from': 'runs/default'})", "dim is 32 in the checkpoint and 128 here"),
        (
            "ttl.load_config(overrides={'optim.freeze': ['nothing.*']})",
            'optim.freeze: "nothing.*" matches no parameter',
        ),
        ("ttl.open_data(ttl.load_config(overrides={'data.path': 'nosuch'}))", "nosuch"),
        ("ttl.build_model(config)", "ttl.build_model(config, data.vocab_size)"),
        (
            "ttl.build_model(ttl.load_config(overrides={'model.vocab_size': 300, 'tokenizer.vocab_size': 257}), 517)",
            "model.vocab_size = 300 is smaller than the tokenizer's 517; 0 takes that",
        ),
        ("ttl.load_model('nosuch')", "nosuch does not exist"),
        ("ttl.load_model('my_text')", "is not a run with a checkpoint"),
        ("ttl.load_model('runs/default', tokenizer='nosuch.json')", "nosuch.json"),
        ("ttl.set_learning_rate(optimizer, tiny_config(optim__schedule='step'), 3)", "use the config of ttl.open_data"),
        (
            "ttl.generate(model, tokenizer, 'a', max_tokens=0, top_p=2)",
            "--max-tokens=0 should be at least 1\n  --top-p=",
        ),
        ("ttl.generate(model, tokenizer, 'a', beams=2)", "beams=2 is for encoder-decoders"),
        ("ttl.evaluate(model, tokenizer, 'nosuch')", "nosuch"),
        ("ttl.evaluate(model, tokenizer, [])", "no text to score"),
        ("ttl.evaluate(model, tokenizer, data, seq_len=100)", "seq-len=100: the model takes at most 37 tokens"),
        ("ttl.evaluate(model, tokenizer, data, batch_size=0)", "--batch-size=0 should be at least 1"),
        ("ttl.evaluate(model, tokenizer, '')", "no text to score"),
        ("ttl.build_model(config, -1)", "the vocabulary size is missing"),
        ("ttl.build_model(tiny_config(model__init_from='runs/default'), 519)", "tok_embeddings.weight"),
    ],
)
def test_mistakes_are_user_errors(place: Path, mistake: str, message: str) -> None:
    with pytest.raises(ttl.UserError) as raised:
        eval(mistake, dict(example_names()))
    assert message in str(raised.value)


# --- what is documented ---------------------------------------------------------------------------------------------


@functools.cache
def example_names() -> dict[str, Any]:
    """What the examples in the docstrings use."""
    config = tiny_config()
    data = ttl.open_data(config)
    model = ttl.build_model(config, data.vocab_size)
    optimizer = ttl.build_optimizer(model, config)
    tokens = torch.tensor([data.tokenizer.encode("def main")])
    names = {"ttl": ttl, "torch": torch, "config": config, "data": data, "model": model, "optimizer": optimizer}
    return names | {"tokenizer": data.tokenizer, "tokens": tokens, "tiny_config": tiny_config}


def test_each_cell_of_the_page(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    assert len(CELLS) >= 9
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(CELLS):
        exec(compile(cell, f"cell {number}", "exec"), names)
        assert not dist.is_initialized()
    said = capsys.readouterr().out
    assert re.search(r"^step 20  loss \d\.\d{4}  grad norm \d+\.\d\d$", said, re.M)
    assert "train.steps" in said
    assert (dir(ttl), (place / "weights.pt").is_file()) == (sorted(ttl.__all__), True), "with every module imported"
