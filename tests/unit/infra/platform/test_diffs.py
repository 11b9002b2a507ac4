"""One diff writer: patches that git applies, and short changes for a model."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.platform.diffs import changed_lines, count_changed_lines, unified_diff

texts = st.lists(
    st.sampled_from(["a", "b", "  c", "", "a\r", "d\re", "f\x0cg", "h\u2028i", "\ufeffa", "a "]),
    max_size=8,
).map("\n".join)


def test_change_without_context_names_its_lines_alone() -> None:
    patch = unified_diff("m.py", b"a\nb\nc\n", b"a\nX\nc\n", context_lines=0)
    assert patch == "--- a/m.py\n+++ b/m.py\n@@ -2 +2 @@\n-b\n+X\n"
    assert changed_lines("a\nb\nc\n", "a\nX\nc\n", context_lines=0) == ["@@ -2 +2 @@", "-b", "+X"]


def test_bytes_that_are_no_text_are_named_only() -> None:
    assert unified_diff("a.png", b"\xff", b"\xfe") == "Binary files a/a.png and b/a.png differ\n"


@pytest.mark.parametrize("context", [1, 3])
@settings(deadline=None, max_examples=15)
@given(before=texts, after=texts)
def test_git_applies_the_patch(tmp_path_factory, context: int, before: str, after: str) -> None:
    if before == after:
        return
    folder: Path = tmp_path_factory.mktemp("patch")
    (folder / "m").write_bytes(before.encode())
    patch = unified_diff("m", before.encode(), after.encode(), context_lines=context)
    command = ["git", "apply", "-"]
    subprocess.run(command, input=patch.encode(), cwd=folder, check=True, timeout=200)
    assert (folder / "m").read_bytes() == after.encode()


@given(before=texts, after=texts)
def test_changed_lines_are_no_fewer_than_the_texts_differ_by_and_no_more_than_they_have(
    before: str, after: str
) -> None:
    patch = unified_diff("m", before.encode(), after.encode(), context_lines=0)
    count = count_changed_lines(patch)
    sizes = [text.count("\n") + (not text.endswith("\n")) * bool(text) for text in (before, after)]
    assert abs(sizes[0] - sizes[1]) <= count <= max(sum(sizes), 0)
    assert (count == 0) == (before == after)


def test_a_replaced_line_counts_once_and_hunks_are_counted_apart() -> None:
    cases = {
        (b"a\nb\nc\n", b"a\nX\nc\n"): 1,
        (b"a\nb\nc\n", b"X\nb\nc\nd\n"): 2,
        (b"-- a\n++ b\n@@ c\n", b""): 3,
        (None, b"a\nb"): 2,
        (b"\xff", b"\xfe"): 0,
    }
    for (before, after), count in cases.items():
        assert count_changed_lines(unified_diff("m.py", before, after, context_lines=0)) == count


@given(before=texts, after=texts)
def test_a_short_change_tells_every_byte_that_differs(before: str, after: str) -> None:
    """All lines of both texts, rebuilt from a diff whose context is the whole file."""
    lines = changed_lines(before, after, context_lines=99)
    sides, marks = {"-": "", "+": ""}, " "
    for line in lines[1:]:
        if line.startswith("\\"):
            shown = sides if marks == " " else (marks,)
            sides |= {side: sides[side].removesuffix("\n") for side in shown}
            continue
        marks = line[0]
        for side in sides if marks == " " else (marks,):
            sides[side] += line[1:] + "\n"
    assert before == after or (sides["-"], sides["+"]) == (before, after)
