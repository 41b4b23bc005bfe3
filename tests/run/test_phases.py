"""Phases and forks: each source continues where it was, and what was seen adds up, across stops and forks."""

import itertools
import json
import random
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import assert_same_end, checkpoint, forget_after, losses, ranks, records, refused, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.data import token_files
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.run.phases import open_phase
from torchtitan_lite.tools import which
from torchtitan_lite.tools.report import report

# lines of each source; those that begin with "long" have the same text
SIZES = {"web": 90, "code": 60, "long": 40, "long too": 40, "long as well": 40}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    where = tmp_path_factory.mktemp("sources")
    for name, n in SIZES.items():
        rng = random.Random(name[:4])
        lines = (json.dumps({"text": "".join(rng.choices("abcdefgh ", k=rng.randint(8, 30)))}) for _ in range(n))
        (where / f"{name}.jsonl").write_text("\n".join(lines))
        assert prepare([str(where / f"{name}.jsonl"), "--out", str(where / name), "--tokenizer", "bytes"]) == 0
    return {name: str(where / name) for name in SIZES}


def random_config(rng: random.Random, folders: dict[str, str], steps: int) -> Config:
    """A run with up to three phases, each of which changes some of sources, weights, length and batch."""

    def mixture() -> dict[str, float]:
        names = rng.sample(sorted(folders), rng.randint(1, 3))
        return {folders[name]: rng.choice([0.1, 0.25, 0.5, 1.0, 3.0]) for name in names}

    phases = []
    for begin in sorted(rng.sample(range(1, steps), rng.randint(0, 3))):
        changes = {
            ("data", "sources"): mixture(),
            ("train", "seq_len"): rng.choice([8, 16]),
            ("train", "global_batch_size"): rng.randint(1, 40),
        }
        place = {"from_step": begin} if rng.random() < 0.5 else {"from_fraction": begin / steps}
        phase: dict[str, Any] = {} | place
        for (section, key), value in rng.sample(sorted(changes.items()), rng.randint(1, 3)):
            phase.setdefault(section, {})[key] = value
        phases.append(phase)
    train = {"steps": steps, "seq_len": rng.choice([8, 16]), "global_batch_size": rng.randint(1, 40), "phases": phases}
    skipped = [[20, 20 + rng.randint(1, 30)]] if rng.random() < 0.2 else []
    return Config.model_validate({"data": {"sources": mixture(), "skip_samples": skipped}, "train": train})


Read = tuple[str, Any, int, int, int, int]  # key of a source, its cut, samples in an epoch, place, length, run sample


def walk(config: Config, data: DataSet, state: TrainState, last: int, world_size: int) -> tuple[TrainState, list[Read]]:
    """The steps of a run without a model, as train.py makes them: the state after `last`, and what was read."""
    phase, mixture, state = open_phase(config, data, state, state.step)
    read: list[Read] = []
    for step in range(state.step + 1, last + 1):
        if state.step in config.train.boundaries(state.phases):
            phase, mixture, state = open_phase(config, data, state, step)
        size = phase.train.batch_size(step)
        first = phase.data.position(state.samples_consumed, size)
        loader = Loader(mixture, micro_batch_size=2, rank=world_size - 1, world_size=world_size, seed=0)
        state = state.after_step(first + size, loader.batch(first, size).source_tokens)
        keys, sources, numbers = [*mixture.starts], state.segments[-1]["sources"], np.arange(first, first + size)
        for k, place, sample in zip(*mixture.locate(numbers), numbers, strict=True):
            each = sources[keys[k]]
            read.append((keys[k], each["cut"], each["samples"], int(place), phase.train.seq_len, int(sample)))
    return state, read


