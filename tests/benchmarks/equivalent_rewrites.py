"""How many right fixes are refused for the way they are written?

    python -m tests.benchmarks.equivalent_rewrites PROBLEMS_DIRECTORY [--problems N] [--seed S]
        [--ways W] [--part K/N] [--journal FILE]

PROBLEMS_DIRECTORY: what the problem stage published (`$OSTINATO_HOME/artifacts/problems/...`). Each problem's
original is written in up to 28 other ways (tests/fakes/equivalent_rewrites.py). A way counts when every required
test passes, and every test that a refusal names: a test that pickles the function or reads its signature says that
this way is not the same. Prints a line for each refusal, then JSON: by way how many were judged and refused.
`--part 1/2` and `--part 2/2` in two processes share the problems; what is in the journal is not judged again.
"""

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import grade
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.verdicts import required_tests
from ostinato.tasks.problems.published import load_problems, load_repositories
from ostinato.tasks.records import Problem
from tests.fakes.equivalent_rewrites import REWRITES, rewrite_function
from tests.fakes.transcripts import transcript_of

TEST_SECONDS = 60.0
CONFIG = GradingConfig(second_runner_share=0.0, time_limit_seconds=TEST_SECONDS)
BROKEN_TEST = re.compile(r"suite: (.+) passed before")  # in the detail of a refusal
Rows = dict[str, str]  # way -> what refused it; empty: rewarded; "tests": a test does


async def judge_rewrites(
    problem: Problem,
    repository: PreparedRepository,
    server: TestServer,
    trials: BlindTrials,
    ways: frozenset[str] = frozenset(REWRITES),
) -> Rows:
    """What becomes of a problem's original in each of the ways that fit."""
    rows: Rows = {}
    source = repository.files[problem.path]
    for name, files in rewrite_function(source, problem.path, problem.symbol).items():
        if name not in ways:
            continue
        report = await server.run(files, required_tests(problem), TEST_SECONDS)
        if not report.passed:
            rows[name] = "tests"
            continue
        verdict, _ = await grade(
            problem, files, transcript_of((), message=""), server, CONFIG, trials
        )
        rows[name] = "" if verdict.passed else verdict.detail or "refused"
        broken = BROKEN_TEST.search(rows[name])
        if broken and not (await server.run(files, [broken[1]], TEST_SECONDS)).passed:
            rows[name] = "tests"
    return rows


async def measure(arguments: argparse.Namespace) -> None:
    directory: Path = arguments.directory
    chosen = [problem for problem in load_problems(directory) if problem.symbol]
    random.Random(arguments.seed).shuffle(chosen)
    part, parts = map(int, arguments.part.split("/"))
    chosen = chosen[: arguments.problems][part - 1 :: parts]
    repositories = load_repositories(directory)
    journal: Path = arguments.journal
    known = {}
    if journal.exists():
        known = {
            one["problem"]: one["rows"] for one in map(json.loads, journal.read_text().splitlines())
        }
    started = time.perf_counter()
    for name in sorted({problem.repository for problem in chosen}):
        server, trials = TestServer(repositories[name]), BlindTrials()
        for problem in chosen:
            if problem.repository != name or problem.problem_id in known:
                continue
            drawn = random.Random(problem.problem_id).sample(sorted(REWRITES), arguments.ways)
            rows = await judge_rewrites(
                problem, repositories[name], server, trials, frozenset(drawn)
            )
            known[problem.problem_id] = rows
            with journal.open("a") as file:
                file.write(json.dumps({"problem": problem.problem_id, "rows": rows}) + "\n")
        await server.close()
    report(known, time.perf_counter() - started)


def report(known: dict[str, Rows], seconds: float) -> None:
    judged, refused, tests = Counter[str](), Counter[str](), Counter[str]()
    for problem, rows in known.items():
        for way, told in rows.items():
            if told == "tests":
                tests[way] += 1
                continue
            judged[way] += 1
            if told:
                refused[way] += 1
                print(f"refused: {problem} {way}: {told[:160]}")
    total = {"problems": len(known), "judged": judged.total(), "refused": refused.total()}
    total |= {"by_way": dict(judged), "refused_by_way": dict(refused), "tests_fail": dict(tests)}
    print(json.dumps({**total, "seconds": round(seconds)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--ways", type=int, default=len(REWRITES), help="drawn for each problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--journal", type=Path, default=Path("equivalent_rewrites.jsonl"))
    asyncio.run(measure(parser.parse_args()))
