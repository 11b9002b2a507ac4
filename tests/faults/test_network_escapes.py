"""What an agent with an allow-list tries in order to reach more than the list: each try is refused and recorded.

Servers of the test stand for the places outside. Names lead to them through the `dial` that the doors are given.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from ostinato.infra.sandbox.egress.config import Address, EgressConfig
from ostinato.infra.sandbox.egress.dialing import dial
from tests.fakes.local_index import NAME, WHEEL, LocalIndex, make_wheel, served_index
from tests.fakes.open_boxes import OpenBox, open_environment
from tests.fakes.outside import Outside, running_outside

TLS, PLAIN = Address("files.test", 443), Address("plain.test", 80)
ALLOWED = EgressConfig(allow=("files.test:443", "plain.test:80"))
FETCH = """
import sys, urllib.error, urllib.request
def fetch(url, method="GET", data=None):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=60) as answer:
            print(answer.status, answer.read().decode().strip())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except Exception as error:
        print(type(error).__name__, error)
"""
CONNECT = """
import socket, ssl, sys
def connect(target, name, send=b"GET / HTTP/1.0\\r\\n\\r\\n"):
    link = socket.create_connection(("127.0.0.1", 8791), timeout=60)
    link.sendall(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode())
    said = b""
    while b"\\r\\n\\r\\n" not in said and (piece := link.recv(4096)):
        said += piece
    if b" 200 " not in said:
        return print("refused", said.split()[1].decode())
    try:
        context = ssl._create_unverified_context()
        tls = context.wrap_socket(link, server_hostname=name) if name != "plain" else link
        tls.sendall(send)
        print("answer", tls.recv(4096).split(b"\\r\\n")[0].decode() or "nothing")
    except OSError as error:
        print("closed")
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    with running_outside(tmp_path_factory.mktemp("outside")) as outside:
        yield outside


@asynccontextmanager
async def box_with(config: EgressConfig, outside: Outside) -> AsyncIterator[OpenBox]:
    async with open_environment(config, dial=outside.dial) as open_box, open_box() as box:
        yield box


def reasons(box: OpenBox) -> list[str]:
    return [each.reason for each in box.requests]


@pytest.mark.asyncio
async def test_allowed_places_answer_and_nothing_else_leaves_the_box(outside: Outside) -> None:
    async with box_with(ALLOWED, outside) as box:
        said = await box.python(
            f"{CONNECT}{FETCH}"
            "connect('files.test:443', 'files.test')\n"
            "fetch('http://plain.test/')\nfetch('http://plain.test:80/?a=1', 'HEAD')\n"
            "for place in (('1.1.1.1', 53), ('169.254.169.254', 80), "
            f"('127.0.0.1', {outside.plain_port})):\n"
            "    try: socket.create_connection(place, timeout=3); print('open')\n"
            "    except OSError: print('closed')\n"
            "for kind in (socket.AF_PACKET, socket.AF_INET):\n"
            "    try: socket.socket(kind, socket.SOCK_RAW); print('open')\n"
            "    except OSError: print('closed')\n"
            "try: print(socket.getaddrinfo('files.test', 443))\n"
            "except OSError: print('closed')\n"
            "for server in ('8.8.8.8', '127.0.0.53'):\n"
            "    try: asked = socket.socket(type=socket.SOCK_DGRAM); asked.settimeout(2); "
            "asked.sendto(b'x', (server, 53)); print(asked.recv(99))\n"
            "    except OSError: print('closed')\n"
        )
    assert [line.strip() for line in said.splitlines()] == [
        "answer HTTP/1.0 200 OK",
        "200 plain",
        "200",
        *["closed"] * 8,
    ]
    assert [(each.method, each.host, each.path, each.allowed) for each in box.requests] == [
        ("CONNECT", "files.test:443", "", True),
        ("GET", "plain.test:80", "/", True),
        ("HEAD", "plain.test:80", "/?a=1", True),
    ]
    assert reasons(box) == ["", "", ""]
    assert box.requests[0].sent_bytes > 0


