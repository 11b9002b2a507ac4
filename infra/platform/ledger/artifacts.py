"""The index of artifacts and their lineage. The bytes are elsewhere; `ostinato.infra.platform.artifacts` joins the
two.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Database
from ostinato.infra.platform.ledger.models import ArtifactParentTable, ArtifactTable
from ostinato.infra.platform.ledger.rows import ArtifactRow

_VERSION_LOCK = 71_002


class ArtifactRepository:
    """Rows of published artifacts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        kind: str,
        name: str,
        fingerprint: str,
        *,
        object_prefix: str,
        parents: Sequence[tuple[str, str, str]],
        payload: dict[str, Any],
        at: float,
    ) -> ArtifactRow:
        """Index an artifact under the next version of its name. The row that is there if it is
        known.

        `parents` are (kind, name, fingerprint) of indexed artifacts; an unknown one raises
        StorageError.
        """
        with self._database.write() as connection:
            self._database.serialize(connection, _VERSION_LOCK)
            known = connection.execute(_by_fingerprint(kind, name, fingerprint)).first()
            if known is not None:
                return ArtifactRow.model_validate(known)
            parent_ids = []
            for parent in parents:
                found = connection.execute(_by_fingerprint(*parent)).first()
                if found is None:
                    raise StorageError(
                        f"artifact {kind}/{name} {fingerprint} has parent {'/'.join(parent)}, "
                        "which the ledger does not know; publish parents first"
                    )
                parent_ids.append(found.artifact_id)
            newest = connection.scalar(
                select(func.max(ArtifactTable.version)).where(
                    ArtifactTable.kind == kind, ArtifactTable.name == name
                )
            )
            row = {
                "kind": kind,
                "name": name,
                "version": (newest or 0) + 1,
                "fingerprint": fingerprint,
                "object_prefix": object_prefix,
                "payload": payload,
                "created_at": at,
            }
            self._database.insert_absent(connection, ArtifactTable, [row])
            added = connection.execute(_by_fingerprint(kind, name, fingerprint)).one()
            edges = [
                {"child_id": added.artifact_id, "parent_id": parent_id} for parent_id in parent_ids
            ]
            self._database.insert_absent(connection, ArtifactParentTable, edges)
        return ArtifactRow.model_validate(added)

    def find(self, kind: str, name: str, fingerprint: str) -> ArtifactRow | None:
        """The artifact made from this recipe, if it was indexed."""
        with self._database.read() as connection:
            found = connection.execute(_by_fingerprint(kind, name, fingerprint)).first()
        return ArtifactRow.model_validate(found) if found is not None else None

    def latest(self, kind: str, name: str) -> ArtifactRow | None:
        """The highest version of a name."""
        rows = self.list(kind, name)
        return rows[-1] if rows else None

    def list(self, kind: str, name: str | None = None) -> list[ArtifactRow]:
        """Artifacts of a kind (and name), oldest version first."""
        statement = select(ArtifactTable.__table__).where(ArtifactTable.kind == kind)
        if name is not None:
            statement = statement.where(ArtifactTable.name == name)
        with self._database.read() as connection:
            found = connection.execute(
                statement.order_by(ArtifactTable.name, ArtifactTable.version)
            ).all()
        return [ArtifactRow.model_validate(row) for row in found]

    def parents(self, artifact_id: int) -> Sequence[ArtifactRow]:
        """Parents of the artifact, in the order of ids."""
        with self._database.read() as connection:
            found = connection.execute(
                select(ArtifactTable.__table__)
                .join(
                    ArtifactParentTable,
                    ArtifactParentTable.parent_id == ArtifactTable.artifact_id,
                )
                .where(ArtifactParentTable.child_id == artifact_id)
                .order_by(ArtifactTable.artifact_id)
            ).all()
        return tuple(ArtifactRow.model_validate(row) for row in found)


def _by_fingerprint(kind: str, name: str, fingerprint: str) -> Any:
    return select(ArtifactTable.__table__).where(
        ArtifactTable.kind == kind,
        ArtifactTable.name == name,
        ArtifactTable.fingerprint == fingerprint,
    )
