"""Edits in a plain answer: they become the same calls and file writes that edit tools make, or say why not."""

import asyncio
import difflib
import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.config import AgentRequest, HarnessConfig, ToolPolicy
from ostinato.infra.agent.dialects.dialect import offered_tools
from ostinato.infra.agent.dialects.edits.blocks import GUIDES, REMINDERS, read_edits, write_edit
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import CallStatus, EndReason, Transcript
from tests.fakes.memory_sandbox import MemorySandbox
from tests.fakes.published_templates import HERMES
from tests.fakes.scripted_model import ScriptedModel

FILES = {
    "pkg/core.py": b"import os\n\n\n@cached\ndef double(value):\n    return valu * 2\n\n\ndef other():\n    pass\n",
    "pkg/box.py": b"class Box:\n    def double(self):\n        return self.size * 3\n",
}
FIXED = b"import os\n\n\n@cached\ndef double(value):\n    return value * 2\n\n\ndef other():\n    pass\n"
FENCED = "The name is wrong:\n```python\ndef double(value):\n    return value * 2\n```\n"
SEARCH = "pkg/core.py\n```python\n<<<<<<< SEARCH\n    return valu * 2\n=======\n    return value * 2\n>>>>>>> REPLACE\n```\n"
DIFF = "```diff\n--- a/pkg/core.py\n+++ b/pkg/core.py\n@@ -5,2 +5,2 @@\n"
DIFF += " def double(value):\n-    return valu * 2\n+    return value * 2\n```\n"
ANSWERS = {"whole_function": FENCED, "search_replace": SEARCH, "udiff": DIFF}
LINES = st.lists(
    st.sampled_from(["a", "b", "", "  c", "-- d", "++ e", "@@ f", "é", "x = '```'"]), max_size=8
)


