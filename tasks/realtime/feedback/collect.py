"""Interactions since the watermark, with their tokens.

A second reading of a window gives the same interactions, maybe with more feedback.
"""

import logging

from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import InteractionRow
from ostinato.infra.platform.objects import ObjectStore
from ostinato.tasks.realtime.feedback.interactions import (
    CollectedInteraction,
    Collection,
    Skip,
    SkipReason,
    Window,
    source_of,
)
from ostinato.tasks.realtime.feedback.sessions import rows_judged_by

logger = logging.getLogger(__name__)

INFRASTRUCTURE_REASONS = frozenset(
    {EndReason.ENGINE_FAILED, EndReason.SANDBOX_FAILED, EndReason.FAULT}
)


def choose_watermark(
    ledger: Ledger, line: str, from_watermark: int, *, settle_seconds: float, now: float
) -> int:
    """Newest sequence number of the line up to which all interactions are older than `settle_seconds`."""
    chosen = from_watermark
    for row in ledger.interactions.since(from_watermark, line=line):
        if row.created_at > now - settle_seconds:
            break
        chosen = row.sequence
    return chosen


def collect(ledger: Ledger, objects: ObjectStore, window: Window) -> Collection:
    """Collects the interactions of (from_watermark, to_watermark] and earlier ones that feedback since the
    previous cycle is about (`feedback/sessions.py`). Only interactions of the served checkpoint are kept,
    because they are on-policy; an earlier cycle may have used them to train a candidate that was refused.
    Only interactions of the window's source are kept, so that people and simulated users are never in one
    batch.
    """
    interactions = ledger.interactions
    recent = {"after": window.feedback_after, "before": window.feedback_until}
    sessions = interactions.in_sessions_with_feedback_between(
        window.to_watermark, line=window.line, **recent
    )
    late = [
        row
        for row in rows_judged_by(sessions, **recent)
        if row.sequence <= window.from_watermark
        and row.checkpoint_id == window.served
        and source_of(row) is window.source
    ]
    new = interactions.since(window.from_watermark, window.to_watermark, line=window.line)
    taken: list[CollectedInteraction] = []
    skipped: list[Skip] = []
    for row in (*late, *new):
        found = _take(row, objects, window)
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
    return Collection(window=window, interactions=tuple(taken), skipped=tuple(skipped))


def _take(row: InteractionRow, objects: ObjectStore, window: Window) -> CollectedInteraction | Skip:
    def skip(reason: SkipReason, detail: str) -> Skip:
        return Skip(interaction_id=row.interaction_id, reason=reason, detail=detail)

    source = source_of(row)
    if source is not window.source:
        return skip(
            SkipReason.OTHER_SOURCE,
            f"of {source.value}, the cycle trains on {window.source.value} only",
        )
    if row.checkpoint_id != window.served:
        return skip(SkipReason.OTHER_CHECKPOINT, f"made by {row.checkpoint_id or 'an unknown one'}")
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
    truncated = [
        segment.sampling for segment in transcript.segments if segment.sampling.is_truncated
    ]
    if truncated:
        return skip(SkipReason.TRUNCATED_SAMPLING, f"drawn at {truncated[0]}")
    return CollectedInteraction(
        interaction_id=row.interaction_id,
        session_id=row.session_id,
        sequence=row.sequence,
        population=row.tenant,
        problem_kind=row.problem_kind,
        transcript=transcript,
        feedback=row.feedback,
    )
