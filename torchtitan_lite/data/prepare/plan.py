"""What decides how text is prepared: the options, the job of a worker, the marks of documents, and their hash.

Reading this does not load a text reader or an encoder: a run whose data is prepared needs neither.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data.prepare.corpus import Corpus

SHARD_TOKENS = 1 << 28
MARKS = 2**64  # of documents: their hashes
MAX_DOCUMENT_BYTES = 16 << 20
CHUNK_BYTES = 512 * 1024  # bytes of text that a worker gets at a time
CHUNK_DOCUMENTS = 4096  # at most


@dataclass(frozen=True)
class Job:
    """What is the same for all chunks."""

    tokenizer: str  # the content of a tokenizer.json
    vocab_size: int
    end_token: int
    text_key: str
    held_out_below: int  # documents whose mark is below this are for validation
    unknown: int = -1  # the entry for what the vocabulary does not have; -1: there is none


@dataclass(frozen=True)
class Options:
    """How to prepare."""

    on_error: Literal["stop", "skip"] = "stop"
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    workers: int = 0  # processes; 0: one per usable core, or none for a small corpus
    shard_tokens: int = SHARD_TOKENS
    keep_partial: bool = False  # after an error: whoever calls again with --on-error skip goes on from there


def plan_of(corpus: Corpus, job: Job, options: Options) -> str:
    """A hash of all that decides the result (of a text without problems `on_error` does not)."""
    decides = [
        *(metas.FORMAT_VERSION, corpus.identity(), corpus.text_key, corpus.python_source),
        *(hashlib.sha256(job.tokenizer.encode()).hexdigest(), job.end_token, job.held_out_below),
        *(options.max_document_bytes, options.shard_tokens, CHUNK_BYTES, CHUNK_DOCUMENTS),
    ]
    definition = json.loads(job.tokenizer)
    special = {entry["id"] for entry in definition.get("added_tokens", []) if entry.get("special")}
    if definition["model"]["type"] != "BPE" or job.end_token not in special:
        decides.append("literal text 1")  # an older version let text of these tokenizers become the end mark
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def mark(text: bytes) -> int:
    """A hash of a document, 0 <= mark < 2^64: it decides the split, and stays the same when others are added."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8])
