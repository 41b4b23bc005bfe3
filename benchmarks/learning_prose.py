"""English prose for benchmarks/learning.py, from packages of Debian 12: `python -m benchmarks.learning_prose FILE`.

The King James Bible, a document a chapter, and four manuals on Debian, a document an HTML page. Of a page, paragraphs
and list items of at least 60 characters are kept: so no headings, menus, tables, commands and their output. Needs Linux
on x86-64 with `apt-get download` (or the .deb files in the folder of FILE) and `dpkg-deb`; nothing is installed.
"""

import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = {  # and their versions
    **{"bible-kjv": "4.38", "bible-kjv-text": "4.38", "debian-faq": "11.1", "debian-handbook": "11.20220922"},
    **{"debian-reference-en": "2.100", "developers-reference": "12.18"},
}
SHA256 = "c02f99149d81cf063d775d5423b9e2f39efe4de08f88d7676c953042574011f2"  # of the result
LEAST = 60  # characters of a paragraph
PAGES = {
    "debian-faq": "*/FAQ/*.en.html",
    "debian-handbook": "*/html/en-US/*.html",
    "debian-reference-en": "*/*.en.html",
}


class Paragraphs(HTMLParser):
    """The text of a page by blocks, without commands and tables."""

    LEFT_OUT = "head", "script", "style", "pre", "table"
    BLOCKS = "p", "div", "li", "dd", "dt", "ul", "ol", "dl", "section", "h1", "h2", "h3", "h4", "h5", "br", "blockquote"

    def __init__(self) -> None:
        super().__init__()
        self.within, self.blocks = 0, [""]

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.within += tag in self.LEFT_OUT
        if tag in self.BLOCKS:
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        self.within -= tag in self.LEFT_OUT
        if tag in self.BLOCKS:
            self.blocks.append("")

    def handle_data(self, data: str) -> None:
        if not self.within:
            self.blocks[-1] += data


def page(text: str) -> str:
    """The paragraphs of an HTML page."""
    parser = Paragraphs()
    parser.feed(text)
    blocks = (" ".join(block.split()) for block in parser.blocks)
    return "\n".join(block for block in blocks if len(block) >= LEAST)


def chapters(text: str) -> list[str]:
    """The chapters of the Bible, a verse a line, of lines such as "Ge1:1 In the beginning ..."."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if verse := re.match(r"(\w+:)\d+ (.+)", line):
            found.setdefault(verse[1], []).append(verse[2])
    return ["\n".join(verses) for verses in found.values()]


def documents(folder: Path) -> list[str]:
    """The text of the packages, which are downloaded into `folder` and unpacked there."""
    for name, version in PACKAGES.items():
        if not (debs := list(folder.glob(f"{name}_{version}_*.deb"))):
            subprocess.run(["apt-get", "download", f"{name}={version}"], cwd=folder, check=True)
            debs = list(folder.glob(f"{name}_{version}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(debs[0]), str(folder / name)], check=True)
    bible = [str(folder / "bible-kjv/usr/bin/bible"), "-p", "bible-kjv-text/usr/lib", "-f", "ge1:1-rev22:21"]
    done = subprocess.run(bible, cwd=folder, check=True, capture_output=True, text=True)
    found = chapters(done.stdout)
    for name in sorted(PACKAGES):
        if not name.startswith("bible"):
            for file in sorted((folder / name).rglob("*.html")):
                if file.match(PAGES.get(name, "*")) and file.stem != name:  # that is all pages once more
                    found.append(page(file.read_text(encoding="utf-8")))
    return [one for one in dict.fromkeys(found) if one]


def make(file: Path) -> None:
    """Write the documents as lines of JSON.

    Raises:
        ValueError: the text is not that of the figures.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"text": one}) + "\n" for one in documents(file.parent))
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{file}: the sha256 of the prose is {found}, not {SHA256}")
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
