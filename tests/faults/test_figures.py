"""What a soak says about failures that it did not see."""

import random

from tests.faults.figures import none_of, stamp


def test_none_of_so_many_tries_names_the_rate_that_one_soak_in_twenty_would_miss() -> None:
    assert none_of(200, "kills") == "0 of 200 kills (below 1.49 % at 95 %)"
    rng, rate = random.Random(1), 0.0149
    missed = sum(all(rng.random() >= rate for _ in range(200)) for _ in range(4000)) / 4000
    assert 0.04 < missed < 0.06
    assert none_of(0, "kills") == "0 of 0 kills (below 100 % at 95 %)"


def test_a_stamp_names_seed_and_commit() -> None:
    assert stamp(7).startswith("seed 7, commit ")
