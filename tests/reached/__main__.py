"""Runs the documented commands at miniature size under a function trace and reports what they reached.

python -m tests.reached [--keep FOLDER] [--report FOLDER]
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.architecture.source import ROOT
from tests.reached.report import measure, print_report

WANTED_SHARE = 0.85
OSTINATO = (sys.executable, "-P", "-c", "from ostinato.flows.cli import main; main()")
GATEWAY_SECONDS = 300.0
RUN = "miniature-seed0"
CHECKPOINT = "candidate/miniature@1"
EXPORTED = "exported"  # folders inside the one that this run keeps
KEPT_STEPS = ("--set", "learning.keep_for_replay=true")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("doctor", "--deep"),
    ("recipe", "list"),
    ("recipe", "show", "miniature"),
    ("demo", "--recipe", "miniature", *KEPT_STEPS, "--set", "rollout.boxes=fleet"),
    ("demo", "--recipe", "miniature", *KEPT_STEPS),
    ("replay", "--run", RUN),
    ("bisect", "--run", RUN, "--metric", "loss"),
    ("run", "controls", "--recipe", "miniature", *KEPT_STEPS),
    ("run", "problem-verification", "--recipe", "miniature"),
    ("run", "search-training", "--recipe", "miniature"),
    ("run", "search-ablation", "--recipe", "miniature"),
    ("run", "realtime-cycle", "--recipe", "miniature"),
    ("evaluate", "--recipe", "miniature"),
    ("evaluate", "--recipe", "miniature", "--checkpoint", CHECKPOINT, "--json"),
    ("export", CHECKPOINT, EXPORTED),
    ("import", EXPORTED, "--as", "again"),
    ("cycle", "show", "--recipe", "miniature", "--line", "tests"),
    ("gc", "--dry-run"),
    ("status",),
)


def run(arguments: Sequence[str], environment: dict[str, str]) -> int:
    """Runs one command to its end; its output goes to this process's."""
    print(f"--- ostinato {' '.join(arguments)}", flush=True)
    return subprocess.run(
        [*OSTINATO, *arguments], env=environment, cwd=environment["OSTINATO_HOME"], check=False
    ).returncode


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def talk_to_gateway(address: str, key: str) -> None:
    """One completion, one stream, a session with feedback, and a refused request."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=address, headers=headers, timeout=120) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        messages = [{"role": "user", "content": "Fix total in shop/cart.py"}]
        ask = {"model": model, "messages": messages, "max_tokens": 32}
        client.post("/v1/chat/completions", json=ask)
        with client.stream("POST", "/v1/chat/completions", json=ask | {"stream": True}) as stream:
            list(stream.iter_lines())
        client.post("/v1/chat/completions", json=ask | {"model": "none"})


def run_services(environment: dict[str, str], home: Path) -> None:
    """`ostinato up`: waits for the gateway, talks to it, chats through it, stops all."""
    port = free_port()
    dashboard = free_port()
    environment = environment | {
        "OSTINATO_GATEWAY_PORT": str(port),
        "OSTINATO_DASHBOARD_PORT": str(dashboard),
    }
    services = subprocess.Popen(
        [*OSTINATO, "up", "--recipe", "miniature", "--line", "tests"], env=environment, cwd=ROOT
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + GATEWAY_SECONDS
        while time.monotonic() < deadline and services.poll() is None:
            try:
                if httpx.get(f"{address}/healthz", timeout=5).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(2)
        keys = json.loads((home / "gateway_keys.json").read_text())
        talk_to_gateway(address, keys["local"])
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "shop.py").write_text("def total(a, b):\n    return a - b\n")
            chat = ("chat", "--repo", folder, "--message", "fix total")
            run((*chat, "--gateway", address), environment)
            run((*chat, "--checkpoint", CHECKPOINT), environment)
            run(("status",), environment)
    finally:
        services.send_signal(signal.SIGINT)
        services.wait(timeout=60)


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
        codes = {" ".join(command): run(command, environment) for command in COMMANDS}
        run_services(environment, home)
        print("exit codes:", json.dumps(codes))
        sys.exit(0 if print_report(measure(traces)) >= WANTED_SHARE else 1)


if __name__ == "__main__":
    main()
