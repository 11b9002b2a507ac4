"""The supervised child: runs once, survives its supervisor, resumes after a kill, leaves
nothing.
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

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.processes import is_alive, mark_process
from ostinato.infra.platform.cluster.workspace import (
    ENDING,
    Ending,
    ProcessMark,
    Progress,
    read_record,
)
from ostinato.infra.platform.errors import (
    ClusterError,
    ConfigError,
    EngineError,
    OstinatoError,
    StorageError,
    TrainingError,
)
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from tests.fakes.processes import is_running, of_home, wait_for_end
from tests.unit.infra.platform.cluster.entries import (
    CountRequest,
    CountResult,
    DeviceResult,
    FailRequest,
)

_COUNT = "tests.unit.infra.platform.cluster.entries:count"
_SEE_DEVICES = "tests.unit.infra.platform.cluster.entries:see_devices"
_FAIL = "tests.unit.infra.platform.cluster.entries:fail"


def _count(directory: Path, request: CountRequest) -> CountResult:
    return run_child(_COUNT, request, CountResult, directory=directory)


def _await(condition: Callable[[], object], limit_seconds: float = 200.0) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition did not come"
        time.sleep(0.02)


def _start_supervisor(directory: Path, steps: int, release: Path) -> subprocess.Popen[bytes]:
    program = "tests.unit.infra.platform.cluster.supervisor_program"
    supervisor = subprocess.Popen(
        [sys.executable, "-m", program, str(directory), str(steps), str(release)]
    )
    _await((directory / "waiting").exists)
    return supervisor


def _pid(directory: Path) -> int:
    mark = read_record(directory / "child.pid", ProcessMark)
    assert mark is not None
    return mark.pid


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda", "0")])
def test_a_stage_sees_gpus_only_where_the_device_says_so(
    device: str, visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    settings = Settings.model_validate({"home": tmp_path / "home", "device": device})
    seen = run_child(
        _SEE_DEVICES,
        CountRequest(steps=1),
        DeviceResult,
        directory=tmp_path / "work",
        settings=settings,
    )
    assert seen.visible == visible


def test_result_progress_and_metrics_arrive(tmp_path: Path) -> None:
    seen: list[Progress] = []
    result = run_child(
        _COUNT,
        CountRequest(steps=5),
        CountResult,
        directory=tmp_path / "work",
        on_progress=seen.append,
    )

    assert (result.counted, result.steps_this_attempt) == (5, 5)
    assert result.pid != os.getpid()
    assert (seen[-1].done, seen[-1].total, seen[-1].message) == (5, 5, "counting")
    assert [row["value"] for row in read_metrics(tmp_path / "work" / "metrics.jsonl")] == [
        *range(5)
    ]


def test_same_request_again_runs_nothing(tmp_path: Path) -> None:
    first = _count(tmp_path / "work", CountRequest(steps=2))

    assert _count(tmp_path / "work", CountRequest(steps=2)) == first


def test_other_request_starts_clean_and_keeps_the_old_files_aside(tmp_path: Path) -> None:
    _count(tmp_path / "work", CountRequest(steps=2))
    result = _count(tmp_path / "work", CountRequest(steps=3))

    assert result.steps_this_attempt == 3
    (aside,) = tmp_path.glob("work.superseded-*")
    assert (aside / "checkpoint").read_text() == "2"


@pytest.mark.parametrize(
    ("how", "error_type", "message"),
    [
        ("config", ConfigError, "learning_rate is -1, wanted above 0"),
        ("engine", EngineError, "replica 3 is gone"),
        ("bug", TrainingError, "ZeroDivisionError: division by zero"),
        ("exit", ClusterError, "with exit code 7"),
        ("signal", ClusterError, "by signal 9"),
    ],
)
@pytest.mark.sampled(2)
def test_failure_arrives_typed_with_the_end_of_the_log(
    tmp_path: Path, how: str, error_type: type[OstinatoError], message: str
) -> None:
    with pytest.raises(error_type, match=message) as caught:
        run_child(_FAIL, FailRequest.model_validate({"how": how}), CountResult, directory=tmp_path)

    assert type(caught.value) is error_type
    assert "what the child said before it ended" in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        "no.such.module:main",
        "ostinato.infra.platform.errors:nothing",
        _COUNT.replace("count", "unannotated"),
    ],
)
@pytest.mark.sampled(1)
def test_wrong_entry_is_a_config_error(tmp_path: Path, entry: str) -> None:
    with pytest.raises(ConfigError, match=entry.partition(":")[0]):
        run_child(entry, CountRequest(steps=1), CountResult, directory=tmp_path)


def _start_and_kill_supervisor(work: Path, release: Path) -> int:
    """Process id of the child that it leaves."""
    supervisor = _start_supervisor(work, 3, release)
    child_pid = _pid(work)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    return child_pid


def test_killed_supervisor_the_next_one_attaches_to_the_same_child(tmp_path: Path) -> None:
    work, release = tmp_path / "work", tmp_path / "release"
    child_pid = _start_and_kill_supervisor(work, release)
    assert is_running(child_pid)

    threading.Timer(0.3, release.touch).start()
    request = CountRequest(steps=3, release_file=str(release), grandchild=True)
    result = _count(work, request)

    assert result.pid == child_pid
    assert (work / "steps.txt").read_text().split() == ["0", "1", "2"]
    assert not is_running(int((work / "grandchild").read_text()))


def _release_with_failure(release: Path) -> None:
    unnamed = release.with_suffix(".new")
    unnamed.write_text("fail")
    unnamed.rename(release)


def test_a_child_of_a_killed_supervisor_that_fails_is_started_again(tmp_path: Path) -> None:
    """It may fail of what killed its supervisor, such as a rank that is gone."""
    work, release = tmp_path / "work", tmp_path / "release"
    child_pid = _start_and_kill_supervisor(work, release)

    threading.Timer(0.3, _release_with_failure, [release]).start()
    result = _count(work, CountRequest(steps=3, release_file=str(release), grandchild=True))

    assert release.read_text() == ""
    assert result.pid != child_pid
    assert result.steps_this_attempt == 0


def test_two_supervisors_of_a_child_that_fails_are_told_and_start_no_other(tmp_path: Path) -> None:
    work, release = tmp_path / "work", tmp_path / "release"
    supervisor = _start_supervisor(work, 3, release)
    child_pid = _pid(work)

    threading.Timer(0.5, _release_with_failure, [release]).start()
    with pytest.raises(EngineError, match="replica 3 is gone"):
        _count(work, CountRequest(steps=3, release_file=str(release), grandchild=True))

    assert supervisor.wait(20) != 0
    assert _pid(work) == child_pid


def test_killed_child_fails_and_the_next_call_resumes(tmp_path: Path) -> None:
    work, release = tmp_path / "work", tmp_path / "release"
    request = CountRequest(steps=4, release_file=str(release), grandchild=True)

    def kill_when_waiting() -> None:
        _await((work / "waiting").exists)
        os.kill(_pid(work), signal.SIGKILL)

    killer = threading.Thread(target=kill_when_waiting)
    killer.start()
    with pytest.raises(ClusterError, match="by signal 9"):
        _count(work, request)
    killer.join()
    assert not is_running(int((work / "grandchild").read_text()))
    release.touch()

    result = _count(work, request)
    assert (result.counted, result.steps_this_attempt) == (4, 0)
    assert (work / "steps.txt").read_text().split() == ["0", "1", "2", "3"]


def test_killed_supervisor_and_child_the_next_call_ends_leftovers_and_resumes(
    tmp_path: Path,
) -> None:
    work, release = tmp_path / "work", tmp_path / "release"
    supervisor = _start_supervisor(work, 2, release)
    for pid in (supervisor.pid, _pid(work)):
        os.kill(pid, signal.SIGKILL)
    supervisor.wait()
    orphan = int((work / "grandchild").read_text())
    assert is_running(orphan)
    release.touch()

    request = CountRequest(steps=2, release_file=str(release), grandchild=True)
    assert _count(work, request).steps_this_attempt == 0
    assert not is_running(orphan)


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_interrupted_supervisor_takes_the_whole_session_along(tmp_path: Path, number: int) -> None:
    work = tmp_path / "work"
    supervisor = _start_supervisor(work, 1, tmp_path / "never")
    child_pid, grandchild = _pid(work), int((work / "grandchild").read_text())
    supervisor.send_signal(number)
    supervisor.wait(timeout=200)

    assert not is_running(child_pid)
    assert not is_running(grandchild)


def _supervise_nested(home: Path, entry: str) -> tuple[subprocess.Popen[bytes], int]:
    """A supervisor of a child that supervises others, all at work, and the process id of that child."""
    work = home / "work"
    program = "tests.unit.infra.platform.cluster.supervisor_program"
    supervisor = subprocess.Popen(
        [sys.executable, "-m", program, str(work), "1", str(home / "never"), entry],
        env=os.environ | {"OSTINATO_HOME": str(home)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    for index in range(2 if entry == "nest" else 1):
        _await((work / f"nested{index}" / "waiting").exists)
    return supervisor, _pid(work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "of_supervisor", "of_child"),
    [
        ("nest", [signal.SIGTERM], []),
        ("nest", [signal.SIGINT, signal.SIGINT], []),
        ("nest", [signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM]),
        ("nest", [], [signal.SIGTERM]),
        ("nest", [], [signal.SIGKILL]),
        ("nest", [signal.SIGKILL], []),
        ("nest_alone", [signal.SIGKILL], [signal.SIGKILL]),
    ],
)
@pytest.mark.sampled(2)
def test_end_of_a_supervisor_or_its_child_ends_children_of_children(
    tmp_path: Path,
    entry: str,
    of_supervisor: list[signal.Signals],
    of_child: list[signal.Signals],
) -> None:
    """Sessions of their own, started by threads: a signal to the outer ones reaches all of them."""
    supervisor, child_pid = _supervise_nested(tmp_path, entry)
    assert len(of_home(tmp_path)) == (6 if entry == "nest" else 4)
    for number in of_child:
        os.kill(child_pid, number)
    for number in of_supervisor:
        supervisor.send_signal(number)
        time.sleep(0.5)
    supervisor.wait(30)
    is_killed = signal.SIGKILL in (*of_supervisor, *of_child)
    wait_for_end(lambda: of_home(tmp_path), 25 if is_killed else 10)


def test_live_child_of_another_request_is_not_disturbed(tmp_path: Path) -> None:
    work, release = tmp_path / "work", tmp_path / "release"
    supervisor = _start_supervisor(work, 1, release)
    with pytest.raises(ClusterError, match=f"process {_pid(work)} works in .* another request"):
        _count(work, CountRequest(steps=9))
    release.touch()

    assert supervisor.wait(timeout=200) == 0


def test_error_in_the_progress_callback_does_not_end_the_child(tmp_path: Path) -> None:
    def refuse(progress: Progress) -> None:
        raise ValueError(f"no more of {progress.done}")

    request = CountRequest(steps=3)
    result = run_child(
        _COUNT, request, CountResult, directory=tmp_path / "work", on_progress=refuse
    )
    assert result.steps_this_attempt == 3


def _share(work: Path, release: Path) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Two supervisors of one child; the first has started it."""
    first = _start_supervisor(work, 1, release)
    second = _start_supervisor(work, 1, release)
    _await(lambda: len(list((work / "owners").glob("[!.]*"))) == 2)
    return first, second


