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
_HISTORY, _CHUNK, _AHEAD = "attempts.jsonl", 8 << 20, 32 << 20  # bytes hashed at a time; bytes requested at a time
_WHY = {  # by what an error says: the cause that the same command would meet again
    "ModuleNotFoundError": "its package is missing: pip install s3fs for s3://, gcsfs for gs://, adlfs for abfs://",
    "Protocol not known": "use a protocol that fsspec knows, such as s3://, gs:// or abfs://",
    "Credentials": "set the protocol's environment variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "egion": "set the region of the bucket, such as AWS_DEFAULT_REGION=eu-west-1",
    "Redirect": "set the region of the bucket, such as AWS_DEFAULT_REGION=eu-west-1",
    "FileNotFoundError": "create the bucket first",
    "PermissionError": "these credentials must be allowed to list, read, write and delete",
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
        options = {"auto_mkdir": True} if parts.scheme == "file" else {}
        with explained(url):
            fs, root = url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True, **options)
        self.fs: Any = DirFileSystem(root.rstrip("/"), fs, skip_instance_cache=True)

    def contents(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the content of objects by key, without those that retention has deleted meanwhile."""
        listed = [*keys]
        return dict(self.fs.cat(listed, on_error="omit") if listed else {})

    def fetch(self, key: str, file: Path, sha256: str, advance: Callable[[int], object] = progress.advance) -> str:
        """Copy an object into a file, hashing it meanwhile. Returns its problem; only an intact file appears."""
        part, digest = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.part"), hashlib.sha256()
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
        part.replace(file)
        return ""

    def fetch_run(self, folder: Path, *, newest: bool = True) -> tuple[dict[str, bytes], list[str]]:
        """Copy the small files of a run, and manifest and state of each complete step, into its folder.

        Args:
            newest: keep local small files unless a later attempt has made those of the bucket.

        Returns:
            the manifest of each complete step, by its folder's name; and the problems of the other steps.
        """
        with explained(self.url):
            found: Mapping[str, Any] = self.fs.find("", detail=True)
            manifests = self.contents(filter(STEP.fullmatch, found))
            source = max((m[0] for m in map(CLAIM.match, found) if m and f"{m[0]}{_HISTORY}" in found), default="")
            files = (key for key in found if re.fullmatch(f"{source}[^/]+", key))
            small = self.contents(key for key in files if Path(key).suffix in SMALL)
            complete, problems = dict[str, bytes](), list[str]()
            for key, text in manifests.items():
                step, files = key.split("/")[1], parsed(text).get("files", {"manifest.json": {"bytes": 0}})
                keys = {key_of(step, claim_of(text), name): record["bytes"] for name, record in files.items()}
                if wrong := [each for each in keys if found.get(each, {"size": None})["size"] != keys[each]]:
                    problems.append(f"damaged: {self.url}/{wrong[0]} is missing, or has a different size")
                else:
                    complete[step] = text
            if complete or small:
                folder.mkdir(parents=True, exist_ok=True)
            began = [
                text.count(b'"command"')
                for text in (small.get(f"{source}{_HISTORY}", b""), _content(folder / _HISTORY))
            ]
            if not newest or began[0] > began[1]:
                for key, content in small.items():
                    write_durably(folder / key.removeprefix(source), content)
            for step, text in complete.items():
                target = folder / "checkpoints" / step
                local = _content(target / "manifest.json")
                if text != local and claim_of(text) >= claim_of(local):  # not if a later claim has saved it here
                    target.mkdir(parents=True, exist_ok=True)
                    key, sha256 = (
                        key_of(step, claim_of(text), "state.json"),
                        parsed(text)["files"]["state.json"]["sha256"],
                    )
                    problems += filter(None, [self.fetch(key, target / "state.json", sha256)])
                    write_durably(target / "manifest.json", text)
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


def copy_of_run(url: str) -> Path:
    """Return a copy of a run or of its checkpoint in the cache. `storage.verify` fetches the large files.

    Raises:
        UserError: there is none, or the URL can't be opened.
    """
    run, _, step = url.rstrip("/").partition("/checkpoints/")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchtitan_lite/runs"
    folder = cache / hashlib.sha256(run.encode()).hexdigest()[:16] / run.rpartition("/")[2]
    complete, problems = Bucket(run).fetch_run(folder, newest=False)
    for old in folder.glob("checkpoints/step-*"):
        if old.name not in complete:  # retention has deleted it, or it is damaged
            shutil.rmtree(old, ignore_errors=True)
    if not (found := folder / "checkpoints" / step if step else folder).is_dir():
        raise CheckpointError("\n  ".join([f"{url}: there is no run and no complete checkpoint", *problems]))
    (folder / ".bucket").write_text(run)
    return found


def copy_of_data(url: str, cache: Path) -> Path:
    """Return a copy of a prepared folder, fetched once and verified by the hashes in its meta.json.

    Raises:
        DataError: it is not a prepared folder, is damaged, or is larger than the disk's free space.
    """
    bucket = Bucket(url)
    with explained(url):
        meta = bucket.contents(["meta.json"]).get("meta.json", b"")
    if not (files := parsed(meta).get("files")):
        raise DataError(f"{url}: no prepared folder is there (python -m torchtitan_lite.data.prepare makes one)")
    folder = cache / f"{hashlib.sha256(meta).hexdigest()[:16]}-copy"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # the other processes of this machine wait
        lacking = {name: record for name, record in files.items() if not (folder / name).is_file()}
        n_bytes, free = sum(record["bytes"] for record in lacking.values()), shutil.disk_usage(folder).free
        if n_bytes > free:
            raise DataError(f"{url} takes {size(n_bytes)}, but {cache} has only {size(free)} free; set data.cache_dir")
        with tqdm(total=n_bytes, unit="B", unit_scale=True, desc=f"fetching {url}", disable=not n_bytes) as bar:
            for name, record in lacking.items():
                if problem := bucket.fetch(name, folder / name, record["sha256"], bar.update):
                    raise DataError(problem)
        write_durably(folder / "meta.json", meta)
    return folder
