"""Tables of the ledger, made from the records that they hold.

A change here needs a new migration. The ledger stores ids, numbers, JSON and object keys and knows nothing of the
content of trajectories and problems. Records are pydantic models instead of SQLAlchemy's mapped classes, which are
mutable, do not check that numbers are finite and do not write JSON.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    and_,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import SchemaItem

from ostinato.infra.platform.ledger.rows import (
    ArtifactRow,
    CycleRow,
    EventRow,
    FeedbackRow,
    InteractionRow,
    JournalRow,
    LineageRow,
    PromotionRow,
    Row,
    ScorecardRow,
    SpendingRow,
)

METADATA = MetaData()
# SQLite only numbers rows by itself in a column that is exactly INTEGER
_ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")
_SQL_TYPES = {bool: Boolean, int: BigInteger, float: Double, str: String, dict: JSON}

R = TypeVar("R", bound=Row)


class RowTable(Generic[R]):
    """A table whose columns are the fields of a record."""

    def __init__(
        self,
        name: str,
        kind: type[R],
        *constraints: SchemaItem,
        key: tuple[str, ...],
        is_numbered: bool = False,
        indexed: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """`is_numbered`: the database numbers the rows in the key. `indexed`: columns with an index each."""
        self._kind = kind
        columns = [
            _make_column(field, info.annotation, is_key=field in key, is_numbered=is_numbered)
            for field, info in kind.model_fields.items()
            if field != "feedback"
        ]
        indices = [Index(f"ix_{name}_{column}", column) for column in indexed]
        self.table = Table(name, METADATA, *columns, *constraints, *indices, **options)
        self.c = self.table.c

    def list(
        self,
        connection: Connection,
        *conditions: ColumnElement[bool],
        order_by: Any,
        limit_rows: int | None = None,
    ) -> list[R]:
        """The rows that meet all conditions. `order_by` is a column or a tuple of columns."""
        order = order_by if isinstance(order_by, tuple) else (order_by,)
        statement = select(self.table).where(*conditions).order_by(*order).limit(limit_rows)
        found = connection.execute(statement)
        return [self._kind.model_validate(row) for row in found]

    def first(self, connection: Connection, *conditions: ColumnElement[bool]) -> R | None:
        """A row that meets all conditions, if there is one."""
        found = connection.execute(select(self.table).where(*conditions)).first()
        return self._kind.model_validate(found) if found is not None else None

    def equals(self, **values: Any) -> ColumnElement[bool]:
        """The condition that these columns have these values."""
        return and_(*(self.c[name] == value for name, value in values.items()))

    def insert(self, connection: Connection, **values: Any) -> R:
        """Adds a row, and returns it with its number."""
        added = connection.execute(insert(self.table).values(values).returning(*self.c))
        return self._kind.model_validate(added.one())

    def insert_absent(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Adds the rows with new keys. Existing rows are not changed."""
        if rows:
            dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
            connection.execute(dialect.insert(self.table).on_conflict_do_nothing(), list(rows))

    def update(
        self, connection: Connection, *conditions: ColumnElement[bool], **values: Any
    ) -> int:
        """Changes the rows that meet all conditions, and returns their number."""
        return connection.execute(update(self.table).where(*conditions).values(values)).rowcount

    def highest(self, connection: Connection, column: str, *conditions: ColumnElement[bool]) -> int:
        """The largest number in a column. 0 without rows."""
        return connection.scalar(select(func.max(self.c[column])).where(*conditions)) or 0


def _make_column(name: str, annotation: Any, *, is_key: bool, is_numbered: bool) -> Column[Any]:
    parts = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
    kind = next(get_origin(part) or part for part in parts if part is not NoneType)
    sql_type = next(sql for python, sql in _SQL_TYPES.items() if issubclass(kind, python))
    return Column(
        name,
        _ROW_NUMBER if is_key and is_numbered else sql_type,
        primary_key=is_key,
        autoincrement=is_key and is_numbered,
        nullable=NoneType in parts,
    )


ARTIFACTS = RowTable(
    "artifacts",
    ArtifactRow,
    UniqueConstraint("kind", "name", "version"),
    UniqueConstraint("kind", "name", "fingerprint"),
    key=("artifact_id",),
    is_numbered=True,
)
LINEAGE = RowTable(
    "artifact_parents",
    LineageRow,
    ForeignKeyConstraint(["child_id"], ["artifacts.artifact_id"]),
    ForeignKeyConstraint(["parent_id"], ["artifacts.artifact_id"]),
    key=("child_id", "parent_id"),
)
JOURNAL = RowTable(
    "journal",
    JournalRow,
    Index("ix_journal_run_state", "run_id", "state", "commit_sequence"),
    key=("trajectory_id",),
    indexed=("group_id", "commit_sequence"),
)
SCORECARDS = RowTable("scorecards", ScorecardRow, key=("scorecard_id",), indexed=("checkpoint_id",))
PROMOTIONS = RowTable("promotions", PromotionRow, key=("entry_id",), is_numbered=True)
INTERACTIONS = RowTable(
    "interactions",
    InteractionRow,
    UniqueConstraint("interaction_id"),
    key=("sequence",),
    is_numbered=True,
    sqlite_autoincrement=True,
)
FEEDBACK = RowTable(
    "feedback",
    FeedbackRow,
    ForeignKeyConstraint(["interaction_id"], ["interactions.interaction_id"]),
    key=("feedback_id",),
    indexed=("interaction_id",),
)
CYCLES = RowTable("cycles", CycleRow, key=("cycle_id",))
SPENDING = RowTable("token_spending", SpendingRow, key=("account", "day"))
EVENTS = RowTable("events", EventRow, key=("event_id",), is_numbered=True, indexed=("source",))
