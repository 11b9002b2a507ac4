"""E2B's own SDK against a server process with real boxes. Run by `.ci/sdk`, which installs the SDK."""

import io
import os
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.fakes.sandbox_server import ROOT, SandboxServer, serving

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    with serving(tmp_path_factory.mktemp("home"), "--warm", "2") as server:
        names = {
            "E2B_API_URL": server.address,
            "E2B_SANDBOX_URL": server.address,
            "E2B_API_KEY": server.key,
        }
        os.environ.update(names)
        yield server
        for name in names:
            del os.environ[name]


@pytest.fixture
def sandbox(server: SandboxServer) -> Iterator[Any]:
    from e2b import Sandbox

    made = Sandbox.create(timeout=300, envs={"A": "1"}, metadata={"of": "test"})
    yield made
    made.kill()


def test_the_guides_client_works(server: SandboxServer, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs/serving.md").read_text()
    block = re.search(r"```python\n(from e2b import .*?)```", guide, re.DOTALL)
    assert block is not None
    exec(block[1], {})
    assert capsys.readouterr().out == "42\n"


def test_commands(sandbox: Any) -> None:
    from e2b import CommandExitException, NotFoundException, TimeoutException

    done = sandbox.commands.run("echo $A; pwd; echo no >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("1\n/repo\n", "no\n", 0)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo out; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "out\n")
    with pytest.raises(TimeoutException, match="timeout"):
        sandbox.commands.run("sleep 30", timeout=1)
    heard: list[str] = []
    sandbox.commands.run("printf a; sleep 0.3; printf b", on_stdout=heard.append)
    assert heard == ["a", "b"]
    assert sandbox.commands.run("pwd", cwd="/tmp", envs={"A": "2"}).stdout == "/tmp\n"
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(9_999)


def test_commands_in_the_background(sandbox: Any) -> None:
    from e2b import CommandExitException

    reader = sandbox.commands.run("cat", background=True, stdin=True)
    assert reader.pid in [each.pid for each in sandbox.commands.list()]
    reader.send_stdin("one\n")
    sandbox.commands.send_stdin(reader.pid, b"two\n")
    reader.close_stdin()
    assert reader.wait().stdout == "one\ntwo\n"
    sleeper = sandbox.commands.run("sleep 300", background=True)
    assert sleeper.kill()
    with pytest.raises(CommandExitException):
        sleeper.wait()
    assert not sandbox.commands.kill(sleeper.pid)
    late = sandbox.commands.run("sleep 1; echo late", background=True)
    late.disconnect()
    assert sandbox.commands.connect(late.pid).wait().stdout == "late\n"


def test_files(sandbox: Any) -> None:
    from e2b import FileNotFoundException, FileType, InvalidArgumentException

    content = os.urandom(3 << 20)
    assert sandbox.files.write("folder/a", "text").path == "/repo/folder/a"
    assert sandbox.files.read("/home/user/folder/a") == "text"
    sandbox.files.write("b", content)
    assert sandbox.files.read("b", format="bytes") == content
    sandbox.files.write("c", io.BytesIO(content))
    assert b"".join(sandbox.files.read("c", format="stream")) == content
    odd = {'folder/"odd" name': b"\r\n--x\0\xff", "folder/empty": b""}
    sandbox.files.write_files([{"path": name, "data": data} for name, data in odd.items()])
    assert {name: sandbox.files.read(name, format="bytes") for name in odd} == odd
    assert [each.name for each in sandbox.files.list("folder")] == ['"odd" name', "a", "empty"]
    about = sandbox.files.get_info("folder/a")
    assert (about.type, about.size, about.owner) == (FileType.FILE, 4, "user")
    assert sandbox.files.rename("folder/a", "new/place").path == "/repo/new/place"
    assert (sandbox.files.make_dir("made"), sandbox.files.make_dir("made")) == (True, False)
    sandbox.files.remove("new")
    assert not sandbox.files.exists("new/place")
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("none")
    with pytest.raises(FileNotFoundException):
        sandbox.files.list("none")
    with pytest.raises(InvalidArgumentException, match="is not a file"):
        sandbox.files.read("folder")
    with pytest.raises(InvalidArgumentException, match="root"):
        sandbox.files.read("b", user="root")


def test_a_file_over_the_limit_is_refused(sandbox: Any) -> None:
    from e2b import NotEnoughSpaceException

    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("big", io.BytesIO(bytes(65 << 20)))


def test_control_of_sandboxes(sandbox: Any) -> None:
    from e2b import Sandbox, SandboxNotFoundException, SandboxQuery, SandboxState

    about = sandbox.get_info()
    assert (about.template_id, about.metadata, about.state) == (
        "base",
        {"of": "test"},
        SandboxState.RUNNING,
    )
    query = SandboxQuery(metadata={"of": "test"}, state=[SandboxState.RUNNING])
    assert [each.sandbox_id for each in Sandbox.list(query=query).next_items()] == [
        sandbox.sandbox_id
    ]
    sandbox.set_timeout(3_000)
    assert (sandbox.get_info().end_at - about.end_at).total_seconds() > 2_000
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.is_running()
    assert (again.kill(), sandbox.kill()) == (True, False)
    assert not sandbox.is_running()
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()


def test_a_sandbox_that_ended_is_named_as_one(server: SandboxServer) -> None:
    from e2b import AuthenticationException, Sandbox, SandboxException, TimeoutException

    short = Sandbox.create(timeout=5)
    with pytest.raises(TimeoutException, match="was not found"):
        short.commands.run("sleep 60")
    with pytest.raises(TimeoutException, match="was not found"):
        short.files.read("a")
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)
    with pytest.raises(SandboxException, match="template 'none' was not found"):
        Sandbox.create("none")


def test_pause_and_resume(sandbox: Any) -> None:
    from e2b import TimeoutException

    sleeper = sandbox.commands.run("echo > /tmp/kept; sleep 300", background=True)
    assert (sandbox.pause(), sandbox.pause()) == (True, False)
    with pytest.raises(TimeoutException, match="it is paused"):
        sandbox.commands.run("true")
    assert not sandbox.is_running()
    sandbox.connect(timeout=60)
    assert sleeper.pid in [each.pid for each in sandbox.commands.list()]
    assert sandbox.files.exists("/tmp/kept")


def test_snapshots_and_forks(sandbox: Any) -> None:
    from e2b import Sandbox, SandboxException

    sandbox.files.write("kept", "before")
    saved = sandbox.create_snapshot()
    sandbox.files.write("kept", "after")
    assert [each.snapshot_id for each in sandbox.list_snapshots().next_items()] == [
        saved.snapshot_id
    ]
    other = Sandbox.create(saved.snapshot_id)
    assert other.files.read("kept") == "before"
    assert Sandbox.delete_snapshot(saved.snapshot_id)
    assert not Sandbox.delete_snapshot(saved.snapshot_id)
    assert other.files.read("kept") == "before"
    twins = sandbox.fork(count=2)
    assert [each.files.read("kept") for each in twins] == ["after", "after"]
    assert twins[0].commands.run("echo $A").stdout == "1\n"
    with pytest.raises(SandboxException, match="holds files alone"):
        sandbox.create_snapshot(mode="full")
    for each in (other, *twins):
        each.kill()


def test_signed_addresses(sandbox: Any) -> None:
    sandbox.files.write("a b", "text")
    assert httpx2.get(sandbox.download_url("a b", use_signature_expiration=60)).text == "text"
    sent = httpx2.post(sandbox.upload_url("up/c"), files={"file": b"sent"})
    assert sent.status_code == 200
    assert sandbox.files.read("up/c") == "sent"
    assert httpx2.get(sandbox.upload_url("a b")).status_code == 401


@pytest.mark.asyncio
async def test_the_client_for_asyncio(server: SandboxServer) -> None:
    from e2b import AsyncSandbox

    sandbox = await AsyncSandbox.create(timeout=60)
    done = await sandbox.commands.run("echo $((6 * 7))")
    assert done.stdout == "42\n"
    await sandbox.files.write("a", "text")
    assert await sandbox.files.read("a") == "text"
    assert await sandbox.kill()
