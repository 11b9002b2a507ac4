"""Runs the documented commands at miniature size under a function trace and reports what they reached.

python -m tests.reached [--keep FOLDER] [--report FOLDER]
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2

from ostinato.flows.stages.server_access import basic_header, read_login
from tests.architecture.source import ROOT
from tests.reached.commands import (
    AFTER_SERVICES,
    ATTEMPTS,
    CHECKPOINT,
    COMMANDS,
    IMPORTED,
    RUN,
    write_inputs,
)
from tests.reached.report import measure, print_report

WANTED_SHARE = 0.85
OSTINATO = (sys.executable, "-P", "-c", "from ostinato.flows.cli import main; main()")
GATEWAY_SECONDS = 300.0
COMMAND_SECONDS = 3600.0
TRIES = 2
END_SECONDS = 120.0


def end(child: subprocess.Popen[bytes]) -> int:
    """Ends a command as Ctrl-C does, and by force where that takes too long. Its exit code."""
    child.send_signal(signal.SIGINT)
    try:
        return child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def run(arguments: Sequence[str], environment: dict[str, str]) -> int:
    """Runs one command to its end, or a limit; its output goes to this process's. What a busy machine
    stopped goes on at a second try, as the documents promise.
    """
    code = 2
    if ATTEMPTS in arguments:
        found = Path(environment["OSTINATO_HOME"]).glob(f"runs/{RUN}/reinforced-*")
        newest = max(found, key=lambda folder: folder.stat().st_mtime, default=Path("none"))
        arguments = [newest.name if word == ATTEMPTS else word for word in arguments]
    for _ in range(TRIES):
        print(f"--- ostinato {' '.join(arguments)}", flush=True)
        started = time.monotonic()
        child = subprocess.Popen(
            [*OSTINATO, *arguments], env=environment, cwd=environment["OSTINATO_HOME"]
        )
        try:
            code = child.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            code = end(child)
        print(f"--- exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
        if code in (0, 1):  # 1: the gate or a comparison says no
            break
    return code


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def talk_to_gateway(address: str, key: str) -> None:
    """One completion, one stream, a session with feedback, and a refused request."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=address, headers=headers, timeout=120) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        messages = [{"role": "user", "content": "Fix total in shop/cart.py"}]
        ask = {"model": model, "messages": messages, "max_tokens": 32}
        client.post("/v1/chat/completions", json=ask)
        with client.stream("POST", "/v1/chat/completions", json=ask | {"stream": True}) as stream:
            list(stream.iter_lines())
        client.post("/v1/chat/completions", json=ask | {"model": "none"})


def use_services(environment: dict[str, str], home: Path, address: str) -> None:
    """What README and docs do with a running `ostinato up`."""
    keys = json.loads((home / "gateway_keys.json").read_text())
    talk_to_gateway(address, keys["local"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "shop.py").write_text("def total(a, b):\n    return a - b\n")
        chat = ("chat", "--repo", folder, "--message", "fix total")
        run((*chat, "--gateway", address, "--apply", "always"), environment)
        run((*chat, "--checkpoint", CHECKPOINT), environment)
        if shutil.which("qemu-system-x86_64"):
            run((*chat, "--checkpoint", CHECKPOINT, "--sandbox", "microvm"), environment)
    endpoint = ("--endpoint", f"{address}/v1", "--model", "ostinato", "--key-env", "REACHED_KEY")
    run(
        ("evaluate", "--recipe", "miniature", *endpoint),
        environment | {"REACHED_KEY": keys["local"]},
    )
    login = read_login(home)
    api = {
        "PREFECT_API_URL": f"http://127.0.0.1:{environment['OSTINATO_PREFECT_PORT']}/api",
        "PREFECT_API_AUTH_STRING": login,
    }
    run(("deploy", "--recipe", "miniature"), environment | api)
    deployment = (sys.executable, "-m", "prefect", "deployment", "run", "--watch")
    for name in (
        "problem-building/build-problems",
        "promotion/offer-to-users",
        "rollback/serve-previous",
    ):
        subprocess.run(
            (*deployment, name), env=environment | api, check=False, timeout=COMMAND_SECONDS
        )
    page = f"http://127.0.0.1:{environment['OSTINATO_DASHBOARD_PORT']}/"
    httpx2.get(page, timeout=60, headers={"authorization": basic_header(login)})
    run(("status",), environment)


def run_services(environment: dict[str, str], home: Path) -> None:
    """`ostinato up`: waits for the gateway, uses all of it, stops all."""
    port = free_port()
    environment = environment | {
        "OSTINATO_GATEWAY_PORT": str(port),
        "OSTINATO_DASHBOARD_PORT": str(free_port()),
        "OSTINATO_PREFECT_PORT": str(free_port()),
    }
    services = subprocess.Popen(
        [*OSTINATO, "up", "--recipe", "miniature", "--line", "tests"], env=environment, cwd=ROOT
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + GATEWAY_SECONDS
        while time.monotonic() < deadline and services.poll() is None:
            try:
                if httpx2.get(f"{address}/healthz", timeout=5).is_success:
                    break
            except httpx2.HTTPError:
                time.sleep(2)
        use_services(environment, home, address)
    except (OSError, httpx2.HTTPError, subprocess.TimeoutExpired) as error:
        print(f"--- services: {error}", flush=True)
    finally:
        end(services)


def main() -> None:
    """Runs everything, or only reads what an earlier run left, and exits with 1 below the share."""
    parser = argparse.ArgumentParser(prog="python -m tests.reached", description=__doc__)
    parser.add_argument("--keep", help="folder for home and traces; default: a temporary one")
    parser.add_argument("--report", help="only report on the traces in this folder")
    options = parser.parse_args()
    if options.report:
        sys.exit(0 if print_report(measure(Path(options.report))) >= WANTED_SHARE else 1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        traces, home = folder / "traces", folder / "home"
        traces.mkdir(parents=True, exist_ok=True)
        home.mkdir(exist_ok=True)
        path = [str(ROOT / "tests/reached/hook"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "OSTINATO_REACHED_FOLDER": str(traces),
            "OSTINATO_HOME": str(home),
            "NUMBA_CACHE_DIR": str(folder / "numba"),
            "OMP_NUM_THREADS": "1",
        }
        write_inputs(home)
        trackers = {"OSTINATO_TRACKERS": "tensorboard"}
        codes = {" ".join(command): run(command, environment | trackers) for command in COMMANDS}
        run_services(environment, home)
        late = (*IMPORTED, *AFTER_SERVICES)
        codes |= {" ".join(command): run(command, environment) for command in late}
        print("exit codes:", json.dumps(codes))
        sys.exit(0 if print_report(measure(traces)) >= WANTED_SHARE else 1)


if __name__ == "__main__":
    main()
