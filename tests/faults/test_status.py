"""`ostinato status` names each of 25 injected faults within ten seconds, and none where all is well."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ostinato.flows.operating.status.report import collect
from ostinato.flows.operating.status.rows import Fault, StatusRow
from ostinato.infra.platform.cluster.child import note_ending
from ostinato.infra.platform.cluster.stage_status import (
    BlockedOn,
    BoxUse,
    DecodingActivity,
    ReplicaStatus,
    StageStatus,
)
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.serving.weights.publisher import ChainPublisher
from tests.faults.injected_faults import FAULTS, InjectedFault
from tests.faults.injections import INJECTIONS, Scene, open_cycle
from tests.faults.prefect_injections import PREFECT_INJECTIONS, PrefectServer, prefect_server
from tests.faults.weight_chain_programs import weights_of

LIMIT_SECONDS = 10.0
SINCE_SECONDS = 6.0  # a heartbeat, from which some of the times are known, comes every five
BY_NAME = {fault.name: fault for fault in FAULTS}
BY_COMMAND = ("full-disk",)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    return Scene(tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with prefect_server(tmp_path_factory.mktemp("prefect")) as running:
        yield running


def check(fault: InjectedFault, scene: Scene) -> None:
    """The fault is named, alone, in time, with its part, cause and since when."""
    began = time.monotonic()
    found: list[StatusRow] = []
    # a process of a busy machine may stand ready for a core just when it is looked at
    while not found and time.monotonic() < began + LIMIT_SECONDS:
        rows = collect(scene.settings, scene.thresholds)
        found = [row for row in rows if row.fault is not None]
    seconds = time.monotonic() - began
    assert [row.fault for row in found] == [fault.name], found
    assert found[0].part.startswith(fault.part)
    assert fault.cause in found[0].cause
    assert seconds < LIMIT_SECONDS
    if scene.since is None:
        assert found[0].since is None
    else:
        assert found[0].since == pytest.approx(scene.since, abs=SINCE_SECONDS)


@pytest.mark.parametrize("name", INJECTIONS)
@pytest.mark.sampled(4)
def test_fault_is_named_alone_and_in_time(name: str, scene: Scene) -> None:
    with INJECTIONS[name](scene):
        check(BY_NAME[name], scene)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PREFECT_INJECTIONS)
def test_fault_around_the_server_is_named(name: str, scene: Scene, server: PrefectServer) -> None:
    scene.set(home=server.home, prefect_port=server.port)
    with server.clean(), PREFECT_INJECTIONS[name](scene, server):
        check(BY_NAME[name], scene)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_late_runs_have_the_cause_that_is_theirs(scene: Scene, server: PrefectServer) -> None:
    scene.set(home=server.home, prefect_port=server.port)
    due = datetime.now(tz=UTC) - timedelta(minutes=5)
    with server.clean():
        server.beat("here", seconds=30)
        queue = f"work_pools/{server.pool}/queues/default"
        deployment = server.deployment()
        server.api.patch(queue, json={"concurrency_limit": 1}).raise_for_status()
        server.set_state(server.run(deployment), "PENDING")
        server.run(deployment, due)

        rows = collect(scene.settings)
        assert [row for row in rows if row.fault is not None] == []
        [queued] = [row for row in rows if row.state == "queued"]
        assert "which runs 1 at a time" in queued.waits_for
        assert queued.since == pytest.approx(due.timestamp())

        server.api.patch(queue, json={"is_paused": True}).raise_for_status()
        [late] = [row for row in collect(scene.settings) if row.fault is not None]
        assert late.fault is Fault.LATE_RUN
        assert "is paused" in late.cause


def run_status(scene: Scene, *around: str) -> list[dict[str, Any]]:
    """Rows that the command prints, run by the words `around`."""
    program = "from ostinato.flows.cli import main; main()"
    command = [*around, sys.executable, "-P", "-c", program, "status", "--json"]
    environment = {**os.environ, **scene.settings.to_environment()}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FILL = """
mount -t tmpfs -o size=8m none "$OSTINATO_HOME" && mkdir "$OSTINATO_HOME/objects"
head -c 9000000 /dev/zero 2>/dev/null > "$OSTINATO_HOME/objects/big"
exec "$@"
"""


def test_command_names_a_full_disk(scene: Scene) -> None:
    scene.set(minimum_free_disk_bytes=2**20)
    fault = BY_NAME["full-disk"]
    rows = run_status(
        scene, "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FILL, "-"
    )
    [found] = [row for row in rows if row["fault"] is not None]
    assert (found["part"], found["state"], found["fault"]) == (fault.part, "full", fault.name)
    assert fault.cause in found["cause"]
    assert "0.0 GiB free" in found["cause"]


@pytest.mark.parametrize("name", ["stopped-process", "held-lock"])
@pytest.mark.sampled(1)
def test_command_names_a_fault(name: str, scene: Scene) -> None:
    with INJECTIONS[name](scene):
        rows = run_status(scene)
    [found] = [row for row in rows if row["fault"] is not None]
    assert found["fault"] == name
    assert found["part"].startswith(BY_NAME[name].part)
    assert BY_NAME[name].cause in found["cause"]


def test_each_fault_is_injected() -> None:
    assert {*INJECTIONS, *PREFECT_INJECTIONS, *BY_COMMAND} == set(BY_NAME)


def test_healthy_home_has_no_finding(scene: Scene) -> None:
    scene.champion()
    ChainPublisher(open_object_store(scene.settings), "chain-run").publish(0, weights_of(0))
    status = StageStatus(
        phase="running",
        at=time.time(),
        waits={"trainer": BlockedOn(what="ready groups", detail="has 1, wants 4", since=5.0)},
        replicas={"run.engine0": ReplicaStatus(state="serving", since=7.0, version=3)},
        generation=DecodingActivity(
            computed_tokens=9.0, since=time.time() - 5, attempts_in_flight=4
        ),
        boxes=BoxUse(leased=4, waiting=1, waiting_since=time.time() - 5),
    )
    interrupted = scene.stage("corpus-0123")
    note_ending(interrupted, "KeyboardInterrupt")
    with (
        contextlib.closing(open_ledger(scene.settings)) as ledger,
        scene.standing_child(num_ranks=2),
        scene.sleeping_stage(status),
    ):
        open_cycle(ledger, at=7.0)
        rows = collect(scene.settings, scene.thresholds)
    assert [row for row in rows if row.fault is not None] == []
    states = {row.part.removeprefix("run "): (row.state, row.since) for row in rows}
    assert states["cycle mine-000000-f"] == ("open", 7.0)
    assert states["corpus-0123"][0] == "interrupted"
    assert states["reinforced-0123 trainer"] == ("waiting", 5.0)
    assert states["reinforced-0123 replica engine0"] == ("serving", 7.0)
    assert states["waiting-0123 rank 1"][0] == states["waiting-0123 rank 0"][0] == "up"
    assert states["waiting-0123"][0] == "running"


def test_findings_are_the_documented_ones() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    documented = re.findall(r"^\| `([a-z-]+)` \|", guide, re.MULTILINE)
    assert documented == [fault.name for fault in FAULTS] == [fault.value for fault in Fault]
    assert len(documented) == 25
