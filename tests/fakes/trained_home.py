"""A home as a finished RL run leaves it: metrics, weight versions, a promotion, a closed cycle, a report."""

import json
import math
from pathlib import Path

from ostinato.flows.stages.declared import START_FILE, StageStart
from ostinato.infra.platform.artifacts import Identity
from ostinato.infra.platform.cluster.workspace import ProgressWriter
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.weights.manifest import (
    ChainManifest,
    ChainObject,
    commit_manifest,
)
from ostinato.tasks.records import Group
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory

NUM_STEPS = 12


def fill_home(settings: Settings) -> None:
    """Writes all of it by the product's own functions."""
    for stage in ("pretrained-aa", "reinforced-bb"):
        (settings.home / "runs" / "toy-seed0" / stage).mkdir(parents=True)
    pretraining = ProgressWriter(settings.home / "runs/toy-seed0/pretrained-aa")
    steps = ProgressWriter(settings.home / "runs/toy-seed0/reinforced-bb")
    for step in range(1, NUM_STEPS + 1):
        pretraining.update(step, NUM_STEPS, "bulk", loss=4.0 / step)
        steps.update(
            step,
            NUM_STEPS,
            f"step {step} <b>v{step}</b>",
            solve_rate=0.3 + step / 100,
            reward_mean=step / 50,
            entropy_nats=math.nan,  # as of a model that diverged
            staleness_mean=0.5,
            staleness_max=1.0,
        )
    objects = open_object_store(settings)
    for version in range(NUM_STEPS):
        commit_manifest(objects, _manifest(version))
    ledger = open_ledger(settings)
    ledger.cycles.open(
        "toy-0-7", line="toy", served="reinforced/toy@1", from_watermark=0, to_watermark=7, at=1_000
    )
    ledger.cycles.close("toy-0-7", "promoted", 1_100)
    ledger.promotions.promote("toy", "candidate/toy@1", None, "its gate was passed", 1_100)
    ledger.close()
    page = settings.home / "reports" / "toy-seed0" / "report.html"
    page.parent.mkdir(parents=True)
    page.write_text("<h1>toy, seed 0</h1>" + json.dumps({"reward": 1}))


def add_attempts(
    settings: Settings, run_id: str = "reinforced-bb", groups: int = 1, in_flight: int = 0
) -> None:
    """Adds committed groups of two attempts, of which the first one solves its problem, and attempts in flight."""
    ledger, objects = open_ledger(settings), open_object_store(settings)
    journal = RolloutJournal(ledger.journal, objects, run_id)
    for number in range(groups):
        group_id = f"{run_id}.g{number}"
        problem = make_problem(f"p{number}")
        requests = [
            AttemptRequest(f"{group_id}.t{at}", group_id, problem, at, 0, at) for at in range(2)
        ]
        journal.reserve(requests, weight_version=0)
        made = tuple(make_trajectory(it, solved=it.attempt == 0) for it in requests)
        journal.commit(Group(group_id=group_id, problem_id=problem.problem_id, trajectories=made))
    late, problem = f"{run_id}.g{groups}", make_problem("late")
    running = [AttemptRequest(f"{late}.t{at}", late, problem, at, 0, 0) for at in range(in_flight)]
    journal.reserve(running, weight_version=0)
    ledger.close()


def note_start(directory: Path, began_at: float, flow_run_id: str | None = None) -> None:
    """Writes that a stage began in a run directory, as its flow does."""
    kind, _, fingerprint = directory.name.rpartition("-")
    identity = Identity(kind=kind, name="toy", settings_fingerprint="0", code={}, parents=())
    start = StageStart(
        identity=identity, fingerprint=fingerprint, began_at=began_at, flow_run_id=flow_run_id
    )
    (directory / START_FILE).write_text(start.model_dump_json())


def _manifest(version: int) -> ChainManifest:
    written = ChainObject(key=f"v{version}", size_bytes=1_000 + 10 * version, checksum="0" * 32)
    is_anchor = version % 6 == 0
    return ChainManifest(
        chain_id="toy-run",
        version=version,
        epoch=1,
        base_version=None if is_anchor else version - 1,
        delta=() if is_anchor else (written,),
        anchor=(written,) if is_anchor else (),
        tensors={},
        changed_elements=1,
        total_elements=2,
        raw_bytes=8,
        deltas_since_anchor=version % 6,
        delta_bytes_since_anchor=0,
        published_at=1_000.0 + version,
    )
