"""Chunks: every line in exactly one, cut where the syntax says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.search.chunks import LONGEST_CHUNK_LINES, WINDOW_LINES, cut_chunks
from tests.unit.infra.agent.search.repositories import LEDGER, TEXTS


@pytest.mark.parametrize("path", ["a.py", "a.md"])
@settings(deadline=None)
@given(text=st.one_of(TEXTS, st.text(max_size=300)))
def test_every_line_is_in_exactly_one_chunk(path: str, text: str) -> None:
    chunks = cut_chunks(path, text)

    assert "\n".join(chunk.text for chunk in chunks) == text
    covered = [line for chunk in chunks for line in range(chunk.first_line, chunk.last_line + 1)]
    assert covered == list(range(1, text.count("\n") + 2))


@settings(deadline=None)
@given(text=TEXTS)
def test_no_chunk_is_longer_than_the_limit(text: str) -> None:
    long = "\n".join([text] * 20)

    assert all(
        chunk.last_line - chunk.first_line < LONGEST_CHUNK_LINES
        for chunk in cut_chunks("a.py", long)
    )


def test_methods_are_chunks_and_the_class_holds_the_rest() -> None:
    chunks = cut_chunks("shop/cart.py", LEDGER["shop/cart.py"].decode())

    assert [(chunk.name, chunk.first_line) for chunk in chunks] == [
        ("", 1),
        ("Cart", 4),
        ("Cart.add_item", 7),
        ("Cart.total_price", 10),
        ("load_cart", 14),
    ]


def test_a_decorator_belongs_to_its_function() -> None:
    [chunk] = cut_chunks("a.py", "@cache\n@other(1)\ndef first():\n    def inner():\n        pass")

    assert (chunk.name, chunk.first_line, chunk.last_line) == ("first", 1, 5)


def test_definitions_inside_conditions_are_found() -> None:
    text = "if x:\n    def f():\n        return 1\nelse:\n    def g():\n        return 2"

    assert [chunk.name for chunk in cut_chunks("a.py", text)] == ["", "f", "", "g"]


def test_unknown_languages_fall_into_windows() -> None:
    chunks = cut_chunks("notes.md", "\n".join(f"line {i}" for i in range(120)))

    assert [chunk.last_line for chunk in chunks] == [WINDOW_LINES, 2 * WINDOW_LINES, 120]


def test_broken_code_is_cut_all_the_same() -> None:
    text = "def f(:\n  return (\nclass\n\tdef g(self): x ="

    assert "\n".join(chunk.text for chunk in cut_chunks("a.py", text)) == text
