"""Projects as strangers have them, through `problems from` and `certify`: every right fix is accepted, every refusal
is one sentence.
"""

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.problems.certification.records import CertifyOptions
from ostinato.tasks.problems.certification.run import check_set, draw_set
from ostinato.tasks.problems.config import OracleConfig, ProblemsConfig, Quotas, ValidityRules
from ostinato.tasks.problems.discovery.describing import describe_source
from ostinato.tasks.records import Split
from tests.fakes.hostile_projects import PROJECTS
from tests.unit.tasks.problems.builds import build_set, load

# the others by night: each of these meets another part of the way
IN_CI = ("namespace", "pythonpath", "line_ends")
BUILT = [name for name, project in PROJECTS.items() if not project.refusal]
REFUSED = [name for name, project in PROJECTS.items() if project.refusal]


def build(tmp_path: Path, name: str):
    """The set that is made of a project's description."""
    project = PROJECTS[name].write(tmp_path / name)
    try:
        found = describe_source(str(project), None, tmp_path / "archives", 0)
    finally:  # pytest's own clean-up does not get to the end of deep folders
        subprocess.run(["rm", "-rf", str(project)], check=True)
    quotas = Quotas(mutation=1, trials_ratio=4)
    source = found.repository.model_copy(update={"split": Split.TRAIN, "quotas": quotas})
    rules = ValidityRules(max_failing_ratio=1.0)  # of two tests both may call a function
    config = ProblemsConfig(
        repositories=(source,), rules=rules, oracle=OracleConfig(max_calls_derived=2)
    )
    return build_set(tmp_path, config, "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.nightly) for name in BUILT],
)
def test_right_fixes_of_a_project_are_accepted(tmp_path: Path, name: str) -> None:
    result, problems = build(tmp_path, name)

    assert problems, result.left_out
    tests = {
        test for problem in problems for test in (*problem.fail_to_pass, *problem.pass_to_pass)
    }
    project = PROJECTS[name]
    assert not [test for test in tests if project.missing and project.missing in test]
    for part in project.needed:
        assert any(part in test for test in tests), (part, tests)
    options = CertifyOptions(repeats=1, hacks=0, fixes=1)
    drawn = draw_set(name, tmp_path / "run" / "problems", options)
    reports = check_set(drawn, tmp_path / "checks", options, lambda *_: None)
    findings = {finding.reason.value for report in reports for finding in report.findings}
    assert findings <= set(project.findings), [report.findings for report in reports]
    assert load(tmp_path, result_name(result)).fingerprint


def result_name(result) -> str:
    [name] = result.repositories
    return name


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "fails_from_the_start"])
def test_a_refusal_is_one_sentence(home: Path, tmp_path: Path, name: str) -> None:
    project = PROJECTS[name].write(tmp_path / name)
    done = CliRunner().invoke(app, ["problems", "from", str(project)])
    assert isinstance(done.exception, OstinatoError), done.output
    assert PROJECTS[name].refusal in str(done.exception)
    assert "\n" not in str(done.exception)
    assert load_settings().home == home


@pytest.mark.slow
def test_tests_that_fail_from_the_start_are_named(tmp_path: Path) -> None:
    with pytest.raises(OstinatoError, match=PROJECTS["fails_from_the_start"].refusal):
        build(tmp_path, "fails_from_the_start")
