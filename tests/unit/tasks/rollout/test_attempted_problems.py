"""No agent finds in its own program what a problem removed."""

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.harnesses import HarnessCommand
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.egress.config import EgressConfig, SandboxConfig
from ostinato.tasks.records import Problem
from ostinato.tasks.rollout.attempted_problems import choose_attempted
from tests.fakes.rollouts import make_problem

BRINGS = HarnessConfig(
    program="command",
    command=HarnessCommand(packages=("six==1.17.0", "iniconfig==2.1.0"), command="true"),
)
CLOSED = SandboxConfig()
WITH_INDEX = SandboxConfig(egress=EgressConfig(allow=("index",)))
PATHS = ("six.py", "src/iniconfig/_parse.py", "pkg/code.py", "src/sixes/code.py", "")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    made = make_problem("p")
    return [made.model_copy(update={"problem_id": path, "path": path}) for path in PATHS]


def test_problems_of_packages_that_a_program_brings_are_left_out(problems: list[Problem]) -> None:
    left = choose_attempted(problems, BRINGS, CLOSED)
    assert [problem.path for problem in left] == ["pkg/code.py", "src/sixes/code.py", ""]


def test_builtin_loop_attempts_all(problems: list[Problem]) -> None:
    assert choose_attempted(problems, HarnessConfig(), CLOSED) == problems


def test_set_of_brought_packages_alone_is_refused(problems: list[Problem]) -> None:
    with pytest.raises(ProblemError, match="all 2 problems are of packages that harness"):
        choose_attempted(problems[:2], BRINGS, CLOSED)


def test_problems_of_packages_inside_pip_are_left_out_of_boxes_with_an_index() -> None:
    paths = ("rich/text.py", "src/packaging/version.py", "pip/_internal/cli.py", "richer/text.py")
    made = make_problem("p")
    problems = [made.model_copy(update={"problem_id": path, "path": path}) for path in paths]
    assert choose_attempted(problems, HarnessConfig(), CLOSED) == problems
    left = choose_attempted(problems, HarnessConfig(), WITH_INDEX)
    assert [problem.path for problem in left] == ["richer/text.py"]
