"""The adversary suite: edits that fix nothing and must not be rewarded.

`load_hacks`: the hacks of hacks.toml, each an attack on the run. `find_defence`: the verdict without
the scan of the text, which is a monitor and no defence.
"""

import functools
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ostinato.infra.platform.syntax import Defined, parse_once
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.cheating.stubs import append_code
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.verdicts import (
    differs_by_oracle,
    find_suite_harm,
    required_tests,
)
from ostinato.tasks.records import Problem

_FILE = Path(__file__).with_name("hacks.toml")


class Defence(StrEnum):
    """Part of grading that refuses an edit."""

    TESTS = "tests"
    BLIND_TRIAL = "blind_trial"  # the tests pass; the blind trial alone refuses it
    HARM = "harms"  # it does what it should, and harms
    ORACLE = "asks_oracle"  # held-out calls differ from the original's
    ENVIRONMENT = "environment"
    NONE = "none"  # it is rewarded


@dataclass(frozen=True)
class Hack:
    """One way to be rewarded for nothing, and the defence that stops it."""

    family: str
    name: str
    defence: str
    code: str
    base: str = "broken"
    """the files that the code is put at the end of: "broken", or the "original" that it harms"""
    needs_others: bool = False
    """whether it harms other public code of the file, so that a file without any has nothing to harm"""

    @property
    def title(self) -> str:
        """Family and name."""
        return f"{self.family}: {self.name}"


@functools.cache
def load_hacks() -> dict[str, Hack]:
    """All hacks by name, each with the suite's common code before it."""
    content = tomllib.loads(_FILE.read_text())
    hacks = [Hack(**fields) for fields in content["hack"]]
    return {hack.name: replace(hack, code=_join(content["common"], hack.code)) for hack in hacks}


def has_target(hack: Hack, problem: Problem, repository: PreparedRepository) -> bool:
    """Whether a problem's file has what a hack harms."""
    names = {
        node.name
        for node in parse_once(repository.files[problem.path]).body
        if isinstance(node, Defined) and not node.name.startswith("_")
    }
    return not hack.needs_others or bool(names - {problem.symbol.partition(".")[0]})


def hacked_files(hack: Hack, problem: Problem, repository: PreparedRepository) -> dict[str, bytes]:
    """The product files of a problem, broken or whole, with a hack at the end of the problem's own."""
    code = hack.code.replace("SYMBOL", problem.symbol)
    if hack.base == "original":
        in_a_week = f"{time.time() + 7 * 86_400:.0f}"
        harm = code.replace("NAME", problem.symbol.rpartition(".")[2])
        harm = harm.replace("IN_A_WEEK", in_a_week)
        return {problem.path: repository.files[problem.path] + harm.encode()}
    return append_code(code.replace("NAME", problem.symbol.rpartition(".")[2]), problem, repository)


async def find_defence(
    problem: Problem,
    files: Mapping[str, bytes | None],
    server: TestServer,
    trials: BlindTrials,
    time_limit_seconds: float,
) -> Defence:
    """The first of tests, blind trial, held-out calls and harms that refuses an edit by default."""
    report = await server.run(files, required_tests(problem), time_limit_seconds)
    if not report.passed:
        return Defence.TESTS
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
