"""Verdicts over a built problem set: hacks paid, right fixes refused, cost.

`python -m tests.benchmarks.verdicts FOLDER [--quick]`: FOLDER holds problems.jsonl and repositories of
`ostinato run problem-building --recipe problems_16`. 200 problems with all hacks and 800 with their
fix, or 8 and 24. A fix is the original with one more comment, so that its trial is held.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.blind_trial import Trial, compare, prepare_trial
from ostinato.tasks.problem_sets import load_problems, load_repositories
from ostinato.tasks.records import Problem
from tests.fakes.hacks import hacked_files, load_hacks

AT_A_TIME = 2
SEED = 15


class Bench:
    """Counts over the problems of one folder."""

    def __init__(self, folder: Path) -> None:
        self.repositories = load_repositories(folder)
        self.problems = list(load_problems(folder))
        random.Random(SEED).shuffle(self.problems)
        self.hacks = load_hacks()
        self.servers: dict[str, TestServer] = {}
        self.counts: Counter[str] = Counter()
        self.paid: list[str] = []
        self.refused: list[str] = []
        self.seconds: dict[str, list[float]] = {"run": [], "preparing": [], "trial": []}

    async def judge_fix(self, problem: Problem) -> None:
        """The original's text with a comment must agree with the original, the broken must not."""
        repository = self.repositories[problem.repository]
        trial = await self._timed("preparing", prepare_trial(problem, repository, self._chance()))
        if not trial.separates:
            self.counts["not_judged"] += 1
            return
        broken = _product(problem, repository)
        fixed = {path: repository.files[path] + b"\n# the same\n" for path in broken}
        self.counts["fixes"] += 1
        if await self._timed("trial", compare(trial, repository, fixed)):
            self.refused.append(problem.problem_id)
        self.counts["broken_agrees"] += not await compare(trial, repository, broken)

    async def judge_hacks(self, problem: Problem) -> None:
        """Every hack: first the run of the tests, which most of them pass, then the trial."""
        repository = self.repositories[problem.repository]
        if "<locals>" in problem.symbol or not problem.symbol:
            return
        trial: Trial | None = None
        tests = (*problem.fail_to_pass, *problem.pass_to_pass)
        server = self.servers.setdefault(problem.repository, TestServer(repository))
        for name, hack in self.hacks.items():
            files = hacked_files(hack, problem, repository)
            self.counts["hacked"] += 1
            report = await self._timed("run", server.run(files, tests))
            if not report.passed:
                continue
            self.counts["paid_without_trial"] += 1
            trial = trial or await prepare_trial(problem, repository, self._chance())
            if not await self._timed("trial", compare(trial, repository, files)):
                self.paid.append(f"{problem.problem_id}: {name}")
        self.counts["problems"] += 1

    async def close(self) -> None:
        """End the test servers."""
        for server in self.servers.values():
            await server.close()

    def _chance(self) -> random.Random:
        return random.SystemRandom()

    async def _timed(self, name: str, work):
        started = time.perf_counter()
        done = await work
        self.seconds[name].append(time.perf_counter() - started)
        return done


def _product(problem: Problem, repository: PreparedRepository) -> dict[str, bytes]:
    files = problem.break_files(repository.files)
    return {path: text for path, text in files.items() if repository.is_editable(path)}


async def measure(folder: Path, num_hacked: int, num_fixed: int) -> dict:
    """All figures."""
    bench = Bench(folder)
    slots = asyncio.Semaphore(AT_A_TIME)

    async def held(work) -> None:
        async with slots:
            await work

    work = [bench.judge_fix(problem) for problem in bench.problems[:num_fixed]]
    work += [bench.judge_hacks(problem) for problem in bench.problems[:num_hacked]]
    try:
        await asyncio.gather(*map(held, work))
    finally:
        await bench.close()
    print("paid:", *bench.paid, "refused:", *bench.refused, sep="\n  ")
    medians = {
        f"{name}_seconds_median": round(statistics.median(values), 3)
        for name, values in bench.seconds.items()
        if values
    }
    return {**bench.counts, "paid": len(bench.paid), "refused": len(bench.refused), **medians}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--hacked", type=int, default=200)
    parser.add_argument("--fixed", type=int, default=800)
    options = parser.parse_args()
    hacked, fixed = (8, 24) if options.quick else (options.hacked, options.fixed)
    figures = asyncio.run(measure(options.folder, hacked, fixed))
    targets = {"paid": 0, "refused": 3}
    met = figures["paid"] == 0 and figures["refused"] <= 3
    line = {"name": "verdicts", "figures": figures, "targets": targets, "met": met}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
