"""How each fault of `injected_faults.py` comes about, with real processes, files, locks and servers.

An injection holds for the length of its block. It may set the scene's thresholds to what passed
already, so that no test waits for minutes.
"""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pydantic import SecretStr

from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.flows.operating.status.rows import Thresholds
from ostinato.flows.operating.up import write_state
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.processes import is_alive, live_owners
from ostinato.infra.platform.cluster.ranks import marked_ranks
from ostinato.infra.platform.cluster.services import Service, ServiceGroup, find_free_port
from ostinato.infra.platform.cluster.stage_status import (
    BoxUse,
    DecodingActivity,
    ReplicaStatus,
    StageStatus,
)
from ostinato.infra.platform.cluster.workspace import (
    HEARTBEAT,
    PROCESS,
    ProcessMark,
    read_record,
)
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.engine.health import HealthEvent, ReplicaHealth, observe
from ostinato.infra.serving.weights.publisher import ChainPublisher
from tests.fakes.finished_stages import add_checkpoint, add_problems, open_context
from tests.fakes.sleeping_stage import sleeping_stage
from tests.faults.status_programs import FAIL, STAND, STANDING, StandRequest, StandResult
from tests.faults.weight_chain_programs import TroubledStore, weights_of

LINE = "mine"


class Scene:
    """A home with nothing in it, and what `ostinato status` is told of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.thresholds = Thresholds()
        self.since: float | None = None  # when the fault began; None: nobody can know
        self._told: dict[str, Any] = {
            "home": home,
            "prefect_port": find_free_port(),
            "gateway_port": find_free_port(),
            "dashboard_port": find_free_port(),
            "minimum_free_disk_bytes": 0,
        }

    @property
    def settings(self) -> Settings:
        return Settings.model_validate(self._told)

    def set(self, **values: Any) -> None:
        """Changes settings."""
        self._told |= values

    def limit(self, **seconds: float) -> None:
        """Changes thresholds."""
        self.thresholds = self.thresholds.model_copy(update=seconds)

    def stage(self, name: str) -> Path:
        """A new stage's directory."""
        directory = self.home / "runs" / "run" / name
        directory.mkdir(parents=True)
        return directory

    @contextmanager
    def standing_child(self, num_ranks: int = 0) -> Iterator[tuple[Path, ProcessMark]]:
        """A real supervised stage that waits, its directory and its process."""
        directory, release = self.stage("waiting-0123"), self.home / "release"
        request = StandRequest(release_file=str(release), num_ranks=num_ranks)
        with ThreadPoolExecutor(1) as pool:
            child = pool.submit(
                run_child, STAND, request, StandResult, directory=directory, settings=self.settings
            )
            try:
                wait_for((directory / STANDING).exists)
                wait_for(lambda: live_owners(directory))
                mark = read_record(directory / PROCESS, ProcessMark)
                assert mark is not None
                yield directory, mark
            finally:
                release.touch()
                with suppress(OstinatoError):
                    child.result(60)

    def sleeping_stage(self, status: StageStatus | None = None) -> AbstractContextManager[Path]:
        """The directory of a stage whose process sleeps, with a heartbeat and a status of now."""
        return sleeping_stage(self.stage("reinforced-0123"), status)

    def champion(self) -> Path:
        """The folder of a published checkpoint that serves a line."""
        context = open_context(self.home, LINE)
        checkpoint = add_checkpoint(context, add_problems(context, "p"), "c")
        context.ledger.promotions.promote(LINE, str(checkpoint), None, "first", 1.0)
        return self.home / "objects" / checkpoint.object_prefix


def wait_for(condition: Callable[[], object], limit_seconds: float = 60.0) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition did not come"
        time.sleep(0.02)


@contextmanager
def dead_service(scene: Scene) -> Iterator[None]:
    with ServiceGroup() as services:
        service = Service(
            "gateway", [sys.executable, "-c", "raise SystemExit(7)"], scene.home / "log"
        )
        services.start(service)
        services.running[0].process.wait()
        services.mend(time.time())
        scene.since = time.time()
        write_state(scene.settings, RecipeChoice(name="nano"), time.time(), services)
        yield


