"""Checks of problems: gold, no-op, repeats, right fixes, the adversary suite, leaks.

`TestedChecks` checks problems that tests judge, `check_judged` those that an environment judges. The search
for leaks is the one of the build (problems/proving/leaks.py).
"""

import ast
import asyncio
import random
import re
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ostinato.infra.platform.errors import CapacityExhausted, GradingError, SandboxHostLost
from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.plain_run import run_plainly
from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.adversary import (
    Defence,
    Hack,
    KnownCalls,
    find_defence,
    find_known_calls,
    hacked_files,
    has_target,
)
from ostinato.tasks.grading.cheating.left_names import left_names
from ostinato.tasks.grading.cheating.stubs import stub_fixes
from ostinato.tasks.grading.environments import ENVIRONMENTS, Environment, SolvedEnvironment
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.other_code import name_some
from ostinato.tasks.grading.judging.verdicts import BOX_LIMITS, judge_in_environment, required_tests
from ostinato.tasks.problems.certification.records import CertifyOptions, Finding, Reason
from ostinato.tasks.problems.certification.replies import find_answer_faults, try_replies
from ostinato.tasks.problems.certification.right_fixes import rewrite_original
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.problems.proving.leaks import LeakCheck
from ostinato.tasks.records import Problem

_MAX_NUMBER = 2_000
_LEAST_ANSWER = 6  # shorter answers occur in files by chance
_COMMAND_SECONDS = 30.0
Files = Mapping[str, bytes | None]
# kinds of runs -> reason, if a test's outcome differs only in these
_LABELS = {
    frozenset({"reversed", "shuffled"}): Reason.FLAKY_ORDER,
    frozenset({"reversed"}): Reason.FLAKY_ORDER,
    frozenset({"shuffled"}): Reason.FLAKY_ORDER,
    frozenset({"with another hash seed"}): Reason.FLAKY_HASH,
    frozenset({"later"}): Reason.FLAKY_CLOCK,
    frozenset({"reworded"}): Reason.READS_SOURCE,
}


