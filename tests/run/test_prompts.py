"""The prompts of samples: those of the config, or the start of a document."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from torchtitan_lite.config.schema import Config, DataConfig, SampleConfig
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run.sampling import Prompts


def test_without_prompts_other_text_is_sampled_from_the_start_of_a_document(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(20)))
    out = tmp_path / "data"
    assert main([str(tmp_path / "text.jsonl"), "--out", str(out), "--tokenizer=bytes", "--val-fraction=0.4"]) == 0
    data, tokenizer = DataSet.open({"": (1.0, out)}), Tokenizer.from_file(str(out / "tokenizer.json"))

    def prompts(config: Config) -> list[tuple[str, list[int]]]:
        found = Prompts.from_config(config, data)
        return list(zip(found.texts, found.ids, strict=True))

    assert prompts(Config()) == [(text, tokenizer.encode(text).ids) for text in ("def ", "The ")]
    own, mixed = Config(data=DataConfig(path=str(out))), Config(data=DataConfig(sources={str(out): 1.0}))
    assert prompts(own) == prompts(mixed) == [("", [data.end_token])]
    named = own.model_copy(update={"sample": SampleConfig(prompts=["mine", ""])})
    assert prompts(named) == [("mine", tokenizer.encode("mine").ids), ("", [data.end_token])]
    answered = {"model": {"family": "t5", "max_seq_len": 6}, "data": {"objective": "span_corruption", "path": str(out)}}
    source = Config.model_validate(answered | {"sample": {"prompts": ["mine"]}})
    assert prompts(source) == [("mine", [*tokenizer.encode("mine").ids, data.end_token])]
    assert len(prompts(source.model_copy(update={"sample": SampleConfig(prompts=["five5"])}))[0][1]) == 6
    with pytest.raises(ConfigError, match="^the prompt 'a long' has 7 tokens, and the model takes 6"):
        prompts(source.model_copy(update={"sample": SampleConfig(prompts=["five5", "a long"])}))
