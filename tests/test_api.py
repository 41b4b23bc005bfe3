"""The API: `import torchtitan_lite as ttl`, its doctests, docs/notebook.md, and the losses of a run in a plain loop."""

import contextlib
import functools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchtitan_lite as ttl
from tests.docs.pages import blocks
from tests.helpers import ROOT, TINY, losses, ranks, run_python, succeeded, tiny
from torchtitan_lite.data.loader import MicroBatch

CELLS = blocks((ROOT / "docs/notebook.md").read_text(), "python")
STEPS = 5
MORE: dict[str, Any] = {
    **{"train__steps": STEPS, "eval__every": STEPS, "checkpoint__every": STEPS},
    **{"model__family": "llama", "optim__max_norm": 0.5},
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
    config = ttl.load_config("runs/default/config.toml")
    assert plain_loop(config) == run


OTHERS: dict[str, dict[str, Any]] = {
    "experts": {
        **{"model__family": "qwen3_moe", "model__n_experts": 4, "train__router_z_loss": 0.01},
        **{"model__router_bias": True, "train__router_aux_loss": 0.1, "train__router_bias_rate": 0.1},
    },
    "muon": {"optim__name": "muon"},
    "sgd": {"optim__name": "sgd", "optim__lr": 0.1, "model__tie_embeddings": True},
    "documents": {"data__packing": "best_fit", "data__document_mask": True, "train__z_loss": 1e-4},
    "schedule": {"train__batch_schedule": [[2, 4]], "activation_checkpointing__mode": "full"},
}


@pytest.mark.parametrize("name", ["experts", *(pytest.param(n, marks=pytest.mark.extended) for n in [*OTHERS][1:])])
def test_a_plain_loop_with_other_values(place: Path, tmp_path: Path, name: str) -> None:
    more = OTHERS[name]
    given = {key: str(value).lower() if isinstance(value, bool) else value for key, value in (MORE | more).items()}
    succeeded(ranks(1, *tiny(place / "my_text", tmp_path, run__name="run", **given)))
    assert plain_loop(tiny_config(**more)) == losses(tmp_path / "run")


def test_batches_from_a_later_step(place: Path) -> None:
    config = tiny_config(train__batch_schedule=[[2, 4]])
    data = ttl.open_data(config)
    every = dict(data.batches())
    assert list(every) == list(range(1, STEPS + 1))
    later = dict(data.batches(first_step=3))
    assert list(later) == [3, 4, 5]

    def tokens(micro_batches: list[MicroBatch]) -> torch.Tensor:
        return torch.cat([micro.tokens for micro in micro_batches])

    for step, batch in later.items():
        assert tokens(batch.micro_batches).equal(tokens(every[step].micro_batches))
    assert "train_tokens=" in repr(data)
    size = config.train.batch_size(1)
    without_first = ttl.open_data(tiny_config(data__skip_samples=[[0, size]])).batches()
    plain = dict(ttl.open_data(tiny_config()).batches())
    assert tokens(next(without_first)[1].micro_batches).equal(tokens(plain[2].micro_batches))


@pytest.mark.extended
def test_scores_and_text_are_those_of_the_commands(place: Path) -> None:
    model, tokenizer = ttl.load_model("runs/default")
    command = ["-m", "torchtitan_lite.evaluate", str(place / "runs/default"), "--device", "cpu"]
    command += ["--json", str(place / "scores.json")]
    text = str(place / "my_text")
    succeeded(run_python([*command, "--data", text, "--documents", "2"]))
    (scored,) = json.loads((place / "scores.json").read_text())["models"]
    assert ttl.evaluate(model, tokenizer, text, documents=2) == scored["texts"]
    succeeded(run_python(command))
    (scored,) = json.loads((place / "scores.json").read_text())["models"]
    data = ttl.open_data(tiny_config())
    (own,) = ttl.evaluate(model, tokenizer, data).values()
    (wanted,) = scored["texts"].values()
    assert own["loss"] == wanted["loss"]

    words = ["-m", "torchtitan_lite.generate", str(place / "runs/default"), "--prompt", "def ", "--max-tokens", "20"]
    said = succeeded(run_python([*words, "--device", "cpu"]))
    assert said == f"def {ttl.generate(model, tokenizer, 'def ', max_tokens=20)}\n"


def test_weights_of_a_run_and_of_a_published_model(place: Path) -> None:
    succeeded(run_python(["checkpoint.py", "export", str(place / "runs/default"), str(place / "exported")]))
    model, tokenizer = ttl.load_model("runs/default")
    published, same = ttl.load_model(place / "exported")
    tokens = torch.tensor([tokenizer.encode("def main(arguments)")])
    assert same.encode("def main(arguments)") == tokens[0].tolist()
    assert tokenizer.decode(tokens[0].tolist()) == "def main(arguments)"
    torch.testing.assert_close(published(tokens), model(tokens))
    for source in ("runs/default", "exported"):
        started = ttl.build_model(tiny_config(model__init_from=source), tokenizer.vocab_size)
        for name, parameter in started.named_parameters():
            assert parameter.equal(model.get_parameter(name)), (source, name)
    (model(tokens, tokens) / 5).backward()  # it can be trained
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("ttl.load_config(overrides={'train.stepz': 5})", "overrides: [train] stepz = 5: unknown key"),
        ("ttl.load_config('nosuch.toml')", "nosuch.toml: no such file"),
        ("ttl.load_config(overrides={'model.init_from': 'nosuch'})", "model.init_from"),
        ("ttl.open_data(ttl.load_config(overrides={'data.path': 'nosuch'}))", "nosuch"),
        ("ttl.build_model(config)", "ttl.build_model(config, data.vocab_size)"),
        (
            "ttl.build_model(ttl.load_config(overrides={'model.vocab_size': 300, 'tokenizer.vocab_size': 257}), 517)",
            "model.vocab_size = 300 is smaller than the tokenizer's 517; 0 takes that",
        ),
        ("ttl.load_model('nosuch')", "nosuch does not exist"),
        ("ttl.load_model('my_text')", "is not a run with a checkpoint"),
        ("ttl.load_model('runs/default', tokenizer='nosuch.json')", "nosuch.json"),
        ("tokenizer.encode('a' + chr(0xd83d))", "the tokenizer can't encode the text 'a\\ud83d'"),
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
    assert (place / "weights.pt").is_file()
