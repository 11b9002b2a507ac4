"""The way from an agent's box to the network: a socket and a proxy for each attempt, open as long as the attempt.

Nothing listens on a network of this machine. In the box, a forwarder makes the socket a port of the box's own loopback,
which variables name to pip, npm, curl and others.
"""

import asyncio
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ostinato.infra.platform.errors import ConfigError, SandboxError
from ostinato.infra.platform.packages import read_pip_settings
from ostinato.infra.sandbox.egress.config import EgressConfig, NetworkRequest
from ostinato.infra.sandbox.egress.dialing import dial
from ostinato.infra.sandbox.egress.mirror import IndexMirror
from ostinato.infra.sandbox.egress.proxy import AttemptProxy, Dial
from ostinato.infra.sandbox.host.system import PACKAGES, SEARCH_PATH, forwarding_command
from ostinato.infra.sandbox.memory import key_of, prepare
from ostinato.infra.sandbox.protocol import Sandbox

SOCKET = "/egress.sock"  # in boxes
PORT = 8791  # on a box's own loopback
_URL = f"http://127.0.0.1:{PORT}"
_CERTIFICATES = "certificates.pem"
_PIP = '#!/bin/sh\nexec python3 -m pip "$@"\n'
_READY = "/run/egress"
_START_SECONDS = 30.0
_DAY_SECONDS = 86_400.0


class Door:
    """The network of one attempt. It is closed when the attempt ends."""

    def __init__(self, socket_path: Path, site: Path, variables: Mapping[str, str]) -> None:
        """`site`: folder of certificates and pip. `variables`: by which programs in the box find the network."""
        self.mounts: Mapping[str, Path] = {SOCKET: socket_path, PACKAGES: site}
        self.variables = variables

    @asynccontextmanager
    async def forwarded(self, sandbox: Sandbox) -> AsyncIterator[None]:
        """Runs the forwarder in the attempt's box for the length of the block."""
        command = forwarding_command(SOCKET, PORT, f": > {_READY}; exec sleep infinity")
        forwarding = asyncio.create_task(sandbox.exec(command, _DAY_SECONDS))
        try:
            wait = f"until [ -e {_READY} ]; do sleep 0.02; done"
            if (await sandbox.exec(wait, _START_SECONDS)).exit_code:
                raise SandboxError(
                    f"box {sandbox.sandbox_id}: the network's forwarder did not start"
                )
            yield
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)


class Doors:
    """Doors of all attempts of one process. Belongs to its event loop."""

    def __init__(self, config: EgressConfig, dial: Dial = dial) -> None:
        """`dial` connects to allowed addresses. ConfigError when pip's settings cannot be used."""
        self._config, self._dial = config, dial
        self._site, self._variables = _prepare_site(config), _variables(config)
        self._mirror = IndexMirror(config) if config.has_index else None
        self._folder = Path(tempfile.mkdtemp(prefix="ostinato-egress-"))
        self._numbers = iter(range(1 << 62))

    @asynccontextmanager
    async def open(
        self, attempt: str, closed_packages: Collection[str], requests: list[NetworkRequest]
    ) -> AsyncIterator[Door]:
        """A door of an attempt. `closed_packages`: names of the packages that its problem was made from. `requests`
        gets a record of each request when it ends.
        """
        config = self._config
        proxy = AttemptProxy(attempt, config, self._mirror, closed_packages, requests, self._dial)
        path = self._folder / f"{next(self._numbers)}.sock"
        server = await asyncio.start_unix_server(proxy.serve, path)
        try:
            yield Door(path, self._site, self._variables)
        finally:
            server.close()
            await proxy.close()
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the mirror's files."""
        if self._mirror is not None:
            self._mirror.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def packages_of_pip() -> frozenset[str]:
    """Names of the packages inside pip, which every box with an index can read."""
    return frozenset(path.stem for path in (_pip_folder() / "_vendor").iterdir()) | {"pip"}


def _pip_folder() -> Path:
    found = find_spec("pip")
    if found is None or found.origin is None:
        raise ConfigError("pip is not installed, wanted it for sandbox.egress.allow")
    return Path(found.origin).parent


def _prepare_site(config: EgressConfig) -> Path:
    """Folder with certificates and, for an index, this environment's pip. Boxes have none of their own."""
    pip = _pip_folder()
    given = read_pip_settings().get("cert") or pip / "_vendor" / "certifi" / "cacert.pem"
    certificates = Path(given)

    def fill(folder: Path) -> None:
        shutil.copyfile(certificates, folder / _CERTIFICATES)
        if config.has_index:
            information = pip.with_name(f"pip-{version('pip')}.dist-info")
            for source in (pip, information):
                left_out = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / source.name, ignore=left_out)
            for name in ("pip", "pip3"):
                program = folder / "bin" / name
                program.parent.mkdir(exist_ok=True)
                program.write_text(_PIP)
                program.chmod(0o755)

    try:
        changed_at = str(certificates.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"pip's setting cert is {given}, wanted a file: {error}") from None
    return prepare(
        "egress", key_of(version("pip"), str(config.has_index), str(certificates), changed_at), fill
    )


def _variables(config: EgressConfig) -> dict[str, str]:
    """Variables by which programs find the proxy, the mirror and certificates."""
    given = (
        ("http_proxy HTTP_PROXY https_proxy HTTPS_PROXY", _URL),
        ("no_proxy NO_PROXY", "127.0.0.1,localhost"),
        (
            "SSL_CERT_FILE CURL_CA_BUNDLE REQUESTS_CA_BUNDLE NODE_EXTRA_CA_CERTS",
            f"{PACKAGES}/{_CERTIFICATES}",
        ),
    )
    found = {name: value for names, value in given for name in names.split()}
    if config.has_index:
        found |= {
            "PATH": f"{PACKAGES}/bin:/tmp/.local/bin:{SEARCH_PATH}",
            "PIP_INDEX_URL": f"{_URL}/simple",
            "UV_DEFAULT_INDEX": f"{_URL}/simple",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_BREAK_SYSTEM_PACKAGES": "1",
        }
    return found
