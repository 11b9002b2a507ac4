"""Tests that open process groups of their own: a plugin, named in the module's `pytest_plugins`."""

from collections.abc import Iterator

import pytest

from ostinato.models.process_groups import close_process_groups, open_process_groups


@pytest.fixture
def closed_groups() -> Iterator[None]:
    """None is open at first; after the test the CPU's stand-ins are again."""
    close_process_groups()
    yield
    close_process_groups()
    open_process_groups(kind="cpu")
