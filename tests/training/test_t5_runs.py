"""T5 in complete runs: resume, world sizes, checkpoints, samples, export, and the tools."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import checkpoint, losses, python, ranks, succeeded, tensors, tiny
from torchtitan_lite.tools import generate
from torchtitan_lite.tools.load_model import open_model

SHAPE: dict[str, Any] = {
    **{
        "model__family": "t5",
        "model__head_dim": 5,
        "model__hidden_dim": 50,
        "model__n_layers": 3,
        "model__n_decoder_layers": 2,
    },
    **{"data__objective": "span_corruption", "train__steps": 4, "checkpoint__every": 2, "eval__every": 2},
}
RUNS: dict[str, dict[str, Any]] = {
    "dcp": {
        **{"checkpoint__api": "dcp", "checkpoint__state_dict": "sharded", "fsdp__param_dtype": "bfloat16"},
        **{"fsdp__explicit_prefetching": True, "activation_checkpointing__mode": "selective", "model__dropout": 0.1},
    },
    "v1.0": {
        **{"model__gated": False, "model__tie_embeddings": True, "model__scale_output": True, "train__z_loss": 1e-4},
        **{"fsdp__grad_sync": "last", "train__micro_batch_size": 1},
    },
    "float32": {},
}
SAMPLES = ["--sample.every=4", '--sample.prompts=["def ", "The"]', "--sample.max_tokens=4"]
Runs = Callable[[str, int], Path]
extended = pytest.mark.extended


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of a run on n processes; each runs once."""
    folder = tmp_path_factory.mktemp("t5")

    @functools.cache
    def run(name: str, n: int) -> Path:
        succeeded(ranks(n, *tiny(text, folder, run__name=f"{name}{n}", **SHAPE, **RUNS[name])))
        return folder / f"{name}{n}"

    return run


@extended
@pytest.mark.parametrize("name", ["dcp", "v1.0"])
def test_a_resume_is_bitwise(name: str, runs: Runs, text: Path, tmp_path: Path) -> None:
    run = tmp_path / f"{name}2"
    shutil.copytree(runs(name, 2), run)
    shutil.rmtree(checkpoint(run, 4))
    # the run before had no samples: they change nothing
    output = succeeded(ranks(2, *tiny(text, tmp_path, run__name=f"{name}2", **SHAPE, **RUNS[name]), *SAMPLES))
    assert "resumed after step 2" in output
    assert "not bit for bit" not in output
    assert 'sample  step 4  "The" -> "' in output
    assert losses(run) == losses(runs(name, 2))
    mine, theirs = tensors(checkpoint(run, 4)), tensors(checkpoint(runs(name, 2), 4))
    assert mine.keys() == theirs.keys()
    assert all(mine[key].equal(theirs[key]) for key in theirs)
    first = tensors(checkpoint(run, 2))
    assert all(not first[key].equal(theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    "n", [pytest.param(2, marks=extended), pytest.param(3, marks=extended), pytest.param(4, marks=extended)]
)
def test_loss_curves_agree_on_other_world_sizes(n: int, runs: Runs) -> None:
    ours, theirs = losses(runs("float32", n)), losses(runs("float32", 1))
    assert ours.keys() == theirs.keys() == set(range(1, 5))
    for step, expected in theirs.items():
        assert ours[step] == pytest.approx(expected, rel=1e-4), f"step {step}"


@pytest.mark.parametrize(("n", "more"), [(1, {}), (3, {}), (4, {"fsdp__dp_replicate": 2})])
@extended
def test_a_run_resumes_on_other_world_sizes(
    n: int, more: dict[str, Any], runs: Runs, text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "float322"
    shutil.copytree(runs("float32", 2), run)
    shutil.rmtree(checkpoint(run, 4))
    output = succeeded(ranks(n, *tiny(text, tmp_path, run__name="float322", **SHAPE, **more)))
    assert "resumed after step 2" in output
    for step in range(3, 5):
        assert losses(run)[step] == pytest.approx(losses(runs("float32", 2))[step], rel=1e-4), f"step {step}"


@pytest.mark.extended
def test_a_run_is_exported_trained_on_and_answers(
    runs: Runs, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run, out = runs("float32", 1), tmp_path / "exported"
    succeeded(python("export", str(run), str(out), script="checkpoint.py"))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    end = json.loads((out / "config.json").read_text())["eos_token_id"]
    opened = open_model(run, torch.device("cpu"), torch.float32)
    source = generate.encode(opened, "def f(x):")
    assert source[-1] == end
    for beams in (1, 4):
        theirs = model.generate(torch.tensor([source]), num_beams=beams, do_sample=False, max_new_tokens=12)[0, 1:]
        kept = [token for token in theirs.tolist() if token != end]
        for folder in (run, out):
            words = [str(folder), "--source", "def f(x):", "--temperature=0", "--max-tokens=12", f"--beams={beams}"]
            assert generate.main(words) == 0
            assert capsys.readouterr().out == opened.tokenizer.decode(kept) + "\n"
    # and a run starts from it
    command = tiny(text, tmp_path, run__name="fork", model__init_from=out, **SHAPE)
    assert f"starts from the weights of {out}" in succeeded(ranks(2, *command))
    assert losses(tmp_path / "fork")[1][0] < losses(run)[1][0]


def test_a_folder_becomes_a_config(runs: Runs, tmp_path: Path) -> None:
    out, written = tmp_path / "exported", tmp_path / "mine.toml"
    succeeded(python("export", str(runs("float32", 1)), str(out), script="checkpoint.py"))
    succeeded(python("import", str(out), str(written), script="checkpoint.py"))
    command = ["--config", str(written), "--check-config"]
    assert "the configuration is fine" in succeeded(python(*command))
    assert 'objective = "span_corruption"' in written.read_text()
    assert "lr = 1e-4  #" in written.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prompt=x"], "--prompt is for decoders, and .* holds an encoder-decoder .t5.: use --source"),
        (["--source=x", "--beams=0"], "--beams=0 should be 1 to 1000, e.g. 4"),
        (["--source=x", "--length-penalty=nan"], "--length-penalty=nan should be between"),
        (["--source="], "the source is empty"),
        (["--source=" + "a " * 400], "the source has .* tokens; the model takes at most 37"),
    ],
)
def test_sources_that_are_refused(
    arguments: list[str], expected: str, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert generate.main([str(runs("float32", 1)), *arguments]) == 2
    assert re.search(expected, capsys.readouterr().err)
