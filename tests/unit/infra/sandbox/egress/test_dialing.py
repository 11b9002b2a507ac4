"""Addresses inside are refused, and the server name of TLS is read from any pieces of its first bytes."""

import socket
import ssl

import psutil
import pytest

from ostinato.infra.sandbox.egress.config import Address
from ostinato.infra.sandbox.egress.dialing import Refusal, is_public, read_server_name, resolve

INSIDE = (
    *(
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
    ),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1"),
    *("2002:7f00:1::", "64:ff9b::a00:1", "2001::1", "2001:db8::1"),
)


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_inside_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "151.101.0.223", "2a04:4e42::223"])
def test_addresses_outside_are_public(address: str) -> None:
    assert is_public(address)


def test_own_addresses_of_the_machine_are_not_public() -> None:
    kinds = (socket.AF_INET, socket.AF_INET6)
    own = [
        item.address
        for items in psutil.net_if_addrs().values()
        for item in items
        if item.family in kinds
    ]
    assert own
    assert not any(map(is_public, own))


@pytest.mark.asyncio
async def test_name_that_leads_inside_is_refused_and_its_address_is_not() -> None:
    with pytest.raises(Refusal, match=r"localhost leads to .*, which is not public"):
        await resolve(Address("localhost", 80))
    assert await resolve(Address("127.0.0.1", 80)) == ("127.0.0.1", 80)


def hello(name: str | None) -> bytes:
    """The first bytes of a TLS connection to a name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    given, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(given, sent, server_hostname=name).do_handshake()
    return sent.read()


@pytest.mark.parametrize("name", ["files.example.org", None])
def test_server_name_is_read_once_all_bytes_are_there(name: str | None) -> None:
    data = hello(name)
    for size in (0, 1, 5, 40, len(data) - 1):
        assert read_server_name(data[:size]) == (False, None)
    assert read_server_name(data) == (True, name)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n" * 9, b"\x16\x03\x01\xff\xff" * 9]
)
def test_what_is_no_tls_is_refused(data: bytes) -> None:
    with pytest.raises(Refusal, match="not TLS"):
        read_server_name(data)
