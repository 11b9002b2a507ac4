"""One attempt by a program in a box: the program is started, watched and ended, and its session gives the transcript.

Whatever the program does is an outcome of the attempt, which is judged by the files that the program leaves.
"""

import asyncio
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.dialects.dialect import dialect_of
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.harnesses import HARNESS_FOLDER, SERVED_MODEL, HarnessCommand
from ostinato.infra.agent.loop.attempt import Ending, OnTurn, run_to_end
from ostinato.infra.agent.loop.prompts import write_first_message
from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.platform.errors import EngineError, SandboxError
from ostinato.infra.sandbox.host.system import forwarding_command
from ostinato.infra.sandbox.protocol import ExecResult, Sandbox, SandboxLimits
from ostinato.infra.serving.attempts.door import AttemptDoor
from ostinato.infra.serving.attempts.layers import install_program
from ostinato.infra.serving.attempts.session import AttemptSession
from ostinato.models.decode.protocol import ModelClient
from ostinato.models.rendering import Renderer

DOOR_PATH = "/door.sock"  # in boxes
PORT = 8790  # on a box's own loopback
URL = f"http://127.0.0.1:{PORT}"
_OUTPUT_BYTES = 64 << 10
_STOP_SECONDS = 10.0
_LAST_LINES = 12
_LAST_CHARACTERS = 1200


class ProgramDialogue:
    """Attempts by the program that a harness's settings name."""

    def __init__(self, model: ModelClient, renderer: Renderer, harness: HarnessConfig) -> None:
        self.program = harness.foreign_program()
        self.layer = install_program(self.program)
        self._door = AttemptDoor(model, renderer, harness)

    @property
    def mounts(self) -> Mapping[str, Path]:
        """Paths in boxes, and the paths of this machine that are mounted there."""
        layer = {} if self.layer is None else {HARNESS_FOLDER: self.layer}
        return {DOOR_PATH: self._door.socket_path, **layer}

    def limits(self, usual: SandboxLimits) -> SandboxLimits:
        """The usual limits of a box, with the memory that the program needs."""
        needs = self.program
        return usual.model_copy(
            update={
                "memory_bytes": max(usual.memory_bytes, needs.memory_bytes),
                "process_memory_bytes": max(usual.process_memory_bytes, needs.process_memory_bytes),
            }
        )

    async def __call__(
        self,
        environment: AgentEnvironment,
        request: AgentRequest,
        config: HarnessConfig,
        *,
        clock: Callable[[], float],
        on_turn: OnTurn | None = None,
    ) -> Transcript:
        """Runs the program until it or the attempt ends."""
        if on_turn is not None:
            raise ValueError("on_turn is set, wanted None: a program's turns come at its end")
        started = clock()
        prompt = request.prompt
        if dialect_of(config).is_explained:
            prompt = write_first_message(request.prompt, request.facts, config)
        async with self._door.session(request, clock) as session:
            values = {"url": URL, "key": session.key, "model": SERVED_MODEL}
            run = _Run(environment.sandbox, self.program.filled(prompt, values), session)
            reason, detail = await run_to_end(
                run.to_end(config), config, lambda: environment.sandbox.is_lost
            )
            final_message = await run.stop()
        if reason is not EndReason.FINISHED:
            detail = "; ".join(part for part in (detail, run.last_lines) if part)
        return session.transcript(reason, detail, final_message, clock() - started)

    async def close(self) -> None:
        """Stops the server."""
        await self._door.close()


class _Run:
    """One run of a program in one box."""

    def __init__(self, sandbox: Sandbox, program: HarnessCommand, session: AttemptSession) -> None:
        self._sandbox, self._program, self._session = sandbox, program, session
        self._executing: asyncio.Task[ExecResult] | None = None
        self._output = b""

    @property
    def last_lines(self) -> str:
        """The last lines that the program printed."""
        lines = self._output.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        text = "\n".join(lines)[-_LAST_CHARACTERS:]
        return f"last lines:\n{text}" if text else ""

    async def to_end(self, config: HarnessConfig) -> Ending:
        """Runs the program, and returns how the attempt ended."""
        for path, text in self._program.files.items():
            await self._sandbox.write(path, text.encode())
        variables = [
            f"export {name}={shlex.quote(text)};"
            for name, text in self._program.environment.items()
        ]
        command = forwarding_command(DOOR_PATH, PORT, self._program.command)
        limit_seconds = config.attempt_time_limit_seconds
        self._executing = asyncio.create_task(
            self._sandbox.exec(
                " ".join((*variables, "exec", command)), limit_seconds, _OUTPUT_BYTES
            )
        )
        ended = asyncio.create_task(self._session.ended.wait())
        try:
            await asyncio.wait((self._executing, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not self._executing.done():
            return self._session.ending
        result = self._executing.result()
        self._output = result.output
        return self._ending_of(result, limit_seconds)

    def _ending_of(self, result: ExecResult, limit_seconds: float) -> Ending:
        """Ending of an attempt after its program has exited or timed out."""
        if self._session.ended.is_set():
            return self._session.ending
        if result.timed_out:
            return EndReason.TIMED_OUT, f"program ran longer than {limit_seconds:g} seconds"
        if self._session.engine_failure:
            raise EngineError(self._session.engine_failure)
        has_turns = bool(self._session.graph.turns)
        parts = []
        if result.exit_code or not has_turns:
            parts.append(f"program ended with code {result.exit_code}")
            if not has_turns:
                parts[0] += " and no answer of the model"
        if self._session.last_refusal:
            parts.append(f"its last request was refused: {self._session.last_refusal}")
        detail = "; ".join(parts)
        if has_turns and self._session.is_context_full:
            return EndReason.TOKEN_LIMIT, detail
        if has_turns and not result.exit_code:
            return EndReason.FINISHED, detail
        return EndReason.HARNESS_FAILED, detail

    async def stop(self) -> str:
        """Kills all processes in the box, also those that the program left behind. Returns its final message."""
        try:
            # spares only process 1, which is the box's server, and the shell itself
            await self._sandbox.exec("kill -KILL -1", _STOP_SECONDS)
            if self._executing is not None:
                result = await asyncio.wait_for(self._executing, _STOP_SECONDS)
                self._output = result.output
            if self._program.final_message:
                message = await self._sandbox.read(self._program.final_message)
                return message.decode(errors="replace").strip()
        except (SandboxError, TimeoutError):  # the box is gone, or there is no such file
            pass
        return self._output.decode(errors="replace").strip()[-_LAST_CHARACTERS:]
