"""Checks of problems that a final message solves: right messages pass, other messages and changed files do not."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.change import AttemptChange
from ostinato.tasks.grading.judging.answers import MARGIN_LINES, judge_reply
from ostinato.tasks.problems.certification.records import Reason
from ostinato.tasks.problems.proving.replies import derive_places
from ostinato.tasks.records import CodePlace, Problem

_BEYOND = 999_999  # a line after the end of any file
_RIGHT_NO_EDIT = {
    "a sentence": "Nothing is wrong, so I changed nothing.",
    "with tests": "I ran the tests and they pass. The function works as it should.",
}
_WRONG_NO_EDIT = {
    "claims a fix": "I fixed the bug.",
    "names a bug": "There is a bug in this function.",
}


class TriedReply(NamedTuple):
    """One final message and its verdict."""

    name: str
    is_right: bool
    passed: bool


async def find_answer_faults(
    problem: Problem, repository: PreparedRepository
) -> list[tuple[Reason, str]]:
    """Answers of a question that are not found again, or that the agent can read."""
    assert problem.reply is not None
    places, faults = problem.reply.places, list[tuple[Reason, str]]()
    if places and (found := await derive_places(problem, repository)) != places:
        faults.append((Reason.GOLD_FAILS, f"the answer is now {', '.join(map(str, found))}"))
    for place in places:
        text = f"{place.path}:{place.first_line}"
        if text in problem.prompt:
            faults.append((Reason.LEAK_PROMPT, text))
        holding = (path for path, data in repository.files.items() if text.encode() in data)
        faults += [(Reason.LEAK_FILE, f"{text} in {path}") for path in holding]
    return faults


def try_replies(problem: Problem, repository: PreparedRepository) -> Iterator[TriedReply]:
    """Verdicts on right and wrong final messages, and on right ones with a changed file."""
    assert problem.reply is not None
    files = repository.files
    places = problem.reply.places
    right = _write_answers(places) if places else _RIGHT_NO_EDIT
    wrong = _write_guesses(problem, repository) if places else _WRONG_NO_EDIT
    good = next(iter(right.values()))

    def judge(
        message: str,
        changed: Mapping[str, bytes | None] | None = None,
        end: EndReason = EndReason.FINISHED,
    ) -> bool:
        transcript = Transcript(
            segments=(), turns=(), end_reason=end, final_message=message, wall_seconds=0.0
        )
        # hidden tests are missing in the agent's files, as in every attempt
        left = {**problem.break_files(files), **(changed or {})}
        return judge_reply(problem, AttemptChange.of(problem, left, repository), transcript).passed

    for name, message in right.items():
        yield TriedReply(name, True, judge(message))
    wrong = {**wrong, "no message": "", "only a thought": f"<think>{good}</think>"}
    for name, message in wrong.items():
        yield TriedReply(name, False, judge(message))
    test = next(path for path in sorted(files) if repository.is_test(path))
    changes: dict[str, dict[str, bytes | None]] = {
        "a changed file": {problem.path: files[problem.path] + b"\n# read\n"},
        "a removed file": {problem.path: None},
        "a changed test": {test: files[test] + b"\n# read\n"},
        "a new test": {f"{test.rpartition('/')[0]}/test_new.py".lstrip("/"): b""},
    }
    for name, changed in changes.items():
        yield TriedReply(f"the right message and {name}", False, judge(good, changed))
    unfinished = judge(good, end=EndReason.TURN_LIMIT)
    yield TriedReply("the right message in an unfinished attempt", False, unfinished)


def _write_answers(places: tuple[CodePlace, ...]) -> dict[str, str]:
    """The right answer in several notations."""
    return {
        "path:line": "\n".join(f"{one.path}:{one.first_line}" for one in places),
        "in words": " and ".join(f"line {one.last_line} of `{one.path}`" for one in places) + ".",
        "links": ", ".join(
            f"[here](/repo/{p.path}#L{p.first_line}-L{p.last_line})" for p in places
        ),
    }


def _write_guesses(problem: Problem, repository: PreparedRepository) -> dict[str, str]:
    """Answers that are wrong, or that name more than the right places."""
    assert problem.reply is not None
    product = [path for path in sorted(repository.files) if repository.is_editable(path)]
    sizes = {path: repository.files[path].count(b"\n") + 1 for path in product}
    places = problem.reply.places
    right = ", ".join(f"{one.path}:{one.first_line}" for one in places)
    guesses = {
        "a wrong place": f"{problem.path}:{_BEYOND}",
        "the right place and a wrong one": f"{right}, {places[0].path}:{_BEYOND}",
        "every line": ", ".join(
            f"{path}:1-{size + MARGIN_LINES + 1}" for path, size in sizes.items()
        ),
        "every place": " ".join(
            f"{path}:{number}" for path, size in sizes.items() for number in range(1, size + 1)
        ),
        "only the file": places[0].path,
    }
    if problem.reply.needs_all:
        guesses["one place less"] = ", ".join(f"{one.path}:{one.first_line}" for one in places[1:])
    return guesses
