"""`ostinato chat`: a terminal agent over any served checkpoint, with the harness that training uses.

The session: which model answers (a gateway, or a checkpoint loaded here), the conversation over
several messages, what happens with the edits. Tools run in a sandbox over a copy. Entry of a
process of its own: `python -m ostinato.flows.chat --repo PATH --gateway URL`; a checkpoint served
in the same process is chat_local.py, so that a gateway's user need not load it.
"""

import asyncio
import contextlib
import datetime
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console

from ostinato.flows.chat_screen import ChatScreen
from ostinato.flows.chat_workplace import Workplace, open_workplace, recent_files
from ostinato.infra.agent.config import AgentRequest, HarnessConfig, PromptFacts
from ostinato.infra.agent.dialects.dialect import enabled_tools
from ostinato.infra.agent.dialects.full.tools import EDIT_TOOLS
from ostinato.infra.agent.loop.attempt import open_conversation, run_conversation
from ostinato.infra.agent.loop.conversation import Conversation, call_reader
from ostinato.infra.agent.loop.messages import MessageConversation
from ostinato.infra.agent.loop.prompts import write_first_message, write_system_prompt
from ostinato.infra.agent.transcript import Transcript, TurnRecord
from ostinato.infra.platform.errors import ConfigError, OstinatoError, boundary
from ostinato.infra.platform.settings import Settings, load_settings
from ostinato.infra.serving.gateway.keys import FILE_NAME, local_tenants
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.models.decode.protocol import ModelClient, Priority
from ostinato.models.rendering import Renderer

