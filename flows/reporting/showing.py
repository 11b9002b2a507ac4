"""What people see of a run: Prefect artifacts at each stage, and the report at its end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ostinato.flows.reporting.attempts.attempts_page import write_attempts
from ostinato.flows.reporting.attempts.trajectories import find_examples
from ostinato.flows.reporting.codebase_rows import codebase_rows
from ostinato.flows.reporting.control_rows import control_rows
from ostinato.flows.reporting.figures import interval
from ostinato.flows.reporting.gate_picture import show_gate
from ostinato.flows.reporting.overlap_notes import note_overlap, overlap_rows
from ostinato.flows.reporting.provenance import describe_origin
from ostinato.flows.reporting.stage_times import stage_times
from ostinato.flows.stages import chain
from ostinato.flows.stages.artifacts import show_link, show_markdown, show_table
from ostinato.flows.stages.console import open_console, say
from ostinato.flows.stages.curves.report import (
    Curve,
    ReportRow,
    RunPage,
    StageTime,
    console_table,
    write_html,
)
from ostinato.flows.stages.curves.rl_curves import (
    evaluation_curves,
    newest_runs,
    rl_curves,
    seed_curves,
    steps_of,
)
from ostinato.flows.stages.curves.training_curves import (
    perplexity_curve,
    show_curves,
    training_curves,
)
from ostinato.flows.stages.realtime import CycleReport
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.workspace import METRICS
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.corpus.config import CorpusResult
from ostinato.tasks.evaluation.locating import ArmComparison
from ostinato.tasks.pretraining.config import PretrainingResult
from ostinato.tasks.pretraining.mtp.config import MtpResult
from ostinato.tasks.pretraining.mtp.speculation_config import SpeculationResult
from ostinato.tasks.problems.config import ProblemsResult
from ostinato.tasks.problems.environments.run import EnvironmentsResult
from ostinato.tasks.records import Metric, Split
from ostinato.tasks.reinforcement.records import ReinforcementResult

ATTEMPTS_PAGE = "attempts.html"
HEADLINE = ("RL", "held-out mutations: average solve rate")  # stage and measure of a row


def show_problems(context: StageContext, problems: ArtifactRef) -> None:
    """Card of a problem set, in the console and as artifacts."""
    result = chain.result_of(context, problems, ProblemsResult)
    rows = [{"split": split, "problems": count} for split, count in result.split_sizes.items()]
    show_table(
        rows, key="problem-splits", description=f"yield {result.yield_ratio:.0%}, {problems}"
    )
    operators = [{"operator": name, "problems": count} for name, count in result.operators.items()]
    show_table(operators, key="problem-operators", description=str(problems))
    show_table(list(result.yield_table), key="problem-yield", description=f"yield of {problems}")
    for line in describe_problems(result):
        say(line)


def show_environments(context: StageContext, problems: ArtifactRef) -> None:
    """Problems that each environment of the recipe added."""
    result = chain.result_of(context, problems, EnvironmentsResult)
    rows = [{"environment": name, "problems": count} for name, count in result.added.items()]
    show_table(rows, key="environments", description=str(problems))
    for name, count in result.added.items():
        say(f"environment {name}: {count} problems")


def describe_problems(result: ProblemsResult) -> list[str]:
    """Lines of a problem set's card: size, kinds, operators, splits, and what was left out."""
    lines = [
        f"problems: {result.num_problems} proven of {result.num_candidates} candidates "
        f"({result.yield_ratio:.0%}), {len(result.repositories)} repositories",
        f"  kinds: {_counts(result.kinds)}",
        f"  operators: {_counts(result.operators)}",
        f"  splits: {_counts(result.split_sizes)}",
    ]
    empty = [split for split, size in result.split_sizes.items() if not size]
    if empty:
        lines.append(
            f"  no problem for {', '.join(empty)}: no repository is of that split, and none is "
            "dealt out (a source without `split` is)"
        )
    lines += [
        f"  left out {name}: {' '.join(reason.split())[:600]}"
        for name, reason in sorted(result.left_out.items())
    ]
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def show_pretraining(context: StageContext, corpus: ArtifactRef, pretrained: ArtifactRef) -> None:
    """Shards of the corpus and perplexity through the phases."""
    made = chain.result_of(context, corpus, CorpusResult)
    shards = [shard.model_dump() for shard in made.shards]
    show_table(shards, key="corpus-shards", description=str(corpus))
    if made.overlap:
        show_table([*overlap_rows(made)], key="answers-in-corpus", description=str(corpus))
    result = chain.result_of(context, pretrained, PretrainingResult)
    rows = [
        {"step": item.step, "codebase": round(item.perplexity, 3)}
        | {name: round(value, 3) for name, value in item.by_source.items()}
        for item in result.evaluations
    ]
    show_table(rows, key="perplexity", description=f"held-out perplexity, {pretrained}")
    curves = [perplexity_curve(result.evaluations), *_losses(context, pretrained)]
    show_curves("pretraining", pretrained, curves)


