"""The layout of a weight chain in the object store, and the record that commits a version.

README.md has the whole format. A version exists once its manifest is written. It has a delta, an anchor or
both (then it can be built from either). Object names contain the publisher's epoch, so a publisher that was
replaced can never overwrite objects that its successor committed. The manifest holds the checksum of each
object's bytes, the checksum of each tensor after the version is applied, and a seal over itself.
Imports no torch: some readers list the store and load no tensors.
"""

import json
import math
import re
from typing import TypeVar

import xxhash
from pydantic import Field, ValidationError

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import DamagedObject, ObjectStore
from ostinato.infra.platform.record import Record

CHAINS = "chains/"
MANIFEST = "manifest.json"
_FILE_KEY = re.compile(r"chains/(?P<chain>[^/]+)/(?P<version>\d{8,})/(?P<name>[^/]+)$")
_VERSION_KEY = re.compile(r"/(\d{8,})/manifest\.json$")
_EPOCH_KEY = re.compile(r"/epochs/(\d{8,})\.json$")
_WANTED_KEY = re.compile(r"/anchor-wanted/(\d{8,})\.json$")


class ChainObject(Record):
    """Address and identity of one stored payload."""

    key: str
    size_bytes: int
    checksum: str = Field(description="xxh3-128 of the stored bytes")


class TensorEntry(Record):
    """One stored tensor after the version is applied."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str = Field(description="xxh3-128 of the result's bytes in row-major order")
    shard: int = Field(default=0, description="index of the shard whose payloads hold it")


class EpochClaim(Record):
    """A publisher's claim to be the only writer from now on. Only one publisher can claim an epoch."""

    epoch: int
    claimed_at: float


ShardObjects = tuple[ChainObject, ...]


class ChainManifest(Record):
    """The commit record of one version."""

    schema_version: int = 1
    chain_id: str
    version: int
    epoch: int
    base_version: int | None
    """version the delta starts from; None: there is no delta"""
    delta: ShardObjects = Field(description="delta of each shard; empty: there is no delta")
    anchor: ShardObjects = Field(description="anchor of each shard; empty: there is no anchor")
    tensors: dict[str, TensorEntry]
    changed_elements: int
    """elements whose bits differ from base_version; all of them without a base"""
    total_elements: int
    raw_bytes: int = Field(description="size of all tensors, uncompressed")
    deltas_since_anchor: int
    delta_bytes_since_anchor: int
    published_at: float = Field(description="seconds since 1970")

    @property
    def kind(self) -> str:
        """`anchor` when the version can be built from nothing, else `delta`."""
        return "anchor" if self.anchor else "delta"

    @property
    def num_shards(self) -> int:
        """Ranks that wrote the version together."""
        return len(self.anchor or self.delta)

    @property
    def density_ratio(self) -> float:
        """Share of elements that changed, 0 to 1."""
        return self.changed_elements / max(1, self.total_elements)

    @property
    def stored_bytes(self) -> int:
        """Bytes that this version takes in the store, without its manifest."""
        return sum(item.size_bytes for item in (*self.delta, *self.anchor))


def chain_prefix(chain_id: str) -> str:
    return f"{CHAINS}{chain_id}"


def version_prefix(chain_id: str, version: int) -> str:
    return f"{chain_prefix(chain_id)}/{version:08d}"


def payload_key(
    chain_id: str, version: int, kind: str, epoch: int, shard: int | None = None
) -> str:
    """Key of a delta or an anchor. `shard` is None when there is only one."""
    stem = f"{kind}.{epoch:08d}" + ("" if shard is None else f".{shard:05d}")
    return f"{version_prefix(chain_id, version)}/{stem}.safetensors.zst"


def manifest_key(chain_id: str, version: int) -> str:
    """Key of the commit record."""
    return f"{version_prefix(chain_id, version)}/{MANIFEST}"


def parse_file_key(key: str) -> tuple[str, int, str] | None:
    """Chain, version and name of a file that belongs to a version. None for any other key."""
    found = _FILE_KEY.fullmatch(key)
    return None if found is None else (found["chain"], int(found["version"]), found["name"])


def epoch_key(chain_id: str, epoch: int) -> str:
    return f"{chain_prefix(chain_id)}/epochs/{epoch:08d}.json"


def anchor_wanted_key(chain_id: str, version: int) -> str:
    """Key by which a subscriber asks for an anchor after `version`."""
    return f"{chain_prefix(chain_id)}/anchor-wanted/{version:08d}.json"


def list_versions(objects: ObjectStore, chain_id: str) -> list[int]:
    """Committed versions, ascending."""
    return _numbers(objects, f"{chain_prefix(chain_id)}/", _VERSION_KEY)


def list_epochs(objects: ObjectStore, chain_id: str) -> list[int]:
    """Claimed epochs, ascending."""
    return _numbers(objects, f"{chain_prefix(chain_id)}/epochs/", _EPOCH_KEY)


def claimed_at(objects: ObjectStore, chain_id: str, epoch: int) -> float:
    """When an epoch was claimed. Infinity when the claim cannot be read."""
    try:
        content = objects.get_bytes(epoch_key(chain_id, epoch))
        return EpochClaim.model_validate_json(content).claimed_at
    except (DamagedObject, ValidationError):
        return math.inf


def list_wanted_anchors(objects: ObjectStore, chain_id: str) -> list[int]:
    """Versions that some subscriber could not build, ascending."""
    return _numbers(objects, f"{chain_prefix(chain_id)}/anchor-wanted/", _WANTED_KEY)


def commit_manifest(objects: ObjectStore, manifest: ChainManifest) -> bool:
    """Commits a version. False when it was committed before. A manifest is never replaced."""
    return objects.put_new(manifest_key(manifest.chain_id, manifest.version), seal_record(manifest))


def read_manifest(objects: ObjectStore, chain_id: str, version: int) -> ChainManifest:
    """The commit record of a version. StorageError when it is missing, torn or altered."""
    key = manifest_key(chain_id, version)
    manifest = open_record(ChainManifest, key, objects.get_bytes(key))
    if (manifest.chain_id, manifest.version) != (chain_id, version):
        raise StorageError(
            f"manifest {key}: is for {manifest.chain_id} version {manifest.version}, "
            f"wanted {chain_id} version {version}"
        )
    return manifest


Sealed = TypeVar("Sealed", bound=Record)


def seal_record(record: Record) -> bytes:
    """A record with a checksum over its content."""
    body = record.model_dump(mode="json")
    return json.dumps({"manifest": body, "seal": _seal(body)}).encode()


def open_record(kind: type[Sealed], key: str, data: bytes) -> Sealed:
    """Inverse of seal_record. StorageError when the bytes are torn or altered."""
    try:
        sealed = json.loads(data)
        body, seal = sealed["manifest"], sealed["seal"]
        if _seal(body) != seal:
            raise StorageError(
                f"manifest {key}: seal is {seal}, wanted {_seal(body)} for its content"
            )
        return kind.model_validate(body)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise StorageError(
            f"manifest {key}: unreadable ({error}), wanted a sealed manifest"
        ) from error


def _seal(body: object) -> str:
    return xxhash.xxh3_128_hexdigest(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    )


def _numbers(objects: ObjectStore, prefix: str, pattern: re.Pattern[str]) -> list[int]:
    found = (pattern.search(key) for key in objects.list(prefix))
    return sorted(int(match.group(1)) for match in found if match)
