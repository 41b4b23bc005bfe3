"""The CUDA allocator's settings, which torch reads from the environment once, when CUDA is first used."""

from tests.helpers import python, succeeded

GIVEN = {
    "": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF=max_split_size_mb:64": "max_split_size_mb:64",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False": "expandable_segments:False",
}


def test_segments_of_cuda_memory_can_grow_unless_the_user_says_otherwise() -> None:
    found = succeeded(python(*GIVEN, script="tests/distributed/allocator_worker.py")).splitlines()
    assert found == [f"{given}: {settings}" for given, settings in GIVEN.items()]
