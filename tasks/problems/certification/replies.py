"""Checks of problems that a final message solves: right messages pass, other messages and changed files do not."""

from collections.abc import Iterator, Mapping

from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.change import AttemptChange
from ostinato.tasks.grading.judging.answers import MARGIN_LINES, judge_reply
from ostinato.tasks.problems.certification.records import Reason
from ostinato.tasks.problems.proving.replies import derive_places
from ostinato.tasks.records import CodePlace, Problem

_BEYOND = 999_999  # a line after the end of any file
_FINDS_NOTHING = {"nothing": "I changed nothing.", "with tests": "The tests pass. It works."}
_CLAIMS = {"a claimed fix": "I fixed it.", "a claimed bug": "There is a bug in this function."}


async def find_answer_faults(
    problem: Problem, repository: PreparedRepository
) -> list[tuple[Reason, str]]:
    """Answers of a question that are not found again, or that the agent can read."""
    places = problem.reply.places if problem.reply else ()
    faults: list[tuple[Reason, str]] = []
    if places and (found := await derive_places(problem, repository)) != places:
        faults.append((Reason.GOLD_FAILS, f"the answer is now {', '.join(map(str, found))}"))
    for text in (f"{place.path}:{place.first_line}" for place in places):
        faults += [(Reason.LEAK_PROMPT, text)] * (text in problem.prompt)
        holding = (path for path, data in repository.files.items() if text.encode() in data)
        faults += [(Reason.LEAK_FILE, f"{text} in {path}") for path in holding]
    return faults


def try_replies(
    problem: Problem, repository: PreparedRepository
) -> Iterator[tuple[str, bool, bool]]:
    """Name of each tried end of an attempt, whether it is right, and whether it passes."""
    files, places = repository.files, problem.reply.places if problem.reply else ()
    right = _write_answers(places) if places else _FINDS_NOTHING
    wrong = _write_guesses(problem, repository) if places else _CLAIMS
    good = next(iter(right.values()))
    test = min(path for path in files if repository.is_test(path))
    changes: dict[str, dict[str, bytes | None]] = {
        "a changed file": {problem.path: files[problem.path] + b"\n# read\n"},
        "a removed file": {problem.path: None},
        "a changed test": {test: files[test] + b"\n# read\n"},
        "a new test": {f"{test}_new.py" if "/" in test else "conftest.py": b""},
    }

    def judge(message: str, changed: Mapping[str, bytes | None], end: EndReason) -> bool:
        ended = Transcript(
            segments=(), turns=(), end_reason=end, final_message=message, wall_seconds=0.0
        )
        left = {**problem.break_files(files), **changed}  # which lack hidden tests
        return judge_reply(problem, AttemptChange.of(problem, left, repository), ended).passed

    for name, message in right.items():
        yield name, True, judge(message, {}, EndReason.FINISHED)
    wrong = {**wrong, "no message": "", "only a thought": f"<think>{good}</think>"}
    for name, message in wrong.items():
        yield name, False, judge(message, {}, EndReason.FINISHED)
    for name, changed in changes.items():
        yield f"right with {name}", False, judge(good, changed, EndReason.FINISHED)
    yield "right in an unfinished attempt", False, judge(good, {}, EndReason.TURN_LIMIT)


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
    places = problem.reply.places if problem.reply else ()
    texts = {path: data for path, data in repository.files.items() if repository.is_editable(path)}
    sizes = {path: data.count(b"\n") + 2 + MARGIN_LINES for path, data in texts.items()}
    right = [f"{one.path}:{one.first_line}" for one in places]
    return {
        "a wrong place": f"{problem.path}:{_BEYOND}",
        "the right place and a wrong one": f"{', '.join(right)}, {problem.path}:{_BEYOND}",
        "every line": ", ".join(f"{path}:1-{size}" for path, size in sizes.items()),
        "every place": " ".join(f"{p}:{n}" for p, size in sizes.items() for n in range(1, size)),
        "only the file": right[0].rpartition(":")[0],
        **({"one place less": ", ".join(right[1:])} if len(right) > 1 else {}),
    }
