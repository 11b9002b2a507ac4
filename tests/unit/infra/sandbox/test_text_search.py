"""Search in a box: ripgrep and the program that stands in for it find the same."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.sandbox.namespace import NamespaceSandbox
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.text_search import (
    TextMatch,
    TextSearch,
    expand_braces,
    python_command,
    read_matches,
    ripgrep_command,
    search_command,
)

SECONDS = 20.0
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
GLOBS = st.sampled_from(
    ("", "*.py", "test_*", "pkg/*.py", "pkg/**", "**/inner/*", "*.{py,md}", "[ab]*", "/a*", "?.py")
)
SEARCHES = st.builds(
    TextSearch,
    pattern=PATTERNS,
    path=st.sampled_from((".", "pkg", "a.py")),
    glob=GLOBS,
    ignores_case=st.booleans(),
    counts_only=st.booleans(),
)


class Box:
    """One sandbox and the loop it belongs to."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        (directory / "README.md").write_text("hello\n")
        repository = PreparedRepository.from_directory("empty", directory, ("README.md",), ())
        self.sandbox = self.loop.run_until_complete(NamespaceSandbox.open(repository))

    def lay(self, files: dict[str, bytes | None]) -> None:
        self.loop.run_until_complete(self.sandbox.reset(files))

    def run(self, command: str) -> tuple[int, bytes]:
        result = self.loop.run_until_complete(self.sandbox.exec(command, SECONDS, 1 << 20))
        return result.exit_code, result.output

    def close(self) -> None:
        self.loop.run_until_complete(self.sandbox.close())
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


@given(tree=TREES, search=SEARCHES)
@settings(max_examples=60, deadline=None)
def test_both_programs_find_the_same_on_any_tree(box: Box, tree, search: TextSearch) -> None:
    box.lay(tree)
    code, output = box.run(ripgrep_command(search))
    other_code, other_output = box.run(python_command(search))
    assert other_code == code
    assert read_matches(other_output)[0] == read_matches(output)[0]
    assert box.run(search_command(search)) == (code, output)


@pytest.mark.parametrize("make", [ripgrep_command, python_command])
@pytest.mark.parametrize("counts_only", [False, True])
def test_a_file_asked_for_by_name_that_is_not_text_has_no_matches(
    box: Box, make, counts_only: bool
) -> None:
    box.lay({"a.py": b"foo\na\0b"})
    code, output = box.run(make(TextSearch("foo", path="a.py", counts_only=counts_only)))
    assert (code, read_matches(output)[0]) == (1, [])


@pytest.mark.parametrize("make", [ripgrep_command, python_command])
def test_a_question_mark_of_a_glob_is_one_byte_as_in_ripgrep(box: Box, make) -> None:
    box.lay({"\u00e4.py": b"foo", "a.py": b"foo"})
    code, output = box.run(make(TextSearch("foo", glob="?.py")))
    assert (code, read_matches(output)[0]) == (0, [TextMatch("a.py", 1, "foo")])
    code, output = box.run(make(TextSearch("foo", glob="\u00e4.*")))
    assert (code, read_matches(output)[0]) == (0, [TextMatch("\u00e4.py", 1, "foo")])


def test_without_ripgrep_the_box_uses_python(box: Box) -> None:
    box.lay({"pkg/a.py": b"def foo():\n    pass\n"})
    search = search_command(TextSearch("def (foo|bar)"))
    code, output = box.run(f"PATH=/usr/bin:/bin; {search}")
    assert (code, read_matches(output)[0]) == (0, [TextMatch("pkg/a.py", 1, "def foo():")])


@pytest.mark.parametrize("make", [ripgrep_command, python_command])
def test_a_wrong_expression_or_path_is_an_error_with_words(box: Box, make) -> None:
    for search in (TextSearch("foo("), TextSearch("foo", path="nowhere")):
        code, output = box.run(make(search))
        found, said = read_matches(output)
        assert code == 2
        assert found == []
        assert search.pattern in said or search.path in said


def test_braces_are_alternatives() -> None:
    assert expand_braces("") == ()
    assert expand_braces("*.py") == ("*.py",)
    assert sorted(expand_braces("{a,b}/*.{py,md}")) == ["a/*.md", "a/*.py", "b/*.md", "b/*.py"]