@pytest.mark.asyncio
async def test_closed_places_are_refused(outside: Outside) -> None:
    tries = {
        "fetch('http://closed.test/')": "403 refused: closed.test:80 is not in",
        "fetch('http://plain.test:81/')": "403 refused: plain.test:81 is not in",
        "fetch('http://plain.test@closed.test/')": "403 refused: plain.test@closed.test",
        "fetch('http://plain.test/', 'POST', b'secret')": "403 refused: method POST, wanted GET or HEAD",
        "fetch('http://plain.test/', 'GET', b'secret')": "403 refused: the request has a body",
        # a redirect is answered by the client itself, which asks again
        "fetch('http://plain.test/leads-to-closed')": "403 refused: closed.test:80 is not in",
        "connect('closed.test:443', 'closed.test')": "refused 403",
        "connect('127.0.0.1:443', 'files.test')": "refused 403",
        f"connect('127.0.0.1:{outside.tls_port}', 'files.test')": "refused 403",
        "connect('files.test:22', 'files.test')": "refused 403",
        "connect('files.test.:443', 'files.test')": "refused 403",
        "connect('files.test:443', 'closed.test')": "closed",
        "connect('files.test:443', None)": "closed",
        "connect('files.test:443', 'plain')": "answer nothing",  # no TLS
        "fetch('http://127.0.0.1:8791/simple/tiny-words/')": "403 refused: index is not in",
    }
    async with box_with(ALLOWED, outside) as box:
        said = await box.python("\n".join((CONNECT, FETCH, *tries)))
    lines = said.splitlines()
    assert len(lines) == len(tries), said
    for line, (asked, wanted) in zip(lines, tries.items(), strict=True):
        assert line.startswith(wanted), (asked, line)
    refused = [each for each in box.requests if each.reason]
    assert len(refused) == len(tries)
    assert not any(each.allowed for each in refused)
    assert any("TLS asks for closed.test, wanted files.test" in text for text in reasons(box))
    assert outside.asked_of_closed == 0


@pytest.mark.asyncio
async def test_literal_entry_reaches_this_machine_and_a_name_does_not(outside: Outside) -> None:
    port = outside.plain_port
    config = EgressConfig(allow=(f"127.0.0.1:{port}", f"localhost:{port}"))
    async with open_environment(config, dial=dial) as open_box, open_box() as box:
        # the variables of the box leave out its own loopback, as it must for the forwarder
        said = await box.python(
            f"import os; del os.environ['no_proxy'], os.environ['NO_PROXY']\n{FETCH}"
            f"fetch('http://127.0.0.1:{port}/')\nfetch('http://localhost:{port}/')\n"
        )
    first, second = said.splitlines()
    assert first == "200 plain"
    assert second.startswith("403 refused: localhost leads to 127.0.0.1, which is not public")


@pytest.mark.asyncio
async def test_slow_bodies_and_idle_tunnels_end(outside: Outside) -> None:
    config = ALLOWED.model_copy(update={"request_seconds": 4.0, "idle_seconds": 1.5})
    async with box_with(config, outside) as box:
        said = await box.python(
            f"{CONNECT}{FETCH}fetch('http://plain.test/drips')\nfetch('http://plain.test/silent')\n"
            "connect('files.test:443', 'files.test', b'x')\n"
            "link = socket.create_connection(('127.0.0.1', 8791)); print('end', link.recv(99)[9:12])\n"
        )
    lines = said.splitlines()
    assert lines[0].startswith("IncompleteRead"), said
    assert lines[1].startswith(("502", "IncompleteRead", "RemoteDisconnected")), said
    assert lines[2] in ("closed", "answer nothing")
    assert len(reasons(box)) == 4
    assert all("in time" in text for text in reasons(box)), reasons(box)


@pytest.mark.asyncio
async def test_answers_and_attempts_have_no_more_bytes_than_allowed(outside: Outside) -> None:
    config = ALLOWED.model_copy(update={"max_answer_bytes": 200_000, "max_attempt_bytes": 500_000})
    async with box_with(config, outside) as box:
        said = await box.python(
            f"{CONNECT}{FETCH}fetch('http://plain.test/endless')\n"
            + "fetch('http://plain.test/large')\n" * 5
        )
    assert any("larger than 200000 bytes" in text for text in reasons(box))
    assert any("has used its 500000 bytes" in text for text in reasons(box))
    assert sum(each.received_bytes for each in box.requests) < 500_000 + 70_000
    assert said.splitlines()[-1] == "403 refused: the attempt has used its 500000 bytes"


