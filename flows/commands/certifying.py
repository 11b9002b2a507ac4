"""`ostinato certify`: checks each problem of a set and writes a signed certificate and a page."""

import hashlib
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ostinato.flows.commands.problem_recipes import find_problem_set
from ostinato.flows.recipe import Recipe
from ostinato.flows.reporting.pages import render
from ostinato.flows.stages.checkpoints import checkpoint_named
from ostinato.flows.stages.console import say
from ostinato.infra.platform.artifacts import ArtifactRef, open_artifacts
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest, EvaluationResult
from ostinato.tasks.evaluation.config import EvaluationConfig
from ostinato.tasks.grading.environments import ENVIRONMENTS
from ostinato.tasks.problems.certification.records import (
    Certificate,
    CertifyOptions,
    Difficulty,
    ProblemReport,
    SignedCertificate,
)
from ostinato.tasks.problems.certification.run import (
    DrawnSet,
    check_set,
    draw_environment,
    draw_set,
    make_certificate,
    write_set,
)
from ostinato.tasks.problems.certification.signing import read_signed, sign
from ostinato.tasks.problems.published import PROBLEMS_FILE

CERTIFICATE, PAGE = "certificate.json", "certificate.html"
_EVALUATION = "ostinato.tasks.evaluation.checkpoint.run:main"


def certify(
    settings: Settings,
    problems: str,
    options: CertifyOptions,
    *,
    checkpoint: str | None,
    attempts: int,
    recipe: Recipe,
    directory: Path | None,
    at_a_time: int,
) -> SignedCertificate:
    """Checks a set, prints each finding, and writes certificate.json and certificate.html."""
    work = settings.home / "certificates" / hashlib.sha256(problems.encode()).hexdigest()[:16]
    drawn = _open_set(settings, problems, work, options)
    measured = None
    if checkpoint is not None:
        ledger = open_ledger(settings)
        artifacts = open_artifacts(settings, ledger)
        measured = checkpoint_named(recipe, ledger, artifacts, checkpoint)
    say(f"{drawn.name}: {len(drawn.problems)} of {drawn.num_problems} problems")
    with _bar() as bar:
        task = bar.add_task("checked", total=len(drawn.problems))

        def show(report: ProblemReport, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            for finding in report.findings:
                bar.console.out(
                    f"{report.problem_id}: {finding.reason}: {finding.detail}", highlight=False
                )

        reports = check_set(drawn, work, options, show, at_a_time)
    difficulty = None
    if measured is not None:
        difficulty = _measure(settings, drawn, work, measured, attempts, recipe, options)
    signed = sign(make_certificate(drawn, options, reports, difficulty, time.time()), settings.home)
    target = directory or work
    target.mkdir(parents=True, exist_ok=True)
    (target / CERTIFICATE).write_text(signed.model_dump_json(indent=1) + "\n")
    (target / PAGE).write_text(render_page(signed))
    conclude(signed.certificate)
    say(f"{target / CERTIFICATE}, {PAGE}: signed by key {signed.public_key}")
    return signed


def verify(path: Path, public_key: str | None) -> SignedCertificate:
    """Checks the signature of a certificate and prints a summary. Returns the certificate."""
    signed = read_signed(path, public_key)
    say(f"{path}: valid signature by key {signed.public_key}")
    conclude(signed.certificate)
    return signed


def conclude(certificate: Certificate) -> None:
    """Prints findings, paid hacks, refused fixes and costs of a certificate."""
    checked = len(certificate.reports)
    say(f"{certificate.num_proven} of {checked} problems have no finding")
    for reason, count in certificate.counts.items():
        say(f"  {reason}: {count}")
    say(f"adversary suite: {certificate.hacks_paid} paid in {certificate.hacks_tried} tries")
    for family, refused in certificate.hacks.items():
        counts = ", ".join(f"{defence} {count}" for defence, count in refused.items())
        say(f"  {family}, refused by: {counts}")
    say(f"right fixes: {certificate.fixes_refused} of {certificate.fixes_judged} refused")
    costs = {
        "test run": certificate.verdict_seconds,
        "command in a box": certificate.step_seconds,
        "start of a box": certificate.start_seconds,
        "verdict on another text": certificate.trial_seconds,
    }
    medians = [f"{name} {1e3 * seconds:.0f} ms" for name, seconds in costs.items() if seconds]
    say(f"cost, medians: {', '.join(medians) or 'not measured'}")
    if certificate.difficulty is not None:
        found = certificate.difficulty
        say(
            f"{found.checkpoint} solves {found.solve_rate:.1%} [{found.low:.1%}, {found.high:.1%}], "
            f"{found.attempts_per_problem} attempts each"
        )


def render_page(signed: SignedCertificate) -> str:
    """The certificate as one HTML page without scripts."""
    certificate = signed.certificate
    title = f"Certificate of {certificate.problem_set}"
    return render("certificate", title=title, signed=signed, certificate=certificate)


def _open_set(settings: Settings, problems: str, work: Path, options: CertifyOptions) -> DrawnSet:
    """The set of a directory, an installed environment or an artifact."""
    names = ENVIRONMENTS.names
    if problems in names and not (Path(problems) / PROBLEMS_FILE).is_file():
        return draw_environment(problems, work / "environment", options)
    otherwise = f", or an installed environment: {', '.join(names) or 'none'}"
    return draw_set(problems, find_problem_set(settings, problems, otherwise), options)


def _measure(
    settings: Settings,
    drawn: DrawnSet,
    work: Path,
    checkpoint: ArtifactRef,
    attempts: int,
    recipe: Recipe,
    options: CertifyOptions,
) -> Difficulty:
    """Difficulty of the checked problems for a checkpoint, measured with the harness and engine of training."""
    request = EvaluationRequest(
        checkpoint_directory=str(open_artifacts(settings).local_copy(checkpoint, settings.home)),
        checkpoint_name=str(checkpoint),
        problems_directory=str(write_set(drawn, work / "set")),
        suite="certificate",
        config=EvaluationConfig(
            problems=len(drawn.problems), attempts_per_problem=attempts, seed=options.seed
        ),
        harness=recipe.harness,
        grading=recipe.grading,
        sandbox=recipe.rollout.sandbox,
        sandboxes=recipe.sandbox,
        engine_slots=recipe.reinforcement.engine_slots,
        decoding=recipe.decoding,
        processes=settings.cpu_limit,
    )
    name = f"evaluation-{drawn.sha256[:12]}-{checkpoint.fingerprint}-{attempts}-{options.seed}"
    with _bar() as bar:
        task = bar.add_task("attempts", total=None)
        card = run_child(
            _EVALUATION,
            request,
            EvaluationResult,
            directory=work / name,
            on_progress=lambda seen: bar.update(task, completed=seen.done, total=seen.total),
            settings=settings,
        ).scorecard
    return Difficulty(
        checkpoint=str(checkpoint),
        attempts_per_problem=attempts,
        solve_rate=card.average.mean,
        low=card.average.low,
        high=card.average.high,
        solved={item.problem_id: item.solved / item.attempts for item in card.problems},
    )


def _bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
