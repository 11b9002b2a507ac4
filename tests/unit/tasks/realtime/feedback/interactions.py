"""Small interactions for tests: one segment of prompt and answer with chosen calls and feedback."""

from collections.abc import Sequence

import numpy as np

from ostinato.infra.agent.transcript import CallStatus, EndReason, Segment, Transcript, TurnRecord
from ostinato.infra.platform.ledger.rows import FeedbackRow
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.realtime.feedback.interactions import CollectedInteraction
from tests.fakes.transcripts import make_call, transcript_of


def segment(
    sampled: int = 1, *, context: Sequence[int] = (1, 1), answer: Sequence[int] | None = None
) -> Segment:
    """A segment whose answer is `answer`, or `sampled` tokens."""
    tokens = [*context, *(answer if answer is not None else [7] * sampled)]
    total = len(tokens)
    mask_T = np.arange(total) >= len(context)
    return Segment(
        token_ids_T=np.array(tokens, np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, -0.5, 0.0).astype(np.float32),
        weight_versions_T=np.where(mask_T, 3, -1),
        cache_versions_T=np.where(mask_T, 3, -1),
        routed_experts_TLK=np.zeros((total, 1, 1), np.int16),
    )


def transcript(
    *statuses: CallStatus,
    tool: str = "edit_file",
    end_reason: EndReason = EndReason.FINISHED,
    segments: tuple[Segment, ...] | None = None,
) -> Transcript:
    calls = tuple(make_call(tool, status) for status in statuses)
    turn = TurnRecord(generated_tokens=1, text="", calls=calls)
    return transcript_of([turn], segments if segments is not None else (segment(),), end=end_reason)


def interaction(
    *events: tuple[Signal, float],
    name: str = "i1",
    said: Transcript | None = None,
    kind: str = "mutation",
    population: str = "people",
    session: str | None = None,
    sequence: int = 0,
) -> CollectedInteraction:
    return CollectedInteraction(
        interaction_id=name,
        session_id=session or name,
        sequence=sequence,
        population=population,
        problem_kind=kind,
        transcript=said if said is not None else transcript(CallStatus.OK),
        feedback=tuple(
            FeedbackRow(
                feedback_id=f"{name}/{index}",
                interaction_id=name,
                signal=signal,
                value=value,
                created_at=float(index),
            )
            for index, (signal, value) in enumerate(events)
        ),
    )
