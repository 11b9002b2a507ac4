"""What must survive every process, as rows: artifacts, the journal, promotions, interactions,
cycles.
"""

from ostinato.infra.platform.ledger.ledger import Ledger, open_ledger

__all__ = ["Ledger", "open_ledger"]