def show_ablation(found: ArmComparison) -> None:
    """Both arms of the search ablation, and what they differ by."""
    rows = [
        {
            "arm": name,
            "solved": interval(arm.solved),
            "shown": interval(arm.shown),
            "located": interval(arm.located),
            "solved when located": f"{arm.solved_when_located:.1%}",
            "turns to locate": f"{arm.turns.mean:.1f}",
            "tokens to locate": f"{arm.generated_tokens.mean + arm.read_tokens.mean:.0f}",
        }
        for name, arm in found.arms.items()
    ]
    difference = found.solved_difference
    show_table(
        rows,
        key="search-ablation",
        description=f"solve rate with minus without: {difference.mean:+.3f} "
        f"[{difference.low:+.3f}, {difference.high:+.3f}]",
    )


def show_drafting(context: StageContext, drafted: ArtifactRef, speculation: ArtifactRef) -> None:
    """Draft quality and what it is worth in the engine."""
    distilled = context.parent_of(drafted, "mtp") or drafted
    draft = chain.result_of(context, distilled, MtpResult)
    measured = chain.result_of(context, speculation, SpeculationResult)
    rows = [
        {
            "depth": depth + 1,
            "kl_nats_before": before,
            "kl_nats_after": after,
            "agreement_after": agreement,
        }
        for depth, (before, after, agreement) in enumerate(
            zip(draft.before.kl_nats, draft.after.kl_nats, draft.after.agreement, strict=True)
        )
    ]
    show_table(rows, key="draft-layers", description=str(drafted))
    show_curves("mtp", distilled, _training_curves(context, distilled))
    show_table([measured.model_dump(mode="json")], key="speculation", description=str(drafted))


def show_reinforcement(context: StageContext, reinforced: ArtifactRef) -> None:
    """The curve of an RL run."""
    wanted = (
        "solve_rate",
        "reward_mean",
        "generated_tokens_mean",
        "turns_mean",
        "staleness_mean",
        "entropy_nats",
    )
    rows = [
        {"step": row["step"]} | {name: round(float(row[name]), 4) for name in wanted if name in row}
        for row in _curve(context, reinforced)
    ]
    if rows:
        show_table(rows, key="reinforcement-curve", description=str(reinforced))
    result = chain.result_of(context, reinforced, ReinforcementResult)
    curves = evaluation_curves(result.evaluations) + rl_curves(_curve(context, reinforced))
    show_curves("reinforcement", reinforced, curves)


def show_cycle(cycle: CycleReport) -> None:
    """One cycle as text."""
    lines = [f"# {cycle.cycle_id}", f"served: {cycle.served}", f"seconds: {cycle.seconds:.0f}"]
    if cycle.users is not None:
        lines.append(f"**simulated users, not people**: {cycle.users.counts}")
    if cycle.training is not None:
        lines.append(
            f"{cycle.training.samples} samples, mean reward {cycle.training.mean_reward:.3f}"
        )
        if cycle.training.left_out:
            lines.append(f"late: {cycle.training.left_out} more samples were not trained on")
    if cycle.promotion is not None:
        decided = f"{cycle.promotion.outcome.value}: {cycle.promotion.reason}"
        lines.append(f"**{cycle.promotion.outcome.value}**: {cycle.promotion.reason}")
        cards = {"candidate": cycle.candidate_scorecard, "champion": cycle.champion_scorecard}
        rates = {name: card.average for name, card in cards.items() if card is not None}
        show_gate(rates, decided)
    show_markdown("\n\n".join(lines), key="cycle")


class MadeByRun(NamedTuple):
    """Artifacts of the whole chain."""

    problems: ArtifactRef
    pretrained: ArtifactRef
    drafted: ArtifactRef
    reinforced: ArtifactRef


def show_run(context: StageContext, made: MadeByRun, cycle: CycleReport | None) -> Path:
    """Writes the report of the whole chain, prints its table, and returns its path."""
    rows, controls = _rows(context, made), _control_rows(context, made)
    cycle_rows = _cycle_rows(cycle)
    recipe = context.recipe
    line = recipe.serving.line
    champion = None if line is None else context.ledger.promotions.current(line)
    title = f"Ostinato: {recipe.name}, seed {recipe.seed}"
    place = context.settings.home / "reports" / f"{recipe.name}-seed{recipe.seed}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "recipe.json").write_text(recipe.model_dump_json(indent=1))
    facts = {
        "recipe": recipe.description,
        "problems": str(made.problems),
        "serving line": line or "none: the recipe names no line",
        "serving checkpoint": "none" if champion is None else champion.checkpoint_id,
        **describe_origin(recipe, context.settings),
    }
    curves = _curves(context, made)
    links = _write_examples(context, made.reinforced, place)
    times = _times(context, made, cycle)
    headline = next(row for row in rows if (row.stage, row.measure) == HEADLINE)
    page = write_html(
        place / "report.html",
        RunPage(title, headline, controls, curves, rows + cycle_rows, links, times, facts),
    )
    rows += controls + cycle_rows
    show_table([row._asdict() for row in rows], key="run-report", description=title)
    # by the dashboard, which `ostinato up` keeps running: browsers refuse links to files
    port = context.settings.dashboard_port
    address = f"http://127.0.0.1:{port}/reports/{place.name}/{page.name}"
    show_link(address, key="run-report-page", description=title)
    console = open_console()
    console.print(console_table(rows, title))
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
    return page