@pytest.mark.parametrize("seed", range(64))
def test_sources_continue_where_they_were(seed: int, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random mixtures, phases, forks, world sizes and stops: no sample of an epoch is repeated or left out."""
    monkeypatch.setattr(token_files, "changed", lambda *_: [])  # a third of the time
    rng = random.Random(seed)
    steps = rng.randint(6, 16)
    runs = [random_config(rng, folders, steps), random_config(rng, folders, 2 * steps)]
    fork, stops = rng.randint(1, steps), rng.sample(range(1, 2 * steps), 3)
    found = []
    for stopped_at in ([], sorted(stops)):
        state, all_read = TrainState(config=flatten(runs[0])), list[Read]()
        for config, end in ((runs[0], fork), (runs[1], 2 * steps)):
            data = prepare_all(config.data, config.tokenizer, print, later=config.train.later_sources)
            for stop in [*(stop for stop in stopped_at if state.step < stop < end), end]:
                resumed = TrainState(**json.loads(json.dumps(asdict(state)))).continued_by(
                    TrainState(config=flatten(config))
                )
                state, read = walk(config, data, resumed, stop, rng.randint(1, 4))
                all_read += read
        found.append((replace(state, config={}), all_read))
    assert found[0] == found[1], "stopped and straight"
    skips, (end_state, all_read) = any(config.data.skip_samples for config in runs), found[0]
    for key in {key for key, *_ in all_read}:
        of_source = [each for each in all_read if each[0] == key]
        recut = len({str(s["sources"][key]["cut"]) for s in end_state.segments if key in s["sources"]}) > 1
        for (_, cut, n, place, *_), (_, next_cut, next_n, next_place, *_) in itertools.pairwise(of_source):
            if cut != next_cut or (recut and next_place // n > place // n):  # or a short segment had another cut
                assert next_place // next_n > place // n, "an epoch that was begun before"
                assert skips or next_place % next_n == 0, "not the beginning of an epoch"
            else:
                assert next_place > place if skips else next_place == place + 1
        assert end_state.source_tokens[key] == sum(length for *_, length, _ in of_source)
    assert end_state.tokens == sum(end_state.source_tokens.values())


RUN: dict[str, Any] = {
    **{"model__family": "llama", "model__max_seq_len": 32, "model__window": 12, "train__seq_len": 16},
    **{"train__steps": 12, "checkpoint__every": 2, "eval__every": 6, "optim__schedule": "wsd", "spike__action": "log"},
    **{"train__micro_batch_size": 3, "run__peak_tflops": 1.0},
}


def given(folders: dict[str, str], *, long: str = "train.seq_len = 32") -> tuple[str, str, str]:
    """The sources of three phases, and [[phases]] with them; the last one is longer."""
    mixed = (("web", "code", 0.7), ("code", "long", 0.2), ("long", "web", 0.5))
    texts = [f'{{ "{folders[a]}" = {w}, "{folders[b]}" = {round(1 - w, 1)} }}' for a, b, w in mixed]
    phases = f"from_step = 4, data.sources = {texts[1]}, optim.lr = 0.002, model.window = 7, model.rope_theta = 2e4"
    more = (
        f"from_fraction = 0.75, data.sources = {texts[2]}, {long}, train.global_batch_size = 4, "
        "train.micro_batch_size = 2, model.window = 20, model.rope_theta = 5e4"
    )
    return f"--data.sources={texts[0]}", f"--train.phases=[{{ {phases} }}, {{ {more} }}]", phases


def test_a_run_with_phases_is_its_forks_and_a_resume_in_any_phase_is_bitwise(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the middle of each phase, resumed on two ranks, and forked in the second phase."""
    first, phases, _ = given(folders)
    run = tmp_path / "run"
    words = [word for word in tiny(run, tmp_path, run__name="run", **RUN) if not word.startswith("--data.path")]
    command = [*words, first, phases]
    said = succeeded(ranks(1, *command))
    assert re.findall(r"^phase   (\d), steps (\S+) to (\S+):", said, re.M) == [
        ("1", "1", "4"),
        ("2", "5", "9"),
        ("3", "10", "12"),
    ]
    assert [(r["step"], r["phase"]) for r in records(run) if "phase" in r] == [(4, 2), (9, 3)]
    assert f"data    {folders['code']}: continues after" in said
    assert re.search(r"web: begins a new epoch of [\d,]+ tokens; the run has read [\d,]+ tokens of this text", said)
    for record in [record for record in records(run) if "sources" in record]:
        assert sum(source["tokens"] for source in record["sources"].values()) == record["tokens"]
        losses_of = [value for key, value in record.items() if key.startswith("loss/") and value is not None]
        assert min(losses_of) - 1e-5 <= record["loss"] <= max(losses_of) + 1e-5
    validated = [sorted(key for key in r if key.startswith("val_loss/")) for r in records(run) if "val_loss" in r]
    assert validated == [[f"val_loss/{folders['code']}", f"val_loss/{folders['web']}"]] * 2, "those of the first phase"
    assert storage.read_state(checkpoint(run, 6)).settings["model.window"] == 7
    assert len(storage.read_state(checkpoint(run, 6)).spikes["losses"]) == 2, "the window of losses begins anew"

    straight = shutil.copytree(run, tmp_path / "straight")
    for step in (10, 6, 2):  # in the middle of each phase
        forget_after(run, step)
        assert f"resumed after step {step}" in succeeded(ranks(1, *command))
        assert_same_end(run, straight, 12)
        peaks = [
            {r["step"]: round(r["tokens_per_second"] / r["mfu"]) for r in records(one) if "mfu" in r}
            for one in (run, straight)
        ]
        assert (peaks[0], len({*peaks[1].values()})) == (peaks[1], 3), "MFU compares with the peak of its phase"
    forget_after(run, 6)
    succeeded(ranks(2, *command))
    for step, (loss, _) in losses(run).items():
        assert loss == pytest.approx(losses(straight)[step][0], rel=1e-4)

    # the same as forks
    succeeded(ranks(1, *words, first, "--run.name=one", "--train.steps=4", "--optim.decay_ratio=0.01"))
    parts = dict(
        re.findall(r"([a-z_.]+) = (\{ .*? \}|[^, ]+)", phases.split("}, {")[0].removeprefix("--train.phases=[{"))
    )
    changed = [f"--{key}={value}" for key, value in parts.items() if key != "from_step"]
    fork = [*words, *changed, "--run.name=two", f"--checkpoint.resume={checkpoint(straight, 4)}", "--train.steps=12"]
    said = succeeded(ranks(1, *fork))
    assert "continues after" in said
    assert {step: losses(tmp_path / "two")[step] for step in range(5, 10)} == {
        step: losses(straight)[step] for step in range(5, 10)
    }
    for step, run_of in ((2, tmp_path / "two"), (7, tmp_path / "two"), (11, straight)):
        assert which.main([str(run_of), f"--step={step}", f"--json={tmp_path / 'rows.json'}"]) == 0
    names = {row["source"] for row in json.loads((tmp_path / "rows.json").read_text())["documents"]}
    assert names <= {folders["web"], folders["long"]}
    assert f"belong to {checkpoint(straight, 4)}, the parent of this fork" in capsys.readouterr().out
    assert report.main([str(straight), "--out", str(tmp_path / "page.html")]) == 0
    assert "phase 3" in (tmp_path / "page.html").read_text()

    # a phase that has not begun may change, and one that has may not; a boundary that was passed stays
    forget_after(straight, 8)
    at = [*words, "--run.name=straight", first]
    refused(ranks(1, *at, phases.replace("optim.lr = 0.002", "optim.lr = 0.003")), "train.phases is", "fork it")
    later = phases.replace("from_fraction = 0.75", "from_fraction = 0.9")
    assert "phase   3, steps 19 to 20" in succeeded(ranks(1, *at, later, "--train.steps=20"))
