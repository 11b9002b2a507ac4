"""Problems as a package for verifiers: exported by the command, installed, loaded and rolled out by verifiers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.tasks.records import Split
from tests.fakes.one_line_problem import make_one_line_problem

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(600)]  # builds a package
SOURCE = "def double(value):\n    return value * 2\n"
TESTS = "from pkg.code import double\n\n\ndef test_double():\n    assert double(4) == 8\n"
EDIT = ("    return value * 2", "    return value * 3")
FIX = {"path": "pkg/code.py", "old": "value * 3", "new": "value * 2"}


@pytest.fixture
def problem_set(tmp_path: Path) -> Path:
    """A built set of one problem for RL and one held out."""
    target = tmp_path / "built"
    repository, problem = make_one_line_problem(
        target / "repositories" / "pkg" / "files",
        SOURCE,
        TESTS,
        EDIT,
        symbol="double",
        failing="test_double",
    )
    repository.save()
    held_out = problem.model_copy(update={"problem_id": "pkg-double-2", "split": Split.HELD_OUT})
    lines = [each.model_dump_json() + "\n" for each in (problem, held_out)]
    (target / "problems.jsonl").write_text("".join(lines))
    return target


@pytest.fixture
def environment(problem_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The environment of the installed package."""
    import verifiers as vf

    package = tmp_path / "double-trouble"
    told = CliRunner().invoke(
        app, ["problems", "export", str(problem_set), str(package), "--format", "verifiers"]
    )
    assert told.exit_code == 0, told.output
    assert "2 tasks written" in told.output
    install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps")
    target = tmp_path / "installed"
    subprocess.run([*install, "--target", str(target), str(package)], check=True)
    monkeypatch.syspath_prepend(target)
    return vf.load_environment("double-trouble")


def scripted(answers: list):
    """A model of verifiers' that gives these answers: calls as (tool, arguments), or a text."""
    import verifiers as vf
    from verifiers.types import Response, ResponseMessage, ToolCall

    left = list(answers)

    class Scripted(vf.Client):
        def setup_client(self, config):
            raise NotImplementedError

        to_native_tool = to_native_prompt = get_native_response = setup_client
        raise_from_native_response = from_native_response = close = setup_client

        async def get_response(self, prompt, model, sampling_args, tools=None, **others):
            answer = left.pop(0)
            calls = None
            if not isinstance(answer, str):
                name, arguments = answer
                calls = [ToolCall(id=f"c{len(left)}", name=name, arguments=json.dumps(arguments))]
            message = ResponseMessage(
                content=answer if calls is None else None,
                tool_calls=calls,
                finish_reason="stop" if calls is None else "tool_calls",
                is_truncated=False,
            )
            return Response(id="r", created=0, model=model, message=message)

    return Scripted(None)


async def roll_out(environment, answers: list):
    row = environment.get_dataset()[0]
    state = await environment.rollout(row, scripted(answers), "model", {})
    await environment.rubric.score_rollout(state)
    return state


async def test_the_right_fix_is_paid_and_none_is_not(environment) -> None:
    names = [tool.name for tool in environment.tool_defs]
    assert {"read_file", "edit_file", "run_terminal"} <= set(names)
    assert [row["info"]["problem_id"] for row in environment.get_dataset()] == ["pkg-double"]
    assert [row["info"]["problem_id"] for row in environment.get_eval_dataset()] == ["pkg-double-2"]
    try:
        look = ("read_file", {"path": "pkg/code.py"})
        test = ("run_terminal", {"command": "pytest"})
        fixed = await roll_out(environment, [look, ("edit_file", FIX), test, "Fixed."])
        assert fixed["error"] is None
        assert fixed["reward"] == 1.0, fixed["verdict"]
        results = [each.content for each in fixed["completion"] if each.role == "tool"]
        assert "value * 3" in results[0]
        assert "passed" in results[2]
        idle = await roll_out(environment, ["All is well."])
        assert (idle["error"], idle["reward"]) == (None, 0.0)
        wrong = await roll_out(environment, [("edit_file", {**FIX, "new": "8"}), "Fixed."])
        assert wrong["reward"] == 0.0, wrong["verdict"]
    finally:
        await environment.close()
