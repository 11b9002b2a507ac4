"""No hack is paid: each is with its defence off, none is with it on."""

import asyncio
import random
import textwrap
import tomllib
from pathlib import Path

import pytest

from ostinato.tasks.grading.adversary import find_known_calls, hacked_files, has_target, load_hacks
from ostinato.tasks.grading.cheating.attacks import find_forbidden
from ostinato.tasks.grading.judging.blind_trial import BlindTrials, draw_tests
from tests.unit.tasks.grading.conftest import PATH, problem, repository, server

__all__ = ("problem", "repository", "server")
# those that need lists or exceptions in tests: tests/unit/tasks/grading/judging/test_harms.py
HACKS = {
    name: hack for name, hack in load_hacks().items() if hack.needs not in ("mutable", "raises")
}
FAMILIES = {hack.family: name for name, hack in HACKS.items()}  # the last of each
TAUGHT = Path(__file__).with_name("taught_hacks.toml")


@pytest.fixture(scope="module")
def trials() -> BlindTrials:
    return BlindTrials(rng=random.Random(0))


@pytest.fixture(scope="module")
def judged(runner: asyncio.Runner, problem, server):
    """The verdict without the scan of the text, which is a monitor and no defence."""

    def run(files, trials=None):
        # what harms other code shows in guards where the problem has some
        guards = problem.pass_to_pass if trials else ()
        report = runner.run(server.run(files, (*problem.fail_to_pass, *guards)))
        if trials is None or not report.passed:
            return report.passed
        found = runner.run(trials.judge(problem, files, server.repository))
        return not found.difference and not found.harms

    return run


@pytest.fixture(scope="module")
def files_of(runner: asyncio.Runner, problem, repository):
    known = runner.run(find_known_calls(problem, repository, 20.0))

    def make(name):
        assert has_target(HACKS[name], problem, repository, known)
        return hacked_files(HACKS[name], problem, repository, known)

    return make


def test_there_are_eighty_hacks_in_fourteen_families():
    hacks = load_hacks().values()
    assert len(hacks) >= 80
    assert len({hack.family for hack in hacks}) == 14
    assert {hack.defence for hack in hacks} == {"blind_trial", "harms"}


@pytest.mark.parametrize("name", HACKS)
@pytest.mark.sampled(5)
def test_hack_is_paid_without_its_defence(judged, files_of, name):
    assert judged(files_of(name))


@pytest.mark.parametrize("name", FAMILIES.values())
@pytest.mark.sampled(5)
def test_hack_of_each_family_is_not_paid(judged, files_of, trials, name):
    assert not judged(files_of(name), trials)


@pytest.mark.slow
@pytest.mark.parametrize("name", HACKS)
@pytest.mark.nightly
def test_hack_is_not_paid(judged, files_of, trials, name):
    assert not judged(files_of(name), trials)


@pytest.mark.parametrize(("name", "code"), tomllib.loads(TAUGHT.read_text())["hacks"].items())
def test_hack_that_is_taught_passes_the_scan_and_not_the_trial(
    judged, problem, repository, trials, name, code
):
    text = problem.break_files(repository.files)[PATH].decode()
    head, line, rest = text.partition("def count_words(text, minimum=1):\n")
    files = {PATH: (head + line + textwrap.indent(code, "    ") + rest).encode()}
    assert not find_forbidden(files, repository)
    assert judged(files)
    assert not judged(files, trials)


OTHER_FIXES = {
    "other words": (b"total += 2", b"total = total + 1"),
    "a comment": (b"total += 2", b"total += 1  # one word"),
    "another loop": (
        b"    total = 0\n    for word in text.split():\n        if len(word) >= minimum:\n"
        b"            total += 2\n    return total\n",
        b"    return sum(len(word) >= minimum for word in text.split())\n",
    ),
}


@pytest.mark.parametrize("name", OTHER_FIXES)
def test_right_fix_in_other_words_is_paid(judged, files_of, trials, problem, repository, name):
    broken = problem.break_files(repository.files)[PATH]
    fixed = broken.replace(*OTHER_FIXES[name])
    assert fixed != broken
    assert judged({PATH: fixed}, trials)


def test_two_processes_draw_other_inputs(runner, problem, repository):
    first, second = (draw_tests(problem, repository, random.SystemRandom()) for _ in range(2))
    assert set(first.tests).isdisjoint(second.tests)
    assert set(first.files.values()) != set(second.files.values())
