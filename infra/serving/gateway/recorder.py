"""Records interactions: tokens in the object store, a row in the ledger, counters for the status page.

Without consent only counters change: no text, no tokens and no row are stored.
"""

import asyncio
import hashlib
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import FeedbackRow, NewInteraction
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.gateway.arms import Arm
from ostinato.infra.serving.gateway.config import MAX_FEEDBACK
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.signals import OWN_FEEDBACK, Signal

logger = logging.getLogger(__name__)

PRIVATE_PREFIX = "private-"
_SALT = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Interaction:
    """One user turn, before it is stored."""

    interaction_id: str
    session_id: str
    tenant: str
    arm: Arm
    problem_kind: str
    consent: bool
    latency_seconds: float
    account: str  # account that its tokens are counted against
    is_abandoned: bool = False


def new_interaction_id(*, consent: bool, tenant: str, idempotency_key: str | None = None) -> str:
    """A new id. Without consent it begins with PRIVATE_PREFIX, and nothing is stored under it.

    An idempotency key gives the same id at every retry, so a repeated request is recorded once. Without consent that
    holds within one process, whose random salt keeps the id from telling anything about the request.
    """
    prefix = "interaction-" if consent else PRIVATE_PREFIX
    if idempotency_key is None:
        return f"{prefix}{secrets.token_hex(16)}"
    name = f"{tenant}\0{idempotency_key}".encode() + (b"" if consent else _SALT)
    return f"{prefix}{hashlib.sha256(name).hexdigest()[:32]}"


def interaction_seed(interaction_id: str) -> int:
    """A sampling seed below 2^31 that differs from interaction to interaction."""
    return int(interaction_id[-8:], 16) % 2**31


class InteractionRecorder:
    """Writes interactions and feedback."""

    def __init__(
        self,
        line: str,
        ledger: Ledger,
        objects: ObjectStore,
        clock: Callable[[], float],
        spend: Callable[[str, int, float], None],
    ) -> None:
        self._line = line
        self._spend = spend
        self._ledger, self._objects, self._clock = ledger, objects, clock
        # by tenant; all that is kept of interactions without consent
        self.counters: defaultdict[str, Counter[str]] = defaultdict(Counter)

    async def keep(self, interaction: Interaction, transcript: Transcript) -> None:
        """Stores an interaction, its latency and its number of generated tokens. A repeated id stores nothing more.

        When the store fails, the record is lost, which is logged and counted; the user keeps the answer.
        """
        counters = self.counters[interaction.tenant]
        counters["interactions"] += 1
        counters[f"ended.{transcript.end_reason.value}"] += 1
        num_tokens = sum(len(segment.token_ids_T) for segment in transcript.segments)
        counters["tokens"] += num_tokens
        self._spend(interaction.account, num_tokens, self._clock())
        if not interaction.consent:
            counters["interactions.without_consent"] += 1
            return
        try:
            await asyncio.to_thread(self._store, interaction, transcript)
        except StorageError as error:
            counters["interactions.not_stored"] += 1
            logger.error("interaction=%s not_stored=%s", interaction.interaction_id, error)

    def count_unanswered(self, tenant: str, account: str, prompt_tokens: int) -> None:
        """Counts a stream that its client left before the first token. Its prompt was read, and nothing is stored."""
        counters = self.counters[tenant]
        counters["left_before_an_answer"] += 1
        counters["tokens"] += prompt_tokens
        self._spend(account, prompt_tokens, self._clock())

    async def keep_feedback(
        self,
        interaction_id: str,
        tenant: str,
        signal: Signal,
        value: float,
        feedback_id: str | None,
    ) -> str | None:
        """Id of the stored signal. None when the interaction is not stored or is another tenant's.

        A repeated signal changes nothing; a different signal under the same id is refused.
        """
        feedback_id = feedback_id or signal.value
        row = await asyncio.to_thread(self._ledger.interactions.get, interaction_id)
        if row is None or row.tenant != tenant:
            return None
        events = {event.feedback_id: event for event in row.feedback}
        earlier = events.get(f"{interaction_id}/{feedback_id}")
        if earlier is not None:
            _refuse_conflict(earlier, feedback_id, signal, value)
            return feedback_id
        if len(events) >= MAX_FEEDBACK:
            raise ApiError(
                400,
                f"interaction {interaction_id} has {len(events)} signals, wanted fewer than "
                f"{MAX_FEEDBACK}",
                param="interaction_id",
            )
        await asyncio.to_thread(
            self._record, interaction_id, feedback_id, signal, value, self._clock()
        )
        kept = await asyncio.to_thread(self._ledger.interactions.get, interaction_id)
        for event in kept.feedback if kept is not None else ():
            if event.feedback_id == f"{interaction_id}/{feedback_id}":
                _refuse_conflict(event, feedback_id, signal, value)  # another request was first
        self.counters[tenant][f"feedback.{signal.value}"] += 1
        return feedback_id

    def _store(self, interaction: Interaction, transcript: Transcript) -> None:
        versions = [
            segment.oldest_version for segment in transcript.segments if segment.sampled_tokens
        ]
        if self._ledger.interactions.get(interaction.interaction_id) is not None:
            return  # a retry with the same idempotency key: the first record stays
        now = self._clock()
        # unique, since two requests may store at once; the row names the transcript that is kept
        name = f"transcript-{secrets.token_hex(4)}.safetensors"
        key = f"interactions/{interaction.interaction_id}/{name}"
        self._objects.put_bytes(key, transcript.to_bytes())
        row = NewInteraction(
            interaction_id=interaction.interaction_id,
            line=self._line,
            tenant=interaction.tenant,
            session_id=interaction.session_id,
            arm=interaction.arm.name,
            checkpoint_id=interaction.arm.checkpoint_id,
            weight_version=min(versions, default=interaction.arm.weight_version),
            problem_kind=interaction.problem_kind,
            consent=True,
            object_key=key,
            created_at=now,
        )
        self._ledger.interactions.record(row)
        kept = self._ledger.interactions.get(row.interaction_id)
        if kept is not None and kept.object_key != key:  # the other request was first
            self._objects.delete(key)
            return
        generated = sum(segment.sampled_tokens for segment in transcript.segments)
        measured = {
            Signal.LATENCY_SECONDS: interaction.latency_seconds,
            Signal.GENERATED_TOKENS: float(generated),
        }
        if interaction.is_abandoned:
            measured[Signal.ABANDONED] = 1.0
        for signal, value in measured.items():
            self._record(row.interaction_id, f"{OWN_FEEDBACK}{signal.value}", signal, value, now)

    def _record(
        self, interaction_id: str, name: str, signal: Signal, value: float, now: float
    ) -> None:
        event = FeedbackRow(
            feedback_id=f"{interaction_id}/{name}",
            interaction_id=interaction_id,
            signal=signal.value,
            value=value,
            created_at=now,
        )
        self._ledger.interactions.add_feedback(event)


def _refuse_conflict(earlier: FeedbackRow, feedback_id: str, signal: Signal, value: float) -> None:
    if (earlier.signal, earlier.value) != (signal.value, value):
        raise ApiError(
            409,
            f"feedback {feedback_id} is {signal.value} = {value:g} and was {earlier.signal} = "
            f"{earlier.value:g} before, wanted the same or another feedback_id",
            code="feedback_conflict",
            param="feedback_id",
        )
