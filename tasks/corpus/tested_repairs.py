"""Repair documents whose bugs real tests have seen.

Functions with the tests that reach them in; documents that carry what those tests really said out.
Corruptions that no test notices are dropped: they are no bugs. Slower than inventing reports (a
test run each), so a share of the budget decides.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from ostinato.infra.agent.dialects.compact.regions import open_region
from ostinato.infra.agent.tools.testing import describe_report
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.corpus.documents import Bug, FunctionDraw, RepairMaker, is_repair_trained
from ostinato.tasks.corpus.functions import CodeFunction
from ostinato.tasks.corpus.problem_sources import ProblemSource
from ostinato.tasks.corpus.transcripts import PASSED
from ostinato.tasks.records import Problem

BATCH_BUGS = 64
MAX_TESTS = 5
PARALLEL_RUNS = 2
TIME_LIMIT_SECONDS = 10.0
Place = tuple[str, tuple[str, ...]]  # repository name and test ids


async def make_tested_repairs(
    functions: Sequence[CodeFunction],
    maker: RepairMaker,
    source: ProblemSource,
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[int]]:
    """Documents worth `tested_repair_share` of the repair budget."""
    budget = int(maker.config.budgets.repair * maker.config.tested_repair_share)
    allowed = [item for item in functions if not maker.guard.is_function_held_out(item)]
    documents: list[list[int]] = []
    if budget <= 0 or not allowed:
        return documents
    places = find_places(source.problems)
    draw, rng = FunctionDraw(allowed), random.Random(f"{maker.config.seed}/tested")
    num_tokens = 0
    async with AsyncExitStack() as stack:
        servers: dict[str, TestServer] = {}
        for name in sorted({name for name, _ in places.values()}):
            servers[name] = TestServer(source.repository(name), parallel_runs=PARALLEL_RUNS)
            stack.push_async_callback(servers[name].close)
        while num_tokens < budget:
            drawn = [maker.draw_bug(draw, rng, is_repair_trained) for _ in range(BATCH_BUGS)]
            bugs = [bug for bug in drawn if bug is not None]
            reports = await asyncio.gather(*(_test_bug(bug, places, servers) for bug in bugs))
            kept = [(bug, text) for bug, text in zip(bugs, reports, strict=True) if text != PASSED]
            if not kept:
                break
            documents += [maker.write(bug, text, rng) for bug, text in kept]
            num_tokens = sum(map(len, documents))
            on_tokens(min(num_tokens, budget), budget)
    return documents


def find_places(problems: Sequence[Problem]) -> dict[tuple[str, str], Place]:
    """Test place of each function. The tests that most of its problems break come first."""
    repositories: dict[tuple[str, str], str] = {}
    counts: dict[tuple[str, str], Counter[str]] = {}
    for problem in problems:
        key = (problem.path, problem.symbol)
        repositories[key] = problem.repository
        counts.setdefault(key, Counter()).update(problem.fail_to_pass)
        counts[key].update(dict.fromkeys(problem.pass_to_pass, 0))
    return {
        key: (
            repositories[key],
            tuple(sorted(tests, key=lambda test, tests=tests: (-tests[test], test))[:MAX_TESTS]),
        )
        for key, tests in counts.items()
    }


async def _test_bug(
    bug: Bug, places: Mapping[tuple[str, str], Place], servers: Mapping[str, TestServer]
) -> str:
    """Test report of an agent that runs the tests on the bug after reading the function."""
    function, corruption = bug
    repository, tests = places[function.key]
    server = servers[repository]
    text = server.repository.files[function.path].decode()
    region = open_region(text, f"{function.path}::{function.symbol}")
    lines = text.split("\n")
    lines[region.first_line - 1 + corruption.number - 1] = corruption.broken
    broken = {function.path: "\n".join(lines).encode()}
    return describe_report(await server.run(broken, tests, TIME_LIMIT_SECONDS), region)
