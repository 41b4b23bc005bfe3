"""What a soak says about failures that it did not see."""

import json
import random
import sys
from pathlib import Path

import pytest

from tests.faults import figures
from tests.faults.figures import none_of, stamp


def test_none_of_so_many_tries_names_the_rate_that_one_soak_in_twenty_would_miss() -> None:
    assert none_of(200, "kills") == "0 of 200 kills (below 1.49 % at 95 %)"
    rng, rate = random.Random(1), 0.0149
    missed = sum(all(rng.random() >= rate for _ in range(200)) for _ in range(4000)) / 4000
    assert 0.04 < missed < 0.06
    assert none_of(0, "kills") == "0 of 0 kills (below 100 % at 95 %)"


def test_a_stamp_names_seed_and_commit() -> None:
    assert stamp(7).startswith("seed 7, commit ")


def test_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [{"seconds": 12.0, "repeated": 0, "graceful": True}, {"seconds": 30.0, "repeated": 3, "graceful": False}]
    piece = {"stamp": "seed 1", "nnodes": "1:2", "events": 100, "kinds": {"killed": 40, "left": 60}, "samples": 600}
    piece |= {"problems": [], "recoveries": found, "restarts": 1, "difference": 1e-6, "load": [1.0, 4.0]}
    file = tmp_path / "pieces"
    file.write_text(f"{json.dumps(piece)}\n{json.dumps(piece | {'nnodes': '1:3'})}\n")
    monkeypatch.setattr(sys, "argv", ["figures", str(file)])
    figures.main()
    *_, total, bound = capsys.readouterr().out.splitlines()
    assert total.startswith(
        "| all 2 | 1:2, 1:3 | 200 | 80 killed, 120 left | 1,200 | none | 21.0 s, 30.0 s of 4 | 0 of 2 |"
    )
    assert bound == "0 of 200 events lost or doubled a sample, or needed a person (below 1.49 % at 95 %)"
    file.write_text(json.dumps(piece | {"problems": ["step 3 saw [1]"]}))
    figures.main()
    assert capsys.readouterr().out.splitlines()[-1].count("step 3 saw [1]") == 1
