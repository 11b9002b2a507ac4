"""git on repositories of strangers: nothing that their configuration names is run."""

import os
import subprocess
from pathlib import Path

from ostinato.infra.platform.errors import ProblemError

_SECONDS = 300
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


def run_git(directory: Path | None, *arguments: str) -> bytes:
    """Output of a git command in `directory` (None: in none). ProblemError says what git said."""
    command = ["git"]
    for setting in _SETTINGS:
        command += ["-c", setting]
    if directory is not None:
        command += ["-c", f"safe.directory={directory.resolve()}", "-C", str(directory)]
    place = "" if directory is None else f" in {directory}"
    try:
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            timeout=_SECONDS,
            env={**os.environ, **_ENVIRONMENT},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProblemError(f"git {arguments[0]}{place}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-300:]
        raise ProblemError(f"git {arguments[0]}{place} ended with {done.returncode}: {said}")
    return done.stdout
