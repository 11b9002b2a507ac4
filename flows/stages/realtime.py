"""One real-time cycle: collect, distil, train, evaluate, ship. A killed cycle continues where it stopped."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ostinato.flows.stages import chain, lineage
from ostinato.flows.stages.artifacts import show_markdown
from ostinato.flows.stages.checkpoints import champion_id, line_of
from ostinato.flows.stages.child_task import run_stage
from ostinato.flows.stages.declared import CANDIDATE
from ostinato.flows.stages.events import (
    PROMOTED,
    REGRESSED,
    ROLLED_BACK,
    WITHDRAWN,
    send_checkpoint_event,
    send_cycle_skipped,
    send_event_now,
    send_gate_event,
)
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef, open_artifacts
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import CycleRow
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.platform.tracking.registries import register_champion
from ostinato.tasks.evaluation.config import GateConfig
from ostinato.tasks.evaluation.gates import gate_candidate
from ostinato.tasks.realtime.feedback.collect import choose_watermark
from ostinato.tasks.realtime.feedback.interactions import Source, Window, source_of
from ostinato.tasks.realtime.feedback.simulated_users import SimulatedUsersReport
from ostinato.tasks.realtime.parity_gate import parity_checks
from ostinato.tasks.realtime.promotion.guard import Advice, describe_power
from ostinato.tasks.realtime.promotion.serving_line import (
    PromotionOutcome,
    PromotionReport,
    ServingLine,
)
from ostinato.tasks.realtime.records import (
    CycleTrainingResult,
    DeployedModel,
    ServedCandidate,
    TrafficRequest,
)
from ostinato.tasks.records import GateCheck, GateDecision, Scorecard, Split
from ostinato.tasks.reinforcement.learning.config import trainer_config

logger = logging.getLogger(__name__)

# event that announces a canary's end
_ENDS = {
    Advice.PROMOTE: PROMOTED,
    Advice.ROLL_BACK: REGRESSED,
    Advice.EXPIRE: WITHDRAWN,
}
SKIPPED = "skipped"  # outcome of a cycle without a sample in its window


class CycleReport(Record):
    """Result of one cycle."""

    cycle_id: str = Field(description="empty: too few interactions, nothing was trained")
    served: str = Field(description="empty: no checkpoint passed the gate of the line yet")
    users: SimulatedUsersReport | None
    champion_scorecard: Scorecard | None = None
    training: CycleTrainingResult | None = None
    candidate: str | None = None
    candidate_scorecard: Scorecard | None = None
    promotion: PromotionReport | None = None
    seconds: float = 0.0


class _NothingToLearn(Exception):
    """Raised when a cycle's window yields no sample."""

    def __init__(self, result: CycleTrainingResult) -> None:
        super().__init__(result)
        self.result = result


def serving_line(context: StageContext, name: str | None = None) -> ServingLine:
    """The line of that name, else the recipe's. ConfigError when the recipe has none."""
    line = name or line_of(context.recipe)
    return ServingLine(context.ledger, line, time.time)


def champion_of(context: StageContext) -> ArtifactRef | None:
    """The checkpoint that the recipe's line serves. None without a line, and before its first promotion."""
    champion = None
    if context.recipe.serving.line is not None:
        champion = serving_line(context).champion()
    return None if champion is None else context.artifacts.get(champion)


def judge(
    line: ServingLine,
    candidate: Scorecard,
    champion: Scorecard,
    config: GateConfig,
    training: Sequence[GateCheck] = (),
) -> GateDecision:
    """The gate's decision on a candidate of the line, with the line's recent champions taken into account."""
    earlier = line.recent_champions(candidate, config.champions)
    return gate_candidate(candidate, champion, config, earlier, training)


def offer(
    context: StageContext,
    problems: ArtifactRef,
    trained: ArtifactRef,
    *,
    directly: bool = True,
) -> PromotionReport:
    """Applies the gate of the recipe's line to a checkpoint. Offering the same checkpoint again changes
    nothing. `directly`: promote without the recipe's canary.
    """
    line = serving_line(context)
    context.recipe.cycle.gate.refuse_slices("the split of a promotion's gate", ())
    _problems_of(context, trained)  # fails for a checkpoint that the gateway could not serve
    card = chain.evaluate(context, problems, trained, Split.HELD_OUT)
    served, gate = champion_of(context), context.recipe.cycle.gate
    if served is None:
        decision = gate_candidate(card, None, gate)  # compared with the floor
    else:
        against = chain.evaluate(context, problems, served, Split.HELD_OUT)
        decision = judge(line, card, against, gate)
    line.publish_candidate(card, decision)
    return _announce(context, _carry_out(context, line, decision, directly=directly), decision)


