"""A scripted agent that knows the answer. Its log-probabilities are zero, since nothing is sampled."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.dialect import dialect_of
from ostinato.infra.agent.dialects.edits.blocks import write_edit, write_function
from ostinato.infra.agent.loop.prompts import START_OVER, SUMMARY_REQUEST
from ostinato.infra.agent.tools.names import EDIT_FILE, PASSED
from ostinato.infra.platform.errors import ConfigError
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
from ostinato.tasks.problems.published import facts_of
from ostinato.tasks.records import LineEdit, Problem

AnswerScript = Generator[str, str, None]


class Demonstrator:
    """Model client that answers one attempt at one problem by a script."""

    def __init__(self, renderer: Renderer, conversation: AnswerScript, summary: str = "") -> None:
        """`conversation` yields answers and is sent results. `summary` answers a summary request."""
        self._renderer = renderer
        self._conversation = conversation
        self._summary = summary
        self._has_started = False
        self._result: str | None = None  # of the turn before a summary

    async def generate(self, request: GenerateRequest) -> Generation:
        """The next answer to the latest tool results."""
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
    """The conversation that locates a described function and repairs it."""
    place = yield from locating
    if place is None:
        yield NOT_FOUND
    else:
        yield from repair(plan, place, right=right, wrong=wrong)


def repair(plan: Plan, place: str, *, right: str, wrong: str) -> AnswerScript:
    """The conversation of a repair in the compact dialect, by the plan's script. `place`: the function."""
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


@dataclass(slots=True)
class _Lines:
    """A file that is edited line by line. Edits keep the number of lines."""

    lines: list[str]

    def replace(self, edit: LineEdit) -> tuple[str, str]:
        """Applies an edit. Returns its old and new text, with enough lines around to be unique."""
        first = last = edit.line_number - 1
        whole = "\n".join(self.lines)
        while whole.count("\n".join(self.lines[first : last + 1])) > 1:
            first, last = max(first - 1, 0), last + (first == 0)
        old = "\n".join(self.lines[first : last + 1])
        self.lines[edit.line_number - 1] = edit.gold_text
        return old, "\n".join(self.lines[first : last + 1])


def write_repair(
    problem: Problem, broken: Mapping[str, bytes], harness: HarnessConfig
) -> str | None:
    """The calls or blocks that restore the gold lines. None if a wrong line is not in the prompt,
    or if one answer cannot hold all calls.
    """
    seen = {
        (file.path, file.first_line + number)
        for file in facts_of(problem, broken, harness).recent_files
        for number in range(file.text.count("\n") + 1)
    }
    if problem.blocks or any((edit.path, edit.line_number) not in seen for edit in problem.edits):
        return None
    if harness.edits == "tool" and len(problem.edits) > 1 and not dialect_of(harness).several_calls:
        return None
    return "\n".join(_calls(problem, broken, harness))


def _calls(problem: Problem, broken: Mapping[str, bytes], harness: HarnessConfig) -> Iterator[str]:
    files = {path: _Lines(content.decode().split("\n")) for path, content in broken.items()}
    for edit in sorted(problem.edits, key=lambda edit: (edit.path, edit.line_number)):
        old, new = files[edit.path].replace(edit)
        if harness.edits == "tool":
            yield _write_call(harness, {"path": edit.path, "old": old, "new": new})
        elif harness.edits != "whole_function":
            yield write_edit(harness.edits, edit.path, old, new)
    if harness.edits == "whole_function":
        yield write_function(problem.symbol, files[problem.path].lines)


def _write_call(harness: HarnessConfig, arguments: Mapping[str, str]) -> str:
    write = dialect_of(harness).write
    if write is None:
        raise ConfigError(
            f"dialect {harness.dialect!r} writes no calls, wanted one with `write` for demonstrations; "
            "set [corpus.demonstrations] count = 0"
        )
    return write(EDIT_FILE, arguments)


def repair_plainly(calls: str) -> AnswerScript:
    """The conversation of a repair: all calls in one answer, then the closing message."""
    yield calls
    yield FIXED
