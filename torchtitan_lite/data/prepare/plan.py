"""The inputs of a preparation, and their hash. Imports no text reader or encoder: a cached run needs none."""

import hashlib
import json
import sys
from dataclasses import dataclass
from typing import Literal

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data.prepare.corpus import Corpus

SHARD_TOKENS = 1 << 28
HASH_RANGE = 2**64  # document_hash is below this
MAX_DOCUMENT_BYTES = 16 << 20
CHUNK_BYTES = 512 * 1024  # maximum text in a chunk
CHUNK_DOCUMENTS = 4096  # maximum documents in a chunk


@dataclass(frozen=True)
class Job:
    """The inputs of a worker that are the same for all chunks."""

    tokenizer: str  # the content of a tokenizer.json
    vocab_size: int
    end_token: int
    text_key: str
    held_out_below: int  # documents whose document_hash is below this are for validation
    unknown: int = -1  # the unknown token; -1: none
    target_key: str = ""  # pairs: text_key is that of the source; empty: one text per document
    source_prefix: str = ""
    first_held_out: int = sys.maxsize  # files from this one on are for validation


@dataclass(frozen=True)
class Options:
    """Options of a preparation."""

    on_error: Literal["stop", "skip"] = "stop"
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    workers: int = 0  # processes; 0: one per usable core, or none for a small corpus
    shard_tokens: int = SHARD_TOKENS
    keep_partial: bool = False  # after an error, so that a rerun with --on-error skip resumes


def plan_of(corpus: Corpus, job: Job, options: Options) -> str:
    """A hash of all inputs that determine the result. For text without problems, `on_error` is not one of them."""
    inputs = [
        *(metas.FORMAT_VERSION, corpus.identity(), corpus.text_key, corpus.target_key, corpus.source_prefix),
        *(sorted(corpus.text_suffixes), corpus.n_held_out, corpus.python_source),
        *(hashlib.sha256(job.tokenizer.encode()).hexdigest(), job.end_token, job.held_out_below),
        *(options.max_document_bytes, options.shard_tokens, CHUNK_BYTES, CHUNK_DOCUMENTS),
    ]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def document_hash(text: bytes) -> int:
    """A hash of a document, 0 <= hash < HASH_RANGE. It decides the document's split."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8])
