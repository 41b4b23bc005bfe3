"""A run that lives in a bucket (`run.remote`): claims, uploads, and the start from it. bucket.py has the keys.

Each start takes a claim: the next number, created as one object and renewed every minute. A start is refused while a
different job renews the newest claim. A run whose claim is no longer the newest stops at its next save, for good.
Until then it can harm nothing: its files lie under its own claim, a manifest is only replaced by one of a later claim,
and it deletes only while its claim is the newest.

One process per machine uploads the files that its ranks wrote. When all have reported through the store, rank 0 creates
the manifest, which commits the step.
"""

import contextlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchtitan_lite import progress
from torchtitan_lite.bucket import (
    CLAIM,
    HISTORY,
    MANIFEST,
    SMALL,
    STEP,
    Bucket,
    claim_of,
    explained,
    key_of,
    parsed,
)
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.exchange import on_all, on_rank0
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import BusyError, ConfigError, SaveError, text_of
from torchtitan_lite.terminal import size

RENEW_S, STALE_S = 60.0, 300.0  # a claim is renewed this often, and given up after this long
PAUSES_S = 1, 2, 4, 8, 16, 32, 64  # between the tries of an upload

Keep = Callable[[list[int]], set[int]]  # returns which of the bucket's steps retention keeps


class Remote:
    """The bucket of a run, on every rank. Collective: every rank creates one, and so takes the next claim.

    Args:
        job: torchrun's id, see run_folder.job.
        saved_under: returns the claim under which a run made a step; None if unknown.

    Raises:
        UserError: on every rank: the bucket can't be used, or a different job trains the run.
    """

    def __init__(
        self, config: Config, process: Process, job: str, saved_under: Callable[[Path, int], str | None]
    ) -> None:
        assert process.store is not None
        self.bucket = Bucket(config.url)
        self.folder, self.leads = config.folder, local_rank() == 0  # whether this process uploads
        self._process, self._saved_under = process, saved_under
        self._store = process.store.clone()  # type: ignore[attr-defined]  # a blocked thread must not block the others
        self._store.set_timeout(timedelta(days=30))
        self._about = {"id": uuid.uuid4().hex[:8], "host": socket.gethostname(), "folder": str(self.folder.absolute())}
        self._about |= {"job": job, "by": f"a process on {self._about['host']}, job {job}"}
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._pool = futures.ThreadPoolExecutor(1, "upload")
        self._upload: futures.Future[float] | None = None  # the seconds that it took
        self._step, self._n_bytes, self._putting = 0, 0, False  # of the upload; whether this machine's part goes on
        self._rate = 0.0  # bytes per second of the last upload
        self._steps: dict[str, str] = {}  # the bucket's complete steps, and their claims
        self._probes = set[str]()  # at the last upload
        self._everywhere = set[str]()  # the hashes of the manifests that all machines have
        self._leaders = [
            rank
            for rank, leads in enumerate(on_all(lambda: self.leads and bool(self.bucket.now()), process.untimed))
            if leads
        ]
        self.claim: str = on_rank0(self._take_claim, process.untimed)

    # --- claims -------------------------------------------------------------------------------------------------

    def _newest_claim(self) -> tuple[str, dict[str, Any]]:
        key = max(self.bucket.fs.find("claims"), default="")
        return key, parsed(self.bucket.fs.cat_file(key)) if key else {"ended": True}

    def _take_claim(self) -> str:
        with explained(self.bucket.url):
            taken = False
            while not taken:
                key, about = self._newest_claim()
                self._require_free(key, about)
                self.claim = f"{int(key[-8:] or 0) + 1:08d}-{self._about['id']}"
                taken = self.bucket.create(f"claims/{self.claim[:8]}", self._content())
        threading.Thread(target=self._renew, name="claim", daemon=True).start()
        return self.claim

    def _require_free(self, key: str, about: Mapping[str, Any]) -> None:
        """Raise BusyError if a different job renews the newest claim."""
        here = all(about.get(key) == self._about[key] for key in ("host", "folder"))  # its lock is free: it ended
        if about.get("ended") or here or about.get("job") == self._about["job"] != "none":
            return
        seen = self.bucket.fs.modified(key)
        if (self.bucket.now() - seen).total_seconds() < STALE_S:  # the machines' own clocks may differ
            raise BusyError(
                f"{self.bucket.url} is being used by {about.get('by')}, last seen at {seen:%H:%M:%S %Z}; "
                "wait for it (after a kill: five minutes), or choose another --run.name=NAME"
            )

    def _content(self) -> bytes:
        return json.dumps({**self._about, "time": round(time.time(), 3), "ended": self._ended.is_set()}).encode()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            self._write_claim()

    def _write_claim(self) -> None:
        with self._writing, contextlib.suppress(Exception):  # else it becomes stale
            self.bucket.fs.pipe_file(f"claims/{self.claim[:8]}", self._content())

    def require_newest(self) -> None:
        """Check on rank 0 that no other start has taken a later claim. If the bucket does not answer, the upload fails.

        Raises:
            ConfigError: one has.
        """
        newest = dict[str, Any]()
        with contextlib.suppress(Exception):
            _, newest = self._newest_claim()
        if newest and newest.get("id") != self._about["id"]:
            self._ended.set()
            raise ConfigError(
                f"{newest.get('by')} has taken over the run in {self.bucket.url}: this one stops without saving"
            )

    def close(self) -> None:
        """Upload the run's small files, and end the claim."""
        if self._process.rank == 0 and not self._ended.is_set():
            with contextlib.suppress(Exception):
                self.upload_small_files()
            self._ended.set()
            self._write_claim()

    # --- uploads ------------------------------------------------------------------------------------------------

    def upload(self, folder: Path, n_bytes: int, keep: Keep) -> None:
        """Begin to upload this machine's files of a committed step. Every machine that has some calls it.

        Args:
            n_bytes: of all machines' files, for the log.
        """
        self._step, self._n_bytes = _number(folder.name), n_bytes
        self._upload = self._pool.submit(self._upload_and_commit, folder, keep)

    def _upload_and_commit(self, folder: Path, keep: Keep) -> float:
        began, report, error = time.perf_counter(), f"torchtitan_lite/{self.claim}/{folder.name}/{{}}", ""
        self._putting = True
        try:
            manifest = storage.read_manifest(folder)
            for name in (name for name in manifest.files if (folder / name).is_file()):
                key = key_of(folder.name, manifest.claim, name)
                self._retried(self.bucket.fs.put_file, str(folder / name), key)
        except Exception as failed:
            error = text_of(failed)
        self._store.set(report.format(self._process.rank), error)
        self._putting = False
        if self._process.rank == 0:
            machines = self._leaders if not error and manifest.state_dict == "sharded" else [0]
            if error := "; ".join(filter(None, (self._store.get(report.format(n)).decode() for n in machines))):
                raise SaveError(error)
            self.require_newest()
            if not self._retried(self._commit, folder):
                raise SaveError(f"{self.bucket.url} has this step of a later start of the run")
            self._rate = self._n_bytes / (time.perf_counter() - began)
            with contextlib.suppress(Exception):  # the next upload does both
                self.upload_small_files()
                self.require_newest()  # a start that did not see this step may need older ones
                self._delete_old(keep)
            self._steps[folder.name] = manifest.claim
        return time.perf_counter() - began

    def _retried(self, action: Callable[..., Any], *args: Any) -> Any:
        for pause in PAUSES_S:
            with contextlib.suppress(Exception):
                return action(*args)
            time.sleep(pause)
        with explained(self.bucket.url):
            return action(*args)

    def _commit(self, folder: Path) -> bool:
        """Create the manifest. One of an earlier claim is damaged, or of a run that was displaced: replace it."""
        key, text = f"checkpoints/{folder.name}/{MANIFEST}", (folder / MANIFEST).read_bytes()
        if not self.bucket.create(key, text) and claim_of(self.bucket.fs.cat_file(key)) < self.claim:
            self.bucket.fs.rm_file(key)
        return self.bucket.create(key, text)

    def upload_small_files(self) -> None:
        """Upload config, metrics, log and the like, on rank 0. The attempts are last: they tell that all are there."""
        for file in sorted(self.folder.iterdir(), key=lambda file: file.name == HISTORY):
            if file.suffix in SMALL and not file.name.startswith("."):
                self.bucket.fs.pipe_file(f"{self.claim}/{file.name}", file.read_bytes())

    def _delete_old(self, keep: Keep) -> None:
        """Apply retention, manifests first; then delete all files of this and earlier claims that no manifest names."""
        fs = self.bucket.fs
        found = fs.find("")
        steps = {_number(match[1]): match[0] for match in map(STEP.fullmatch, found) if match}
        kept = {steps.pop(step) for step in keep(sorted(steps)) if step in steps}
        for key in steps.values():
            fs.rm_file(key)
        named = {f"{self.claim}/", *(f"{key.rpartition('/')[0]}/{claim_of(fs.cat_file(key))}/" for key in kept)}
        gone = (*self._probes, *(key.removesuffix(MANIFEST) for key in steps.values()))
        self._probes = {key for key in found if key.startswith("probes/")}  # if still there next time: of a kill
        for key, claimed in zip(found, map(CLAIM.match, found), strict=True):
            unnamed = claimed and claimed[0] not in named and claimed[1] <= self.claim[:8]
            if (unnamed or key.startswith(gone)) and key not in steps.values():  # those are gone
                fs.rm_file(key)

    def report(self, log: Any, *, wait: bool = False) -> str:
        """Log an upload that has ended. If it waits, that is collective, and returns the error.

        Args:
            log: run.metrics.Log.
        """
        began = time.perf_counter()
        if wait and self.uploading():
            log.info(self._waiting_line())
        done = on_all(lambda: self._outcome(wait=True), self._process.untimed)[0] if wait else self._outcome()
        if not done:
            return ""
        log.record(done)
        if error := str(done.get("upload_error", "")):
            log.info(f"NOT IN THE BUCKET  step {done['step']}: {error}; the next save tries again")
            return f"step {done['step']} is not in the bucket: {error}" if wait else ""
        waited_s = time.perf_counter() - began
        paused = f", training paused for {waited_s:.1f} s" if waited_s > 0.1 else ""
        log.info(
            f"bucket  step {done['step']} is in {self.bucket.url}  "
            f"({done['upload_bytes'] / 2**20:.1f} MiB, {done['upload_s']:.1f} s{paused})"
        )
        return ""

    def uploading(self) -> bool:
        """Return whether an upload goes on, which reads its step's files."""
        return bool(self._upload and not self._upload.done())

    def _waiting_line(self) -> str:
        """Describe the upload that is going on, on rank 0."""
        newest = max(map(_number, self._steps), default=0)
        about = f", about {self._n_bytes / self._rate:.0f} s" if self._rate else ""
        until = f"until then the newest step in the bucket is {newest}" if newest else "the bucket has no step yet"
        return f"uploading step {self._step}, {size(self._n_bytes)}{about}; {until}"

    def _wait(self) -> None:
        """Wait for the upload. While a machine uploads, that is progress, however slow."""
        while self._upload and not self._upload.done():
            with progress.working(f"uploading step {self._step}"):
                futures.wait([self._upload], timeout=1)
                progress.advance(self._putting)

    def _outcome(self, *, wait: bool = False) -> dict[str, Any]:
        """Return the record of an upload that has ended, once; {} if there is none."""
        if wait:
            self._wait()
        if self._upload is None or not self._upload.done():
            return {}
        upload, self._upload = self._upload, None
        if error := upload.exception():
            return {"step": self._step, "upload_error": str(error) or repr(error)}
        return {"step": self._step, "upload_s": upload.result(), "upload_bytes": self._n_bytes}

    # --- starting from the bucket -------------------------------------------------------------------------------

    def refresh(self) -> list[str]:
        """Fetch small files and manifests again, now that the run is claimed. Returns problems of steps. Collective."""

        def fetch() -> tuple[dict[str, str], list[str], list[str]]:
            for left in self.folder.glob("checkpoints/*/.*.part") if self.leads else ():  # of a fetch that was killed
                left.unlink()
            steps, problems = self.bucket.fetch_run(self.folder) if self.leads else ({}, [])
            return (
                {name: claim_of(text) for name, text in steps.items()},
                problems,
                [parsed(file.read_bytes()).get("sha256", "") for file in self.folder.glob(f"checkpoints/*/{MANIFEST}")],
            )

        fetched = on_all(fetch, self._process.untimed)
        self._steps, problems, _ = fetched[0]
        self._everywhere = set.intersection(*({*fetched[rank][2]} for rank in self._leaders))
        if pending := on_rank0(self._pending, self._process.untimed):
            folder = self.folder / "checkpoints" / pending
            if self.leads and folder.is_dir():
                self.upload(folder, storage.read_manifest(folder).bytes, lambda steps: {*steps})
            on_all(self._wait, self._process.untimed)
        return problems

    def _pending(self) -> str:
        """Return the run's newest step if only the disks have it: a machine may need files that others wrote."""
        folders = (self.folder / "checkpoints").glob(f"step-*/{MANIFEST}")
        local = max((file.parent.name for file in folders if self.counts(file.parent)), default="")
        return local if local > max(self._steps, default="") else ""

    def counts(self, folder: Path) -> bool:
        """Return whether a step is of the run's history, not repeated by a later attempt, and not lost with a disk."""
        about = parsed((folder / MANIFEST).read_bytes())
        here = about.get("state_dict") == "full" or about.get("sha256") in self._everywhere
        return here and self._saved_under(self.folder, _number(folder.name)) in (None, about.get("claim", ""))


def _number(step: str) -> int:
    return int(step.removeprefix("step-"))
