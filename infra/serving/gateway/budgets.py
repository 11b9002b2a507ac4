"""Tokens that accounts used today (UTC). All gateways of a ledger share the counts, and a restart keeps them.

An answer counts in memory at once. Every few seconds a gateway adds its counts to the ledger and reads those of all
gateways, so that no answer waits for the database.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from ostinato.infra.platform.errors import StorageError

if TYPE_CHECKING:  # SQLAlchemy would delay every command
    from ostinato.infra.platform.ledger.repositories import SpendingRepository

logger = logging.getLogger(__name__)
DAY_SECONDS = 86_400.0
EXCHANGE_SECONDS = 5.0


def day_of(wall_seconds: float) -> int:
    """Days since 1970 (UTC)."""
    return int(wall_seconds // DAY_SECONDS)


class Budgets:
    """Used tokens by account and day. `ledger` None: of this process alone."""

    def __init__(self, ledger: "SpendingRepository | None" = None) -> None:
        self._ledger = ledger
        self._unwritten: Counter[tuple[int, str]] = Counter()
        self._written: Mapping[str, int] = {}  # of all gateways on the day below
        self._day = 0

    def spend(self, account: str, tokens: int, wall_seconds: float) -> None:
        """Counts the tokens of an answer."""
        day = day_of(wall_seconds)
        if self._ledger is None and day != self._day:  # nobody reads earlier days
            self._day, self._unwritten = day, Counter()
        self._unwritten[day, account] += tokens

    def spent(self, account: str, wall_seconds: float) -> int:
        """Tokens that the account used today, as far as this gateway knows."""
        day = day_of(wall_seconds)
        written = self._written.get(account, 0) if day == self._day else 0
        return written + self._unwritten[day, account]

    async def exchange(self, wall_seconds: float) -> None:
        """Adds the counts of this gateway to the ledger, and reads those of all. Counts are kept while the ledger fails."""
        if self._ledger is None:
            return
        adding, day = Counter(self._unwritten), day_of(wall_seconds)
        try:
            written = await asyncio.to_thread(self._ledger.add, adding, day)
        except StorageError as error:
            logger.warning("budgets_not_stored=%s", error)
            return
        self._unwritten -= adding
        self._written, self._day = written, day

    @asynccontextmanager
    async def shared(self, wall_clock: Callable[[], float]) -> AsyncIterator[None]:
        """Exchanges counts with the ledger for the length of the block, and once more at its end."""
        await self.exchange(wall_clock())
        is_over = asyncio.Event()

        async def repeat() -> None:
            # never cancelled: counts that a cancelled exchange has added would be added again
            while not is_over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(is_over.wait(), EXCHANGE_SECONDS)
                    return
                await self.exchange(wall_clock())

        repeating = asyncio.create_task(repeat())
        try:
            yield
        finally:
            is_over.set()
            await repeating
            await self.exchange(wall_clock())
