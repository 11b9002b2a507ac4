"""Requests to one sandbox, as E2B's daemon `envd` answers them: commands, files and folders.

Calls are Connect's JSON, one message or a stream of messages with a length each. File contents are plain HTTP bodies.
"""

import base64
import binascii
import hashlib
import json
import posixpath
import re
import secrets
import struct
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ostinato.infra.sandbox.host.box import REPOSITORY_PATH
from ostinato.infra.serving.sandboxes.guest import Command, Event, Guest, Refused
from ostinato.infra.serving.sandboxes.service import RentedSandbox, SandboxService

USER = "user"  # the one user of a box
_ENVELOPE = struct.Struct(">BI")
_END_OF_STREAM = 2
_MAX_CALL_BYTES = 4 << 20
_MAX_FORM_BYTES = 65 << 20  # held in memory; a larger file comes as a stream
_MAX_PIECE_BYTES = 1 << 20
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && exec cat > "$1"'
_NO_SPACE = ("No space left", "File too large", "signal: 25")
_OPERATIONS = {  # calls that the command server answers as they are
    "filesystem.Filesystem/Stat": "stat",
    "filesystem.Filesystem/ListDir": "list",
    "filesystem.Filesystem/MakeDir": "make",
    "filesystem.Filesystem/Move": "move",
    "filesystem.Filesystem/Remove": "remove",
}
_FIELDS = ("path", "depth", "source", "destination")
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}


