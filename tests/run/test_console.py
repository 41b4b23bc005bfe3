"""What a run prints and records: every line of a log against its records, and every option in the lines of a start."""

import json
import os
import re
import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import checkpoint, ranks, records, run_python, succeeded, tiny
from torchtitan_lite import __version__
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import load
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.run import attempts, console
from torchtitan_lite.tools import checkpoints

LOSS = [
    *("step", "loss", "mean_loss", "grad_norm", "lr", "tokens", "tokens_per_second", "peak_memory_gib", "seconds"),
    *("data_s", "optimizer_s", "rank_losses", "attempt", "time"),
]
SAVE = ["step", "save_s", "bytes", "attempt", "time"]
EVAL = [
    *("step", "val_loss", "val_loss_stderr", "val_bits_per_byte", "val_bits_per_byte_stderr", "unigram_bits_per_byte"),
    *("eval_samples", "eval_s", "attempt", "time"),
]
START = """torchtitan_lite {version}  torch {torch}  cpu  world {world} = dp_replicate 1 x dp_shard {world}  1 thread \
per rank (run.threads)
model   gpt dim 32, 2 layers, 2 heads of 16, feed-forward 128{model}; computes in float32
batch   2 sequences x {batch}, of 32 tokens = 192 tokens per step
data    {text}: N tokens to train on, 0.01 epochs in 4 steps; {held_out} held out; vocabulary 517
fsdp    reshard_after_forward default; reduces in float32
run     {run}  new; the same command resumes it
"""
OF_ONE = {"model": ": 59,744 parameters, 59,744 on rank 0", "batch": "1 rank x 3 accumulation steps"}
OF_TWO = {
    "model": ", tie_embeddings: 43,200 parameters, 21,632 on rank 0",
    "batch": "2 ranks x 2 accumulation steps, including 2 padding sequences (none with train.micro_batch_size = 1)",
}


