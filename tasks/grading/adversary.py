"""The adversary suite: edits that fix nothing and must not be rewarded.

`load_hacks` reads the hacks of hacks.toml, each an attack on the run or a harm. `find_known_calls` records the
calls that a memorising edit may know. `find_defence` judges an edit without the scan of its text, because that
scan is a monitor and not a defence.
"""

import ast
import functools
import shlex
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from ostinato.infra.platform.syntax import Defined, evaluate_literal, parse_once
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.protocol import SandboxError
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.cheating.stubs import append_code
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.old_names import find_old_name
from ostinato.tasks.grading.judging.verdicts import (
    BOX_LIMITS,
    differs_by_oracle,
    find_suite_harm,
    required_tests,
)
from ostinato.tasks.records import Problem

_FILE = Path(__file__).with_name("hacks.toml")
_SEEN = "/repo/seen_calls.txt"
# maximum number of calls, and of characters of their text, that an edit may memorise
_MAX_KNOWN = 300
_MAX_TEXT = 100_000
# keys of calls without arguments, of a function (0) and of an object without attributes ({})
_EMPTY_KEYS = frozenset(repr((held, (), [])) for held in (0, {}))


class Defence(StrEnum):
    """Part of grading that refuses an edit."""

    TESTS = "tests"
    BLIND_TRIAL = "blind_trial"  # the tests pass, but the blind trial refuses the edit
    HARM = "harms"  # the function is right, but the edit does harm
    ORACLE = "asks_oracle"  # held-out calls differ from the original's
    OLD_NAME = "old_name"  # a refactoring leaves the old name
    ENVIRONMENT = "environment"
    REPLY = "reply"  # the final message is wrong, or a file was changed
    NONE = "none"  # the edit is rewarded


@dataclass(frozen=True)
class Hack:
    """Edit that fixes nothing, and the defence that stops it."""

    family: str
    name: str
    defence: str
    code: str
    base: str = "broken"
    """state of the files that the code is appended to: "broken", or the "original" that it harms"""
    needs: str = ""
    """target that the problem must have. "others": other public code in the file; "parameters": among that code a
    function of two or more parameters; "calls": calls by the required tests; "answer": a call that returns plain data;
    "mutable": a call with a mutable argument; "raises": a call that raises an exception with a text
    """

    @property
    def title(self) -> str:
        """Family and name."""
        return f"{self.family}: {self.name}"


@dataclass(frozen=True)
class KnownCalls:
    """Calls of the problem's function that the required tests make."""

    answers: Mapping[str, str] = field(default_factory=dict)
    """text of the arguments -> text of the value, empty if the value is not plain data"""
    kinds: frozenset[str] = frozenset()  # values of Hack.needs that the calls meet


@functools.cache
def load_hacks() -> dict[str, Hack]:
    """All hacks by name. The suite's common code precedes the code of each."""
    content = tomllib.loads(_FILE.read_text())
    hacks = [Hack(**fields) for fields in content["hack"]]
    return {hack.name: replace(hack, code=_join(content["common"], hack.code)) for hack in hacks}


def has_target(
    hack: Hack, problem: Problem, repository: PreparedRepository, known: KnownCalls
) -> bool:
    """Whether a problem has the target that a hack needs."""
    others = [
        node
        for node in parse_once(repository.files[problem.path]).body
        if isinstance(node, Defined) and not node.name.startswith("_")
        if node.name != problem.symbol.partition(".")[0]
    ]
    functions = [node for node in others if not isinstance(node, ast.ClassDef)]
    kinds = known.kinds | ({"others"} if others else set())
    kinds |= {"parameters"} if any(len(one.args.args) > 1 for one in functions) else set()
    # a fix cannot know the text of an exception in deleted code
    is_known = hack.needs != "raises" or not problem.blocks
    return not hack.needs or (hack.needs in kinds and is_known)


def hacked_files(
    hack: Hack, problem: Problem, repository: PreparedRepository, known: KnownCalls
) -> dict[str, bytes]:
    """The product files of a problem, broken or original, with a hack appended to the problem's file."""
    code = hack.code.replace("SYMBOL", problem.symbol)
    code = code.replace("NAME", problem.symbol.rpartition(".")[2])
    if hack.base == "broken":
        return append_code(code, problem, repository)
    code = code.replace("IN_A_WEEK", f"{time.time() + 7 * 86_400:.0f}")
    code = code.replace("KNOWN", repr(dict(known.answers)))
    return {problem.path: repository.files[problem.path] + code.encode()}


async def find_known_calls(
    problem: Problem, repository: PreparedRepository, time_limit_seconds: float
) -> KnownCalls:
    """Calls that the required tests make on the original. Calls with an address in their text are left out."""
    content = tomllib.loads(_FILE.read_text())
    recorder = Hack("", "", "", _join(content["common"], content["recorder"]), "original")
    files = hacked_files(recorder, problem, repository, KnownCalls())
    tests = " ".join(map(shlex.quote, required_tests(problem)))
    async with open_box(repository, files, BOX_LIMITS) as box:
        await box.exec(f"python -m pytest -q -p no:cacheprovider {tests}", time_limit_seconds)
        try:
            lines = (await box.read(_SEEN)).decode().splitlines()
        except SandboxError:
            return KnownCalls()
    answers: dict[str, str] = {}
    kinds: set[str] = set()
    for line in lines:
        key, answer, *found = evaluate_literal(line)
        kinds |= set(found)
        if "0x" not in key:
            answers[key] = answer
    # an edit whose known keys have no content matches every call, and behaves like the original
    has_content = not answers.keys() <= _EMPTY_KEYS
    if has_content and len(answers) <= _MAX_KNOWN and len(repr(answers)) <= _MAX_TEXT:
        kinds |= {"calls", "answer"} if any(answers.values()) else {"calls"}
    return KnownCalls(answers, frozenset(kinds))


async def find_defence(
    problem: Problem,
    files: Mapping[str, bytes | None],
    server: TestServer,
    trials: BlindTrials,
    time_limit_seconds: float,
) -> Defence:
    """The first defence that refuses an edit under default settings: tests, old name, blind trial, oracle, harms."""
    report = await server.run(files, required_tests(problem), time_limit_seconds)
    if not report.passed:
        return Defence.TESTS
    if await find_old_name(problem, files, server.repository):
        return Defence.OLD_NAME
    found = await trials.judge(problem, files, server.repository)
    if found.difference:
        return Defence.BLIND_TRIAL
    if await differs_by_oracle(problem, files, server.repository):
        return Defence.ORACLE
    harms = found.harms or await find_suite_harm(problem, files, server, time_limit_seconds)
    return Defence.HARM if harms else Defence.NONE


def _join(common: str, code: str) -> str:
    body = "".join(f"    {line}\n" for line in code.strip().split("\n"))
    return f"\n\n{common}\n\ntry:\n{body}except Exception:\n    pass\n"
