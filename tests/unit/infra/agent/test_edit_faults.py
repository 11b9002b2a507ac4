"""Edits as models write them where a naive reader loses text: other line ends, fences in texts, functions of one name."""

import pytest

from ostinato.infra.agent.dialects.edits.blocks import read_edits
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.transcript import CallStatus
from tests.unit.infra.agent.test_edit_forms import ANSWERS, FILES, FIXED, attempt

PROPERTY = (
    "class Box:\n    @property\n    def size(self):\n        return self._size\n\n"
    "    @size.setter\n    def size(self, value):\n        self._size = value\n"
)


def fenced(code: str) -> str:
    return f"```python\n{code}```\n"


@pytest.mark.parametrize("edits", ANSWERS)
@pytest.mark.parametrize("file_end", ["\n", "\r\n"])
@pytest.mark.parametrize("answer_end", ["\n", "\r\n"])
def test_a_file_keeps_its_line_ends(edits: str, file_end: str, answer_end: str) -> None:
    files = {"pkg/core.py": FILES["pkg/core.py"].replace(b"\n", file_end.encode())}
    answer = ANSWERS[edits].replace("\n", answer_end)
    transcript, left = attempt(edits, answer, "Done.", files=files)
    assert left["pkg/core.py"] == FIXED.replace(b"\n", file_end.encode()), transcript.turns[0]


def test_a_getter_and_a_setter_are_two_functions() -> None:
    new = PROPERTY.replace("self._size\n", "abs(self._size)\n").replace("= value", "= int(value)")
    _, left = attempt("whole_function", fenced(new), "Done.", files={"box.py": PROPERTY.encode()})
    assert left["box.py"].decode() == new


def test_overloads_and_their_function_each_have_a_place() -> None:
    old = (
        "@overload\ndef get(key: int) -> int: ...\n\n\n@overload\ndef get(key: str) -> str: ...\n\n\n"
        "def get(key):\n    return key\n"
    )
    new = old.replace("-> int", "-> float").replace("-> str", "-> bytes").replace("key\n", "1\n")
    _, left = attempt("whole_function", fenced(new), "Done.", files={"a.py": old.encode()})
    assert left["a.py"].decode() == new


def test_a_method_of_a_class_that_lacks_it_replaces_no_other_classs() -> None:
    files = {
        f"pkg/m{number:03}.py": b"class A:\n    def go(self):\n        pass\n"
        for number in range(60)
    }
    files["z.py"] = (
        b"class Box:\n    def go(self):\n        return 1\n\n\nclass Other:\n    x = 1\n"
    )
    block = "class {}:\n    def go(self):\n        return 2\n"
    _, left = attempt("whole_function", fenced(block.format("Box")), "Done.", files=files)
    assert left == files | {"z.py": files["z.py"].replace(b"return 1", b"return 2")}
    transcript, left = attempt(
        "whole_function", fenced(block.format("Other")), "Done.", files=files
    )
    assert left == files
    assert "no function Other.go" in transcript.turns[0].results[0]
    bare = fenced("def go(self):\n    return 2\n")
    transcript, left = attempt("whole_function", bare, "Done.", files=files)
    assert left == files
    assert "61 functions go" in transcript.turns[0].results[0]


def test_of_two_blocks_for_a_place_the_later_holds_however_they_name_it() -> None:
    first = fenced("# pkg/core.py\ndef double(value):\n    return 7\n")
    files = {"pkg/core.py": FILES["pkg/core.py"]}
    transcript, left = attempt(
        "whole_function", first + ANSWERS["whole_function"], "Done.", files=files
    )
    assert left["pkg/core.py"] == FIXED
    assert "a later block replaces double" in transcript.turns[0].results[0]


@pytest.mark.parametrize("inner", ["```python\n    >>> f()\n    ```", "```\n    f()\n    ```"])
def test_fences_in_a_docstring_do_not_end_the_block(inner: str) -> None:
    new = f'def f():\n    """Says 2.\n\n    {inner}\n    """\n    return 2\n'
    answer = f"I see:\n{fenced(new)}and more\n{fenced('print(1)' + chr(10))}"
    _, left = attempt(
        "whole_function", answer, "Done.", files={"a.py": b"def f():\n    return 1\n"}
    )
    assert left["a.py"].decode() == new


def test_a_text_at_the_margin_keeps_its_margin() -> None:
    old = "class A:\n    def sql(self):\n        return 1\n"
    new = 'def sql(self):\n    """Doc.\n\n    More.\n    """\n    return """\nselect\n  1\n"""\n'
    _, left = attempt("whole_function", fenced(new), "Done.", files={"a.py": old.encode()})
    scope: dict[str, type] = {}
    exec(left["a.py"], scope)
    assert scope["A"]().sql() == "\nselect\n  1\n"
    assert b"\n        More.\n        " in left["a.py"]


