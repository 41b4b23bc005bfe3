"""A step on a GPU that does not exist: its waits, its attention, its bytes (tests/fake_cuda)."""

import json
import os
import sys
from typing import Any

import pytest

from tests.fake_cuda import library
from tests.fake_cuda.cases import TABLE
from tests.helpers import start, succeeded

# .ci/run installs g++: there nothing may be skipped for its lack
pytestmark = pytest.mark.skipif(
    bool(library.unavailable()) and not ("TORCHTITAN_LITE_CI" in os.environ and "g++" in library.unavailable()),
    reason=library.unavailable(),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("fake_cuda") / "found.json"
    succeeded(start([sys.executable, "-m", "tests.fake_cuda", "tests.fake_cuda.cases", str(file)]))
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", TABLE)
def test_the_host_waits_only_for_the_step_before(name: str, found: Any) -> None:
    """Two small copies of the step before are read: the guard's and the preemption's."""
    step = found["steps"][name]
    assert step["operators"] > 300
    expected = "waits for an event of the step before"
    assert [waits for _, _, waits in step["waits"]] == [expected], step["waits"]
    # of inputs, two blocks and head, forward and backward; tied inputs and head (gpt's too) around the blocks only
    assert step["spans"] == (5 if "tied" in name or "gpt" in name else 8) * (2 if "accumulation" in name else 1)


def kernels(step: dict[str, Any]) -> list[str]:
    """The attention kernels of a step."""
    return [name.removeprefix("aten._scaled_dot_product_").removesuffix(".default") for name in step["attention"]]


def test_selective_checkpointing_keeps_attention_within_documents(found: Any) -> None:
    step = kernels(found["steps"]["document mask, selective checkpointing, HSDP, muon"])
    forward, backward = (f"compiled flex_attention {way}" for way in ("forward", "backward"))
    assert step == [forward, forward, backward, backward]  # of two blocks: none is recomputed
    full = kernels(found["steps"]["hybrid, HSDP, full checkpointing, explicit prefetching"])
    assert full.count("cudnn_attention") == 2, "full checkpointing recomputes it, in the one layer that has it"


def test_a_window_is_computed_by_flex_attention_in_its_layers_only(found: Any) -> None:
    step = kernels(found["steps"]["world of one, float16, tied, logits of all tokens, muon, window"])
    flex = [f"compiled flex_attention {way}" for way in ("forward", "backward")]
    assert step == [flex[0], "cudnn_attention", "cudnn_attention_backward", flex[1]]


def test_muon_multiplies_the_matrices_of_a_shape_together(found: Any) -> None:
    """Of 14 matrices of four shapes in all; of 8 owners, rank 0 has one of the largest."""
    for name, shapes in (
        ("world of one, float16, tied, logits of all tokens, muon, window", 4),
        ("document mask, selective checkpointing, HSDP, muon", 1),
    ):
        assert len(found["steps"][name]["muon"]) == shapes * 5 * 3


def test_a_document_mask_is_never_a_matrix_of_tokens_by_tokens(found: Any) -> None:
    for length, (largest, waits) in found["mask"].items():
        assert largest < int(length) ** 2 / 500
        assert not waits


@pytest.mark.parametrize(
    ("case", "kernel", "copied"),
    [
        ("bfloat16, 256, 2", "cudnn", 0),
        ("float16, 256, 2", "cudnn", 0),
        ("bfloat16, 256, 8", "cudnn", 0),
        ("bfloat16, 100, 2", "flash", 0),  # cuDNN only for multiples of 128 tokens
        ("float32, 256, 2", "efficient", 2 * 2 * 8 * 256 * 64 * 4),  # which takes no shared heads
        ("bfloat16, 1, 2, cached", "flash", 0),  # one query needs no mask
        ("bfloat16, 2, 2, cached", "efficient", 2 * 2 * 8 * 257 * 64 * 2),  # a mask: fewer queries than keys
    ],
)
def test_shared_heads_are_copied_only_where_no_kernel_takes_them(
    case: str, kernel: str, copied: int, found: Any
) -> None:
    names, n_bytes = found["attention"][case]
    assert names == [f"aten._scaled_dot_product_{kernel}_attention.default"]
    assert n_bytes == copied


def test_a_save_locks_no_more_memory_than_its_shard_and_loses_no_byte_of_it(found: Any) -> None:
    """torch's own pinned memory would round each tensor up to a power of two."""
    save = found["save"]
    assert save["bytes"] <= save["asked"] <= 1.03 * save["bytes"]
    assert save["left"] == [4096], "the block of other shapes is freed"
    assert save["same"]
    assert save["kernels after an error"] == 1, "CUDA returns the error again to the next kernel, which is training's"
