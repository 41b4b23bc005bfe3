"""model.init_from: checked before a run is queued, and only read by a run that begins."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers import checkpoint, damage, python, ranks, refused, succeeded, tiny
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.huggingface.weights import tokenizer_notes


def test_the_check_of_a_config_refuses_weights_that_are_missing_or_of_another_model(
    finished: Path, text: Path, tmp_path: Path
) -> None:
    """scripts/slurm.sbatch runs it first. Also if the run has a checkpoint already: it has never started from them."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    lone, larger = shutil.copytree(checkpoint(finished, 4), tmp_path / "lone"), bpe.load(finished)
    assert larger.add_tokens(["[PAD]"]) == 1
    larger.save(str(tmp_path / "larger.json"))
    assert prepare([str(text), f"--out={tmp_path / 'prepared'}", f"--tokenizer={finished}"]) == 0
    for name, source, more, problem in (
        ("run", "runs/nosuch", {}, "model.init_from: nothing at runs/nosuch"),
        ("new", tmp_path / "empty", {}, "is not a run with a checkpoint, or a checkpoint"),
        ("new", finished, {"model__dim": 64}, "dim is 32 in the checkpoint and 64 here"),
        ("new", finished, {"model__max_seq_len": 64}, "max_seq_len is 37 in the checkpoint and 64 here"),
        ("new", finished, {"model__dropout": 0.1}, ""),
        ("new", lone, {}, "tokenizer trained on your text would not fit its embeddings: name the model's own with"),
        ("new", lone, {"tokenizer__path": finished}, ""),
        ("new", lone, {"tokenizer__path": tmp_path / "larger.json"}, "518 entries, and the model 517 embeddings, none"),
        ("new", lone, {"data__path": tmp_path / "prepared"}, ""),
    ):
        result = python("--check-config", *tiny(text, tmp_path, run__name=name, model__init_from=source, **more))
        refused(result, problem, code=2 if problem else 0)


def test_weights_of_another_tokenizer_are_reported(finished: Path, text: Path, tmp_path: Path) -> None:
    """`tiny` trains a tokenizer on each text: that of another text has other tokens of the same number."""
    (tmp_path / "other.txt").write_text("".join(file.read_text() for file in text.glob("*.txt"))[::-1])
    more, home = (
        {"run__name": "new", "model__init_from": f"~/{finished.name}", "train__steps": 3},
        {"HOME": str(finished.parent)},
    )
    other = ranks(1, *tiny(tmp_path / "other.txt", tmp_path, **more), env=home)
    file = finished / "tokenizer.json"
    assert f"a different tokenizer, so most tokens mean different text here: --tokenizer.path={file}" in other.stdout
    lone = shutil.copytree(checkpoint(finished, 4), tmp_path / "lone")
    of_run, of_checkpoint, of_lone = (
        tokenizer_notes(source, tmp_path / "new/tokenizer.json") for source in (finished, checkpoint(finished, 4), lone)
    )
    assert (of_lone[0] in of_run[0].replace(str(finished), str(lone)), tokenizer_notes(lone, file)) == (True, [])
    assert of_checkpoint == [note.replace(f"of {finished}", f"of {checkpoint(finished, 4)}") for note in of_run]
    assert (len(of_run), tokenizer_notes(tmp_path / "none", file)) == (1, [])
    again = succeeded(ranks(1, *tiny(tmp_path / "other.txt", tmp_path, **more | {"train__steps": 4}), env=home))
    assert "different tokenizer" not in again, "a resume does not read them"
    theirs = tiny(tmp_path / "other.txt", tmp_path, **more | {"run__name": "theirs", "tokenizer__path": file})
    kept = [option for option in theirs if not option.startswith("--tokenizer.vocab_size")]
    assert "different tokenizer" not in succeeded(ranks(1, *kept, env=home))


def test_damaged_weights_and_tensors_that_the_model_lacks_are_refused(
    finished: Path, text: Path, tmp_path: Path
) -> None:
    damaged = checkpoint(shutil.copytree(finished, tmp_path / "damaged"), 2)
    damage(damaged)
    larger = tmp_path / "larger"
    succeeded(python("export", str(finished), str(larger), script="checkpoint.py"))
    weights = load_file(larger / "model.safetensors")
    nan = "can't be used: 1 tensor of it with NaN or infinite values, the first is norm.bias: damaged, or saved by"
    for value, said, code in ((3e38, "losses that are not finite", 3), (-torch.inf, nan, 2), (torch.nan, nan, 2)):
        save_file(weights | {"transformer.ln_f.bias": torch.full((32,), value)}, larger / "model.safetensors")
        refused(python(str(larger), "--data", str(text), script="-m torchtitan_lite.evaluate"), said, code=code)
    refused(ranks(2, *tiny(text, tmp_path, train__steps=3, model__init_from=larger)), nan, code=1)  # of torchrun
    save_file(weights | {"transformer.h.2.ln_1.weight": torch.ones(32)}, larger / "model.safetensors", {"format": "pt"})
    for source, problem in (
        (damaged, "model.safetensors: its SHA-256 does not match the manifest"),
        (larger, "the model has no tensor that corresponds to transformer.h.2.ln_1.weight"),
    ):
        result = ranks(1, *tiny(text, tmp_path, run__name="new", train__steps=3, model__init_from=source))
        refused(result, problem)
        assert not (tmp_path / "new/metrics.jsonl").exists()
