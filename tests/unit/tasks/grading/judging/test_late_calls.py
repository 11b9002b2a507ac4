"""A change that is too slow for all drawn calls to be made is not taken for one that gives the right values."""

import asyncio
import json
from dataclasses import replace

import pytest

from ostinato.infra.sandbox.protocol import ExecResult
from ostinato.tasks.grading.config import Harm
from ostinato.tasks.grading.judging.drawn_calls import Differences, DrawnCalls, compare_calls
from ostinato.tasks.grading.judging.drawn_tests import DrawnTests
from tests.fakes.memory_sandbox import MemorySandbox

DRAWN = DrawnTests(
    files={}, tests=(), instances=(), order=0, perturbed={}, varied={}, function=("pkg.py", "f"),
    is_rewritten=False, hash_seeds=(0, 1), root="/repo", shift_seconds=0,
)  # fmt: skip
CALL = {"function": "pkg:f", "arguments": json.dumps({"plain": [], "named": {}})}
RIGHT = {"result": {"int": "1"}, "facts": [], "seconds": 0.0}
WANTED = {**RIGHT, "facts": frozenset(), "has_effect": False}
MADE = DrawnCalls((CALL, CALL, CALL), (WANTED, WANTED, WANTED), CALL, 0, 0.0)


class AnsweringBox(MemorySandbox):
    """A box whose program answers with given lines."""

    def __init__(self, lines: list[dict]) -> None:
        super().__init__({})
        self._lines = lines

    async def read(self, path: str) -> bytes:
        return b"".join(json.dumps(line).encode() + b"\n" for line in self._lines)

    async def exec(self, *_: object, **__: object) -> ExecResult:
        return ExecResult(
            exit_code=0, output=b"", timed_out=False, truncated=False, wall_seconds=0.0
        )


@pytest.mark.parametrize("before", [[RIGHT], [{**RIGHT, "result": {"int": "2"}}]])
def test_what_was_not_compared_is_a_difference(before: list[dict]) -> None:
    lines = [*before, {"late": True}, {"late": True}]
    found = Differences()
    asyncio.run(compare_calls(AnsweringBox(lines), DRAWN, MADE, found))
    assert Harm.SLOW in found.harms
    assert found.difference
    rewritten = Differences()
    box = AnsweringBox(lines)
    asyncio.run(compare_calls(box, replace(DRAWN, is_rewritten=True), MADE, rewritten))
    assert not rewritten.difference  # its values are not those of the original


def test_calls_that_are_all_right_are_no_difference() -> None:
    found = Differences()
    asyncio.run(compare_calls(AnsweringBox([RIGHT] * 3), DRAWN, MADE, found))
    assert found == Differences()
