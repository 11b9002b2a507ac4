"""What a simulation counts, and the figures made of it.

All of it depends on the scenario and the seed alone.
"""

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from ostinato.infra.sandbox.fleet.records import Priority
from ostinato.infra.sandbox.protocol import SandboxRecord


class WaitFigures(SandboxRecord):
    """Seconds from asking to having a box."""

    num_granted: int
    p50_seconds: float
    p99_seconds: float
    worst_seconds: float


class Sample(SandboxRecord):
    """The fleet at one moment."""

    at_seconds: float
    alive: int = Field(description="boxes that are lent")
    waiting: int
    started: int = Field(description="boxes that came up, in all")
    worst_memory_ratio: float
    mean_cpu_ratio: float
    worst_cpu_ratio: float


class SimulationFigures(SandboxRecord):
    """What one simulation showed."""

    scenario: str
    seed: int
    simulated_seconds: float
    num_nodes: int
    asked: int
    started: int
    peak_alive: int
    starts_per_second_mean: float
    starts_per_second_peak: float = Field(description="best ten seconds")
    waits: dict[str, WaitFigures]
    refused: dict[str, int]
    reaped: int
    dead_holders: int
    moved_leases: int
    lost_leases: int = Field(description="reported lost to their holders")
    unaccounted_requests: int = Field(description="neither served, refused, ended nor waiting")
    forks_at_home: int
    forks_copied: int
    warm_hits: int
    memory_kills: int
    worst_memory_ratio: float
    worst_cpu_ratio: float
    overcommitted_nodes: int = Field(description="times a node had promised more than its limit")
    samples: tuple[Sample, ...]


class Measurements:
    """Counts of a running simulation."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.waits: dict[Priority, list[float]] = {priority: [] for priority in Priority}
        self.started_in_second: Counter[int] = Counter()
        self.samples: list[Sample] = []

    def note_start(self, at_seconds: float) -> None:
        """A box came up."""
        self.counts["started"] += 1
        self.started_in_second[int(at_seconds)] += 1

    def peak_starts_per_second(self, span_seconds: int = 10) -> float:
        """The most starts in a span, over its length."""
        if not self.started_in_second:
            return 0.0
        last = max(self.started_in_second)
        by_second = [self.started_in_second[second] for second in range(last + 1)]
        span_seconds = min(span_seconds, len(by_second))
        current = best = sum(by_second[:span_seconds])
        for second in range(span_seconds, len(by_second)):
            current += by_second[second] - by_second[second - span_seconds]
            best = max(best, current)
        return best / span_seconds

    def wait_figures(self) -> dict[str, WaitFigures]:
        """Waits by priority, highest first; those nobody asked for are left out."""
        return {
            priority.name.lower(): WaitFigures(
                num_granted=len(waits),
                p50_seconds=quantile(waits, 0.50),
                p99_seconds=quantile(waits, 0.99),
                worst_seconds=max(waits),
            )
            for priority in sorted(Priority, reverse=True)
            if (waits := self.waits[priority])
        }


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest-rank quantile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
