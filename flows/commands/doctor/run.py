"""Checks of `ostinato doctor`, in the order in which a newcomer meets them."""

import sys
from collections.abc import Sequence

import psutil
import typer

from ostinato.flows.commands.doctor.boxes import check_box_programs, check_sandbox
from ostinato.flows.commands.doctor.check import Check
from ostinato.flows.commands.doctor.machine import check_disk, check_memory, check_port
from ostinato.flows.commands.doctor.programs import (
    ENGINE_PROGRAM,
    MEGATRON_PROGRAM,
    ON_CPU,
    RAY_PROGRAM,
    REINSTALL,
    TORCH_PROGRAM,
    VLLM_PROGRAM,
    check_program,
    check_python,
    check_ray,
)
from ostinato.flows.commands.doctor.services import (
    check_database,
    check_object_store,
    check_schedules,
)
from ostinato.flows.operating.local_prefect import named_server
from ostinato.flows.recipe import Recipe
from ostinato.infra.platform.settings import Settings


def run_checks(settings: Settings, recipe: Recipe, *, deep: bool = False) -> list[Check]:
    """All checks; `recipe` says how much memory and disk is enough. `deep` also starts Ray."""
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
        check_box_programs(),
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
        fix = "install the extra `vllm`, or take --set decoding.engine=local"
        checks.insert(4, check_program("vllm", VLLM_PROGRAM, fix))
    if deep:
        arguments = [str(settings.cpu_limit), str(settings.object_store_memory_bytes)]
        fix = "free memory and look into /tmp/ostinato-ray-*/ray/session_latest/logs"
        checks.append(check_program("ray start", RAY_PROGRAM, fix, arguments))
    return checks


def show(checks: Sequence[Check]) -> None:
    """Prints a line per check and, below one that failed, its fix."""
    for check in checks:
        mark = typer.style("ok    ", fg="green") if check.ok else typer.style("not ok", fg="red")
        typer.echo(f"{mark} {check.name:<22} {check.detail}")
        if not check.ok:
            typer.echo(f"       fix: {check.fix}")
