"""Served agents: the harness of training works on a user's request in a sandbox.

A session keeps tokens, files and harness state between turns, but no sandbox. In the record of a
follow-up, earlier turns are context and are not trained on again.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from weakref import WeakValueDictionary

from ostinato.infra.agent.config import AgentRequest
from ostinato.infra.agent.environment import HarnessState
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.platform.errors import CapacityExhausted, SandboxError
from ostinato.infra.serving.gateway.answers.tenant_cache import TenantCache
from ostinato.infra.serving.gateway.answers.workplaces import changed_files, describe_changes
from ostinato.infra.serving.gateway.config import (
    MAX_SESSIONS,
    MAX_TENANT_SESSIONS,
    MAX_UPLOAD_BYTES,
    MAX_UPLOAD_FILES,
    SESSION_IDLE_SECONDS,
    Caller,
)
from ostinato.infra.serving.gateway.context import GatewayContext
from ostinato.infra.serving.gateway.failures import ApiError, check_length
from ostinato.infra.serving.gateway.recorder import (
    Interaction,
    InteractionRecorder,
    interaction_seed,
    new_interaction_id,
)
from ostinato.infra.serving.gateway.schemas import (
    AgentAnswer,
    AgentMessageRequest,
    AgentSessionRequest,
    Usage,
)
from ostinato.infra.serving.gateway.tenants import Spending
from ostinato.infra.serving.gateway.uploads.archive import WANTED, is_path
from ostinato.models.decode.protocol import ModelClient, Priority

logger = logging.getLogger(__name__)
_WITHOUT_FILES = (EndReason.SANDBOX_FAILED, EndReason.BOX_RUINED, EndReason.FAULT)
_WAIT_SECONDS = 5.0  # after which a client may ask again for a free box


@dataclass(slots=True)
class AgentSession:
    """One user's conversation with an agent about one repository."""

    session_id: str
    tenant: str
    repository: str
    problem_kind: str
    consent: bool
    first_message: str
    test_ids: tuple[str, ...] | None
    files_at_start: dict[str, bytes | None]
    files: dict[str, bytes | None]
    state: HarnessState = field(default_factory=HarnessState)
    token_ids: tuple[int, ...] = ()
    turn: int = 0
    opening: AgentAnswer | None = None  # the answer to the first message
    answer: AgentAnswer | None = None  # the last one
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    working_on: str = ""  # id of the interaction that holds the lock
    warning: str = ""  # of the last message


