"""Artifacts: results of stages as files with identity and lineage.

The files of an artifact lie in the object store under one prefix. Its manifest, `artifact.json`, is written last:
without it the artifact does not exist. The ledger is an index; a row that is missing after a kill is restored from
the manifest.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.ledger.rows import ArtifactRow
from ostinato.infra.platform.objects import (
    DamagedObject,
    ObjectStore,
    checksum_file,
    open_object_store,
)
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings

_MANIFEST = "artifact.json"


class ArtifactRef(Record):
    """Reference to a published artifact."""

    kind: str
    name: str
    version: int
    fingerprint: str = Field(
        description="identity of the recipe, code and parents that made it, 16 hex digits"
    )
    object_prefix: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}@{self.version}"


class ArtifactFile(Record):
    """One file of an artifact."""

    path: str = Field(description="path relative to the artifact, never outside of it")
    size_bytes: int = Field(ge=0)
    checksum: str

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        pure = PurePosixPath(path)
        is_odd = (
            "\\" in path or "\0" in path or any(len(os.fsencode(it)) > 255 for it in pure.parts)
        )
        if pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == "." or is_odd:
            raise ValueError(f"path is {path!r}, wanted a relative one without .. and backslashes")
        return path


class Manifest(Record):
    """The content of artifact.json."""

    schema_version: int = 2
    kind: str
    name: str
    fingerprint: str
    settings_fingerprint: str = ""
    """identity of the settings alone, including those of its ancestors"""
    code: dict[str, str] = Field(default={})
    """digest or version of each file or package when the stage ended"""
    changed_files: tuple[str, ...] = ()
    """code that changed between the stage's start and its end"""
    parents: tuple[ArtifactRef, ...]
    metadata: dict[str, Any]
    files: tuple[ArtifactFile, ...]
    created_at: float


class Identity(Record):
    """Everything that the artifact of a stage depends on: settings, code and parents."""

    kind: str
    name: str
    settings_fingerprint: str
    code: dict[str, str]
    parents: tuple[ArtifactRef, ...]

    def fingerprint(self, repetition: int = 0) -> str:
        """16 hex digits over settings, code and parents. `repetition` distinguishes repeated runs."""
        content: dict[str, Any] = {"settings": self.settings_fingerprint, "code": self.code}
        if repetition:
            content["repetition"] = repetition
        return fingerprint(content, self.parents)


def fingerprint(recipe: object, parents: Sequence[ArtifactRef] = ()) -> str:
    """16 hex digits that identify the artifact made from `recipe` (a model or JSON value) and `parents`."""
    return _digest_of(
        _as_json(recipe),
        [f"{parent.kind}/{parent.name}/{parent.fingerprint}" for parent in parents],
    )