async def read_body(request: Request, most_bytes: int) -> bytes:
    """A request's body of bounded size."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise Refused("invalid_argument", f"body is over {most_bytes} bytes")
    return bytes(body)


def read_json(body: bytes) -> dict[str, Any]:
    """A body as an object."""
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(body or b"{}"), dict):
            return value
    raise Refused("invalid_argument", "body is no JSON object")


class SandboxCalls:
    """Handlers of the routes below a sandbox's address."""

    def __init__(self, service: SandboxService) -> None:
        self._service = service

    async def call(self, request: Request) -> Response:
        """One call of a service of envd."""
        name = request.path_params["name"]
        sandbox = self._enter(request)
        body = await read_body(request, _MAX_CALL_BYTES)
        try:
            if (operation := _OPERATIONS.get(name)) is not None:
                call = read_json(body)
                fields = {name: call[name] for name in _FIELDS if name in call}
                return JSONResponse(await sandbox.guest.request(operation, **fields))
            if (method := _METHODS.get(name)) is not None:
                return JSONResponse(await method(sandbox.guest, read_json(body)))
            call = read_json(body[_ENVELOPE.size :])
            if name == "process.Process/Start":
                messages = await _start(sandbox, call, request.headers.get("connect-timeout-ms"))
            elif name == "process.Process/Connect":
                messages = _followed(_selected(sandbox.guest, call))
            else:
                raise Refused("unimplemented", f"{name} is not supported by this server")
        except (KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise Refused("invalid_argument", f"{name}: {type(error).__name__} {error}") from None
        return StreamingResponse(_enveloped(messages), media_type="application/connect+json")

    async def health(self, request: Request) -> Response:
        """Whether the sandbox runs."""
        self._named(request)
        return Response(status_code=204)

    async def download(self, request: Request) -> Response:
        """The content of a file."""
        guest = self._enter(request, "read").guest
        place = _place(request)
        entry = (await guest.request("stat", path=place))["entry"]
        if entry["type"] != "FILE_TYPE_FILE":
            raise Refused("invalid_argument", f"{place} is not a file")
        command = await guest.run(_config("cat", "--", place))
        queue = command.subscribe()

        async def content() -> AsyncIterator[bytes]:
            async for event in command.events(queue):
                if "stdout" in event:
                    yield event["stdout"]
                if "error" in event or event.get("end", {}).get("exitCode"):
                    raise OSError(f"{place} could not be read to its end")  # breaks the connection

        return StreamingResponse(content(), media_type="application/octet-stream")

    async def upload(self, request: Request) -> Response:
        """Writes files: one as the body, or those of a form."""
        guest = self._enter(request, "write").guest
        form = request.headers.get("content-type", "")
        if form.startswith("multipart/"):
            written = []
            for name, content in _parts(form, await read_body(request, _MAX_FORM_BYTES)):
                place = _place(request, name)
                written.append(await _write(guest, place, _pieces(content)))
            return JSONResponse(written)
        if (coding := request.headers.get("content-encoding")) is not None:
            raise Refused("invalid_argument", f"content-encoding is {coding!r}, wanted none")
        return JSONResponse([await _write(guest, _place(request), request.stream())])

    def _named(self, request: Request) -> RentedSandbox:
        """The running sandbox that a request names. Refused with what the SDK takes for an ended one."""
        host = re.match(r"\d+-(\w+)\.", request.headers.get("host", ""))
        name = request.headers.get("e2b-sandbox-id") or (host[1] if host else "")
        found = self._service.sandboxes.get(name)
        if found is None or found.is_paused or found.guest.is_lost:
            text = f"sandbox {name} was not found" if found is None else found.gone
            raise Refused("unavailable", text)
        return found

    def _enter(self, request: Request, operation: str | None = None) -> RentedSandbox:
        """The sandbox of a request with its token, or with a signature of a file's path made with it."""
        query = request.query_params
        signature = query.get("signature")
        if operation is not None and signature is not None:
            ends_at = query.get("signature_expiration")
            for sandbox in self._service.sandboxes.values():  # a signed address may name no sandbox
                parts = (query.get("path", ""), operation, query.get("username", ""), sandbox.token)
                raw = ":".join((*parts, *(() if ends_at is None else (ends_at,))))
                digest = base64.b64encode(hashlib.sha256(raw.encode()).digest())
                if secrets.compare_digest(b"v1_" + digest.rstrip(b"="), signature.encode()):
                    if ends_at is not None and (
                        not ends_at.isdecimal() or int(ends_at) < time.time()
                    ):
                        raise Refused("unauthenticated", "the signature has expired")
                    if sandbox.is_paused:
                        raise Refused("unavailable", sandbox.gone)
                    return sandbox
            raise Refused("unauthenticated", "the signature is wrong")
        sandbox = self._named(request)
        given = request.headers.get("x-access-token", "")
        if not secrets.compare_digest(given.encode(), sandbox.token.encode()):
            raise Refused(
                "unauthenticated", "header X-Access-Token does not hold the sandbox's token"
            )
        kind, _, login = request.headers.get("authorization", "").partition(" ")
        user = query.get("username", "")
        if kind.lower() == "basic":
            try:
                user = base64.b64decode(login).decode(errors="replace").partition(":")[0]
            except ValueError:
                user = login  # which is refused
        if user not in ("", USER):
            raise Refused(
                "invalid_argument", f"user is {user!r}, wanted {USER!r}: a box has no other"
            )
        return sandbox


async def _enveloped(messages: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """A stream of messages. The last one has its own mark, and an error if there was one."""
    last: Event = {}
    async for message in messages:
        if "error" in message:
            last = message
        else:
            text = json.dumps(message).encode()
            yield _ENVELOPE.pack(0, len(text)) + text
    text = json.dumps(last).encode()
    yield _ENVELOPE.pack(_END_OF_STREAM, len(text)) + text


def _followed(command: Command) -> AsyncIterator[Event]:
    """Messages of a command from now on."""
    queue = command.subscribe()

    async def follow() -> AsyncIterator[Event]:
        async for event in command.events(queue):
            if "error" in event:
                yield event
            else:
                data = {
                    name: base64.b64encode(value).decode()
                    for name, value in event.items()
                    if isinstance(value, bytes)
                }
                yield {"event": {"data": data} if data else event}

    return follow()


async def _start(
    sandbox: RentedSandbox, call: Mapping[str, Any], limit: str | None
) -> AsyncIterator[Event]:
    if "pty" in call:
        raise Refused("unimplemented", "pty is not supported by this server")
    process = call["process"]
    config = {
        "cmd": process["cmd"],
        "args": process.get("args", []),
        "envs": {**sandbox.variables, **process.get("envs", {})},
        "cwd": process.get("cwd", REPOSITORY_PATH),
    }
    seconds = int(limit) / 1000 if limit is not None and limit.isdecimal() else None
    command = await sandbox.guest.run(
        config, has_stdin=call.get("stdin", True), tag=call.get("tag"), timeout_seconds=seconds
    )
    return _followed(command)


def _selected(guest: Guest, call: Mapping[str, Any]) -> Command:
    wanted = call["process"]
    for command in guest.commands.values():
        if command.pid == wanted.get("pid") or (wanted.get("tag") or 0) == command.tag:
            return command
    raise Refused("not_found", f"no command with {wanted}")


async def _list_commands(guest: Guest, _: Mapping[str, Any]) -> Event:
    found = [(one, {} if one.tag is None else {"tag": one.tag}) for one in guest.commands.values()]
    return {"processes": [{"config": one.config, "pid": one.pid, **tag} for one, tag in found]}


async def _send_input(guest: Guest, call: Mapping[str, Any]) -> Event:
    command = _selected(guest, call)
    content = base64.b64decode(call["input"]["stdin"])
    try:
        if command.stdin is None:
            raise ConnectionResetError
        command.stdin.write(content)
        await command.stdin.drain()
    except (ConnectionResetError, BrokenPipeError):
        raise Refused("failed_precondition", f"command {command.pid} has no open input") from None
    return {}


async def _close_input(guest: Guest, call: Mapping[str, Any]) -> Event:
    if (stdin := _selected(guest, call).stdin) is not None:
        stdin.close()
    return {}


async def _send_signal(guest: Guest, call: Mapping[str, Any]) -> Event:
    command = _selected(guest, call)
    await guest.request("signal", pid=command.pid, number=_SIGNALS[call["signal"]])
    return {}


def _place(request: Request, name: str = "") -> str:
    path = request.query_params.get("path") or name
    if not path or "\0" in path:
        raise Refused("invalid_argument", f"path is {path!r}, wanted a path of a file")
    return posixpath.join(REPOSITORY_PATH, path)


def _config(program: str, *arguments: str) -> Event:
    return {"cmd": program, "args": arguments, "envs": {}, "cwd": REPOSITORY_PATH}


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _MAX_PIECE_BYTES):
        yield content[start : start + _MAX_PIECE_BYTES]


async def _write(guest: Guest, place: str, pieces: AsyncIterator[bytes]) -> Event:
    """Writes a file with the folders above it. Returns its description."""
    command = await guest.run(_config("sh", "-c", _WRITE, "sh", place), has_stdin=True)
    queue, stdin = command.subscribe(), command.stdin
    assert stdin is not None
    try:
        with suppress(ConnectionResetError, BrokenPipeError):  # its end says why
            async for piece in pieces:
                stdin.write(piece)
                await stdin.drain()
    except BaseException:
        await guest.kill(command)
        raise
    stdin.close()
    said = b""
    async for event in command.events(queue):
        said += event.get("stderr", b"")
        status = event.get("end", {}).get("error") or event.get("error")
        if status is not None:
            reason = f"{place}: {said.decode(errors='replace').strip()} {status}"
            is_full = any(sign in reason for sign in _NO_SPACE)
            raise Refused("no_space" if is_full else "invalid_argument", reason)
    return {"name": posixpath.basename(place), "type": "file", "path": place}


def _parts(form: str, body: bytes) -> Iterator[tuple[str, bytes]]:
    """File names and contents of a form."""
    boundary = re.search(r'boundary="?([^";,]+)', form)
    if boundary is None:
        raise Refused("invalid_argument", f"content-type is {form!r}, wanted a boundary")
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary[1].encode())[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        name = re.search(r'filename="((?:[^"\\]|\\.)*)"', head.decode(errors="replace"))
        given = re.sub(r"\\(.)", r"\1", name[1]) if name else ""
        yield re.sub("%(22|0D|0A)", lambda found: chr(int(found[1], 16)), given), content


_METHODS = {
    "process.Process/List": _list_commands,
    "process.Process/SendInput": _send_input,
    "process.Process/CloseStdin": _close_input,
    "process.Process/SendSignal": _send_signal,
}
