"""First schema of the ledger. It is where migrations begin; a new ledger is made from the tables at once."""

revision: str = "one_spine_2"
down_revision: str | None = None
