"""Stubs in place of a problem's function: where one passes its tests, they ask for nothing."""

from collections import defaultdict

from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.cheating.stubs import stub_fixes
from ostinato.tasks.records import Problem


class StubTrials:
    """Stubs of one repository's functions, and the tests that each is known to fail.

    A stub takes the place of whatever is broken in its function, so one run mostly answers for all
    problems of the function. What passes is always run on the problem itself.
    """

    def __init__(self, server: TestServer, time_limit_seconds: float) -> None:
        self._server = server
        self._time_limit_seconds = time_limit_seconds
        self._failed: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    async def is_passed(self, problem: Problem) -> bool:
        """Whether some stub passes all tests of a problem."""
        tests = (*problem.fail_to_pass, *problem.pass_to_pass)
        for name, files in stub_fixes(problem, self._server.repository).items():
            failed = self._failed[_place_of(problem), name]
            if not failed.isdisjoint(tests):
                continue
            for some in (tests[:1], tests):
                report = await self._server.run(files, some, self._time_limit_seconds)
                if not report.passed:
                    failed.update(test for test in some if test not in report.passed_ids)
                    break
            else:
                return True
        return False


def _place_of(problem: Problem) -> str:
    """The function, where nothing beside it is broken. Else the problem."""
    lines = [(edit.path, edit.line_number, edit.line_number) for edit in problem.edits]
    lines += [
        (block.path, block.first_line, block.first_line + len(block.gold_lines) - 1)
        for block in problem.blocks
    ]
    is_inside = all(
        path == problem.path and problem.first_line <= first and last <= problem.last_line
        for path, first, last in lines
    )
    return f"{problem.path}::{problem.symbol}" if is_inside else problem.problem_id