def test_stopped_supervisor_leaves_a_child_that_another_waits_for(tmp_path: Path) -> None:
    work, release = tmp_path / "work", tmp_path / "release"
    first, second = _share(work, release)
    child_pid = _pid(work)
    first.send_signal(signal.SIGINT)
    first.wait(timeout=200)
    assert is_running(child_pid)
    release.touch()
    assert second.wait(timeout=200) == 0
    assert not list((work / "owners").iterdir())


def test_killed_supervisor_keeps_no_child_alive(tmp_path: Path) -> None:
    work = tmp_path / "work"
    first, second = _share(work, tmp_path / "never")
    child_pid = _pid(work)
    first.kill()
    first.wait(timeout=200)
    second.send_signal(signal.SIGINT)
    second.wait(timeout=200)
    assert not is_running(child_pid)


def test_supervisor_that_cannot_say_it_waits_leaves_no_child(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "owners").write_text("a file where a folder is wanted")
    with pytest.raises(StorageError, match=r"starting a child in .*FileExistsError"):
        _count(work, CountRequest(steps=1, release_file=str(tmp_path / "never")))
    assert not is_running(_pid(work))


def test_stopped_child_is_ended_and_goes_on_when_called_again(tmp_path: Path) -> None:
    work, release = tmp_path / "work", tmp_path / "release"
    settings = Settings(home=tmp_path, heartbeat_limit_seconds=4.0)
    request = CountRequest(steps=3, release_file=str(release))

    def stop_it(progress: Progress) -> None:
        if progress.done == 3:
            os.kill(_pid(work), signal.SIGSTOP)

    with pytest.raises(ClusterError, match="no heartbeat of the child"):
        run_child(
            _COUNT, request, CountResult, directory=work, on_progress=stop_it, settings=settings
        )
    assert not is_running(_pid(work))
    release.touch()
    assert _count(work, request).steps_this_attempt == 0


