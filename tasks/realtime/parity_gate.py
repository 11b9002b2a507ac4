"""Rules of the gate about the parity of a cycle's training.

This module does not import torch, so that the cycle's flow can import it.
"""

import math

from ostinato.tasks.realtime.records import CycleTrainingResult
from ostinato.tasks.records import GateCheck

# by kind of cache that tokens were sampled from: metric and setting of the limit
_LIMITS = {
    "one": ("parity_alarm_k3", "alarm_k3"),
    "kept": ("parity_alarm_kept_cache_k3", "alarm_kept_cache_k3"),
}


def parity_checks(training: CycleTrainingResult) -> tuple[GateCheck, ...]:
    """One rule for each kind of cache for which the step compared engine and trainer.

    If tokens were compared and the metrics hold no k3, it was not a number, and the rule fails.
    """
    metrics = training.metrics
    checks = []
    for cache, (limit_metric, setting) in _LIMITS.items():
        tokens = metrics.get(f"parity_{cache}_cache_tokens")
        if not tokens:
            continue
        k3, limit = metrics.get(f"parity_{cache}_cache_k3_nats"), metrics[limit_metric]
        checks.append(
            GateCheck(
                name=f"parity_{cache}_cache",
                value=k3,
                threshold=limit,
                passed=k3 is not None and k3 <= limit,
                detail=(
                    f"parity alarm of the training: k3 {math.nan if k3 is None else k3:.3g} between engine and trainer at equal "
                    f"weights over {tokens:.0f} tokens ({cache} cache), limit {limit:g}: the update does "
                    "not belong to the policy that served users. Find the difference (checkpoint, number format, "
                    "experts' routes), or raise cycle.learning.parity."
                    f"{setting} if this engine is known to differ so much"
                ),
            )
        )
    return tuple(checks)
