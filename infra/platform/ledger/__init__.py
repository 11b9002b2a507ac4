"""The ledger: artifacts, journal, scorecards, promotions, interactions, cycles and events as rows of
one database.
"""

from ostinato.infra.platform.ledger.ledger import Ledger, open_ledger

__all__ = ["Ledger", "open_ledger"]
