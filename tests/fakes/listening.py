"""Everything that a group of processes listens on, and what strangers get from it: foreign web pages, names that
resolve to this machine, and users of the machine without a secret.
"""

import json
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

EVIL = "http://evil.example"
# answers that say nothing of a home: whether a server lives, its schema, and pages without data
PUBLIC = ("/", "/api/health", "/api/ready", "/ui-settings", "/healthz", "/openapi.json", "/docs")
PATHS = (
    *PUBLIC,
    "/api/admin/settings",
    "/api/admin/version",
    "/api/flow_runs/filter",
    "/api/deployments/filter",
    "/api/logs/filter",
    "/api/block_documents/filter",
    "/api/csrf-token?client=evil",
    "/snapshot",
    "/events",
    "/reports/",
    "/reports/one/report.html",
    "/metrics",
    "/v1/models",
    "/api/jobs/",
    "/api/version",
    "/get_or_create_runtime_env",
    "/delete_runtime_env_if_possible",
    "/get_runtime_envs_info",
)


@dataclass(frozen=True)
class Listener:
    """A listening socket."""

    address: tuple[str, int] | str
    pid: int
    command: str

    @property
    def port(self) -> int:
        """0 of one in the file system."""
        return 0 if isinstance(self.address, str) else self.address[1]


def family(*roots: int, home: Path | None = None) -> set[int]:
    """Processes, all below them, and all that were told of a home."""
    found = set(roots)
    for root in roots:
        found |= {one.pid for one in psutil.Process(root).children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if home is not None and process.environ().get("OSTINATO_HOME") == str(home):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Sockets that take connections or datagrams, of every family."""
    wanted, found = set(pids), []
    for one in psutil.net_connections("all"):
        is_local = one.family == socket.AF_UNIX
        takes = one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and one.laddr)
        if one.pid in wanted and (bool(one.laddr) if is_local else takes):
            command = " ".join(psutil.Process(one.pid).cmdline())
            address = one.laddr if is_local else tuple(one.laddr)
            found.append(Listener(address, one.pid, command))
    return found


def exposed(found: Iterable[Listener]) -> list[Listener]:
    """Those that somebody else than this user can connect to, beside programs of this machine by 127.0.0.1."""
    loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    return [
        one
        for one in found
        if (
            not _is_private(Path(one.address))
            if isinstance(one.address, str)
            else one.address[0] not in loopback
        )
    ]


def _is_private(path: Path) -> bool:
    """Whether a folder above the socket, if it is in the file system, keeps others out."""
    if not path.is_absolute():
        return False
    return any(
        folder.stat().st_uid == os.geteuid()
        and not folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        for folder in path.parents
    )


def given_away(port: int, marks: Iterable[str]) -> Iterator[str]:
    """What a stranger without a secret gets from a port that he should not: answers that a foreign page may read, to
    a foreign name, beyond those of `PUBLIC`, or that hold one of the marks.
    """
    words = tuple(marks)
    origins = {"origin": EVIL, "referer": f"{EVIL}/page"}
    preflight = {
        **origins,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
        "access-control-request-private-network": "true",
    }
    names = (f"127.0.0.1:{port}", f"evil.example:{port}")
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        if not _speaks_http(client):
            return
        for path in PATHS:
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                for name in names:
                    headers = {"host": name, **(preflight if method == "OPTIONS" else origins)}
                    body = {} if method in ("GET", "OPTIONS") else {"content": json.dumps({})}
                    try:
                        with client.stream(method, path, headers=headers, **body) as answer:
                            text = next(answer.iter_text(65_536), "") if answer.is_success else ""
                            where = f"{method} {path} as {name}: {answer.status_code}"
                    except httpx2.RemoteProtocolError:
                        continue  # it hangs up
                    if any(word in text for word in words):
                        yield f"{where} tells {text[:200]}"
                    if answer.headers.get("access-control-allow-origin") in ("*", EVIL):
                        yield f"{where} lets {EVIL} read it"
                    is_public = method in ("GET", "OPTIONS") and path in PUBLIC
                    if answer.is_success and not is_public:
                        yield f"{where} answers without a secret: {text[:80]!r}"


def _speaks_http(client: httpx2.Client) -> bool:
    try:
        client.get("/", timeout=5)  # a port of another protocol may say nothing
    except httpx2.HTTPError:
        return False
    return True
