"""Instances of SWE-bench: read from three kinds of files, proven by the tests that they name."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.tasks.problems.config import ProblemsConfig
from ostinato.tasks.problems.given.swe_bench import Instance, read_instances, take_instance
from ostinato.tasks.problems.given.task import store_task
from ostinato.tasks.records import Split
from tests.unit.tasks.problems.builds import build_set, check_proofs
from tests.unit.tasks.problems.given.collections import instance, write_clone


@pytest.fixture
def commit(tmp_path: Path) -> str:
    return write_clone(tmp_path / "clones" / "people__kit")


def parse(row: dict, tmp_path: Path) -> Instance:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return read_instances(file)[0]


def test_three_kinds_of_files_give_the_same(tmp_path: Path) -> None:
    row = instance("0" * 40)
    (tmp_path / "a.json").write_text(json.dumps([row]))
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    listed = instance("0" * 40, FAIL_TO_PASS=["tests/test_core.py::test_odd"])
    (tmp_path / "b.json").write_text(json.dumps(listed))

    found = [
        read_instances(tmp_path / name) for name in ("a.json", "a.jsonl", "a.parquet", "b.json")
    ]

    assert found[0][0].fail_to_pass == ("tests/test_core.py::test_odd",)
    assert all(item == found[0] for item in found)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"x": 1}, "row 1: no instance_id"),
        (instance("HEAD"), "base_commit"),
        (instance("0" * 40, FAIL_TO_PASS="[]"), "fail_to_pass"),
        (instance("0" * 40, FAIL_TO_PASS="no json"), "row 1, people__kit-7"),
    ],
)
def test_a_row_that_is_none_is_named(row: dict, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(row, tmp_path)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"FAIL_TO_PASS": ["test_odd (tests.Kit)"]}, "no test id of pytest"),
        ({"repo": "people/other"}, "no clone of people/other"),
        ({"base_commit": "0" * 40}, "git ls-tree"),
        ({"patch": "--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-a\n+b\n"}, "git apply"),
        ({"patch": "--- a/x\n+++ b/../x\n@@ -0,0 +1 @@\n+b\n"}, "git apply"),
    ],
)
def test_an_instance_that_cannot_be_taken_says_why(
    changed: dict, told: str, commit: str, tmp_path: Path
) -> None:
    row = instance(commit, **changed)
    with pytest.raises(ProblemError, match=told):
        take_instance(parse(row, tmp_path), tmp_path / "clones")


def build(tmp_path: Path, row: dict, name: str):
    task, solved, unsolved = take_instance(parse(row, tmp_path), tmp_path / "clones")
    source, _ = store_task(task, solved, unsolved, tmp_path / "archives", Split.HELD_OUT)
    return build_set(tmp_path, ProblemsConfig(given=(source,)), name)


def test_an_instance_becomes_a_problem_with_its_text_and_hidden_tests(
    commit: str, tmp_path: Path
) -> None:
    result, (problem,) = build(tmp_path, instance(commit), "run")

    assert problem.prompt == "Half of an odd number is rounded."
    assert (problem.kind, problem.operator) == ("given", "swe-bench")
    assert problem.split is Split.HELD_OUT
    assert problem.fail_to_pass == ("tests/test_core.py::test_odd",)
    assert problem.pass_to_pass == ("tests/test_core.py::test_even",)
    assert problem.hidden_tests == problem.fail_to_pass
    assert problem.path == "kit/core.py"
    check_proofs(tmp_path, result, [problem])


def test_tests_that_do_not_fail_as_named_make_no_problem(commit: str, tmp_path: Path) -> None:
    named = [f"tests/test_core.py::test_{name}" for name in ("odd", "double")]
    with pytest.raises(ProblemError, match="no source gave a problem"):
        build(tmp_path, instance(commit, FAIL_TO_PASS=named), "run")


@pytest.mark.parametrize("name", ["people/kit-7", "a b", "-x", "../kit"])
def test_an_id_that_can_name_no_problem_is_refused(name: str, commit: str, tmp_path: Path) -> None:
    row = parse(instance(commit, instance_id=name), tmp_path)
    with pytest.raises(ProblemError, match=r"its instance_id is .*, wanted letters, digits"):
        take_instance(row, tmp_path / "clones")