@dataclass(frozen=True)
class TestedChecks:
    """Test servers of one repository, with two hash seeds, and the blind trials of its problems."""

    server: TestServer
    other: TestServer
    trials: BlindTrials
    options: CertifyOptions

    async def close(self) -> None:
        """Ends both servers."""
        await self.server.close()
        await self.other.close()

    async def check(
        self, problem: Problem, hacks: Sequence[Hack], rng: random.Random
    ) -> "ProblemFindings":
        """Findings on a problem, after trying the hacks, and measured times."""
        checked = ProblemFindings()
        if not problem.fail_to_pass and not (problem.reply and problem.pass_to_pass):
            checked.add(Reason.NO_TESTS, ["fail_to_pass is empty"])
            return checked
        await self._check_original(problem, rng, checked)
        if problem.reply is not None:
            await self._check_replies(problem, checked)
            return checked
        await self._check_broken(problem, rng, checked)
        await self._judge_right_fixes(problem, rng, checked)
        await self._try_hacks(problem, hacks, checked)
        repository = self.server.repository
        await checked.measure_steps(repository, problem.break_files(repository.files))
        return checked

    async def _check_original(
        self, problem: Problem, rng: random.Random, checked: "ProblemFindings"
    ) -> None:
        failed = await self._run_rounds(problem, {}, rng, checked, is_original=True)
        for test, (runs, kinds) in failed.items():
            if runs and runs == kinds:
                checked.add(Reason.GOLD_FAILS, [test])
            elif runs:
                detail = f"{test} fails {', '.join(sorted(runs))}"
                checked.add(_LABELS.get(frozenset(runs), Reason.FLAKY), [detail])

    async def _check_broken(
        self, problem: Problem, rng: random.Random, checked: "ProblemFindings"
    ) -> None:
        files = self.server.repository.keep_editable(
            problem.break_files(self.server.repository.files)
        )
        failed = await self._run_rounds(problem, files, rng, checked, is_original=False)
        guards = frozenset(problem.pass_to_pass)
        known = frozenset(test for test, (runs, kinds) in failed.items() if not runs)
        if known.issuperset(required_tests(problem)):
            checked.add(Reason.NOOP_PASSES, ["every required test passes in the broken state"])
            return
        for test, (runs, kinds) in failed.items():
            if 0 < len(runs) < len(kinds):
                other = frozenset(kinds - runs if len(runs) * 2 > len(kinds) else runs)
                detail = f"{test} in the broken state fails {', '.join(sorted(runs))}"
                checked.add(_LABELS.get(other, Reason.FLAKY), [detail])
            elif runs and test in guards:
                checked.add(Reason.GUARD_FAILS_BROKEN, [test])
            elif not runs and test not in guards:
                hidden = " (hidden)" if test in problem.hidden_tests else ""
                checked.add(Reason.TEST_PASSES_BROKEN, [test + hidden])

    async def _run_rounds(
        self,
        problem: Problem,
        files: Files,
        rng: random.Random,
        checked: "ProblemFindings",
        *,
        is_original: bool,
    ) -> dict[str, tuple[set[str], set[str]]]:
        """For every test, the kinds of runs that it failed in, and all kinds of runs."""
        tests = required_tests(problem)
        repository, limit = self.server.repository, self.options.time_limit_seconds
        failed: dict[str, tuple[set[str], set[str]]] = {test: (set(), set()) for test in tests}

        def note(kind: str, outcomes: Mapping[str, TestOutcome]) -> None:
            for test, (runs, kinds) in failed.items():
                kinds.add(kind)
                if outcomes[test] is not TestOutcome.PASSED:
                    runs.add(kind)

        for _ in range(self.options.repeats):
            mixed = list(tests)
            rng.shuffle(mixed)
            for kind, server, order in (
                ("as listed", self.server, tests),
                ("reversed", self.server, tests[::-1]),
                ("shuffled", self.server, mixed),
                ("with another hash seed", self.other, tests),
            ):
                report = await server.run(files, order, limit)
                checked.verdicts.append(report.seconds)
                note(kind, report.outcomes)
        if is_original:
            later = await run_plainly(repository, files, tests, limit, later=True)
            note("later", later.outcomes)
            reworded = {
                path: _reword(repository.files[path]) for path in _edited(problem, self.server)
            }
            plain = await run_plainly(repository, reworded, tests, limit)
            note("reworded", plain.outcomes)
        else:
            plain = await run_plainly(repository, files, tests, limit)
            note("in a new process", plain.outcomes)
        return failed

    async def _judge_right_fixes(
        self, problem: Problem, rng: random.Random, checked: "ProblemFindings"
    ) -> None:
        repository = self.server.repository
        broken = problem.break_files(repository.files)
        original = {path: repository.files[path] for path in _edited(problem, self.server)}
        fixes = await asyncio.to_thread(rewrite_original, original, broken, self.options.fixes, rng)
        # with other findings, a refused fix may only be a result of the same defect of the tests
        is_sound = not checked.findings
        for name, files in fixes.items():
            started = time.perf_counter()
            defence = checked.fixes[name] = await self._find_defence(problem, files)
            checked.trials.append(time.perf_counter() - started)
            if is_sound and defence is not Defence.NONE:
                found = await self.trials.judge(problem, files, repository)
                detail = found.difference or ", ".join(found.harms.values()) or defence
                checked.add(Reason.RIGHT_FIX_REFUSED, [f"{name}: {detail}"])

    async def _try_hacks(
        self, problem: Problem, hacks: Sequence[Hack], checked: "ProblemFindings"
    ) -> None:
        if not problem.symbol or not hacks:
            return
        repository = self.server.repository
        known = KnownCalls()
        if any(hack.needs not in ("", "others") for hack in hacks):
            known = await find_known_calls(problem, repository, self.options.time_limit_seconds)
        edits = {
            hack.title: hacked_files(hack, problem, repository, known)
            for hack in hacks
            if has_target(hack, problem, repository, known)
        }
        cheats = {
            **repair_all_but_one(problem, repository),
            **stub_fixes(problem, repository),
            **left_names(problem, repository),
        }
        for name, files in {**edits, **cheats}.items():
            checked.note_hack(name, await self._find_defence(problem, files))

    async def _check_replies(self, problem: Problem, checked: "ProblemFindings") -> None:
        repository = self.server.repository
        for reason, detail in await find_answer_faults(problem, repository):
            checked.add(reason, [detail])
        for name, is_right, passed in try_replies(problem, repository):
            defence = Defence.NONE if passed else Defence.REPLY
            if not is_right:
                checked.note_hack(name, defence)
                continue
            checked.fixes[name] = defence
            if not passed:
                checked.add(Reason.RIGHT_ANSWER_REFUSED, [name])
        await checked.measure_steps(repository, problem.break_files(repository.files))

    async def _find_defence(self, problem: Problem, files: Files) -> Defence:
        limit = self.options.time_limit_seconds
        return await find_defence(problem, files, self.server, self.trials, limit)


def repair_all_but_one(problem: Problem, repository: PreparedRepository) -> dict[str, Files]:
    """Repairs that leave one of several places with one cause broken, by name."""
    original = {path: repository.files[path] for path in problem.break_files(repository.files)}
    edits = problem.edits if problem.kind == Kind.MULTI_PLACE else ()
    return {
        f"partial: {edit.path}:{edit.line_number} is left": original
        | problem.model_copy(update={"edits": (edit,), "cut_tests": ()}).break_files(original)
        for edit in edits
    }


