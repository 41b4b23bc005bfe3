"""Which files `[data] path` selects: links, globs, names and permissions. Skipped files are reported."""

import csv
import gzip
import os
import shutil
import tempfile
from pathlib import Path

import pytest

import train
from tests.data.test_data import texts_of
from tests.helpers import ranks, succeeded, tiny
from torchtitan_lite.config.load import load
from torchtitan_lite.config.paths import is_prepared
from torchtitan_lite.config.schema import Config, DataConfig
from torchtitan_lite.data.prepare.documents import usable
from torchtitan_lite.data.prepare.texts import find, ignored_notes
from torchtitan_lite.errors import ConfigError, DataError, UserError
from torchtitan_lite.run.checks import check_text


def tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"the text of {name}\n")
    return root


def found(path: str | Path | list[str]) -> list[str]:
    return [str(file) for file in find(path if isinstance(path, list) else str(path)).files]


def test_suffixes_are_of_any_case(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "B.TXT", "d.PARQUET", "e.CSV.zst", "README.md", *(f"x.{i}" for i in range(12)))
    (tmp_path / "c.Jsonl.GZ").write_bytes(gzip.compress(b'{"text": "a line"}\n'))
    assert [Path(file).name for file in found(tmp_path)] == ["B.TXT", "a.txt", "c.Jsonl.GZ", "d.PARQUET", "e.CSV.zst"]
    assert texts_of(find(str(tmp_path / "c.Jsonl.GZ"))) == ["a line"]
    assert ignored_notes([find(str(tmp_path)), find(str(tmp_path / "a.txt"))]) == [
        "13 other files are not read: 1 x .md, 1 x .0, 1 x .1, 1 x .10, 1 x .11, 1 x .2, 1 x .3, 1 x .4, 1 x .5, 1 x .6"
        ", ...; --text-suffixes (data.text_suffixes) names more suffixes of plain text, e.g. .md"
    ]


def test_named_suffixes_are_read_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In folders and by name, compressed too."""
    tree(tmp_path, "a.txt", "b.MD", "c.py", "e.tsv", "f.rst")
    (tmp_path / "d.py.gz").write_bytes(gzip.compress(b"compressed\n"))
    texts = find(str(tmp_path), text_suffixes=[".md", ".PY"])
    assert [file.name for file in texts.files] == ["a.txt", "b.MD", "c.py", "d.py.gz", "e.tsv"]
    assert [file.name for file in find(str(tmp_path)).files] == ["a.txt", "e.tsv"]
    with pytest.raises(DataError, match=r"c\.py: only \.txt.*--text-suffixes .* names more suffixes"):
        find(str(tmp_path / "c.py"))
    for wrong in ("md", ".csv", ".gz", ".a/b", ""):
        with pytest.raises(DataError, match=r"data\.text_suffixes.* should be the suffix of plain text"):
            find(str(tmp_path), text_suffixes=[wrong])
        config = Config(data=DataConfig(text_suffixes=[wrong]))
        assert "should be the suffix of plain text" in " ".join(check_text(config).values())
    assert train.main(["--check-config", "--data.text_suffixes=md"]) == 2
    assert 'data.text_suffixes (--text-suffixes): "md" should be the suffix' in capsys.readouterr().err
    (tmp_path / "c.py").rename(tmp_path / "a.py")
    for name in ("a.txt", "e.tsv"):
        (tmp_path / name).unlink()
    with pytest.raises(
        DataError,
        match=r"no text at .* \(it has 1 x \.py, 1 x \.MD, 1 x \.gz, 1 x \.rst\); supported: \.txt.*--text-suffixes",
    ):
        find(str(tmp_path))


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|"), ("a.tsv", "\t")])
def test_delimiters_are_those_of_the_header(name: str, delimiter: str, tmp_path: Path) -> None:
    rows = [["1", "plain"], ["2", f"a, b; c\t d | {delimiter}"], ["3", 'two\nlines, "quoted"']]
    with (tmp_path / name).open("w", newline="") as stream:
        stream.write("\n")
        csv.writer(stream, delimiter=delimiter).writerows([["id", "body"], *rows])
    assert texts_of(find(str(tmp_path / name), ["body"])) == [text for _, text in rows]
    pairs = find(str(tmp_path / name), ["id", "body"])
    assert [list(document.texts) for document in usable(pairs)] == rows
    with pytest.raises(DataError, match='no column "text": its columns are id, body'):
        texts_of(find(str(tmp_path / name)))


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


@pytest.mark.parametrize("name", ["data[1]", "what?", "a*b", "[x].txt"])
def test_a_path_that_exists_is_itself(name: str, tmp_path: Path) -> None:
    tree(tmp_path, name if name.endswith(".txt") else f"{name}/a.txt", "data1/wrong.txt", "x.txt", "a-b/wrong.txt")
    assert [Path(file).name for file in found(tmp_path / name)] == [name if name.endswith(".txt") else "a.txt"]
    load(None, {"data.path": str(tmp_path / name)})


def test_each_start_names_its_text_what_is_left_out_and_many_epochs(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(text, folder)
    tree(folder, "x.md", "y.md", "Makefile")
    for name, steps in (("a", 2), ("a", 3), ("b", 10**6)):
        command = tiny(folder, tmp_path / "runs", run__name=name, train__steps=steps, optim__warmup_steps=1)
        said = succeeded(ranks(2, *command, f"--run.max_minutes={0.001 if steps > 3 else 0}"))
        assert f"data    {folder}: " in said
        assert said.count("3 other files are not read: 2 x .md, 1 x Makefile; ") == 1
        assert (f"data    the run reads {folder} " in said) == (steps > 3)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~nobody-of-this-name/text", "nobody-of-this-name"),
        ("x" * 5000, "File name too long"),
        (["a.txt", ""], "no text at a.txt"),
    ],
)
def test_impossible_names_are_errors(path: str | list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        find(path)
    with pytest.raises(ConfigError) as caught:
        load(None, {"data.path": path})
    assert expected in str(caught.value) or "a.txt" in str(caught.value)


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