def _write_examples(context: StageContext, reinforced: ArtifactRef, place: Path) -> dict[str, str]:
    """Addresses of attempts on a page beside the report, by what they are."""
    run_id = f"{reinforced.kind}-{reinforced.fingerprint}"
    examples = find_examples(context.settings, run_id)
    if not examples:  # an artifact from elsewhere: this ledger has no attempts of it
        return {}
    page = write_attempts(place / ATTEMPTS_PAGE, f"Attempts of {run_id}", [*examples.values()])
    names = {what: attempt.facts["trajectory_id"] for what, attempt in examples.items()}
    return {f"{what}: {name}": f"{page.name}#{name}" for what, name in names.items()}


def _times(context: StageContext, made: MadeByRun, cycle: CycleReport | None) -> list[StageTime]:
    """What each stage of the chain took, the evaluations and the cycle too."""
    refs = {str(ref): ref for ref in made}
    for checkpoint in (made.drafted, made.reinforced):
        for split in (Split.HELD_OUT, Split.HELD_OUT_FUNCTION):
            card = chain.evaluation(context, made.problems, checkpoint, split)
            refs[f"{card}: {checkpoint}, {split.value}"] = card
    times = stage_times(context, refs)
    if cycle is not None and cycle.cycle_id:
        times.append(StageTime(f"cycle {cycle.cycle_id}", "", f"{cycle.seconds:.0f}"))
    return times


def _control_rows(context: StageContext, made: MadeByRun) -> list[ReportRow]:
    """The controls on held-out mutations, from evaluations that the report has anyway."""
    start, after_rl = (
        chain.evaluation(context, made.problems, checkpoint, Split.HELD_OUT)
        for checkpoint in (made.drafted, made.reinforced)
    )
    return control_rows(context, start, after_rl)


def _rows(context: StageContext, made: MadeByRun) -> list[ReportRow]:
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
            ),
            _change("RL", f"{name}: best of {attempts}", (before.best_of, after.best_of)),
        ]
    return rows


def _change(stage: str, measure: str, metrics: tuple[Metric, Metric], note: str = "") -> ReportRow:
    """Row of a measure before and after a stage."""
    before, after = metrics
    return ReportRow(stage, measure, interval(before), interval(after), note)


def _draft_rows(
    context: StageContext, corpus: ArtifactRef, drafted: ArtifactRef
) -> list[ReportRow]:
    """Quality and worth of the draft layers, where the recipe wants some."""
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
            f"{speculation.speed_up:.2f}x, {speculation.tokens_per_forward:.2f} tokens a forward, "
            f"acceptance {speculation.acceptance:.0%}; with the lookup {speculation.lookup_speed_up:.2f}x",
        ),
    ]


def _base_row(
    context: StageContext, problems: ArtifactRef, tuned: ArtifactRef, split: Split, name: str
) -> list[ReportRow]:
    """The model as it was imported beside the fine-tuned one."""
    base = chain.imported_base(context)
    if base is None:
        return []
    before = chain.evaluate(context, problems, base, split)
    after = chain.evaluate(context, problems, tuned, split)
    note = f"as imported, then fine-tuned; {len(after.problems)} problems x {after.attempts_per_problem}"
    measure = f"{name}: average solve rate"
    return [_change("SFT", measure, (before.average, after.average), note)]


def _in_words(counts: Mapping[str, int]) -> str:
    """Counts as a sentence has them: 96 requests, 59 kept."""
    named = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in named)


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
    return ReportRow("cycle", "samples", "", "0", note)


def _curves(context: StageContext, made: MadeByRun) -> list[Curve]:
    """All plots of the report, the solve rate first."""
    trained = chain.result_of(context, made.pretrained, PretrainingResult)
    run = chain.result_of(context, made.reinforced, ReinforcementResult)
    here = context.run_directory(made.reinforced.kind, made.reinforced.fingerprint)
    return [
        *evaluation_curves(run.evaluations),
        *seed_curves(newest_runs(context.settings.home, context.recipe.name, here)),
        *rl_curves(_curve(context, made.reinforced)),
        perplexity_curve(trained.evaluations),
        *_losses(context, made.pretrained),
    ]


def _curve(context: StageContext, ref: ArtifactRef) -> list[dict]:
    path = context.run_directory(ref.kind, ref.fingerprint) / METRICS
    return steps_of(path)


def _training_curves(context: StageContext, ref: ArtifactRef) -> list[Curve]:
    """Plots of a training stage that ran here. None for an artifact from elsewhere."""
    return training_curves(read_metrics(context.run_directory(ref.kind, ref.fingerprint) / METRICS))


def _losses(context: StageContext, pretrained: ArtifactRef) -> list[Curve]:
    """Plots of pretraining without perplexity, for which the result has more points."""
    found = _training_curves(context, pretrained)
    return [curve for curve in found if curve.key != "perplexity"]


def _hack_row(run: ReinforcementResult) -> ReportRow:
    """Report row of the hack monitors over the newest trajectories."""
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


def _list(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)
