"""Encodes a corpus into a prepared folder: on all cores, in constant memory, resumable.

1. Chunks are read in order (readers.py), encoded by worker processes (worker.py), and written in order to OUT.partial.
   So the result does not depend on the number of workers.
2. After a kill, the files are truncated to the last commit in progress.json, and encoding resumes with the next chunk
   (writer.py). The result is byte-identical.
3. At the end all files are hashed, meta.json is written, and the folder is renamed.
"""

import collections
import contextlib
import json
import queue
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare import corpus as corpora
from torchtitan_lite.data.prepare import plan as plan_module
from torchtitan_lite.data.prepare import summary, worker
from torchtitan_lite.data.prepare.corpus import Corpus, stat_of
from torchtitan_lite.data.prepare.plan import Options, plan_of
from torchtitan_lite.data.prepare.readers import Chunk, Problem, chunks, refusal
from torchtitan_lite.data.prepare.writer import Progress, Writer, read_progress, write_origins
from torchtitan_lite.data.token_files import Meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import sync_folder, write_durably
from torchtitan_lite.process import usable_cores
from torchtitan_lite.terminal import counted

_SMALL = 4 << 20  # bytes; less text is encoded faster than a worker starts
_LISTED = 1000  # maximum number of skipped texts in meta.json


def encode(corpus: Corpus, tokenizer: Tokenizer, job: plan_module.Job, out: Path, options: Options) -> Meta:
    """Create the prepared folder `out`, or resume creating it.

    Raises:
        DataError: a text is unusable (with `on_error` "stop"), or there are too few.
        WorkerError: a worker was killed.
    """
    partial = partial_folder(out)
    plan = plan_of(corpus, job, options)
    partial.mkdir(parents=True, exist_ok=True)
    if (finished := _finished(partial, plan)) is not None:
        require_complete(partial, finished.skipped, options)
        partial.rename(out)
        return finished
    itemsize = np.dtype(metas.token_dtype(job.vocab_size)).itemsize
    progress = read_progress(partial, plan, itemsize, options.shard_tokens)
    require_complete(partial, progress.skipped, options)
    writer = Writer(partial, job, options.shard_tokens, progress)
    try:
        done = sum(stat_of(file).st_size for file in corpus.files[: progress.file])  # bytes of complete files
        with tqdm(total=corpus.size(), initial=done, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            for chunk, result in _results(corpus, job, options, progress):
                if result.problems and options.on_error == "stop":
                    raise refusal(corpus.files[chunk.file], result.problems[0])
                writer.add(chunk, result, corpus)
                bar.update(done + chunk.read_bytes - bar.n)
                if chunk.last:
                    done += chunk.read_bytes
        writer.commit()
        if plan_of(corpus, job, options) != plan or not corpora.is_unchanged(corpus):
            raise DataError(corpora.CHANGED)
        write_origins(partial, corpus)
        meta = _finish(partial, job, progress, options, bpe.sha256(tokenizer))
    except DataError as error:
        if not options.keep_partial and not isinstance(error, worker.WorkerError):
            writer.close()
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        writer.close()
    partial.rename(out)
    sync_folder(out.parent)
    return meta


def partial_folder(out: Path) -> Path:
    """The temporary folder of `out`."""
    return out.with_name(f"{out.name}.partial")


def _finished(folder: Path, plan: str) -> Meta | None:
    """The meta of a folder that is complete, but was not renamed before a kill."""
    if (folder / "progress.json").exists() or not (folder / "meta.json").exists():
        return None
    with contextlib.suppress(DataError):
        meta = metas.read_meta(folder)
        return meta if meta.made_from == plan else None
    return None


def require_complete(folder: Path, skipped: dict[str, int], options: Options) -> None:
    """
    Raises:
        DataError: an earlier command skipped texts, and this one has `on_error` "stop".
    """
    if skipped and options.on_error == "stop":
        with (folder / "skipped.log").open(encoding="utf-8") as stream:
            first = json.loads(stream.readline())
        problem = Problem(first["place"], "", first["detail"])
        raise DataError(
            f"{problem.of(first['file'])}; an earlier command left it out of {folder}, with --on-error skip: correct "
            "or remove the text, or pass --on-error skip again"
        )


# --- encoding in parallel ---------------------------------------------------------------------------------------


def _results(
    corpus: Corpus, job: plan_module.Job, options: Options, progress: Progress
) -> Iterator[tuple[Chunk, worker.Result]]:
    """The remaining chunks and their results, in order."""
    remaining = (
        chunk
        for chunk in chunks(corpus, options.max_document_bytes, progress.file)
        if (chunk.file, chunk.number) >= (progress.file, progress.chunk)
    )
    n_workers = options.workers or (0 if corpus.size() < _SMALL else usable_cores())
    if not n_workers:
        encoder = worker.load(job)
        for chunk in remaining:
            yield chunk, worker.encode(chunk, job, encoder)
        return
    workers = [worker.Worker(job) for _ in range(n_workers)]
    idle: queue.SimpleQueue[worker.Worker] = queue.SimpleQueue()
    for process in workers:
        idle.put(process)

    def encode_chunk(chunk: Chunk) -> worker.Result:
        process = idle.get()
        try:
            return process.encode(chunk)
        finally:
            idle.put(process)

    pool = ThreadPoolExecutor(n_workers)  # a thread waits for each process
    pending: collections.deque[tuple[Chunk, Future[worker.Result]]] = collections.deque()
    try:
        for chunk in remaining:
            pending.append((chunk, pool.submit(encode_chunk, chunk)))
            if len(pending) > 2 * n_workers:  # keeps all workers busy, and bounds the memory
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for process in workers:
            process.close()


def _finish(folder: Path, job: plan_module.Job, progress: Progress, options: Options, tokenizer_sha256: str) -> Meta:
    train, val = progress.documents
    if train + val < 2:
        raise DataError(
            f"the text has {counted(train + val, 'document')}; at least 2 are needed, to train and to validate"
        )
    if not train or not val:
        raise DataError(
            "all of the text was held out; use more text, or a smaller data.val_fraction"
            if val
            else "none of the text was held out; use more text, or a larger data.val_fraction"
        )
    names = ["tokenizer.json", *[metas.PAIRS] * bool(job.target_key), *(f"{split}.idx" for split in metas.SPLITS)]
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
    files = summary.all_files(folder, names)
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
        tokens_sha256=summary.identity(files),
        made_from=progress.plan,
        files=files,
        skipped=dict(sorted(progress.skipped.items())),
        skipped_first=skipped_first,
    )
    if problems := summary.wrong_documents(folder, meta):
        (folder / "progress.json").unlink()  # the next run starts over
        raise DataError(
            f"{folder}: the files differ from what was written: {problems[0]}; run the same command again to start over"
        )
    write_durably(folder / "meta.json", (json.dumps(asdict(meta), indent=2) + "\n").encode())
    (folder / "progress.json").unlink()
    sync_folder(folder)
    return meta
