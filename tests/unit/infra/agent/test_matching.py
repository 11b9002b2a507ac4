"""What an edit may mean: exact, else white space, else indentation, never a guess."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.tools.matching import NoMatch, replace_text

FILE = "def a():\n    x = 1  \n    return x\n\n\ndef b():\n    return 2\n"


def replaced(text: str, old: str, new: str, **rules: bool) -> tuple[str, str]:
    edited = replace_text(
        text, old, new, all_of_them=rules.get("all_of_them", False), exact=rules.get("exact", False)
    )
    return edited.text, edited.how


def test_exact_text_is_replaced_once() -> None:
    assert replaced(FILE, "return 2", "return 3") == (FILE.replace("2", "3"), "exact")


def test_several_occurrences_are_refused_with_their_lines_unless_all_are_meant() -> None:
    with pytest.raises(NoMatch, match=r"occurs 2 times \(lines 3, 7\)"):
        replaced(FILE, "    return", "    yield")
    assert replaced(FILE, "return", "yield", all_of_them=True)[0].count("yield") == 2


def test_white_space_at_line_ends_is_forgiven() -> None:
    text, how = replaced(FILE, "    x = 1\n    return x\n", "    return 1\n")
    assert (how, text) == (
        "white space",
        FILE.replace("    x = 1  \n    return x\n", "    return 1\n"),
    )


def test_carriage_returns_survive_an_edit() -> None:
    text, _ = replaced("a\r\nb\r\nc\r\n", "a\nb\n", "x\ny\n")
    assert text == "x\r\ny\r\nc\r\n"


def test_a_shifted_indentation_is_shifted_back() -> None:
    text, how = replaced(FILE, "x = 1\nreturn x", "if x:\n    return 1")
    assert how == "indentation"
    assert "def a():\n    if x:\n        return 1\n" in text


def test_a_policy_may_want_the_exact_text() -> None:
    with pytest.raises(NoMatch, match="does not occur"):
        replaced(FILE, "    x = 1\n    return x\n", "", exact=True)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_empty_text_is_refused(all_of_them: bool) -> None:
    with pytest.raises(NoMatch, match="old is empty"):
        replaced(FILE, "", "x", all_of_them=all_of_them)


def test_a_miss_shows_the_closest_lines_with_their_numbers() -> None:
    with pytest.raises(NoMatch, match=r"closest is\n1\tdef a\(\):\n2\t    x = 1"):
        replaced(FILE, "x = 11\ny", "")


lines = st.lists(st.sampled_from(["a", "  b", "b", "", "    a", "c  "]), min_size=1, max_size=8)


def num_alike(left: list[str], right: list[str]) -> int:
    """How many lines they begin with in common."""
    pairs = zip(left, right, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


@settings(deadline=None)
@given(lines, lines, lines)
def test_an_edit_touches_one_stretch_or_nothing(file, old, new) -> None:
    text = "\n".join(file)
    try:
        edited, _ = replaced(text, "\n".join(old), "\n".join(new))
    except NoMatch:
        return
    after = edited.split("\n")
    assert len(after) <= len(file) + 2 * len(new)
    head = num_alike(file, after)
    tail = num_alike(file[head:][::-1], after[head:][::-1])
    assert len(file) - head - tail <= len(old)
