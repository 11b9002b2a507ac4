"""Package indexes: what pip says of a package, and its source archive as bytes."""

from ostinato.infra.platform.packages.index_files import SUFFIXES, fetch_source
from ostinato.infra.platform.packages.pip_questions import newest_version, pin

__all__ = ["SUFFIXES", "fetch_source", "newest_version", "pin"]
