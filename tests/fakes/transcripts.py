"""Transcripts without a model: calls, segments and attempts that a test makes up."""

from collections.abc import Iterable, Sequence

import numpy as np

from ostinato.infra.agent.transcript import (
    CallStatus,
    EndReason,
    Segment,
    ToolCallRecord,
    Transcript,
    TurnRecord,
)


def make_call(tool: str, status: CallStatus = CallStatus.OK, **arguments: str) -> ToolCallRecord:
    """A call that took no time."""
    return ToolCallRecord(tool=tool, arguments=arguments, status=status, wall_seconds=0.0)


def masked_segment(
    mask: Sequence[int],
    token_ids: Sequence[int] | None = None,
    *,
    layers: int = 1,
    experts: int = 1,
) -> Segment:
    """A segment whose sampled tokens, where `mask` is true, were made by version 0."""
    mask_T = np.array(mask, dtype=bool)
    versions_T = np.where(mask_T, 0, -1)
    total = len(mask_T)
    ids = [0] * total if token_ids is None else token_ids
    return Segment(
        token_ids_T=np.array(ids, dtype=np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.zeros(total, dtype=np.float32),
        weight_versions_T=versions_T,
        cache_versions_T=versions_T,
        routed_experts_TLK=np.zeros((total, layers, experts), dtype=np.int16),
    )


def transcript_of(
    turns: Iterable[TurnRecord],
    segments: tuple[Segment, ...] = (),
    *,
    message: str = "Fixed.",
    end: EndReason = EndReason.FINISHED,
) -> Transcript:
    """An attempt of one second."""
    return Transcript(
        segments=segments,
        turns=tuple(turns),
        end_reason=end,
        final_message=message,
        wall_seconds=1.0,
    )
