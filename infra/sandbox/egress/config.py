"""Settings of the network that agents' boxes may reach, and the record of one request to it."""

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from ostinato.infra.platform.record import Record

INDEX = "index"  # entry for the package index of the machine's pip settings
_HOST = re.compile(r"(?!-)[a-z0-9-]+(\.[a-z0-9-]+)*")


class Address(NamedTuple):
    """A host as written, in lower case, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """The address of HOST:PORT or [IPV6]:PORT. ValueError for anything else."""
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port
        is_whole = text.lower() in (f"{host}:{port}", f"[{host}]:{port}")
        if not port or not is_whole or not (_HOST.fullmatch(host) or _is_literal(host)):
            raise ValueError(f"{text!r} is no address, wanted HOST:PORT")
        return cls(host, port)

    @property
    def is_literal(self) -> bool:
        """Whether the host is written as an IP address."""
        return _is_literal(self.host)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class EgressConfig(Record):
    """Network of agents' boxes in rollouts and evaluations. Boxes that judge have none."""

    allow: tuple[str, ...] = ()
    """places that a box may reach through a proxy outside of it. index: the package index of this machine's pip
    settings, so that `pip install` works; HOST:PORT: TLS to exactly this host, or plain HTTP by GET and HEAD; empty:
    boxes have no network"""
    max_answer_bytes: PositiveInt = Field(
        default=256 << 20, description="largest answer to one request"
    )
    max_attempt_bytes: PositiveInt = Field(
        default=1 << 30, description="bytes that one attempt may send and receive"
    )
    request_seconds: PositiveFloat = 300.0
    """longest time of one request, or of one TLS connection"""
    idle_seconds: PositiveFloat = 30.0
    """time without a byte after which a request ends"""

    @field_validator("allow")
    @classmethod
    def _known_entries(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for entry in allow:
            try:
                if entry != INDEX:
                    Address.parse(entry)
            except ValueError:
                raise ValueError(
                    f"allow names {entry!r}, wanted 'index' or HOST:PORT without a scheme, path or wildcard, "
                    "such as 'files.example.org:443'"
                ) from None
        return allow

    @property
    def has_index(self) -> bool:
        """Whether boxes reach the package index."""
        return INDEX in self.allow

    @property
    def addresses(self) -> frozenset[Address]:
        """The hosts and ports that boxes reach."""
        return frozenset(Address.parse(entry) for entry in self.allow if entry != INDEX)


class SandboxConfig(Record):
    """Agents' boxes in rollouts and evaluations."""

    egress: EgressConfig = EgressConfig()


class NetworkRequest(Record):
    """One request of an attempt's box to the network."""

    at: float = Field(description="start in seconds since 1970")
    method: str
    host: str = Field(description="HOST:PORT, or index")
    path: str = Field(description="path and query; empty for a TLS connection")
    sent_bytes: int = Field(description="bytes from the box, without the request's head")
    received_bytes: int
    """bytes to the box, without the answer's head; of the index, the size of the file"""
    allowed: bool
    reason: str = Field(description="why it was refused or cut; empty: it ended normally")
