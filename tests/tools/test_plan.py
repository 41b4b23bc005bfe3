"""Compares `plan`'s memory, communication and time with measurements and manual counts."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.docs.pages import blocks
from tests.helpers import ROOT, meta_model, run_distributed
from tests.recorded import by_line, differences
from tests.tools.memory import CASES, EXTENDED, HYBRID, SLOW, VOCABULARY, config_of, config_with, peaks_of
from torchtitan_lite import plan
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.distributed import initialize
from torchtitan_lite.run.mfu import DEVICES, flops_per_token
from torchtitan_lite.tools.estimate import simulate
from torchtitan_lite.tools.estimate.planned_run import make_plan

H100 = DEVICES["h100"]


def cases() -> Iterator[Any]:
    """The name of a case, and a number of ranks."""
    for name in CASES:
        mark = [pytest.mark.slow] if name in SLOW else [pytest.mark.extended] if name in EXTENDED else []
        if name in HYBRID:
            yield pytest.param(name, 4, marks=mark)
        else:
            yield pytest.param(name, 1, marks=pytest.mark.slow)
            yield pytest.param(name, 2, marks=mark)


@pytest.mark.parametrize(("name", "world_size"), [*cases()])
def test_planned_memory_matches_measured_memory(name: str, world_size: int) -> None:
    config = config_of(name, world_size)
    planned = simulate.simulate(config, world_size, VOCABULARY, on_gpu=False)
    (measured,) = run_distributed(peaks_of, world_size, [config])[0]
    assert sum(planned.peak.values()) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_flops_match_those_counted_by_torch(family: str, tied: bool) -> None:
    values = {"family": family, "dim": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 32, "tie_embeddings": tied}
    model = meta_model(ModelConfig.model_validate(values), 97)
    initialize.materialize(model, torch.device("cpu"), 0)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counts = counter.get_flop_counts()["Global"]
    matmuls = sum(n for operator, n in counts.items() if "attention" not in str(operator))
    # vectors are parameters too: the formula counts them, and nothing multiplies with them
    assert flops_per_token(model, 32) - 12 * 3 * 64 * 32 == pytest.approx(matmuls / 64, rel=0.02), "without attention"


@pytest.mark.extended
def test_suggested_settings_make_the_run_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a TOML file, with the memory that its comment has."""
    command = [f"--config={ROOT}/configs/llama_1b.toml", "--world-size=2", "--device=rtx4090", "--model.n_layers=8"]
    assert plan.main([*command, "--train.micro_batch_size=8", "--activation_checkpointing.mode=none"]) == 0
    assert "DOES NOT FIT" in (out := capsys.readouterr().out)
    assert "try     --suggest" in out
    assert plan.main([*command, "--suggest"]) == 0
    _, *suggested = capsys.readouterr().out.split("\n# ")
    assert suggested
    for text in suggested:
        comment, lines = text.split("\n", 1)
        (tmp_path / "mine.toml").write_text(f'base = "{ROOT}/configs/llama_1b.toml"\n{lines}')
        assert plan.main([f"--config={tmp_path / 'mine.toml'}", *command[1:]]) == 0
        assert f"memory  {comment.split('device, ')[1]} peak per rank: fits" in capsys.readouterr().out


@pytest.mark.extended
def test_the_pages_show_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The example, and the days of the shipped config on the nodes of the commands of docs/cluster.md."""
    page, cluster = ((ROOT / f"docs/{name}.md").read_text() for name in ("plan", "cluster"))
    command = blocks(page)[0].replace("configs", f"{ROOT}/configs").split()[3:]
    for world_size in (16, 32, 64):
        assert plan.main([*command, f"--world-size={world_size}"]) == 0
        out = capsys.readouterr().out
        assert f"expects {out.split('run takes ')[1].split(',')[0]}" in cluster
    assert not differences(by_line(blocks(page, "text")[0]), by_line(out), "", 5e-3)


class CountedOperators(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CountedOperators.n += 1
        return function(*args, **(kwargs or {}))


class CountedFakes(FakeTensorMode):
    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        CountedOperators.n += 1
        return super().__torch_dispatch__(*args, **kwargs)


def test_the_work_of_a_plan_does_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Muon: FSDP's chunks of each parameter, and what each of up to 4,096 ranks has of a matrix."""
    monkeypatch.setattr(simulate, "FakeTensorMode", CountedFakes)
    model = {"n_layers": 1, "dim": 64, "n_heads": 4, "hidden_dim": 4096}
    config = config_with({f"model.{key}": n for key, n in model.items()} | {"optim.name": "muon"}, 2)

    def operators(world_size: int) -> int:
        CountedOperators.n = 0
        with CountedOperators():  # type: ignore[no-untyped-call]
            make_plan(config, world_size, H100)
        return CountedOperators.n

    assert operators(5000) < 1.1 * operators(2)
    assert not torch.distributed.is_initialized(), "a process group remains"


ELSEWHERE = ["--compile.enabled=true", '--log.trackers=["wandb","tensorboard"]', "--data.path=/cluster/text"]
ELSEWHERE += ["--model.init_from=/cluster/run", "--checkpoint.resume=/cluster/other", "--fsdp.param_dtype=bfloat16"]


@pytest.mark.parametrize("device", ["h100", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.extended
def test_a_plan_is_the_same_on_every_machine(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No compiler, no triton, no trackers, no files of the run; other cores, kernels and launchers; GPUs or none."""
    command = ["--world-size=16", f"--device={device}", "--fsdp.sharding_strategy=HYBRID_SHARD", *ELSEWHERE]
    command = [c for c in command if device != "cpu" or "HYBRID" not in c]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert plan.main(command) == 0, capsys.readouterr().err
    here = capsys.readouterr().out
    assert "/cluster/text is not on this machine" in here
    env = {"OMP_NUM_THREADS": "7", "ATEN_CPU_CAPABILITY": "default", "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    env |= {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": str(ROOT), "ONEDNN_MAX_CPU_ISA": "SSE41", "HOME": str(tmp_path)}
    hidden = "import sys; sys.modules.update(triton=None, wandb=None, tensorboard=None)"
    code = f"{hidden}\nfrom torchtitan_lite import plan; sys.exit(plan.main(sys.argv[1:]))"
    there = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert there.stdout == here, there.stderr
