"""Generation: the cache does not change the text, and every kind of folder gives the same text."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from tests.helpers import checkpoint, meta_model, ranks, succeeded, tiny
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.distributed import initialize
from torchtitan_lite.huggingface import weights
from torchtitan_lite.models import Transformer, generation
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.generation import Sampler, new_tokens
from torchtitan_lite.tools import generate, load_model

CONFIGS = {
    "gpt": ModelConfig(family="gpt", dim=32, n_heads=2, n_layers=3, max_seq_len=24, dropout=0.1),
    "llama": ModelConfig(dim=32, n_heads=4, n_kv_heads=2, n_layers=3, max_seq_len=24, qk_norm=True),
    "llama, tied": ModelConfig(dim=32, n_heads=4, n_layers=2, max_seq_len=24, tie_embeddings=True, qkv_bias=True),
    "windows": ModelConfig(
        dim=32, n_heads=4, n_kv_heads=2, n_layers=3, max_seq_len=24, window=5, layer_pattern=["window", "nope"]
    ),
    "resformer": ModelConfig(family="resformer", dim=32, n_heads=4, n_layers=2, max_seq_len=24, qk_norm=True),
    "hybrid": ModelConfig(
        family="olmo_hybrid", dim=32, n_heads=4, n_layers=3, max_seq_len=24, layer_pattern=["delta", "full"]
    ),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Transformer:
    """No parameter has its initial value, so attention matters."""
    made = meta_model(CONFIGS[request.param], 97)
    initialize.materialize(made, torch.device("cpu"), 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


@torch.no_grad()
def test_logits_and_tokens_are_the_same_with_the_cache(model: Transformer) -> None:
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    for chunks in ([1] * 24, [7, 1, 1, 5, 10], [24]):
        cache = model.new_cache()
        parts = torch.cat([model(part, None, cache) for part in tokens.split(chunks, dim=1)], dim=1)
        torch.testing.assert_close(parts, model(tokens), rtol=1e-4, atol=1e-4)
        for layer, window in zip(cache, model.config.windows, strict=True):
            assert layer.length == 24
            if isinstance(layer, KeysValues):
                assert layer.kept[0].shape[1] == (window - 1 if window else 24)
    prompt = [5, 6, 7]
    found = list(new_tokens(model, prompt, 100, Sampler(temperature=0)))
    expected: list[int] = []
    while len(prompt) + len(expected) < 24:
        expected.append(int(model(torch.tensor([prompt + expected]))[0, -1].argmax()))
    assert found == expected
    assert len(set(found)) > 3
    stop = found[5]
    assert list(new_tokens(model, prompt, 100, Sampler(temperature=0), ends=(stop,))) == found[: found.index(stop)]
    assert list(new_tokens(model, prompt, 4, Sampler(temperature=0))) == found[:4]


def drawn(sampler: Sampler, logits: Tensor, n: int = 300) -> list[int]:
    return [sampler(logits) for _ in range(n)]


def test_the_sampler_obeys_temperature_top_k_top_p_and_seed() -> None:
    logits = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()
    before = torch.random.get_rng_state()
    everything = drawn(Sampler(1.0), logits, 3000)
    assert (torch.tensor(everything).bincount(minlength=4) / 3000 - logits.exp()).abs().max() < 0.04
    assert torch.random.get_rng_state().equal(before)
    assert [everything[:300], drawn(Sampler(1.0), logits.bfloat16(), 2000)] == [
        *(drawn(Sampler(1.0), logits), drawn(Sampler(1.0), logits.bfloat16().float(), 2000))
    ], "in float32"
    assert everything[:300] != drawn(Sampler(1.0, seed=1), logits)
    for sampler, possible in (
        (Sampler(0), {0}),
        (Sampler(1.0, top_k=2), {0, 2}),
        (Sampler(1.0, top_k=5), {0, 1, 2, 3}),
        (Sampler(1.0, top_p=0.7), {0, 2}),
        (Sampler(1.0, top_p=0.8), {0, 2, 3}),
        (Sampler(1.0, top_p=1e-6), {0}),
    ):
        assert set(drawn(sampler, logits)) == possible
    hot, cold = (drawn(Sampler(t), logits).count(0) for t in (5.0, 0.5))
    assert hot < 0.4 * 300 < 0.6 * 300 < cold
    assert set(drawn(Sampler(1e-40, top_k=3, top_p=0.9), torch.tensor([-3.0, 7.0, 2.0, 6.9]), 20)) == {1}


def test_what_is_printed_and_every_option_has_its_effect(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = load_model.open_model(finished, torch.device("cpu"), torch.float32)
    encode, decode = opened.tokenizer.encode, opened.tokenizer.decode
    ids = encode("def ").ids

    def printed(*options: str) -> tuple[str, str]:
        assert generate.main([str(finished), "--prompt=def ", *options]) == 0
        return capsys.readouterr()

    for options, most, sampler in (
        ([], 200, Sampler(0.8)),
        (["--max-tokens=9", "--temperature=3", "--seed=5"], 9, Sampler(3.0, seed=5)),
        (["--max-tokens=9", "--temperature=3", "--top-k=2"], 9, Sampler(3.0, top_k=2)),
        (["--max-tokens=9", "--temperature=3", "--top-p=0.1"], 9, Sampler(3.0, top_p=0.1)),
    ):
        tokens = list(new_tokens(opened.model, ids, most, sampler, opened.ends))
        assert printed(*options) == (f"{decode([*ids, *tokens])}\n", f"{opened.source}\n"), options
    some = generate.Options(9, temperature=3.0, top_p=0.1)
    up_to = tokens[: tokens.index(tokens[4])]
    assert some.sampler is some.sampler, "one for a conversation, which goes on with its random numbers"
    ended = generate.tokens_of(replace(opened, ends=(517, tokens[4])), ids, some)
    assert list(ended) == up_to, "each end token ends it"
    assert opened.source == f"{checkpoint(finished, 4)} (gpt, 59,744 parameters)"
    assert (generate.encode(opened, ""), len(generate.encode(opened, "x" * 36))) == ([0], 36)


def test_the_text_is_streamed_in_whole_characters(finished: Path) -> None:
    """Of valid text, of random tokens, which seldom are, and of a tokenizer whose first word loses its space."""
    of_bytes = Tokenizer.from_file(str(finished / "tokenizer.json"))
    of_words = Tokenizer(models.Unigram([("\u2581the", 0.0), ("\u2581a", 0.0), ("b", 0.0)], None, False))
    of_words.decoder = decoders.Metaspace()
    drawn = torch.randint(517, (40, 60), generator=torch.Generator().manual_seed(3)).tolist()
    whole = of_bytes.encode("\u00e9\u4e2d \U0001f600b" * 9).ids
    for tokenizer, before, ids in (
        *((of_bytes, of_bytes.encode("n\u4e2d").ids, some) for some in (whole, *drawn)),
        (of_words, [0], [1, 0, 2, 1]),
    ):
        pieces = list(generation.pieces(tokenizer, before, ids))
        assert "".join(pieces) == tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
        assert len(pieces) > 3


@pytest.mark.extended
def test_every_kind_of_folder_gives_the_same_text(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"model__family": "llama", "model__n_kv_heads": 1, "model__hidden_dim": 48, "model__qk_norm": True}
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="run", checkpoint__state_dict="sharded", **more)))
    run = tmp_path / "run"

    def text_of(*arguments: str | Path) -> str:
        assert generate.main([*map(str, arguments), "--prompt=def ", "--temperature=1", "--device=cpu"]) == 0
        return capsys.readouterr().out

    newest = text_of(run)
    assert len(newest) > 20
    assert text_of(checkpoint(run, 20)) == newest
    copy = shutil.copytree(checkpoint(run, 20), tmp_path / "copy")
    assert text_of(copy, f"--tokenizer={run / 'tokenizer.json'}") == newest
    weights.export(run, tmp_path / "export")
    assert text_of(tmp_path / "export") == newest
    assert text_of(checkpoint(run, 10)) != newest
    assert newest.startswith(text_of(run, "--max-tokens=3").removesuffix("\n"))
    assert text_of(run, "--dtype=bfloat16").startswith("def ")


def test_a_conversation_ends_at_an_empty_line(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b"def \nclass \n\nthe\n"
    said = io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", newline="\n")  # as Python's stdin
    monkeypatch.setattr("sys.stdin", said)
    assert generate.main([str(finished), "--interactive", "--max-tokens=5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def ")
    assert "class " in out
    assert said.read() == "the\n", "not asked for"
    monkeypatch.setattr("sys.stdin", io.StringIO("the"))
    assert generate.main([str(finished), "--interactive", "--max-tokens=2"]) == 0, "at the end of the input, too"
