"""Bytes by key, in a local directory or an S3 bucket, behind one interface."""

from ostinato.infra.platform.objects.local import checksum_bytes, checksum_file
from ostinato.infra.platform.objects.store import DamagedObject, ObjectStore, open_object_store

__all__ = ["DamagedObject", "ObjectStore", "checksum_bytes", "checksum_file", "open_object_store"]