class AgentService:
    """Runs agents on the arms of one gateway."""

    def __init__(self, context: GatewayContext, recorder: InteractionRecorder) -> None:
        self._arms, self._renderer = context.arms, context.renderer
        self._workplaces, self._recorder = context.workplaces, recorder
        self._config, self._clock = context.config, context.clock
        self.sessions: TenantCache[AgentSession] = TenantCache(
            MAX_TENANT_SESSIONS, MAX_SESSIONS, SESSION_IDLE_SECONDS, context.clock
        )
        self._at_work: Counter[str] = Counter()  # agents by tenant
        self._openings: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def open(
        self,
        request: AgentSessionRequest,
        spending: Spending,
        idempotency_key: str | None = None,
    ) -> AgentAnswer:
        """Opens a session and works on its first message. A repeated request with the same key waits for the first
        one and gets its answer, or works where the first one failed.
        """
        tenant = spending.caller
        check_length(request.message, "message")
        names = self._workplaces.names(tenant.name)
        if request.repository not in names:
            raise ApiError(
                404,
                f"repository is {request.repository!r}, wanted one of "
                f"{', '.join(names) or '(none here)'}",
                code="unknown_repository",
                param="repository",
            )
        pristine = await self._workplaces.pristine(tenant.name, request.repository)
        files = read_uploads(request.files, pristine)
        consent = tenant.consents(request.store)
        interaction_id = new_interaction_id(
            consent=consent,
            tenant=tenant.name,
            idempotency_key=_key_of_request(idempotency_key, "", request),
        )
        session = AgentSession(
            session_id=f"agent-{interaction_id}",
            tenant=tenant.name,
            repository=request.repository,
            problem_kind=request.problem_kind,
            consent=consent,
            first_message=request.message,
            test_ids=tuple(request.test_ids) if request.test_ids is not None else None,
            files_at_start=dict(files),
            files=dict(files),
        )
        async with self._openings.setdefault(session.session_id, asyncio.Lock()):
            earlier = self.sessions.get(tenant.name, session.session_id)
            if earlier is not None and earlier.opening is not None:
                return earlier.opening
            with self._counted(spending):
                session.opening = await self._work(session, interaction_id, request, tenant.account)
            self.sessions.put(tenant.name, session.session_id, session)
        return session.opening

    async def follow_up(
        self,
        session_id: str,
        request: AgentMessageRequest,
        spending: Spending,
        idempotency_key: str | None = None,
    ) -> AgentAnswer:
        """Works on a further message, in the state that the agent left. A repeated request with the same key waits
        for the session's last answer and gets it. Without consent to this message, nothing more of the session is
        stored.
        """
        tenant = spending.caller
        check_length(request.message, "message")
        session = self._find(session_id, tenant)
        interaction_id = new_interaction_id(
            consent=session.consent and tenant.consents(request.store),
            tenant=tenant.name,
            idempotency_key=_key_of_request(idempotency_key, session_id, request),
        )
        if session.lock.locked() and session.working_on != interaction_id:
            raise ApiError(
                409,
                f"session {session_id} is at work on an earlier message; wait for its answer",
                code="session_busy",
            )
        async with session.lock:
            session.working_on = interaction_id
            answer = session.answer
            if answer is not None and answer.interaction_id == interaction_id:
                return answer
            pristine = await self._workplaces.pristine(session.tenant, session.repository)
            held = {**pristine, **session.files}
            there = [path for path, content in held.items() if content is not None]
            uploads = read_uploads(request.files, there)
            with self._counted(spending):
                session.files |= uploads
                # later turns contain this message
                session.consent = session.consent and tenant.consents(request.store)
                return await self._work(session, interaction_id, request, tenant.account)

    def close(self, session_id: str, tenant: Caller) -> None:
        self._find(session_id, tenant)
        self.sessions.remove(tenant.name, session_id)

    def count_sessions(self, tenant: Caller) -> int:
        """Number of a tenant's open sessions."""
        return self.sessions.count(tenant.name)

    @contextmanager
    def _counted(self, spending: Spending) -> Iterator[None]:
        """Counts one working agent for the length of the block, and reserves a context of tokens for it. ApiError
        when its tenant has too many agents or too few tokens.
        """
        tenant, most = spending.caller, self._config.agents_at_once
        if self._at_work[tenant.name] >= most:
            self._recorder.counters[tenant.name]["too_many_agents"] += 1
            raise ApiError(
                429,
                f"{most} agents of this tenant are working, wanted at most {most} at once",
                code="too_many_agents",
                retry_after_seconds=_WAIT_SECONDS,
            )
        spending.reserve(self._config.harness.context_tokens)
        self._at_work[tenant.name] += 1
        try:
            yield
        finally:
            self._at_work[tenant.name] -= 1

    async def _work(
        self,
        session: AgentSession,
        interaction_id: str,
        request: AgentSessionRequest | AgentMessageRequest,
        account: str,
    ) -> AgentAnswer:
        pristine = await self._workplaces.pristine(session.tenant, session.repository)
        started = self._clock()
        arm = self._arms.choose(session.session_id)
        agent_request = self._request(session, interaction_id, request.message, request.seed)
        transcript, files = await self._run(session, arm.model, agent_request)
        latency = self._clock() - started
        if files is not None:
            session.files = files
        session.token_ids = self._conversation_tokens(transcript)
        session.turn += 1
        interaction = Interaction(
            interaction_id=interaction_id,
            session_id=session.session_id,
            tenant=session.tenant,
            arm=arm,
            problem_kind=session.problem_kind,
            consent=session.consent,
            latency_seconds=latency,
            account=account,
        )
        await self._recorder.keep(interaction, transcript)
        session.answer = _write_answer(session, interaction, transcript, pristine)
        return session.answer

    async def _run(
        self, session: AgentSession, model: ModelClient, request: AgentRequest
    ) -> tuple[Transcript, dict[str, bytes | None] | None]:
        """The transcript, and the files that the agent left. None when the sandbox was lost."""
        try:
            async with self._workplaces.lease(
                session.tenant, session.repository, session.files, session.test_ids
            ) as environment:
                environment.state, session.warning = session.state, environment.warning
                transcript = await run_agent(
                    model,
                    self._renderer,
                    environment,
                    request,
                    self._config.harness,
                    clock=self._clock,
                )
                if transcript.end_reason in _WITHOUT_FILES:
                    return transcript, None
                return transcript, dict(await environment.sandbox.diff())
        except CapacityExhausted as error:
            raise ApiError(
                503,
                f"all sandboxes of {session.repository} are in use",
                code="capacity_exhausted",
                retry_after_seconds=_WAIT_SECONDS,
            ) from error
        except SandboxError as error:
            logger.error("session=%s sandbox_failed=%s", session.session_id, error)
            raise ApiError(
                502, f"the sandbox of {session.repository} failed", code="sandbox_failed"
            ) from error

    def _request(
        self, session: AgentSession, interaction_id: str, message: str, seed: int | None
    ) -> AgentRequest:
        """Continues the session's tokens while enough context is left, else starts a new conversation."""
        needed = len(session.token_ids) + len(self._renderer.append_user(message))
        is_continued = (
            self._config.harness.context_tokens - needed >= self._config.follow_up_context_tokens
        )
        earlier = session.token_ids if is_continued else ()
        prompt = message
        if session.turn and not earlier:
            prompt = f"{session.first_message}\n\n{message}"
        return AgentRequest(
            prompt=prompt,
            session_id=f"{session.session_id}/{session.turn}",
            seed=seed if seed is not None else interaction_seed(interaction_id),
            priority=Priority.USER,
            earlier_token_ids=earlier,
        )

    def _conversation_tokens(self, transcript: Transcript) -> tuple[int, ...]:
        """The conversation's tokens with the last answer ended, ready for a user message."""
        segment = transcript.segments[-1]
        tokens = tuple(int(token) for token in segment.token_ids_T)
        if not segment.loss_mask_T[-1]:  # nothing was sampled after the header
            return tokens[: len(tokens) - self._renderer.header_size(tokens)]
        return tokens if tokens[-1] == self._renderer.end_id else (*tokens, self._renderer.end_id)

    def _find(self, session_id: str, tenant: Caller) -> AgentSession:
        session = self.sessions.get(tenant.name, session_id)
        if session is None:
            raise ApiError(
                404,
                f"session is {session_id!r}, which is not open here (idle sessions are "
                "forgotten); open a new one",
                code="unknown_session",
            )
        self.sessions.put(tenant.name, session_id, session)  # restarts its idle time
        return session


