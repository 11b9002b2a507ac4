"""A book of entries."""

from ledgerkit.money import format_amount


class Book:
    """Entries in order."""

    def __init__(self, currency="euro"):
        self.currency = currency
        self._entries = []

    def add(self, account, cents):
        """Add an entry and return its number."""
        self._entries.append((account, cents))
        return len(self._entries)

    @property
    def balance(self):
        """Sum of all entries."""
        return sum(cents for _, cents in self._entries)

    @balance.setter
    def balance(self, cents):
        self.add("correction", cents - self.balance)

    def lines(self):
        """One text an entry."""
        for account, cents in self._entries:
            yield f"{account}: {format_amount(cents, self.currency)}"


def total_by_account(entries):
    """Sums of (account, cents) pairs."""
    totals = {}
    for account, cents in entries:
        totals[account] = totals.get(account, 0) + cents
    return totals
