"""Seconds of trajectories that a crash of everything throws away, and whether the rest counts once.

    python -m tests.benchmarks.crash_loss [--kills 200]

Accounting of verl's RFC 7579: a second that an attempt ran and that no step will use is lost. Each
kill ends a run of its own at a moment of its seed: the orchestrator on a virtual clock, its journal a
real ledger (SQLite) and object store, which a second journal then reads, as the next process does. The
same moment is counted for a buffer in memory with the same step checkpoints, as trainers have whose
finished rollouts live in the process: all that no checkpointed step used is lost. Prints one JSON line.
"""

import argparse
import asyncio
import json
import logging
import random
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.tasks.planning.simulation import run_virtual
from ostinato.tasks.records import Trajectory
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.steps import StepRequest
from tests.benchmarks.orchestrator import Load, Simulation

LOAD = Load(steps=40, group_size=4, groups_per_step=4, slots=16, failure_ratio=0.0, problems=60)
LONGEST_SECONDS = 60.0  # some ten steps; no run is over by then
CHECKPOINT_SECONDS = 0.3  # of a step, at its end: marked trained and not yet durable


@dataclass(frozen=True)
class Loss:
    """One kill."""

    ran_seconds: float  # of all attempts, those in flight too
    lost_seconds: float
    buffer_lost_seconds: float  # with the buffer in memory
    wrong_groups: int  # committed ones that are not trained or owed exactly once


class KilledRun(Simulation):
    """A simulated run with a real journal that ends without warning."""

    def __init__(self, seed: int, ledger: Ledger, objects: ObjectStore) -> None:
        self.journal = RolloutJournal(ledger.journal, objects, "sim")
        super().__init__(LOAD, 1, seed, self.journal)
        self.began: dict[str, float] = {}
        self.spent: dict[str, float] = {}
        self.checkpoint = 0
        self.used: dict[int, list[str]] = {}

    async def attempt(self, request: AttemptRequest) -> Trajectory:
        loop = asyncio.get_running_loop()
        self.began[request.trajectory_id] = loop.time()
        ended = await super().attempt(request)
        self.spent[request.trajectory_id] = loop.time() - self.began[request.trajectory_id]
        return ended

    async def train(self, request: StepRequest) -> int:
        groups = [group.group_id for group in request.groups]
        self.used[request.step] = groups
        self.journal.mark_trained(groups, request.step)
        version = await super().train(request)
        await asyncio.sleep(CHECKPOINT_SECONDS)
        self.checkpoint = request.step
        return version

    def killed_at(self, seconds: float) -> None:
        async def work() -> None:
            running = asyncio.create_task(self.orchestrator.run())
            await asyncio.wait([running], timeout=seconds)
            now = asyncio.get_running_loop().time()
            for name in self.began.keys() - self.spent.keys():
                self.spent[name] = now - self.began[name]
            # a killed process writes nothing more
            self.journal.reserve = self.journal.commit = self.journal.retire = _nothing  # type: ignore[method-assign]
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

        run_virtual(work())


def _nothing(*_: object) -> None: ...


def kill(seed: int) -> Loss:
    """Runs up to a random moment, reads the journal again and counts."""
    moment = random.Random(seed).uniform(1.0, LONGEST_SECONDS)
    with tempfile.TemporaryDirectory(prefix="ostinato-crash-") as place:
        ledger = Ledger(f"sqlite:///{place}/ledger.db").migrate()
        objects = ObjectStore.from_url(f"file://{Path(place)}/objects")
        run = KilledRun(seed, ledger, objects)
        run.killed_at(moment)
        committed = {
            row.group_id for row in ledger.journal.rows("sim") if row.commit_sequence is not None
        }
        owed = RolloutJournal(ledger.journal, objects, "sim").restore(run.checkpoint)
    kept = Counter(
        name for step, names in run.used.items() if step <= run.checkpoint for name in names
    )
    durable = set(kept)
    kept.update(item.group.group_id for item in owed)

    def seconds_outside(groups: set[str]) -> float:
        return sum(s for name, s in run.spent.items() if name.rpartition(".t")[0] not in groups)

    return Loss(
        ran_seconds=sum(run.spent.values()),
        lost_seconds=seconds_outside(set(kept)),
        buffer_lost_seconds=seconds_outside(durable),
        wrong_groups=sum(kept[name] != 1 for name in committed | set(kept)),
    )


def main() -> None:
    """Print the figures and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="20 kills")
    options = parser.parse_args()
    kills = 20 if options.quick else options.kills
    logging.disable(logging.WARNING)
    losses = [kill(seed) for seed in range(kills)]
    figures: dict[str, float] = {
        "kills": kills,
        "ran_seconds_mean": fmean(loss.ran_seconds for loss in losses),
        "wrong_groups": sum(loss.wrong_groups for loss in losses),
    }
    for name, values in (
        ("lost", [loss.lost_seconds for loss in losses]),
        ("buffer_in_memory_lost", [loss.buffer_lost_seconds for loss in losses]),
    ):
        figures[f"{name}_seconds_mean"] = fmean(values)
        figures[f"{name}_seconds_p95"] = quantiles(values, n=20)[-1]
    for name, value in figures.items():
        print(f"{name:>34} {value:10.1f}")
    targets = {"wrong_groups": 0.0}
    met = figures["wrong_groups"] == 0
    print(json.dumps({"name": "crash_loss", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
