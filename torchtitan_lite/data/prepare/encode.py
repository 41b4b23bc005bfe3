"""A corpus and a tokenizer -> a prepared folder: on all cores, in constant memory, and after a kill from where it was.

1. Chunks are read in order (readers.py), encoded by worker processes (worker.py), and written in order by this one.
2. All is written to OUT.partial. After a kill its files are cut to where they were when progress.json was written, and
   it goes on with the next chunk (writer.py): the result is the same, byte for byte.
3. At the end everything is hashed, meta.json is written, and the folder is renamed. Half a data set is never taken for
   a whole one.
"""

import collections
import contextlib
import json
import queue
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from torchtitan_lite.config.derive import usable_cores
from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare import content, worker
from torchtitan_lite.data.prepare import plan as plan_module
from torchtitan_lite.data.prepare.corpus import Corpus, stat_of
from torchtitan_lite.data.prepare.plan import Options, plan_of
from torchtitan_lite.data.prepare.readers import Chunk, Problem, chunks
from torchtitan_lite.data.prepare.writer import Progress, Writer, read_progress
from torchtitan_lite.data.token_files import Meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import sync_folder, write_durably

_SMALL = 4 << 20  # bytes; less text is encoded before another process has started
_LISTED = 1000  # skipped texts that meta.json names

Advance = Callable[[int], None]  # is told how many bytes of the files were done


def encode(
    corpus: Corpus, tokenizer: Tokenizer, job: plan_module.Job, out: Path, options: Options, advance: Advance
) -> Meta:
    """Make the prepared folder `out`, or go on making it.

    Raises:
        DataError: a text that can't be used (with `on_error` "stop"), or too few of them.
        WorkerError: a worker was killed.
    """
    beside = partial_folder(out)
    plan = plan_of(corpus, job, options)
    beside.mkdir(parents=True, exist_ok=True)
    if (finished := _finished(beside, plan)) is not None:
        require_complete(beside, finished.skipped, options)
        beside.rename(out)
        return finished
    itemsize = np.dtype(metas.token_dtype(job.vocab_size)).itemsize
    progress = read_progress(beside, plan, itemsize, options.shard_tokens)
    require_complete(beside, progress.skipped, options)
    writer = Writer(beside, job, options.shard_tokens, progress)
    try:
        done_before = sum(stat_of(file).st_size for file in corpus.files[: progress.file])
        advance(done_before)
        for chunk, result in _results(corpus, job, options, progress):
            if result.problems and options.on_error == "stop":
                raise refusal(corpus.files[chunk.file], result.problems[0])
            writer.add(chunk, result, corpus)
            done = done_before + chunk.read_bytes
            advance(done)
            if chunk.last:
                done_before = done
        writer.commit()
        if plan_of(corpus, job, options) != plan:
            raise DataError(
                "the text was changed while it was being read; the same command begins again with the new one"
            )
        content.require_unchanged(corpus)
        meta = _finish(beside, job, progress, options, bpe.sha256(tokenizer))
    except DataError as error:
        if not options.keep_partial and not isinstance(error, worker.WorkerError):
            writer.close()
            shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        writer.close()
    beside.rename(out)
    sync_folder(out.parent)
    return meta


def partial_folder(out: Path) -> Path:
    """Where `out` is made."""
    return out.with_name(f"{out.name}.partial")


def _finished(folder: Path, plan: str) -> Meta | None:
    """What was killed just before the folder got its name."""
    if (folder / "progress.json").exists() or not (folder / "meta.json").exists():
        return None
    with contextlib.suppress(DataError):
        meta = metas.read_meta(folder)
        return meta if meta.made_from == plan else None
    return None


def require_complete(folder: Path, skipped: dict[str, int], options: Options) -> None:
    """Refuse to go on with a folder that texts were left out of by an earlier command, if this one would stop at them.

    Raises:
        DataError: it names the first of them.
    """
    if skipped and options.on_error == "stop":
        with (folder / "skipped.log").open(encoding="utf-8") as stream:
            first = json.loads(stream.readline())
        problem = Problem(first["place"], "", first["detail"])
        raise DataError(
            f"{problem.of(first['file'])}; an earlier command left it out of {folder}, with --on-error skip: correct "
            "the text or take it out, or give --on-error skip again"
        )