def test_the_log_and_the_records_of_a_run(finished: Path, sharded: Path, text: Path) -> None:
    for run, world, sizes in ((finished, 1, OF_ONE), (sharded, 2, OF_TWO)):
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
        given = {"version": __version__, "torch": torch.__version__, "world": world, "text": text, "run": run}
        given["held_out"] = f"{n_held_out:,}"
        log = re.sub(r"eta \S+ \(.*?\)", "eta N", (run / "train.log").read_text())
        log = re.sub(r"[\d,]+ tokens to train", "N tokens to train", log)
        start, done = log[: log.index("step ")], log.splitlines()[-3]
        assert start == START.format(**given, **sizes)
        assert log.splitlines()[6:-3] == lines
        done_in = rf"done    4 steps in \S+, goodput \d+% of \S+ since the first launch; the run is in {run}"
        assert re.fullmatch(done_in, done)
        about = json.loads((run / "run.json").read_text())
        assert list(about) == ["format_version", "attempt", "status", "step", "reason", "repeats", "time", "goodput"]
        assert list(about.values())[:6] == [2, 1, "complete", 4, "", False]
        assert made.time < found[0]["time"] - found[0]["seconds"] < found[-1]["time"] <= made.end_time <= about["time"]
        assert (made.attempt, made.step, made.samples, made.forked_from) == (1, 0, 0, "")
        assert (made.world_size, made.setting["world_size"], made.config["train.steps"]) == (world, world, 4)
        assert (made.hosts, made.versions["torch"]) == ([os.uname().nodename], torch.__version__)
        assert (made.device[:3], made.ended, made.last_step, made.reason) == ("cpu", "complete", 4, "")
        assert "--run.name=run" in made.command
        assert {record["attempt"] for record in found} == {1}
        state = storage.read_state(checkpoint(run, 2))
        assert (state.step, state.tokens, state.samples_consumed) == (2, 384, 12)
        assert (state.loss_since, state.end_token) == ([0.0, 0.0], 0)
        assert state.validation == {"samples": 5, "of": n_held_out // 32, "seed": 0}
        manifest = storage.read_manifest(checkpoint(run, 2))
        assert (manifest.step, manifest.world_size) == (2, world)
        assert manifest.state_dict == ("full" if run == finished else "sharded")


STEP: dict[str, Any] = {"step": 7, "loss": 2.5, "mean_loss": 2.25, "grad_norm": 1.5, "lr": 0.00125}
STEP |= {"tokens_per_second": 12345.6, "peak_memory_gib": 1.25}
PLAIN = "  lr 1.25e-03  tok/s 12,346  mem 1.25 GiB  data 25 %  eta "


def test_a_step_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it loses on a narrow terminal: the least important fields first."""
    now = time.mktime((2026, 3, 5, 20, 30, 0, 0, 0, -1))
    plain = time.localtime
    monkeypatch.setattr("time.localtime", lambda when=None: plain(now if when is None else when))
    monkeypatch.setattr("time.time", lambda: now)
    line = console.step_line(STEP, 400, 0.25, 252.0)
    assert line == f"step      7/400  loss 2.2500  grad_norm 1.50{PLAIN}4m12s (20:34)"
    later = console.step_line(STEP | {"loss": None, "grad_norm": None}, 9, 0.25, 4 * 3600)
    assert later == f"step    7/9  loss not finite  grad_norm not finite, skipped{PLAIN}4h00m (Fri 06 Mar 00:30)"
    more = {"loss_scale": 65536.0, "skipped_steps": 3, "load_min": 0.5, "load_max": 1.75, "mfu": 0.4126}
    full = console.step_line(STEP | more, 9, 0.25, 252.0)
    assert full == (
        "step    7/9  loss 2.2500  grad_norm 1.50  scale 65536, 3 skipped  loads 0.50-1.75  lr 1.25e-03  "
        "tok/s 12,346  mfu 41.3 %  mem 1.25 GiB  data 25 %  eta 4m12s (20:34)"
    )
    order = ("mem 1.25 GiB", "lr 1.25e-03", "data 25 %", "scale 65536, 3 skipped", "loads 0.50-1.75", "mfu 41.3 %")
    for field in (*order, "grad_norm 1.50", "eta 4m12s (20:34)"):
        assert console.fitted(full, len(full)) == full
        assert console.fitted(full, len(full) - 1) == (full := full.replace(f"  {field}", ""))
    assert full == "step    7/9  loss 2.2500  tok/s 12,346"
    assert [console.cut("0123456789", n) for n in (10, 9)] == ["0123456789", "012345..."]


def config_of(values: dict[str, Any], world_size: int = 8, n_gpus: int = 8) -> Config:
    return load.load(None, values, world_size=world_size, n_gpus=n_gpus, elsewhere=True).config


FSDP = "reshard_after_forward default; reduces in float32"
MANY: dict[str, Any] = {
    **{"fsdp.reshard_after_forward": False, "fsdp.reduce_dtype": "bfloat16", "fsdp.blocks_per_group": 2},
    **{"fsdp.explicit_prefetching": True, "fsdp.forward_prefetch": 2, "fsdp.backward_prefetch": 3},
    **{"fsdp.reshard_after_backward": False, "fsdp.output_dtype": "bfloat16", "fsdp.cast_forward_inputs": True},
    **{"fsdp.grad_sync": "last", "fsdp.shard_columns": ["*.wk.weight", "*.wq.weight"]},
    "fsdp.precision_overrides": [{"match": m, "param_dtype": "float32"} for m in ("norm*", "layers.0.*")],
    **{"fsdp.separate_reduce_scatter_group": True, "fsdp.reduce_scatter_buffers": 2, "optim.freeze": ["a*", "b*"]},
    **{"activation_checkpointing.mode": "selective", "activation_checkpointing.every": 3},
    **{"compile.enabled": True, "compile.backend": "eager"},
}
OTHER: dict[str, Any] = {
    **{"fsdp.reshard_after_forward": 2, "fsdp.explicit_prefetching": True, "fsdp.cpu_offload": True},
    **{"optim.name": "adamw", "activation_checkpointing.mode": "full", "fsdp.forward_prefetch": 1},
}


@pytest.mark.parametrize(("values", "expected"), [
    ({}, FSDP),
    (MANY, "reshard_after_forward false; reduces in bfloat16; groups of 2 blocks; prefetches 2 groups in forward, 3 in "
     "backward; stays gathered between micro-batches; outputs bfloat16; casts all inputs; grad_sync last; precision "
     "overrides for norm*, layers.0.*; sharded by columns: *.wk.weight, *.wq.weight; reduce-scatter in its own process "
     "group; 2 reduce-scatter buffers; selective activation checkpointing of 1 block in 3; blocks compiled by eager; "
     "frozen: a*, b*"),
    (OTHER, "reshard_after_forward 2; reduces in float32; prefetches 1 group in forward, 2 in backward; offloaded to "
     "the host; full activation checkpointing of every block"),
    (OTHER | {"fsdp.pin_memory": False}, "reshard_after_forward 2; reduces in float32; prefetches 1 group in forward, "
     "2 in backward; offloaded to the host, not pinned; full activation checkpointing of every block"),
    ({"speed.float8": True, "fsdp.param_dtype": "bfloat16"}, f"{FSDP}; block matmuls in float8 (emulated on a CPU)"),
])  # fmt: skip
def test_the_active_options_of_fsdp(values: dict[str, Any], expected: str) -> None:
    assert console.fsdp_line(config_of(values)) == expected


T5 = {"model.family": "t5", "data.objective": "span_corruption", "data.path": "x"}
SHAPE = ["dim 128, ", "2 heads of 64, feed-forward 384", "4 heads of 32, 2 for keys and values, feed-forward "]
QWEN3 = "qk_norm, induction_head"


def test_the_sizes_and_the_next_commands_of_other_runs() -> None:
    values: dict[str, Any]
    for values, expected in (
        ({"model.tie_embeddings": True}, f"llama {SHAPE[0]}2 layers, {SHAPE[1]}, tie_embeddings, {QWEN3}"),
        (
            {"model.layer_pattern": ["window", "full"], "model.window": 64, "model.n_layers": 1},
            f"llama {SHAPE[0]}1 layer, {SHAPE[1]}, layers window/full with window 64, {QWEN3}",
        ),
        (
            {"model.family": "qwen3_moe"},
            f"qwen3_moe {SHAPE[0]}4 layers, {SHAPE[2]}192, 2 of 8 experts, norm_topk_prob",
        ),
        (T5, f"t5 {SHAPE[0]}2 + 2 layers, 4 heads of 32, feed-forward 256, gated"),
        (
            {"model.family": "olmo_hybrid"},
            f"olmo_hybrid {SHAPE[0]}4 layers, {SHAPE[2]}384, layers delta/delta/delta/full",
        ),
    ):
        said = {"model.family": "llama"} | values
        assert (
            console.model_line(config_of(said), "9 parameters")
            == f"model   {expected}: 9 parameters; computes in float32"
        )
        in_tf32 = console.model_line(config_of(said | {"run.tf32": True}), "9", widened=True)
        assert in_tf32.endswith(": 9; computes in float32, its matmuls in TF32 on a GPU that has it")
    narrow = console.model_line(config_of({"fsdp.param_dtype": "bfloat16"}), "9", widened=True)
    assert narrow.endswith("; computes in bfloat16, its matmuls in float32: this CPU has no 16-bit matmul instructions")
    pairs = {"data.objective": "pairs", "data.target_len": 7, "data.source_key": "a", "data.target_key": "b"}
    for values, n, expected in (
        (
            {"train.global_batch_size": 24, "train.micro_batch_size": 5},
            8,
            "5 sequences x 8 ranks x 1 accumulation step, including 16 padding sequences (none with "
            "train.micro_batch_size = 3), of 256 tokens = 6,144 tokens per step",
        ),
        (
            {"train.global_batch_size": 9, "train.micro_batch_size": 5},
            2,
            "5 sequences x 2 ranks x 1 accumulation step, including 1 padding sequence, of 256 tokens = 2,304 tokens "
            "per step",
        ),
        (
            {"train.batch_schedule": [[0, 8], [4, 16]]},
            2,
            "4 sequences x 2 ranks x 2 accumulation steps, of 256 tokens = 4,096 tokens per step; in the last steps "
            "(see train.batch_schedule for the others)",
        ),
        (
            {"train.batch_schedule": [[0, 12], [4, 20]], "train.micro_batch_size": 8},
            1,
            "8 sequences x 1 rank x 3 accumulation steps, including 4 padding sequences (none with "
            "train.micro_batch_size = 5), of 256 tokens = 5,120 tokens per step; in the last steps (see "
            "train.batch_schedule for the others)",
        ),
        (
            {"data.path": "x", **pairs},
            2,
            "4 sequences x 2 ranks x 1 accumulation step, of at most 263 tokens and 263 targets",
        ),
    ):
        config = config_of(values, n)
        assert console.batch_line(config, derive(config, n), n) == f"batch   {expected}"
    for values, folder, words in (
        ({}, "runs/default", "--prompt 'def '"),
        ({"data.path": "x", "run.name": "a b"}, "'runs/a b'", "--interactive"),
        ({"sample.prompts": ["", "it's", "b"]}, "runs/default", "--prompt 'it'\"'\"'s'"),
        (T5 | {"sample.prompts": ["q"]}, "runs/default", "--source q"),
    ):
        prompt, report = console.what_next(config_of(values)).splitlines()[1:]
        assert prompt.startswith("next    prompt it:       ")
        assert prompt.endswith(f" -m torchtitan_lite.generate {folder} {words}")
        assert re.fullmatch(rf"        plot its curves: \S+ -m torchtitan_lite.report {folder}", report)


def test_what_a_run_reads_of_each_source() -> None:
    """Two of three samples are of the first. Those of a skipped range, and what of it comes later, are not seen."""
    sources = [SimpleNamespace(mean_tokens=m, n_samples=n, notes=[]) for m, n in ((32, 40), (31.5, 2))]
    samples: Any = SimpleNamespace(names="ab", sources=sources, consumed=lambda n: [n - n // 3, n // 3])
    assert console.seen_of_sources(samples, 60) == {
        "a": {"tokens": 1280, "epochs": 1.0},
        "b": {"tokens": 630, "epochs": 10.0},
    }
    seen = console.seen_of_sources(samples, 60, [[3, 9], [57, 90], [90, 99]])
    assert seen == {"a": {"tokens": 32 * 34, "epochs": 0.85}, "b": {"tokens": 536, "epochs": 8.5}}
    state = TrainState(samples_consumed=60)
    assert console.source_lines(samples, state, [[3, 9]])[1] == "data    b: 567 tokens seen, 9.00 epochs"
    data: Any = SimpleNamespace(notes=["a note"], vocab_size=517, tokens={"train": 9000, "val": 1234}.__getitem__)
    data.sources = [
        SimpleNamespace(name=n, weight=w, meta=SimpleNamespace(train_tokens=t))
        for n, w, t in (("a", 3, 8000), ("b", 1, 1000))
    ]
    more = {"train.steps": 11, "train.global_batch_size": 6, "data.document_mask": True, "data.packing": "best_fit"}
    assert console.data_lines(config_of(more, 1), data, samples) == [
        "data    9,000 tokens to train on, in 2 sources; 1,234 held out; vocabulary 517; documents packed whole; "
        "attention within documents",
        "data     75.0 % a: 8,000 tokens, 1.10 epochs in 11 steps",
        "data     25.0 % b: 1,000 tokens, 11.00 epochs in 11 steps",
        "data    a note",
        "data    the run reads b 11 times: after about four times, the same text teaches little (arXiv:2305.16264); "
        "more text or fewer steps is better",
    ]


def test_the_start_on_a_gpu_and_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(console, "BUSY_AT_START", True)
    monkeypatch.setattr(console, "data_lines", lambda *_: [])
    config = config_of({"model.init_from": "w", "eval.every": 0, "run.threads": 2, "fsdp.param_dtype": "float16"}, 1)
    state = TrainState(bitwise_setting={"widen_matmuls": False, "deterministic": False})
    saver: Any = SimpleNamespace(forked_from=None, damaged=[9, 8])

    def lines(device: str, saved: TrainState | None) -> list[str]:
        process = Process(0, 1, torch.device(device), 2)
        model: Any = SimpleNamespace(parameters=list)
        start = console.start_lines(config, derive(config, 1), process, model, model, model, state, saved, saver)
        return start.splitlines()[4:]

    assert lines("cpu", None) == [
        "run     runs/default  new; the same command resumes it",
        "run     other processes use this machine, so threads spin only briefly (GOMP_SPINCOUNT=1000). That is 20 % "
        "slower on idle cores: if the machine becomes idle, restart the run",
        "run     a resume on a GPU is bitwise identical only with run.deterministic = true",
        "run     starts from the weights of w",
    ]
    origin, copies, *found = lines("cuda", TrainState(step=7))
    assert origin.endswith("  resumed after step 7; newer checkpoints are damaged, and their steps are repeated: 8, 9")
    assert copies.startswith("fsdp    nothing is sharded: ")
    assert found == [
        "run     MFU is not logged: the peak of Some GPU is not known; run.peak_tflops = its dense TFLOP/s gives it",
        "run     a resume on a GPU is bitwise identical only with run.deterministic = true",
    ]


def test_the_closing_block_is_commands_that_work(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny(text, tmp_path, run__name="mine", train__steps=2, optim__warmup_steps=1, run__threads=0)
    output = succeeded(ranks(1, *options))
    *_, prompt, report = output.rstrip().splitlines()
    assert prompt.endswith(f" -m torchtitan_lite.generate {tmp_path / 'mine'} --interactive")
    words = shlex.split(report.partition("plot its curves:")[2])  # as a shell reads it
    assert str(tmp_path / "mine") in succeeded(run_python(words[1:]))
    # one is singular
    assert checkpoints.main(["inspect", str(tmp_path / "mine")]) == 0
    assert "saved by 1 rank;" in capsys.readouterr().out
    assert "1 thread per rank (OMP_NUM_THREADS)" in output
    assert " x 1 rank x " in output
    assert not re.findall(
        r"(?<![\d,.])1 (?:ranks|threads|files|steps|groups|layers|heads|documents|sequences)\b", output
    )
