"""The commands of `checkpoint.py`: which checkpoint they take, and what `verify` reports."""

import hashlib
import shutil
from pathlib import Path

import pytest

from tests.helpers import checkpoint, ranks, succeeded, tiny
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.tools import checkpoints


def test_every_command_takes_the_newest_complete_checkpoint_and_names_a_damaged_one(
    finished: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    weights = checkpoint(run, 4) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    note = f"note    damaged: {weights}: its SHA-256 does not match the manifest"
    assert checkpoints.main(["inspect", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("step 2,")
    assert note in said
    (tmp_path / "hf").mkdir()
    assert checkpoints.main(["export", str(run), str(tmp_path / "hf")]) == 0
    assert note in capsys.readouterr().out
    assert checkpoints.main(["import", str(tmp_path / "hf")]) == 0
    assert (
        f'init_from = "{tmp_path / "hf"}"\n\n[tokenizer]\npath = "{tmp_path / "hf/tokenizer.json"}"\n'
        'end_token = "<|endoftext|>"\n\n# Continued'
    ) in capsys.readouterr().out
    command = tiny(text, tmp_path, run__name="from", train__steps=1, optim__warmup_steps=0, model__init_from=run)
    assert note in succeeded(ranks(2, *command))
    (checkpoint(run, 2) / "state.json").unlink()
    for name in ("inspect", "export"):
        assert checkpoints.main([name, str(run), *([str(tmp_path / "no")] if name == "export" else [])]) == 2
        assert "no checkpoint is complete" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_verify_takes_a_folder_of_runs(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    (tmp_path / "runs/started").mkdir()
    assert checkpoints.main(["verify", str(tmp_path / "runs")]) == 0
    folders = [checkpoint(tmp_path / "runs" / name, step) for name in "ab" for step in (2, 4)]
    assert capsys.readouterr().out.splitlines() == [f"complete {folder}" for folder in folders]
    (folders[2] / "model.safetensors").write_bytes(b"x")
    assert checkpoints.main(["verify", str(tmp_path / "runs")]) == 1
    found = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert found == [
        *(f"complete {f}" for f in folders[:2]),
        f"DAMAGED {folders[2]}/model.safetensors",
        f"complete {folders[3]}",
    ]
    there = f"runs there: {tmp_path / 'runs/a'}, {tmp_path / 'runs/b'}"
    for name, problem in (("started", "is not a run with a checkpoint, or a checkpoint"), ("none", "does not exist")):
        assert checkpoints.main(["verify", str(tmp_path / "runs" / name)]) == 2
        assert capsys.readouterr().err == f"checkpoint.py: {tmp_path / 'runs' / name} {problem}; {there}\n"


RECIPE = """
# Continued pretraining; docs/models.md has the reasons and the sources.
{data}[train]
seq_len = {seq_len}  # {limit}
micro_batch_size = {micro}  # sequences per rank and forward pass
global_batch_size = {batch}  # {tokens} tokens per step; for 4 times the tokens, double lr
steps = 500  # {all} tokens; or epochs = 1 instead

[optim]
name = "adamw"
lr = {lr}
# A larger lr learns the new text faster and forgets more of the old (Ibrahim et al., arXiv:2403.08763).
betas = [0.9, 0.95]
weight_decay = 0.1
schedule = "cosine"  # warm up again, then decay again to a tenth
warmup_steps = 20
min_lr_ratio = 0.1"""
CODE_LLAMA = "2e-5  # that of Code Llama's continued training on long sequences, arXiv:2308.12950"
TINY = {"seq_len": 37, "limit": "as the model", "micro": 6, "batch": 1771, "tokens": "65,527", "all": "32,763,500"}
WHOLE = {"tokens": "65,536", "all": "32,768,000"}
LONG = WHOLE | {"seq_len": 2048, "limit": "the model takes 8192, if there is memory", "micro": 1, "batch": 32}
PAIRS = WHOLE | {"seq_len": 512, "limit": "as the model", "micro": 4, "batch": 128}
PAIRS |= {"data": '[data]\nobjective = "span_corruption"  # or "pairs", with target_len\n\n'}
PAIRS |= {"lr": "1e-4  # the lower value for AdamW on transformers' T5 page"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ModelConfig(family="gpt", dim=32, n_layers=2, n_heads=2, max_seq_len=37, vocab_size=517), TINY),
        (
            ModelConfig(family="gpt", dim=256, n_layers=2, n_heads=2, max_seq_len=240, vocab_size=5000),
            TINY | {"seq_len": 240, "micro": 4, "batch": 273, "tokens": "65,520", "all": "32,760,000"},
        ),
        (ModelConfig(dim=1024, n_layers=12, n_heads=8, max_seq_len=8192, vocab_size=32000), LONG),
        (
            ModelConfig(
                family="t5", dim=512, n_layers=6, n_decoder_layers=6, n_heads=8, max_seq_len=512, vocab_size=32000
            ),
            PAIRS,
        ),
    ],
)
def test_the_recipe_of_an_import_fits_the_model(model: ModelConfig, expected: dict[str, object]) -> None:
    assert checkpoints.recipe(model) == RECIPE.format(**{"data": "", "lr": CODE_LLAMA} | expected)


def test_inspect_prints_the_state_of_a_checkpoint(
    finished: Path, sharded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, expected, world in (
        (checkpoint(finished, 2), "step 2, 384 tokens, 12 samples; full state", "1 rank"),
        (checkpoint(sharded, 4), "step 4, 768 tokens, 24 samples; sharded state", "2 ranks"),
    ):
        assert checkpoints.main(["inspect", str(folder)]) == 0
        head, best, saved, *rest = capsys.readouterr().out.splitlines()
        assert head == expected
        assert best == "the run's best checkpoint, by validation loss: step 4"
        files = {file.name: file for file in folder.iterdir() if file.name != "manifest.json"}
        n_bytes = sum(file.stat().st_size for file in files.values())
        assert saved == f"saved by {world}; {n_bytes / 2**20:.2f} MiB in {len(files)} files"
        for line in rest[: len(files)]:
            size, digest, name = line.split()
            content = files[name].read_bytes()
            assert (size, digest) == (f"{len(content):,}", f"{hashlib.sha256(content).hexdigest()[:12]}...")
        for name in ("model.tok_embeddings.weight", "optimizer.exp_avg.tok_embeddings.weight"):
            assert f"  {'[517, 32]':>20}  {name}" in rest