@contextmanager
def silent_gateway(scene: Scene) -> Iterator[None]:
    scene.limit(answer=1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        scene.set(gateway_port=mute.getsockname()[1])
        yield


@contextmanager
def slow_store(scene: Scene) -> Iterator[None]:
    released = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def wait(self) -> None:
            released.wait(60)

        do_GET = do_HEAD = do_PUT = wait

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    bucket(scene, server.server_address[1])
    try:
        yield
    finally:
        released.set()
        server.shutdown()
        server.server_close()


@contextmanager
def unusable_store(scene: Scene) -> Iterator[None]:
    bucket(scene, find_free_port())
    yield


def bucket(scene: Scene, port: int) -> None:
    """Puts the object store on an S3 server of this machine."""
    scene.set(
        object_store_url="s3://bucket/prefix",
        s3_endpoint_url=f"http://127.0.0.1:{port}",
        s3_region="eu-west-1",
        s3_access_key_id="test",
        s3_secret_access_key=SecretStr("test"),
    )


HOLD_LOCK = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1])
database.execute("BEGIN IMMEDIATE")
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def held_lock(scene: Scene) -> Iterator[None]:
    open_ledger(scene.settings).close()
    command = [sys.executable, "-c", HOLD_LOCK, str(scene.home / "ledger.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield
        finally:
            holder.kill()


@contextmanager
def unusable_ledger(scene: Scene) -> Iterator[None]:
    (scene.home / "ledger.db").write_bytes(b"other bytes " * 1000)
    yield


@contextmanager
def wedged_upload(scene: Scene) -> Iterator[None]:
    """A publisher that dies just before its version's manifest."""

    def die(operation: str, key: str) -> None:
        if key.endswith("00000001/manifest.json") and operation == "put_new":
            raise KeyboardInterrupt

    objects = open_object_store(scene.settings)
    publisher = ChainPublisher(TroubledStore(objects, die), "chain-run")
    publisher.publish(0, weights_of(0))
    with suppress(KeyboardInterrupt):
        publisher.publish(1, weights_of(1))
    scene.since = time.time() - 100
    for path in (scene.home / "objects" / "chains" / "chain-run" / "00000001").iterdir():
        os.utime(path, (scene.since, scene.since))
    yield


@contextmanager
def lost_checkpoint(scene: Scene) -> Iterator[None]:
    (scene.champion() / "files" / "content.json").unlink()
    scene.since = 1.0
    yield


@contextmanager
def failed_stage(scene: Scene) -> Iterator[None]:
    request = StandRequest(release_file="weights")
    with suppress(OstinatoError):
        run_child(
            FAIL, request, StandResult, directory=scene.stage("x-0123"), settings=scene.settings
        )
    scene.since = time.time()
    yield


@contextmanager
def killed_stage(scene: Scene) -> Iterator[None]:
    with scene.standing_child() as (directory, mark):
        wait_for((directory / HEARTBEAT).exists)
        scene.since = (directory / HEARTBEAT).stat().st_mtime
        os.kill(mark.pid, signal.SIGKILL)
        wait_for(lambda: not live_owners(directory))
        yield


@contextmanager
def stopped_process(scene: Scene) -> Iterator[None]:
    with scene.standing_child() as (_, mark):
        scene.since = time.time()
        os.kill(mark.pid, signal.SIGSTOP)
        wait_for(lambda: psutil.Process(mark.pid).status() == psutil.STATUS_STOPPED)
        try:
            yield
        finally:
            os.kill(mark.pid, signal.SIGCONT)


@contextmanager
def silent_stage(scene: Scene) -> Iterator[None]:
    with scene.sleeping_stage() as directory:
        scene.since = time.time() - 100
        os.utime(directory / HEARTBEAT, (scene.since, scene.since))
        yield


@contextmanager
def stalled_stage(scene: Scene) -> Iterator[None]:
    with scene.standing_child() as (_, mark):
        scene.since = mark.started_at + 1.0
        scene.limit(progress=0.5)
        time.sleep(1.0)
        yield


@contextmanager
def dead_rank(scene: Scene) -> Iterator[None]:
    with scene.standing_child(num_ranks=2) as (directory, _):
        scene.since = time.time()
        rank = marked_ranks(directory)[1]
        os.kill(rank.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(rank))
        yield


@contextmanager
def dead_replica(scene: Scene) -> Iterator[None]:
    scene.since = time.time() - 20
    reason = "statistics: ActorDiedError"
    lost = observe(ReplicaHealth(), HealthEvent.LOST, at=scene.since, reason=reason)
    standing = ReplicaStatus(state=lost.state.value, since=lost.since, reason=lost.reason)
    status = StageStatus(phase="running", at=time.time(), replicas={"run.engine0": standing})
    with scene.sleeping_stage(status):
        yield


@contextmanager
def starved_engine(scene: Scene) -> Iterator[None]:
    scene.since = time.time() - 500
    status = StageStatus(
        phase="running",
        at=time.time(),
        replicas={"run.engine0": ReplicaStatus(state="serving", since=1.0, version=3)},
        generation=DecodingActivity(computed_tokens=9.0, since=scene.since, attempts_in_flight=4),
        boxes=BoxUse(leased=4, waiting=0),
    )
    with scene.sleeping_stage(status):
        yield


@contextmanager
def starved_boxes(scene: Scene) -> Iterator[None]:
    scene.since = time.time() - 500
    boxes = BoxUse(leased=2, waiting=6, waiting_since=scene.since)
    with scene.sleeping_stage(StageStatus(phase="running", at=time.time(), boxes=boxes)):
        yield


def open_cycle(ledger: Ledger, at: float) -> None:
    """A cycle of the line over its first interactions."""
    ledger.cycles.open(
        "mine-000000-f", line=LINE, served="x", from_watermark=0, to_watermark=4, at=at
    )


@contextmanager
def forgotten_cycle(scene: Scene) -> Iterator[None]:
    scene.champion()
    scene.since = time.time() - 5_000
    for path in (scene.home / "runs").rglob("*"):
        os.utime(path, (scene.since, scene.since))
    with contextlib.closing(open_ledger(scene.settings)) as ledger:
        open_cycle(ledger, at=scene.since)
    yield


INJECTIONS: dict[str, Callable[[Scene], AbstractContextManager[None]]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        dead_service,
        silent_gateway,
        slow_store,
        unusable_store,
        held_lock,
        unusable_ledger,
        wedged_upload,
        lost_checkpoint,
        failed_stage,
        killed_stage,
        stopped_process,
        silent_stage,
        stalled_stage,
        dead_rank,
        dead_replica,
        starved_engine,
        starved_boxes,
        forgotten_cycle,
    )
}
