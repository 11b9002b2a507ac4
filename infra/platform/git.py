"""Runs git on untrusted repositories without running any program that their configuration names."""

import hashlib
import os
import posixpath
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import locked

_SECONDS = 300
_MAX_LINKS = 8  # links to links that are followed for one path
_LINK = "120000"  # mode of a link in a tree
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FETCHED = "refs/fetched"  # a ref per fetched commit, so that git does not prune it
MAX_OUTPUT_BYTES = 512 << 20
# each of these settings can name a program to run or a place to fetch from
_SETTINGS = (
    "core.fsmonitor=false", "core.hooksPath=/dev/null", "core.sshCommand=ssh", "log.showSignature=false",
    "gpg.program=false", "gpg.ssh.program=false", "gpg.x509.program=false", "diff.external=", "core.pager=cat",
    "credential.helper=", "protocol.ext.allow=never", "submodule.recurse=false",
)  # fmt: skip
# output of `git rev-parse --local-env-vars`: git sets some for hooks, and each would redirect git to the hook's repository
_REPOSITORY_VARIABLES = {
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_CONFIG", "GIT_CONFIG_COUNT", "GIT_CONFIG_PARAMETERS", "GIT_DIR",
    "GIT_GRAFT_FILE", "GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_INTERNAL_SUPER_PREFIX", "GIT_NAMESPACE",
    "GIT_NO_REPLACE_OBJECTS", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_REPLACE_REF_BASE", "GIT_SHALLOW_FILE", "GIT_WORK_TREE",
}  # fmt: skip
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ATTR_NOSYSTEM": "1",
}


