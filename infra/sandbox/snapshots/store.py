"""Storage for the layers of one backend, and the files that a box sees through them."""

import contextlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ostinato.infra.platform.errors import InvalidArgument, OutputLimit
from ostinato.infra.sandbox.memory import copy_repository
from ostinato.infra.sandbox.snapshots.layers import (
    Entries,
    Entry,
    EntryKind,
    entries_of_files,
    fold_entries,
    identify_entries,
    read_entries,
    remove_folder,
    write_entries,
)

logger = logging.getLogger(__name__)
_left: set[Path] = set()  # folders whose removal failed
SKIPPED_NAMES = frozenset({"__pycache__", ".pytest_cache", ".git"})
MAX_DIFF_BYTES = 64 << 20
# Compiled code, caches and history show the code that a problem removed from the sources.
_HIDDEN_NAMES = frozenset(
    (
        *("__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
        *(".tox", ".nox", ".hypothesis", ".coverage", "htmlcov", ".eggs", ".venv"),
    )
)
_HIDDEN_SUFFIXES = (".pyc", ".pyo", ".egg-info", ".orig", ".rej")


def is_hidden(name: str) -> bool:
    """Whether a file or folder of a repository is hidden from its sandboxes."""
    return name in _HIDDEN_NAMES or name.endswith(_HIDDEN_SUFFIXES)


@dataclass(frozen=True, slots=True)
class State:
    """Files of a sandbox: a repository folder (None: empty) with at most one layer over it (None: no layer)."""

    repository: Path | None
    layer_id: str | None = None


class LayerStore:
    """Content-addressed layers, in a folder that the constructor creates and `close` removes."""

    def __init__(self, parent: Path | None = None) -> None:
        prefix = f"ostinato-{os.geteuid()}-{os.getpid()}-"
        self.directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent or _state_parent()))
        (self.directory / "empty").mkdir()
        self._uses: Counter[str] = Counter()
        self._entries: dict[str, Entries] = {}
        self._hidden: dict[Path, Entries] = {}
        self._copies: dict[Path, Path] = {}
        self._read: dict[Path, Entries] = {}

    def base(self, repository: Path | None) -> State:
        """A repository without its caches and history."""
        if repository is None:
            return State(None)
        if not repository.is_dir():
            raise InvalidArgument(f"repository {repository} is not a folder")
        repository = repository.resolve()
        if repository not in self._hidden:
            owner = repository.stat().st_uid
            if owner != os.geteuid():
                raise InvalidArgument(
                    f"repository {repository} belongs to user {owner}, wanted {os.geteuid()}: "
                    "files of others cannot be changed in a box; copy it"
                )
            self._copies[repository] = copy_repository(repository, is_hidden)
            self._hidden[repository] = _hiding_entries(self._copies[repository])
        return State(self._copies[repository], self._add(self._hidden[repository]))

    def apply_files(self, state: State, files: Mapping[str, bytes | None]) -> State:
        """A state with files written over it (None: removed)."""

        def status_of(path: str) -> os.stat_result | None:
            if state.repository is None:
                return None
            with contextlib.suppress(OSError):
                return (state.repository / path).stat()
            return None

        return self.with_writes(state, entries_of_files(files, status_of))

    def with_writes(self, state: State, writes: Entries) -> State:
        """A state with the writes of a sandbox over it, folded into one layer."""
        return State(state.repository, self._add(fold_entries(self.entries(state), writes)))

    def entries(self, state: State) -> Entries:
        """Entries of a state's layer."""
        return {} if state.layer_id is None else self._entries[state.layer_id]

    def hold(self, state: State) -> None:
        """Keeps the layer of a state until `release`."""
        if state.layer_id is not None:
            self._uses[state.layer_id] += 1

    def release(self, state: State) -> None:
        """Undoes one `hold`. A layer without holders is removed."""
        if state.layer_id is None:
            return
        self._uses[state.layer_id] -= 1
        if self._uses[state.layer_id] <= 0:
            del self._uses[state.layer_id], self._entries[state.layer_id]
            discard_folder(self.directory / state.layer_id)

    def folders(self, state: State) -> tuple[Path, ...]:
        """Folders for the overlay, lowest first. Unpacks a layer when it is first used."""
        lowest = state.repository or self.directory / "empty"
        if state.layer_id is None:
            return (lowest,)
        folder = self.directory / state.layer_id
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix="partial-", dir=self.directory))
            partial.chmod(0o755)
            write_entries(self.entries(state), partial)
            partial.rename(folder)
        return (lowest, folder)

    def whole(self, state: State, writes: Entries | None = None) -> Entries:
        """All files of a state, with the writes of a sandbox over it, as one layer over an empty folder."""
        below: Entries = {}
        if state.repository is not None:
            if state.repository not in self._read:
                self._read[state.repository] = read_entries(state.repository)
            below = self._read[state.repository]
        folded = fold_entries(fold_entries(below, self.entries(state)), writes or {})
        return {
            path: replace(entry, is_opaque=False) if entry.is_opaque else entry
            for path, entry in folded.items()
            if entry.kind is not EntryKind.REMOVED
        }

    def close(self) -> None:
        """Removes the folder with all layers."""
        discard_folder(self.directory)

    def _add(self, entries: Entries) -> str | None:
        if not entries:
            return None
        layer_id = identify_entries(entries)
        self._entries.setdefault(layer_id, entries)
        return layer_id


