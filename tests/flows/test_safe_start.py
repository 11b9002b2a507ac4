"""Commands run in a folder full of look-alikes import nothing from it, and keys stay on their host."""

import subprocess
from pathlib import Path

import pytest

from ostinato.flows.chat.command import key_for
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.gateway.tenants import local_tenants
from tests.fakes.processes import run_command

LOOK_ALIKES = (
    "models/__init__.py",
    "ostinato/__init__.py",
    "flows/__init__.py",
    "torch.py",
    "prefect.py",
    "numba.py",
    "typer.py",
    "sitecustomize.py",
    "usercustomize.py",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cloned"
    for name in LOOK_ALIKES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        mark = f"open({str(tmp_path / 'ran')!r}, 'a').write(__file__ + '\\n')\n"
        (folder / name).write_text(mark)
    return folder


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(folder.parent / "home", *arguments, cwd=folder, timeout=500)


def what_ran(folder: Path) -> str:
    mark = folder.parent / "ran"
    return mark.read_text() if mark.exists() else ""


@pytest.mark.timeout(600)
def test_chat_in_a_strange_folder_runs_none_of_its_code(folder: Path) -> None:
    done = run_in(
        folder, "chat", "--repo", ".", "--gateway", "http://127.0.0.1:9", "--message", "a"
    )
    assert "127.0.0.1:9" in done.stdout + done.stderr
    assert what_ran(folder) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flow_in_a_strange_folder_runs_none_of_its_code(folder: Path) -> None:
    """Server, flow process and one stage, which fails since its base checkpoint does not exist."""
    recipe = folder / "mine.toml"
    recipe.write_text(
        'extends = "miniature"\nname = "mine"\n[[problems.repositories]]\nname = "no-such-package"\n'
        'version = "1"\npackage_paths = ["a"]\ntest_paths = ["b"]\nmutated_paths = ["a/b.py"]\n'
    )
    done = run_in(folder, "run", "problem_building", "--recipe", str(recipe))
    assert done.returncode != 0
    assert what_ran(folder) == ""


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8400", "http://localhost:8400/v1", "http://127.0.0.1:8400/v1/"]
)
def test_key_of_this_machine_goes_to_its_own_gateway(tmp_path: Path, url: str) -> None:
    settings = Settings(home=tmp_path)
    (tenant,) = local_tenants(tmp_path, ("local",)).values()
    assert key_for(settings, url, "") == tenant.api_keys[0].get_secret_value()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9999",
        "http://example.org:8400",
        "https://example.org",
        "http://127.0.0.1:8400@example.org",
        "http://127.0.0.1.example.org:8400",
    ],
)
def test_key_of_this_machine_goes_nowhere_else(tmp_path: Path, url: str) -> None:
    local_tenants(tmp_path, ("local",))
    assert key_for(Settings(home=tmp_path), url, "") == ""
    assert key_for(Settings(home=tmp_path), url, "given") == "given"
