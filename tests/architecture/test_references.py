"""An editor finds what text search finds: references that a language server gives for names used everywhere."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ostinato
from tests.architecture.source import ROOT, list_files, list_modules

SERVER = Path(sys.executable).with_name("pyright-langserver")
DEFINED_IN = {
    "Scorecard": "tasks/records.py",
    "ArtifactRef": "infra/platform/artifacts.py",
    "DecodeEngine": "models/decode/engine.py",
}


class LanguageServer:
    """Pyright as an editor runs it, on a folder called `ostinato` that is this checkout."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        self._process = subprocess.Popen(
            [SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._last_id = 0
        folder = {"uri": workspace.as_uri(), "name": "ostinato"}
        self.ask("initialize", processId=None, rootUri=folder["uri"], workspaceFolders=[folder],
                 capabilities={"workspace": {"configuration": True}})  # fmt: skip
        self._send({"method": "initialized", "params": {}})
        while "source files" not in str(self._receive()):
            pass  # what it has not found yet it does not search

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def references(self, path: str, name: str) -> set[str]:
        """Files in which the class that a file defines is used, as paths below the workspace."""
        text = (self._workspace / path).read_text()
        uri = (self._workspace / path).as_uri()
        document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        found = re.search(rf"^class {name}\b", text, re.MULTILINE)
        assert found is not None
        line = text.count("\n", 0, found.start())
        answer = self.ask(
            "textDocument/references",
            textDocument={"uri": uri},
            position={"line": line, "character": len("class ")},
            context={"includeDeclaration": True},
        )
        return {place["uri"].removeprefix(f"{self._workspace.as_uri()}/") for place in answer}

    def ask(self, method: str, **params: object) -> list[dict]:
        """The result of a request. What the server asks meanwhile is answered."""
        self._last_id += 1
        self._send({"id": self._last_id, "method": method, "params": params})
        while (message := self._receive()).get("id") != self._last_id or "method" in message:
            pass
        return message["result"]

    def _receive(self) -> dict:
        """The next message. What the server asks with it is answered."""
        message = self._read()
        if "method" in message and "id" in message:
            items = (message.get("params") or {}).get("items", [])
            self._send({"id": message["id"], "result": [None] * len(items)})
        return message

    def _send(self, message: dict) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._process.stdin.flush()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        length = 0
        while (line := self._process.stdout.readline().strip()) or not length:
            assert line, "the language server ended"
            name, _, value = line.partition(b": ")
            length = int(value) if name == b"Content-Length" else length
        return json.loads(self._process.stdout.read(length))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageServer]:
    workspace = tmp_path_factory.mktemp("editor") / "ostinato"
    workspace.symlink_to(ROOT)
    server = LanguageServer(workspace)
    yield server
    server.close()


@pytest.mark.editor
@pytest.mark.parametrize("name", DEFINED_IN)
def test_references_are_those_of_a_text_search(server: LanguageServer, name: str) -> None:
    used_in = {
        path for path in list_modules() if re.search(rf"\b{name}\b", (ROOT / path).read_text())
    }

    assert len(used_in) > 2
    assert server.references(DEFINED_IN[name], name) == used_in


def test_the_checkout_holds_no_links() -> None:
    assert [name for name in list_files() if (ROOT / name).is_symlink()] == []


def test_only_the_folder_of_all_tests_is_a_regular_package() -> None:
    """Modules of tests are called `tests.unit...`; in regular packages pytest would name them by the checkout."""
    found = [name for name in list_files() if re.fullmatch(r"tests/(.*/)?__init__\.py", name)]

    assert [name for name in found if "fakes/repositories/" not in name] == ["tests/__init__.py"]


@pytest.mark.editor
def test_a_type_checker_knows_every_name_of_the_package(tmp_path: Path) -> None:
    """What a program that uses the API is told: `__init__.pyi` declares the names that `__getattr__` gives."""
    program = tmp_path / "program.py"
    uses = "\n".join(f"print(ostinato.{name})" for name in ostinato.__all__)
    program.write_text(f"import ostinato\n\n{uses}\nhome: ostinato.Home = ostinato.open()\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "ostinato").symlink_to(ROOT)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"include": ["program.py"], "extraPaths": ["src"]})
    )
    command = [SERVER.with_name("pyright"), "-p", tmp_path, "--pythonpath", sys.executable]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
