"""What a run records, and the commands that it prints at its end."""

import os
import shlex
from pathlib import Path

import pytest
import torch

from tests.helpers import checkpoint, ranks, records, run_python, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.run import attempts


def test_the_log_and_the_records_of_a_run(finished: Path, sharded: Path, text: Path) -> None:
    for run, world in ((finished, 1), (sharded, 2)):
        found, (made,) = records(run), attempts.read(run)
        log = (run / "train.log").read_text()
        for r in found:
            if "loss" in r:
                assert r["tokens"] == 192 * r["step"]
                assert r["tokens_per_second"] == pytest.approx(192 / r["seconds"])
                assert r["lr"] == pytest.approx([2e-3, 4e-3, 2.2e-3, 4e-4][r["step"] - 1])
                assert r["loss"] == pytest.approx(sum(r["rank_losses"]) / 192)
                assert len(r["rank_losses"]) == world
                assert 0 < r["optimizer_s"] < r["seconds"] - r["data_s"]
                assert 0.05 < r["peak_memory_gib"] < 5
                rate = f"tok/s {r['tokens_per_second']:,.0f}  mem {r['peak_memory_gib']:.2f} GiB"
                assert f"{rate}  data {100 * r['data_s'] / r['seconds']:.0f} %  eta " in log
            elif "save_s" in r:
                manifest = storage.read_manifest(checkpoint(run, r["step"]))
                assert r["bytes"] == manifest.bytes - manifest.files["state.json"].bytes
                size = f"({r['bytes'] / 2**20:.1f} MiB, {r['save_s']:.1f} s)"
                assert f"saved   {checkpoint(run, r['step'])}  {size}\n" in log
        assert f", {attempts.goodput_line(run)}; the run is in {run}\n" in log
        assert log.count("\ndone  ") == 1, "not one of each rank"
        ends = made.end_time, attempts.newest_status(run)["time"]
        assert made.time < found[0]["time"] - found[0]["seconds"] < found[-1]["time"] <= ends[0] <= ends[1]
        assert (made.hosts, made.versions["torch"], made.device[:3]) == (
            [os.uname().nodename],
            torch.__version__,
            "cpu",
        )
        assert "--run.name=run" in made.command


def test_the_closing_block_is_commands_that_work(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny(text, tmp_path, run__name="mine", train__steps=2, optim__warmup_steps=1, run__threads=0)
    output = succeeded(ranks(1, *options))
    *_, prompt, report = output.rstrip().splitlines()
    assert prompt.endswith(f" -m torchtitan_lite.generate {tmp_path / 'mine'} --interactive")
    words = shlex.split(report.partition("plot its curves:")[2])  # as a shell reads it
    assert str(tmp_path / "mine") in succeeded(run_python(words[1:]))
