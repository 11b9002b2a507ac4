"""The report of a whole chain: a snapshot of rows, curves, times and facts, for the console, a page and Prefect."""

import base64
import importlib.metadata
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console

import ostinato
from ostinato.flows.recipe import Recipe, load_recipe, recipe_names
from ostinato.flows.reporting.attempt_files import write_attempts
from ostinato.flows.reporting.attempts import find_examples
from ostinato.flows.reporting.evaluations import (
    control_rows,
    note_overlap,
)
from ostinato.flows.reporting.pages import render
from ostinato.flows.reporting.showing import loss_curves, rl_steps
from ostinato.flows.reporting.tables import ReportRow, interval
from ostinato.flows.stages import chain
from ostinato.flows.stages.artifacts import show_link, show_table
from ostinato.flows.stages.console import open_console
from ostinato.flows.stages.curves import (
    Curve,
    evaluation_curves,
    newest_runs,
    perplexity_curve,
    plot_png,
    rl_curves,
    seed_curves,
)
from ostinato.flows.stages.declared import START_FILE, StageStart
from ostinato.flows.stages.realtime import CycleReport
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.workspace import read_record
from ostinato.infra.platform.errors import ProblemError, StorageError
from ostinato.infra.platform.git import run_git
from ostinato.infra.platform.record import dotted
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.pretraining.config import PretrainingResult
from ostinato.tasks.pretraining.mtp.config import MtpResult, SpeculationResult
from ostinato.tasks.problems.config import ProblemsResult
from ostinato.tasks.records import Metric, Split
from ostinato.tasks.reinforcement.records import ReinforcementResult

ATTEMPTS_PAGE = "attempts.html"
HEADLINE = f"solve-rate {Split.HELD_OUT.value}"  # key of a row
MAX_PRINTED = 8  # rows on the console below the headline
TRANSCRIPTS_PHASE = "transcripts"  # fine-tuning; phases of other names are continued pretraining


class RunArtifacts(NamedTuple):
    """Artifacts that a run of the whole chain made."""

    problems: ArtifactRef
    pretrained: ArtifactRef
    drafted: ArtifactRef
    reinforced: ArtifactRef


class StageTime(NamedTuple):
    """Time that a stage took, including pauses between a stop and the resumption."""

    stage: str
    began: str
    seconds: str


class RunReport(NamedTuple):
    """Snapshot of a finished run. Every form of the report is made from it."""

    title: str
    headline: ReportRow
    controls: Sequence[ReportRow]
    curves: Sequence[Curve]  # the first is shown below the headline
    rows: Sequence[ReportRow]
    cycle_rows: Sequence[ReportRow]
    links: Mapping[str, str]  # addresses of example attempts
    times: Sequence[StageTime]
    facts: Mapping[str, str]
    checkpoint: str  # after RL

    @property
    def table(self) -> list[dict[str, str]]:
        """All rows by column."""
        rows = (*self.rows, *self.controls, *self.cycle_rows)
        return [{n: text for n, text in row._asdict().items() if n != "key"} for row in rows]


def show_run(context: StageContext, made: RunArtifacts, cycle: CycleReport | None) -> Path:
    """Writes the report of the whole chain, prints its table, and returns its path."""
    recipe, settings = context.recipe, context.settings
    place = settings.home / "reports" / f"{recipe.name}-seed{recipe.seed}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "recipe.json").write_text(recipe.model_dump_json(indent=1))
    report = collect(context, made, cycle, place)
    page = write_page(place / "report.html", report)
    # the dashboard of `ostinato up` serves the page, because browsers refuse links to files
    publish(report, f"http://127.0.0.1:{settings.dashboard_port}/reports/{place.name}/{page.name}")
    print_report(report, page, open_console())
    return page


def print_report(report: RunReport, page: Path, console: Console) -> None:
    """Prints the headline, at most MAX_PRINTED further rows of one line each, and what to do next."""
    controls = [f"{row.measure}: {row.before}, RL {row.after}" for row in report.controls]
    others = [
        describe_row(row)
        for row in (*report.rows, *report.cycle_rows)
        if row.key and row.key != report.headline.key
    ]
    next_steps = (
        ("every plot and attempt", "ostinato dashboard"),
        ("talk to it in a repository", "ostinato chat --repo PATH"),
        ("keep it", f"ostinato export {report.checkpoint} DIRECTORY"),
    )
    lines = [
        report.title,
        "",
        describe_row(report.headline),
        "",
        *[*controls, *others][:MAX_PRINTED],
        "",
        f"report with all rows and plots: {page}",
        *(f"{what}: {command}" for what, command in next_steps),
    ]
    for line in lines:
        console.out(line, highlight=False)


