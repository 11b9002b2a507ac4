"""Search in a box by ripgrep, held against the simplest search there is."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.text_search import (
    TextMatch,
    TextSearch,
    read_matches,
    search_command,
)

SECONDS = 20.0
HIDDEN = {".git", "__pycache__"}
NAMES = st.sampled_from(("a", "a.py", "b.py", "Z.md", ".hidden", "test_a.py", "e f.txt", "ä.py"))
FOLDERS = st.sampled_from(("", "", "pkg/", "pkg/inner/", ".git/", "__pycache__/", "a.b/"))
LINES = st.sampled_from(
    ("", "foo", "  foo(bar)", "Foo = 1", "bär foo", "x\r", "foo: 1:foo", "a\0b", "\u017f", "_f0_")
)
TREES = st.dictionaries(
    st.builds(str.__add__, FOLDERS, NAMES),
    st.lists(LINES, max_size=5).map(lambda lines: "\n".join(lines).encode()),
    max_size=8,
)
PATTERNS = st.sampled_from(
    ("foo", "^foo$", r"\bfoo\b", "fo{2}", "[a-z]+ ?=", "x.?$", "", r"\w+\(", "b(ä|a)r", r"\d:", "s")
)
SEARCHES = st.builds(
    TextSearch,
    pattern=PATTERNS,
    path=st.sampled_from((".", "pkg", "a.py")),
    ignores_case=st.booleans(),
    counts_only=st.booleans(),
)


class Box:
    """One sandbox and the loop it belongs to."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        (directory / "README.md").write_text("hello\n")
        repository = PreparedRepository.from_directory("empty", directory, ("README.md",), ())
        self.place = RepositoryEnvironment.create(repository, 1)
        self.sandbox = self.loop.run_until_complete(self.place.lease())

    def lay(self, files: dict[str, bytes]) -> None:
        removed = "rm -rf .[!.]* * pkg"
        self.loop.run_until_complete(self.sandbox.exec(removed, SECONDS))
        assert self.loop.run_until_complete(self.sandbox.write_files(files)) == {}

    def run(self, command: str) -> tuple[int, bytes]:
        result = self.loop.run_until_complete(self.sandbox.exec(command, SECONDS, 1 << 20))
        return result.exit_code, result.output

    def close(self) -> None:
        self.loop.run_until_complete(self.place.close())
        self.loop.close()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    opened = Box(tmp_path_factory.mktemp("empty"))
    yield opened
    opened.close()


def test_the_box_has_ripgrep_where_nobody_may_write(box: Box) -> None:
    code, output = box.run("command -v rg && rg --version && ! touch /sandbox/bin/rg")
    assert code == 0
    assert output.startswith(b"/sandbox/bin/rg\nripgrep ")


def expected(tree: dict[str, bytes], search: TextSearch) -> list[TextMatch]:
    """Matches in text files outside hidden folders, by Python's expressions."""
    expression = re.compile(search.pattern, re.IGNORECASE if search.ignores_case else 0)
    found = []
    for path in sorted(tree, key=os.fsencode):
        is_below = search.path == "." or path == search.path or path.startswith(search.path + "/")
        if not is_below or b"\0" in tree[path] or HIDDEN.intersection(path.split("/")[:-1]):
            continue
        lines = tree[path].decode().split("\n")
        lines = lines[:-1] if not lines[-1] else lines
        numbers = [number for number, line in enumerate(lines, 1) if expression.search(line)]
        if search.counts_only and numbers:
            found.append(TextMatch(path, len(numbers), ""))
        elif not search.counts_only:
            found += [TextMatch(path, number, lines[number - 1]) for number in numbers]
    return found


@given(tree=TREES, search=SEARCHES)
@example(tree={"a": b"x\r\na\0b"}, search=TextSearch("x.?$"))
@settings(max_examples=60, deadline=None)
def test_search_finds_the_matching_lines_of_text_files(box: Box, tree, search: TextSearch) -> None:
    box.lay({**tree, "pkg/there.bin": b"\0"})
    code, output = box.run(search_command(search))
    exists = search.path != "a.py" or "a.py" in tree
    wanted = expected(tree, search)
    told = read_matches(output)[0]
    # ripgrep prints some lines before the zero byte
    found = [match for match in told if b"\0" not in tree[match.path]]
    assert sorted(found) == sorted(wanted)
    assert code == ((0 if told else 1) if exists else 2)


@pytest.mark.parametrize("counts_only", [False, True])
def test_a_file_asked_for_by_name_that_is_not_text_has_no_matches(
    box: Box, counts_only: bool
) -> None:
    box.lay({"a.py": b"foo\na\0b"})
    code, output = box.run(search_command(TextSearch("foo", path="a.py", counts_only=counts_only)))
    assert (code, read_matches(output)[0]) == (1, [])


def test_a_question_mark_of_a_glob_is_one_byte_as_in_ripgrep(box: Box) -> None:
    box.lay({"\u00e4.py": b"foo", "a.py": b"foo"})
    code, output = box.run(search_command(TextSearch("foo", glob="?.py")))
    assert (code, read_matches(output)[0]) == (0, [TextMatch("a.py", 1, "foo")])
    code, output = box.run(search_command(TextSearch("foo", glob="\u00e4.*")))
    assert (code, read_matches(output)[0]) == (0, [TextMatch("\u00e4.py", 1, "foo")])


def test_globs_choose_files_as_gitignore_does(box: Box) -> None:
    box.lay(dict.fromkeys(("a.py", "b.md", "pkg/a.py", "pkg/inner/c.py"), b"foo"))
    globs = {
        "*.py": ["a.py", "pkg/a.py", "pkg/inner/c.py"],
        "pkg/*.py": ["pkg/a.py"],
        "pkg/**": ["pkg/a.py", "pkg/inner/c.py"],
        "/a*": ["a.py"],
        "*.{md,txt}": ["b.md"],
    }
    for glob, wanted in globs.items():
        _, output = box.run(search_command(TextSearch("foo", glob=glob)))
        assert [match.path for match in read_matches(output)[0]] == wanted, glob


def test_a_wrong_expression_or_path_is_an_error_with_words(box: Box) -> None:
    for search in (TextSearch("foo("), TextSearch("foo", path="nowhere")):
        code, output = box.run(search_command(search))
        found, said = read_matches(output)
        assert code == 2
        assert found == []
        assert search.pattern in said or search.path in said