@pytest.mark.asyncio
async def test_index_serves_no_file_over_the_cap_or_of_another_checksum_or_place(
    monkeypatch: pytest.MonkeyPatch, outside: Outside
) -> None:
    config = EgressConfig(allow=("index",), max_answer_bytes=100_000)
    get = f"""
import os, re
index = os.environ["PIP_INDEX_URL"]
page = urllib.request.urlopen(f"{{index}}/{NAME}/").read().decode()
fetch(index.removesuffix("/simple") + re.search('href="([^"#]+)', page)[1])
fetch(index.removesuffix("/simple") + "/files/../../etc/passwd")
fetch(index.removesuffix("/simple") + "/files/tiny-words/" + "0" * 32 + "/x.whl")
fetch(f"{{index}}/no-such-package/")
"""

    async def ask(box: OpenBox) -> list[str]:
        return [line.partition(" ")[0] for line in (await box.python(FETCH + get)).splitlines()]

    for wheel, link in (
        (make_wheel(extra_bytes=200_000), ""),
        (make_wheel(), f"http://127.0.0.1:{outside.plain_port}/{WHEEL}"),
    ):
        with served_index(monkeypatch, wheel, link):
            async with box_with(config, outside) as box:
                assert await ask(box) == ["502", "403", "404", "404"]
    with served_index(monkeypatch) as index:
        index.answers[f"/files/{WHEEL}"] = (200, {}, b"another")
        async with box_with(config, outside) as box:
            assert await ask(box) == ["502", "403", "404", "404"]
    with served_index(monkeypatch) as index:
        redirect_to_file(index)
        async with box_with(config, outside) as box:
            assert await ask(box) == ["502", "403", "404", "404"]


def redirect_to_file(index: LocalIndex) -> None:
    index.answers[f"/files/{WHEEL}"] = (302, {"Location": "file:///etc/passwd"}, b"")


@pytest.mark.asyncio
async def test_access_ends_with_the_attempt(outside: Outside) -> None:
    async with open_environment(ALLOWED, dial=outside.dial) as open_box:
        async with open_box() as first:
            source = first.door.mounts["/egress.sock"]
            await first.shell("cp -a /egress.sock /repo/kept 2>&1; ln -s /egress.sock /repo/link")
            changed = await first.sandbox.diff()
        assert not source.exists()
        async with open_box() as second:
            said = await second.python(
                f"{CONNECT}import glob\n"
                "for path in glob.glob('/repo/*') + glob.glob('/*.sock') + glob.glob('/proc/*/r*t/*.sock'):\n"
                "    try: link = socket.socket(socket.AF_UNIX); link.connect(path); print('open', path)\n"
                "    except OSError: pass\n"
                "connect('files.test:443', 'files.test')\n"
            )
            assert {line for line in said.splitlines() if "/proc" not in line} == {
                "open /egress.sock",
                "answer HTTP/1.0 200 OK",
            }
            assert first.requests == []
            assert [each.allowed for each in second.requests if each.method] == [True]
        assert changed == {}


@pytest.mark.asyncio
async def test_open_connections_end_with_the_attempt(outside: Outside) -> None:
    async with open_environment(ALLOWED, dial=outside.dial) as open_box:
        outside.is_dripping.clear()
        async with open_box() as box:
            held = asyncio.create_task(box.python(f"{FETCH}fetch('http://plain.test/drips')"))
            while not outside.is_dripping.is_set():
                await asyncio.sleep(0.05)
        assert len(reasons(box)) == 1
        assert box.requests[0].reason != ""
        await asyncio.gather(held, return_exceptions=True)


@pytest.mark.asyncio
async def test_floods_of_connections_are_bounded(outside: Outside) -> None:
    async with box_with(ALLOWED, outside) as box:
        said = await box.python(
            f"{CONNECT}links = [socket.create_connection(('127.0.0.1', 8791)) for _ in range(60)]\n"
            "import time; time.sleep(2)\n"
            "open_ones = 0\n"
            "for link in links:\n"
            "    link.setblocking(False)\n"
            "    try: link.recv(1)\n"
            "    except BlockingIOError: open_ones += 1\n"
            "    except OSError: pass\n"
            "print(open_ones)\n"
            "for link in links: link.close()\n"
            "time.sleep(1)\nconnect('files.test:443', 'files.test')\n"
        )
    count, answer = said.splitlines()
    assert int(count) <= 32
    assert answer == "answer HTTP/1.0 200 OK"
