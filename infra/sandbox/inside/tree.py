"""The repository folder of a box: fill it, see what changed, put it back.

`Tree`, which keeps the pristine contents in memory (never on a path the box could read) and file
signatures that tell unchanged files without reading them. Standard library only: this file runs
inside the box.
"""

import os
import stat
import time

_SKIPPED = frozenset({"__pycache__", ".pytest_cache", ".git"})
# A file written within this time of its signature may change again without a new timestamp: compare
# its content.
_RACY_NS = 20_000_000
_MAX_NEW_FILES = 500
MAX_READ_BYTES = 8 << 20


class Tree:
    """Files below `root`."""

    def __init__(self, root: str, pristine: dict[str, bytes]) -> None:
        self.root = root
        self.pristine = pristine
        self._signatures: dict[str, tuple[tuple[int, ...], int]] = {}
        self._contents: dict[
            str, bytes
        ] = {}  # what was last put there, where it is not the pristine content
        for path, content in pristine.items():
            self.put(path, content)

    def put(self, path: str, content: bytes) -> None:
        """Write one file from this server and remember its signature."""
        full = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            self._sign(path, os.fstat(descriptor))
        finally:
            os.close(descriptor)
        if content == self.pristine.get(path):
            self._contents.pop(path, None)
        else:
            self._contents[path] = content

    def changed(self) -> dict[str, bytes | None]:
        """Files that differ from the pristine repository; None: removed."""
        found = self._scan()
        changes: dict[str, bytes | None] = {
            path: None for path in self.pristine if path not in found
        }
        num_new = 0
        for path, status in sorted(found.items()):
            if path not in self.pristine:
                num_new += 1
                if num_new > _MAX_NEW_FILES:
                    continue
            content = self._current(path, status)
            if content != self.pristine.get(path):
                changes[path] = content
        return changes

    def restore(self, files: dict[str, bytes | None]) -> None:
        """Put back the pristine repository with `files` laid over it (None: without that file)."""
        found = self._scan(remove_others=True)
        wanted: dict[str, bytes | None] = dict.fromkeys(found)
        wanted.update(self.pristine)
        wanted.update(files)
        for path, content in wanted.items():
            if content is None:
                if path in found:
                    os.unlink(os.path.join(self.root, path))
                self._contents.pop(path, None)
            elif path not in found or self._current(path, found[path]) != content:
                self.put(path, content)
        self._remove_empty_folders(wanted)

    def _remove_empty_folders(self, wanted: dict[str, bytes | None]) -> None:
        needed = {""}
        for path, content in wanted.items():
            while content is not None and path:
                path = os.path.dirname(path)
                needed.add(path)
        for folder, names, _ in os.walk(self.root):
            relative = os.path.relpath(folder, self.root)
            for name in list(names):
                if os.path.normpath(os.path.join(relative, name)) not in needed:
                    remove_tree(os.path.join(folder, name))
                    names.remove(name)

    def _sign(self, path: str, status: os.stat_result) -> None:
        self._signatures[path] = (_signature(status), time.time_ns())

    def _current(self, path: str, status: os.stat_result) -> bytes | None:
        """Content now.

        From memory when the signature says that nobody wrote since this server did.
        """
        known = self._signatures.get(path)
        is_same = known is not None and known[0] == _signature(status)
        if known is not None and is_same and status.st_ctime_ns + _RACY_NS < known[1]:
            return self._contents.get(path, self.pristine.get(path))
        content = read_regular(os.path.join(self.root, path), {status.st_dev})
        last = self._contents.get(path, self.pristine.get(path))
        if content == last:
            self._sign(path, status)
        return content

    def _scan(self, remove_others: bool = False) -> dict[str, os.stat_result]:
        """Regular files by relative path.

        `remove_others` also drops links, caches and folders without files.
        """
        found: dict[str, os.stat_result] = {}
        folders = [""]
        for folder in folders:
            full = os.path.join(self.root, folder)
            os.chmod(full, 0o755)
            for entry in os.scandir(full):
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _SKIPPED:
                        folders.append(path)
                    elif remove_others:
                        remove_tree(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    found[path] = entry.stat(follow_symlinks=False)
                elif remove_others:
                    os.unlink(entry.path)
        return found


def read_regular(path: str, devices: set[int]) -> bytes | None:
    """Content of a regular file on one of `devices`, up to MAX_READ_BYTES; None when it is anything
    else.

    The device check is on the opened file: links into /proc cannot make this server read its own
    memory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except PermissionError:
        try:
            os.chmod(path, 0o644, follow_symlinks=False)
        except (OSError, NotImplementedError):
            return None
        return None
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_dev not in devices:
            return None
        return file.read(MAX_READ_BYTES)


def remove_tree(path: str) -> None:
    """Remove a folder and all below it, whatever its permissions.

    Links are removed, not followed.
    """
    os.chmod(path, 0o755)
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(entry.path)
        else:
            os.unlink(entry.path)
    os.rmdir(path)


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)
