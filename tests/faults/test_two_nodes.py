"""A run on a Ray cluster of two nodes: its actors are on both, and it goes on when one node dies."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReinforcementResult
from tests.fakes.processes import command_line
from tests.fakes.reinforcement import miniature_request

STEPS = 5
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
SPREAD_ACTORS = {"MailboxReplica", "RolloutActor", "BoxNode"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes; `remove_node` kills one as a machine that vanishes."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
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
@pytest.mark.timeout(600)
def test_run_is_spread_over_two_nodes_and_outlives_one(tmp_path: Path, cluster: Cluster) -> None:
    request = miniature_request(tmp_path, "spread", STEPS, boxes="fleet")
    request = request.model_copy(update={"engine_replicas": 2, "rollout_workers": 2})
    directory = tmp_path / "run"
    settings = Settings(home=tmp_path / "home", cpu_limit=2, ray_address=cluster.address)
    head, other = cluster.list_all_nodes()
    seen: list[set[str]] = []

    def kill_node_after_step() -> None:
        while len(read_metrics(directory / "metrics.jsonl")) < 2:
            if (directory / "failure.json").exists():
                return
            time.sleep(0.05)
        for node in (head, other):
            raylet = node.all_processes["raylet"][0].process
            seen.append(actors_below(psutil.Process(raylet.pid)))
        cluster.remove_node(other, allow_graceful=False)

    killer = threading.Thread(target=kill_node_after_step, daemon=True)
    killer.start()
    result = run(request, directory, settings)
    killer.join()

    on_head, on_other = seen
    assert on_head >= SPREAD_ACTORS | {"TrainerActor"}
    assert on_other >= SPREAD_ACTORS
    assert result.steps == STEPS
    assert [row["step"] for row in read_metrics(directory / "metrics.jsonl")] == list(
        range(1, STEPS + 1)
    )


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", ray_address="127.0.0.1:9")
    request = miniature_request(tmp_path, "nobody", STEPS)

    with pytest.raises(ClusterError, match=r"Ray cluster 127\.0\.0\.1:9 \(OSTINATO_RAY_ADDRESS\)"):
        run(request, tmp_path / "run", settings)