def refusal(file: Path, problem: Problem) -> DataError:
    """The error that stops the preparation at a text that can't be used."""
    return DataError(
        f"{problem.of(file)}; correct it or take it out, or have it left out by "
        "`python -m torchtitan_lite.data.prepare ... --on-error skip`"
    )


# --- encoding in parallel ---------------------------------------------------------------------------------------


def _results(corpus: Corpus, job: plan_module.Job, options: Options, progress: Progress) -> Iterator[tuple[Chunk, Any]]:
    """The chunks that are not done yet, and their results, in order."""
    todo = (
        chunk
        for chunk in chunks(corpus, options.max_document_bytes, progress.file)
        if (chunk.file, chunk.number) >= (progress.file, progress.chunk)
    )
    n_workers = options.workers or (0 if corpus.size() < _SMALL else usable_cores())
    if not n_workers:
        literal = worker.load(job)
        for chunk in todo:
            yield chunk, worker.encode(chunk, job, literal)
        return
    idle: queue.SimpleQueue[worker.Worker] = queue.SimpleQueue()
    workers = [worker.Worker(job) for _ in range(n_workers)]
    for one in workers:
        idle.put(one)

    def by_any(chunk: Chunk) -> worker.Result:
        one = idle.get()
        try:
            return one.encode(chunk)
        finally:
            idle.put(one)

    pool = ThreadPoolExecutor(n_workers)
    waiting: collections.deque[tuple[Chunk, Future[worker.Result]]] = collections.deque()
    try:
        for chunk in todo:
            waiting.append((chunk, pool.submit(by_any, chunk)))
            if len(waiting) > 2 * n_workers:  # enough for nobody to wait, and few enough for the memory
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
        pool.shutdown()
        for one in workers:
            one.close()


def _finish(folder: Path, job: plan_module.Job, progress: Progress, options: Options, tokenizer_sha256: str) -> Meta:
    train, val = progress.documents
    if train + val < 2:
        raise DataError(f"the text has {train + val} documents; it takes at least 2, to train and to validate")
    if not train or not val:
        raise DataError(
            "all of the text was held out; use more text, or a smaller data.val_fraction"
            if val
            else "none of the text was held out; use more text, or a larger data.val_fraction"
        )
    names = ["tokenizer.json", *(f"{split}.idx" for split in metas.SPLITS)]
    for split, tokens in zip(metas.SPLITS, progress.tokens, strict=True):
        names += [metas.shard_name(split, i) for i in range(len(metas.shard_lengths(tokens, options.shard_tokens)))]
    skipped_first: list[str] = []
    if progress.skipped:
        names.append("skipped.log")
        with (folder / "skipped.log").open(encoding="utf-8") as stream:
            for _, line in zip(range(_LISTED), stream, strict=False):
                problem = json.loads(line)
                skipped_first.append(Problem(problem["place"], "", problem["detail"]).of(problem["file"]))
    else:
        (folder / "skipped.log").unlink()
    files = metas.all_files(folder, names)
    meta = Meta(
        format_version=metas.FORMAT_VERSION,
        documents=train + val,
        val_documents=val,
        text_bytes=sum(progress.text_bytes),
        val_text_bytes=progress.text_bytes[1],
        train_tokens=progress.tokens[0],
        val_tokens=progress.tokens[1],
        unknown_tokens=progress.unknown_tokens,
        vocab_size=job.vocab_size,
        end_token=job.end_token,
        shard_tokens=options.shard_tokens,
        tokenizer_sha256=tokenizer_sha256,
        tokens_sha256=metas.identity(files),
        made_from=progress.plan,
        files=files,
        skipped=dict(sorted(progress.skipped.items())),
        skipped_first=skipped_first,
    )
    if wrong := metas.wrong_documents(folder, meta):
        (folder / "progress.json").unlink()  # the next one begins again
        raise DataError(
            f"{folder}: what was written is not what the disk has now: {wrong[0]}; the same command begins again"
        )
    write_durably(folder / "meta.json", (json.dumps(asdict(meta), indent=2) + "\n").encode())
    (folder / "progress.json").unlink()
    sync_folder(folder)
    return meta
