"""Problem sets in tasks/problems/sets: whole, of the recipe that is shipped, with separate splits."""

import asyncio
import hashlib
import json
from collections import defaultdict
from pathlib import Path

import pytest

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.settings import Settings
from ostinato.infra.sandbox.environment import open_box
from ostinato.tasks.grading.judging.verdicts import BOX_LIMITS, judge_by_oracle
from ostinato.tasks.problems.config import ProblemsRequest
from ostinato.tasks.problems.published import read_problems
from ostinato.tasks.problems.run import prepare_parts
from ostinato.tasks.problems.shipped import SETS, find_set
from ostinato.tasks.records import Problem, Split

NAMES = sorted(path.stem for path in SETS.glob("*.json"))


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    found = find_set(load_recipe("problems_16").problems)
    assert found is not None
    return found[1].splitlines()


def test_sixteen_packages_ship() -> None:
    assert NAMES == ["problems_16"]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_set_is_that_of_its_recipe(name: str) -> None:
    found = find_set(load_recipe(name).problems)
    assert found is not None, f"recipe {name} changed: build its set again"
    card, content = found
    assert hashlib.sha256(content).hexdigest() == card.sha256
    assert content.count(b"\n") == card.result.num_problems


def test_stored_lines_of_a_shipped_set_are_those_of_its_problems(lines: list[bytes]) -> None:
    """A set that is built again has the same checksum. No stored problem has a solve rate."""
    problems = read_problems(b"\n".join(lines), "problems_16")
    assert [problem.model_dump_json().encode() for problem in problems] == lines
    assert {problem.solve_rate for problem in problems} == {None}


def test_no_repository_is_in_two_splits(lines: list[bytes]) -> None:
    splits: dict[str, set[Split]] = defaultdict(set)
    for problem in map(Problem.model_validate_json, lines):
        splits[problem.repository].add(problem.split)
    assert len(splits) == 16
    assert all(len(found) == 1 for found in splits.values())


def test_operators_of_mutations_are_mixed(lines: list[bytes]) -> None:
    """Of a package's first 180 mutations up to 81 % were of one operator before they were mixed."""
    operators: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        row = json.loads(line)
        if row["kind"] == "mutation":
            operators[row["repository"]].append(row["operator"])
    for repository, found in operators.items():
        most = max(map(found.count, set(found)))
        assert most <= max(0.25 * len(found), 4), repository


def test_no_problem_asks_for_a_hash(lines: list[bytes]) -> None:
    symbols = [json.loads(line)["symbol"] for line in lines]
    assert not [symbol for symbol in symbols if symbol.endswith("__hash__")]


SHIPPED = load_recipe("problems_16").problems


@pytest.mark.parametrize("name", [source.name for source in SHIPPED.repositories])
@pytest.mark.sampled(1)
@pytest.mark.timeout(600)
def test_the_original_agrees_with_its_held_out_calls(
    name: str, lines: list[bytes], tmp_path: Path, runner: asyncio.Runner
) -> None:
    """As it is written down today: 23 problems had results in an older form, so nobody could solve them."""
    source = next(source for source in SHIPPED.repositories if source.name == name)
    request = ProblemsRequest(
        config=SHIPPED.model_copy(update={"repositories": (source,)}),
        archives_directory=tmp_path / "archives",
    )
    workspace = Workspace.open(tmp_path, Settings(home=tmp_path / "home"))
    (part,), _ = prepare_parts(request, tmp_path / "repositories", workspace)
    problems = [one for one in map(Problem.model_validate_json, lines) if one.repository == name]

    async def different() -> list[str]:
        async with open_box(part.repository, {}, BOX_LIMITS) as sandbox:
            return [
                f"{problem.problem_id}: {found}"
                for problem in problems
                if problem.oracle is not None
                and (found := await judge_by_oracle(sandbox, problem.oracle))
            ]

    assert problems
    assert runner.run(different()) == []


def test_a_damaged_set_is_refused(tmp_path: Path) -> None:
    for path in SETS.glob("problems_16.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    card = json.loads((tmp_path / "problems_16.json").read_text())
    card["sha256"] = "0" * 64
    (tmp_path / "problems_16.json").write_text(json.dumps(card))
    with pytest.raises(ProblemError, match=r"problems_16\.jsonl\.zst has sha256 .*wanted 000"):
        find_set(load_recipe("problems_16").problems, tmp_path)