def describe_row(row: ReportRow) -> str:
    """The row as a line without its note."""
    values = " -> ".join(value for value in (row.before, row.after) if value)
    return f"{row.stage}, {row.measure}: {values}"


def publish(report: RunReport, address: str) -> None:
    """Shows the table of the report, and a link to its page, in Prefect."""
    show_table(report.table, key="run-report", description=report.title)
    show_link(address, key="run-report-page", description=report.title)


def write_page(path: Path, report: RunReport) -> Path:
    """Writes the report as one self-contained page and returns its path."""
    pictures = [
        {
            "title": curve.title,
            "expected": curve.expected,
            "png": base64.b64encode(plot_png(curve)).decode(),
        }
        for curve in report.curves
    ]
    path.write_text(render("report", pictures=pictures, **report._asdict()))
    return path


def collect(
    context: StageContext, made: RunArtifacts, cycle: CycleReport | None, place: Path
) -> RunReport:
    """The snapshot of a run. Example attempts are written to a page in `place`."""
    recipe = context.recipe
    line, rows = recipe.serving.line, _rows(context, made)
    champion = None if line is None else context.ledger.promotions.current(line)
    return RunReport(
        title=f"Ostinato: {recipe.name}, seed {recipe.seed}",
        headline=next(row for row in rows if row.key == HEADLINE),
        controls=_controls_of(context, made),
        curves=_curves(context, made),
        rows=rows,
        cycle_rows=_cycle_rows(cycle),
        links=_write_examples(context, made.reinforced, place),
        times=_times(context, made, cycle),
        facts={
            "recipe": recipe.description,
            "problems": str(made.problems),
            "serving line": line or "none: the recipe names no line",
            "serving checkpoint": "none" if champion is None else champion.checkpoint_id,
            **describe_origin(recipe, context.settings),
        },
        checkpoint=str(made.reinforced),
    )


def describe_origin(recipe: Recipe, settings: Settings) -> dict[str, str]:
    """Facts about the machine and the code that write the report, and changes to the shipped recipe."""
    return {
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
        "machine": _machine(settings),
        "code": _code(),
        "python": platform.python_version(),
        "changes to the shipped recipe": "; ".join(recipe_changes(recipe)) or "none",
    }


def recipe_changes(recipe: Recipe) -> Iterator[str]:
    """Differences from the shipped recipe of that name, as section.key: shipped -> used."""
    if recipe.name not in recipe_names():
        yield f"{recipe.name} is a recipe of your own"
        return
    original = load_recipe(recipe.name, seed=recipe.seed)
    shipped, used = (dict(dotted(item.model_dump(mode="json"))) for item in (original, recipe))
    for name in sorted(shipped.keys() | used.keys()):
        if shipped.get(name) != used.get(name):
            yield f"{name}: {shipped.get(name)} -> {used.get(name)}"


def _machine(settings: Settings) -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_gib = psutil.virtual_memory().total / 2**30
    model = names[0] if names else platform.machine()
    return f"{model}, {settings.cpu_limit} cores, {memory_gib:.0f} GiB, device {settings.device}"


def _code() -> str:
    root = Path(ostinato.__file__).parent
    version = f"ostinato {importlib.metadata.version('ostinato')}"
    try:
        commit = run_git(root, "rev-parse", "HEAD").decode().strip()
        is_changed = bool(run_git(root, "status", "--porcelain", "--untracked-files=no").strip())
    except ProblemError:  # installed, not a checkout
        return version
    return f"{version}, commit {commit}{', with changes' if is_changed else ''}"


def _write_examples(context: StageContext, reinforced: ArtifactRef, place: Path) -> dict[str, str]:
    """Writes example attempts to a page next to the report. Returns their addresses by rank."""
    run_id = context.shipped_run_directory(reinforced).name
    examples = find_examples(context.settings, run_id)
    if not examples:  # an artifact of another machine has no attempts in this ledger
        return {}
    page = write_attempts(place / ATTEMPTS_PAGE, f"Attempts of {run_id}", [*examples.values()])
    names = {what: attempt.facts["trajectory_id"] for what, attempt in examples.items()}
    return {f"{what}: {name}": f"{page.name}#{name}" for what, name in names.items()}


def _times(context: StageContext, made: RunArtifacts, cycle: CycleReport | None) -> list[StageTime]:
    """Times of the stages of the chain, of evaluations and of the cycle."""
    refs = {str(ref): ref for ref in made}
    for checkpoint in (made.drafted, made.reinforced):
        for split in (Split.HELD_OUT, Split.HELD_OUT_FUNCTION):
            card = chain.evaluation(context, made.problems, checkpoint, split)
            refs[f"{card}: {checkpoint}, {split.value}"] = card
    times = stage_times(context, refs)
    if cycle is not None and cycle.cycle_id:
        times.append(StageTime(f"cycle {cycle.cycle_id}", "", f"{cycle.seconds:.0f}"))
    return times


