"""Which files `[data] path` selects: links, globs, names and permissions. Skipped files are reported."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.helpers import ranks, succeeded, tiny
from torchtitan_lite.config.paths import is_prepared
from torchtitan_lite.data.prepare.texts import find
from torchtitan_lite.errors import DataError


def tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"the text of {name}\n")
    return root


def found(path: Path) -> list[str]:
    return [str(file) for file in find(str(path)).files]


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    tree(tmp_path, "in/a.txt", "in/sub/b.txt", "elsewhere/c.txt", "elsewhere/deep/d.txt")
    for link, target in (
        ("in/more", "elsewhere"),
        ("in/again", "elsewhere"),
        ("in/sub/loop", "in"),
        ("elsewhere/back", "in"),
    ):
        (tmp_path / link).symlink_to(tmp_path / target)
    names = [str(Path(file).relative_to(tmp_path / "in")) for file in found(tmp_path / "in")]
    assert names == ["a.txt", "again/c.txt", "again/deep/d.txt", "sub/b.txt"]


def test_each_start_names_its_text_what_is_left_out_and_many_epochs(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(text, folder)
    tree(folder, "x.md", "y.md", "Makefile")
    for steps in (2, 10**6):
        command = tiny(folder, tmp_path / "runs", run__name="a", train__steps=steps, optim__warmup_steps=1)
        said = succeeded(ranks(2, *command, f"--run.max_minutes={0.001 if steps > 2 else 0}"))
        assert f"data    {folder}: " in said
        assert said.count("3 other files not read: 2 x .md, 1 x Makefile; ") == 1
        assert (f"data    the run reads {folder} " in said) == (steps > 2)


def test_unreadable_folders_are_errors() -> None:
    """A folder that can't be listed may hold text, so it is not skipped. Root looks as another user."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        secret = tree(Path(folder), "in/a.txt", "in/secret/b.txt", "in/secret/deep/c.txt") / "in/secret"
        Path(folder).chmod(0o755)
        secret.chmod(0)
        try:
            os.seteuid(user or 65534)
            for name in ("in", "in/secret", "in/secret/deep", "in/secret/b.txt"):
                assert not is_prepared(f"{folder}/{name}")
                with pytest.raises(DataError, match="secret.* can't be read: Permission denied"):
                    find(f"{folder}/{name}")
        finally:
            os.seteuid(user)
            secret.chmod(0o755)


def test_a_folder_of_save_to_disk_is_told_how_to_become_text(tmp_path: Path) -> None:
    """The JSON beside its .arrow files is no text."""
    disk = tree(tmp_path, "train/data-00000-of-00001.arrow", "train/dataset_info.json", "train/state.json")
    with pytest.raises(
        DataError, match=r"train was written by save_to_disk, .*load_from_disk\('.*train'\)\.to_parquet"
    ):
        found(disk)
