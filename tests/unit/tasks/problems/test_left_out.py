"""Test files that cannot be imported: left out one by one, and named with their errors."""

import pytest

from ostinato.flows.reporting.showing import describe_problems
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import write_folder
from ostinato.tasks.problems.config import (
    GitSource,
    OracleConfig,
    ProblemsConfig,
    Quotas,
    RepositorySource,
)
from ostinato.tasks.records import Split
from tests.fakes.repositories import write_archive
from tests.unit.tasks.problems.builds import begin_history, build_set, check_proofs

KIT = RepositorySource(
    name="kit",
    version="1.0",
    package_paths=("kit",),
    test_paths=("tests",),
    stripped_prefix="src",
    split=Split.TRAIN,
    quotas=Quotas(mutation=2, trials_ratio=4),
)
CONFIG = ProblemsConfig(repositories=(KIT,), oracle=OracleConfig(enabled=False))
CODE = """
def half(number):
    rest = number % 2
    return (number - rest) // 2


def clip(number, low, high):
    if number < low:
        return low
    return high if number > high else number
"""
TESTS = """
from kit import clip, half


def test_half():
    assert half(7) == 3
    assert half(8) == 4


def test_clip():
    assert clip(1, 2, 5) == 2
    assert clip(9, 2, 5) == 5
    assert clip(3, 2, 5) == 3


def test_both():
    assert half(clip(9, 2, 6)) == 3


def test_nothing():
    assert half(0) == 0
"""
LACKING = "import surely_absent\n\n\ndef test_it():\n    assert surely_absent\n"


def write_source(directory, tests):
    texts = {"src/kit/__init__.py": CODE, **tests}
    files = {path: text.encode() for path, text in texts.items()}
    write_folder(directory / "source" / KIT.name, files)
    write_archive(KIT, directory / "archives", parent=directory / "source")


def test_a_test_file_that_cannot_be_imported_is_left_out_and_named(tmp_path):
    write_source(tmp_path, {"tests/test_kit.py": TESTS, "tests/test_lacking.py": LACKING})
    result, problems = build_set(tmp_path, CONFIG, "run")
    assert len(problems) == 2
    named = {test for problem in problems for test in problem.fail_to_pass + problem.pass_to_pass}
    assert {test.partition("::")[0] for test in named} == {"tests/test_kit.py"}
    check_proofs(tmp_path, result, problems)
    assert set(result.left_out) == {"kit/tests/test_lacking.py"}
    assert "No module named 'surely_absent'" in result.left_out["kit/tests/test_lacking.py"]
    assert any("kit/tests/test_lacking.py" in line for line in describe_problems(result))
    again, _ = build_set(tmp_path, CONFIG, "run")  # from the noted baseline
    assert again.left_out == result.left_out


def test_a_package_whose_every_test_file_fails_is_refused_with_the_cause(tmp_path):
    write_source(tmp_path, {"tests/test_lacking.py": LACKING})
    with pytest.raises(ProblemError, match="surely_absent"):
        build_set(tmp_path, CONFIG, "run")


def test_commits_that_are_no_problems_are_counted_by_their_reasons(tmp_path):
    _, commit = begin_history(tmp_path / "history")
    broken = CODE.replace("return low", "return number")
    commit("First version of the kit", {"kit/__init__.py": broken})
    commit("docs: say what the kit does", {"README.md": "kit"})
    commit("Fix the lower bound of clip", {"kit/__init__.py": CODE, "tests/test_kit.py": TESTS})
    source = GitSource(
        name="kit", path=str(tmp_path / "history"), package_paths=("kit",), test_paths=("tests",)
    )
    config = ProblemsConfig(git=(source,), oracle=OracleConfig(enabled=False))
    result, _ = build_set(tmp_path, config, "run")
    assert result.left_out["kit"] == "2 commits: 1 not_a_change, 1 first_commit"
    assert any("1 not_a_change" in line for line in describe_problems(result))
