"""Ranking: the passage that says it comes first, and names count in their parts."""

from ostinato.infra.agent.search import search_files
from ostinato.infra.agent.search.passages import split_passages, split_terms

FILES = {
    "a.py": "import os\n\n\ndef first_true(iterable):\n    return next(iter(iterable))\n",
    "b.py": (
        "class TreeWalker:\n    def walkTree(self):\n        return 1\n\n\ndef other():\n    pass\n"
    ),
}


def test_names_are_found_by_their_parts_whatever_the_style() -> None:
    assert search_files(FILES, "first true", limit=1)[0].path == "a.py"
    assert search_files(FILES, "walk tree", limit=1)[0].title == "class TreeWalker:"


def test_hits_carry_the_lines_of_their_passage() -> None:
    hit = search_files(FILES, "other", limit=3)[0]
    assert (hit.path, hit.first_line, hit.last_line) == ("b.py", 6, 7)


def test_unknown_words_find_nothing() -> None:
    assert search_files(FILES, "zebra", limit=3) == []
    assert search_files({}, "zebra", limit=3) == []


def test_passages_cover_every_line_that_says_something() -> None:
    text = "\n".join(f"x{i} = {i}" if i % 7 else "" for i in range(100))
    covered = {
        line
        for passage in split_passages(text)
        for line in range(passage.first_line, passage.last_line + 1)
    }
    said = {i + 1 for i, line in enumerate(text.split("\n")) if line}
    assert said <= covered


def test_terms_hold_the_identifier_and_its_parts() -> None:
    assert split_terms("parseHTTPDoc x") == ["parsehttpdoc", "parse", "http", "doc", "x"]
