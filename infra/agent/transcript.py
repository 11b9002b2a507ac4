"""The record of one attempt as tokens: segments, turns, and the reason of its end.

Shapes: T tokens of the segment (prompt, answers and tool results together), L MoE layers, K experts
per token.
"""

import json
from enum import StrEnum

import numpy as np
from pydantic import ConfigDict, model_validator
from safetensors.numpy import load, save

from ostinato.infra.platform.record import Record

MISSING_ROUTE = -1  # a position whose routes the engine did not record: the trainer routes it live

_SEGMENT_ARRAYS = (
    "token_ids_T",
    "loss_mask_T",
    "logprobs_T",
    "weight_versions_T",
    "cache_versions_T",
    "routed_experts_TLK",
)


class EndReason(StrEnum):
    """Reason for the end of an attempt. Every attempt has exactly one."""

    FINISHED = "finished"  # the model answered without a tool call
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    BROKEN_CALLS = "broken_calls"  # too many turns of broken calls in a row, or a repeated turn
    TIMED_OUT = "timed_out"
    BOX_RUINED = "box_ruined"  # the model's calls killed the box or made it unreadable
    HARNESS_FAILED = "harness_failed"  # a third-party agent did not start, failed or made no call
    FAULT = "fault"  # an unexpected exception after the dialogue had begun
    SANDBOX_FAILED = "sandbox_failed"  # an infrastructure fault
    ENGINE_FAILED = "engine_failed"


class CallStatus(StrEnum):
    """Outcome of one tool call. All but OK are the error taxonomy of the harness."""

    OK = "ok"
    INVALID_ARGUMENTS = "invalid_arguments"
    UNKNOWN_TOOL = "unknown_tool"
    MALFORMED = "malformed"
    ENVIRONMENT = "environment"
    TIMEOUT = "timeout"


MODEL_FAULTS = frozenset(
    {CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.INVALID_ARGUMENTS}
)
"""The model's own mistakes: calls that the harness could not run as written."""


class ToolCallRecord(Record):
    """One call as the model wrote it, and its outcome."""

    tool: str
    arguments: dict[str, str]
    status: CallStatus
    wall_seconds: float  # 0 if the client runs the tool
    call_id: str = ""  # unique in its turn; empty in records of the compact dialect


class TurnRecord(Record):
    """One model answer with its calls."""

    generated_tokens: int
    text: str
    calls: tuple[ToolCallRecord, ...]
    results: tuple[str, ...] = ()
    is_summary: bool = False  # the turn that ends a segment
    # index of the turn whose context this turn continues, -1 for none; None: the turn before
    continues: int | None = None
    begins_in_thought: bool = False  # the prompt opened a thought, whose mark `text` lacks


class SamplingDistribution(Record):
    """Sampling settings that a segment's tokens were drawn with."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens could not be drawn. Log-probabilities over all tokens then describe another
        distribution.
        """
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0


class Segment(Record):
    """One trainable token sequence. All arrays are parallel to token_ids_T."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    schema_version: int = 1
    token_ids_T: np.ndarray  # int32
    loss_mask_T: np.ndarray  # bool, true on tokens the model sampled
    logprobs_T: np.ndarray  # float32, of sampled tokens; 0 where not sampled
    weight_versions_T: np.ndarray  # int64, of sampled tokens; -1 where not sampled
    # int64, oldest version in the KV cache each token was sampled from, -1 where not sampled: below
    # the token's own version if the cache was kept over a swap of weights
    cache_versions_T: np.ndarray
    routed_experts_TLK: np.ndarray  # int16; MISSING_ROUTE where not recorded
    sampling: SamplingDistribution = SamplingDistribution()

    @model_validator(mode="after")
    def _parallel(self) -> "Segment":
        total = len(self.token_ids_T)
        for name in _SEGMENT_ARRAYS:
            rows = len(getattr(self, name))
            if rows != total:
                raise ValueError(
                    f"segment array {name} has {rows} rows, wanted {total} (one per token)"
                )
        if self.routed_experts_TLK.ndim != 3:
            raise ValueError(
                f"routed_experts_TLK has {self.routed_experts_TLK.ndim} axes, wanted 3"
            )
        sampled = self.loss_mask_T
        if np.any(self.weight_versions_T[sampled] < 0):
            raise ValueError("a sampled token has no weight version")
        if np.any(self.logprobs_T[sampled] > 1e-4):
            raise ValueError("a sampled token has a positive log-probability")
        return self

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that made a token here. -1 when nothing was sampled."""
        versions = self.weight_versions_T[self.loss_mask_T]
        return int(versions.min()) if len(versions) else -1

    @property
    def sampled_tokens(self) -> int:
        return int(self.loss_mask_T.sum())


