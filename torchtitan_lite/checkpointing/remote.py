"""A run that lives in a bucket (`run.remote`): claims, uploads, and the start from it. bucket.py has the keys.

Each start takes a claim: the next number, created as one object and renewed every minute. A start is refused while a
different job renews the newest claim. A run whose claim is no longer the newest stops at its next save. Until then it
can harm nothing: its files lie under its own claim, and a manifest is only replaced by one of a later claim.

One process per machine uploads the files that its ranks wrote. When all have reported through the store, rank 0 creates
the manifest, which commits the step.
"""

import contextlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from torchtitan_lite import progress
from torchtitan_lite.bucket import CLAIM, SMALL, STEP, Bucket, claim_of, explained, key_of, parsed
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.shards import Layout, Reads
from torchtitan_lite.checkpointing.storage import MANIFEST, STATE
from torchtitan_lite.checkpointing.tensor_names import Tensors
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.exchange import gather, on_all, on_rank0
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import BusyError, ConfigError, SaveError, StuckError, text_of
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
        self.bucket = Bucket(f"{config.run.remote.rstrip('/')}/{config.run.name}")
        self.folder, self.leads = config.folder, local_rank() == 0  # whether this process uploads
        self._process, self._saved_under = process, saved_under
        self._store = process.store.clone()  # type: ignore[attr-defined]  # a blocked thread must not block the others
        self._store.set_timeout(timedelta(days=30))
        where = {"host": socket.gethostname(), "folder": str(self.folder.absolute())}
        self._about = {"id": uuid.uuid4().hex[:8], **where, "job": job}
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._pool = futures.ThreadPoolExecutor(1, "upload")
        self._upload: futures.Future[float] | None = None  # the seconds that it took
        self._uploading = 0, 0  # step and bytes
        self._rate = 0.0  # bytes per second of the last upload
        self._steps: dict[str, str] = {}  # the bucket's complete steps, and their claims
        self._only_here: tuple[Path, list[str]] | None = None  # the loaded step, if it is not in the bucket; its files
        on_all(lambda: self.leads and str(self._now()), process.untimed)
        self._leaders = [rank for rank, leads in enumerate(gather(self.leads, process.untimed)) if leads]
        self.claim: str = on_rank0(self._take_claim, process.untimed)

    # --- claims -------------------------------------------------------------------------------------------------

    def _now(self) -> datetime:
        """Return the time by the storage's clock. Creates, reads and removes an object, which needs all rights."""
        key = f"probes/{uuid.uuid4().hex}"
        with explained(self.bucket.url):
            self.bucket.fs.pipe_file(key, b"can this be written, read and removed?")
            self.bucket.fs.cat_file(key)
            moment: datetime = self.bucket.fs.modified(key)
            self.bucket.fs.rm_file(key)
        return moment

    def _create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one. Returns whether it now has this content."""
        with contextlib.suppress(FileExistsError):
            self.bucket.fs.pipe_file(key, content, mode="create")
        return bool(self.bucket.fs.cat_file(key) == content)

    def _claims(self) -> list[tuple[str, dict[str, Any], datetime]]:
        """Return key, content and time of renewal of the newest claims, oldest first."""
        fs = self.bucket.fs
        return [(key, parsed(fs.cat_file(key)), fs.modified(key)) for key in fs.find("claims")[-8:]]

    def _take_claim(self) -> str:
        with explained(self.bucket.url):
            taken = False
            while not taken:
                claims = self._claims()
                self._require_free(claims)
                number = int(claims[-1][0][-8:]) + 1 if claims else 1
                self.claim = f"{number:08d}-{self._about['id']}"
                taken = self._create(f"claims/{number:08d}", self._content())
        threading.Thread(target=self._renew, name="claim", daemon=True).start()
        return self.claim

    def _require_free(self, claims: Sequence[tuple[str, dict[str, Any], datetime]]) -> None:
        """Raise BusyError if a different job trains the run, or if two jobs with one id displaced each other."""
        now = self._now()  # the machines' own clocks may differ
        recent = [about for _, about, at in claims if (now - at).total_seconds() < STALE_S]
        if not recent or recent[-1] != claims[-1][1] or recent[-1].get("ended"):
            return
        here = all(recent[-1].get(key) == self._about[key] for key in ("host", "folder"))  # its lock is free: it ended
        if not here and (not self._same_job(recent[-1]) or any(about.get("displaced") for about in recent)):
            raise BusyError(
                f"{self.bucket.url} is being used by {_named(recent[-1])}, last seen at {claims[-1][2]:%H:%M:%S %Z}; "
                "wait for it (after a kill: five minutes), or choose another --run.name=NAME"
            )

    def _same_job(self, about: Mapping[str, Any]) -> bool:
        return bool(about.get("job") == self._about["job"] != "none")

    def _content(self, **more: bool) -> bytes:
        return json.dumps({**self._about, "time": round(time.time(), 3), **more}).encode()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            self._write_claim()

    def _write_claim(self, **ends: bool) -> None:
        with self._writing, contextlib.suppress(Exception):  # else it becomes stale
            if ends or not self._ended.is_set():
                self.bucket.fs.pipe_file(f"claims/{self.claim[:8]}", self._content(**ends))

    def require_newest(self) -> None:
        """Check on rank 0 that no other start has taken a later claim. If the bucket does not answer, the upload fails.

        Raises:
            StuckError, ConfigError: one of the same job has; one of a different job has.
        """
        newest: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            newest = self._claims()[-1][1]
        if newest and newest.get("id") != self._about["id"]:
            self._ended.set()
            self._write_claim(displaced=True)
            raise (StuckError if self._same_job(newest) else ConfigError)(
                f"{_named(newest)} has taken over the run in {self.bucket.url}: this one stops without saving"
            )

    def close(self) -> None:
        """Upload the run's small files, and end the claim."""
        if self._process.rank == 0 and not self._ended.is_set():
            self._ended.set()
            with contextlib.suppress(Exception):
                self.upload_small_files()
            self._write_claim(ended=True)

    # --- uploads ------------------------------------------------------------------------------------------------

    def upload(self, folder: Path, names: Sequence[str], keep: Keep) -> None:
        """Begin to upload this machine's files of a committed step. Every machine that has some calls it."""
        manifest = storage.read_manifest(folder)
        self._uploading = manifest.step, manifest.bytes
        self._upload = self._pool.submit(self._upload_and_commit, folder, manifest, names, keep)

    def _upload_and_commit(self, folder: Path, manifest: storage.Manifest, names: Sequence[str], keep: Keep) -> float:
        began, report, error = time.perf_counter(), f"torchtitan_lite/{self.claim}/{folder.name}/{{}}", ""
        try:
            for name in names:
                key = key_of(folder.name, manifest.claim, name)
                self._retried(self.bucket.fs.put_file, str(folder / name), key)
        except Exception as failed:
            error = text_of(failed)
        self._store.set(report.format(self._process.rank), error)
        if self._process.rank == 0:
            machines = self._leaders if manifest.state_dict == "sharded" else [0]
            if error := "; ".join(filter(None, (self._store.get(report.format(n)).decode() for n in machines))):
                raise SaveError(error)
            self.require_newest()
            if not self._retried(self._commit, folder):
                raise SaveError(f"{self.bucket.url} has this step of a later start of the run")
            self._steps[folder.name] = manifest.claim
            self._rate = manifest.bytes / (time.perf_counter() - began)
            with contextlib.suppress(Exception):  # the next upload does both
                self.upload_small_files()
                self._delete_old(keep)
        return time.perf_counter() - began

    def _retried(self, action: Callable[..., Any], *args: Any) -> Any:
        for pause in PAUSES_S:
            with contextlib.suppress(Exception):
                return action(*args)
            time.sleep(pause)
        return action(*args)

    def _commit(self, folder: Path) -> bool:
        """Create the manifest. One of an earlier claim is damaged, or of a run that was displaced: replace it."""
        key, text = f"checkpoints/{folder.name}/{MANIFEST}", (folder / MANIFEST).read_bytes()
        if not self._create(key, text) and claim_of(self.bucket.fs.cat_file(key)) < self.claim:
            self.bucket.fs.rm_file(key)
        return self._create(key, text)

    def upload_small_files(self) -> None:
        """Upload config, attempts, metrics, log and the like, on rank 0."""
        for file in self.folder.iterdir():
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
        gone = tuple(key.removesuffix(MANIFEST) for key in steps.values())
        for key, claimed in zip(found, map(CLAIM.match, found), strict=True):
            if (claimed and claimed[0] not in named and claimed[1] <= self.claim[:8]) or key.startswith(gone):
                fs.rm_file(key)

    def before_save(self, log: Any) -> None:
        """Wait for the previous upload, and check that no other start has taken the run over. Collective."""
        self.report(log, wait=True)
        on_rank0(self.require_newest, self._process.untimed)

    def report(self, log: Any, *, wait: bool = False, ends: bool = False) -> str:
        """Log an upload that has ended. Returns its error, and does not raise it. Collective if it waits.

        Args:
            log: run.metrics.Log.
            ends: whether the process may be killed while it waits.
        """
        began, done = time.perf_counter(), self._outcome() if not wait else {}
        if ends:
            log.info(self._waiting_line())
        if wait:
            done = on_all(lambda: self._outcome(wait=True), self._process.untimed)[0]
        waited_s = time.perf_counter() - began
        if error := str(done.get("upload_error", "")):
            log.info(f"NOT IN THE BUCKET  step {done['step']}: {error}; the next save tries again")
        elif done:
            paused = f", training paused for {waited_s:.1f} s" if waited_s > 0.1 else ""
            about = f"{done['upload_bytes'] / 2**20:.1f} MiB, {done['upload_s']:.1f} s{paused}"
            log.info(f"bucket  step {done['step']} is in {self.bucket.url}  ({about})")
        if done:
            log.record(done)
        return error

    def _waiting_line(self) -> str:
        """Describe the upload that is going on, on rank 0."""
        (step, n_bytes), newest = self._uploading, max(map(_number, self._steps), default=0)
        about = f", about {n_bytes / self._rate:.0f} s" if self._rate else ""
        until = f"until then the newest step in the bucket is {newest}" if newest else "the bucket has no step yet"
        return f"uploading step {step}, {size(n_bytes)}{about}; {until}"

    def _outcome(self, *, wait: bool = False) -> dict[str, Any]:
        """Return the record of an upload that has ended, once; {} if there is none.

        Args:
            wait: for the upload. That is progress, however slow.
        """
        while wait and self._upload and not self._upload.done():
            with progress.working(f"uploading step {self._uploading[0]}"):
                futures.wait([self._upload], timeout=1)
                progress.advance(1)
        if self._upload is None or not self._upload.done():
            return {}
        upload, self._upload = self._upload, None
        record: dict[str, Any] = {"step": self._uploading[0]}
        if error := upload.exception():
            return record | {"upload_error": str(error) or repr(error)}
        return record | {"upload_s": upload.result(), "upload_bytes": self._uploading[1]}

    # --- starting from the bucket -------------------------------------------------------------------------------

    def refresh(self) -> list[str]:
        """Fetch small files and manifests again, now that the run is claimed. Returns problems of steps. Collective."""

        def fetch() -> tuple[dict[str, str], list[str]]:
            steps, problems = self.bucket.fetch_run(self.folder) if self.leads else ({}, [])
            return {name: claim_of(text) for name, text in steps.items()}, problems

        self._steps, problems = on_all(fetch, self._process.untimed)[0]
        return problems

    def counts(self, folder: Path) -> bool:
        """Return whether a step is of the run's history, not one that a later attempt repeats."""
        claim = self._saved_under(self.folder, _number(folder.name))
        return claim is None or claim == claim_of((folder / MANIFEST).read_bytes())

    def complete(self, folder: Path, mode: str, tensors: Callable[[], Tensors]) -> list[str]:
        """Verify on each machine the files that its ranks need, and fetch missing and damaged ones. Collective.

        Args:
            tensors: returns the tensors to load, by sharded state dict name.

        Returns:
            all problems, on every rank; empty if the step can be loaded.
        """
        process, own, n = self._process, local_rank(), self._process.local_world_size
        manifest, problem = storage.check_manifest(folder)
        kind, claim = on_rank0(lambda: [manifest.state_dict, manifest.claim] if manifest else ["", ""], process.untimed)
        needed = gather([] if manifest is None else self._needed(folder, manifest, tensors), process.untimed)
        names = sorted({name for each in needed[process.rank - own :][:n] for name in each})
        in_bucket = manifest is not None and self._steps.get(folder.name) == manifest.claim
        self._only_here = None if in_bucket else (folder, names)

        def verify() -> list[str]:
            if manifest is None or manifest.claim != claim:  # a full one is only on rank 0's machine
                return [] if kind == "full" and process.rank else [problem or f"{folder}: a different start saved it"]
            lacking = [each for each in names if storage.verify_file(folder, each, manifest.files[each], "size")]
            storage.require_space(folder, sum(manifest.files[each].bytes for each in lacking))
            bucket = self.bucket if in_bucket else None
            checked = (storage.intact(folder, each, manifest, mode, bucket) for each in names[own::n])
            return [problem for problem in checked if problem]

        return [problem for problems in on_all(verify, process.untimed) for problem in problems]

    def _needed(self, folder: Path, manifest: storage.Manifest, tensors: Callable[[], Tensors]) -> list[str]:
        """Return the files that this rank reads."""
        if manifest.layout is None:  # full, or of format 6
            return [*manifest.files] if self._process.rank == 0 or manifest.state_dict == "sharded" else []
        layout = Layout(**manifest.layout)
        own = {name: tensor for name, tensor in tensors().items() if name in layout.tensors}
        return [*Reads(folder, layout, own).files, *([STATE] if self.leads else [])]

    def taken_over(self, keep: Keep) -> None:
        """Upload the small files, and begin to upload the loaded step if it is only here. On all ranks."""
        on_rank0(lambda: self._retried(self.upload_small_files), self._process.untimed)
        if self._only_here and self._only_here[1] and self.leads:
            self.upload(*self._only_here, keep)


def _number(step: str) -> int:
    return int(step.removeprefix("step-"))


def _named(about: Mapping[str, Any]) -> str:
    job = f", job {about['job']}" if about.get("job", "none") != "none" else ""
    return f"a process on {about.get('host')}{job}"