def stage_times(context: StageContext, refs: Mapping[str, ArtifactRef]) -> list[StageTime]:
    """Times of the named artifacts and of their ancestors, in order of their ends. A stage records its start in the
    run directory and its end in the artifact. Removed artifacts are left out.
    """
    found, ended = dict(refs), dict[str, float]()
    waiting = list(found)
    while waiting:
        name = waiting.pop()
        try:
            manifest = context.artifacts.manifest(found[name])
        except StorageError:
            continue
        ended[name] = manifest.created_at
        for parent in manifest.parents:
            if parent not in found.values():
                found[str(parent)] = parent
                waiting.append(str(parent))
    names = sorted(ended, key=lambda name: ended[name])
    return [_time_of(context, name, found[name], ended[name]) for name in names]


def _time_of(context: StageContext, name: str, ref: ArtifactRef, ended_at: float) -> StageTime:
    place = context.run_directory(ref.kind, ref.fingerprint)
    start = read_record(place / START_FILE, StageStart)
    if start is None:
        return StageTime(name, "not here", "not known")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began_at))
    return StageTime(name, began, f"{ended_at - start.began_at:.0f}")


def _controls_of(context: StageContext, made: RunArtifacts) -> list[ReportRow]:
    """The controls on held-out mutations, from evaluations that the report already uses."""
    checkpoints = (made.drafted, made.reinforced)
    cards = (chain.evaluation(context, made.problems, ref, Split.HELD_OUT) for ref in checkpoints)
    return control_rows(context, *cards)


def _rows(context: StageContext, made: RunArtifacts) -> list[ReportRow]:
    problems, pretrained, drafted, reinforced = made
    built = chain.result_of(context, problems, ProblemsResult)
    trained = chain.result_of(context, pretrained, PretrainingResult)
    corpus = chain.build_corpus(context, problems)
    run = chain.result_of(context, reinforced, ReinforcementResult)
    rows = [
        ReportRow(
            "problems",
            "proven by real tests",
            f"{built.num_candidates} candidates",
            f"{built.num_problems} problems",
            f"yield {built.yield_ratio:.0%}",
            key="proven problems",
        ),
        *codebase_rows(trained),
        *_draft_rows(context, corpus, drafted),
        _hack_row(run),
    ]
    for split, name in (
        (Split.HELD_OUT, "held-out mutations"),
        (Split.HELD_OUT_FUNCTION, "functions held out whole"),
    ):
        rows += _base_row(context, problems, drafted, split, name)
        before = chain.evaluate(context, problems, drafted, split)
        after = chain.evaluate(context, problems, reinforced, split)
        attempts = after.attempts_per_problem
        overlap = note_overlap(context, reinforced, problems, split)
        rows += [
            _change(
                "RL",
                f"{name}: average solve rate",
                (before.average, after.average),
                f"{run.steps} steps, {len(after.problems)} problems x {attempts}; in training text: {overlap}",
                key=f"solve-rate {split.value}",
            ),
            _change("RL", f"{name}: best of {attempts}", (before.best_of, after.best_of)),
        ]
    return rows


def codebase_rows(trained: PretrainingResult) -> list[ReportRow]:
    """Perplexity and bits per byte of held-out code, before and after the phases on code and those on transcripts."""
    continued_steps = sum(
        phase.steps for phase in trained.phases if phase.name != TRANSCRIPTS_PHASE
    )
    continued = next(item for item in trained.evaluations if item.step == continued_steps)
    phases = [f"{phase.name} {phase.tokens / 1e6:.1f}M tokens" for phase in trained.phases]
    rows = [
        ReportRow(
            "pretraining",
            "held-out codebase perplexity",
            f"{trained.before.perplexity:.2f}",
            f"{continued.perplexity:.2f}",
            f"before the transcripts; {', '.join(phases)}" if phases else "no phase: as it was",
            key="perplexity",
        )
    ]
    for stage, before, after in (
        ("pretraining", trained.before, continued),
        ("SFT", continued, trained.after),
    ):
        if before.bits_per_byte is None or after.bits_per_byte is None or before == after:
            continue  # not measured, or the stage took no step
        numbers = f"{before.bits_per_byte:.3f}", f"{after.bits_per_byte:.3f}"
        note = "per byte, so comparable across tokenizers"
        rows.append(ReportRow(stage, "held-out codebase, bits per byte", *numbers, note))
    return rows


