"""A run of T5 is exported, imported, answered by, and started from."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.helpers import losses, python, ranks, succeeded, tiny
from tests.run.test_resume import T5
from torchtitan_lite.tools import generate
from torchtitan_lite.tools.load_model import open_model

SHAPE = T5 | {"train__steps": 4, "optim__warmup_steps": 2}


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    succeeded(ranks(1, *tiny(text, folder, run__name="run", **SHAPE)))
    return folder / "run"


@pytest.mark.extended
def test_a_run_is_exported_trained_on_and_answers(
    run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "exported"
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


def test_a_folder_becomes_a_config(run: Path, tmp_path: Path) -> None:
    out, written = tmp_path / "exported", tmp_path / "mine.toml"
    succeeded(python("export", str(run), str(out), script="checkpoint.py"))
    succeeded(python("import", str(out), str(written), script="checkpoint.py"))
    command = ["--config", str(written), "--check-config"]
    assert "the configuration is fine" in succeeded(python(*command))
    assert 'objective = "span_corruption"' in written.read_text()
    assert "lr = 1e-4  #" in written.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--source=x", "--beams=0"], "--beams=0 should be 1 to 1000, e.g. 4"),
        (["--source=x", "--length-penalty=nan"], "--length-penalty=nan should be between"),
        (["--source="], "the prompt is empty"),
        (
            ["--source=" + "a " * 400],
            "the prompt has .* tokens, and the model takes .*: a prompt of at most 37 works",
        ),
    ],
)
def test_sources_that_are_refused(
    arguments: list[str], expected: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main([str(run), *arguments]) == 2
    assert re.search(expected, capsys.readouterr().err)
