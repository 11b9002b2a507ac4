"""A person's conversation with an agent about a repository, and the decision on its edits."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import httpx2

from ostinato.flows.chat.screen import ChatScreen
from ostinato.flows.chat.workplace import Workplace
from ostinato.infra.agent.config import AgentRequest, HarnessConfig, PromptFacts
from ostinato.infra.agent.dialects.dialect import dialect_of
from ostinato.infra.agent.dialects.full.tools import EDIT_TOOLS
from ostinato.infra.agent.loop.attempt import open_conversation, run_conversation
from ostinato.infra.agent.loop.conversation import Conversation
from ostinato.infra.agent.loop.messages import MessageConversation, open_messages
from ostinato.infra.agent.loop.prompts import write_first_message
from ostinato.infra.agent.transcript import Transcript, TurnRecord
from ostinato.infra.platform.errors import ConfigError, OstinatoError
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.models.decode.protocol import ModelClient, Priority
from ostinato.models.rendering import Renderer

FOLLOW_UP_RATIO = 0.375  # free share of the context below which a message starts a new conversation
USER_SECONDS = 24 * 3600.0  # a person may think as long as it takes
Apply = Literal["ask", "always", "never"]
HELP = (
    "/diff  what would change   /apply  write it   /revert  undo it in the sandbox   /quit\n"
    "Ctrl-C stops the working agent; your next message continues from there."
)


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The model that answers: its name, its harness, and the client that talks to it."""

    name: str
    harness: HarnessConfig
    engine: ModelClient | None = None
    renderer: Renderer | None = None
    client: httpx2.AsyncClient | None = None
    model_name: str = ""
    says_harness: bool = True  # False: not our gateway, so its limits are unknown
    search_directory: str | None = None  # encoder of code search; None: search by words alone


@dataclass(slots=True)
class Interrupt:
    """Handler of Ctrl-C: cancels the agent's work, or the input line when the agent is idle."""

    task: asyncio.Task[Any] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.task is None:
            raise KeyboardInterrupt
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


@dataclass(slots=True)
class ChatSession:
    """State of a conversation about a repository."""

    model: ChatModel
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
        """Runs the agent on a message until it answers."""
        harness = self.model.harness
        prompt = message if not self.first_message else f"{self.first_message}\n\n{message}"
        self.first_message = self.first_message or message
        if self.conversation is None:
            self.conversation = self._open(message)
        elif self._fits(message):
            self.conversation.append_user(message)
        else:
            await self.conversation.restart(write_first_message(prompt, self._facts(), harness))
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
        """The person's answer to the agent's question. Ctrl-C cancels the agent's work."""
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

    async def send_feedback(self, signal: Signal) -> None:
        """Sends feedback about the last answer if a gateway recorded it. A failure to send is ignored."""
        conversation, client = self.conversation, self.model.client
        if client is None or not isinstance(conversation, MessageConversation):
            return
        if conversation.interaction_ids:
            body = {"interaction_id": conversation.interaction_ids[-1], "signal": signal.value}
            with contextlib.suppress(httpx2.HTTPError):
                await client.post("/feedback", json=body)

    def _facts(self) -> PromptFacts:
        return self.facts if dialect_of(self.model.harness).is_explained else PromptFacts()

    def _fits(self, message: str) -> bool:
        harness, conversation = self.model.harness, self.conversation
        assert conversation is not None
        left = harness.context_tokens - conversation.num_tokens - len(message) // 3
        return left >= harness.context_tokens * FOLLOW_UP_RATIO

    def _open(self, message: str) -> Conversation:
        model, environment = self.model, self.workplace.environment
        request = AgentRequest(
            prompt=message,
            session_id=self.session_id,
            seed=self.seed,
            temperature=self.temperature,
            priority=Priority.USER,
            return_routes=False,
            facts=self._facts(),
        )
        if model.engine is not None and model.renderer is not None:
            return open_conversation(
                model.engine, model.renderer, environment, request, model.harness
            )
        assert model.client is not None
        return open_messages(
            model.client,
            model.model_name,
            environment,
            request,
            model.harness,
            self.session_id,
            sends_max_tokens=model.says_harness,
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


async def run_chat(session: ChatSession, messages: Sequence[str], apply: Apply) -> bool:
    """Sends `messages`, or without any the lines that the person types until /quit or the end of the input. Returns
    whether the agent could work on all of `messages`.
    """
    has_worked = True
    for message in messages:
        has_worked &= await work_on(session, message)
        await decide_on_edits(session, apply)
    while not messages:
        try:
            line = session.screen.ask("\nyou> ")
        except (EOFError, KeyboardInterrupt):
            break
        if line in ("/quit", "/exit"):
            break
        await _run_line(session, line, apply)
    return has_worked


async def _run_line(session: ChatSession, line: str, apply: Apply) -> None:
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
        await decide_on_edits(session, apply)


async def work_on(session: ChatSession, message: str) -> bool:
    """Runs the agent on a message. Returns whether that succeeded. Ctrl-C cancels only this work."""
    task = asyncio.create_task(session.send(message))
    session.interrupt.task = task
    try:
        await task
    except asyncio.CancelledError:
        chat = asyncio.current_task()
        if chat is None or chat.cancelling():  # the chat itself is being cancelled
            raise
        session.screen.say("stopped", "yellow")
    except OstinatoError as error:
        session.screen.say(f"{type(error).__name__}: {error}", "red")
        return False
    finally:
        session.interrupt.task = None
    return True


async def decide_on_edits(session: ChatSession, apply: Apply) -> None:
    """Asks whether to write, keep or revert the edits that are not yet in the repository."""
    workplace, screen = session.workplace, session.screen
    pending = await workplace.pending()
    if not pending:
        return
    screen.say(f"\nedits in the sandbox: {', '.join(pending)}")
    if apply == "never":
        screen.say("left in the sandbox; your files are unchanged")
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
    """Writes edits into the repository, except for files that changed there meanwhile or cannot be written."""
    workplace, screen = session.workplace, session.screen
    kept: list[str] = []
    for path, content in pending.items():
        change = {path: content}
        try:
            if workplace.conflicts(change):
                screen.say(f"{path} changed in your repository meanwhile: not overwritten", "red")
                continue
            workplace.keep(change)
        except (OSError, ConfigError) as error:
            screen.say(f"{path} is not written: {error}", "red")
        else:
            kept.append(path)
    screen.say(f"written: {', '.join(kept) or 'nothing'}", "green")
    if kept:
        await session.send_feedback(Signal.EDIT_KEPT)


async def revert_edits(session: ChatSession) -> None:
    """Resets the sandbox to the state of the repository."""
    await session.workplace.revert()
    session.shown = {}
    session.screen.say("undone in the sandbox")
    await session.send_feedback(Signal.EDIT_REVERTED)
