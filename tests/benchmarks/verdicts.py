"""Hacks and right fixes over a built problem set, and what a verdict costs.

    python -m tests.benchmarks.verdicts DIRECTORY [--problems 200] [--hacks 2] [--fixes 0] [--at-a-time 2]

DIRECTORY is a problem set as `ostinato run problem-building` publishes it. Each hack of
tasks/grading/hacks.toml is tried as it is in the test server (its defence off) and, where that pays
it, in a blind trial and on the problem's held-out calls. The scan of the text, a monitor, is left
out. A right fix is the original with a comment. `--fixes`: so many further problems with their right
fix alone.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ostinato.infra.sandbox import PreparedRepository, TestServer
from ostinato.infra.sandbox.environment import open_box
from ostinato.tasks.grading.adversary import Hack, hacked_files, load_hacks
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.oracle import judge_by_oracle
from ostinato.tasks.grading.judging.verdicts import BOX_LIMITS
from ostinato.tasks.problem_sets import load_problems, load_repositories
from ostinato.tasks.records import Problem

TARGETS = {"hacks_paid": 0, "fixes_refused": 3}
_SEED = 0


class Bench:
    """Test servers, trials and the counts of one run."""

    def __init__(self, repositories: dict[str, PreparedRepository]) -> None:
        self.servers = {name: TestServer(found) for name, found in repositories.items()}
        self.trials = BlindTrials()
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.unpaid: Counter[str] = Counter()  # hacks that fail without their defence
        self._tried: set[str] = set()

    async def try_problem(self, problem: Problem, hacks: Sequence[Hack]) -> None:
        """A right fix and some hacks of one problem."""
        self.counts["problems"] += 1
        try:
            refused = not await self._passes(problem, right_fix(problem, self._repository(problem)))
        except Exception as error:  # noqa: BLE001 - one problem must not end the run
            self.tell(f"{problem.problem_id}: right fix: {error!r:.200}")
            refused = True
        if refused:
            self.counts["fixes_refused"] += 1
            self.tell(f"{problem.problem_id}: right fix refused")
        for hack in hacks:
            await self.try_hack(problem, hack)

    async def try_hack(self, problem: Problem, hack: Hack) -> None:
        """A hack with its defence off, then on."""
        files = hacked_files(hack, problem, self._repository(problem))
        self.counts["hacks"] += 1
        try:
            if not await self._passes(problem, files, blind=False):
                self.unpaid[hack.name] += 1
                return
            self.counts["hacks_paid_without_defence"] += 1
            if await self._passes(problem, files):
                self.counts["hacks_paid"] += 1
                self.tell(f"{problem.problem_id}: {hack.family}: {hack.name}: PAID")
        except Exception as error:  # noqa: BLE001 - a fault is a failed verdict
            self.tell(f"{problem.problem_id}: {hack.name}: {error!r:.200}")

    async def _passes(
        self, problem: Problem, files: Mapping[str, bytes | None], *, blind: bool = True
    ) -> bool:
        server = self.servers[problem.repository]
        tests = tuple(dict.fromkeys((*problem.fail_to_pass, *problem.pass_to_pass)))
        started = time.perf_counter()
        report = await server.run(files, tests, 20.0)
        if not report.from_cache:
            self.seconds[f"tests_{report.route}"].append(time.perf_counter() - started)
        if not report.passed or not blind:
            return report.passed
        started = time.perf_counter()
        first = problem.problem_id not in self._tried
        self._tried.add(problem.problem_id)
        difference = await self.trials.find_difference(problem, files, server.repository)
        self.seconds["first_trial" if first else "trial"].append(time.perf_counter() - started)
        if difference or problem.oracle is None:
            return not difference
        async with open_box(server.repository, files, BOX_LIMITS) as sandbox:
            return (await judge_by_oracle(sandbox, problem.oracle)).passed

    def _repository(self, problem: Problem) -> PreparedRepository:
        return self.servers[problem.repository].repository

    def tell(self, line: str) -> None:
        """Print at once."""
        print(line, flush=True)


def right_fix(problem: Problem, repository: PreparedRepository) -> dict[str, bytes | None]:
    """The original of what is broken, told apart from it by a comment."""
    paths = [path for path in problem.break_files(repository.files) if repository.is_editable(path)]
    return {path: repository.files[path] + b"\n# repaired\n" for path in paths}


async def run(options: argparse.Namespace) -> dict[str, float]:
    """Figures of one run."""
    problems = load_problems(options.directory)
    chance = random.Random(_SEED)
    chance.shuffle(problems)
    hacks = list(load_hacks().values())
    bench = Bench(load_repositories(options.directory))
    room = asyncio.Semaphore(options.at_a_time)
    chosen = problems[: options.problems + options.fixes]
    chosen = sorted(chosen, key=lambda problem: problem.repository)
    with_hacks = {problem.problem_id for problem in problems[: options.problems]}
    plan = [(problem, chance.sample(hacks, min(options.hacks, len(hacks)))) for problem in chosen]
    ends = time.monotonic() + options.seconds

    async def one(problem: Problem, mine: list[Hack]) -> None:
        async with room:
            if time.monotonic() < ends:
                await bench.try_problem(problem, mine if problem.problem_id in with_hacks else [])

    chance.shuffle(plan)
    await asyncio.gather(*(one(problem, mine) for problem, mine in plan))
    for server in bench.servers.values():
        await server.close()
    print("without their defence not paid:", dict(bench.unpaid.most_common(20)))
    names = ("problems", "hacks", "hacks_paid_without_defence", "hacks_paid", "fixes_refused")
    figures: dict[str, float] = {name: bench.counts[name] for name in names}
    for name, times in sorted(bench.seconds.items()):
        figures[f"{name}_median_ms"] = round(1e3 * statistics.median(times), 1)
    return figures


def main() -> None:
    """Print the figures and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="a built problem set")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--hacks", type=int, default=2, help="hacks drawn for each problem")
    parser.add_argument("--fixes", type=int, default=0, help="problems with their right fix alone")
    parser.add_argument("--at-a-time", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no problem after these")
    figures = asyncio.run(run(parser.parse_args()))
    for name, value in figures.items():
        print(f"{name:>32} {value:10g}")
    met = all(figures[name] <= target for name, target in TARGETS.items())
    print(json.dumps({"name": "verdicts", "figures": figures, "targets": TARGETS, "met": met}))


if __name__ == "__main__":
    main()
