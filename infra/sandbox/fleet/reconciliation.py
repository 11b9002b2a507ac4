"""Compares the boxes a scheduler wants on a node with those the node has.

Orders and answers may be lost, repeated or late; what a node is seen to have is the truth, save for
what changed after the count was asked for.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from ostinato.infra.sandbox.fleet.cluster_view import BoxPhase, BoxState


@dataclass(frozen=True, slots=True)
class Differences:
    """Repairs to make, in the order of the boxes given."""

    vanished: list[BoxState]  # were up, are not there
    ended: list[BoxState]  # were told to stop and have
    lingering: list[BoxState]  # were told to stop some time ago and have not
    strays: list[str]  # ids nobody knows; sorted


def compare(
    wanted: Iterable[BoxState],
    seen: Set[str],
    *,
    counted_at_seconds: float,
    stop_repeat_seconds: float,
) -> Differences:
    """Differences between `wanted` and `seen`.

    A box whose phase is younger than the count is left alone, and so is one that is starting: its
    start has a deadline of its own.
    """
    vanished: list[BoxState] = []
    ended: list[BoxState] = []
    lingering: list[BoxState] = []
    known: set[str] = set()
    for box in wanted:
        known.add(box.box_id)
        if box.phase is BoxPhase.STARTING or box.phase_since_seconds > counted_at_seconds:
            continue
        is_seen = box.box_id in seen
        if box.phase is not BoxPhase.STOPPING:
            if not is_seen:
                vanished.append(box)
        elif not is_seen:
            ended.append(box)
        elif box.phase_since_seconds + stop_repeat_seconds <= counted_at_seconds:
            lingering.append(box)
    return Differences(vanished, ended, lingering, sorted(seen - known))
