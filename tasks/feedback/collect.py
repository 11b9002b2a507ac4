"""Interactions since the watermark, with their tokens.

Reading the same window again gives the same interactions; what was said since may be more.
"""

import logging

from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import InteractionRow
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.feedback.interactions import (
    CollectedInteraction,
    Collection,
    FeedbackEvent,
    Skip,
    SkipReason,
)

logger = logging.getLogger(__name__)

INFRASTRUCTURE_REASONS = frozenset({EndReason.ENGINE_FAILED, EndReason.SANDBOX_FAILED})


def choose_watermark(
    ledger: Ledger, line: str, from_watermark: int, *, settle_seconds: float, now: float
) -> int:
    """Newest sequence of the line that is, with all before it, older than `settle_seconds`."""
    chosen = from_watermark
    for row in ledger.interactions.since(from_watermark, line=line):
        if row.created_at > now - settle_seconds:
            break
        chosen = row.sequence
    return chosen


def collect(
    ledger: Ledger,
    objects: ObjectStore,
    line: str,
    from_watermark: int,
    to_watermark: int,
    *,
    oldest_weight_version: int | None = None,
) -> Collection:
    """Takes the line's interactions of (from_watermark, to_watermark].

    With `oldest_weight_version` given, those made by older weights are skipped as stale: the update
    is meant for data of the policy that serves now.
    """
    taken: list[CollectedInteraction] = []
    skipped: list[Skip] = []
    for row in ledger.interactions.since(from_watermark, to_watermark, line=line):
        found = _take(row, objects, oldest_weight_version)
        if isinstance(found, Skip):
            logger.info(
                "interaction=%s skipped=%s detail=%s",
                row.interaction_id,
                found.reason.value,
                found.detail,
            )
            skipped.append(found)
        else:
            taken.append(found)
    return Collection(
        from_watermark=from_watermark,
        to_watermark=to_watermark,
        interactions=tuple(taken),
        skipped=tuple(skipped),
    )


def _take(
    row: InteractionRow, objects: ObjectStore, oldest_weight_version: int | None
) -> CollectedInteraction | Skip:
    def skip(reason: SkipReason, detail: str) -> Skip:
        return Skip(interaction_id=row.interaction_id, reason=reason, detail=detail)

    if oldest_weight_version is not None and row.weight_version < oldest_weight_version:
        return skip(
            SkipReason.STALE,
            f"weight version {row.weight_version}, wanted at least {oldest_weight_version}",
        )
    try:
        stored = objects.get_bytes(row.object_key)
    except StorageError as error:
        if objects.exists(row.object_key):
            raise
        return skip(SkipReason.TRANSCRIPT_LOST, str(error))
    transcript = Transcript.from_bytes(stored)
    if transcript.end_reason in INFRASTRUCTURE_REASONS:
        return skip(
            SkipReason.INFRASTRUCTURE, f"{transcript.end_reason.value}: {transcript.detail}"
        )
    if not any(segment.sampled_tokens for segment in transcript.segments):
        return skip(SkipReason.NOTHING_SAMPLED, f"ended by {transcript.end_reason.value}")
    return CollectedInteraction(
        interaction_id=row.interaction_id,
        session_id=row.session_id,
        population=row.tenant,
        problem_kind=row.problem_kind,
        arm=row.arm,
        weight_version=row.weight_version,
        created_at=row.created_at,
        transcript=transcript,
        feedback=tuple(
            FeedbackEvent(signal=Signal(said.signal), value=said.value, created_at=said.created_at)
            for said in row.feedback
        ),
    )
