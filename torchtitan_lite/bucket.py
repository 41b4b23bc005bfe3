"""A run, or prepared data, in object storage: at any URL that fsspec opens. Imported only where there is one.

    URL/claims/00000003                        who trains the run, see checkpointing/remote.py
        00000003-1f0c9a2e/metrics.jsonl, ...   the run's small files, as this claim last uploaded them
        checkpoints/step-00000200/manifest.json                 created last: without it, the step is incomplete
                                  00000003-1f0c9a2e/FILE        a file in the manifest, under the claim in the manifest

An object appears whole or not at all. Listings are never cached.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from tqdm import tqdm

from torchtitan_lite import progress
from torchtitan_lite.errors import BusyError, CheckpointError, ConfigError, DataError, UserError
from torchtitan_lite.files import write_durably
from torchtitan_lite.terminal import size

CLAIM = re.compile(r"(?:checkpoints/step-\d+/)?(\d{8})-[0-9a-f]{8}/")  # how the keys under a claim begin
STEP = re.compile(r"checkpoints/(step-\d{8,})/manifest\.json")
SMALL = {".toml", ".json", ".jsonl", ".log", ".txt"}  # suffixes of the small files of a run or prepared folder
HISTORY, MANIFEST, STATE = "attempts.jsonl", "manifest.json", "state.json"
_CHUNK, _AHEAD = 8 << 20, 32 << 20  # bytes hashed at a time; bytes requested at a time
_WHY = {  # by what an error says: the cause that the same command would meet again
    "ModuleNotFoundError": "its package is missing: pip install s3fs for s3://, gcsfs for gs://, adlfs for abfs://",
    "Protocol not known": "use a protocol that fsspec knows, such as s3://, gs:// or abfs://",
    "Credentials": "set the protocol's environment variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "egion": "set the region of the bucket, such as AWS_DEFAULT_REGION=eu-west-1",
    "Redirect": "set the region of the bucket, such as AWS_DEFAULT_REGION=eu-west-1",
    "FileNotFoundError": "create the bucket first",
    "PermissionError": "these credentials must be valid, and allowed to list, read, write and delete",
    "mplement": "the server must refuse to overwrite an object with If-None-Match",
}


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn an error of the protocol into a sentence: a ConfigError if the same command would fail again."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = f"{error!r} {error.__cause__!r}"
        why = next((f"; {text}" for word, text in _WHY.items() if word in said), "")
        raise (ConfigError if why else BusyError)(f"{url}: {type(error).__name__}: {error}{why}") from error


class Bucket:
    """A folder in object storage: `fs` has its objects, by key.

    Raises:
        ConfigError: the URL can't be opened, or has a password.
    """

    def __init__(self, url: str) -> None:
        self.url, parts = url.rstrip("/"), urlsplit(url)
        if "://" not in url or parts.password or parts.query:
            raise ConfigError(
                "object storage needs a URL such as s3://bucket/prefix, without password or query, which would be "
                "logged: the protocol's environment variables have them (docs/cluster.md)"
            )
        with explained(url):
            fs, root = url_to_fs(
                self.url, use_listings_cache=False, **({"auto_mkdir": True} if parts.scheme == "file" else {})
            )
        self.fs: Any = DirFileSystem(root.rstrip("/"), fs, skip_instance_cache=True)

    def now(self) -> datetime:
        """Return the time by the storage's clock. Creates and removes an object, which needs all rights.

        Raises:
            UserError: a right is missing, or the storage can't create an object only once.
        """
        key = f"probes/{uuid.uuid4().hex}"
        with explained(self.url):
            self.create(key, b"can this be created, read and removed?")
            moment: datetime = self.fs.modified(key)
            if self.create(key, b"can this be overwritten?"):
                raise NotImplementedError("an object was overwritten")
            self.fs.rm_file(key)
        return moment

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one. Returns whether it now has this content."""
        with contextlib.suppress(FileExistsError):
            self.fs.pipe_file(key, content, mode="create")
        return bool(self.fs.cat_file(key) == content)

    def contents(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the content of objects by key, without those that retention has deleted meanwhile."""
        listed = [*keys]
        return dict(self.fs.cat(listed, on_error="omit") if listed else {})

    def fetch(
        self,
        key: str,
        folder: Path,
        n_bytes: int,
        sha256: str,
        advance: Callable[[int], object] = progress.advance,
    ) -> str:
        """Copy an object into a folder, hashing it meanwhile. Returns its problem; only an intact file appears.

        Raises:
            UserError: it can't be read, or the disk has no room for it.
        """
        name, digest = key.rpartition("/")[2], hashlib.sha256()  # never a path, whatever a manifest says
        if n_bytes > (free := shutil.disk_usage(folder).free):
            raise BusyError(f"{self.url}/{key} takes {size(n_bytes)}, but {folder} has only {size(free)} free")
        part = folder / f".{name}.{uuid.uuid4().hex[:8]}.part"
        with explained(self.url):
            try:
                with self.fs.open(key, "rb", block_size=_AHEAD) as source, part.open("wb") as target:
                    while chunk := source.read(_CHUNK):
                        target.write(chunk)
                        digest.update(chunk)
                        advance(len(chunk))
            except FileNotFoundError:
                return f"{self.url}/{key} is missing"
        if digest.hexdigest() != sha256:
            part.unlink()
            return f"{self.url}/{key}: its SHA-256 does not match the manifest: the object is damaged"
        part.replace(folder / name)
        return ""

    def fetch_file(self, folder: Path, name: str, record: Any, claim: str) -> str:
        """Copy a file of a step into the step's folder. Returns its problem."""
        return self.fetch(key_of(folder.name, claim, name), folder, record.bytes, record.sha256)

    def fetch_run(self, folder: Path, *, newest: bool = True) -> tuple[dict[str, bytes], list[str]]:
        """Copy the small files of a run, and manifest and state of each complete step, into its folder.

        Args:
            newest: keep local small files unless a later start has made those of the bucket.

        Returns:
            the manifest of each complete step, by its folder's name; and the problems of the other steps.

        Raises:
            ConfigError: the folder has a different run, which was never in a bucket.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        # the other processes of this machine wait
        with FileLock(folder.with_name(f".{folder.name}.lock")), explained(self.url):
            found: Mapping[str, Any] = self.fs.find("", detail=True)
            manifests = self.contents(filter(STEP.fullmatch, found))
            source = max((m[0] for m in map(CLAIM.match, found) if m and f"{m[0]}{HISTORY}" in found), default="")
            small = self.contents(
                key for key in found if re.fullmatch(f"{source}[^/]+", key) and Path(key).suffix in SMALL
            )
            complete, problems = dict[str, bytes](), list[str]()
            for key, text in manifests.items():
                step, files = key.split("/")[1], parsed(text).get("files", {MANIFEST: {"bytes": 0}})
                keys = {key_of(step, claim_of(text), name): record["bytes"] for name, record in files.items()}
                if wrong := [each for each in keys if found.get(each, {"size": None})["size"] != keys[each]]:
                    problems.append(f"damaged: {self.url}/{wrong[0]} is missing, or has a different size")
                else:
                    complete[step] = text
            states = self.contents(key_of(step, claim_of(text), STATE) for step, text in complete.items())
            history = _content(folder / HISTORY)
            claim = max(re.findall(rb'"claim": "(\d.*?)"', history), default=b"").decode()
            if newest and source and not claim and history.split(b"\n")[0] not in small[f"{source}{HISTORY}"]:
                raise ConfigError(f"{folder} and {self.url} have different runs: choose another --run.name=NAME")
            if complete or small:
                folder.mkdir(parents=True, exist_ok=True)
            if not newest or source > f"{claim}/":
                for key, content in small.items():
                    write_durably(folder / key.removeprefix(source), content)
            for old in () if newest else folder.glob("checkpoints/step-*"):
                if old.name not in complete:  # retention has deleted it, or it is damaged
                    shutil.rmtree(old, ignore_errors=True)
            for step, text in complete.items():
                target, local = folder / "checkpoints" / step, _content(folder / "checkpoints" / step / MANIFEST)
                if text != local and claim_of(text) >= claim_of(local):  # not if a later claim has saved it here
                    shutil.rmtree(target, ignore_errors=True)  # files of two saves must not mix
                    target.mkdir(parents=True, exist_ok=True)
                    write_durably(target / STATE, states.get(key_of(step, claim_of(text), STATE), b""))
                    write_durably(target / MANIFEST, text)
        return complete, problems


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def parsed(text: bytes) -> dict[str, Any]:
    """Return a JSON object; {} if it is none, e.g. because it is cut off."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(text))
    return {}


def claim_of(manifest: bytes) -> str:
    """Return the claim under which a step was saved; empty without `run.remote`. Later ones compare higher."""
    return str(parsed(manifest).get("claim", ""))


def key_of(step: str, claim: str, name: str) -> str:
    """Return the key of a file of a step."""
    return "/".join(filter(None, ("checkpoints", step, claim, name)))


def copy_of(url: str) -> Path:
    """Return a copy in the cache of prepared data, or of a run or its checkpoint.

    Raises:
        UserError: there is none, it is damaged or too large for the disk, or the URL can't be opened.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchtitan_lite"
    with explained(url):
        meta = Bucket(url).contents(["meta.json"]).get("meta.json", b"")
    return copy_of_data(url, meta, cache) if parsed(meta).get("files") else copy_of_run(url, cache / "runs")


def copy_of_run(url: str, cache: Path) -> Path:
    """Return a copy of a run or of its checkpoint. `storage.verify` fetches the large files."""
    run, _, step = url.rstrip("/").partition("/checkpoints/")
    folder = cache / hashlib.sha256(run.encode()).hexdigest()[:16] / run.rpartition("/")[2]
    _, problems = Bucket(run).fetch_run(folder, newest=False)
    if not (found := folder / "checkpoints" / step if step else folder).is_dir():
        raise CheckpointError("\n  ".join([f"{url}: no run, complete checkpoint or prepared data is there", *problems]))
    write_durably(folder / ".bucket", run.encode())
    return found


def copy_of_data(url: str, meta: bytes, cache: Path) -> Path:
    """Return a copy of a prepared folder, fetched once and verified by the hashes in its meta.json."""
    folder, files = cache / f"{hashlib.sha256(meta).hexdigest()[:16]}-copy", parsed(meta)["files"]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # the other processes of this machine wait
        for left in folder.glob(".*.part"):  # of a process that was killed
            left.unlink()
        lacking = {name: record for name, record in files.items() if not (folder / name).is_file()}
        n_bytes = sum(record["bytes"] for record in lacking.values())
        with tqdm(total=n_bytes, unit="B", unit_scale=True, desc=f"fetching {url}", disable=not n_bytes) as bar:
            for name, record in lacking.items():
                if problem := Bucket(url).fetch(name, folder, record["bytes"], record["sha256"], bar.update):
                    raise DataError(problem)
        write_durably(folder / "meta.json", meta)
    return folder