class SearchedSandbox(MemorySandbox):
    """Answers the search for definitions as ripgrep does."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files, self._search)

    def _search(self, command: str) -> tuple[int, bytes]:
        words = shlex.split(command)
        pattern = re.compile(words[words.index("-e") + 1])
        found = [
            f"{path}\0{number}:{line}"
            for path, content in sorted(self.files.items())
            for number, line in enumerate(content.decode().split("\n"), start=1)
            if pattern.search(line)
        ]
        return (0 if found else 1), "\n".join(found).encode()


def attempt(
    edits: str, *answers: str, files: dict[str, bytes] = FILES
) -> tuple[Transcript, dict[str, bytes]]:
    renderer = HERMES.renderer()
    sandbox = SearchedSandbox(files)
    config = HarnessConfig.model_validate(
        {
            "dialect": "hermes",
            "edits": edits,
            "context_tokens": 20_000,
            "max_generated_tokens": 4000,
        }
    )
    model = ScriptedModel(renderer, answers)
    request = AgentRequest(prompt="Fix double", session_id="s")
    made = run_agent(model, renderer, AgentEnvironment(sandbox), request, config)
    return asyncio.run(made), sandbox.files


@pytest.mark.parametrize("edits", ANSWERS)
def test_an_answer_is_the_same_edit_in_each_form(edits: str) -> None:
    transcript, files = attempt(edits, ANSWERS[edits], "Done.")
    assert files == FILES | {"pkg/core.py": FIXED}
    (call,) = transcript.turns[0].calls
    assert (call.tool, call.status) == ("edit_file", CallStatus.OK)
    assert call.arguments.keys() == {"path", "old", "new"}
    assert transcript.turns[0].text == ANSWERS[edits]
    assert transcript.end_reason is EndReason.FINISHED


@pytest.mark.parametrize("edits", GUIDES)
def test_the_guide_is_no_edit_and_edit_tools_are_not_offered(edits: str) -> None:
    for text in (GUIDES[edits], REMINDERS[edits]):
        assert read_edits(text, edits, FULL_TOOLS).calls == ()
    config = HarnessConfig.model_validate({"dialect": "full", "edits": edits})
    assert offered_tools(config, ToolPolicy()).keys() == FULL_TOOLS.keys() - {
        "edit_file",
        "write_file",
    }


@pytest.mark.parametrize("edits", ANSWERS)
def test_nothing_is_edited_from_a_thought(edits: str) -> None:
    transcript, files = attempt(edits, f"<think>{ANSWERS[edits]}</think>Done.")
    assert files == FILES
    assert transcript.turns[0].calls == ()


@pytest.mark.parametrize("edits", ANSWERS)
@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_a_truncated_edit_changes_nothing_and_says_so(edits: str, share: float) -> None:
    answer = ANSWERS[edits].rstrip().removesuffix("```").rstrip()
    cut = answer[: int(len(answer) * share)].rpartition("\n")[0]
    transcript, files = attempt(edits, cut, "Done.")
    calls = transcript.turns[0].calls
    assert [call.status for call in calls] == [CallStatus.MALFORMED]
    assert files == FILES


def test_a_function_of_several_is_the_most_like_and_the_result_says_so() -> None:
    transcript, files = attempt("whole_function", FENCED, "Done.")
    assert files["pkg/box.py"] == FILES["pkg/box.py"]
    assert "the most like of 2 functions of this name" in transcript.turns[0].results[0]
    method = "```python\nclass Box:\n    def double(self):\n        return self.size * 2\n```"
    transcript, files = attempt("whole_function", method, "Done.")
    assert (
        files["pkg/box.py"] == b"class Box:\n    def double(self):\n        return self.size * 2\n"
    )
    assert "most like" not in transcript.turns[0].results[0]


def test_a_method_without_its_class_is_indented_as_the_one_it_replaces() -> None:
    files = {"box.py": FILES["pkg/box.py"]}
    block = "```\ndef double(self):\n    return self.size * 2\n```"
    _, left = attempt("whole_function", block, "Done.", files=files)
    assert left["box.py"] == b"class Box:\n    def double(self):\n        return self.size * 2\n"


def test_of_two_blocks_for_a_function_the_later_holds() -> None:
    first = "```python\ndef double(value):\n    return 7\n```\nor rather\n"
    transcript, files = attempt("whole_function", first + FENCED, "Done.")
    assert files["pkg/core.py"] == FIXED
    assert len(transcript.turns[0].calls) == 1


@pytest.mark.parametrize(
    ("edits", "answer", "words"),
    [
        ("whole_function", "```python\ndef tripel(x):\n    return 3\n```", "no function tripel"),
        ("whole_function", "```python\ndef double(x:\n    return 3\n```", "does not parse"),
        ("search_replace", SEARCH.replace("pkg/core.py\n", ""), "lacks the path"),
        ("search_replace", "pkg/core.py\n<<<<<<< SEARCH\n=======\nx\n>>>>>>> REPLACE", "is there"),
        ("udiff", "--- a/x.py\n+++ b/x.py\nnothing", "has no hunk"),
        (
            "udiff",
            "--- a/pkg/core.py\n+++ b/pkg/core.py\n@@ @@\nreturn\n-x\n",
            "'return' in a hunk",
        ),
    ],
)
def test_what_is_no_edit_says_why(edits: str, answer: str, words: str) -> None:
    transcript, files = attempt(edits, answer, "Done.")
    assert words in transcript.turns[0].results[0]
    assert transcript.turns[0].calls[0].status is not CallStatus.OK
    assert files == FILES


def test_blocks_make_and_delete_files() -> None:
    _, files = attempt(
        "search_replace", "new.py\n<<<<<<< SEARCH\n=======\nx = 1\n>>>>>>> REPLACE", "Done."
    )
    assert files["new.py"] == b"x = 1\n"
    _, files = attempt("udiff", "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x = 1\n", "Done.")
    assert files["new.py"] == b"x = 1\n"


def test_prose_and_other_code_are_no_edits() -> None:
    text = "Run it:\n```sh\npytest\n```\nor\n```python\nprint(double(2))\n```\n"
    assert read_edits(text, "whole_function", FULL_TOOLS).calls == ()
    assert read_edits(text, "whole_function", FULL_TOOLS).prose == text.strip()


@settings(deadline=None)
@given(before=LINES, after=LINES, prose=st.sampled_from(["", "I change it.\n", "# Plan\n"]))
def test_a_diff_is_read_back_as_the_stretches_that_it_replaces(
    before: list[str], after: list[str], prose: str
) -> None:
    old, new = ([f"line {line}\n" for line in lines] for lines in (before, after))
    diff = "".join(difflib.unified_diff(old, new, "a/x.py", "b/x.py", n=100))
    calls = read_edits(f"{prose}```diff\n{diff}```\nDone.", "udiff", FULL_TOOLS).calls
    if old != new and old:
        assert [call.arguments["old"] for call in calls] == ["".join(old)]
        assert [call.arguments["new"] for call in calls] == ["".join(new)]


@pytest.mark.parametrize("edits", ["search_replace", "udiff"])
@pytest.mark.parametrize("mark", ["\x0c", "\r", "\x0b", "\x1c", "\x85", "\u2028"])
def test_only_a_newline_ends_a_line_of_an_edit(edits: str, mark: str) -> None:
    """Form feeds between functions and separators in strings are part of a line, as in git and the tools."""
    old, new = f"x = 1\n{mark}\ns = 'a{mark}b'", f"x = 2\n{mark}\ns = 'a{mark}b'"
    (call,) = read_edits(write_edit(edits, "x.py", old, new), edits, FULL_TOOLS).calls
    assert call.arguments == {"path": "x.py", "old": f"{old}\n", "new": f"{new}\n"}, call.error


@settings(deadline=None)
@given(old=LINES, new=LINES, prose=st.text(alphabet="ab é\n", max_size=20))
def test_a_search_block_is_read_back(old: list[str], new: list[str], prose: str) -> None:
    texts = ["".join(f"{line}\n" for line in lines) for lines in (old, new)]
    block = f"src/a.py\n<<<<<<< SEARCH\n{texts[0]}=======\n{texts[1]}>>>>>>> REPLACE"
    answer = read_edits(f"{prose}\n{block}\n{block}\n{prose}", "search_replace", FULL_TOOLS)
    assert len(answer.calls) == 2
    for call in answer.calls:
        assert call.arguments["path"] == "src/a.py"
        assert call.arguments.get("old", "") == texts[0]
        assert call.arguments.get("new", call.arguments.get("text")) == texts[1]


@settings(deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["```", "```python", "def f():", "    pass", "<<<<<<< SEARCH", "=======", "a/b.py"]
        )
        | st.sampled_from(
            [">>>>>>> REPLACE", "--- a/x", "+++ b/x", "@@ @@", "-y", "+z", " w", "", "class B:"]
        )
    ).map("\n".join),
    edits=st.sampled_from(list(GUIDES)),
)
def test_no_text_raises(text: str, edits: str) -> None:
    for call in read_edits(text, edits, FULL_TOOLS).calls:
        assert (call.status is CallStatus.OK) == (call.error == "")


def test_functions_of_one_name_in_two_files_are_two_edits() -> None:
    block = "```python\n# {}\ndef double(value):\n    return value\n```\n"
    text = "".join(map(block.format, ("pkg/core.py", "pkg/box.py", "pkg/core.py")))
    calls = read_edits(text, "whole_function", FULL_TOOLS).calls
    assert [call.arguments["path"] for call in calls] == ["pkg/box.py", "pkg/core.py"]


IMPORTING = (
    "```python\nfrom __future__ import annotations\nimport os, re\nfrom typing import List, Optional\n\n"
    "def double(value: Optional[int]):\n    return re.escape(os.sep) * value\n```\n"
)
DOCSTRING = '"""Doubles.\n\nimport os\n"""\nfrom __future__ import annotations\n\n'
ADDED = "import re\nfrom typing import Optional\n"
BODY = "def double(value: Optional[int]):\n    return re.escape(os.sep) * value\n"
OLD = "def double(value):\n    return valu * 2\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import os\n\n\n" + OLD, ADDED + "import os\n\n\n" + BODY),
        (
            DOCSTRING + "import os\nimport re\n\n" + OLD,
            DOCSTRING + "from typing import Optional\nimport os\nimport re\n\n" + BODY,
        ),
        ("@cached\n" + OLD, "import os, re\nfrom typing import Optional\n@cached\n" + BODY),
        (
            "try:\n    import re2 as re\nexcept ImportError:\n    re = None\nos = Optional = 1\n" + OLD,
            "try:\n    import re2 as re\nexcept ImportError:\n    re = None\nos = Optional = 1\n" + BODY,
        ),
        ("X = 1\n" + OLD + "import os\n", ADDED + "X = 1\n" + BODY + "import os\n"),
        ("import os\r\n\r\n" + OLD.replace("\n", "\r\n"), (ADDED + "import os\n\n" + BODY).replace("\n", "\r\n")),
    ],
    ids=["imports", "docstring", "none", "defined", "below", "CRLF"],
)  # fmt: skip
def test_imports_of_a_block_that_its_function_needs_are_added(before: str, after: str) -> None:
    transcript, files = attempt(
        "whole_function", IMPORTING, "Done.", files={"core.py": before.encode()}
    )
    assert files["core.py"].decode() == after
    assert [call.status for call in transcript.turns[0].calls] == [CallStatus.OK]
    assert transcript.end_reason is EndReason.FINISHED


def test_the_result_names_the_imports_that_were_added() -> None:
    transcript, _ = attempt("whole_function", IMPORTING, "Done.", files={"core.py": OLD.encode()})
    added = "added imports to core.py: import os, re; from typing import Optional"
    assert added in transcript.turns[0].results[0]
    defined = {"core.py": ("import os, re\nOptional = 1\n" + OLD).encode()}
    transcript, _ = attempt("whole_function", IMPORTING, "Done.", files=defined)
    assert "added imports" not in transcript.turns[0].results[0]


def test_blocks_of_one_file_share_their_imports() -> None:
    other = "```python\nimport re\n\ndef other():\n    return re.compile('')\n```\n"
    before = OLD + "\n\ndef other():\n    pass\n"
    transcript, files = attempt(
        "whole_function", IMPORTING + other, "Done.", files={"core.py": before.encode()}
    )
    text = files["core.py"].decode()
    assert text.startswith("import os, re\nfrom typing import Optional\ndef double")
    assert [call.status for call in transcript.turns[0].calls] == [CallStatus.OK] * 2
    assert transcript.end_reason is EndReason.FINISHED


def test_lines_that_look_like_the_header_of_a_diff_are_lines() -> None:
    query = "query = '''\n{}'''\n"
    diff = "--- a/q.py\n+++ b/q.py\n@@\n-select 1\n--- all\n+++ some\n+select 2\n"
    before = query.format("select 1\n-- all\n")
    transcript, files = attempt(
        "udiff", f"```diff\n{diff}```\n", "Done.", files={"q.py": before.encode()}
    )
    assert [call.status for call in transcript.turns[0].calls] == [CallStatus.OK]
    assert files["q.py"].decode() == query.format("++ some\nselect 2\n")


@pytest.mark.parametrize(
    ("old", "new"), [("A\n=======\nx", "A\n=======\ny"), ("x", "B\n=======\ny")]
)
def test_a_heading_of_seven_equals_signs_does_not_divide_a_block(old: str, new: str) -> None:
    block = f"a.md\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n"
    _, files = attempt("search_replace", block, "Done.", files={"a.md": f"0\n{old}\n1\n".encode()})
    assert files["a.md"].decode() == f"0\n{new}\n1\n"


def test_a_block_without_its_end_does_not_take_the_next_one() -> None:
    cut = "a.md\n<<<<<<< SEARCH\nx\n=======\ny\n" + SEARCH
    transcript, files = attempt("search_replace", cut, "Done.", files=FILES | {"a.md": b"x\n"})
    assert files == FILES | {"a.md": b"x\n"}
    assert [call.status for call in transcript.turns[0].calls] == [CallStatus.MALFORMED]


@pytest.mark.timeout(60)  # a second; minutes if each further line were tried
def test_a_file_of_equal_lines_is_edited_in_time() -> None:
    before = OLD + "x = 1\n" * 10_000 + OLD + "x = 1\n" * 10_000 + OLD
    transcript, files = attempt(
        "whole_function", IMPORTING, "Done.", files={"core.py": before.encode()}
    )
    assert files["core.py"].decode().count(BODY) == 1
    assert [call.status for call in transcript.turns[0].calls] == [CallStatus.OK]
    assert transcript.end_reason is EndReason.FINISHED
