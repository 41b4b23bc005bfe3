"""What benchmarks/learning_prose.py keeps of a page and of the Bible."""

from benchmarks.learning_prose import chapters, page

SENTENCE = "A paragraph of a manual, of which the text is kept in one line, because it is long enough."


def test_a_page_gives_its_paragraphs_without_menus_commands_and_tables() -> None:
    html = f"""<html><head><title>{SENTENCE}</title></head><body><ul><li>Next</li></ul>
      <p>{SENTENCE.replace("text", "<em>text</em>", 1).replace(" in ", chr(10) + " in ")}</p>
      <pre>{SENTENCE}</pre><table><tr><td>{SENTENCE}</td></tr></table><div>{SENTENCE}<p>Short.</p></div></body></html>"""
    assert page(html) == f"{SENTENCE}\n{SENTENCE}"


def test_a_chapter_has_a_verse_a_line() -> None:
    text = "Ge1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus the heavens.\n\n"
    assert chapters(text) == ["In the beginning.\nAnd the earth.", "Thus the heavens."]
