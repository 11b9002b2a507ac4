"""Frozen layers on this host, and stacks of them over a repository.

`LayerStore`: which layers exist (by content), their folders for the overlay, the layer that hides a
repository's caches and history, and squashing; and `Stack`: what a sandbox's /repo shows below its
own writes. It starts no box.
"""

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostinato.infra.platform.errors import InvalidArgument, OutputLimit, SandboxNotFound
from ostinato.infra.sandbox.layers import (
    Entries,
    Entry,
    EntryKind,
    entries_of_files,
    fold_entries,
    identify_entries,
    pack_entries,
    remove_folder,
    unpack_entries,
    write_entries,
)

SQUASH_LAYERS = 24  # overlay options fit one page; a longer chain also slows every look-up
SKIPPED_NAMES = frozenset({"__pycache__", ".pytest_cache", ".git"})
_MAX_DIFF_BYTES = 64 << 20
# Compiled code, type and test caches and history tell what a problem removed from the sources.
_HIDDEN_NAMES = frozenset(
    [
        "__pycache__",
        ".git",
        ".hg",
        ".svn",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        ".nox",
        ".hypothesis",
        ".coverage",
        "htmlcov",
        ".eggs",
        ".venv",
    ]
)
_HIDDEN_SUFFIXES = (".pyc", ".pyo", ".egg-info", ".orig", ".rej")


def is_hidden(name: str) -> bool:
    """Whether a file or folder of a repository is kept from its sandboxes."""
    return name in _HIDDEN_NAMES or name.endswith(_HIDDEN_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Stack:
    """A repository folder (None: empty) and the layers over it, lowest first."""

    repository: Path | None
    layer_ids: tuple[str, ...] = ()

    def with_layer(self, layer_id: str | None) -> "Stack":
        """This stack with one more layer; None: nothing to add."""
        return self if layer_id is None else Stack(self.repository, (*self.layer_ids, layer_id))


class LayerStore:
    """Layers in `directory`, which it makes and removes."""

    def __init__(self, parent: Path | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent or state_parent()))
        for name in ("l", "p", "empty"):
            (self.directory / name).mkdir()
        self._uses: Counter[str] = Counter()
        self._entries: dict[str, Entries] = {}
        self._hidden: dict[Path, str | None] = {}

    def add(self, entries: Entries) -> str | None:
        """Keep a layer; its id. None when it has no entries."""
        if not entries:
            return None
        layer_id = identify_entries(entries)
        if layer_id not in self._uses:
            (self.directory / "p" / layer_id).write_bytes(pack_entries(entries))
            self._uses[layer_id] = 0
            self._entries[layer_id] = entries
        return layer_id

    def hold(self, stack: Stack) -> None:
        """The layers of a stack stay until it is let go."""
        self._uses.update(stack.layer_ids)

    def let_go(self, stack: Stack) -> None:
        """Undo one `hold`; layers that nobody holds are removed, but not a repository's mask."""
        self._uses.subtract(stack.layer_ids)
        for layer_id in set(stack.layer_ids):
            if self._uses[layer_id] <= 0 and layer_id not in self._hidden.values():
                del self._uses[layer_id]
                del self._entries[layer_id]
                (self.directory / "p" / layer_id).unlink()
                remove_folder(self.directory / "l" / layer_id)

    def entries(self, layer_id: str) -> Entries:
        """What a layer holds."""
        if layer_id not in self._entries:
            raise SandboxNotFound(f"no layer {layer_id} in {self.directory}")
        return self._entries[layer_id]

    def packed(self, layer_id: str) -> bytes:
        """A layer as bytes that another host's store can take (`add_packed`)."""
        self.entries(layer_id)
        return (self.directory / "p" / layer_id).read_bytes()

    def add_packed(self, packed: bytes) -> str | None:
        """Keep a layer that came from another store."""
        return self.add(unpack_entries(packed))

    def base(self, repository: Path | None) -> Stack:
        """A repository without its caches and history."""
        if repository is None:
            return Stack(None)
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
            self._hidden[repository] = self.add(_hiding_entries(repository))
        return Stack(repository).with_layer(self._hidden[repository])

    def lay_over(self, stack: Stack, files: Mapping[str, bytes | None]) -> Stack:
        """A stack with files over it; None: removed."""

        def mode_of_folder(path: str) -> int | None:
            if stack.repository is None or not (stack.repository / path).is_dir():
                return None
            return (stack.repository / path).stat().st_mode & 0o777

        return stack.with_layer(self.add(entries_of_files(files, mode_of_folder)))

    def squash(self, stack: Stack) -> Stack:
        """The same files from one layer, when the chain has grown too long."""
        if len(stack.layer_ids) <= SQUASH_LAYERS:
            return stack
        folded: dict[str, Entry] = {}
        for layer_id in stack.layer_ids:
            folded = fold_entries(folded, self.entries(layer_id))
        return Stack(stack.repository).with_layer(self.add(folded))

    def lower_folders(self, stack: Stack) -> tuple[Path, ...]:
        """Folders for the overlay, lowest first; layers are unpacked when first mounted."""
        folders = [stack.repository or self.directory / "empty"]
        for layer_id in stack.layer_ids:
            folder = self.directory / "l" / layer_id
            if not folder.is_dir():
                partial = Path(tempfile.mkdtemp(prefix="partial-", dir=self.directory))
                partial.chmod(0o755)
                write_entries(self.entries(layer_id), partial)
                partial.rename(folder)
            folders.append(folder)
        return tuple(folders)

    def compare(
        self, before: Stack, after: Stack, writes: Entries | None = None
    ) -> dict[str, bytes | None]:
        """Regular files that differ between two stacks, the second with a sandbox's own writes.

        None: removed. Caches are left out. Both must be of one repository.
        """
        if before.repository != after.repository:
            raise InvalidArgument(
                f"diff between repositories {before.repository} and {after.repository}"
            )
        num_common = 0
        for first, second in zip(before.layer_ids, after.layer_ids, strict=False):
            if first != second:
                break
            num_common += 1
        old = [self.entries(layer_id) for layer_id in before.layer_ids]
        new = [self.entries(layer_id) for layer_id in after.layer_ids]
        if writes is not None:
            new.append(writes)
        common = _View(before.repository, old[:num_common])
        touched: set[str] = set()
        for entries in (*old[num_common:], *new[num_common:]):
            touched.update(entries)
            for path, entry in entries.items():
                if entry.kind is not EntryKind.FOLDER or entry.is_opaque:
                    touched.update(common.files_below(path))
        return _differences(_View(before.repository, old), _View(after.repository, new), touched)

    def close(self) -> None:
        """Remove everything."""
        remove_folder(self.directory)


