"""The default pairs: functions of Python's standard library, and the first sentence of each docstring."""

import ast
import hashlib
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from torchtitan_lite.data.prepare.texts import Corpus, standard_library
from torchtitan_lite.files import write_durably


def functions(cache: Path) -> Corpus:
    """Return a cached file of pairs: function bodies without docstrings, and the docstrings' first sentences.

    If functions have the same body, the first is kept.
    """
    library = standard_library()
    key = hashlib.sha256(json.dumps(library.fingerprint()).encode()).hexdigest()[:16]
    file = cache / f"functions-{key}.jsonl"
    with FileLock(cache / f"{file.name}.lock"):
        if not file.is_file():
            pairs: dict[str, str] = {}
            for text in library.files:
                for body, sentence in _functions_of(text):
                    pairs.setdefault(body, sentence)
            lines = (json.dumps({"body": body, "docstring": sentence}) + "\n" for body, sentence in pairs.items())
            write_durably(file, "".join(lines).encode())
    return Corpus((file,), ("body", "docstring"))


def _functions_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the body and the docstring's first sentence of each function in a source file."""
    with tokenize.open(file) as stream:
        text = stream.read()
    lines = text.split("\n")  # as ast counts lines: splitlines() also splits at form feeds
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            begin = min(one.lineno for one in (node.body[1], *getattr(node.body[1], "decorator_list", ())))
            body = textwrap.dedent("\n".join(lines[begin - 1 : node.body[-1].end_lineno]))
            paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
            if sentence:
                yield body, sentence
