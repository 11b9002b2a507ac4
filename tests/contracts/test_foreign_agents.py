"""Agents as their package indexes have them, in a box, behind a scripted model: each makes one attempt."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.records import Group, Outcome, Trajectory
from ostinato.tasks.reinforcement.learning.batches.advantages import make_samples
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig
from tests.fakes.foreign_programs import ForeignRollouts, open_rollouts
from tests.fakes.one_line_problem import write_package
from tests.fakes.rollouts import make_problem

# the first installs 57 packages, 230 MB, each of the others 350 to 430 MB
pytestmark = pytest.mark.timeout(1800)
SOURCE = "def one():\n    return 1\n"
TESTS = "from pkg.code import one\n\n\ndef test_one():\n    assert one() == 1\n"
COMMAND = "sed -i '2s/.*/    return 1/' /repo/pkg/code.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def fenced(command: str) -> str:
    return f"So.\n\n```mswea_bash_command\n{command}\n```"


def called(name: str, **arguments: str) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"I put it back.\n<tool_call>\n{said}\n</tool_call>"


ANSWERS = {
    # an answer without a command is not in the next request: a branch
    "mini_swe_agent": (fenced(COMMAND), "I forget the command.", fenced(SUBMIT)),
    "mini_swe_agent_tools": (called("bash", command=COMMAND), called("bash", command=SUBMIT)),
    "codex": (called("exec_command", cmd=COMMAND), "Fixed."),
    "claude_code": (called("Bash", command=COMMAND, description="put it back"), "Fixed."),
    "opencode": (called("bash", command=COMMAND, description="put it back"), "Fixed."),
}
TITLE = "A title"  # which a program asks for beside its work


def answering(program: str) -> Callable[[str], str]:
    """Answers by how many there are in the conversation."""

    def answer(conversation: str) -> str:
        if program != "mini_swe_agent" and "<tools>" not in conversation:
            return TITLE
        if "Format error" in conversation.rpartition("<|user|>")[2]:
            return fenced(SUBMIT)
        return ANSWERS[program][conversation.count("<|assistant|>")]

    return answer


def check_trained(one: Trajectory, renderer: Renderer) -> None:
    """What is trained is what was sampled, in the order of the turns."""
    group = Group(group_id="run.g0", problem_id="p0", trajectories=(one,))
    segments = [sample.segment for sample in make_samples(group, ObjectiveConfig())]
    trained = [token for each in segments for token in each.token_ids_T[each.loss_mask_T].tolist()]
    texts = [turn.text for turn in one.transcript.turns]
    assert trained == [token for text in texts for token in renderer.encode_answer(text)]
    assert all(np.all(each.logprobs_T[each.loss_mask_T] == -0.5) for each in segments)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("mini_swe_agent", marks=pytest.mark.slow),
        pytest.param("mini_swe_agent_tools", marks=pytest.mark.slow),
        pytest.param("codex", marks=pytest.mark.nightly),
        pytest.param("claude_code", marks=pytest.mark.nightly),
        pytest.param("opencode", marks=pytest.mark.nightly),
    ],
)
def test_it_solves_a_problem_and_what_it_sampled_is_trained(program: str, tmp_path: Path) -> None:
    repository = write_package(tmp_path / "files", SOURCE, TESTS)
    problem = make_problem("p0").model_copy(
        update={"repository_fingerprint": repository.fingerprint}
    )
    renderer = Renderer(train_tokenizer([SOURCE, TESTS], 400))

    async def run() -> tuple[Trajectory, ForeignRollouts]:
        rollouts = open_rollouts(
            *(program, answering(program), renderer, repository, problem),
            dialect="full",
            context_tokens=400_000,
            max_generated_tokens=20_000,
        )
        try:
            return await rollouts.attempt(), rollouts
        finally:
            await rollouts.worker.close()

    one, rollouts = asyncio.run(run())
    assert one.outcome is Outcome.FINISHED, one.reason
    assert one.verdict is not None
    assert one.verdict.passed
    texts = [turn.text for turn in one.transcript.turns if turn.text != TITLE]
    assert texts == list(ANSWERS[program])
    if program == "mini_swe_agent":
        assert [turn.continues for turn in one.transcript.turns] == [None, None, 0]
    work = one.transcript.segments[-1]
    first = next(
        request
        for request in rollouts.model.requests
        if tuple(work.token_ids_T[: len(request.token_ids)].tolist()) == request.token_ids
    )
    assert not work.loss_mask_T[: len(first.token_ids)].any()
    check_trained(one, renderer)
