"""The command line of `ostinato chat`. It runs in a separate process, and with a gateway it loads no model."""

import asyncio
import contextlib
import datetime
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx2
import typer
from rich.console import Console

from ostinato.flows.chat.screen import ChatScreen
from ostinato.flows.chat.session import (
    USER_SECONDS,
    Apply,
    ChatModel,
    ChatSession,
    Interrupt,
    run_chat,
)
from ostinato.flows.chat.workplace import MAX_FILE_BYTES, is_inside, open_workplace, recent_files
from ostinato.flows.commands.launching import SetOption
from ostinato.flows.stages.console import print_error
from ostinato.infra.agent.config import HarnessConfig, PromptFacts
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.errors import ConfigError, OstinatoError, boundary
from ostinato.infra.platform.settings import Settings, load_settings, named_secret
from ostinato.infra.sandbox.backends import check_kind
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.serving.gateway.config import LOCAL_KEYS_FILE
from ostinato.infra.serving.gateway.tenants import local_tenants

LOCAL_TENANT = "local"
ANSWER_SECONDS = 600.0
RECENT_SECONDS = 24 * 3600.0  # files changed within this time are shown with the first message
RULE_FILES = ("AGENTS.md", ".ostinato/rules.md")
MAX_RULE_CHARACTERS = 8_000
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
OPEN_HARNESS = HarnessConfig(
    dialect="full",
    max_turns=100,
    max_generated_tokens=64_000,
    context_tokens=100_000,
    result_limit_characters=16_000,
    turn_limit_characters=48_000,
    read_limit_lines=400,
    call_time_limit_seconds=120.0,
    announce_turns=5,
    announce_tokens=4_000,
)
"""Harness for servers that do not report the one their model was trained with."""


@contextlib.asynccontextmanager
async def connect_gateway(url: str, api_key: str, wanted: str = "") -> AsyncIterator[ChatModel]:
    """The model behind an OpenAI-style server. Our gateway also reports the harness it was trained with."""
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=ANSWER_SECONDS) as client:
        with boundary(ConfigError, f"gateway {base}"):
            response = await client.get("/models")
            response.raise_for_status()
            listed: list[dict[str, Any]] = response.json()["data"]
        chosen = [entry for entry in listed if wanted in ("", entry["id"])]
        if not chosen:
            known = ", ".join(entry["id"] for entry in listed) or "none"
            raise ConfigError(f"gateway {base}: model is {wanted!r}, wanted one of {known}")
        first = chosen[0]
        harness, says_harness = OPEN_HARNESS, "harness" in first
        if says_harness:
            harness = HarnessConfig.model_validate(first["harness"])
        name = f"{first['id']} at {base}"
        yield ChatModel(
            name, harness, client=client, model_name=first["id"], says_harness=says_harness
        )


def read_rules(root: Path) -> str:
    """The repository's rules for agents. Empty when it has none."""
    for name in RULE_FILES:
        if is_inside(root, name, may_link=True):
            with contextlib.suppress(OSError), (root / name).open(errors="replace") as file:
                return file.read(MAX_RULE_CHARACTERS)
    return ""


