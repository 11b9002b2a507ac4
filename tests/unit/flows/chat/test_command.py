"""The command line of the chat refuses what cannot work before anything is loaded."""

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from ostinato.flows.chat import command
from ostinato.infra.platform.errors import ConfigError

CLI = "import sys; sys.argv[0] = 'ostinato'; from ostinato.flows.cli import main; main()"


def test_a_missing_repository_is_refused_without_loading_a_model() -> None:
    program = f"{CLI[:11]}sys.modules['torch'] = None; {CLI[11:]}"
    arguments = [sys.executable, "-c", program, "chat", "--repo", "/nonexistent"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'/nonexistent' does not exist" in done.stderr


async def test_a_model_that_the_server_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"data": [{"id": "small"}, {"id": "large"}]}
    server = httpx2.MockTransport(lambda request: httpx2.Response(200, json=listed))
    client = httpx2.AsyncClient
    monkeypatch.setattr(
        command.httpx2, "AsyncClient", lambda **given: client(**given, transport=server)
    )
    async with command.connect_gateway("http://there", "", "large") as served:
        assert served.model_name == "large"
    with pytest.raises(ConfigError, match="model is 'huge', wanted one of small, large"):
        async with command.connect_gateway("http://there", "", "huge"):
            pass


@pytest.mark.nightly
def test_set_reaches_the_recipe_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    options = ["--repo", str(tmp_path), "--set", "decoding.engin=vllm"]
    command_line = [sys.executable, "-P", "-c", CLI, "chat", *options]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "decoding.engin" in done.stderr
    command_line += ["--gateway", "http://there"]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--set changes a recipe" in done.stderr
