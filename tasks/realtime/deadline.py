"""What a late cycle still trains on. Its gate is never shortened: the time for it is kept free.

A cycle takes one step, so what can be trimmed is the batch. How long a batch takes is known from
the line's cycles before; the first one of a line is trimmed only when it is late already.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.infra.platform.ledger import Ledger
from ostinato.tasks.records import Sample

STAGE = "training"
_SPEED = "tokens_per_second"


def training_payload(metrics: Mapping[str, float], left_out: int) -> dict[str, Any]:
    """JSON for `ledger.cycles.update(cycle_id, STAGE, ...)`."""
    return {_SPEED: metrics[_SPEED], "left_out": left_out}


def known_speed(ledger: Ledger, line: str) -> float | None:
    """Tokens per second of the line's newest closed cycle that computed any. None before the first."""
    for cycle in reversed(ledger.cycles.history(line)):
        speed = cycle.stages.get(STAGE, {}).get(_SPEED)
        if cycle.closed_at is not None and speed:
            return speed
    return None


def fitting_tokens(
    seconds_left: float, tokens_per_second: float | None, least: int
) -> float | None:
    """Tokens that training has time for: `least` of them in a cycle that is late. None: all."""
    if seconds_left <= 0:
        return least
    return None if tokens_per_second is None else max(least, seconds_left * tokens_per_second)


def newest_that_fit(samples: Sequence[Sample], tokens: float) -> list[Sample]:
    """The newest interactions of at most so many tokens together, in order, one at least.

    An interaction stays whole: its samples share a reward.
    """
    sizes: dict[str, int] = {}
    for sample in samples:
        size = len(sample.segment.token_ids_T)
        sizes[sample.trajectory_id] = sizes.get(sample.trajectory_id, 0) + size
    taken: set[str] = set()
    for interaction, size in reversed(sizes.items()):
        tokens -= size
        if taken and tokens < 0:
            break
        taken.add(interaction)
    return [sample for sample in samples if sample.trajectory_id in taken]
