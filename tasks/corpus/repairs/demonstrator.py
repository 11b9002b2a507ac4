"""A scripted agent that knows the answer. Its log-probabilities are zero: nothing was sampled."""

from collections.abc import Generator

import numpy as np

from ostinato.infra.agent.loop.prompts import START_OVER, SUMMARY_REQUEST
from ostinato.infra.agent.tools.names import PASSED
from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.vocabulary import ASSISTANT, END, TOOL, USER
from ostinato.tasks.corpus.repairs.locating import LocatingCalls
from ostinato.tasks.corpus.repairs.transcripts import (
    FIXED,
    GAVE_UP,
    NOT_FOUND,
    Plan,
    RepairScript,
    edit_turns,
    read_turns,
)

AnswerScript = Generator[str, str, None]


class Demonstrator:
    """Answers one attempt at one problem."""

    def __init__(self, renderer: Renderer, conversation: AnswerScript, summary: str = "") -> None:
        """`conversation` yields answers and is sent results. `summary`: what it writes when asked for one."""
        self._renderer = renderer
        self._conversation = conversation
        self._summary = summary
        self._has_started = False
        self._result: str | None = None  # of the turn before a summary

    async def generate(self, request: GenerateRequest) -> Generation:
        """The next answer to what the tools said last."""
        text = self._renderer.decode(request.token_ids).removesuffix(f"{END}{ASSISTANT}")
        if text.endswith(f"{USER}{SUMMARY_REQUEST}"):
            self._result = _last_result(text.removesuffix(f"{END}{USER}{SUMMARY_REQUEST}"))
            answer = PASSED if self._result == PASSED else self._summary
        elif self._has_started:
            result = _last_result(text) if self._result is None else self._result
            self._result = None
            answer = self._conversation.send(result)
        else:
            answer = next(self._conversation)
            self._has_started = True
        ids = self._renderer.encode_answer(answer)
        is_whole = len(ids) <= request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logprobs_T=np.zeros(len(ids), dtype=np.float32),
            weight_versions_T=np.zeros(len(ids), dtype=np.int64),
            routed_experts=np.zeros((0, 0, 0), dtype=np.int16),
            route_offset=0,
            stop_reason=StopReason.STOP_TOKEN if is_whole else StopReason.LENGTH,
        )

    async def end_session(self, session_id: str) -> None:
        """Does nothing: the attempt may go on in another segment."""


def _last_result(text: str) -> str:
    return text.rpartition(TOOL)[2]


def locate_and_repair(
    locating: LocatingCalls, plan: Plan, *, right: str, wrong: str
) -> AnswerScript:
    """A repair of a function that is only described."""
    place = yield from locating
    if place is None:
        yield NOT_FOUND
    else:
        yield from repair(plan, place, right=right, wrong=wrong)


def repair(plan: Plan, place: str, *, right: str, wrong: str) -> AnswerScript:
    """A repair in the compact dialect of the function at a place, with the plan's script."""
    for calls in read_turns(plan, place):
        yield "".join(calls)
    if plan.script is not RepairScript.RIGHT:
        result = yield from _edit_and_test(plan, wrong)
        if result == PASSED:
            yield FIXED
            return
        if plan.script is RepairScript.GIVE_UP:
            yield GAVE_UP
            return
        if plan.script is RepairScript.START_OVER:
            yield f"{START_OVER} {wrong.removeprefix('<edit_file>').removesuffix('</edit_file>')} did not pass"
            for calls in read_turns(plan, place):
                yield "".join(calls)
    result = yield from _edit_and_test(plan, right)
    yield FIXED if result == PASSED else GAVE_UP


def _edit_and_test(plan: Plan, edit: str) -> Generator[str, str, str]:
    result = ""
    for calls in edit_turns(plan, edit):
        result = yield "".join(calls)
    return result
