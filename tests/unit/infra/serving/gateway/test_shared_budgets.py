"""Budgets that several gateways of a ledger share, and that a restart keeps."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.serving.gateway import budgets as budgets_module
from ostinato.infra.serving.gateway.budgets import DAY_SECONDS, Budgets

pytestmark = pytest.mark.asyncio
NOON = 20_000.5 * DAY_SECONDS


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()


async def test_a_restarted_gateway_knows_what_was_spent_today(ledger: Ledger) -> None:
    first = Budgets(ledger.spending)
    async with first.shared(lambda: NOON):
        first.spend("acme", 30, NOON)
    second = Budgets(ledger.spending)
    assert second.spent("acme", NOON) == 0
    async with second.shared(lambda: NOON):
        assert second.spent("acme", NOON) == 30
        second.spend("acme", 12, NOON)
        assert second.spent("acme", NOON) == 42
        assert second.spent("acme", NOON + DAY_SECONDS) == 0
    assert ledger.spending.add({}, 20_000) == {"acme": 42}


async def test_two_gateways_hear_of_each_other_and_count_nothing_twice(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets_module, "EXCHANGE_SECONDS", 0.01)
    one, other = Budgets(ledger.spending), Budgets(ledger.spending)
    async with one.shared(lambda: NOON), other.shared(lambda: NOON):
        for number in range(40):
            (one, other)[number % 2].spend("acme", 1, NOON)
            await asyncio.sleep(0.005)
        async with asyncio.timeout(20):
            while {one.spent("acme", NOON), other.spent("acme", NOON)} != {40}:
                await asyncio.sleep(0.01)
    assert ledger.spending.add({}, 20_000) == {"acme": 40}


async def test_counts_are_kept_while_the_ledger_fails_and_added_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, add, fails = Budgets(ledger.spending), ledger.spending.add, True

    def add_or_fail(tokens: Mapping[tuple[int, str], int], day: int) -> dict[str, int]:
        counts.spend("acme", 1, NOON)  # an answer that ends meanwhile
        if fails:
            raise StorageError("no ledger")
        return add(tokens, day)

    monkeypatch.setattr(ledger.spending, "add", add_or_fail)
    for spent in range(1, 5):
        await counts.exchange(NOON)
        assert counts.spent("acme", NOON) == spent
    fails = False
    await counts.exchange(NOON)
    assert counts.spent("acme", NOON) == 5
    assert add({}, 20_000) == {"acme": 4}
    await counts.exchange(NOON + DAY_SECONDS)  # what was left of yesterday is yesterday's
    assert add({}, 20_000) == {"acme": 5}
    assert counts.spent("acme", NOON + DAY_SECONDS) == 0