LOCAL_TENANT = "local"
ANSWER_SECONDS = 600.0
USER_SECONDS = 24 * 3600.0  # a person may think as long as it takes
RECENT_SECONDS = 24 * 3600.0  # files changed since then are shown with the first message
FOLLOW_UP_RATIO = 0.375  # of the context that a further message wants free, else it begins anew
RULE_FILES = ("AGENTS.md", ".ostinato/rules.md")
MAX_RULE_CHARACTERS = 8_000
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
"""For servers that do not say what their model was trained with."""
Apply = Literal["ask", "always", "never"]
HELP = (
    "/diff  what would change   /apply  write it   /revert  undo it in the sandbox   /quit\n"
    "Ctrl-C stops the agent at work; your next message goes on from there."
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that answers: its name, its harness, and the client that talks to it."""

    name: str
    harness: HarnessConfig
    engine: ModelClient | None = None
    renderer: Renderer | None = None
    client: httpx.AsyncClient | None = None
    model_name: str = ""


OpenLocal = Callable[[str, str], AbstractAsyncContextManager[ServedModel]]
"""Serves a checkpoint in this process: its reference and a recipe's name in."""


@dataclass(slots=True)
class Interrupt:
    """Handler of Ctrl-C: ends the agent's work while there is some, else the line being typed."""

    task: asyncio.Task[Any] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.task is None:
            raise KeyboardInterrupt
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


@dataclass(slots=True)
class ChatSession:
    """One person's conversation about one repository."""

    model: ServedModel
    workplace: Workplace
    screen: ChatScreen
    temperature: float
    seed: int
    facts: PromptFacts
    session_id: str
    interrupt: Interrupt
    first_message: str = ""
    conversation: Conversation | None = None
    shown: dict[str, bytes | None] = field(default_factory=dict)

    async def send(self, message: str) -> Transcript:
        """Lets the agent work on a message until it answers."""
        harness = self.model.harness
        prompt = message if not self.first_message else f"{self.first_message}\n\n{message}"
        self.first_message = self.first_message or message
        if self.conversation is None:
            self.conversation = self._open(message)
        elif self._has_room(message):
            self.conversation.append_user(message)
        else:
            await self.conversation.restart(write_first_message(prompt, self._facts()))
        transcript = await run_conversation(
            self.conversation,
            self.workplace.environment,
            prompt,
            harness.model_copy(update={"attempt_time_limit_seconds": USER_SECONDS}),
            on_turn=self._show,
        )
        self.screen.show_ending(transcript)
        return transcript

    async def ask_user(self, question: str) -> str:
        """Puts a question of the agent to the person. Ctrl-C ends the agent's work."""
        self.screen.say(f"the agent asks: {question}", "bold")
        task, self.interrupt.task = self.interrupt.task, None
        try:
            return self.screen.ask("answer> ")
        except EOFError:
            return "no answer"
        except KeyboardInterrupt:
            assert task is not None
            task.cancel()
            return "no answer"
        finally:
            self.interrupt.task = task

    async def tell(self, what: Signal) -> None:
        """Feedback about the last answer, where a gateway recorded it. Losing it is no error."""
        conversation, client = self.conversation, self.model.client
        if client is None or not isinstance(conversation, MessageConversation):
            return
        if conversation.interaction_ids:
            body = {"interaction_id": conversation.interaction_ids[-1], "signal": what.value}
            with contextlib.suppress(httpx.HTTPError):
                await client.post("/feedback", json=body)

    def _facts(self) -> PromptFacts:
        return self.facts if self.model.harness.dialect == "full" else PromptFacts()

    def _has_room(self, message: str) -> bool:
        harness, conversation = self.model.harness, self.conversation
        assert conversation is not None
        left = harness.context_tokens - conversation.num_tokens - len(message) // 3
        return left >= harness.context_tokens * FOLLOW_UP_RATIO

    def _open(self, message: str) -> Conversation:
        model, environment, facts = self.model, self.workplace.environment, self._facts()
        if model.engine is not None and model.renderer is not None:
            request = AgentRequest(
                prompt=message,
                session_id=self.session_id,
                seed=self.seed,
                temperature=self.temperature,
                priority=Priority.USER,
                return_routes=False,
                facts=facts,
            )
            return open_conversation(
                model.engine, model.renderer, environment, request, model.harness
            )
        assert model.client is not None
        policy = environment.policy_under(model.harness)
        tools = enabled_tools(model.harness, policy)
        is_full = model.harness.dialect == "full"
        return MessageConversation(
            client=model.client,
            model_name=model.model_name,
            tools=tools,
            read_calls=call_reader(model.harness, tools),
            prompt=write_first_message(message, facts),
            system_prompt=write_system_prompt(tools.values(), model.harness, policy, facts)
            if is_full
            else None,
            temperature=self.temperature,
            session_id=self.session_id,
        )

    async def _show(self, turn: TurnRecord) -> None:
        self.screen.show_turn(turn)
        if not any(call.tool in EDIT_TOOLS for call in turn.calls):
            return
        pending = await self.workplace.pending()
        fresh = {path: text for path, text in pending.items() if self.shown.get(path) != text}
        if fresh:
            self.screen.show_diff(self.workplace.describe(fresh))
        self.shown = pending


async def run_chat(session: ChatSession, messages: list[str], apply: Apply) -> None:
    """Sends `messages`, or what the person types until /quit or the end of the input."""
    for message in messages:
        await work_on(session, message)
        await settle(session, apply)
    while not messages:
        try:
            line = session.screen.ask("\nyou> ")
        except (EOFError, KeyboardInterrupt):
            break
        if line in ("/quit", "/exit"):
            break
        await _obey(session, line, apply)


async def _obey(session: ChatSession, line: str, apply: Apply) -> None:
    workplace, screen = session.workplace, session.screen
    if line == "/diff":
        pending = await workplace.pending()
        screen.show_diff(workplace.describe(pending)) if pending else screen.say("nothing changed")
    elif line == "/apply":
        await keep_edits(session, await workplace.pending())
    elif line == "/revert":
        await revert_edits(session)
    elif line == "/help" or line.startswith("/"):
        screen.say(HELP)
    elif line:
        await work_on(session, line)
        await settle(session, apply)


async def work_on(session: ChatSession, message: str) -> None:
    """One message. Ctrl-C ends the work on it and nothing else."""
    task = asyncio.create_task(session.send(message))
    session.interrupt.task = task
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():  # it is this chat that is being ended
            raise
        session.screen.say("stopped", "yellow")
    except OstinatoError as error:
        session.screen.say(f"{type(error).__name__}: {error}", "red")
    finally:
        session.interrupt.task = None


async def settle(session: ChatSession, apply: Apply) -> None:
    """Asks what is to become of the edits that are not in the repository yet."""
    workplace, screen = session.workplace, session.screen
    pending = await workplace.pending()
    if not pending:
        return
    screen.say(f"\nedits in the sandbox: {', '.join(pending)}")
    if apply == "never":
        screen.say("left in the sandbox; your files are as they were")
        return
    answer = "y"
    if apply == "ask":
        screen.show_diff(workplace.describe(pending))
        try:
            answer = screen.ask(f"write them to {workplace.root}? [y]es, [n]ot yet, [r]evert: ")
        except (EOFError, KeyboardInterrupt):
            answer = "n"
    if answer.lower() in ("y", "yes"):
        await keep_edits(session, pending)
    elif answer.lower() in ("r", "revert"):
        await revert_edits(session)
    else:
        screen.say("not written; /apply writes them later")


async def keep_edits(session: ChatSession, pending: dict[str, bytes | None]) -> None:
    """Writes edits into the repository, but for files that changed there meanwhile."""
    workplace, screen = session.workplace, session.screen
    conflicts = workplace.conflicts(pending)
    for path in conflicts:
        screen.say(f"{path} changed in your repository meanwhile: left alone", "red")
    kept = {path: content for path, content in pending.items() if path not in conflicts}
    workplace.keep(kept)
    screen.say(f"written: {', '.join(kept) or 'nothing'}", "green")
    if kept:
        await session.tell(Signal.EDIT_KEPT)


async def revert_edits(session: ChatSession) -> None:
    """Puts the sandbox back to what the repository has."""
    await session.workplace.revert()
    session.shown = {}
    session.screen.say("undone in the sandbox")
    await session.tell(Signal.EDIT_REVERTED)


@contextlib.asynccontextmanager
async def connect_gateway(url: str, api_key: str) -> AsyncIterator[ServedModel]:
    """The model behind an OpenAI-style server. Our gateway also says how it was trained."""
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=ANSWER_SECONDS) as client:
        with boundary(ConfigError, f"gateway {base}"):
            response = await client.get("/models")
            response.raise_for_status()
            listed: list[dict[str, Any]] = response.json()["data"]
        if not listed:
            raise ConfigError(f"gateway {base} lists no model, wanted one")
        first = listed[0]
        harness = OPEN_HARNESS
        if "harness" in first:
            harness = HarnessConfig.model_validate(first["harness"])
        name = f"{first['id']} at {base}"
        yield ServedModel(name, harness, client=client, model_name=first["id"])


