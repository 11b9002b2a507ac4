"""What one cycle leaves for the next: baselines and the numbers of its batch, as the cycle's stage
payload in the ledger.

Baselines come from closed cycles only, so a cycle that is run again after a kill starts from the
same ones.
"""

from collections import Counter
from typing import Any

from ostinato.infra.platform.ledger import Ledger
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.realtime.feedback.distil import Distilled
from ostinato.tasks.realtime.feedback.interactions import Collection

STAGE = "distil"


def distil_payload(collection: Collection, distilled: Distilled) -> dict[str, Any]:
    """JSON for `ledger.cycles.update(cycle_id, STAGE, ...)`."""
    return {
        "interactions": len(collection.interactions),
        "skipped": dict(Counter(skip.reason.value for skip in collection.skipped)),
        "samples": len(distilled.samples),
        "mean_reward": distilled.mean_reward,
        "mean_absolute_advantage": distilled.mean_absolute_advantage,
        "reasons": dict(Counter(reward.reason for reward in distilled.rewards)),
        "baselines": distilled.baselines.model_dump(mode="json"),
    }


def carried_baselines(ledger: Ledger, line: str) -> Baselines:
    """The baselines of the line's newest closed cycle that has any. Empty before the first."""
    for cycle in reversed(ledger.cycles.history(line)):
        if cycle.closed_at is not None and STAGE in cycle.stages:
            return Baselines.model_validate(cycle.stages[STAGE]["baselines"])
    return Baselines()
