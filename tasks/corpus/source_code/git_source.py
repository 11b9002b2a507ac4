"""Python files of one commit of a git repository. Nothing that the repository names is run: no hook, no filter."""

import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.git import (
    fetch_commit,
    list_tree,
    read_blobs,
    resolve_commit,
    run_git,
)
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.corpus.config import CodeSource

SUBMODULE, LFS_POINTER = "submodule", "lfs_pointer"  # reasons to leave a path out
_LFS_START = b"version https://git-lfs.github.com/spec/"
_URL = re.compile(r"[\w+.-]+://|[\w.-]+@[\w.-]+:")
_BLOBS_AT_ONCE = 256


def open_commit(source: CodeSource, revision: str, settings: Settings) -> tuple[Path, str]:
    """A repository of this machine that holds the revision, and its commit. That of a URL is kept in the cache.
    ConfigError without git, repository or revision.
    """
    place = f"corpus source {source.name!r}: path is {source.path!r}"
    if shutil.which("git") is None:
        raise ConfigError(f"{place}, of kind git, and no program git is on PATH; install it")
    try:
        if _URL.match(source.path):
            name = hashlib.sha256(source.path.encode()).hexdigest()[:16]
            repository = settings.cache_directory / "git-sources" / f"{name}.git"
            return repository, fetch_commit(source.path, revision, repository)
        repository = Path(source.path).expanduser()
        if not ((repository / ".git").exists() or (repository / "HEAD").is_file()):
            raise ConfigError(f"{place}, wanted a git repository or the URL of one")
        _refuse_partial(repository, place)
        return repository, resolve_commit(repository, revision)
    except ProblemError as error:
        raise ConfigError(
            f"{place} with revision {revision!r}, wanted a repository that can be read and, of it, a commit in "
            f"full, a tag or a branch: {error}"
        ) from None


def read_commit(
    repository: Path,
    commit: str,
    is_wanted: Callable[[PurePosixPath, int], bool],
    dropped: Counter[str],
) -> Iterator[tuple[str, bytes]]:
    """Paths and contents, in the order of a directory's. `is_wanted` is given a path and its bytes; submodules and
    pointers to large files are counted in `dropped`.
    """
    keys: dict[PurePosixPath, str] = {}
    for entry in list_tree(repository, commit):
        path = PurePosixPath(entry.path)
        if entry.kind != "blob":
            dropped[SUBMODULE] += 1
        elif not entry.is_link and is_wanted(path, entry.num_bytes):
            keys[path] = entry.key
    paths = sorted(keys)
    for start in range(0, len(paths), _BLOBS_AT_ONCE):
        some = paths[start : start + _BLOBS_AT_ONCE]
        blobs = read_blobs(repository, [keys[path] for path in some])
        for path in some:
            content = blobs[keys[path]]
            if content.startswith(_LFS_START):
                dropped[LFS_POINTER] += 1
            else:
                yield path.as_posix(), content


def _refuse_partial(repository: Path, place: str) -> None:
    """Older git fetches what a partial clone lacks, by a program that the clone's configuration may name."""
    settings = run_git(repository, "config", "--list", "--name-only", "-z").decode().split("\0")
    for name in settings:
        if name == "extensions.partialclone" or name.endswith(".promisor"):
            raise ConfigError(
                f"{place}, a partial clone ({name} is set), wanted a full one or its URL"
            )