def _carry_out(
    context: StageContext, line: ServingLine, decision: GateDecision, *, directly: bool
) -> PromotionReport:
    """Promotes or refuses a candidate as decided, or starts its canary when the recipe has one."""
    canary = context.recipe.cycle.people_canary
    if canary is None or directly or not decision.passed or line.champion() is None:
        return line.decide(decision)
    report = line.start_canary(decision, canary.share)
    shown = f"its canary can show {describe_power(canary.guard)}"
    return report.model_copy(update={"reason": f"{report.reason}; {shown}"})


def _announce(
    context: StageContext, report: PromotionReport, decision: GateDecision
) -> PromotionReport:
    """Sends events for the gate's decision and for a promotion, and shows a new champion's lineage."""
    send_gate_event(report.candidate, decision)
    if report.outcome is PromotionOutcome.PROMOTED:
        send_checkpoint_event(PROMOTED, report.candidate, line=report.line, reason=report.reason)
        register_champion(context.settings, report.line)
        origins = lineage.describe(lineage.trace(context.settings, report.candidate))
        text = "\n".join(("```text", *origins, "```"))
        show_markdown(text, key="lineage", description=report.candidate)
    return report


def roll_back(ledger: Ledger, line: str, checkpoint: str | None, reason: str) -> PromotionReport:
    """Withdraws a checkpoint from a line's users, by default its champion, and sends an event. Nothing
    changes when another checkpoint is champion. ConfigError when the line has no champion.
    """
    serving = ServingLine(ledger, line, time.time)
    champion = serving.champion()
    if champion is None:
        raise ConfigError(f"serving line {line!r} has no champion, wanted one")
    active = ledger.promotions.active_checkpoints(line)
    if len(active) > 1:
        _require_files(ledger, active[-2])
    report = serving.roll_back(checkpoint or champion, reason)
    if report.outcome is PromotionOutcome.ROLLED_BACK:
        send_checkpoint_event(ROLLED_BACK, report.candidate, line=line, reason=reason)
        register_champion(load_settings(), line)
    return report


def serving_checkpoint(
    context: StageContext, problems: ArtifactRef, trained: ArtifactRef
) -> ArtifactRef | None:
    """The champion of the recipe's line, or None. `trained` is offered to the line first if it never was."""
    line = serving_line(context)
    if not line.was_offered(str(trained)):
        report = offer(context, problems, trained)
        logger.info("line=%s %s=%s %s", line.name, report.outcome, trained, report.reason)
    return champion_of(context)


def champion_ref(context: StageContext, name: str | None = None) -> ArtifactRef:
    """The artifact that a line serves. ConfigError when nothing was promoted yet."""
    return context.artifacts.get(champion_id(context.ledger, name or line_of(context.recipe)))


def served_model(context: StageContext, line: str | None = None) -> DeployedModel:
    """The champion of a line as the gateway loads it, with the repositories of the problems it was trained
    on, and the line's canary. The gateway calls it repeatedly, which is also what ends a canary.
    """
    candidate = _watch_canary(context, line)
    served = champion_ref(context, line)
    model = _deployed_model(context, served, _problems_of(context, served), line)
    return model.model_copy(update={"candidate": candidate})


def _problems_of(context: StageContext, checkpoint: ArtifactRef) -> ArtifactRef:
    """The problem set that a checkpoint was trained with. The gateway serves its repositories."""
    for ref in context.artifacts.lineage(checkpoint):
        if ref.kind == "problems":
            return ref
    raise ConfigError(
        f"checkpoint {checkpoint} has no problem set among its ancestors, wanted one that a recipe trained"
    )


def _watch_canary(context: StageContext, line: str | None) -> ServedCandidate | None:
    config = context.recipe.cycle.people_canary
    if config is None:
        return None
    serving = serving_line(context, line)
    canary = serving.watch_canary(config.guard)
    ended = serving.unannounced_end()
    if ended is not None:
        what = _ENDS[ended.advice]
        key = f"{serving.name}/{ended.decision.gate_id}"
        if send_event_now(what, ended.checkpoint_id, key, line=serving.name, reason=ended.reason):
            serving.note_announced(ended)
            register_champion(context.settings, serving.name)
    if canary is None:
        return None
    directory = context.directory_of(context.artifacts.get(canary.checkpoint_id))
    return ServedCandidate(
        checkpoint_directory=str(directory), checkpoint_id=canary.checkpoint_id, share=canary.share
    )


