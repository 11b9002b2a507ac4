"""Pretraining on two ranks that torchrun or a Ray cluster of two nodes started: the weights are those of
two local ranks, also when one is killed in mid-run.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ray.cluster_utils import Cluster

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.ranks import marked_ranks
from ostinato.infra.platform.cluster.workspace import RESULT, ResultEnvelope, read_record
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.models.checkpoint import load_checkpoint
from ostinato.tasks.pretraining.config import PretrainingRequest, PretrainingResult
from tests.fakes.corpus import write_corpus
from tests.faults.torchrun_program import ENTRY
from tests.unit.tasks.pretraining.test_run import make_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--nproc-per-node", "2", "--max-restarts", "1", "-m", "tests.faults.torchrun_program"),
]


@pytest.fixture(scope="module")
def request_of_two(tmp_path_factory: pytest.TempPathFactory) -> PretrainingRequest:
    return make_request(write_corpus(tmp_path_factory.mktemp("corpus")), world_size=2)


@pytest.fixture(scope="module")
def wanted(
    request_of_two: PretrainingRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """Weights of two ranks on this machine."""
    directory = tmp_path_factory.mktemp("local")
    return weights_of(run_child(ENTRY, request_of_two, PretrainingResult, directory=directory))


def weights_of(result: PretrainingResult) -> dict[str, torch.Tensor]:
    return load_checkpoint(Path(result.checkpoint_directory)).weights


def after_step(directory: Path, step: int, act: Callable[[], None]) -> threading.Thread:
    """Acts once a step is reported."""

    def wait() -> None:
        while len(read_metrics(directory / "metrics.jsonl")) < step:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def check(result: PretrainingResult, wanted: dict[str, torch.Tensor]) -> None:
    seen = weights_of(result)
    assert result.times_resumed == 1
    assert seen.keys() == wanted.keys()
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)


@pytest.mark.nightly
def test_torchrun_starts_ranks_again_that_lost_one(
    request_of_two: PretrainingRequest, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    asked, directory = tmp_path / "request.json", tmp_path / "run"
    asked.write_text(request_of_two.model_dump_json())
    killer = after_step(
        directory, 3, lambda: os.kill(marked_ranks(directory)[1].pid, signal.SIGKILL)
    )
    done = subprocess.run(
        [*TORCHRUN, str(asked), str(directory)],
        env=os.environ | {"OSTINATO_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    killer.join(1.0)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = read_record(directory / RESULT, ResultEnvelope)
    assert answer is not None
    check(PretrainingResult.model_validate(answer.result), wanted)


@pytest.mark.nightly
def test_ranks_on_a_cluster_go_on_when_a_machine_comes_back(
    request_of_two: PretrainingRequest, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    other = cluster.add_node(**NODE)
    directory = tmp_path / "run"
    settings = Settings(home=tmp_path / "home", cpu_limit=1, ray_address=cluster.address)

    def run() -> PretrainingResult:
        return run_child(
            ENTRY, request_of_two, PretrainingResult, directory=directory, settings=settings
        )

    try:
        killer = after_step(directory, 3, lambda: cluster.remove_node(other, allow_graceful=False))
        with pytest.raises(ClusterError, match=r"2 ranks: rank \d was lost"):
            run()
        killer.join()
        cluster.add_node(**NODE)
        check(run(), wanted)
    finally:
        cluster.shutdown()
