"""What a run prints and records: every line of a log against its records, and every option in the lines of a start."""

import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.helpers import checkpoint, ranks, records, run_python, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.run import attempts

LOSS = [
    *("step", "loss", "mean_loss", "grad_norm", "lr", "tokens", "tokens_per_second", "peak_memory_gib", "seconds"),
    *("data_s", "optimizer_s", "rank_losses", "attempt", "time"),
]
SAVE = ["step", "save_s", "bytes", "attempt", "time"]
EVAL = [
    *("step", "val_loss", "val_loss_stderr", "val_bits_per_byte", "val_bits_per_byte_stderr", "unigram_bits_per_byte"),
    *("eval_samples", "eval_s", "attempt", "time"),
]


def test_the_log_and_the_records_of_a_run(finished: Path, sharded: Path, text: Path) -> None:
    for run, world in ((finished, 1), (sharded, 2)):
        found, (made,) = records(run), attempts.read(run)
        n_held_out = int(re.findall(r"([\d,]+) held out", (run / "train.log").read_text())[0].replace(",", ""))
        assert [list(record) for record in found] == [LOSS, LOSS, SAVE, LOSS, LOSS, EVAL, SAVE]
        assert [record["step"] for record in found] == [1, 2, 2, 3, 4, 4, 4]
        lines = []
        for r in found:
            if "loss" in r:
                assert r["tokens"] == 192 * r["step"]
                assert r["tokens_per_second"] == pytest.approx(192 / r["seconds"])
                assert r["lr"] == pytest.approx([2e-3, 4e-3, 2.2e-3, 4e-4][r["step"] - 1])
                assert r["loss"] == pytest.approx(sum(r["rank_losses"]) / 192)
                assert len(r["rank_losses"]) == world
                assert 0 < r["optimizer_s"] < r["seconds"] - r["data_s"]
                assert 0.05 < r["peak_memory_gib"] < 5
                lines.append(
                    f"step    {r['step']}/4  loss {r['mean_loss']:.4f}  grad_norm {r['grad_norm']:.2f}  "
                    f"lr {r['lr']:.2e}  tok/s {r['tokens_per_second']:,.0f}  mem {r['peak_memory_gib']:.2f} GiB  "
                    f"data {100 * r['data_s'] / r['seconds']:.0f} %  eta N"
                )
            elif "save_s" in r:
                manifest = storage.read_manifest(checkpoint(run, r["step"]))
                assert r["bytes"] == manifest.bytes - manifest.files["state.json"].bytes
                folder = checkpoint(run, r["step"])
                lines.append(f"saved   {folder}  ({r['bytes'] / 2**20:.1f} MiB, {r['save_s']:.1f} s)")
            else:
                val, each = (f"{r[key]:.{n}f} +- {r[f'{key}_stderr']:.{n}f}" for key, n in ((EVAL[1], 4), (EVAL[3], 3)))
                above = r["val_bits_per_byte"] / r["unigram_bits_per_byte"] - 1
                lines.append(
                    f"eval    step 4  loss {val} (best so far)  bits/byte {each}  ({100 * above:.0f} % above unigram "
                    f"{r['unigram_bits_per_byte']:.3f}; 5 of {n_held_out // 32} sequences, {r['eval_s']:.1f} s)"
                )
        log = re.sub(r"eta \S+ \(.*?\)", "eta N", (run / "train.log").read_text())
        done = log.splitlines()[-3]
        assert log.splitlines()[6:-3] == lines
        done_in = rf"done    4 steps in \S+, goodput \d+% of \S+ since the first launch; the run is in {run}"
        assert re.fullmatch(done_in, done)
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
