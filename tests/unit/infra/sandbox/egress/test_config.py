"""Entries of sandbox.egress.allow: what is read from them, and what is refused by name."""

import pytest

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.sandbox.egress.config import Address, EgressConfig

BAD = (
    *("pypi", "host", "host:", "host:0", "host:65536", "host:https", ":443", "a b:443", "-a:1"),
    *(
        "https://host:443",
        "host:443/path",
        "*.host:443",
        "user@host:443",
        "::1:443",
        "h\u00f6st:443",
    ),
    *("host:443?x", "host:+443", "host..org:443", "host:443#x", "[host]:443", "ho\tst:443"),
)


def test_boxes_are_closed_by_default() -> None:
    config = load_recipe("miniature").sandbox.egress
    assert config.allow == ()
    assert not config.has_index
    assert config.addresses == frozenset()


def test_entries_are_the_index_and_addresses() -> None:
    config = EgressConfig(
        allow=("index", "Files.Example.org:443", "[2001:DB8::1]:80", "10.0.0.5:3128")
    )
    assert config.has_index
    assert config.addresses == {
        Address("files.example.org", 443),
        Address("2001:db8::1", 80),
        Address("10.0.0.5", 3128),
    }


@pytest.mark.parametrize("entry", BAD)
def test_bad_entry_is_refused_by_name_with_the_wanted_form(entry: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_recipe("miniature", changes={"sandbox": {"egress": {"allow": ["index", entry]}}})
    text = str(told.value)
    assert "sandbox.egress.allow" in text
    assert repr(entry) in text
    assert "HOST:PORT" in text


@pytest.mark.parametrize(("key", "value"), [("boxes", "fleet"), ("sandbox", "microvm")])
def test_boxes_that_see_no_socket_are_refused(key: str, value: str) -> None:
    changes = {"sandbox": {"egress": {"allow": ["index"]}}, "rollout": {key: value}}
    with pytest.raises(ConfigError, match=rf"rollout.{key} is {value}.*sandbox.egress.allow"):
        load_recipe("miniature", changes=changes)
