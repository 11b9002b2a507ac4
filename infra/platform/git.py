"""git on repositories of strangers: nothing that their configuration names is run."""

import io
import os
import posixpath
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from ostinato.infra.platform.errors import ProblemError

_SECONDS = 300
_MAX_LINKS = 8  # from one to the next
MAX_OUTPUT_BYTES = 512 << 20
# each of these settings of a repository can name a program or a place to fetch from
_SETTINGS = (
    "core.fsmonitor=false", "core.hooksPath=/dev/null", "core.sshCommand=ssh", "log.showSignature=false",
    "gpg.program=false", "gpg.ssh.program=false", "gpg.x509.program=false", "diff.external=", "core.pager=cat",
    "credential.helper=", "protocol.ext.allow=never", "submodule.recurse=false",
)  # fmt: skip
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ATTR_NOSYSTEM": "1",
}


def run_git(directory: Path | None, *arguments: str, max_bytes: int = MAX_OUTPUT_BYTES) -> bytes:
    """Output of a git command in `directory` (None: in none). ProblemError says what git said.

    Objects of git are compressed, so the output has a bound.
    """
    command = ["git"]
    for setting in _SETTINGS:
        command += ["-c", setting]
    if directory is not None:
        command += ["-c", f"safe.directory={directory.resolve()}", "-C", str(directory)]
    place = "" if directory is None else f" in {directory}"
    environment = {**os.environ, **_ENVIRONMENT}
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.Popen(
                [*command, *arguments], stdout=subprocess.PIPE, stderr=errors, env=environment
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
                f"git {arguments[0]}{place} gave more than {max_bytes} bytes, which is the most"
            )
        if done.returncode != 0:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-300:]
            raise ProblemError(
                f"git {arguments[0]}{place} ended with {done.returncode} (at most {_SECONDS} s): {said}"
            )
        return output


def read_tree(repository: Path, commit: str, max_bytes: int = MAX_OUTPUT_BYTES) -> dict[str, bytes]:
    """Files of a commit by path, `max_bytes` in all.

    A link to a file of the same commit is that file; other links are left out. git itself refuses
    paths that leave the folder.
    """
    packed = run_git(repository, "archive", "--format=tar", commit, max_bytes=max_bytes)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        items = tar.getmembers()
        opened = [(item.name, tar.extractfile(item)) for item in items if item.isreg()]
        files = {name: file.read() for name, file in opened if file is not None}
    links = {item.name: item.linkname for item in items if item.issym()}
    for link in links:
        target = _follow(link, links)
        if target in files:
            files[link] = files[target]
    if sum(map(len, files.values())) > max_bytes:
        raise ProblemError(
            f"{repository}: with links followed, commit {commit} holds more than {max_bytes} bytes, "
            "which is the most"
        )
    return files


def _follow(path: str, links: Mapping[str, str]) -> str:
    """Where a path ends, links followed. A path out of the tree stays one: no file has its name."""
    for _ in range(_MAX_LINKS):
        if path not in links:
            break
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), links[path]))
    return path