def _digest_of(recipe: Any, lineage: list[str]) -> str:
    canonical = json.dumps(
        {"recipe": recipe, "parents": lineage},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _as_json(value: object) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value


class Artifacts:
    """Publishes, finds and fetches artifacts."""

    def __init__(self, objects: ObjectStore, ledger: Ledger) -> None:
        self._objects = objects
        self._ledger = ledger

    def find(self, kind: str, name: str, fingerprint: str) -> ArtifactRef | None:
        """The published artifact with this fingerprint, if there is one."""
        manifest = self._manifest(_prefix(kind, name, fingerprint))
        if manifest is None:
            return None
        row = self._ledger.artifacts.find(kind, name, fingerprint)
        return _ref(row if row is not None else self._index(manifest))

    def identify(
        self,
        kind: str,
        name: str,
        settings: object,
        code: Mapping[str, str],
        parents: Sequence[ArtifactRef],
    ) -> Identity:
        """The identity of the artifact that a stage would make."""
        lineage = [
            f"{parent.kind}/{parent.name}/{self.manifest(parent).settings_fingerprint}"
            for parent in parents
        ]
        return Identity(
            kind=kind,
            name=name,
            settings_fingerprint=_digest_of(_as_json(settings), lineage),
            code=dict(code),
            parents=tuple(parents),
        )

    def made_with(self, identity: Identity) -> list[tuple[ArtifactRef, Manifest]]:
        """Artifacts made with the same settings by any code, newest first."""
        self.find(identity.kind, identity.name, identity.fingerprint())  # restores a lost row
        refs = [_ref(row) for row in self._ledger.artifacts.list(identity.kind, identity.name)]
        found = [(ref, self._manifest(ref.object_prefix)) for ref in reversed(refs)]
        return [
            (ref, manifest)
            for ref, manifest in found
            if manifest is not None
            and manifest.settings_fingerprint == identity.settings_fingerprint
        ]

    def get(self, reference: str) -> ArtifactRef:
        """The artifact of a reference kind/name@version. ConfigError when there is none."""
        kind, _, rest = reference.partition("/")
        name, _, version = rest.rpartition("@")
        for row in self._ledger.artifacts.list(kind, name):
            if str(row.version) == version:
                return _ref(row)
        known = ", ".join(str(_ref(row)) for row in self._ledger.artifacts.list(kind)) or "none"
        raise ConfigError(
            f"artifact {reference!r} is not in the ledger, wanted kind/name@version; "
            f"of this kind: {known}"
        )

    def publish(
        self,
        identity: Identity,
        directory: Path,
        metadata: dict[str, Any] | None = None,
        *,
        fingerprint: str | None = None,
        changed_files: Sequence[str] = (),
    ) -> ArtifactRef:
        """Uploads all files under `directory`, then the manifest, then adds the artifact to the index.

        `fingerprint`: fingerprint at the start of the stage; None: that of `identity`. If an artifact with this
        fingerprint exists, it is returned and nothing is uploaded.
        """
        kind, name = identity.kind, identity.name
        fingerprint = fingerprint or identity.fingerprint()
        known = self.find(kind, name, fingerprint)
        if known is not None:
            return known
        prefix = _prefix(kind, name, fingerprint)
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        if not paths:
            raise StorageError(
                f"artifact {kind}/{name} {fingerprint}: no file in {directory}, wanted 1 or more"
            )
        files = []
        for path in paths:
            relative = path.relative_to(directory).as_posix()
            checksum = self._objects.put_file(f"{prefix}/files/{relative}", path)
            files.append(
                ArtifactFile(path=relative, size_bytes=path.stat().st_size, checksum=checksum)
            )
        manifest = Manifest(
            kind=kind,
            name=name,
            fingerprint=fingerprint,
            settings_fingerprint=identity.settings_fingerprint,
            code=identity.code,
            changed_files=tuple(changed_files),
            parents=identity.parents,
            metadata=metadata or {},
            files=tuple(files),
            created_at=time.time(),
        )
        text = manifest.model_dump_json(indent=1)
        self._objects.put_bytes(f"{prefix}/{_MANIFEST}", text.encode())
        return _ref(self._index(manifest))

    def fetch(self, ref: ArtifactRef, directory: Path) -> Path:
        """Downloads the files that are missing or damaged in `directory`. StorageError for a damaged object."""
        manifest = self.manifest(ref)
        for file in manifest.files:
            path = directory / file.path
            if not _is_intact(path, file):
                try:
                    self._objects.get_file(
                        f"{ref.object_prefix}/files/{file.path}", path, checksum=file.checksum
                    )
                except DamagedObject as error:
                    raise StorageError(
                        f"artifact {ref}: {error}; delete {ref.object_prefix}/{_MANIFEST} in "
                        f"{self._objects.url} and run its stage again to make it anew"
                    ) from error
        return directory

    def local_copy(self, ref: ArtifactRef, home: Path) -> Path:
        """Fetches the files to the artifact's directory under `home`."""
        return self.fetch(ref, home / "artifacts" / ref.kind / ref.fingerprint)

    def metadata(self, ref: ArtifactRef) -> dict[str, Any]:
        return self.manifest(ref).metadata

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The manifest. StorageError if the artifact is gone."""
        manifest = self._manifest(ref.object_prefix)
        if manifest is None:
            raise StorageError(
                f"artifact {ref} ({ref.kind}, {ref.fingerprint}) has no "
                f"{ref.object_prefix}/{_MANIFEST} in {self._objects.url}: removed by `ostinato gc --recipe`, or "
                "lost; run its stage again"
            )
        return manifest

    def find_damage(self, ref: ArtifactRef) -> list[str]:
        """Files that are missing from the store or have another size. StorageError if all are gone."""
        manifest = self.manifest(ref)
        folder = f"{ref.object_prefix}/files/"
        sizes = self._objects.sizes(folder)
        return [
            file.path
            for file in manifest.files
            if sizes.get(f"{folder}{file.path}") != file.size_bytes
        ]

    def size_bytes(self, ref: ArtifactRef) -> int:
        """Bytes of the artifact in the object store."""
        return sum(self._objects.sizes(f"{ref.object_prefix}/").values())

    def is_removed(self, ref: ArtifactRef) -> bool:
        """Whether only the artifact's row in the ledger is left."""
        return not self._objects.exists(f"{ref.object_prefix}/{_MANIFEST}")

    def remove(self, ref: ArtifactRef) -> None:
        """Deletes the artifact's objects and keeps its row and lineage. The manifest is deleted first: files that
        a kill leaves are not an artifact, and a second call deletes them. The stage can make the artifact again
        under the same version.
        """
        self._objects.delete(f"{ref.object_prefix}/{_MANIFEST}")
        for key in self._objects.list(f"{ref.object_prefix}/"):
            self._objects.delete(key)

    def lineage(self, ref: ArtifactRef) -> tuple[ArtifactRef, ...]:
        """All ancestors of the artifact, nearest first, each once."""
        row = self._ledger.artifacts.find(ref.kind, ref.name, ref.fingerprint)
        if row is None:
            raise StorageError(f"artifact {ref} ({ref.kind}) is not in ledger {self._ledger.url}")
        found: dict[int, ArtifactRef] = {}
        waiting = [row]
        while waiting:
            for parent in self._ledger.artifacts.parents(waiting.pop(0).artifact_id):
                if parent.artifact_id not in found:
                    found[parent.artifact_id] = _ref(parent)
                    waiting.append(parent)
        return tuple(found.values())

    def _manifest(self, prefix: str) -> Manifest | None:
        key = f"{prefix}/{_MANIFEST}"
        if not self._objects.exists(key):
            return None
        try:
            manifest = Manifest.model_validate_json(self._objects.get_bytes(key))
        except ValidationError as error:
            raise StorageError(
                f"object {key} in {self._objects.url} is corrupt: {error.error_count()} wrong "
                "fields, wanted an artifact manifest; delete it and run again to make it anew"
            ) from error
        named = _prefix(manifest.kind, manifest.name, manifest.fingerprint)
        if named != prefix:
            raise StorageError(
                f"object {key} in {self._objects.url} belongs to {named}; delete it and run again to "
                "make it anew"
            )
        return manifest

    def _index(self, manifest: Manifest) -> ArtifactRow:
        parents = [(parent.kind, parent.name, parent.fingerprint) for parent in manifest.parents]
        for kind, name, wanted in parents:
            # after a loss of the ledger, a parent may exist in the object store only
            if self._ledger.artifacts.find(kind, name, wanted) is None:
                self.find(kind, name, wanted)
        return self._ledger.artifacts.add(
            manifest.kind,
            manifest.name,
            manifest.fingerprint,
            object_prefix=_prefix(manifest.kind, manifest.name, manifest.fingerprint),
            parents=parents,
            at=manifest.created_at,
        )


def open_artifacts(settings: Settings, ledger: Ledger | None = None) -> Artifacts:
    """The artifacts of an installation. `ledger`: an open ledger; None: it is opened here."""
    return Artifacts(
        open_object_store(settings), open_ledger(settings) if ledger is None else ledger
    )


def _prefix(kind: str, name: str, fingerprint: str) -> str:
    return f"artifacts/{kind}/{name}/{fingerprint}"


def _ref(row: ArtifactRow) -> ArtifactRef:
    return ArtifactRef.model_validate(row, from_attributes=True)


def _is_intact(path: Path, file: ArtifactFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    return checksum_file(path) == file.checksum
