"""A small repository in memory and a renderer, shared by the harness tests."""

import pytest

from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.sandbox.protocol import Frame, Sandbox, TestFailure, TestOutcome, TestReport
from ostinato.models.rendering import Renderer, train_tokenizer
from tests.fakes.memory_sandbox import MemorySandbox

SOURCE = """import os


def double(value):
    result = valu * 2
    return result


class Box:
    @property
    def size(self):
        return 1
"""


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(train_tokenizer([SOURCE], vocab_size=400))


@pytest.fixture
def sandbox() -> MemorySandbox:
    return MemorySandbox({"pkg/core.py": SOURCE.encode(), "README.md": b"hello\n"})


@pytest.fixture
def environment(sandbox: MemorySandbox) -> AgentEnvironment:
    async def run_tests(box: Sandbox) -> TestReport:
        if b"value * 2" in await box.read("pkg/core.py"):
            outcomes = {"t": TestOutcome.PASSED}
            return TestReport(outcomes=outcomes, route="hot", seconds=0.0)
        failure = TestFailure(
            test_id="t",
            error_type="NameError",
            message="name 'valu' is not defined",
            frames=(
                Frame(path="tests/test_core.py", line_number=3),
                Frame(path="pkg/core.py", line_number=5),
            ),
        )
        return TestReport(
            outcomes={"t": TestOutcome.FAILED}, first_failure=failure, route="hot", seconds=0.0
        )

    return AgentEnvironment(sandbox, run_tests=run_tests)
