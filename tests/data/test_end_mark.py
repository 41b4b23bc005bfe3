"""The token that ends a document: what the text was prepared with decides, from training to the exported folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.data.test_data import make
from tests.helpers import checkpoint, ranks, succeeded, tiny
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.huggingface import weights
from torchtitan_lite.tools import checkpoints
from torchtitan_lite.tools.load_model import open_model

END = 517  # </s> of the tokenizer below, whose <|endoftext|> is 0


@pytest.mark.extended
def test_a_run_its_checkpoints_and_its_export_have_the_end_mark_of_the_data(text: Path, tmp_path: Path) -> None:
    given = Tokenizer.from_file(str(make(text, tmp_path / "cache") / "tokenizer.json"))
    given.add_special_tokens(["</s>", "<END>"])
    given.save(str(tmp_path / "tokenizer.json"))
    options = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--end-token", "</s>"]
    assert main([str(text / "typing.txt"), *options, "--out", str(tmp_path / "data")]) == 0
    command = tiny(tmp_path / "data", tmp_path, run__name="run", train__steps=3, sample__every=3, sample__max_tokens=2)
    succeeded(ranks(1, *command))
    run = tmp_path / "run"
    weights.export(run, tmp_path / "export")
    assert json.loads((tmp_path / "export/config.json").read_text())["eos_token_id"] == END
    moved = shutil.copytree(checkpoint(run, 3), tmp_path / "elsewhere/step-00000003")
    for folder, tokenizer in (
        (run, None),
        (checkpoint(run, 3), None),
        (moved, run / "tokenizer.json"),
        (tmp_path / "export", None),
    ):
        assert open_model(folder, torch.device("cpu"), torch.float32, tokenizer).ends == (END,)
    named = Tokenizer.from_file(str(run / "tokenizer.json")).id_to_token(END)
    assert f'end_token = "{named}"' in checkpoints.section(tmp_path / "export")
    theirs = json.loads((tmp_path / "export/config.json").read_text())
    (tmp_path / "export/config.json").write_text(json.dumps(theirs | {"eos_token_id": [END, 7]}))
    assert open_model(tmp_path / "export", torch.device("cpu"), torch.float32, None).ends == (END, 7)
    assert json.loads((checkpoint(run, 3) / "state.json").read_text())["end_token"] == END
