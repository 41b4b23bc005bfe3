"""What a save and a restart cost on this machine, part by part: `python -m benchmarks.restart [KILLS]`, by default 3.

A tiny model trains on two ranks. Under torchrun a rank is killed with SIGKILL, KILLS times. Under `tools.elastic` it is
killed once, because the wait doubles with each failure in a row. Then a machine is killed, and the other one continues
alone. Prints the seconds from the launch, and from the kill (median), to the end of the first step. `plan --mtbf` has
some of these parts as its defaults.

The ranks run this file in place of train.py, which writes down when they come to each part.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARKS = "TORCHTITAN_LITE_RESTART_MARKS"  # the file of marks, in the environment of the ranks
# what begins at each mark, in this order; the launcher before the first one
PARTS = "imports", "config and data", "rendezvous", "model and optimizer", "load", "first step"
LONGEST_S = 300.0
OPTIONS = {
    "model.dim": 128,
    "model.n_layers": 4,
    "model.n_heads": 4,
    "tokenizer.vocab_size": 512,
    "train.seq_len": 64,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 4,
    "train.steps": 1_000_000,
    "optim.schedule": "constant",
    "eval.every": 0,
    "sample.every": 0,
    "checkpoint.every": 20,
    "log.every": 10,
    "run.device": "cpu",
}


# --- in a rank -----------------------------------------------------------------------------------------------------


def rank_main() -> None:
    """train.py, with marks."""
    sys.path.insert(0, str(ROOT))
    from torchtitan_lite.monitoring.goodput import process_age_s

    marked: set[str] = set()

    def mark(part: str, when: float | None = None) -> None:
        if part not in marked:
            marked.add(part)
            values = {"pid": os.getpid(), "rank": int(os.environ.get("RANK", "0")), "time": when or time.time()}
            with Path(os.environ[MARKS]).open("a") as stream:
                stream.write(json.dumps(values | {"part": part}) + "\n")

    mark("imports", time.time() - process_age_s())
    import train
    from torchtitan_lite.distributed.process_group import exit_process

    mark("config and data")
    original: dict[str, Callable[..., Any]] = {
        name: getattr(train, name) for name in ("process_group", "load_newest", "train_step")
    }

    @contextlib.contextmanager
    def process_group(*args: Any) -> Iterator[Any]:
        mark("rendezvous")
        with original["process_group"](*args) as world:
            mark("model and optimizer")
            yield world

    def load_newest(*args: Any) -> Any:
        mark("load")
        return original["load_newest"](*args)

    def train_step(*args: Any) -> Any:
        mark("first step")
        result = original["train_step"](*args)
        mark("second step")
        return result

    for function in (process_group, load_newest, train_step):
        setattr(train, function.__name__, function)
    exit_process(train.main(sys.argv[1:]))


# --- the command ---------------------------------------------------------------------------------------------------


class Launch:
    """The processes of a run under a launcher, and the marks of its ranks."""

    def __init__(self, folder: Path, commands: list[list[str]]) -> None:
        self._marks, self.run, self.began = folder / "marks", folder / "runs" / "default", time.time()
        self._marks.touch()
        env = os.environ | {MARKS: str(self._marks), "PYTHONPATH": str(ROOT)}
        with (folder / "output").open("wb") as output:
            self.processes = [
                subprocess.Popen(c, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)
                for c in commands
            ]

    def first_step(self, after: float) -> dict[int, dict[str, float]]:
        """Wait for the first step of a world that started after a moment. Its marks by part, for each rank."""
        until = time.time() + LONGEST_S
        while time.time() < until:
            time.sleep(0.1)
            ranks: dict[int, dict[str, float]] = {}
            for line in self._marks.read_text().splitlines():
                mark = json.loads(line)
                if mark["part"] == "imports" and mark["time"] > after:
                    ranks[mark["rank"]] = {"pid": mark["pid"]}
                if ranks.get(mark["rank"], {}).get("pid") == mark["pid"]:
                    ranks[mark["rank"]][mark["part"]] = mark["time"]
            if ranks and all("second step" in marks for marks in ranks.values()) and 0 in ranks:
                return ranks
        raise TimeoutError(f"no step in {LONGEST_S:.0f} s: {self._marks.with_name('output').read_text()[-2000:]}")

    def wait_for_saves(self, n: int) -> None:
        """Wait for so many checkpoints more."""
        log, until = self.run / "train.log", time.time() + LONGEST_S
        enough = log.read_text().count("saved   ") + n
        while log.read_text().count("saved   ") < enough:
            assert time.time() < until, "no checkpoint was saved"
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def parts_of(marks: dict[str, float], began: float) -> dict[str, float]:
    """Seconds of each part, on rank 0."""
    times = [began, *(marks[part] for part in PARTS), marks["second step"]]
    names = "launcher", *PARTS
    return {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}


def launched(folder: Path, text: Path, launcher: str, *, background: bool) -> Launch:
    """Start a run under torchrun, or a coordinator and two machines of a rank each."""
    options = OPTIONS | {
        "data.path": text,
        "run.out_dir": folder / "runs",
        "checkpoint.async_save": str(background).lower(),
    }
    script = [__file__, *(f"--{key}={value}" for key, value in options.items())]
    python = sys.executable
    if launcher == "torchrun":
        torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", "2"]
        return Launch(folder, [[python, "-m", *torchrun, "--max-restarts", "100", *script]])
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    elastic = [python, "-m", "torchtitan_lite.tools.elastic"]
    secret = ["--secret-file", str(key)]
    joins = [[*elastic, "join", *secret, "--name", name, f"127.0.0.1:{port}", *script] for name in ("a", "b")]
    return Launch(folder, [[*elastic, "coordinate", *secret, str(port)], *joins])


def measure(folder: Path, text: Path, launcher: str, kills: int, *, background: bool) -> dict[str, dict[str, float]]:
    """Seconds by part: of the launch, after the kill of a rank (median), and after that of a machine."""
    folder.mkdir()
    run, rows = launched(folder, text, launcher, background=background), {}
    try:
        marks = run.first_step(run.began)
        rows[f"{launcher}: launch"] = parts_of(marks[0], run.began)
        restarts = []
        for _ in range(kills if launcher == "torchrun" else 1):
            run.wait_for_saves(2)
            killed = time.time()
            os.kill(int(marks[1]["pid"]), signal.SIGKILL)
            marks = run.first_step(killed)
            restarts.append(parts_of(marks[0], killed))
        rows[f"{launcher}: SIGKILL of a rank"] = {
            part: statistics.median(r[part] for r in restarts) for part in restarts[0]
        }
        if launcher == "elastic":
            run.wait_for_saves(2)
            killed = time.time()
            os.killpg(run.processes[-1].pid, signal.SIGKILL)
            rows["elastic: SIGKILL of a machine"] = parts_of(run.first_step(killed)[0], killed)
        saves = re.findall(
            r"([0-9.]+) MiB, ([0-9.]+) s(?:, training paused for ([0-9.]+) s)?", (run.run / "train.log").read_text()
        )
        records = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
        stall = statistics.median(r["save_s"] for r in records if "save_s" in r)
        whole = statistics.median(float(s) for _, s, _ in saves)
        how = (
            f"in the background: training waits {stall:.3f} s of {whole:.1f} s"
            if background
            else f"synchronous: {stall:.3f} s"
        )
        print(f"a save of {saves[0][0]} MiB, {how} (median of {len(saves)})", flush=True)
    finally:
        run.close()
    return rows


def main(kills: int = 3) -> None:
    from benchmarks.machine import cpu

    print(f"seconds, two ranks on {cpu()}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = folder / "text.txt"
        text.write_text((ROOT / "README.md").read_text() * 20)
        rows = measure(folder / "torchrun", text, "torchrun", kills, background=True)
        rows |= measure(folder / "elastic", text, "elastic", kills, background=False)
    names = "launcher", *PARTS
    print("| | " + " | ".join([*names, "all"]) + " |")
    print("|---|" + "---:|" * (len(names) + 1))
    for name, parts in rows.items():
        print(f"| {name} | " + " | ".join(f"{parts[part]:.2f}" for part in names) + f" | {sum(parts.values()):.1f} |")


if __name__ == "__main__":
    if MARKS in os.environ:
        rank_main()
    else:
        main(*map(int, sys.argv[1:2]))
