"""A benchmark program that runs the product's stages, which are Prefect tasks, beside a server of its own."""

import os
import subprocess
import sys

from rich.console import Console

from ostinato.flows.operating import local_prefect
from ostinato.infra.platform.settings import load_settings


def ensure_server(module: str) -> None:
    """Returns in a process that knows a Prefect server; elsewhere runs this command again in one and exits as it does."""
    if "PREFECT_API_URL" in os.environ:
        return
    with local_prefect.server(load_settings(), Console()) as (environment, await_server):
        await_server()
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, **environment}, check=False).returncode)
