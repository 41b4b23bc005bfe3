"""Text, order and batches; what is prepared once."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data import packing, token_files
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.loader import Batch, Loader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.order import sample_indices
from torchtitan_lite.data.prepare.documents import documents, usable
from torchtitan_lite.data.prepare.summary import summary
from torchtitan_lite.data.prepare.texts import Corpus, find
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import TokenFiles, read_meta
from torchtitan_lite.models.loss import IGNORE


def make(path: str | list[str] | Path, cache: Path, vocab_size: int = 517, **more: object) -> Path:
    path = path if isinstance(path, list) else str(path)
    data = DataConfig.model_validate({"path": path, "cache_dir": str(cache)} | more)
    return prepare_all(data, TokenizerConfig(vocab_size=vocab_size), lambda text: None).folder


def stream_of(folder: Path, split: str) -> list[int]:
    """All tokens of a split."""
    meta = read_meta(folder)
    return list(map(int, TokenFiles(folder, meta, split).read(0, meta.tokens(split))))


def decoded(folder: Path, split: str) -> list[str]:
    """The documents of a split."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode(ids) for ids in token_files.documents(folder, read_meta(folder), split)]


def texts_of(corpus: Corpus) -> list[str]:
    """The texts of a corpus; of pairs, the sources."""
    return [document.texts[0] for document in usable(corpus)]


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(text, tmp_path_factory.mktemp("prepared"))


# --- order ------------------------------------------------------------------------------------------------------


def test_the_order_of_samples_never_changes() -> None:
    """These numbers must never change: a later version must resume a run with the same data."""
    some = np.array([0, 1, 2, 999, 1000, 10**15])
    assert sample_indices(some, 1000, seed=0).tolist() == [745, 495, 429, 330, 84, 80]
    assert [sample_indices(np.arange(2 * n), n, seed=7).tolist() for n in (2, 3)] == [[0, 1, 1, 0], [2, 1, 0, 2, 0, 1]]


# --- batches ----------------------------------------------------------------------------------------------------


def rows(batch: Batch) -> list[tuple[int, ...]]:
    """The sequences that count, in no order."""
    return [
        tuple(map(int, tokens))
        for micro in batch.micro_batches
        for tokens, targets in zip(micro.tokens, micro.targets, strict=True)
        if (targets != IGNORE).any()
    ]


def test_every_world_size_consumes_the_same_global_batch(prepared: Path) -> None:
    """Each layout of a global batch has the same samples, but for padding."""
    samples = Mixture([Samples(prepared, "train", 32)], [1.0], ["one"])
    whole = samples.draw(np.arange(7, 17), 3)
    for world_size, micro_batch_size in ((1, 10), (2, 3), (3, 2), (4, 1), (64, 5)):
        loader = partial(Loader, samples, micro_batch_size=micro_batch_size, world_size=world_size, seed=3)
        parts = [loader(rank=rank).batch(7, 10) for rank in range(world_size)]
        micros = [micro for one in zip(*(batch.micro_batches for batch in parts), strict=True) for micro in one]
        assert {len(micro.tokens) for micro in micros} == {micro_batch_size}
        assert {batch.global_tokens for batch in parts} == {(whole.targets != IGNORE).sum()}
        for got, drawn, padding in (
            ([row.tolist() for micro in micros for row in micro.tokens], whole.tokens, 0),
            ([row.tolist() for micro in micros for row in micro.targets], whole.targets, IGNORE),
        ):
            assert got == drawn.tolist() + [[padding] * 32] * (len(got) - 10)


# --- text -------------------------------------------------------------------------------------------------------


def test_blocks_of_a_file_are_its_text(tmp_path: Path) -> None:
    long = np.random.default_rng(5).choice([*"x\u00e9\u4e2d\U0001f600"], 400_000)  # blocks end anywhere in a character
    text = "\r\n".join(
        [*(f"line {i} häß\u4e2d\U0001f600" for i in range(20_000)), "".join(long), "", "end without newline"]
    )
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    found = find(str(tmp_path))
    blocks = texts_of(found)
    assert "".join(blocks) == text
    assert max(len(block.encode()) for block in blocks) <= 64 * 1024
    assert len(blocks) >= 16
    assert sum(len(block.encode()) > found.block - 4 for block in blocks) >= 5, "those of the long line are full"
    assert [*documents(found, count=(read := list[int]()).append)]
    assert sum(read) == len(text.encode()), "which a bar of progress shows"


# --- preparing --------------------------------------------------------------------------------------------------


def test_ranks_wait_for_the_one_that_prepares(text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data = DataConfig(path=str(text), cache_dir=str(tmp_path / "a"))
    tokenizer = TokenizerConfig(vocab_size=517)
    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(lambda _: prepare_all(data, tokenizer, said.append).folder, range(4)))
        assert len({*pool.map(lambda _: packing.pack(folder, read_meta(folder), 32), range(4))}) == 1
    assert said == [
        "data    preparing 3 files, once for all runs ...",
        f"data    {summary(read_meta(folder))}",
    ], "it was made more than once"


def test_a_given_tokenizer_cuts_pads_and_adds_nothing(prepared: Path, tmp_path: Path) -> None:
    """So one with what an export adds is no other one; data/test_recorded_data.py has its tokens."""
    given = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    given.enable_truncation(16)
    given.enable_padding(length=20)
    given.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    given.save(str(tmp_path / "given.json"))
    config = TokenizerConfig(path=str(tmp_path / "given.json"))
    assert prepare_all(DataConfig(path=str(prepared)), config, print).folder == prepared
