"""`ostinato chat` with a server that is not ours: which key it sends, and what a small server answers."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ostinato.infra.platform.cluster.processes import processes_with
from tests.fakes.toy_gateway import toy_repository

KEY = "key-of-the-stub"
LARGEST_ANSWER_TOKENS = 4096
CHAT = (sys.executable, "-c", "from ostinato.flows.cli import main; main()", "chat")
ANSWER = {"role": "assistant", "content": "It is well."}


def argument_lists() -> Iterator[bytes]:
    """Those of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:  # it has ended
            continue


class SmallServer(http.server.BaseHTTPRequestHandler):
    """Lists one model to who has the key, and refuses answers beyond its context."""

    keys: ClassVar[list[str | None]] = []
    is_key_shown: ClassVar[bool] = False
    asked: ClassVar[threading.Event] = threading.Event()
    may_answer: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        key = self.headers["Authorization"]
        self.keys.append(key)
        type(self).is_key_shown |= any(KEY.encode() in words for words in argument_lists())
        self._say(200 if key == f"Bearer {KEY}" else 401, {"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("max_tokens", 1) > LARGEST_ANSWER_TOKENS:
            return self._say(400, {"error": {"message": "maximum context length is 4096 tokens"}})
        self.asked.set()
        self.may_answer.wait(60)
        choice = {"index": 0, "message": ANSWER, "finish_reason": "stop"}
        return self._say(200, {"choices": [choice], "usage": {"total_tokens": 9}})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        written = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)


@pytest.fixture
def url() -> Iterator[str]:
    SmallServer.keys, SmallServer.is_key_shown = [], False
    SmallServer.asked.clear()
    SmallServer.may_answer.set()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SmallServer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def chat(directory: Path, url: str, *options: str, **variables: str) -> subprocess.CompletedProcess:
    repository = toy_repository(directory / "repository").directory
    given = ("--repo", str(repository), "--gateway", url, "--message", "Is first well?")
    inherited = {name: text for name, text in os.environ.items() if not name.endswith("_API_KEY")}
    return subprocess.run(
        (*CHAT, *given, *options),
        env={**inherited, "OSTINATO_HOME": str(directory / "home"), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ((), {"OSTINATO_API_KEY": KEY, "OPENAI_API_KEY": "another"}),
        (("--key-env", "OPENAI_API_KEY"), {"OPENAI_API_KEY": KEY, "OSTINATO_API_KEY": "another"}),
    ],
    ids=["default", "named"],
)
@pytest.mark.sampled(1)
def test_a_key_of_the_environment_opens_a_small_server(
    tmp_path: Path, url: str, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    done = chat(tmp_path, url, *options, **variables)
    assert done.returncode == 0, done.stderr
    assert "It is well." in done.stdout
    assert SmallServer.keys == [f"Bearer {KEY}"]
    assert not SmallServer.is_key_shown


def test_keys_that_nobody_named_are_not_sent(tmp_path: Path, url: str) -> None:
    assert chat(tmp_path, url, OPENAI_API_KEY=KEY).returncode == 2
    done = chat(tmp_path, url, "--key-env", "NO_SUCH_KEY", OSTINATO_API_KEY=KEY)
    assert done.returncode == 2
    assert "NO_SUCH_KEY is not set, wanted a key in it" in done.stderr
    done = chat(tmp_path, url, "--key-env", "NO_SUCH_KEY", "--api-key", "given")
    assert "wanted either --api-key or --key-env" in done.stderr
    assert SmallServer.keys == [None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.sampled(1)
def test_a_closed_terminal_leaves_no_copy_of_the_repository_and_no_process(
    tmp_path: Path, url: str, number: signal.Signals
) -> None:
    repository = toy_repository(tmp_path / "repository").directory
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    scratch.mkdir()
    SmallServer.may_answer.clear()
    given = ("--repo", str(repository), "--gateway", url, "--message", "Is first well?")
    places = {"OSTINATO_HOME": str(home), "TMPDIR": str(scratch), "OSTINATO_API_KEY": KEY}
    process = subprocess.Popen(
        (*CHAT, *given),
        env={**os.environ, **places},
        stdin=subprocess.DEVNULL,
        # below nohup it is ignored, and a chat keeps that
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        assert SmallServer.asked.wait(60)
        assert len(list(scratch.glob("ostinato-chat-*"))) == 1
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    finally:
        process.kill()
        SmallServer.may_answer.set()
    assert list(scratch.glob("ostinato-chat-*")) == []
    assert list(processes_with("OSTINATO_HOME", str(home))) == []
    assert not any(str(scratch).encode() in words for words in argument_lists())
