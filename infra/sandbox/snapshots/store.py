"""The layers of one backend on disk, and the files that a box sees through them."""

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
# Compiled code, type and test caches and history tell what a problem removed from the sources.
_HIDDEN_NAMES = frozenset(
    (
        *("__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
        *(".tox", ".nox", ".hypothesis", ".coverage", "htmlcov", ".eggs", ".venv"),
    )
)
_HIDDEN_SUFFIXES = (".pyc", ".pyo", ".egg-info", ".orig", ".rej")


def is_hidden(name: str) -> bool:
    """Whether a file or folder of a repository is kept from its sandboxes."""
    return name in _HIDDEN_NAMES or name.endswith(_HIDDEN_SUFFIXES)


@dataclass(frozen=True, slots=True)
class State:
    """Files of a sandbox: a repository folder (None: empty) with one layer over it (None: no)."""

    repository: Path | None
    layer_id: str | None = None


class LayerStore:
    """Layers by content, in a folder that is made here and removed by `close`."""

    def __init__(self, parent: Path | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent or _state_parent()))
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
            raise InvalidArgument(f"repository {repository} is no folder")
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
        """A state with files over it. None: removed."""

        def status_of(path: str) -> os.stat_result | None:
            if state.repository is None:
                return None
            with contextlib.suppress(OSError):
                return (state.repository / path).stat()
            return None

        return self.with_writes(state, entries_of_files(files, status_of))

    def with_writes(self, state: State, writes: Entries) -> State:
        """A state with what a sandbox wrote over it, folded into one layer."""
        return State(state.repository, self._add(fold_entries(self.entries(state), writes)))

    def entries(self, state: State) -> Entries:
        """The layer of a state."""
        return {} if state.layer_id is None else self._entries[state.layer_id]

    def hold(self, state: State) -> None:
        """Keep a state's layer until it is let go."""
        if state.layer_id is not None:
            self._uses[state.layer_id] += 1

    def let_go(self, state: State) -> None:
        """Undo one `hold`. A layer that nobody holds is removed."""
        if state.layer_id is None:
            return
        self._uses[state.layer_id] -= 1
        if self._uses[state.layer_id] <= 0:
            del self._uses[state.layer_id], self._entries[state.layer_id]
            discard_folder(self.directory / state.layer_id)

    def folders(self, state: State) -> tuple[Path, ...]:
        """Folders for the overlay, lowest first. A layer is unpacked when first mounted."""
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
        """All files of a state, with what a sandbox wrote over it, as one layer over nothing."""
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
        """Remove everything."""
        discard_folder(self.directory)

    def _add(self, entries: Entries) -> str | None:
        if not entries:
            return None
        layer_id = identify_entries(entries)
        self._entries.setdefault(layer_id, entries)
        return layer_id


def discard_folder(folder: Path) -> None:
    """Remove a folder. One that cannot be removed is told of and tried again with every later one."""
    for place in (folder, *_left):
        try:
            remove_folder(place)
        except OSError as error:
            if place not in _left:
                logger.warning("folder %s stays for now: %s", place, error)
            _left.add(place)
        else:
            _left.discard(place)


def files_of(entries: Entries) -> dict[str, bytes]:
    """Content of the regular files, by path."""
    return {path: entry.content for path, entry in entries.items() if entry.kind is EntryKind.FILE}


def compare_files(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Files that differ, as they are now. None: there is none any more. Caches are left out."""
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
    """Removed names for every cache and every history below a repository."""
    removed: dict[str, bytes | None] = {}
    for folder, folders, names in os.walk(repository):
        for name in [*folders, *names]:
            if is_hidden(name):
                removed[str(Path(folder, name).relative_to(repository))] = None
        folders[:] = [name for name in folders if name not in _HIDDEN_NAMES]

    return entries_of_files(removed, lambda path: (repository / path).stat())


def _state_parent() -> Path:
    """Folder of layers and writes: /dev/shm where it is writable and has 1 GiB free, so that writes count
    against a box's memory limit, else the temporary folder.
    """
    memory, parent = Path("/dev/shm"), Path(tempfile.gettempdir())
    if memory.is_dir() and os.access(memory, os.W_OK):
        space = os.statvfs(memory)
        if space.f_bavail * space.f_frsize >= 1 << 30:
            parent = memory
    _sweep_dead(parent)
    return parent


def _prefix() -> str:
    return f"ostinato-{os.geteuid()}-{os.getpid()}-"


def _sweep_dead(parent: Path) -> None:
    """Remove what killed processes of this user left."""
    for folder in parent.glob(f"ostinato-{os.geteuid()}-*-*"):
        maker = folder.name.split("-")[2]
        if maker.isdigit() and not Path("/proc", maker).exists():
            with contextlib.suppress(OSError):
                remove_folder(folder)