def test_child_without_progress_is_ended(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, stall_limit_seconds=1.0)
    request = CountRequest(steps=1, release_file=str(tmp_path / "never"))
    with pytest.raises(ClusterError, match="no progress of the child"):
        run_child(_COUNT, request, CountResult, directory=tmp_path / "work", settings=settings)
    assert not is_running(_pid(tmp_path / "work"))


@pytest.mark.nightly
def test_live_child_of_another_host_is_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HEARTBEAT_LIMIT_SECONDS", "8")  # a beat every two seconds
    work, release = tmp_path / "work", tmp_path / "release"
    supervisor = _start_supervisor(work, 1, release)
    mark = read_record(work / "child.pid", ProcessMark)
    assert mark is not None
    other = mark.model_copy(update={"host": "another"})
    (work / "child.pid").write_text(other.model_dump_json())
    request = CountRequest(steps=1, release_file=str(release), grandchild=True)
    with pytest.raises(ClusterError, match="of host another works in"):
        _count(work, request)
    release.touch()
    assert supervisor.wait(timeout=200) == 0


def test_mark_of_an_earlier_boot_is_dead(tmp_path: Path) -> None:
    mark = mark_process(os.getpid())
    assert is_alive(mark)
    assert not is_alive(mark.model_copy(update={"boot_id": "before"}))


def test_a_child_that_is_ended_on_purpose_says_so_until_the_next_attempt(tmp_path: Path) -> None:
    directory, release = tmp_path / "work", tmp_path / "release"

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(
            _COUNT,
            CountRequest(steps=1, release_file=str(release)),
            CountResult,
            directory=directory,
            on_progress=stop,
        )
    ending = read_record(directory / ENDING, Ending)
    assert ending is not None
    assert (ending.is_error, ending.reason) == (False, "KeyboardInterrupt")

    release.touch()
    _count(directory, CountRequest(steps=1, release_file=str(release)))
    assert not (directory / ENDING).exists()
