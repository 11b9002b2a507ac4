"""Checks of this machine: memory, disk, ports. What a recipe needs is compared when one is named."""

import shutil
from pathlib import Path

import psutil

from ostinato.flows.commands.doctor.check import Check, compare, gigabytes
from ostinato.flows.commands.doctor.memory import estimate_memory
from ostinato.flows.recipe import Recipe
from ostinato.flows.stages.disk import estimate_disk

_OWN_PROGRAMS = (
    "-m ostinato.flows.operating.prefect_server",
    "-m ostinato.flows.operating.gateway_process",
    "-m ostinato.flows.operating.dashboard.process",
)
_SHOWN = 140  # characters of a process's command


def check_memory(recipe: Recipe, available_bytes: int, *, has_gpu: bool = False) -> Check:
    """Memory for the recipe's largest stage, where no GPU holds the model."""
    if has_gpu:
        detail = f"{gigabytes(available_bytes)} free; `ostinato plan` tells what GPUs hold"
        return Check(name="memory", ok=True, detail=detail)
    parts = estimate_memory(recipe)
    most = max(parts, key=lambda name: parts[name])
    seen = f"{gigabytes(available_bytes)} free for recipe {recipe.name}"
    wanted = f"{gigabytes(sum(parts.values()))}, {gigabytes(parts[most])} of it {most}"
    fix = "end other programs, or take a smaller recipe"
    return compare("memory", available_bytes >= sum(parts.values()), seen, wanted, fix)


def check_disk(home: Path, wanted_bytes: int, recipe: Recipe | None = None) -> Check:
    """Room where the project keeps its files: to start, and for what the recipe's chain may fill."""
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    seen = f"{gigabytes(free)} free at {home}"
    if recipe is not None:
        wanted_bytes = max(wanted_bytes, sum(estimate_disk(recipe).values()))
    of_whom = "" if recipe is None else f" for recipe {recipe.name}"
    fix = "free space, or set OSTINATO_HOME to a larger disk"
    wanted = f"{gigabytes(wanted_bytes)}{of_whom}"
    return compare("disk", free >= wanted_bytes, f"{seen}{of_whom}", wanted, fix)


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
    return compare(name, False, f"{port} is busy ({holder[:_SHOWN]})", "a free port", fix)


def _describe_process(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline())}"
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "a process of another user"
