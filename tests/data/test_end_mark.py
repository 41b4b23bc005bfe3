"""The token that ends a document: what the text was prepared with decides, from training to the exported folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.data.test_data import make
from tests.helpers import checkpoint, ranks, succeeded, tiny
from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.errors import DataError
from torchtitan_lite.huggingface import weights
from torchtitan_lite.tools import checkpoints
from torchtitan_lite.tools.load_model import open_model

END = 517  # </s> of the tokenizer below, whose <|endoftext|> is 0


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with one tokenizer and two end marks, by the mark."""
    base = tmp_path_factory.mktemp("ends")
    tokenizer = Tokenizer.from_file(str(make(text, base / "cache") / "tokenizer.json"))
    tokenizer.add_special_tokens(["</s>", "<END>"])
    tokenizer.save(str(base / "tokenizer.json"))
    command = [str(text / "typing.txt"), "--tokenizer", str(base / "tokenizer.json")]
    assert main([*command, "--out", str(base / "s"), "--end-token", "</s>"]) == 0
    assert main([*command, "--out", str(base / "usual")]) == 0
    return {"</s>": base / "s", "usual": base / "usual"}


@pytest.mark.extended
def test_a_run_its_checkpoints_and_its_export_have_the_end_mark_of_the_data(
    prepared: dict[str, Path], tmp_path: Path
) -> None:
    command = tiny(prepared["</s>"], tmp_path, run__name="run", train__steps=3, sample__every=3, sample__max_tokens=2)
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


def test_sources_with_different_end_marks_are_refused(prepared: dict[str, Path]) -> None:
    sources = {str(prepared["</s>"]): 0.5, str(prepared["usual"]): 0.5}
    with pytest.raises(
        DataError,
        match=r"with '</s>' \(id 517\) in .*/s and with '<\|endoftext\|>' \(id 0\) in .*/usual; prepare one of ",
    ):
        prepare_all(DataConfig(sources=sources), TokenizerConfig(), print)


def test_text_beside_a_prepared_folder_gets_its_tokenizer_and_its_end_mark(
    prepared: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    sources = {str(text / "tarfile.txt"): 0.5, str(prepared["</s>"]): 0.5}
    data = prepare_all(DataConfig(sources=sources, cache_dir=str(tmp_path)), TokenizerConfig(), print)
    assert [(source.name, source.meta.end_token) for source in data.sources] == [(name, END) for name in sources]


def test_a_config_that_names_another_end_mark_is_refused(prepared: dict[str, Path]) -> None:
    data = DataConfig(path=str(prepared["</s>"]))
    assert prepare_all(data, TokenizerConfig(end_token="</s>"), print).end_token == END
    with pytest.raises(
        DataError, match=r"in .*/s end with '</s>' \(id 517\), but tokenizer\.end_token is '<END>'; leave"
    ):
        prepare_all(data, TokenizerConfig(end_token="<END>"), print)
