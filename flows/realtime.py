"""One real-time cycle as steps from a context to a promotion: collect, distil, train, evaluate, ship.

The cycle's row in the ledger and its window of interactions; a killed cycle is the open one and
goes on from what it has. The flow in flows/realtime_cycle.py only orders these.
"""

import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ostinato.flows import chain
from ostinato.flows.child_task import run_stage
from ostinato.flows.drivers.cycle_training import CycleTrainingRequest, CycleTrainingResult
from ostinato.flows.drivers.serving import ServedModel
from ostinato.flows.drivers.traffic import TrafficRequest
from ostinato.flows.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger.rows import CycleRow
from ostinato.tasks.evaluation.gates import gate_candidate
from ostinato.tasks.evaluation.statistics import solve_rates
from ostinato.tasks.feedback.collect import choose_watermark
from ostinato.tasks.feedback.simulated_users import SimulatedUsersReport
from ostinato.tasks.promotion.champion import PromotionDesk, PromotionReport
from ostinato.tasks.records import GateDecision, Scorecard, Split


class CycleReport(BaseModel):
    """What one cycle did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cycle_id: str = Field(description="empty: too few interactions, nothing was trained")
    served: str
    users: SimulatedUsersReport | None
    champion_scorecard: Scorecard
    training: CycleTrainingResult | None = None
    candidate: str | None = None
    candidate_scorecard: Scorecard | None = None
    promotion: PromotionReport | None = None
    seconds: float = 0.0


def open_desk(context: StageContext) -> PromotionDesk:
    """The desk of this ledger, with anything half-done settled."""
    desk = PromotionDesk(context.ledger, time.time)
    desk.repair()
    return desk


def judge_against_champion(context: StageContext, card: Scorecard) -> GateDecision:
    """The gate's word on a checkpoint: against the serving one if both were tried on the same problems, else by the floor."""
    champion = open_desk(context).champion_scorecard()
    same = champion is not None and solve_rates(champion).keys() == solve_rates(card).keys()
    return gate_candidate(card, champion if same else None, context.recipe.cycle.gate)


def serving_checkpoint(
    context: StageContext, problems: ArtifactRef, trained: ArtifactRef
) -> ArtifactRef:
    """What serves now. A freshly trained checkpoint goes before users first, through the same gate as any other."""
    desk = open_desk(context)
    offered = context.ledger.promotions.history()
    if all(entry.to_checkpoint_id != str(trained) for entry in offered):
        card = chain.evaluate(context, problems, trained, Split.HELD_OUT)
        decision = judge_against_champion(context, card)
        desk.publish_candidate(card, decision)
        desk.decide(decision)
    return champion_ref(context)


def champion_ref(context: StageContext) -> ArtifactRef:
    """The artifact behind the champion pointer; ConfigError when nothing was promoted yet."""
    pointer = context.ledger.promotions.current()
    if pointer is None:
        raise ConfigError("no checkpoint was promoted yet, wanted one; run `ostinato demo` first")
    return context.artifacts.get(pointer.checkpoint_id)


def served_model(context: StageContext) -> ServedModel:
    """The champion as the gateway wants it, with the repositories of the problems it was trained on."""
    served = champion_ref(context)
    problems = [ref for ref in context.artifacts.lineage(served) if ref.kind == "problems"]
    if not problems:
        raise ConfigError(f"checkpoint {served} has no problem set among its ancestors, wanted one")
    return _as_served(context, served, problems[0])


def first_cycle(
    context: StageContext, trained: ArtifactRef, run_cycle: Callable[[], CycleReport]
) -> CycleReport:
    """The cycle that the chain runs once after training; the schedule's cycles are others and run every time."""

    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, "cycle.json", run_cycle().model_dump_json()), {}

    ref = context.ensure("cycle", {"cycle": context.recipe.cycle}, (trained,), build)
    report = (context.directory_of(ref) / "cycle.json").read_bytes()
    return CycleReport.model_validate_json(report)


def _as_served(context: StageContext, served: ArtifactRef, problems: ArtifactRef) -> ServedModel:
    return ServedModel(
        checkpoint_directory=str(context.directory_of(served)),
        checkpoint_id=str(served),
        problems_directory=str(context.directory_of(problems)),
        harness=context.recipe.harness,
        decoding=context.recipe.decoding,
    )


def next_cycle_number(context: StageContext) -> int:
    """Number of the cycle under way: the open one's, else the next."""
    cycles = context.ledger.cycles
    return len(cycles.history()) - (cycles.open_cycle() is not None)


def serve_simulated_users(
    context: StageContext, problems: ArtifactRef, served: ArtifactRef
) -> SimulatedUsersReport | None:
    """Traffic for machines without people; None when the recipe has no simulated users."""
    users = context.recipe.cycle.simulated_users
    if users is None:
        return None
    number = next_cycle_number(context)
    request = TrafficRequest(
        served=_as_served(context, served, problems),
        users=users,
        cycle_number=number,
    )
    directory = context.run_directory("traffic", f"{number:06d}-{served.fingerprint}")
    return run_stage(
        "simulated users",
        "ostinato.flows.drivers.traffic:main",
        request,
        SimulatedUsersReport,
        directory,
    )


def open_cycle(context: StageContext, served: ArtifactRef) -> CycleRow | None:
    """The cycle a killed run left open, or a new one over what users did since the last; None when that is too little."""
    cycles, feedback = context.ledger.cycles, context.recipe.cycle.feedback
    known = cycles.open_cycle()
    if known is not None:
        return known
    start = cycles.last_closed_watermark()
    until = choose_watermark(
        context.ledger, start, settle_seconds=feedback.settle_seconds, now=time.time()
    )
    if len(context.ledger.interactions.since(start, until)) < feedback.minimum_interactions:
        return None
    return cycles.open(
        f"cycle-{next_cycle_number(context):06d}-{served.fingerprint}", start, until, time.time()
    )


def train_candidate(
    context: StageContext, cycle: CycleRow, served: ArtifactRef
) -> tuple[CycleTrainingResult, ArtifactRef]:
    """Collect, distil and train on the cycle's window."""
    recipe = context.recipe.cycle
    request = CycleTrainingRequest(
        cycle_id=cycle.cycle_id,
        from_watermark=cycle.from_watermark,
        to_watermark=cycle.to_watermark,
        checkpoint_directory=str(context.directory_of(served)),
        feedback=recipe.feedback,
        learning=recipe.learning,
    )

    def build(directory: Path) -> tuple[Path, dict]:
        entry = "ostinato.flows.drivers.cycle_training:main"
        result = run_stage("cycle training", entry, request, CycleTrainingResult, directory)
        return Path(result.checkpoint_directory), {chain.SUMMARY: result.model_dump(mode="json")}

    identity = {"cycle": cycle.cycle_id, "feedback": recipe.feedback, "learning": recipe.learning}
    candidate = context.ensure("candidate", identity, (served,), build)
    return CycleTrainingResult.model_validate(chain.summary_of(context, candidate)), candidate


def ship(
    context: StageContext, cycle: CycleRow, candidate: Scorecard, champion: Scorecard
) -> PromotionReport:
    """The gate, and what it decides; never skipped, however late the cycle is."""
    desk = open_desk(context)
    decision = gate_candidate(candidate, champion, context.recipe.cycle.gate)
    desk.publish_candidate(candidate, decision)
    report = desk.decide(decision)
    context.ledger.cycles.update(cycle.cycle_id, "promotion", report.model_dump(mode="json"))
    context.ledger.cycles.close(cycle.cycle_id, report.outcome.value, time.time())
    return report
