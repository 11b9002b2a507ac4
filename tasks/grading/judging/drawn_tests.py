"""Tests of a blind trial, drawn at random: each as it is, and in copies with other inputs."""

import ast
import functools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from ostinato.infra.platform.syntax import parse_once, walk_definitions
from ostinato.infra.sandbox.inside.sources import function_of
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging.blind_tests import (
    find_inherited,
    judges_comparisons,
    take_expectations_out,
)
from ostinato.tasks.records import Problem

_WORD = re.compile(rb"\w+")
_ASSERTION = re.compile(rb"\bdef (assert\w*)")

_VARIED_SHARES = (0.0, 0.5, 1.0)  # share of varied arguments, by copy with changed literals
_CHANGED_COPIES = len(_VARIED_SHARES)
_PERTURBED_SHARES = (1.0, 0.5)  # share of calls with changed arguments, by copy
_MAX_FAILING, _MAX_PASSING = 10, 4  # test functions of a trial
MAX_INSTANCES = 12  # instances of one parametrized test
_SHIFT_DAYS = (30, 3000)  # minimum and maximum by which the trial's clock is ahead
_HASH_SEEDS = (2, 2**32 - 1)


@dataclass(frozen=True)
class DrawnTests:
    """Test files under random names, and the tests to run."""

    files: Mapping[str, bytes]
    tests: tuple[str, ...]
    instances: tuple[str, ...]  # instances of parametrized tests that always run
    order: int  # seed of the order
    perturbed: Mapping[str, float]  # share of the function's calls with changed arguments, by file
    varied: Mapping[str, float]  # share of arguments in tests and helpers that are varied, by file
    function: tuple[str, str] | None  # path and symbol of the function under watch
    is_rewritten: bool  # a deleted function is to be written, perhaps as an alias or a class
    hash_seeds: tuple[int, int]  # of the original's two runs; a change has the first
    root: str  # folder of the repository, known to the trial alone
    shift_seconds: int  # by which the clock is ahead
    is_worn: bool = False  # whether the function's first call that returns is made again many times
    chosen: tuple[str, ...] = ()  # tests that the first run has shown; later runs repeat them
    # names by which the original's callers reach the function
    places: tuple[tuple[str, str], ...] = ()

    def has_unseen(self, tests: Iterable[str]) -> bool:
        """Whether one of the tests is in a copy that changes every call with plain arguments."""
        return any(self.perturbed.get(test.partition("::")[0]) == 1.0 for test in tests)


def draw_tests(
    problem: Problem,
    repository: PreparedRepository,
    rng: random.Random,
    *,
    is_shifted: bool = True,
) -> DrawnTests:
    """Tests of a trial: each as it is and in copies with other literals, all without expectations.
    `is_shifted`: whether the trial's clock is ahead by a random time.
    """
    names = [*_draw(problem.fail_to_pass, _MAX_FAILING, rng)]
    names += _draw(problem.pass_to_pass, _MAX_PASSING, rng)
    by_path: dict[str, set[str]] = defaultdict(set)
    for name in names:
        path, _, test = name.partition("::")
        by_path[path].add(test.replace("::", "."))
    helpers = find_helpers(repository, by_path)
    blind = functools.partial(
        take_expectations_out,
        with_literals=judges_comparisons(problem.symbol),
        own_assertions=find_own_assertions(repository, [*by_path, *helpers]),
        rules=repository.collection_rules,
    )
    files: dict[str, bytes] = {}
    for path in helpers:
        with suppress(SyntaxError, ValueError, RecursionError):  # test data in a .py file
            files[path] = blind(repository.files[path], None)
    # these files stay for others that import from them, but without tests, so that the box holds no
    # hidden test as it is written
    cut = {block.path for block in problem.cut_tests if block.path.endswith(".py")}
    for path in {*by_path, *cut}:
        files[path] = blind(repository.files[path], frozenset())
    files |= _blind_bases(repository, by_path, blind)
    tests: list[str] = []
    instances: list[str] = []
    perturbed: dict[str, float] = {}
    varied: dict[str, float] = {}
    is_rewritten = _is_rewritten(problem, repository)
    function = (problem.path, problem.symbol) if problem.symbol else None
    for path, chosen in sorted(by_path.items()):
        # the named class may inherit the tests from a class of the same file
        kept_tests = frozenset(chosen) | find_inherited(repository.files[path], frozenset(chosen))
        folder = path.rpartition("/")[0]
        shares = (0.0,) * (1 + _CHANGED_COPIES) + (() if is_rewritten else _PERTURBED_SHARES)
        for copy, share in enumerate(shares):
            drawn = rng if copy and not share else None
            name = f"test_{rng.getrandbits(48):012x}.py"
            place = f"{folder}/{name}" if folder else name
            files[place] = blind(repository.files[path], kept_tests, drawn)
            if share:
                perturbed[place] = share
            elif copy:
                varied[place] = _VARIED_SHARES[copy - 1]
            tests += [f"{place}::{test.replace('.', '::')}" for test in sorted(chosen)]
            if copy == 0:
                failing = [test for test in problem.fail_to_pass if test.startswith(f"{path}::")]
                kept = rng.sample(failing, min(len(failing), MAX_INSTANCES))
                instances += [place + test.removeprefix(path) for test in kept]
    return DrawnTests(
        files,
        tuple(tests),
        tuple(instances),
        rng.getrandbits(48),
        perturbed,
        varied,
        function,
        is_rewritten,
        (rng.randint(*_HASH_SEEDS), rng.randint(*_HASH_SEEDS)),
        f"/tmp/{rng.getrandbits(48):012x}",
        rng.randint(*_SHIFT_DAYS) * 86_400 if is_shifted else 0,
    )


