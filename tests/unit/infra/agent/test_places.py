"""Places: which lines get tags, and that a tag reads what its line names."""

import asyncio

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact.calls import parse_answer
from ostinato.infra.agent.dialects.compact.places import tag_places
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.execute import CallResult, execute_calls
from ostinato.infra.agent.search.index import LocalSearch, SearchService
from ostinato.infra.agent.transcript import CallStatus
from tests.fakes.memory_sandbox import MemorySandbox

TAGGED = HarnessConfig(place_tags=True)
FILES = {
    "kit/lists.py": b"""def join_lists(first, second):
    both = first + second
    return both


class Stack:
    def push(self, value):
        self.values.append(value)
""",
    "kit/words.py": b"SEPARATOR = ' '\n\n\ndef join_words(words):\n    return SEPARATOR.join(words)\n",
}


@pytest.fixture
def box() -> AgentEnvironment:
    search = LocalSearch(SearchService(None), "kit", FILES)
    return AgentEnvironment(MemorySandbox(dict(FILES)), code_search=search)


def run(box: AgentEnvironment, answer: str, config: HarnessConfig = TAGGED) -> list[CallResult]:
    calls = parse_answer(answer, config.tools).calls
    return asyncio.run(execute_calls(calls, box, config))


def test_places_are_tagged_in_order_and_nothing_else_is() -> None:
    text = "a.py:3:x = 1\nb.py:4-9 def f():\n2 more matches\nc.py:1:d"
    tagged, places = tag_places(text)
    assert tagged == "<L1>a.py:3:x = 1\n<L2>b.py:4-9 def f():\n2 more matches\n<L3>c.py:1:d"
    assert places == {"<L1>": ("a.py", 3), "<L2>": ("b.py", 4), "<L3>": ("c.py", 1)}
    assert tag_places("no matches") == ("no matches", {})


def test_a_tag_reads_the_function_that_its_line_names(box: AgentEnvironment) -> None:
    (found,) = run(box, "<codebase_search>join words</codebase_search>")
    for line in found.text.split("\n"):
        tag, _, place = line.partition(">")
        path, _, title = place.partition(":")
        name = title.partition("(")[0].split(" ")[-1]
        if "def " not in title or path != "kit/words.py":
            continue
        (pointed,) = run(box, f"<read_file>{tag}></read_file>")
        (named,) = run(box, f"<read_file>{path}::{name}</read_file>")
        assert pointed.text == named.text
        assert pointed.record.arguments == named.record.arguments == {"path": f"{path}::{name}"}
        return
    raise AssertionError(f"no function of kit/words.py in {found.text!r}")


def test_a_tag_is_followed_before_the_calls_of_its_own_turn_run(box: AgentEnvironment) -> None:
    run(box, "<codebase_search>join words</codebase_search>")
    before = dict(box.state.places)
    answer = "<codebase_search>push value</codebase_search><read_file><L1></read_file>"
    _, read = run(box, answer)
    assert read.record.arguments["path"].startswith(before["<L1>"][0])
    assert box.state.places != before


def test_a_tag_without_a_place_is_the_models_mistake(box: AgentEnvironment) -> None:
    run(box, "<codebase_search>join words</codebase_search>")
    (read,) = run(box, "<read_file><L39></read_file>")
    assert read.record.status is CallStatus.INVALID_ARGUMENTS
    assert read.text == "error: the last search result has no <L39>"


def test_a_search_without_places_leaves_the_tags_before_it(box: AgentEnvironment) -> None:
    run(box, "<codebase_search>join words</codebase_search>")
    before = dict(box.state.places)
    run(box, "<codebase_search></codebase_search>")
    assert box.state.places == before


def test_without_the_option_nothing_is_tagged(box: AgentEnvironment) -> None:
    found, read = run(
        box,
        "<codebase_search>join words</codebase_search><read_file><L1></read_file>",
        HarnessConfig(),
    )
    assert "<L" not in found.text
    assert read.text == "error: no file <L1>"


def test_only_the_compact_dialect_has_tags() -> None:
    with pytest.raises(ValueError, match="place_tags"):
        HarnessConfig(place_tags=True, dialect="full")
