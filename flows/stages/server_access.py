"""Access to the Prefect server of a home: its login, and a client that uses it.

The server, its clients and the dashboard share one login. It is generated once and stored in a file that
only its owner can read. Processes receive it in their environment, never as an argument.
"""

import base64
import contextlib
import os
import secrets
import stat
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import psutil

from ostinato.infra.platform.cluster.processes import processes_with
from ostinato.infra.platform.errors import ConfigError, StorageError, boundary
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.gateway.issued_keys import locked, write_private

LOGIN_FILE = "prefect_login"
USER = "ostinato"
SERVER_MODULE = "ostinato.flows.operating.prefect_server"
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LOOPBACK = ("127.0.0.1", "::ffff:127.0.0.1", "0.0.0.0", "::")


class ServerAccess(NamedTuple):
    """Address of a Prefect server's API, and user:password if it requires them."""

    url: str
    login: str | None = None


def read_login(home: Path) -> str:
    """user:password of the home's Prefect server and dashboard, generated when there is none yet."""
    path = home / LOGIN_FILE
    with boundary(StorageError, f"the login of the Prefect server in {path}"):
        if not path.exists():
            home.mkdir(parents=True, exist_ok=True)
            with locked(path):  # several first starts may race
                if not path.exists():
                    write_private(path, f"{USER}:{secrets.token_urlsafe(24)}\n".encode())
        mode, login = path.stat().st_mode, path.read_text().strip()
    if mode & _OPEN_TO_OTHERS:
        raise ConfigError(
            f"{path} has mode {stat.filemode(mode)} and others may know the login of the Prefect server, "
            "wanted -rw-------: end `ostinato up` and delete the file; a new login is generated"
        )
    return login


def is_own_server(port: int, home: Path) -> bool:
    """Whether the Prefect server of this home listens on a port of this machine. The kernel names the owner of the
    listening process, so nothing is sent to somebody else's server.
    """
    found = listener(port)
    own = processes_with("PREFECT_HOME", str(prefect_home(home)), (SERVER_MODULE,))
    with contextlib.suppress(psutil.NoSuchProcess):
        return found is not None and found.uids().effective == os.geteuid() and found.pid in own
    return False


def prefect_home(home: Path) -> Path:
    """Directory of the files of the home's Prefect processes."""
    return home.resolve() / "prefect"


def listener(port: int) -> psutil.Process | None:
    """The process that accepts connections to a port of 127.0.0.1. None when it cannot be seen."""
    for found in psutil.net_connections("tcp"):
        accepts = found.laddr in [(address, port) for address in _LOOPBACK]
        if accepts and found.status == psutil.CONN_LISTEN and found.pid:
            with contextlib.suppress(psutil.Error):
                return psutil.Process(found.pid)
    return None


def own_access(settings: Settings, port: int) -> ServerAccess:
    """Access to the home's own server on a port."""
    return ServerAccess(f"http://127.0.0.1:{port}/api", read_login(settings.home))


def basic_header(login: str) -> str:
    """The value of the Authorization header for a login."""
    return f"Basic {base64.b64encode(login.encode()).decode()}"


def open_api(access: ServerAccess, timeout: float = 30.0) -> httpx2.Client:
    """A client of a Prefect server's API."""
    return httpx2.Client(base_url=access.url, timeout=timeout, auth=_Login(access))


def ask(api: httpx2.Client, path: str, body: Mapping[str, Any]) -> Any:
    """The server's answer to a question with a body. httpx2.HTTPStatusError when it refuses."""
    return api.post(path, json=body).raise_for_status().json()


class _Login(httpx2.Auth):
    """Basic authentication, and the CSRF token that a protected server requires with each change."""

    requires_response_body = True

    def __init__(self, access: ServerAccess) -> None:
        self._url = access.url.rstrip("/")
        self._client, self._token = uuid.uuid4().hex, ""
        self._headers = {"Authorization": basic_header(access.login)} if access.login else {}

    def auth_flow(
        self, request: httpx2.Request
    ) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Adds login and token to a request. A change refused with an expired token is sent again with a new one."""
        request.headers.update(self._headers)
        if request.method == "GET":
            yield request
            return
        for _ in range(2):
            if not self._token:
                query = {"client": self._client}
                token_request = httpx2.Request(
                    "GET", f"{self._url}/csrf-token", params=query, headers=self._headers
                )
                reply = yield token_request
                if reply.status_code == httpx2.codes.UNAUTHORIZED:
                    return
                self._token = reply.json()["token"] if reply.is_success else ""
            request.headers.update(
                {"Prefect-Csrf-Client": self._client, "Prefect-Csrf-Token": self._token}
            )
            answer = yield request
            if answer.status_code != httpx2.codes.FORBIDDEN:
                return
            self._token = ""