def _is_rewritten(problem: Problem, repository: PreparedRepository) -> bool:
    """Whether the function is to be written anew. A function that is renamed or moved keeps every detail."""
    if problem.old_place is None:
        return bool(problem.blocks) or not problem.symbol
    nodes = dict(walk_definitions(parse_once(repository.files[problem.path])))
    return isinstance(nodes.get(problem.symbol), ast.ClassDef)


def _blind_bases(
    repository: PreparedRepository, by_path: Mapping[str, set[str]], blind: Callable[..., bytes]
) -> dict[str, bytes]:
    """Test files that define chosen tests which other files inherit, reduced to those tests."""
    wanted = frozenset(
        name
        for path, chosen in by_path.items()
        for name in find_inherited(repository.files[path], frozenset(chosen))
    )
    marks = [f"def {name}(".encode() for name in wanted]
    return {
        path: blind(content, wanted)
        for path, content in repository.files.items()
        if path.endswith(".py") and repository.is_test(path) and any(m in content for m in marks)
    }


def _draw(tests: Sequence[str], most: int, rng: random.Random) -> list[str]:
    functions = list(dict.fromkeys(function_of(test) for test in tests))
    return rng.sample(functions, min(most, len(functions)))


def find_helpers(repository: PreparedRepository, tests: Iterable[str]) -> set[str]:
    """Test files that the given ones may import code from."""
    waiting = set(tests)
    above = {str(folder) for path in waiting for folder in PurePosixPath(path).parents}
    left = {
        path: _module_of(path)
        for path in repository.files
        if path.endswith(".py") and repository.is_test(path) and path not in waiting
    }
    # the runner and the import system read these without an import statement
    found = {
        path
        for path, module in left.items()
        if module == "conftest"
        or (path.endswith("__init__.py") and str(PurePosixPath(path).parent) in above)
    }
    waiting |= found
    while waiting:
        words = {
            word.decode(errors="replace") for word in _WORD.findall(repository.files[waiting.pop()])
        }
        named = {path for path, module in left.items() if module in words} - found
        found |= named
        waiting |= named
    return found


def find_own_assertions(repository: PreparedRepository, paths: Iterable[str]) -> frozenset[str]:
    """Names of assertion functions and methods that the files define."""
    sources = [repository.files[path] for path in paths]
    return frozenset(name.decode() for source in sources for name in _ASSERTION.findall(source))


def _module_of(path: str) -> str:
    pure = PurePosixPath(path)
    return pure.parent.name if pure.name == "__init__.py" else pure.stem
