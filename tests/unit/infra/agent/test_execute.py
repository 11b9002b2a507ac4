"""Tools over a sandbox: results in call order, conflicts in call order, failures as results."""

import asyncio
from dataclasses import replace

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact.calls import parse_answer
from ostinato.infra.agent.dialects.compact.tools import COMPACT_TOOLS
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.execute import execute_calls
from ostinato.infra.agent.search.index import LocalSearch, SearchService
from ostinato.infra.agent.tools.definition import tool_schemas
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.platform.errors import SandboxLost
from tests.fakes.memory_sandbox import MemorySandbox

CONFIG = HarnessConfig()


def run(environment: AgentEnvironment, text: str, config: HarnessConfig = CONFIG):
    calls = parse_answer(text, config.tools).calls
    return asyncio.run(execute_calls(calls, environment, config))


def texts(environment: AgentEnvironment, text: str, config: HarnessConfig = CONFIG) -> list[str]:
    return [result.text for result in run(environment, text, config)]


READ = "<read_file>pkg/core.py::double</read_file>"
VIEW = "<L1>def double(value):\n<L2>    result = valu * 2\n<L3>    return result"


def test_a_report_names_the_line_of_the_region_read_in_the_same_turn(environment) -> None:
    assert texts(environment, "<run_terminal>pytest</run_terminal>" + READ) == [
        "failed: NameError: name 'valu' is not defined at <L2>",
        VIEW,
    ]


def test_an_edit_and_the_tests_after_it_run_in_order(environment, sandbox: MemorySandbox) -> None:
    run(environment, READ)
    answer = "<edit_file><L2>    result = value * 2</edit_file><run_terminal>pytest</run_terminal>"
    assert texts(environment, answer) == ["ok", "passed"]
    assert b"result = value * 2\n" in sandbox.files["pkg/core.py"]


def test_edits_apply_to_the_text_as_read(environment, sandbox: MemorySandbox) -> None:
    run(environment, READ)
    run(environment, "<edit_file><L3>    return 7</edit_file>")
    assert texts(environment, "<edit_file><L2>    result = value * 2</edit_file>") == ["ok"]
    assert b"value * 2\n    return result\n" in sandbox.files["pkg/core.py"]
    assert texts(environment, "<edit_file><L2>    result = value * 2</edit_file>") == [
        "error: the edit changes nothing"
    ]


def test_line_edits_need_a_fresh_read(environment, sandbox: MemorySandbox) -> None:
    edit = "<edit_file><L2>    pass</edit_file>"
    assert "read a file before" in texts(environment, edit)[0]
    run(environment, READ)
    sandbox.files["pkg/core.py"] += b"# more\n"
    assert "changed since it was read" in texts(environment, edit)[0]


def test_search_and_replace_wants_one_match(environment, sandbox: MemorySandbox) -> None:
    def edit(old: str) -> str:
        return f"<edit_file><path>pkg/core.py</path><old>{old}</old><new>value *</new></edit_file>"

    assert "occurs 0 times" in texts(environment, edit("zebra"))[0]
    assert "occurs 2 times" in texts(environment, edit("result = ") + edit("return"))[1]
    assert b"value * 2" not in sandbox.files["pkg/core.py"]
    assert texts(environment, edit("valu *")) == ["ok"]
    assert b"value * 2" in sandbox.files["pkg/core.py"]


def test_listing_writing_and_missing_files(environment) -> None:
    answer = (
        "<list_dir></list_dir><write_file><path>pkg/new.py</path><text>x = 1\n</text></write_file>"
        "<list_dir>pkg</list_dir><read_file>nothing.py</read_file><list_dir>zoo</list_dir>"
    )
    assert texts(environment, answer) == [
        "README.md\npkg/",
        "ok",
        "core.py\nnew.py",
        "error: no file nothing.py",
        "error: no directory zoo",
    ]


def test_only_new_lints_are_shown(environment) -> None:
    assert texts(environment, "<read_lints>pkg/core.py</read_lints>") == ["no new lints"]
    run(environment, READ)
    run(environment, "<edit_file><L3>    return nothing</edit_file>")
    (lints,) = texts(environment, "<read_lints></read_lints>")
    assert "<L3>: F821 Undefined name `nothing`" in lints
    assert "valu`" not in lints
    run(environment, "<edit_file><L3>    return (</edit_file>")
    assert "SyntaxError" in texts(environment, "<read_lints></read_lints>")[0]


