"""The index of artifacts and their lineage. The bytes are in the object store;
`ostinato.infra.platform.artifacts` joins the two.
"""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, select

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger.database import Repository
from ostinato.infra.platform.ledger.rows import ArtifactRow
from ostinato.infra.platform.ledger.tables import ARTIFACTS, LINEAGE

_VERSION_LOCK = 71_002


class ArtifactRepository(Repository):
    """Rows of published artifacts."""

    def add(
        self,
        kind: str,
        name: str,
        fingerprint: str,
        *,
        object_prefix: str,
        parents: Sequence[tuple[str, str, str]],
        at: float,
    ) -> ArtifactRow:
        """Adds an artifact under the next version of its name, or returns its row if it is known.

        `parents` are (kind, name, fingerprint) of indexed artifacts; an unknown one raises
        StorageError.
        """
        with self._database.write() as connection:
            self._database.serialize(connection, _VERSION_LOCK)
            known = ARTIFACTS.first(connection, _has_fingerprint(kind, name, fingerprint))
            if known is not None:
                return known
            parent_ids = []
            for parent in parents:
                found = ARTIFACTS.first(connection, _has_fingerprint(*parent))
                if found is None:
                    raise StorageError(
                        f"artifact {kind}/{name} {fingerprint} has parent {'/'.join(parent)}, "
                        "which the ledger does not know; publish parents first"
                    )
                parent_ids.append(found.artifact_id)
            same_name = and_(ARTIFACTS.c.kind == kind, ARTIFACTS.c.name == name)
            row = {
                "kind": kind,
                "name": name,
                "version": ARTIFACTS.highest(connection, "version", same_name) + 1,
                "fingerprint": fingerprint,
                "object_prefix": object_prefix,
                "created_at": at,
            }
            adding = ARTIFACTS.table.insert().values(row).returning(ARTIFACTS.c.artifact_id)
            added = ArtifactRow(artifact_id=connection.scalars(adding).one(), **row)
            edges = [
                {"child_id": added.artifact_id, "parent_id": parent_id} for parent_id in parent_ids
            ]
            self._database.insert_absent(connection, LINEAGE.table, edges)
        return added

    def find(self, kind: str, name: str, fingerprint: str) -> ArtifactRow | None:
        """The artifact made from this recipe, if it was indexed."""
        with self._database.read() as connection:
            return ARTIFACTS.first(connection, _has_fingerprint(kind, name, fingerprint))

    def list(self, kind: str, name: str | None = None) -> list[ArtifactRow]:
        """Artifacts of a kind (and name), oldest version first."""
        wanted = [ARTIFACTS.c.kind == kind]
        if name is not None:
            wanted.append(ARTIFACTS.c.name == name)
        order = (ARTIFACTS.c.name, ARTIFACTS.c.version)
        with self._database.read() as connection:
            return ARTIFACTS.list(connection, *wanted, order_by=order)

    def parents(self, artifact_id: int) -> Sequence[ArtifactRow]:
        """Parents of the artifact, in the order of ids."""
        ids = select(LINEAGE.c.parent_id).where(LINEAGE.c.child_id == artifact_id)
        of_it, order = ARTIFACTS.c.artifact_id.in_(ids), ARTIFACTS.c.artifact_id
        with self._database.read() as connection:
            return tuple(ARTIFACTS.list(connection, of_it, order_by=order))


def _has_fingerprint(kind: str, name: str, fingerprint: str) -> ColumnElement[bool]:
    return and_(
        ARTIFACTS.c.kind == kind,
        ARTIFACTS.c.name == name,
        ARTIFACTS.c.fingerprint == fingerprint,
    )
