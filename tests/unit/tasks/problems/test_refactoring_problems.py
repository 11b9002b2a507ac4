"""Problems of renames and moves, built and certified in boxes: the right refactoring passes, what leaves the old name fails."""

import pytest

from ostinato.infra.platform.folders import write_folder
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.adversary import Defence
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.verdicts import judge
from ostinato.tasks.problems.breaking.refactorings import MOVE, RENAME
from ostinato.tasks.problems.certification.records import CertifyOptions
from ostinato.tasks.problems.certification.run import check_set, draw_set
from ostinato.tasks.problems.config import (
    OracleConfig,
    ProblemsConfig,
    PromptLevel,
    Quotas,
    RepositorySource,
    ValidityRules,
)
from ostinato.tasks.problems.published import write_problems
from ostinato.tasks.records import Split
from tests.fakes.repositories import write_archive
from tests.fakes.table_project import FILES
from tests.unit.tasks.problems.builds import build_set, check_proofs
from tests.unit.tasks.problems.test_refactorings import make, prepare

SOURCE = RepositorySource(
    name="tablekit",
    version="1.0",
    package_paths=("tablekit",),
    test_paths=("tests",),
    stripped_prefix="src",
    split=Split.TRAIN,
    quotas=Quotas(mutation=0, refactoring=2, trials_ratio=2),
)
CONFIG = ProblemsConfig(
    repositories=(SOURCE,),
    oracle=OracleConfig(enabled=False),
    rules=ValidityRules(cheater_share=1.0, time_limit_seconds=60.0),
    prompt_shares={PromptLevel.TERSE: 0.5, PromptLevel.PLACE: 0.5},
)
OPTIONS = CertifyOptions(repeats=1, hacks=1, fixes=1, time_limit_seconds=60.0)
# sets an attribute of a module without a word for it
_ANSWERS = """
import argparse
from tablekit import rows as _here
_parser = argparse.ArgumentParser()
_parser.set_defaults(**{{"{half}" + "{rest}": parse_rows}})
_parser.parse_args([], namespace=_here)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tables")
    files = {path: text.encode() for path, text in FILES.items()}
    write_folder(directory / "source" / SOURCE.name, files)
    write_archive(SOURCE, directory / "archives", parent=directory / "source")
    result, problems = build_set(directory, CONFIG, "run", parallel_runs=1)
    return directory, result, problems


def test_renames_and_moves_are_proven_and_the_agent_sees_all_tests(built):
    _, result, problems = built
    assert {problem.operator for problem in problems} == {RENAME, MOVE}
    assert result.kinds == {"refactoring": len(problems)}
    for problem in problems:
        old_path, old_name = problem.old_place
        assert not problem.hidden_tests
        assert problem.symbol in problem.prompt
        assert (old_name if problem.operator == RENAME else old_path) in problem.prompt
    check_proofs(*built)


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """A set of one rename, with its repository and the problem."""
    folder = tmp_path_factory.mktemp("renamed")
    repository = prepare(folder / "repositories" / "tablekit" / "files", {})
    repository.save()
    tests = {
        "fail_to_pass": ("tests/test_rows.py::test_rows", "tests/test_rows.py::test_table"),
        "prompt": "Rename it.",
    }
    draft = make(repository)[RENAME, "parse_rows"].draft(repository.fingerprint)
    problem = draft.model_copy(update=tests)
    write_problems(folder, [problem])
    return folder, repository, problem


def test_the_right_refactoring_passes_and_every_other_change_fails(renamed, runner):
    _, repository, problem = renamed
    server, trials = TestServer(repository), BlindTrials()
    rows, report = "tablekit/rows.py", "tablekit/report.py"
    old_name = problem.old_place[1]

    def verdict(path, text, new):
        assert text in repository.files[path]
        files = {path: repository.files[path].replace(text, new.encode())}
        return runner.run(judge(problem, files, server, time_limit_seconds=60.0, trials=trials))

    assert verdict(rows, b"Rows of a table.", f"Once {old_name}.").passed
    forgotten = verdict(report, b"row in rows.parse_rows", f"row in rows.{old_name}")
    assert not forgotten.passed
    other = verdict(rows, b"text.splitlines()", "text.split(chr(10))")
    assert "differs from the original" in other.detail
    # no test has a longer text without a comma
    odd = "return 2 if len(text) > 2 and ',' not in text else sum(len(row)"
    assert not verdict(report, b"return sum(len(row)", odd).passed
    reached = _ANSWERS.format(half=old_name[:3], rest=old_name[3:])
    made = verdict(rows, b"class Table", f"{reached}\n\nclass Table")
    assert made.detail.endswith(f"answers to {old_name} at run time"), made.detail
    runner.run(server.close())


def test_a_certificate_accepts_the_right_fix_and_refuses_every_cheat(renamed):
    folder, _, _ = renamed
    drawn = draw_set("tables", folder, OPTIONS)
    (report,) = check_set(drawn, folder / "work", OPTIONS, lambda *_: None)
    assert report.findings == ()
    cheats = [held for name, held in report.hacks.items() if name.startswith("old name: ")]
    assert len(cheats) == 6
    assert Defence.OLD_NAME in cheats
    assert set(report.fixes.values()) == {Defence.NONE}
