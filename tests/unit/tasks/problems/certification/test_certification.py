"""Planted defects of problem sets are found and named; on clean problems nothing is."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.flows.commands.certifying import render_page
from ostinato.infra.platform import plugins
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.grading.adversary import Defence
from ostinato.tasks.problems.certification.records import CertifyOptions, ProblemReport, Reason
from ostinato.tasks.problems.certification.run import (
    JOURNAL,
    check_set,
    draw_environment,
    draw_set,
    make_certificate,
)
from ostinato.tasks.problems.certification.signing import KEY_FILE, read_signed, sign
from tests.unit.tasks.problems.certification import planted

OPTIONS = CertifyOptions(repeats=1, hacks=1)
QUICK = CertifyOptions(repeats=1, hacks=0, limit=1)


def ignore(report: ProblemReport, done: int, total: int) -> None:
    """Takes no note of progress."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProblemReport]:
    folder = tmp_path_factory.mktemp("certify")
    drawn = draw_set("planted", planted.write_set(folder / "set"), OPTIONS)
    return {
        report.problem_id: report for report in check_set(drawn, folder / "work", OPTIONS, ignore)
    }


def reasons_of(report: ProblemReport) -> set[Reason]:
    return {finding.reason for finding in report.findings}


@pytest.mark.nightly
@pytest.mark.parametrize("name", planted.REASONS)
def test_planted_defect_is_found_by_its_reason(reports, name) -> None:
    assert planted.REASONS[name] in reasons_of(reports[name]), reports[name].findings


@pytest.mark.nightly
def test_a_test_that_asserts_too_little_pays_no_cheat(reports) -> None:
    report = reports["asserts_too_little"]
    assert report.findings == ()
    assert Defence.BLIND_TRIAL in report.hacks.values(), "its tests refuse all by themselves"


@pytest.mark.nightly
@pytest.mark.parametrize("name", planted.CLEAN)
def test_clean_problem_has_no_finding(reports, name) -> None:
    assert reports[name].findings == ()
    assert len(reports[name].hacks) >= 2


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    planted.install_environments(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    plugins.installed_entries.cache_clear()
    yield
    plugins.installed_entries.cache_clear()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", planted.ENVIRONMENTS)
@pytest.mark.sampled(4)
def test_planted_defect_of_an_environment_is_found(tmp_path: Path, name: str) -> None:
    drawn = draw_environment(name, tmp_path / "drawn", QUICK)
    (report,) = check_set(drawn, tmp_path / "work", QUICK, ignore)
    wanted = planted.ENVIRONMENTS[name]
    assert reasons_of(report) == (set() if wanted is None else {wanted}), report.findings


@pytest.mark.usefixtures("installed")
def test_a_finished_report_is_taken_from_the_journal(tmp_path: Path) -> None:
    drawn = draw_environment("sound", tmp_path / "drawn", QUICK)
    first = check_set(drawn, tmp_path / "work", QUICK, ignore)
    journal = tmp_path / "work" / JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"problem_id": "torn')
    assert check_set(drawn, tmp_path / "work", QUICK, ignore) == first
    other = QUICK.model_copy(update={"seed": 1})
    assert check_set(drawn, tmp_path / "work", other, ignore) != first


@pytest.mark.usefixtures("installed")
def test_a_changed_certificate_is_refused_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    drawn = draw_environment("passes_untouched", tmp_path / "drawn", QUICK)
    reports = check_set(drawn, tmp_path / "work", QUICK, ignore)
    certificate = make_certificate(drawn, QUICK, reports, None, now=0.0)
    assert certificate.counts == {"noop_passes": 1}
    signed = sign(certificate, tmp_path)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert sign(certificate, tmp_path) == signed
    path = tmp_path / "certificate.json"
    path.write_text(signed.model_dump_json())
    assert read_signed(path, signed.public_key) == signed
    assert "noop_passes" in render_page(signed)
    with pytest.raises(ConfigError, match="signed by key"):
        read_signed(path, "00" * 32)
    path.write_text(signed.model_dump_json().replace('"num_proven":0', '"num_proven":1'))
    with pytest.raises(ConfigError, match="the signature is not of this content"):
        read_signed(path)
