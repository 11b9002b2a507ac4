"""One trainer a device: the next waits, and goes on however the one before ended."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import (
    PROCESS,
    STATUS,
    ProcessMark,
    Progress,
    read_record,
)
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.settings import Settings
from tests.unit.infra.platform.cluster.entries import CountRequest, CountResult

COUNT = "tests.unit.infra.platform.cluster.entries:count"


def _await(condition: Callable[[], object], limit_seconds: float = 200.0) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition did not come"
        time.sleep(0.02)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ends", "is killed"])
def test_second_trainer_waits_until_the_first_ends(is_killed: bool, tmp_path: Path) -> None:
    first, second, release = tmp_path / "first", tmp_path / "second", tmp_path / "release"
    settings = Settings(home=tmp_path / "home")

    def train(
        directory: Path, release_file: str, tell: Callable[[Progress], None] | None = None
    ) -> CountResult:
        request = CountRequest(steps=1, release_file=release_file)
        return run_child(
            COUNT,
            request,
            CountResult,
            directory=directory,
            on_progress=tell,
            settings=settings,
            alone=True,
        )

    seen: list[Progress] = []
    with ThreadPoolExecutor(2) as pool:
        holder: Future[CountResult] = pool.submit(train, first, str(release))
        _await((first / "waiting").exists)
        waiter = pool.submit(train, second, "", seen.append)
        _await(lambda: seen and (second / STATUS).exists())
        assert str(first) in (second / STATUS).read_text()
        assert not (second / "steps.txt").exists()
        if is_killed:
            mark = read_record(first / PROCESS, ProcessMark)
            assert mark is not None
            os.kill(mark.pid, signal.SIGKILL)
            assert isinstance(holder.exception(timeout=200), ClusterError)
        else:
            release.touch()
            assert holder.result(timeout=200).counted == 1
        assert waiter.result(timeout=200).counted == 1
    assert "waits for the device" in seen[0].message
    assert not (second / STATUS).exists()


def test_other_stages_wait_for_no_trainer(tmp_path: Path) -> None:
    settings, release = Settings(home=tmp_path / "home"), tmp_path / "release"
    request = CountRequest(steps=1, release_file=str(release))
    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(
            run_child,
            COUNT,
            request,
            CountResult,
            directory=tmp_path / "trainer",
            settings=settings,
            alone=True,
        )
        _await((tmp_path / "trainer" / "waiting").exists)
        plain = CountRequest(steps=1)
        directory = tmp_path / "evaluation"
        other = run_child(COUNT, plain, CountResult, directory=directory, settings=settings)
        assert other.counted == 1
        assert not trainer.done()
        release.touch()
        assert trainer.result(timeout=200).counted == 1
