"""Artifacts that each stage of a run shows in Prefect."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ostinato.flows.reporting.evaluations import overlap_rows, show_gate
from ostinato.flows.stages import chain
from ostinato.flows.stages.artifacts import link_to_plots, show_markdown, show_table
from ostinato.flows.stages.console import say
from ostinato.flows.stages.curves import (
    Curve,
    evaluation_curves,
    perplexity_curve,
    rl_curves,
    show_curves,
    steps_of,
    training_curves,
)
from ostinato.flows.stages.lineage import SOLVED
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.workspace import METRICS
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.corpus.config import CorpusResult
from ostinato.tasks.pretraining.config import PretrainingResult
from ostinato.tasks.pretraining.mtp.config import MtpResult, SpeculationResult
from ostinato.tasks.problems.config import EnvironmentsResult, ProblemsResult
from ostinato.tasks.reinforcement.records import ReinforcementResult

if TYPE_CHECKING:  # serving would add half as many modules again as the chain imports
    from ostinato.flows.stages.realtime import CycleReport

_SHOWN_METRICS = (  # columns of RL's table
    "solve_rate",
    "reward_mean",
    "generated_tokens_mean",
    "turns_mean",
    "staleness_mean",
    "entropy_nats",
)


def show_problems(context: StageContext, problems: ArtifactRef) -> None:
    """Shows the card of a problem set on the console and as artifacts."""
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
    """Shows the number of problems that each environment of the recipe added."""
    result = chain.result_of(context, problems, EnvironmentsResult)
    rows = [{"environment": name, "problems": count} for name, count in result.added.items()]
    show_table(rows, key="environments", description=str(problems))
    for name, count in result.added.items():
        say(f"environment {name}: {count} problems")


def show_probes(context: StageContext, probes: ArtifactRef) -> None:
    """Shows how many problems a checkpoint solved in how many of its attempts."""
    manifest = context.artifacts.manifest(probes)
    problems, checkpoint, *_ = manifest.parents
    say(f"{probes}: attempts of {checkpoint} at the training problems of {problems}")
    solved: dict[str, int] = manifest.metadata[SOLVED]
    rows = [{"solved attempts": part, "problems": count} for part, count in solved.items()]
    for part, count in solved.items():
        say(f"  {part}: {count} problems")
    show_table(rows, key="solve-rates", description=f"{checkpoint} on {problems}")


def describe_problems(result: ProblemsResult) -> list[str]:
    """Lines of a problem set's card: size, kinds, operators, splits, and what was left out."""
    lines = [
        f"problems: {result.num_problems} proven of {result.num_candidates} candidates "
        f"({result.yield_ratio:.0%}), {len(result.repositories)} repositories",
        f"  kinds: {_counts(result.kinds)}",
        *(f"  changes: {name} {value:g}" for name, value in result.changes.items()),
        f"  operators: {_counts(result.operators)}",
        f"  splits: {_counts(result.split_sizes)}",
    ]
    empty = [split for split, size in result.split_sizes.items() if not size]
    if empty:
        lines.append(
            f"  no problem for {', '.join(empty)}: no repository has that split, and none can be "
            "assigned to it (only a source without `split` can)"
        )
    lines += [
        f"  left out {name}: {' '.join(reason.split())[:600]}"
        for name, reason in sorted(result.left_out.items())
    ]
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def show_pretraining(context: StageContext, corpus: ArtifactRef, pretrained: ArtifactRef) -> None:
    """Shows the corpus's shards and the perplexity through the phases."""
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
    curves = [perplexity_curve(result.evaluations), *loss_curves(context, pretrained)]
    show_curves("pretraining", pretrained, curves, _link(context, pretrained))


def show_drafting(context: StageContext, drafted: ArtifactRef, speculation: ArtifactRef) -> None:
    """Shows the draft layers' quality and their speed-up in the engine."""
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
    curves = curves_of_training(context, distilled)
    show_curves("mtp", distilled, curves, _link(context, distilled))
    show_table([measured.model_dump(mode="json")], key="speculation", description=str(drafted))


def show_reinforcement(context: StageContext, reinforced: ArtifactRef) -> None:
    """Shows the table and curves of an RL run."""
    steps = rl_steps(context, reinforced)
    rows = [
        {"step": row["step"]}
        | {name: round(float(row[name]), 4) for name in _SHOWN_METRICS if name in row}
        for row in steps
    ]
    if rows:
        show_table(rows, key="reinforcement-curve", description=str(reinforced))
    result = chain.result_of(context, reinforced, ReinforcementResult)
    curves = evaluation_curves(result.evaluations) + rl_curves(steps)
    show_curves("reinforcement", reinforced, curves, _link(context, reinforced))


def show_cycle(cycle: "CycleReport") -> None:
    """Shows a cycle as text, and its gate as a picture."""
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


def rl_steps(context: StageContext, ref: ArtifactRef) -> list[dict]:
    """The metrics rows of an RL run's steps. Empty for a run of another machine."""
    return steps_of(context.shipped_run_directory(ref) / METRICS)


def curves_of_training(context: StageContext, ref: ArtifactRef) -> list[Curve]:
    """Plots of a training stage. Empty for an artifact of another machine."""
    return training_curves(read_metrics(context.shipped_run_directory(ref) / METRICS))


def loss_curves(context: StageContext, pretrained: ArtifactRef) -> list[Curve]:
    """Plots of pretraining except perplexity, for which the result has more points than the metrics."""
    found = curves_of_training(context, pretrained)
    return [curve for curve in found if curve.key != "perplexity"]


def _link(context: StageContext, ref: ArtifactRef) -> str:
    return link_to_plots(context.shipped_run_directory(ref), context.settings)