def discard_folder(folder: Path) -> None:
    """Removes a folder. If that fails, it logs a warning and tries again at every later call."""
    for place in (folder, *_left):
        try:
            remove_folder(place)
        except OSError as error:
            if place not in _left:
                logger.warning("folder %s could not be removed yet: %s", place, error)
            _left.add(place)
        else:
            _left.discard(place)


def files_of(entries: Entries) -> dict[str, bytes]:
    """Contents of the regular files, by path."""
    return {path: entry.content for path, entry in entries.items() if entry.kind is EntryKind.FILE}


def compare_files(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Present contents of the files that differ (None: removed). Caches are left out."""
    changes: dict[str, bytes | None] = {}
    num_bytes = 0
    for path in sorted({*before, *now}):
        content = now.get(path)
        if content == before.get(path) or SKIPPED_NAMES.intersection(path.split("/")):
            continue
        changes[path] = content
        num_bytes += len(content or b"")
        if num_bytes > MAX_DIFF_BYTES:
            raise OutputLimit(f"diff of over {MAX_DIFF_BYTES} bytes at {path}")
    return changes


def _hiding_entries(repository: Path) -> dict[str, Entry]:
    """REMOVED entries for every cache and history folder or file below a repository."""
    removed: dict[str, bytes | None] = {}
    for folder, folders, names in os.walk(repository):
        for name in [*folders, *names]:
            if is_hidden(name):
                removed[str(Path(folder, name).relative_to(repository))] = None
        folders[:] = [name for name in folders if name not in _HIDDEN_NAMES]

    return entries_of_files(removed, lambda path: (repository / path).stat())


def _state_parent() -> Path:
    """Parent folder of layers and writes: /dev/shm if it is writable and has 1 GiB free, so that writes count
    towards a box's memory limit, else the temporary folder.
    """
    memory, parent = Path("/dev/shm"), Path(tempfile.gettempdir())
    if memory.is_dir() and os.access(memory, os.W_OK):
        space = os.statvfs(memory)
        if space.f_bavail * space.f_frsize >= 1 << 30:
            parent = memory
    _sweep_dead(parent)
    return parent


def _sweep_dead(parent: Path) -> None:
    """Removes the folders that killed processes of this user left."""
    for folder in parent.glob(f"ostinato-{os.geteuid()}-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                remove_folder(folder)
