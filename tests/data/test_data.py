"""Text, tokens, order and batches; errors of unusable text."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.loader import Batch, Loader, MicroBatch, SampleSource
from torchtitan_lite.data.order import sample_indices
from torchtitan_lite.data.prepare.documents import usable
from torchtitan_lite.data.prepare.summary import summary
from torchtitan_lite.data.prepare.texts import Corpus, find, standard_library
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import TokenFiles, read_meta
from torchtitan_lite.errors import DataError
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
    text = tokenizer.decode(stream_of(folder, split), skip_special_tokens=False)
    assert text.startswith("<|endoftext|>")
    return text.split("<|endoftext|>")[1:-1]


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


def same_in_every_layout(samples: SampleSource) -> list[MicroBatch]:
    """Each layout of a global batch has the same samples, but for padding. Returns the micro-batches of all."""
    whole, found = samples.draw(np.arange(7, 17), 3), []
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
            wanted = drawn.tolist() + [[padding] * drawn.shape[1]] * (len(got) - 10)
            assert [row + [padding] * (drawn.shape[1] - len(row)) for row in got] == wanted
        found += micros
    return found


def test_every_world_size_consumes_the_same_global_batch(prepared: Path) -> None:
    assert {micro.tokens.shape[1] for micro in same_in_every_layout(Samples(prepared, "train", 32))} == {32}


# --- text -------------------------------------------------------------------------------------------------------


def test_blocks_of_a_file_are_its_text(tmp_path: Path) -> None:
    text = (
        "".join(f"line {i} häß\u4e2d\U0001f600\r\n" for i in range(20_000)) + "é" * 200_000 + "\n\nend without newline"
    )
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    found = find(str(tmp_path))
    blocks = texts_of(found)
    assert "".join(blocks) == text
    assert max(len(block.encode()) for block in blocks) <= 64 * 1024
    assert len(blocks) >= 16
    assert sum(len(block.encode()) > found.block - 4 for block in blocks) >= 5, "those of the long line are full"


def test_the_default_text_is_all_of_the_standard_library_but_its_tests() -> None:
    found = standard_library()
    assert len(found.files) > 300
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in found.files)
    assert sum(len(text.encode()) for text in texts_of(found)) == found.size, "some of it is not UTF-8"


# --- preparing --------------------------------------------------------------------------------------------------


def test_preparing_is_deterministic_and_ranks_wait_for_each_other(text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data = DataConfig(path=str(text), cache_dir=str(tmp_path / "a"))
    tokenizer = TokenizerConfig(vocab_size=517)
    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(lambda _: prepare_all(data, tokenizer, said.append).folder, range(4)))
    assert said == [
        "data    preparing your text: 3 files, once for all runs ...",
        f"data    {summary(read_meta(folder))}",
    ], "it was made more than once"
    again = make(text, tmp_path / "b")
    for name in ("meta.json", "tokenizer.json", "train.bin", "val.bin", "train.idx"):
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name


def test_neither_split_is_ever_empty(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"a short text, line {i}\n" for i in range(120)))
    meta = read_meta(make(tmp_path, tmp_path / "cache", 260, val_fraction=1e-9))
    assert meta.val_documents == 1
    assert meta.train_tokens > meta.val_tokens > 0
    with pytest.raises(
        DataError, match="has 0 usable documents to train and [0-9]+ to validate, and .* both; use more"
    ):
        make(tmp_path, tmp_path / "cache", 257, val_fraction=1 - 1e-15)


# --- text that can't be used ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b"tiny\n",
            r"^the text has 1 usable document; at least 2 are needed, to train and to validate \(plain text is cut "
            r"into documents of at most 1,024 bytes\)$",
        ),
        (
            b"too little to learn from\n" * 200,
            r"short for tokenizer.vocab_size \(--train-tokenizer\) = 517: it yields (\d+) entries; use more .* or \1$",
        ),
        (b"one line\n" * 30_000 + b"gr\xfc\n", r"a\.txt: line 30001: byte 0xfc is not utf-8; correct or rem"),
    ],
)
def test_text_that_can_not_be_used_is_an_error_and_leaves_nothing(
    content: bytes, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=expected):
        make(tmp_path, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_given_tokenizer_is_used(text: Path, prepared: Path, tmp_path: Path) -> None:
    data = DataConfig(path=str(text / "typing.txt"), cache_dir=str(tmp_path))
    config = TokenizerConfig(path=str(prepared / "tokenizer.json"))
    folder = prepare_all(data, config, lambda said: None).folder
    meta = read_meta(folder)
    assert meta.vocab_size == 517
    assert meta.tokenizer_sha256 == read_meta(prepared).tokenizer_sha256
    cutting = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    cutting.enable_truncation(16)
    cutting.enable_padding(length=20)
    cutting.save(str(tmp_path / "cutting.json"))
    same = prepare_all(data, TokenizerConfig(path=str(tmp_path / "cutting.json")), lambda said: None).folder
    assert same == folder, "a tokenizer cut or padded the text"
    cutting.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    cutting.save(str(tmp_path / "cutting.json"))
    given = DataConfig(path=str(folder)), TokenizerConfig(path=str(tmp_path / "cutting.json"))
    assert prepare_all(*given, print).folder == folder, "one with what an export adds is no other one"
    with pytest.raises(DataError, match=r"no entry <bye> to end a document with; its special .* are <\|endoftext\|>"):
        prepare_all(data, TokenizerConfig(path=config.path, end_token="<bye>"), lambda said: None)