class Opening(Record):
    """First turns of an attempt in one segment, up to the header of the next answer."""

    segment: Segment
    turns: tuple[TurnRecord, ...]


class DialogueScore(Record):
    """Score of an environment that ran the dialogue itself."""

    reward: float
    passed: bool
    metrics: dict[str, float]  # its measurements by name


class Transcript(Record):
    """One whole attempt. `segments` has several entries if the context was summarised, or if the session of a
    third-party agent has branches (sessions.py); the turns are in the order of their tokens in the segments.
    """

    schema_version: int = 1
    segments: tuple[Segment, ...]
    turns: tuple[TurnRecord, ...]
    end_reason: EndReason
    final_message: str
    detail: str = ""  # the error text when the end reason is a failure
    wall_seconds: float
    score: DialogueScore | None = None  # None: the resulting files are graded
    # of prompts and tool results, as a server counted them once per segment; None: unknown, or in the segments
    prompt_tokens: int | None = None

    @classmethod
    def of_failure(cls, reason: EndReason, detail: str, wall_seconds: float = 0.0) -> "Transcript":
        """An attempt without segments and turns."""
        return cls(
            segments=(),
            turns=(),
            end_reason=reason,
            final_message="",
            detail=detail,
            wall_seconds=wall_seconds,
        )

    def opening_tokens(self, num_turns: int) -> int:
        """Length of the context that the answer after `num_turns` turns was sampled from, or of the whole
        segment if no answer followed.
        """
        segment = self.segments[0]
        answered = sum(turn.generated_tokens > 0 for turn in self.turns[:num_turns])
        edges_T = np.diff(segment.loss_mask_T.astype(np.int8), prepend=0)
        starts = np.flatnonzero(edges_T == 1)
        return int(starts[answered]) if answered < len(starts) else len(segment.token_ids_T)

    def opening(self, num_turns: int) -> Opening:
        """The first turns, for another attempt to continue from."""
        segment, end = self.segments[0], self.opening_tokens(num_turns)
        arrays = {name: getattr(segment, name)[:end] for name in _SEGMENT_ARRAYS}
        return Opening(
            segment=Segment(**arrays, sampling=segment.sampling), turns=self.turns[:num_turns]
        )

    def to_bytes(self) -> bytes:
        """One safetensors blob: arrays as tensors, the rest as JSON metadata."""
        tensors: dict[str, np.ndarray] = {}
        for index, segment in enumerate(self.segments):
            for name in _SEGMENT_ARRAYS:
                array = np.ascontiguousarray(getattr(segment, name))
                tensors[f"segments.{index}.{name}"] = array
        rest = self.model_dump(mode="json", exclude={"segments"})
        sampling = [segment.sampling.model_dump() for segment in self.segments]
        return save(
            tensors, metadata={"transcript": json.dumps(rest), "sampling": json.dumps(sampling)}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Transcript":
        header_length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + header_length])["__metadata__"]
        tensors = load(data)
        segments = tuple(
            Segment.model_validate(
                {name: tensors[f"segments.{index}.{name}"] for name in _SEGMENT_ARRAYS}
                | {"sampling": sampling}
            )
            for index, sampling in enumerate(json.loads(metadata["sampling"]))
        )
        return cls(segments=segments, **json.loads(metadata["transcript"]))
