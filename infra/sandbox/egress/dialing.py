"""Connections of the proxy to allowed hosts: names are resolved here, and addresses inside are refused."""

import asyncio
import ipaddress
import socket
import ssl

import psutil

from ostinato.infra.sandbox.egress.config import Address

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")


class Refusal(Exception):
    """A request that the proxy refuses or cuts, with the reason as its text."""

    status = 403


class Missing(Refusal):
    """A package or file that no index has."""

    status = 404


class Unreachable(Refusal):
    """An index that does not answer."""

    status = 502


def read_server_name(data: bytes) -> tuple[bool, str | None]:
    """Whether the first bytes of a TLS connection are all there, and the server name in them, read by OpenSSL. None: no
    name is stated, as for a literal address. Refusal when the bytes are not TLS.
    """
    names: list[str | None] = []

    def note(_: object, name: str | None, __: object) -> int:
        names.append(name)
        return (
            ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        )  # ends this handshake, whose answer nobody gets

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = note
    given = ssl.MemoryBIO()
    given.write(data)
    try:
        context.wrap_bio(given, ssl.MemoryBIO(), server_side=True).do_handshake()
    except ssl.SSLWantReadError:
        return False, None
    except ssl.SSLError as error:
        if not names:
            raise Refusal(f"not TLS: {error.reason}") from None
    return True, names[0]


async def dial(address: Address) -> Streams:
    """A connection to an allowed address. Refusal when its name leads inside, OSError when it does not answer."""
    return await asyncio.open_connection(*(await resolve(address)))


async def resolve(address: Address) -> tuple[str, int]:
    """A public IP address of a host, or the literal address that the entry names, with the port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    hosts = [str(item[4][0]) for item in found]
    public = hosts if address.is_literal else [host for host in hosts if is_public(host)]
    if not public:
        raise Refusal(
            f"{address.host} leads to {hosts[0]}, which is not public; an entry with the address itself allows it"
        )
    return public[0], address.port


def leads_outside(host: str, port: int) -> bool:
    """Whether no address of a host is inside. True for a name that only the machine's own proxy can resolve."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(is_public(str(item[4][0])) for item in found)


def is_public(host: str) -> bool:
    """Whether an IP address is neither this machine's nor one of a private, local or reserved network."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _GLOBAL_IPV6 or address.sixtofour is not None
    ):
        return False
    own = {item.address for items in psutil.net_if_addrs().values() for item in items}
    return address.is_global and not address.is_multicast and str(address) not in own
