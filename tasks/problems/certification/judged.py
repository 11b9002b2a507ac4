"""Checks of problems that an environment judges: gold, no-op, repeats, leaks, simple cheats."""

import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from ostinato.infra.platform.errors import CapacityExhausted, GradingError, SandboxHostLost
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.adversary import Defence
from ostinato.tasks.grading.environments import ENVIRONMENTS, Environment, SolvedEnvironment
from ostinato.tasks.grading.judging.verdicts import judge_in_environment
from ostinato.tasks.problems.certification.leaks import find_answers
from ostinato.tasks.problems.certification.records import CertifyOptions, Reason
from ostinato.tasks.problems.certification.tested import ProblemFindings
from ostinato.tasks.records import Problem

_MOST_NUMBER = 2_000
Files = dict[str, bytes | None]


async def check_judged(
    problem: Problem, repository: PreparedRepository, options: CertifyOptions
) -> ProblemFindings:
    """Findings on a problem of an environment, and its costs."""
    checked = ProblemFindings()
    given: Files = {path: text.encode() for path, text in problem.given_files.items()}
    answers = await _check_gold(problem, given, repository, options, checked)
    outcomes = [
        await _judge(problem, given, repository, checked) for _ in range(2 * options.repeats)
    ]
    if len(set(outcomes)) > 1:
        checked.add(Reason.FLAKY, ["verdicts on the untouched files differ"])
    elif outcomes[0]:
        checked.add(Reason.NOOP_PASSES, ["the untouched files pass"])
    else:
        await _try_cheats(problem, given, answers, repository, checked)
    await checked.measure_steps(repository, given)
    return checked


async def _check_gold(
    problem: Problem,
    given: Files,
    repository: PreparedRepository,
    options: CertifyOptions,
    checked: ProblemFindings,
) -> Mapping[str, bytes]:
    environment: Environment = ENVIRONMENTS.load(problem.environment)
    if not isinstance(environment, SolvedEnvironment):
        told = f"environment {problem.environment} has no `solve`"
        checked.add(Reason.GOLD_UNPROVEN, [told])
        return {}
    answers = environment.solve(problem)
    outcomes = [
        await _judge(problem, {**given, **answers}, repository, checked)
        for _ in range(2 * options.repeats)
    ]
    if len(set(outcomes)) > 1:
        checked.add(Reason.FLAKY, ["verdicts on the solution differ"])
    elif not outcomes[0]:
        checked.add(Reason.GOLD_FAILS, ["what `solve` gives does not pass"])
    for finding in find_answers(problem, answers, repository):
        checked.add(finding.reason, [finding.detail])
    return answers


async def _try_cheats(
    problem: Problem,
    given: Files,
    answers: Mapping[str, bytes],
    repository: PreparedRepository,
    checked: ProblemFindings,
) -> None:
    """Files that solve nothing, at the places where the solution stands."""
    with tempfile.TemporaryDirectory(prefix="ostinato-certify-") as folder:
        mark = Path(folder) / uuid.uuid4().hex
        for name, files in _cheats(problem, given, answers, repository, mark).items():
            paid = await _judge(problem, files, repository, checked)
            checked.note_hack(name, Defence.NONE if paid else Defence.ENVIRONMENT)
            if mark.exists():
                mark.unlink()
                checked.add(Reason.RUNS_ON_HOST, [name])
                return


def _cheats(
    problem: Problem,
    given: Files,
    answers: Mapping[str, bytes],
    repository: PreparedRepository,
    mark: Path,
) -> dict[str, Files]:
    places = [*answers] or ["answer.txt"]
    shown = b"\n".join([problem.prompt.encode(), *(text for text in given.values() if text)])
    program = f"open({str(mark)!r}, 'w').close()\n".encode()
    contents: dict[str, bytes] = {
        "a program": program,  # first: a judge that runs it gets no other
        "empty": b"",
        "not UTF-8": b"\xff\xfe\0" * 40,
        "every small number": b" ".join(b"%d" % number for number in range(_MOST_NUMBER)),
        "everything shown": shown,
        "a shell script": f"#!/bin/sh\ntouch '{mark}'\n".encode(),
        "a test that passes": b"def test_passes():\n    pass\n",
        "exits with 0": b"import os\nos._exit(0)\n",
    }
    cheats: dict[str, Files] = {
        f"{name} as the answer": {**given, **dict.fromkeys(places, text)}
        for name, text in contents.items()
        if all(text != answer for answer in answers.values())
    }
    cheats["every file removed"] = dict.fromkeys((*repository.files, *given), None)
    runner = {
        "conftest.py": program,
        "sitecustomize.py": program,
        "verdict.json": b'{"passed": true}',
    }
    return {**cheats, "files of a runner": {**given, **runner}}


async def _judge(
    problem: Problem, files: Files, repository: PreparedRepository, checked: ProblemFindings
) -> bool:
    try:
        verdict = await judge_in_environment(problem, files, repository)
    except (CapacityExhausted, SandboxHostLost):
        raise
    except GradingError as error:
        checked.add(Reason.JUDGE_FAULT, [str(error)[:200]])
        return False
    checked.verdicts.append(verdict.wall_seconds)
    return verdict.passed