class _View:
    """Regular files of a repository with layers over it."""

    def __init__(self, repository: Path | None, layers: list[Entries]) -> None:
        self._repository = repository
        self._layers = layers

    def read(self, path: str) -> bytes | None:
        """Content of a regular file; None when there is none."""
        parts = path.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        for entries in reversed(self._layers):
            entry = entries.get(path)
            if entry is not None:
                return entry.content if entry.kind is EntryKind.FILE else None
            above = [entries[parent] for parent in parents if parent in entries]
            if any(entry.kind is not EntryKind.FOLDER or entry.is_opaque for entry in above):
                return None
        return self._read_repository(parents, path)

    def files_below(self, path: str) -> Iterator[str]:
        """Paths of what may be files below a folder."""
        prefix = path + "/"
        for entries in self._layers:
            yield from (name for name in entries if name.startswith(prefix))
        if self._repository is None or not (self._repository / path).is_dir():
            return
        for folder, _, names in os.walk(self._repository / path):
            for name in names:
                yield str(Path(folder, name).relative_to(self._repository))

    def _read_repository(self, parents: list[str], path: str) -> bytes | None:
        if self._repository is None:
            return None
        if any((self._repository / parent).is_symlink() for parent in parents):
            return None
        target = self._repository / path
        if target.is_symlink() or not target.is_file():
            return None
        return target.read_bytes()


def _differences(old: _View, new: _View, paths: set[str]) -> dict[str, bytes | None]:
    changes: dict[str, bytes | None] = {}
    num_bytes = 0
    for path in sorted(paths):
        if SKIPPED_NAMES.intersection(path.split("/")):
            continue
        content = new.read(path)
        if content != old.read(path):
            changes[path] = content
            num_bytes += len(content or b"")
            if num_bytes > _MAX_DIFF_BYTES:
                raise OutputLimit(f"diff of over {_MAX_DIFF_BYTES} bytes at {path}")
    return changes


def _hiding_entries(repository: Path) -> dict[str, Entry]:
    """Removed names for every cache and every history below a repository."""
    removed: dict[str, bytes | None] = {}
    for folder, folders, names in os.walk(repository):
        for name in [*folders, *names]:
            if is_hidden(name):
                removed[str(Path(folder, name).relative_to(repository))] = None
        folders[:] = [name for name in folders if name not in _HIDDEN_NAMES]

    return entries_of_files(removed, lambda path: (repository / path).stat().st_mode & 0o777)


def state_parent() -> Path:
    """Where layers and writes lie: in memory when the system lets its files carry what an overlay
    needs, so that writes count against a box's memory limit; else in the temporary folder.
    """
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        space = os.statvfs(memory)
        if space.f_bavail * space.f_frsize >= 1 << 30 and _carries_attributes(memory):
            _sweep_dead(memory)
            return memory
    fallback = Path(tempfile.gettempdir())
    _sweep_dead(fallback)
    return fallback


def _carries_attributes(parent: Path) -> bool:
    with tempfile.NamedTemporaryFile(dir=parent) as file:
        try:
            os.setxattr(file.name, "user.overlay.probe", b"y")
        except OSError:
            return False
    return True


def _prefix() -> str:
    return f"ostinato-{os.geteuid()}-{os.getpid()}-"


def _sweep_dead(parent: Path) -> None:
    """Remove what killed processes of this user left."""
    for folder in parent.glob(f"ostinato-{os.geteuid()}-*-*"):
        maker = folder.name.split("-")[2]
        if maker.isdigit() and not Path("/proc", maker).exists():
            with contextlib.suppress(OSError):
                remove_folder(folder)
