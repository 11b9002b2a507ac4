"""The tools in a real box with a real test server: what the fakes assume is so."""

import asyncio
from pathlib import Path

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.search.index import LocalSearch, SearchService
from ostinato.infra.agent.tools.testing import make_test_runner
from ostinato.infra.agent.transcript import CallStatus, EndReason
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.repository import PreparedRepository
from tests.fakes.scripted_model import ScriptedModel

GOOD = "def double(value):\n    result = value * 2\n    return result\n"
CONFIG = HarnessConfig(context_tokens=3000, max_generated_tokens=3000)
LOOK = "<run_terminal>pytest</run_terminal><read_file>pkg/core.py::double</read_file>"
SEARCH = (
    "<list_dir></list_dir><grep>val(u|ue) \\*</grep><grep>zebra</grep><grep>(</grep>"
    "<codebase_search>double</codebase_search><read_file>pkg/no.py</read_file>"
    "<read_file>pkg</read_file><read_file>../../etc/passwd</read_file><list_dir>zoo</list_dir>"
)
WORK = (
    "<run_terminal>exit 3</run_terminal><run_terminal>echo a > b.txt; cat b.txt</run_terminal>"
    "<write_file><path>new/c.txt</path><text>hi</text></write_file>"
)
REPAIR = (
    "<read_file>pkg/core.py::double</read_file><edit_file><L2>    result = value * 2</edit_file>"
    "<run_terminal>pytest -q</run_terminal><read_lints></read_lints>"
)
ANSWERS = [LOOK, SEARCH, WORK, REPAIR, "Fixed."]


async def attempt(directory: Path, renderer):
    repository = PreparedRepository.from_directory("pkg", directory, ("pkg",), ("tests",))
    place = RepositoryEnvironment.create(repository, boxes=1)
    run_tests = make_test_runner(place.test_server, ["tests/test_core.py::test_double"], 120.0)
    broken = GOOD.replace("value * 2", "valu * 2").encode()
    try:
        async with place.leased({"pkg/core.py": broken}) as sandbox:
            model = ScriptedModel(renderer, ANSWERS)
            search = LocalSearch(SearchService(None), "pkg", place.repository.files)
            environment = AgentEnvironment(sandbox, run_tests, code_search=search)
            request = AgentRequest(prompt="Fix double", session_id="s")
            transcript = await run_agent(model, renderer, environment, request, CONFIG)
            return transcript, await sandbox.diff()
    finally:
        await place.close()


def test_every_tool_works_in_a_real_box(tmp_path: Path, renderer) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "core.py").write_text(GOOD)
    test = "from pkg.core import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
    (tmp_path / "tests" / "test_core.py").write_text(test)
    transcript, changed = asyncio.run(attempt(tmp_path, renderer))
    assert transcript.end_reason is EndReason.FINISHED
    look, search, terminal, repair, _ = transcript.turns
    assert look.results[0] == "failed: NameError: name 'valu' is not defined at <L2>"
    assert search.results[0] == "pkg/\ntests/"
    assert search.results[1].startswith("pkg/core.py:2:    result = valu * 2")
    assert search.results[2] == "no matches"
    assert "pkg/core.py:1-4 def double(value):" in search.results[4]
    statuses = [call.status for call in search.calls]
    assert statuses[3] is CallStatus.ENVIRONMENT
    assert statuses[5:] == [CallStatus.ENVIRONMENT] * 4
    assert terminal.results == ("exit code 3", "a", "ok")
    assert repair.results[1:] == ("ok", "passed", "no new lints")
    assert changed == {"b.txt": b"a\n", "new/c.txt": b"hi"}