def run_git(
    directory: Path | None,
    *arguments: str,
    max_bytes: int = MAX_OUTPUT_BYTES,
    input_bytes: bytes = b"",
) -> bytes:
    """Output of a git command in `directory` (None: in no repository). ProblemError with git's message, or for an
    output of more than `max_bytes`, which small repositories can give because git's objects are compressed.
    """
    command = ["git"]
    for setting in _SETTINGS:
        command += ["-c", setting]
    if directory is not None:
        command += ["-c", f"safe.directory={directory.resolve()}", "-C", str(directory)]
    place = "" if directory is None else f" in {directory}"
    kept = {name: text for name, text in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    environment = kept | _ENVIRONMENT
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
        given.write(input_bytes)
        given.seek(0)
        try:
            done = subprocess.Popen(
                [*command, *arguments],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        except OSError as error:
            raise ProblemError(f"git {arguments[0]}{place}: {error}") from error
        timer = threading.Timer(_SECONDS, done.kill)
        timer.start()
        try:
            with done:
                assert done.stdout is not None
                output = done.stdout.read(max_bytes + 1)
                if len(output) > max_bytes:
                    done.kill()
        finally:
            timer.cancel()
        if len(output) > max_bytes:
            raise ProblemError(
                f"git {arguments[0]}{place} gave more than {max_bytes} bytes, wanted at most that many"
            )
        if done.returncode != 0:
            errors.seek(0)
            said = " ".join(errors.read().decode(errors="replace").split())[-300:]
            raise ProblemError(
                f"git {arguments[0]}{place} ended with {done.returncode} (at most {_SECONDS} s): {said}"
            )
        return output


class TreeEntry(NamedTuple):
    """One file, link or submodule of a commit."""

    path: str
    kind: str  # blob, or commit for a submodule
    key: str  # name of the object
    num_bytes: int
    is_link: bool


def resolve_commit(repository: Path, revision: str) -> str:
    """The full name of the commit that a revision names. ProblemError when it names none."""
    asked = f"{revision}^{{commit}}"
    return run_git(repository, "rev-parse", "--verify", "--end-of-options", asked).decode().strip()


def fetch_commit(url: str, revision: str, repository: Path, *, with_history: bool = False) -> str:
    """Fetches the commit that a revision of another repository names into the bare `repository`, and returns its
    full name. A commit that is there already is not fetched again.
    """
    with _locked(repository):
        fetched = f"{_FETCHED}/{revision}"
        if _COMMIT.fullmatch(revision) and (repository / "HEAD").is_file():
            with suppress(ProblemError):  # a damaged copy is replaced
                if run_git(repository, "for-each-ref", fetched):
                    return resolve_commit(repository, fetched)
        if (repository / "HEAD").is_file():
            with suppress(ProblemError):
                return _fetch(url, revision, repository, with_history)
        # into a new folder, so that `repository` is always complete
        with tempfile.TemporaryDirectory(dir=repository.parent) as folder:
            new = Path(folder) / "new"
            run_git(None, "init", "--quiet", "--bare", "--template=", "--", str(new))
            commit = _fetch(url, revision, new, with_history)
            if repository.exists():
                repository.rename(Path(folder) / "old")
            new.rename(repository)
        return commit


def fetch_newest(url: str, revision: str, repository: Path) -> tuple[str, str]:
    """Like `fetch_commit` with the history. If the fetch fails, the last commit fetched for this revision is returned
    with a sentence that says how old it is and why it is used.
    """
    try:
        return fetch_commit(url, revision, repository, with_history=True), ""
    except ProblemError as error:
        stamp = repository / _latest(revision).rpartition("/")[2]
        if not stamp.is_file():
            raise
        fetched_at = stamp.stat().st_mtime
        stated = time.strftime("%Y-%m-%d %H:%M", time.localtime(fetched_at))
        age_hours = max(0.0, time.time() - fetched_at) / 3600
        commit = resolve_commit(repository, _latest(revision))
        return commit, (
            f"the copy fetched on {stated}, {age_hours:.1f} hours ago, is used, with commit {commit[:12]} as its "
            f"{revision}, since a newer one cannot be had: {error}"
        )


@contextmanager
def _locked(repository: Path) -> Iterator[None]:
    """Lets one process at a time change a repository. Removes git's lock files that a killed process left in it."""
    repository.parent.mkdir(parents=True, exist_ok=True)
    with locked(repository.with_name(f"{repository.name}.lock")):
        for left in repository.rglob("*.lock"):
            left.unlink()
        yield


def _latest(revision: str) -> str:
    return f"refs/latest/{hashlib.sha256(revision.encode()).hexdigest()[:16]}"


def _fetch(url: str, revision: str, repository: Path, with_history: bool) -> str:
    latest = _latest(revision)
    depth = () if with_history else ("--depth=1",)
    run_git(
        repository, "fetch", "--quiet", *depth, "--no-tags", "--no-recurse-submodules", "--no-auto-gc",
        "--update-shallow", "--end-of-options", url, f"+{revision}:{latest}",
    )  # fmt: skip
    commit = resolve_commit(repository, latest)
    run_git(repository, "update-ref", f"{_FETCHED}/{commit}", commit)
    (repository / latest.rpartition("/")[2]).touch()
    return commit


def list_tree(
    repository: Path, commit: str, max_bytes: int = MAX_OUTPUT_BYTES
) -> Iterator[TreeEntry]:
    """Files, links and submodules of a commit. ProblemError for paths that leave the folder."""
    arguments = ("ls-tree", "-r", "-z", "-l", "--full-tree", "--end-of-options", commit)
    for entry in run_git(repository, *arguments, max_bytes=max_bytes).split(b"\0")[:-1]:
        head, _, name = entry.partition(b"\t")
        mode, kind, key, size = head.decode().split()
        path = os.fsdecode(name)
        if not _stays_inside(path):
            raise ProblemError(f"{repository}: commit {commit} holds the invalid path {path!r}")
        # git gives no size for a submodule or a missing object
        yield TreeEntry(path, kind, key, int(size) if size.isdigit() else 0, mode == _LINK)


def read_tree(
    repository: Path,
    commit: str,
    max_bytes: int = MAX_OUTPUT_BYTES,
    *,
    max_file_bytes: int = MAX_OUTPUT_BYTES,
) -> dict[str, bytes]:
    """Files of a commit by path as they are stored, at most `max_bytes` in total, without files of more than
    `max_file_bytes`.

    A link to a file of the same commit has the content of that file. Other links and submodules are left out.
    ProblemError for paths that leave the folder. Attributes are ignored: `git archive` and a
    checkout would run the filters that they and the repository's configuration name.
    """
    entries = [
        item
        for item in list_tree(repository, commit, max_bytes)
        if item.kind == "blob" and item.num_bytes <= max_file_bytes
    ]
    blobs = read_blobs(repository, (item.key for item in entries), max_bytes)
    files = {item.path: blobs[item.key] for item in entries if not item.is_link}
    links = {item.path: os.fsdecode(blobs[item.key]) for item in entries if item.is_link}
    for link in links:
        target = _follow(link, links)
        if target in files:
            files[link] = files[target]
    if sum(map(len, files.values())) > max_bytes:
        raise ProblemError(
            f"{repository}: with links followed, commit {commit} holds more than {max_bytes} bytes, "
            "wanted at most that many"
        )
    return files


def read_blobs(
    repository: Path, keys: Iterable[str], max_bytes: int = MAX_OUTPUT_BYTES
) -> dict[str, bytes]:
    """Content of objects by their names, as stored: `cat-file --batch` ignores attributes."""
    names = list(dict.fromkeys(keys))
    asked = "".join(f"{name}\n" for name in names).encode()
    output = run_git(repository, "cat-file", "--batch", max_bytes=max_bytes, input_bytes=asked)
    blobs: dict[str, bytes] = {}
    at = 0
    for name in names:  # answers come in order: NAME KIND SIZE, newline, content, newline
        start = output.index(b"\n", at) + 1
        head = output[at:start].split()
        if len(head) != 3 or head[1] != b"blob":
            raise ProblemError(f"{repository} lacks the object {name}: git said {head!r}")
        at = start + int(head[2]) + 1
        blobs[name] = output[start : at - 1]
    return blobs


def _stays_inside(path: str) -> bool:
    """Whether a path stays below its folder and outside of `.git`."""
    return not any(part.lower() in ("", ".", "..", ".git") for part in path.split("/"))


def _follow(path: str, links: Mapping[str, str]) -> str:
    """The path with links followed. If a link leaves the tree, the result names no file of the tree."""
    for _ in range(_MAX_LINKS):
        if path not in links:
            break
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), links[path]))
    return path