def key_for(settings: Settings, url: str, api_key: str) -> str:
    """The given key. Without one, this machine's key when the gateway runs on this machine, else no key."""
    if api_key or not (settings.home / LOCAL_KEYS_FILE).is_file():
        return api_key
    address = urlsplit(url)
    own_hosts = {settings.host, "127.0.0.1", "localhost"}
    if address.hostname not in own_hosts or address.port != settings.gateway_port:
        return ""
    (tenant,) = local_tenants(settings.home, (LOCAL_TENANT,)).values()
    return tenant.api_keys[0].get_secret_value()


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of the command line."""

    repo: Path
    gateway: str
    model: str
    checkpoint: str
    recipe: str
    settings: Sequence[str] | None
    api_key: str
    key_env: str
    message: Sequence[str] | None
    apply: Apply
    temperature: float
    seed: int
    tests: Sequence[str] | None
    sandbox: SandboxKind


async def _chat(options: ChatOptions, console: Console, interrupt: Interrupt) -> bool:
    check_kind(options.sandbox)
    screen = ChatScreen(console)
    async with contextlib.AsyncExitStack() as stack:
        if options.gateway:
            given = named_secret(options.key_env) if options.key_env else options.api_key
            key = key_for(load_settings(), options.gateway, given)
            opened = connect_gateway(options.gateway, key, options.model)
        else:
            load_local = load_entry("ostinato.flows.chat.local:load_local")
            opened = load_local(
                options.checkpoint or "promoted", options.recipe, options.settings or ()
            )
        model = await stack.enter_async_context(opened)
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ostinato-chat-")))
        is_compact = model.harness.dialect == "compact"
        workplace = await stack.enter_async_context(
            open_workplace(
                options.repo,
                copy,
                warm_tests=is_compact,
                test_limit_seconds=model.harness.call_time_limit_seconds,
                tests=options.tests or (),
                sandbox=options.sandbox,
                search_directory=model.search_directory,
            )
        )
        now = datetime.datetime.now(tz=datetime.UTC)
        recent = recent_files(workplace.root, workplace.files, now.timestamp() - RECENT_SECONDS)
        session = ChatSession(
            model,
            workplace,
            screen,
            options.temperature,
            options.seed,
            facts=PromptFacts(
                date=now.date().isoformat(),
                rules=read_rules(workplace.root),
                recent_files=recent,
            ),
            session_id=f"chat-{uuid.uuid4().hex}",
            interrupt=interrupt,
        )
        workplace.environment.ask_limit_seconds = USER_SECONDS
        workplace.environment.ask_user = None if options.message else session.ask_user
        tests = ", ".join(options.tests or workplace.layout.test_paths) or "none found"
        screen.show_opening(
            str(workplace.root), model.name, model.harness.dialect, len(workplace.files), tests
        )
        if workplace.warning:
            screen.say(workplace.warning)
        if left_out := workplace.left_out:
            screen.say(
                f"{len(left_out)} names are left out, as links, special files, unreadable or over "
                f"{MAX_FILE_BYTES >> 20} MiB, for example {left_out[0]}"
            )
        return await run_chat(session, options.message or (), options.apply)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the chat with its sandbox and the copy of the repository. Unlike Ctrl-C, nothing goes on."""
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


@app.command()
def main(
    context: typer.Context,
    repo: Annotated[Path, typer.Option(exists=True, file_okay=False, help="the repository")],
    gateway: Annotated[str, typer.Option(help="address of an OpenAI-style server")] = "",
    model: Annotated[str, typer.Option(help="model of the server; its first one when absent")] = "",
    checkpoint: Annotated[str, typer.Option(help="directory, artifact or 'promoted'")] = "",
    recipe: Annotated[str, typer.Option(help="recipe with the harness of a checkpoint")] = "nano",
    settings: SetOption = None,
    api_key: Annotated[
        str, typer.Option(envvar="OSTINATO_API_KEY", help="key; this machine's own when absent")
    ] = "",
    key_env: Annotated[
        str, typer.Option(help="another environment variable that holds the key")
    ] = "",
    message: Annotated[
        list[str] | None, typer.Option(help="message to send, then end the chat; repeatable")
    ] = None,
    apply: Annotated[Apply, typer.Option(help="write the edits into your files")] = "ask",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="sampling seed of --checkpoint")] = 0,
    tests: Annotated[
        list[str] | None, typer.Option(help="tests that `pytest` runs; all when absent; repeatable")
    ] = None,
    sandbox: Annotated[
        SandboxKind, typer.Option(help="kind of sandbox for commands; microvm needs QEMU")
    ] = SandboxKind.NAMESPACE,
) -> None:
    """A terminal agent on a repository. Its edits reach your files only when you agree."""
    if gateway and checkpoint:
        raise typer.BadParameter("wanted either --gateway or --checkpoint")
    source = context.get_parameter_source("api_key")
    if key_env and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("wanted either --api-key or --key-env")
    if gateway and settings:
        raise typer.BadParameter("--set changes a recipe, which only --checkpoint uses")
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        has_worked = asyncio.run(_chat(ChatOptions(**context.params), Console(), interrupt))
    except OstinatoError as error:
        print_error(error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not has_worked:
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="ostinato chat")
