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


@pytest.mark.parametrize(
    ("text", "old", "new", "wanted"),
    [
        # a new line ends as its neighbours
        ("a\r\nb = 2\r\nc\r\n", "b = 2", "b = 2\nb2 = 2", "a\r\nb = 2\r\nb2 = 2\r\nc\r\n"),
        ("a\r\nb", "b", "b\nc", "a\r\nb\r\nc"),
        ("a\nb\r\nc\nd", "b", "x\nb", "a\nx\r\nb\r\nc\nd"),
        ("a\r\nb\r\nc", "\nb", "\nx\nb", "a\r\nx\r\nb\r\nc"),
        ("a\r\nb\r\nc", "\nb", "", "a\r\nc"),
        # a line that the edit repeats keeps its bytes
        ("a  \nb\r\nc\n", "a\nb\nc", "a\nb\nx\nc", "a  \nb\r\nx\r\nc\n"),
        ("s = 'x  \r\n'\n", "s = 'x\n'", "s = 'x\ny'", "s = 'x  \r\ny'\n"),
        ("  a \t\n  b\n", "a\nb", "a\nc", "  a \t\n  c\n"),
        # an edit that names line ends is taken at its word
        ("a\r\nb\r\n", "a\r\n", "a\n", "a\nb\r\n"),
        ("a\nb\n", "a\n", "a\r\n", "a\r\nb\n"),
        # the end of the file stays
        ("a\r\nb ", "a\nb\n", "a\nc\n", "a\r\nc"),
        ("a\nb ", "a \nb", "a\nx\nb", "a\nx\nb "),
        ("a\rb\nc ", "a\rb \nc", "a\rb\nd", "a\rb\nd"),
        ("\ufeffa \nb\n", "a\nb", "a\nc", "\ufeffa \nc\n"),
    ],
)
def test_only_what_the_edit_names_changes(text: str, old: str, new: str, wanted: str) -> None:
    assert replaced(text, old, new)[0] == wanted


pieces = st.sampled_from(
    ["a", "b", " ", "\t", "\n", "\n", "\r\n", "\r\n", "\r", "\x0c", "\u2028", "\x85", "\ufeff"]
)
files = st.lists(pieces, min_size=1, max_size=20).map("".join)
by_number = pytest.mark.parametrize("examples", [100, pytest.param(400, marks=pytest.mark.nightly)])


@by_number
def test_an_exact_edit_is_a_replacement_of_bytes_but_for_returns_before_its_newlines(
    examples: int,
) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(files, st.data())
    def replace(text: str, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(text) - 1))
        old = text[start : data.draw(st.integers(start + 1, len(text)))]
        new = data.draw(files)
        if text.count(old) != 1:
            return
        edited, how = replaced(text, old, new)
        plain = text.replace(old, new)
        assert how == "exact"
        if "\r\n" not in text or "\r" in old + new or "\n" not in old + new:
            assert edited == plain
            return
        assert edited.replace("\r\n", "\n") == plain.replace("\r\n", "\n") or old.startswith("\n")
        half = old.startswith("\n") and text[:start].endswith("\r")
        assert edited.startswith(text[: start - half])
        assert edited.endswith(text[start + len(old) :])

    replace()


@by_number
def test_lines_around_any_edit_keep_their_bytes_and_a_file_its_kind_of_ends(
    examples: int,
) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(
        st.lists(st.sampled_from(["a", "b ", "  a", "c\t", "", "d"]), min_size=2), lines, st.data()
    )
    def replace(file: list[str], fresh: list[str], data: st.DataObject) -> None:
        ends = data.draw(st.lists(st.sampled_from(["\n", "\r\n"]), min_size=1, max_size=3))
        bodies = [line + ends[index % len(ends)] for index, line in enumerate(file)]
        bodies[-1] = data.draw(st.sampled_from([file[-1], bodies[-1]]))
        text = "".join(bodies)
        first = data.draw(st.integers(0, len(file) - 1))
        last = data.draw(st.integers(first + 1, len(file)))
        old = "\n".join(line.rstrip() for line in file[first:last])
        new = "\n".join(line.rstrip() for line in [*file[first:last], *fresh])
        if old.endswith("\n") or new.endswith("\n"):  # a blank line, or the end of the one before
            return
        try:
            edited, _ = replaced(text, old, new)
        except NoMatch:
            return
        before, repeated, after = (
            "".join(part) for part in (bodies[:first], bodies[first:last], bodies[last:])
        )
        # exact matches may begin or end within a line
        assert (edited.startswith(before) and edited.endswith(after)) or text.count(old) == 1
        if text.count(old) == 0 and bodies[last - 1].endswith("\n"):
            assert edited.startswith(before + repeated)
        if set(ends) == {"\r\n"}:
            assert edited.count("\n") == edited.count("\r\n")
        assert edited.endswith("\n") == text.endswith("\n") or text.count(old) == 1

    replace()