def _require_files(ledger: Ledger, checkpoint: str) -> None:
    artifacts = open_artifacts(load_settings(), ledger)
    for row in ledger.artifacts.list(checkpoint.partition("/")[0]):
        ref = ArtifactRef.model_validate(row, from_attributes=True)
        if str(ref) == checkpoint:
            artifacts.manifest(ref)  # raises StorageError when `ostinato gc` removed it


def first_cycle(
    context: StageContext, trained: ArtifactRef, run_cycle: Callable[[], CycleReport]
) -> CycleReport:
    """The cycle that the chain runs once after training. Scheduled cycles are separate and run every time."""

    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, "cycle.json", run_cycle().model_dump_json()), {}

    identity = {"cycle": context.recipe.cycle, "line": context.recipe.serving.line}
    ref = context.ensure("cycle", identity, (trained,), build)
    report = (context.directory_of(ref) / "cycle.json").read_bytes()
    return CycleReport.model_validate_json(report)


def _deployed_model(
    context: StageContext, served: ArtifactRef, problems: ArtifactRef, line: str | None = None
) -> DeployedModel:
    return DeployedModel(
        line=serving_line(context, line).name,
        checkpoint_directory=str(context.directory_of(served)),
        checkpoint_id=str(served),
        problems_directory=str(context.directory_of(problems)),
        harness=context.recipe.harness,
        sandbox=context.recipe.rollout.sandbox,
        search_directory=chain.search_directory(context),
        decoding=context.recipe.decoding,
    )


def next_cycle_number(context: StageContext) -> int:
    """Number of the line's open cycle, or of the next one when none is open."""
    cycles, line = context.ledger.cycles, line_of(context.recipe)
    return len(cycles.history(line)) - (cycles.open_cycle(line) is not None)


def serve_simulated_users(
    context: StageContext, problems: ArtifactRef, served: ArtifactRef
) -> SimulatedUsersReport | None:
    """Runs the recipe's simulated users, for machines without real ones. None when the recipe has none."""
    users = context.recipe.cycle.simulated_users
    if users is None:
        return None
    number = next_cycle_number(context)
    request = TrafficRequest(
        served=_deployed_model(context, served, problems),
        users=users,
        cycle_number=number,
    )
    directory = context.run_directory("traffic", f"{number:06d}-{served.fingerprint}")
    return run_stage(
        "simulated users",
        "ostinato.tasks.realtime.traffic:main",
        request,
        SimulatedUsersReport,
        directory,
    )


def open_cycle(
    context: StageContext, served: ArtifactRef, flow_run_id: str = ""
) -> CycleRow | None:
    """The cycle that a killed run left open, else a new one over later interactions. None when these are too few."""
    cycles, feedback = context.ledger.cycles, context.recipe.cycle.feedback
    line = line_of(context.recipe)
    known = cycles.open_cycle(line)
    if known is not None:
        cycles.take_over(known.cycle_id, flow_run_id)
        return known
    start = cycles.last_closed_watermark(line)
    until = choose_watermark(
        context.ledger, line, start, settle_seconds=feedback.settle_seconds, now=time.time()
    )
    seen = context.ledger.interactions.since(start, until, line=line)
    usable = [
        row
        for row in seen
        if row.checkpoint_id == str(served) and source_of(row) is _source(context)
    ]
    if len(usable) < feedback.minimum_interactions:
        return None
    return cycles.open(
        f"{line}-{next_cycle_number(context):06d}-{served.fingerprint}",
        line=line,
        served=str(served),
        from_watermark=start,
        to_watermark=until,
        at=time.time(),
        flow_run_id=flow_run_id,
    )


def train_candidate(
    context: StageContext, cycle: CycleRow, served: ArtifactRef
) -> tuple[CycleTrainingResult, ArtifactRef | None]:
    """Collects, distils and trains on the cycle's window. The candidate is None when the window has no sample."""
    recipe = context.recipe.cycle

    def publish(directory: Path, result: CycleTrainingResult) -> tuple[Path, dict]:
        if result.checkpoint_directory is None:
            raise _NothingToLearn(result)
        return CANDIDATE.output_of(directory, result)

    try:
        candidate = context.make(
            CANDIDATE,
            {"checkpoint": served},
            title="cycle training",
            cycle_id=cycle.cycle_id,
            window=_window(context, cycle),
            feedback=recipe.feedback,
            learning=trainer_config(recipe.learning, context.recipe.decoding),
            train_until=recipe.train_until(cycle.opened_at),
            publish=publish,
        )
    except _NothingToLearn as empty:
        return empty.result, None
    return chain.result_of(context, candidate, CycleTrainingResult), candidate


def _source(context: StageContext) -> Source:
    """The source of interactions to learn from: simulated users if the recipe has them, else people."""
    users = context.recipe.cycle.simulated_users
    return Source.PEOPLE if users is None else Source.SIMULATED


