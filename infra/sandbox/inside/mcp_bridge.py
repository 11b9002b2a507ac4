"""Runs an MCP server inside a box and calls its tools: `bridge.py start | call FOLDER`, with a JSON request on stdin.

`start` runs the server, initializes it, prints its tools and leaves a process behind that holds the server's pipes and
listens at FOLDER/socket. `call` sends one request to that process and prints the answer. The output is one line of
JSON: `result`, or `error` with the reason. The protocol is JSON-RPC 2.0 over lines, MCP revision 2025-06-18
(modelcontextprotocol.io/specification). Standard library only.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

PROTOCOL = "2025-06-18"
LINE_BYTES = 4 << 20  # size limit of one message
SHOWN_BYTES = 1_000  # part of the server's stderr that an error shows
MAX_PAGES = 16  # of a list of tools
METHOD_NOT_FOUND = -32601


class NoAnswer(Exception):
    """The reason why the server gave no answer."""


class Server:
    """A server process with its pipes and the queues of pending answers."""

    def __init__(self, command: str, log: str) -> None:
        self._log = log
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                ["sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._answers: dict[object, queue.Queue[dict]] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._fault = ""
        threading.Thread(target=self._read, daemon=True).start()

    def request(self, method: str, parameters: dict, seconds: float) -> dict:
        """The result of a request. Raises NoAnswer if there is none in time."""
        with self._lock:
            self._number += 1
            number = self._number
            answer = self._answers[number] = queue.Queue(1)
        self.send({"id": number, "method": method, "params": parameters})
        try:
            fault = {"error": {"message": self._fault}}
            message = fault if self._fault else answer.get(timeout=seconds)
        except queue.Empty:
            raise NoAnswer(
                f"no answer to {method} within {seconds:g} seconds{self._read_log()}"
            ) from None
        finally:
            del self._answers[number]
        if "error" in message:
            fault = message["error"]
            raise NoAnswer(str(fault.get("message", fault) if isinstance(fault, dict) else fault))
        result = message.get("result")
        if not isinstance(result, dict):
            raise NoAnswer(f"the result of {method} is {str(result)[:100]}, wanted an object")
        return result

    def close(self) -> None:
        """Kills the server and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def send(self, message: dict) -> None:
        """Sends a request, a notification or an answer."""
        line = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        try:
            with self._lock:
                self._input.write(line)
                self._input.flush()
        except OSError:
            self._fail(self._end())

    def _read(self) -> None:
        """Distributes answers until the server ends or writes too long a line."""
        while line := self._output.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                self._fail(f"an answer has more than {LINE_BYTES} bytes")
                self.close()
                return
            try:
                message = json.loads(line)
            except ValueError:
                continue  # some servers log to stdout
            if not isinstance(message, dict):
                continue
            if "method" in message:
                if "id" in message:
                    self.send({"id": message["id"], **_answer(message["method"])})
                continue
            waiting = self._answers.get(message.get("id"))
            if waiting is not None and waiting.empty():
                waiting.put(message)
        self._fail(self._end())

    def _fail(self, reason: str) -> None:
        self._fault = self._fault or reason
        for waiting in list(self._answers.values()):
            if waiting.empty():
                waiting.put({"error": {"message": self._fault}})

    def _end(self) -> str:
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return f"the server closed its pipes{self._read_log()}"
        return f"the server ended with exit code {code}{self._read_log()}"

    def _read_log(self) -> str:
        with open(self._log, "rb") as log:
            text = log.read()[-SHOWN_BYTES:].decode(errors="replace").strip()
        return f": {text}" if text else ""


def _answer(method: str) -> dict:
    """The answer to a request of the server. The client has none of the optional features."""
    if method == "ping":
        return {"result": {}}
    return {"error": {"code": METHOD_NOT_FOUND, "message": f"no method {method}"}}


def _open(command: str, log: str, seconds: float) -> tuple[Server, list]:
    """An initialized server, and its tools."""
    server = Server(command, log)
    try:
        return server, _initialize(server, seconds)
    except NoAnswer:
        server.close()
        raise


def _initialize(server: Server, seconds: float) -> list:
    """Initializes the server and returns its tools, from all pages of the list."""
    client = {"name": "ostinato", "version": "1"}
    greeting = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
    server.request("initialize", greeting, seconds)
    server.send({"method": "notifications/initialized"})
    tools, page = [], {}
    for _ in range(MAX_PAGES):
        listed = server.request("tools/list", page, seconds)
        tools += listed.get("tools") or []
        if not listed.get("nextCursor"):
            break
        page = {"cursor": listed["nextCursor"]}
    return tools


def _serve(listening: socket.socket, server: Server) -> None:
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_forward, args=(connection, server), daemon=True).start()


def _forward(connection: socket.socket, server: Server) -> None:
    with connection, connection.makefile("rwb") as stream:
        request = json.loads(stream.readline())
        arguments = "tools/call", request["call"], request["seconds"]
        stream.write(_encode_answer(lambda: server.request(*arguments)))


def _encode_answer(ask: Callable[[], dict]) -> bytes:
    try:
        return json.dumps({"result": ask()}).encode() + b"\n"
    except NoAnswer as error:
        return json.dumps({"error": str(error)}).encode() + b"\n"


def start(folder: str, request: dict) -> bytes:
    """The server's tools, or why it did not start. A child process keeps running with the server."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            return pipe.read() or json.dumps({"error": "the bridge ended"}).encode()
    os.setsid()  # because the process group of a command is killed when the command ends
    empty = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(empty, descriptor)
    listening = socket.socket(socket.AF_UNIX)
    place = f"{folder}/socket"
    if os.path.exists(place):
        os.unlink(place)
    listening.bind(place)
    listening.listen()
    found = []

    def tools() -> dict:
        server, listed = _open(request["command"], f"{folder}/log", request["seconds"])
        found.append(server)
        return {"tools": listed}

    with os.fdopen(writing, "wb") as pipe:
        pipe.write(_encode_answer(tools))
    if found:
        _serve(listening, found[0])
    os._exit(0)


def call(folder: str, request: dict) -> bytes:
    """The answer to one call of a tool."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"{folder}/socket")
        except OSError as error:
            return json.dumps({"error": f"the server cannot be reached: {error}"}).encode()
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps(request).encode() + b"\n")
            stream.flush()
            return stream.readline() or json.dumps({"error": "the bridge ended"}).encode()


if __name__ == "__main__":
    act = {"start": start, "call": call}[sys.argv[1]]
    sys.stdout.buffer.write(act(sys.argv[2], json.load(sys.stdin)))
