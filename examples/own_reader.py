"""A text reader of your own: `train.py --data.path=books --data.text_suffixes=examples.own_reader:NOTEBOOK`.

Reads Jupyter notebooks, each as one document (docs/extending.md).
"""

import json
from typing import BinaryIO

from torchtitan_lite.config.sections.data import Reader
from torchtitan_lite.data.prepare.documents import Read
from torchtitan_lite.data.prepare.texts import Corpus


def cells(stream: BinaryIO, corpus: Corpus) -> Read:
    """Yield the text of all cells as one document at line 1."""
    try:
        texts = ["".join(cell["source"]) for cell in json.load(stream)["cells"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a notebook: {error}") from None
    yield 1, ["\n\n".join(texts)]


NOTEBOOK = Reader(".ipynb", f"{__name__}:cells")