def _draft_rows(
    context: StageContext, corpus: ArtifactRef, drafted: ArtifactRef
) -> list[ReportRow]:
    """Quality and speed-up of the draft layers. Empty when the recipe has none."""
    if not context.recipe.mtp.depth:
        return []
    distilled = context.parent_of(drafted, "mtp") or drafted
    draft = chain.result_of(context, distilled, MtpResult)
    speculated = chain.measure_speculation(context, corpus, drafted)
    speculation = chain.result_of(context, speculated, SpeculationResult)
    return [
        ReportRow(
            "MTP",
            "KL to the main head, by depth",
            _list(draft.before.kl_nats),
            _list(draft.after.kl_nats),
            f"greedy agreement {_list(draft.after.agreement)}",
        ),
        ReportRow(
            "MTP",
            "decode tokens/s, batch 1, greedy",
            f"{speculation.plain_tokens_per_second:.0f}",
            f"{speculation.drafted_tokens_per_second:.0f}",
            f"{speculation.speed_up:.2f}x, {speculation.tokens_per_forward:.2f} tokens per forward pass, "
            f"acceptance {speculation.acceptance:.0%}; with the lookup {speculation.lookup_speed_up:.2f}x",
            key="decoding",
        ),
    ]


def _base_row(
    context: StageContext, problems: ArtifactRef, tuned: ArtifactRef, split: Split, name: str
) -> list[ReportRow]:
    """Row that compares the imported model with the fine-tuned one. Empty when the base was not imported."""
    base = chain.imported_base(context)
    if base is None:
        return []
    before = chain.evaluate(context, problems, base, split)
    after = chain.evaluate(context, problems, tuned, split)
    note = f"as imported, then fine-tuned; {len(after.problems)} problems x {after.attempts_per_problem}"
    measure = f"{name}: average solve rate"
    return [_change("SFT", measure, (before.average, after.average), note)]


def _hack_row(run: ReinforcementResult) -> ReportRow:
    """Row of the hack monitors' rates over the newest trajectories."""
    common = sorted(run.hack_rates.items(), key=lambda item: -item[1])[:4]
    seen = ", ".join(f"{name} {rate:.1%}" for name, rate in common) or "no pattern"
    alarms = "; ".join(run.alarms) or "no alarm"
    return ReportRow(
        "RL",
        "trajectories with a hack pattern",
        "",
        f"{run.hack_any_ratio:.1%}",
        f"{seen}; {alarms}",
    )


def _change(
    stage: str, measure: str, metrics: tuple[Metric, Metric], note: str = "", key: str = ""
) -> ReportRow:
    """Row of a measure before and after a stage."""
    before, after = metrics
    return ReportRow(stage, measure, interval(before), interval(after), note, key)


def _list(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _cycle_rows(cycle: CycleReport | None) -> list[ReportRow]:
    if cycle is None:
        return []
    if cycle.champion_scorecard is None:
        return [_no_samples("no checkpoint passed the gate of the serving line")]
    if cycle.training is None:
        return [_no_samples("too few interactions to train on")]
    if cycle.promotion is None or cycle.candidate_scorecard is None:
        return [_no_samples(f"nothing to learn from: {cycle.training.skipped} skipped")]
    users = "" if cycle.users is None else f"simulated users: {_in_words(cycle.users.counts)}"
    return [
        _change(
            "cycle",
            "held-out mutations: average solve rate",
            (cycle.champion_scorecard.average, cycle.candidate_scorecard.average),
            f"{cycle.promotion.outcome.value}; {cycle.training.samples} samples",
            key="cycle",
        ),
        ReportRow(
            "cycle",
            "mean reward distilled from users",
            "",
            f"{cycle.training.mean_reward:+.2f}",
            users,
        ),
    ]


def _no_samples(note: str) -> ReportRow:
    return ReportRow("cycle", "samples", "", "0", note, key="cycle")


def _in_words(counts: Mapping[str, int]) -> str:
    """Counts as text, for example `96 requests, 59 kept`."""
    named = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in named)


def _curves(context: StageContext, made: RunArtifacts) -> list[Curve]:
    """All plots of the report, the solve rate first."""
    trained = chain.result_of(context, made.pretrained, PretrainingResult)
    run = chain.result_of(context, made.reinforced, ReinforcementResult)
    here = context.shipped_run_directory(made.reinforced)
    return [
        *evaluation_curves(run.evaluations),
        *seed_curves(newest_runs(context.settings.home, context.recipe.name, here)),
        *rl_curves(rl_steps(context, made.reinforced)),
        perplexity_curve(trained.evaluations),
        *loss_curves(context, made.pretrained),
    ]
