"""Tokenizers of the `tokenizers` library: the user's, or byte-level BPE trained on the text (lossless)."""

import hashlib
import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from torchtitan_lite.config.paths import expand
from torchtitan_lite.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
_CONVERT = "in Python, transformers.AutoTokenizer.from_pretrained({0}).save_pretrained({0}) writes a tokenizer.json"
_FORMATS = {  # how other files begin
    rb"version https://git-lfs": "a pointer of Git LFS; git lfs pull downloads the file",
    rb"(?i)\s*<(!doctype|html)": "a web page; hf download downloads the file itself",
    rb"(?s)\n.\n.{1,80}?\x15": f"a SentencePiece model; {_CONVERT} (pip install sentencepiece)",
    rb"[\w+/]+=* \d+\s": f"a tiktoken file; {_CONVERT} (pip install tiktoken)",
    rb'(?s)\s*\{.*"(num_vocab_tokens|token_bytes)"': (
        "in Mistral's tekken format; in Python, transformers.integrations.mistral.convert_tekken_tokenizer({1})"
        ".save_pretrained({0}) writes a tokenizer.json (pip install mistral-common)"
    ),
    rb'#version|\[PAD\]|\s*\{\s*"([^"\\]|\\.)+":\s*\d+\s*[,}]': f"only the vocabulary or the merges; {_CONVERT}",
    rb'(?s)\s*\{.*"(tokenizer_class|added_tokens_decoder)"': f"only the settings of a tokenizer; {_CONVERT}",
}
SMALLEST = 257  # 256 bytes and the end token
PAD, N_SENTINELS = "<pad>", 100  # for span corruption and pairs, as in T5
NO_SENTINELS = (
    "which T5's tokenizers have, and those trained here for this objective "
    "(prepare ... --train-tokenizer N --sentinels)"
)


def load(path: Path) -> Tokenizer:
    """Load a tokenizer.json, or the one in a folder, with truncation and padding disabled.

    Raises:
        DataError: the file is not a valid tokenizer.json.
    """
    file = expand(path) / ("tokenizer.json" if expand(path).is_dir() else "")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except BaseException as error:  # the library's panics are BaseExceptions
        raise DataError(
            f"tokenizer.path: {path} can't be read as a tokenizer.json: {other_format(file, reason(error))}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def other_format(file: Path, otherwise: str) -> str:
    """Return what a file is instead of a tokenizer.json, and what works; or `otherwise`, if that is not known.

    If there is no such file, the answer is about a tokenizer of another format in its folder.
    """
    for path in (
        [file]
        if file.is_file()
        else [
            path
            for name in ("*.model", "*.tiktoken", "tekken*.json", "vocab.json")
            for path in file.parent.glob(name)
            if path.is_file()
        ]
    ):
        with path.open("rb") as stream:
            kind = next((kind for pattern, kind in _FORMATS.items() if re.match(pattern, stream.peek())), "")
        if kind:
            return f"{path.name} is {kind.format(*(repr(str(p.absolute())) for p in (path.parent, path)))}"
    return otherwise


def begun(ids: list[int], begin: tuple[int, ...]) -> list[int]:
    """Return a prompt's tokens after the begin token, if there is one, unless the prompt begins with it."""
    return ids if ids[: len(begin)] == [*begin] else [*begin, *ids]


def reason(error: BaseException) -> str:
    """Return the message of an error in the library, whose panics are BaseExceptions. Reraises interrupts."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        raise error
    return str(error)[:300]


def end_token(tokenizer: Tokenizer, name: str = "", verb: str = "end") -> int:
    """Return the id of the token that ends a document; with `verb` "begin", of the one that begins it.

    Raises:
        DataError: the tokenizer has no token of this name or, without a name, no usual one.
    """
    for token in (name,) if name else _KNOWN_ENDS:
        index = tokenizer.token_to_id(token)
        if index is not None:
            return int(index)
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:8]
    raise DataError(
        f"tokenizer.{verb}_token: the tokenizer has no entry {name or ' or '.join(_KNOWN_ENDS)} to {verb} a document "
        "with; "
        f"its special entries are {', '.join(special) or '-'}; "
        f"--tokenizer.{verb}_token (prepare --{verb}-token) names another entry"
    )


def marks(tokenizer: Tokenizer, end: str = "", begin: str = "") -> tuple[int, ...]:
    """Return the ids between two documents: the end token, and the begin token if it is named and differs.

    Raises:
        DataError: see `end_token`.
    """
    last = end_token(tokenizer, end)
    return tuple(dict.fromkeys((last, end_token(tokenizer, begin, "begin") if begin else last)))


def sentinel(i: int) -> str:
    """Return the i-th token that marks a gap in the text."""
    return f"<extra_id_{i}>"


def shown(tokenizer: Tokenizer, index: int) -> str:
    """Return a token for a message."""
    return f"{tokenizer.id_to_token(index)!r} (id {index})"


def size(tokenizer: Tokenizer) -> int:
    """Return the number of embeddings: the largest id plus 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def require_rows(tokenizer: Tokenizer, rows: int, name: Path | str) -> None:
    """Raise DataError if a tokenizer has more entries than a model has embeddings.

    Args:
        rows: of the embeddings.
        name: of the tokenizer's file or folder, for the message.
    """
    if (n := size(tokenizer)) > rows:
        raise DataError(
            f"{name}: its tokenizer has {n} entries, and the model {rows} embeddings, none of them for "
            f"{', '.join(str(tokenizer.id_to_token(i)) for i in range(rows, min(rows + 8, n)))}: use the model's own "
            f"tokenizer, or add embeddings with model.resize_token_embeddings({n}) of transformers"
        )


def sha256(tokenizer: Tokenizer) -> str:
    """Return the hash of a tokenizer's definition, in hex, without the post_processor, which an export adds."""
    definition = json.loads(tokenizer.to_str()) | {"post_processor": None}
    return hashlib.sha256(json.dumps(definition).encode()).hexdigest()
