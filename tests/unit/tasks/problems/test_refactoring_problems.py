"""Problems of renames and moves, built and certified in boxes: the right refactoring passes, what leaves the old name fails."""

import io
import tarfile

import pytest

from ostinato.infra.sandbox.test_server import TestServer
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
from ostinato.tasks.records import Split
from tests.fakes.table_project import FILES
from tests.unit.tasks.problems.builds import build_set, check_proofs, load

SOURCE = RepositorySource(
    name="tablekit",
    version="1.0",
    package_paths=("tablekit",),
    test_paths=("tests",),
    stripped_prefix="src",
    split=Split.TRAIN,
    quotas=Quotas(mutation=0, refactoring=8),
)
CONFIG = ProblemsConfig(
    repositories=(SOURCE,),
    oracle=OracleConfig(enabled=False),
    rules=ValidityRules(cheater_share=1.0, time_limit_seconds=60.0),
    prompt_shares={PromptLevel.TERSE: 0.5, PromptLevel.PLACE: 0.5},
)
OPTIONS = CertifyOptions(repeats=1, hacks=1, fixes=2, time_limit_seconds=60.0)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tables")
    folder = directory / "archives" / "tablekit-1.0"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "tablekit-1.0.tar.gz", "w:gz") as tar:
        for path, text in FILES.items():
            info = tarfile.TarInfo(f"tablekit-1.0/{path}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
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


def test_the_right_refactoring_passes_and_one_forgotten_use_fails(built, runner):
    directory, _, problems = built
    repository = load(directory, "tablekit")
    (problem,) = [it for it in problems if (it.operator, it.symbol) == (RENAME, "parse_rows")]
    old_name = problem.old_place[1]
    server, trials = TestServer(repository), BlindTrials()

    def verdict(files):
        return runner.run(judge(problem, files, server, time_limit_seconds=60.0, trials=trials))

    path = "tablekit/rows.py"
    right = repository.files[path].replace(b"[strip_cell(cell) for", b"[strip_cell( cell ) for")
    assert verdict({path: right}).passed
    documented = repository.files[path].replace(b"Rows of a table.", f"Once {old_name}.".encode())
    assert verdict({path: documented}).passed
    report = "tablekit/report.py"
    broken = problem.break_files(repository.files)
    forgotten = verdict({report: broken[report]})
    assert not forgotten.passed
    other = repository.files[path].replace(b"return [[", b"return [] or [[")
    worse = other.replace(b"text.splitlines()]", b"text.split('\\n')]")
    changed = verdict({path: worse})
    assert not changed.passed, changed.detail
    runner.run(server.close())


def test_a_certificate_accepts_right_fixes_and_refuses_every_cheat(built):
    directory, _, problems = built
    drawn = draw_set("tables", directory / "run" / "problems", OPTIONS)
    chosen = {problem.operator: problem for problem in problems}
    drawn = type(drawn)("tables", tuple(chosen.values()), drawn.repositories, len(problems))
    for report in check_set(drawn, directory / "work", OPTIONS, lambda *_: None):
        assert report.findings == ()
        assert len([name for name in report.hacks if name.startswith("old name: ")]) == 6
        assert "old_name" in report.hacks.values()
