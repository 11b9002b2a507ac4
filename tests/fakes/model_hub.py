"""A hub of models on this machine: the few answers of Hugging Face's that a download asks for."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_reader"


Answer = tuple[int, dict[str, str], bytes]  # status, headers, body


@dataclass
class FakeHub:
    """One repository, `org/small`, at its commits."""

    commits: dict[str, Path]  # files by commit
    branches: dict[str, str]
    url: str = ""
    is_gated: bool = False
    broken: set[str] = field(default_factory=set)  # files that are told of and not sent
    sizes: dict[str, int] = field(default_factory=dict)  # file -> size that is told instead
    fetched: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, token: str) -> Answer:
        """What a request is answered."""
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["api", "models", "org", "small", "auth-check"]:
                return self._gate(token) or _as_json({})
            case ["api", "models" | "datasets", "org", "small", "revision", revision]:
                commit = self.branches.get(revision, revision)
                if commit not in self.commits:
                    return _refusal(404, "RevisionNotFound")
                gated = "manual" if self.is_gated else False
                files = [
                    {"rfilename": name, "size": size, "blobId": "0"}
                    for name, size in self._list(commit)
                ]
                facts = {"id": "org/small", "sha": commit, "gated": gated, "siblings": files}
                return _as_json(facts)
            case ["api", "models", "org", "small", "tree", commit]:
                files = [
                    {"type": "file", "path": name, "size": size, "oid": "0"}
                    for name, size in self._list(commit)
                ]
                return self._gate(token) or _as_json(files)
            case ["org", "small", "resolve", commit, *name] | [
                "datasets",
                "org",
                "small",
                "resolve",
                commit,
                *name,
            ]:
                return self._gate(token) or self._file(method, commit, "/".join(name))
        return _refusal(401, "RepoNotFound")

    def _list(self, commit: str) -> list[tuple[str, int]]:
        top = self.commits[commit]
        found = {
            path.relative_to(top).as_posix(): path.stat().st_size
            for path in sorted(top.rglob("*"))
            if path.is_file()
        }
        return list((found | self.sizes).items())

    def _gate(self, token: str) -> Answer | None:
        if self.is_gated and token != f"Bearer {TOKEN}":
            return _refusal(401, "GatedRepo")
        return None

    def _file(self, method: str, commit: str, name: str) -> Answer:
        content = (self.commits[commit] / name).read_bytes()
        if method == "GET" and name in self.broken:
            return _refusal(503, "Unavailable")
        if method == "GET":
            self.fetched.append(name)
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
        return 200, headers, content


def _as_json(value: object) -> Answer:
    content = json.dumps(value).encode()
    return 200, {"Content-Type": "application/json"}, content


def _refusal(status: int, code: str) -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, b""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Answers at `hub.url` until the end."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "")
            path = urlsplit(self.path).path
            status, headers, content = hub.answer(self.command, path, token)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
