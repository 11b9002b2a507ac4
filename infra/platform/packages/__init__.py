"""Package indexes: what pip says of a package, and its files as bytes."""

from ostinato.infra.platform.packages.index_files import SUFFIXES, fetch_file
from ostinato.infra.platform.packages.pip_questions import newest_version, pin

__all__ = ["SUFFIXES", "fetch_file", "newest_version", "pin"]
