"""A run on a Ray cluster: trainer ranks, replicas, workers and boxes are on all nodes, and it goes on when
they die.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReinforcementResult
from tests.fakes.processes import command_line
from tests.fakes.reinforcement import GROUPS_PER_STEP, miniature_request

STEPS = 6
SMALL = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
NODE = {"num_cpus": 1, **SMALL}  # room for one rank
SPREAD_ACTORS = {"EngineReplica", "RolloutActor", "BoxNode"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A node with room for a rank; `remove_node` kills one as a machine that vanishes."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    yield cluster
    cluster.shutdown()


def actors_below(raylet: psutil.Process) -> set[str]:
    """Classes of the actors that a node runs: Ray names their processes by them."""
    lines = [command_line(child) for child in raylet.children(recursive=True)]
    titles = [
        line.removeprefix("ray::").split(".")[0] for line in lines if line.startswith("ray::")
    ]
    return {title.split(":")[0].strip() for title in titles}


def run(request: ReinforcementRequest, directory: Path, settings: Settings) -> ReinforcementResult:
    return run_child(
        "ostinato.tasks.reinforcement.run:main",
        request,
        ReinforcementResult,
        directory=directory,
        settings=settings,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_run_is_spread_over_machines_and_outlives_them(tmp_path: Path, cluster: Cluster) -> None:
    """Without one that has no rank it goes on as it is; one with a rank ends it, and with another machine in
    its place it goes on from the newest step.
    """
    request = miniature_request(tmp_path, "spread", STEPS, world_size=2, boxes="fleet")
    request = request.model_copy(update={"engine_replicas": 3, "rollout_workers": 3})
    directory = tmp_path / "run"
    settings = Settings(home=tmp_path / "home", cpu_limit=2, ray_address=cluster.address)
    nodes = [cluster.head_node, cluster.add_node(**NODE), cluster.add_node(num_cpus=0, **SMALL)]
    seen: list[set[str]] = []

    def await_step(step: int) -> None:
        while len(read_metrics(directory / "metrics.jsonl")) < step:
            if (directory / "failure.json").exists():
                return
            time.sleep(0.05)

    def kill_nodes() -> None:
        await_step(1)
        for node in nodes:
            raylet = node.all_processes["raylet"][0].process
            seen.append(actors_below(psutil.Process(raylet.pid)))
        cluster.remove_node(nodes[2], allow_graceful=False)
        await_step(3)
        cluster.remove_node(nodes[1], allow_graceful=False)

    killer = threading.Thread(target=kill_nodes, daemon=True)
    killer.start()
    with pytest.raises(ClusterError):
        run(request, directory, settings)
    killer.join()
    cluster.add_node(**NODE)
    result = run(request, directory, settings)

    assert all(actors >= SPREAD_ACTORS for actors in seen)
    assert ["RankActor" in actors for actors in seen] == [True, True, False]
    assert result.steps == STEPS
    steps = [row["step"] for row in read_metrics(directory / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    trained = {
        (row.group_id, row.trained_step)
        for row in Ledger(settings.ledger_url).journal.rows("spread")
        if row.trained_step is not None
    }
    assert len(trained) == len({group for group, _ in trained}) == STEPS * GROUPS_PER_STEP


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", ray_address="127.0.0.1:9")
    request = miniature_request(tmp_path, "nobody", STEPS)

    with pytest.raises(ClusterError, match=r"Ray cluster 127\.0\.0\.1:9 \(OSTINATO_RAY_ADDRESS\)"):
        run(request, tmp_path / "run", settings)
