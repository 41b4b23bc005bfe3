"""docs/recipe.md quotes lines of code. `python -m tests.docs.test_recipe` corrects their numbers."""

import re
from pathlib import Path

from tests.helpers import ROOT

PAGE = ROOT / "docs/recipe.md"
REFERENCE = re.compile(r"\[([\w.]+):(\d+)\]\(\.\./([\w./]+)#L(\d+)\)(\s+)`([^`]+)`")


def line_of(file: Path, code: str) -> int:
    """The number of the only line with this code."""
    numbers = [i for i, line in enumerate(file.read_text().splitlines(), 1) if code in line]
    assert len(numbers) == 1, f"{file.name}: `{code}` is on {len(numbers)} lines: {numbers}"
    return numbers[0]


def corrected(page: str) -> str:
    """The page with the numbers of today's lines."""

    def reference(match: re.Match[str]) -> str:
        name, _, path, _, space, code = match.groups()
        number = line_of(ROOT / path, code)
        return f"[{name}:{number}](../{path}#L{number}){space}`{code}`"

    return REFERENCE.sub(reference, page)


def test_each_quoted_line_is_where_the_page_says() -> None:
    page = PAGE.read_text()
    references = REFERENCE.findall(page)
    assert len(references) == page.count("](../") >= 30, "a link without quoted code"
    for name, _, path, _, _, _ in references:
        assert Path(path).name == name
    assert page == corrected(page), "run `python -m tests.docs.test_recipe`"


if __name__ == "__main__":
    PAGE.write_text(corrected(PAGE.read_text()))