def _write_answer(
    session: AgentSession,
    interaction: Interaction,
    transcript: Transcript,
    pristine: Mapping[str, bytes],
) -> AgentAnswer:
    changed = changed_files(pristine, session.files_at_start, session.files)
    generated = sum(turn.generated_tokens for turn in transcript.turns)
    total = sum(len(segment.token_ids_T) for segment in transcript.segments)
    return AgentAnswer(
        session_id=session.session_id,
        interaction_id=interaction.interaction_id,
        status=transcript.end_reason.value,
        detail=_public_detail(transcript),
        warning=session.warning,
        final_message=transcript.final_message,
        diff=describe_changes(pristine, session.files_at_start, changed),
        changed_files={
            path: content.decode(errors="replace") if content is not None else None
            for path, content in changed.items()
        },
        turns=len(transcript.turns),
        tool_calls=sum(len(turn.calls) for turn in transcript.turns),
        latency_seconds=interaction.latency_seconds,
        usage=Usage(
            prompt_tokens=total - generated, completion_tokens=generated, total_tokens=total
        ),
    )


def _key_of_request(
    idempotency_key: str | None, session_id: str, request: AgentSessionRequest | AgentMessageRequest
) -> str | None:
    """The client's key for one request: with the same key, another request is another interaction."""
    if idempotency_key is None:
        return None
    return json.dumps([idempotency_key, session_id, request.model_dump(mode="json")])


def _public_detail(transcript: Transcript) -> str:
    """Why an attempt ended, without details of failed boxes, engines and servers."""
    if transcript.end_reason is EndReason.ENGINE_FAILED:
        return "the engine failed"
    if transcript.end_reason is EndReason.FAULT:
        return "a fault of this server"
    if transcript.end_reason in _WITHOUT_FILES:
        return "the sandbox failed"
    return transcript.detail


def read_uploads(files: Mapping[str, str], pristine: Iterable[str]) -> dict[str, bytes | None]:
    """A user's files by path. ApiError outside the limits. `pristine`: paths that exist already."""
    contents: dict[str, bytes | None] = {path: text.encode() for path, text in files.items()}
    total = sum(len(content) for content in contents.values() if content is not None)
    if len(files) > MAX_UPLOAD_FILES or total > MAX_UPLOAD_BYTES:
        raise ApiError(
            413,
            f"{len(files)} files hold {total} bytes, wanted at most {MAX_UPLOAD_BYTES} "
            f"in {MAX_UPLOAD_FILES}",
            param="files",
        )
    known = {*pristine, *files}
    folders = {str(folder) for path in known for folder in PurePosixPath(path).parents}
    for path in files:
        above = map(str, PurePosixPath(path).parents)
        if not is_path(path) or path in folders or not known.isdisjoint(above):
            raise ApiError(400, f"path is {path[:80]!r}, wanted one {WANTED}", param="files")
    return contents
