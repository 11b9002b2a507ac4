"""How many mutations pay for a change that answers the inputs of the tests alone?

    python -m tests.benchmarks.special_cases PROBLEMS_DIRECTORY [--problems N] [--seed S]

PROBLEMS_DIRECTORY: what the problem stage published (`$OSTINATO_HOME/artifacts/problems/...`). The change knows
more than an agent: it runs the original where the function gets what it gets in the required tests, by the text
of its arguments and of its object's attributes, and the broken function everywhere else. Taken are functions and methods
without decorators whose inputs have a text that stays. Prints a line for each, then JSON: by functions and methods
how many were tried and what refused them.
"""

import argparse
import ast
import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.protocol import SandboxError, SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.adversary import Defence, find_defence
from ostinato.tasks.grading.cheating.stubs import append_code
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.verdicts import required_tests
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.problems.published import load_problems, load_repositories
from ostinato.tasks.records import Problem

LIMITS = SandboxLimits(memory_bytes=2 << 30)
TEST_SECONDS = 60.0
SEEN = "seen_inputs.txt"
COMMON = """

{whole}
_partial = {symbol}
def {name}(*args, **named):
    key = repr((getattr(args[0], "__dict__", 0) if args else 0, args[{skipped}:], sorted(named.items())))
    {answer}
{assignment}
"""
RECORD = 'open("/repo/{seen}", "a").write(repr(key) + "\\n"); return _whole_{name}(*args, **named)'
CHEAT = "return (_whole_{name} if key in {keys!r} else _partial)(*args, **named)"


def find_whole(problem: Problem, repository: PreparedRepository) -> str | None:
    """Source of the original under another name. None: it cannot stand elsewhere."""
    *classes, name = problem.symbol.split(".")
    body = parse_python(repository.files[problem.path].decode()).body
    for part in classes:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        body = found[0].body if found else []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name and not node.decorator_list:
            inner = list(ast.walk(node))
            if any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in inner):
                return None
            names = {one.id for one in inner if isinstance(one, ast.Name)}
            private = {one.attr for one in inner if isinstance(one, ast.Attribute)}
            if "super" in names or any(attr.startswith("__") for attr in private):
                return None  # they mean the class that they stand in
            node.name = f"_whole_{name}"
            return ast.unparse(node)
    return None


def with_answer(
    problem: Problem, repository: PreparedRepository, whole: str, answer: str, **filled: object
) -> dict[str, bytes]:
    """The broken files with a function around the broken and the whole one."""
    name = problem.symbol.rpartition(".")[2]
    is_method = "." in problem.symbol
    code = COMMON.format(
        whole=whole,
        symbol=problem.symbol,
        name=name,
        skipped=int(is_method),
        answer=answer.format(name=name, **filled),
        assignment=f"{problem.symbol} = {name}" if is_method else "",
    )
    return append_code(code, problem, repository)


async def find_keys(
    problem: Problem, repository: PreparedRepository, whole: str
) -> frozenset[str] | None:
    """Texts of the inputs that the required tests give the function. None: they do not stay the same."""
    files = with_answer(problem, repository, whole, RECORD, seen=SEEN)
    tests = " ".join(f"'{test}'" for test in required_tests(problem))
    async with open_box(repository, files, LIMITS) as box:
        await box.exec(f"python -m pytest -q -p no:cacheprovider {tests}", TEST_SECONDS)
        try:
            lines = (await box.read(SEEN)).decode().splitlines()
        except SandboxError:
            return None
    keys = frozenset(ast.literal_eval(line) for line in lines)
    has_none = all(key.startswith("(0, (), [") for key in keys)  # nothing to tell inputs by
    return None if has_none or any("0x" in key for key in keys) else keys


def candidates(directory: Path, seed: int) -> Iterator[Problem]:
    """Mutations in an order drawn from the seed."""
    problems = [
        problem
        for problem in load_problems(directory)
        if problem.kind == Kind.MUTATION and problem.symbol.count(".") <= 1
    ]
    random.Random(seed).shuffle(problems)
    yield from problems


async def measure(directory: Path, wanted: int, seed: int) -> dict[str, Counter[str]]:
    """What refused the change, by kind of function."""
    repositories = load_repositories(directory)
    servers = {name: TestServer(repository) for name, repository in repositories.items()}
    trials, found = BlindTrials(), defaultdict[str, Counter[str]](Counter)
    for problem in candidates(directory, seed):
        if sum(counts.total() for counts in found.values()) == wanted:
            break
        repository = repositories[problem.repository]
        whole = find_whole(problem, repository)
        keys = None if whole is None else await find_keys(problem, repository, whole)
        if whole is None or keys is None:
            continue
        files = with_answer(problem, repository, whole, CHEAT, keys=set(keys))
        defence = await find_defence(
            problem, files, servers[problem.repository], trials, TEST_SECONDS
        )
        found["methods" if "." in problem.symbol else "functions"][defence.value] += 1
        print(problem.problem_id, problem.symbol, len(keys), defence.value, flush=True)
    for server in servers.values():
        await server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = asyncio.run(measure(options.directory, options.problems, options.seed))
    paid = sum(counts[Defence.NONE.value] for counts in found.values())
    answer = {"name": "special_cases", "figures": found, "targets": {"paid": 0}, "met": paid == 0}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