def read_rules(root: Path) -> str:
    """The repository's own rules for agents, if it has any."""
    for name in RULE_FILES:
        if (root / name).is_file():
            return (root / name).read_text(errors="replace")[:MAX_RULE_CHARACTERS]
    return ""


def _key_of(settings: Settings, api_key: str) -> str:
    """The key that was given, else this machine's own."""
    if api_key or not (settings.home / FILE_NAME).is_file():
        return api_key
    (tenant,) = local_tenants(settings.home, (LOCAL_TENANT,)).values()
    return tenant.api_keys[0].get_secret_value()


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of the command line."""

    repo: Path
    gateway: str
    checkpoint: str
    recipe: str
    api_key: str
    messages: list[str]
    apply: Apply
    temperature: float
    seed: int
    tests: list[str] = field(default_factory=list)


async def _chat(
    options: ChatOptions, console: Console, interrupt: Interrupt, open_local: OpenLocal | None
) -> None:
    screen = ChatScreen(console)
    async with contextlib.AsyncExitStack() as stack:
        if open_local is not None:
            opened = open_local(options.checkpoint or "promoted", options.recipe)
        else:
            key = _key_of(load_settings(), options.api_key)
            opened = connect_gateway(options.gateway, key)
        model = await stack.enter_async_context(opened)
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ostinato-chat-")))
        is_compact = model.harness.dialect == "compact"
        workplace = await stack.enter_async_context(
            open_workplace(
                options.repo,
                copy,
                warm_tests=is_compact,
                test_limit_seconds=model.harness.call_time_limit_seconds,
                tests=options.tests,
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
        workplace.environment.ask_user = session.ask_user if not options.messages else None
        tests = ", ".join(options.tests or workplace.layout.test_paths) or "none found"
        screen.show_opening(
            str(workplace.root), model.name, model.harness.dialect, len(workplace.files), tests
        )
        await run_chat(session, options.messages, options.apply)


def run(options: ChatOptions, open_local: OpenLocal | None = None) -> None:
    """The chat until it ends. Without `open_local` the model is the gateway's."""
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    try:
        asyncio.run(_chat(options, Console(), interrupt, open_local))
    except OstinatoError as error:
        text = f"{type(error).__name__}: {error}"
        Console(stderr=True).print(text, style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def build_command(open_local: OpenLocal | None) -> Callable[..., None]:
    """The command line. Without `open_local` only a gateway can answer."""

    def main(
        repo: Annotated[Path, typer.Option(exists=True, file_okay=False, help="the repository")],
        gateway: Annotated[str, typer.Option(help="address of an OpenAI-style server")] = "",
        checkpoint: Annotated[str, typer.Option(help="directory, artifact or 'promoted'")] = "",
        recipe: Annotated[str, typer.Option(help="whose harness a checkpoint uses")] = "nano",
        api_key: Annotated[str, typer.Option(help="default: this machine's own key")] = "",
        message: Annotated[
            list[str] | None, typer.Option(help="send this and end; may be repeated")
        ] = None,
        apply: Annotated[str, typer.Option(help="ask, always or never write the edits")] = "ask",
        temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 1.0,
        seed: Annotated[int, typer.Option(help="of a checkpoint served here")] = 0,
        tests: Annotated[
            list[str] | None, typer.Option(help="what `pytest` runs; default: all; may be repeated")
        ] = None,
    ) -> None:
        """A terminal agent on a repository. Its edits reach your files only when you agree."""
        if apply not in ("ask", "always", "never"):
            raise typer.BadParameter(f"--apply is {apply!r}, wanted ask, always or never")
        if bool(gateway) == (open_local is not None) or (gateway and checkpoint):
            raise typer.BadParameter("wanted either --gateway or --checkpoint")
        messages = message or []
        options = ChatOptions(
            repo,
            gateway,
            checkpoint,
            recipe,
            api_key,
            messages,
            apply,
            temperature,
            seed,
            tests or [],
        )
        run(options, open_local)

    return main


if __name__ == "__main__":
    typer.run(build_command(None))