def test_search_finds_code_and_grep_runs_in_the_box() -> None:
    box = MemorySandbox({"a.py": b"def first():\n    pass\n"}, run=lambda command: (1, b""))
    search = LocalSearch(SearchService(None), "repo", dict(box.files))
    environment = AgentEnvironment(box, code_search=search)
    answer = "<codebase_search>first</codebase_search><grep>it's</grep>"
    assert texts(environment, answer) == ["a.py:1-3 def first():", "no matches"]
    assert "-e 'it'\"'\"'s' -- ." in box.commands[0]


def test_commands_report_their_exit_code() -> None:
    box = MemorySandbox({}, run=lambda command: (3, b"no such thing\n"))
    answer = "<run_terminal>make</run_terminal><run_terminal>pytest</run_terminal>"
    assert texts(AgentEnvironment(box), answer) == ["exit code 3\nno such thing"] * 2


def test_users_and_lists(environment) -> None:
    answer = "<todo_write>- fix it</todo_write><ask_user>Which one?</ask_user>"
    assert texts(environment, answer) == ["ok", "no user available"]
    assert environment.state.todo == "- fix it"


def test_slow_calls_time_out_and_others_still_answer(environment) -> None:
    async def never(question: str) -> str:
        await asyncio.sleep(60)
        return question

    slow = replace(environment, ask_user=never, ask_limit_seconds=0.05)
    results = run(slow, "<ask_user>?</ask_user><todo_write>a</todo_write>")
    assert [result.record.status for result in results] == [CallStatus.TIMEOUT, CallStatus.OK]
    assert results[0].text == "error: ask_user ran longer than 0.05 seconds"


def test_independent_calls_run_at_the_same_time(environment) -> None:
    meeting = asyncio.Barrier(2)

    async def meet(question: str) -> str:
        await meeting.wait()
        return "met"

    class Meeting(MemorySandbox):
        async def read(self, path: str) -> bytes:
            await meeting.wait()
            return await super().read(path)

    both = AgentEnvironment(Meeting({"a.py": b"x\n"}), ask_user=meet)
    config = HarnessConfig(call_time_limit_seconds=60)
    answer = "<ask_user>?</ask_user><read_file>a.py</read_file>"
    assert texts(both, answer, config) == ["met", "<L1>x"]


def test_long_results_are_cut_in_the_middle(environment) -> None:
    config = HarnessConfig(result_limit_characters=100)
    write = f"<write_file><path>b.py</path><text>{'x' * 900}</text></write_file>"
    answer = write + "<read_file>b.py</read_file>"
    shown = texts(environment, answer, config)[1]
    assert len(shown) <= 100
    assert "characters cut" in shown
    assert shown.startswith("<L1>xx")
    assert shown.endswith("xx")


def test_a_lost_sandbox_ends_the_turn(environment, sandbox: MemorySandbox) -> None:
    sandbox.is_lost = True
    with pytest.raises(SandboxLost):
        run(environment, READ)


def test_schemas_name_every_argument() -> None:
    schemas = tool_schemas(COMPACT_TOOLS.values())
    assert len(schemas) == 10
    for schema, tool in zip(schemas, COMPACT_TOOLS.values(), strict=True):
        parameters = schema["function"]["parameters"]
        assert set(parameters["properties"]) == {argument.name for argument in tool.arguments}


def test_unknown_tools_in_the_config_are_named() -> None:
    with pytest.raises(ValueError, match="delete_all"):
        HarnessConfig(tools=("read_file", "delete_all"))


def test_codebase_search_asks_the_service_about_the_files_as_they_are_now() -> None:
    box = MemorySandbox({"pkg/a.py": b"def first_true():\n    pass\n", "b.py": b"x = 1\n"})
    search = LocalSearch(SearchService(None), "repo", dict(box.files))
    there = AgentEnvironment(box, code_search=search)
    asked = "<codebase_search>first true</codebase_search>"

    assert texts(there, asked) == ["pkg/a.py:1-3 def first_true():"]
    box.files["b.py"] = b"def first_true(value):\n    return value\n"
    assert "b.py:1-3 def first_true(value):" in texts(there, asked)[0].splitlines()