def _window(context: StageContext, cycle: CycleRow) -> Window:
    """The window that a cycle reads. It includes feedback that came too late for the previous cycle."""
    before = [
        other.opened_at
        for other in context.ledger.cycles.history(cycle.line)
        if other.opened_at < cycle.opened_at
    ]
    return Window(
        line=cycle.line,
        served=cycle.served,
        from_watermark=cycle.from_watermark,
        to_watermark=cycle.to_watermark,
        feedback_after=max(before, default=0.0),
        feedback_until=cycle.opened_at,
        source=_source(context),
    )


def ship(
    context: StageContext,
    cycle: CycleRow,
    training: CycleTrainingResult,
    candidate: Scorecard,
    champion: Scorecard,
) -> PromotionReport:
    """Gates the cycle's candidate, carries out the decision and closes the cycle. The gate is never skipped."""
    line, checks = serving_line(context, cycle.line), parity_checks(training)
    decision = judge(line, candidate, champion, context.recipe.cycle.gate, checks)
    line.publish_candidate(candidate, decision)
    report = _announce(context, _carry_out(context, line, decision, directly=False), decision)
    context.ledger.cycles.update(cycle.cycle_id, "promotion", report.model_dump(mode="json"))
    was_promoted = report.champion == candidate.checkpoint  # perhaps by a run that was then killed
    outcome = PromotionOutcome.PROMOTED if was_promoted else report.outcome
    context.ledger.cycles.close(cycle.cycle_id, outcome.value, time.time())
    return report


def run_cycle(
    context: StageContext, problems: ArtifactRef, trained: ArtifactRef, flow_run_id: str = ""
) -> CycleReport:
    """Runs one cycle on the recipe's line. A cycle left open by a kill continues with the checkpoint it
    started with, whatever was promoted since, so its window is trained once and promoted once. A flow run that
    starts again after it has closed its cycle opens no other.
    """
    started, line = time.monotonic(), line_of(context.recipe)
    if closed := context.ledger.cycles.closed_by(line, flow_run_id):
        logger.info("cycle=%s outcome=%s closed before a kill", closed.cycle_id, closed.outcome)
        return _report_of(closed)
    known = context.ledger.cycles.open_cycle(line)
    served = None if known is None else context.artifacts.get(known.served)
    served = served or serving_checkpoint(context, problems, trained)
    if served is None:
        send_cycle_skipped(line, "nothing is served: the first checkpoint did not pass the gate")
        return CycleReport(cycle_id="", served="", users=None)
    users = serve_simulated_users(context, problems, served)
    champion = chain.evaluate(context, problems, served, Split.HELD_OUT)
    report = CycleReport(cycle_id="", served=str(served), users=users, champion_scorecard=champion)
    cycle = open_cycle(context, served, flow_run_id)
    if cycle is None:
        least = context.recipe.cycle.feedback.minimum_interactions
        send_cycle_skipped(line, f"fewer than {least} interactions since the last cycle")
    else:
        learned = _learn(context, problems, cycle, served, champion)
        report = report.model_copy(update={"cycle_id": cycle.cycle_id, **learned})
    return report.model_copy(update={"seconds": time.monotonic() - started})


def _report_of(cycle: CycleRow) -> CycleReport:
    """The report of a closed cycle, of which the ledger knows the decision and no scorecards."""
    kept = cycle.stages.get("promotion")
    promotion = None if kept is None else PromotionReport.model_validate(kept)
    candidate = None if promotion is None else promotion.candidate
    return CycleReport(
        cycle_id=cycle.cycle_id,
        served=cycle.served,
        users=None,
        candidate=candidate,
        promotion=promotion,
    )


def _learn(
    context: StageContext,
    problems: ArtifactRef,
    cycle: CycleRow,
    served: ArtifactRef,
    champion: Scorecard,
) -> dict[str, Any]:
    """Trains and ships the cycle's candidate and closes the cycle. Returns the fields that this adds to the report."""
    training, candidate = train_candidate(context, cycle, served)
    if candidate is None:
        logger.warning("cycle=%s outcome=%s skipped=%d", cycle.cycle_id, SKIPPED, training.skipped)
        context.ledger.cycles.close(cycle.cycle_id, SKIPPED, time.time())
        send_cycle_skipped(cycle.cycle_id, f"{training.skipped} interactions, no sample among them")
        return {"training": training}
    card = chain.evaluate(context, problems, candidate, Split.HELD_OUT)
    return {
        "training": training,
        "candidate": str(candidate),
        "candidate_scorecard": card,
        "promotion": ship(context, cycle, training, card, champion),
    }
