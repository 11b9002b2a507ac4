"""Feedback on one answer counts for all answers that led to it.

A coding agent asks for dozens of answers before its user judges the last one. So an answer without feedback takes that
of the next answer with feedback in its session. An answer that was asked again led to nothing: a later request of the
session continued its predecessor in another way, or repeated its prompt. It keeps to its own feedback.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ostinato.infra.platform.ledger.rows import InteractionRow
from ostinato.infra.serving.gateway.signals import GATEWAY_SIGNALS
from ostinato.tasks.realtime.feedback.interactions import CollectedInteraction, is_judged


def rows_judged_by(
    rows: Sequence[InteractionRow], *, after: float, before: float
) -> list[InteractionRow]:
    """Of the interactions of whole sessions, in order, those that feedback made in (after, before] is about: their
    own, or that of the session's next interaction with feedback.
    """
    is_next_new: dict[tuple[str, str], bool] = {}  # by session: of the next one with feedback
    chosen = []
    for row in reversed(rows):
        session = (row.tenant, row.session_id)
        said = [event for event in row.feedback if event.signal not in GATEWAY_SIGNALS]
        is_new = any(after < event.created_at <= before for event in said)
        if is_judged(row.feedback):
            is_next_new[session] = is_new
        if is_new or is_next_new.get(session, False):  # new, and maybe withdrawn
            chosen.append(row)
    return chosen[::-1]


def find_judged(interactions: Sequence[CollectedInteraction]) -> list[int]:
    """For each interaction the index of that whose feedback counts for it: itself, or a later one of its session."""
    sessions: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index in sorted(range(len(interactions)), key=lambda index: interactions[index].sequence):
        interaction = interactions[index]
        sessions[interaction.population, interaction.session_id].append(index)
    judged = list(range(len(interactions)))
    for indices in sessions.values():
        asked_again = _find_asked_again([interactions[index] for index in indices])
        following: int | None = None  # the next one with feedback
        for place, index in reversed(list(enumerate(indices))):
            if place in asked_again:
                continue
            if is_judged(interactions[index].feedback):
                following = index
            judged[index] = index if following is None else following
    return judged


def _find_asked_again(session: Sequence[CollectedInteraction]) -> set[int]:
    """Places of the answers that a later request of the session replaced. `session`: in order of time."""
    by_end: defaultdict[tuple[int, int], list[tuple[int, np.ndarray]]] = defaultdict(list)
    latest: dict[tuple[int | None, bytes], int] = {}  # by what a request continued
    replaced: set[int] = set()
    for place, interaction in enumerate(session):
        segments = interaction.transcript.segments
        context_T = segments[0].token_ids_T[: int(np.argmax(segments[0].loss_mask_T))]
        parent = _find_parent(context_T, by_end)
        key = (parent, context_T.tobytes() if parent is None else b"")
        if key in latest:
            replaced.add(latest[key])
        latest[key] = place
        answer_T = segments[-1].token_ids_T
        by_end[len(answer_T), int(answer_T[-1])].append((place, answer_T))
    return replaced


def _find_parent(
    context_T: np.ndarray, by_end: Mapping[tuple[int, int], Sequence[tuple[int, np.ndarray]]]
) -> int | None:
    """Place of the longest conversation with which a context begins. `by_end`: places and tokens of conversations by
    their length and last token, so that a session of thousands is searched in no more steps than its context has turns.
    """
    last_tokens = list({token for _, token in by_end})
    for end in np.flatnonzero(np.isin(context_T, last_tokens))[::-1].tolist():
        for place, answer_T in reversed(by_end.get((end + 1, int(context_T[end])), ())):
            if np.array_equal(answer_T, context_T[: end + 1]):
                return place
    return None
