"""Input at its edges: no tokens, no such user, other text of the same size and time, prompts without tokens."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from torchtitan_lite import plan
from torchtitan_lite.config.schema import Config, SampleConfig
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.token_files import TokenFiles, read_meta
from torchtitan_lite.training.sampling import wrong_prompts


def prepared(folder: Path, letter: str) -> Path:
    """A folder made of 64 short texts of one letter each."""
    lines = [json.dumps({"text": letter * 20 + f"{i:02d}"}) for i in range(64)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "text.jsonl"


def test_a_span_of_no_tokens_is_empty(tmp_path: Path) -> None:
    assert main([str(prepared(tmp_path, "a")), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    assert len(TokenFiles(tmp_path / "out", read_meta(tmp_path / "out"), "train").read(1, 1)) == 0


def test_other_text_of_the_same_size_and_time_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = prepared(tmp_path, "a")
    command = [str(text), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    before = text.stat()
    assert main(command) == 0
    assert main(command) == 0, "the same again"
    prepared(tmp_path, "b")
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert text.stat().st_size == before.st_size
    capsys.readouterr()
    assert main(command) == 2
    assert "was made from other text or options" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["data.path", "tokenizer.path"])
@pytest.mark.extended
def test_plan_names_a_user_who_is_not_there(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([f"--{key}=~nobody-of-this-name/x", "--world-size", "1"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_prompt_that_the_tokenizer_can_t_encode_is_named() -> None:
    tokenizer = Tokenizer(models.WordLevel({"def": 0, "<eos>": 1}, unk_token="<unk>"))
    config = Config(sample=SampleConfig(prompts=["def "]))
    (wrong,) = wrong_prompts(config, tokenizer)
    assert "sample.prompts: the tokenizer can't encode 'def '" in wrong