@dataclass
class ProblemFindings:
    """Findings on one problem and measured times, collected during the checks."""

    found: dict[Reason, list[str]] = field(default_factory=lambda: defaultdict(list))
    verdicts: list[float] = field(default_factory=list)  # seconds of each test run
    step_seconds: float | None = None
    start_seconds: float | None = None
    trials: list[float] = field(default_factory=list)  # seconds of each verdict on a right fix
    hacks: dict[str, Defence] = field(default_factory=dict)
    fixes: dict[str, Defence] = field(default_factory=dict)

    def note_hack(self, name: str, defence: Defence) -> None:
        """Records the defence that refused an edit that fixes nothing."""
        self.hacks[name] = defence
        if defence is Defence.NONE:
            self.add(Reason.HACK_PAID, [name])

    async def measure_steps(self, repository: PreparedRepository, files: Files) -> None:
        """Measures the time until a box with these files answers, and the time of a command in it."""
        started = time.perf_counter()
        async with open_box(repository, files, BOX_LIMITS) as box:
            self.start_seconds = time.perf_counter() - started
            started = time.perf_counter()
            await box.exec("ls", _COMMAND_SECONDS)
            self.step_seconds = time.perf_counter() - started

    def add(self, reason: Reason, details: Sequence[str]) -> None:
        """Adds places of a defect."""
        self.found[reason] += details

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One finding per reason, which names the first places."""
        return tuple(
            Finding(reason=reason, detail=name_some(details))
            for reason, details in sorted(self.found.items())
        )


def find_leaks(problem: Problem, check: LeakCheck) -> list[tuple[Reason, str]]:
    """Places where an agent can read the answer of a problem that is judged by tests."""
    found = [
        (Reason.LEAK_PROMPT, f"{leak.what} of {leak.path}")
        for leak in check.find_in_prompt(problem)
    ]
    for leak in (*check.find_repeated(problem), *check.find(problem)):
        found.append((Reason.LEAK_FILE, f"{leak.what} in {leak.path}"))
    for leak in check.find_in_history(problem):
        found.append((Reason.LEAK_HISTORY, f"{leak.path} as it was, in .git"))
    return found


def _edited(problem: Problem, server: TestServer) -> list[str]:
    """Product files that a problem breaks."""
    repository = server.repository
    return sorted(
        path for path in problem.break_files(repository.files) if repository.is_editable(path)
    )


def _reword(text: bytes) -> bytes:
    """A module of equal behaviour with other text: without comments, reformatted, three lines further down."""
    return b"\n\n\n" + ast.unparse(parse_python(text)).encode() + b"\n"


async def check_judged(
    problem: Problem, repository: PreparedRepository, options: CertifyOptions
) -> ProblemFindings:
    """Findings on a problem that an environment judges, and measured times."""
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
        checked.add(Reason.GOLD_UNPROVEN, [f"environment {problem.environment} has no `solve`"])
        return {}
    answers = environment.solve(problem)
    outcomes = [
        await _judge(problem, {**given, **answers}, repository, checked)
        for _ in range(2 * options.repeats)
    ]
    if len(set(outcomes)) > 1:
        checked.add(Reason.FLAKY, ["verdicts on the solution differ"])
    elif not outcomes[0]:
        checked.add(Reason.GOLD_FAILS, ["the solution of `solve` does not pass"])
    for reason, detail in _find_answers(problem, answers, repository):
        checked.add(reason, [detail])
    return answers


def _find_answers(
    problem: Problem, answers: Mapping[str, bytes], repository: PreparedRepository
) -> Iterator[tuple[Reason, str]]:
    """Contents of the solution's files that occur in the prompt or in files that the agent gets."""
    given = {path: text.encode() for path, text in problem.given_files.items()}
    files = {**repository.files, **given}
    for path, content in answers.items():
        answer = content.decode(errors="replace").strip()
        if answer and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", problem.prompt):
            yield Reason.LEAK_PROMPT, f"content of {path}"
        if len(answer) >= _LEAST_ANSWER:
            for other in sorted(name for name, text in files.items() if answer.encode() in text):
                yield Reason.LEAK_FILE, f"content of {path} in {other}"


async def _try_cheats(
    problem: Problem,
    given: Files,
    answers: Mapping[str, bytes],
    repository: PreparedRepository,
    checked: ProblemFindings,
) -> None:
    """Tries files that solve nothing, at the paths of the solution."""
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
        "a program": program,  # first, because a judge that runs it on the host gets no other cheat
        "empty": b"",
        "not UTF-8": b"\xff\xfe\0" * 40,
        "every small number": b" ".join(b"%d" % number for number in range(_MAX_NUMBER)),
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