def test_a_definition_in_a_text_is_no_function() -> None:
    files = {"a.py": b'CODE = """\ndef f():\n    return 1\n"""\n', "b.py": b"def g():\n    pass\n"}
    transcript, left = attempt(
        "whole_function", fenced("def f():\n    return 1\n"), "Done.", files=files
    )
    assert left == files
    assert "no function f" in transcript.turns[0].results[0]


def test_an_async_function_within_a_function_is_replaced_whole() -> None:
    old = 'def outer():\n    async def run():\n        return """\nx\n"""\n    return run\n'
    new = "async def run():\n    return 1\n"
    _, left = attempt("whole_function", fenced(new), "Done.", files={"a.py": old.encode()})
    assert left["a.py"] == b"def outer():\n    async def run():\n        return 1\n    return run\n"


def test_a_long_chain_of_branches_is_read() -> None:
    branches = "".join(f"elif x == {number}:\n    pass\n" for number in range(900))
    code = f"if x:\n    pass\n{branches}def f():\n    return 1\n"
    calls = read_edits(fenced(code), "whole_function", FULL_TOOLS).calls
    assert [call.status for call in calls if call.arguments] in ([CallStatus.OK], [])
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("edits", "answer"),
    [
        ("search_replace", "new.py\n<<<<<<< SEARCH\n=======\nx\n>>>>>>> REPLACE\n" * 2),
        ("udiff", "--- /dev/null\n+++ b/new.py\n@@ @@\n+x\n" * 2),
    ],
)
def test_a_file_made_twice_is_not_overwritten_in_silence(edits: str, answer: str) -> None:
    first, second = read_edits(answer, edits, FULL_TOOLS).calls
    assert (first.status, second.status) == (CallStatus.OK, CallStatus.INVALID_ARGUMENTS)
    assert "twice" in second.error


def test_hunks_of_a_new_file_are_one_file() -> None:
    diff = "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x = 1\n@@ -0,0 +2 @@\n+y = 2\n"
    _, left = attempt("udiff", diff, "Done.")
    assert left["new.py"] == b"x = 1\ny = 2\n"


@pytest.mark.parametrize("path", ["/repo/pkg/core.py", "./pkg/core.py", "pkg/../pkg/core.py"])
def test_a_new_file_overwrites_none_whatever_its_path_looks_like(path: str) -> None:
    answer = f"{path}\n<<<<<<< SEARCH\n=======\nx = 1\n>>>>>>> REPLACE\n"
    transcript, left = attempt("search_replace", answer, "Done.")
    assert left == FILES
    assert "is there" in transcript.turns[0].results[0]


@pytest.mark.parametrize("path", ["../core.py", "/etc/passwd", "pkg/../../x.py"])
@pytest.mark.parametrize(
    ("edits", "answer"),
    [
        ("search_replace", "{}\n<<<<<<< SEARCH\na\n=======\nx\n>>>>>>> REPLACE\n"),
        ("search_replace", "{}\n<<<<<<< SEARCH\n=======\nx\n>>>>>>> REPLACE\n"),
        ("udiff", "--- a/{0}\n+++ b/{0}\n@@ @@\n-a\n+x\n"),
        ("udiff", "--- a/{0}\n+++ /dev/null\n"),
    ],
)
def test_a_path_outside_the_repository_is_refused(edits: str, answer: str, path: str) -> None:
    (call,) = read_edits(answer.format(path), edits, FULL_TOOLS).calls
    assert call.status is CallStatus.INVALID_ARGUMENTS
    assert "inside the repository" in call.error


def test_a_diff_names_files_below_folders_called_a_or_b() -> None:
    files = {"b/x.py": b"1\n", "x.py": b"2\n"}
    _, left = attempt("udiff", "--- a/b/x.py\n+++ /dev/null\n", "Done.", files=files)
    _, changed = attempt(
        "udiff", "--- a/b/x.py\n+++ b/b/x.py\n@@ @@\n-1\n+3\n", "Done.", files=files
    )
    assert changed == {"b/x.py": b"3\n", "x.py": b"2\n"}
    (call,) = read_edits("--- a/b/x.py\n+++ /dev/null\n", "udiff", FULL_TOOLS).calls
    assert call.arguments == {"path": "b/x.py"}
    assert left == files  # the memory sandbox runs no commands


@pytest.mark.parametrize("name", ["Makefile", "`Makefile`", "**Dockerfile**"])
def test_a_file_without_a_suffix_is_a_path_alone_on_its_line(name: str) -> None:
    block = "<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE\n"
    first, second = read_edits(f"a.py\n{block}{name}\n{block}", "search_replace", FULL_TOOLS).calls
    assert (first.arguments["path"], second.arguments["path"]) == ("a.py", name.strip("`*"))
