"""The copy of a user's repository and the way back: nothing ignored goes in, nothing foreign is
overwritten.
"""

import contextlib
import io
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from ostinato.flows.chat.command import read_rules
from ostinato.flows.chat.screen import ChatScreen
from ostinato.flows.chat.session import ChatModel, ChatSession, Interrupt, keep_edits
from ostinato.flows.chat.workplace import (
    Workplace,
    choose_tests,
    copy_repository,
    list_files,
    recent_files,
)
from ostinato.infra.agent.config import HarnessConfig, PromptFacts
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.sandbox.discovery.checkout import describe_checkout
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.repository import PreparedRepository
from tests.fakes.memory_sandbox import MemorySandbox

FILES = {
    "pkg/core.py": "x = 1\n",
    "tests/test_core.py": "",
    "build.log": "",
    ".gitignore": "*.log\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / "mine" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / path).write_text(text)
    return tmp_path / "mine"


def open_workplace(root: Path, copy: Path) -> Workplace:
    files = copy_repository(root, copy)
    layout = describe_checkout(files)
    repository = PreparedRepository.from_directory("chat", copy, layout.package_paths, ())
    environment = AgentEnvironment(MemorySandbox(files))
    return Workplace(root, files, layout, environment, RepositoryEnvironment.create(repository, 1))


def test_ignored_files_stay_behind_with_and_without_git(root: Path) -> None:
    wanted = [".gitignore", "pkg/core.py", "tests/test_core.py"]
    assert list_files(root) == wanted
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "link.py").symlink_to("/etc/passwd")
    assert list_files(root) == wanted


def test_a_folder_of_a_repository_leaves_behind_what_the_repository_ignores(root: Path) -> None:
    (root / "pkg" / "secret.log").write_text("key")
    (root / "private").mkdir()
    (root / "private" / "notes.md").write_text("")
    (root / ".gitignore").write_text("*.log\nprivate/\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    assert list_files(root / "pkg") == ["core.py"]
    assert list_files(root / "private") == ["notes.md"]


NAMES = st.sampled_from(("a", "b", "key.txt", "x.log"))
PATTERNS = st.sampled_from(
    (
        "a",
        "b/",
        "/a",
        "!a",
        "*.log",
        "!*.log",
        "key.txt",
        "/key.txt",
        "a/b",
        "**/b",
        "!b/",
        "a/**",
        "/*",
        "!/a/",
        "*",
    )
)


@given(
    places=st.sets(st.lists(NAMES, min_size=1, max_size=4).map("/".join), min_size=1, max_size=8),
    rules=st.dictionaries(
        st.sampled_from((".", "a", "a/b", "b")), st.lists(PATTERNS, max_size=3), max_size=3
    ),
)
@example({"a/a"}, {".": ["b/", "!/a/"], "a/b": []})  # the second rule is about the folder alone
@settings(max_examples=60, deadline=None)
def test_ignores_of_every_folder_hold_without_git_as_with_it(
    places: set[str], rules: dict[str, list[str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "mine")
        root.mkdir()
        texts = {f"{place}/.gitignore": "\n".join(lines) for place, lines in rules.items()}
        for name, text in {**dict.fromkeys(sorted(places), ""), **texts}.items():
            with contextlib.suppress(OSError):  # a file lies where a folder is wanted
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
        alone = list_files(root)
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        assert alone == list_files(root)


def make_odd_entries(root: Path, outside: Path) -> None:
    """Links to outside, rings, a pipe, a socket and files that cannot be read, in every place of a folder."""
    outside.mkdir()
    (outside / "id_rsa").write_text("secret")
    (outside / ".gitignore").write_text("core.py\n")
    links = {
        "docs": outside, "pkg/up": root, "pkg/self": Path("self"), "key.md": outside / "id_rsa",
        "a": Path("b"), "b": Path("a"), "gone": Path("nowhere"), "pkg/far": Path("/proc/self"),
    }  # fmt: skip
    for name, to in links.items():
        (root / name).symlink_to(to)
    os.mkfifo(root / "pipe.py")
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(root):
        server.bind("socket.py")
    for place in ("AGENTS.md", ".cursorrules", "CLAUDE.md"):
        (root / place).symlink_to(outside / "id_rsa")


@pytest.mark.parametrize("kept_by", ["nothing", "git", "broken git"])
def test_no_link_leads_out_and_odd_entries_are_passed_over(
    root: Path, tmp_path: Path, kept_by: str
) -> None:
    (root / ".gitignore").unlink()
    (root / ".gitignore").symlink_to(tmp_path / "outside" / ".gitignore")
    if kept_by == "git":
        # a tracked folder that became a link afterwards: git still lists what it held
        (root / "docs").mkdir()
        (root / "docs" / "id_rsa").write_text("mine")
        for command in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", "-C", str(root), *command], check=True)
        shutil.rmtree(root / "docs")
    if kept_by == "broken git":
        (root / ".git").symlink_to(tmp_path / "outside")
    make_odd_entries(root, tmp_path / "outside")
    files = copy_repository(root, tmp_path / "copy")
    assert sorted(files) == ["build.log", "pkg/core.py", "tests/test_core.py"]
    assert not [path for path in (tmp_path / "copy").rglob("*") if path.is_symlink()]
    assert read_rules(root) == ""
    (root / "AGENTS.md").unlink()
    (root / "AGENTS.md").symlink_to("pkg/core.py")
    assert read_rules(root) == "x = 1\n"


def test_a_link_in_the_repository_leads_no_write_out(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    workplace = open_workplace(root, tmp_path / "copy")
    (root / "pkg" / ".core.py.ostinato").symlink_to(outside / "mine")
    (root / "new").symlink_to(outside)
    (root / "tests" / "test_core.py").unlink()
    (root / "tests" / "test_core.py").symlink_to(outside / "mine")
    workplace.keep({"pkg/core.py": b"x = 2\n"})
    for path in ("new/x", "tests/test_core.py", "new/../../x", "/etc/x"):
        with pytest.raises(ConfigError, match="wanted one inside"):
            workplace.keep({path: b"x"})
    assert [path.name for path in outside.iterdir()] == ["mine"]
    assert (outside / "mine").read_text() == "mine"
    assert (root / "pkg" / "core.py").read_text() == "x = 2\n"


def test_no_program_that_a_repository_names_is_run(root: Path, tmp_path: Path) -> None:
    marker, hook = tmp_path / "ran", tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {marker}\n")
    hook.chmod(0o755)
    for command in (["init", "-q"], ["add", "."], ["config", "core.fsmonitor", str(hook)]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    assert "pkg/core.py" in list_files(root)
    assert not marker.exists()


def test_files_that_the_user_ignores_everywhere_stay_behind(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git is asked without the user's configuration, yet their list may hold what is secret."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "ignored").write_text("secret.env\n")
    (home / ".gitconfig").write_text("[core]\n\texcludesFile = ~/ignored\n")
    monkeypatch.setenv("HOME", str(home))
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "secret.env").write_text("key\n")
    assert "secret.env" not in list_files(root)


def test_an_empty_directory_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no files"):
        copy_repository(tmp_path, tmp_path / "copy")


def test_code_and_tests_are_told_apart() -> None:
    paths = [
        "setup.py",
        "src/a/x.py",
        "lib/y.py",
        "lib/tests/test_y.py",
        "test_z.py",
        "docs/conf.py",
    ]
    layout = describe_checkout(dict.fromkeys(paths, b""))
    assert layout.package_paths == ("lib", "src/a")
    assert layout.test_paths == ("lib/tests", "test_z.py")


async def test_edits_reach_the_repository_only_when_kept(root: Path, tmp_path: Path) -> None:
    work = open_workplace(root, tmp_path / "copy")
    sandbox = work.environment.sandbox
    await sandbox.write("pkg/core.py", b"x = 2\n")
    await sandbox.write("new/__pycache__/a.pyc", b"")
    pending = await work.pending()
    assert pending == {"pkg/core.py": b"x = 2\n"}
    assert (root / "pkg/core.py").read_text() == "x = 1\n"
    assert "-x = 1\n+x = 2\n" in work.describe(pending)
    work.keep(pending)
    assert (root / "pkg/core.py").read_text() == "x = 2\n"
    assert await work.pending() == {}
    await sandbox.write("pkg/core.py", b"x = 1\n")
    assert await work.pending() == {"pkg/core.py": b"x = 1\n"}


async def test_a_file_that_somebody_else_changed_is_a_conflict(root: Path, tmp_path: Path) -> None:
    work = open_workplace(root, tmp_path / "copy")
    await work.environment.sandbox.write("pkg/core.py", b"x = 2\n")
    (root / "pkg/core.py").write_text("x = 3\n")
    assert work.conflicts(await work.pending()) == ["pkg/core.py"]


async def test_what_is_undone_goes_back_to_what_was_kept(root: Path, tmp_path: Path) -> None:
    work = open_workplace(root, tmp_path / "copy")
    work.environment.sandbox = await work.place.lease()
    await work.environment.sandbox.write("pkg/core.py", b"x = 2\n")
    work.keep(await work.pending())
    await work.environment.sandbox.write("pkg/core.py", b"x = 9\n")
    await work.environment.sandbox.write("/tmp/left", b"")
    await work.revert()
    assert await work.environment.sandbox.read("pkg/core.py") == b"x = 2\n"
    assert await work.environment.sandbox.list("/tmp") == ()
    assert await work.pending() == {}
    await work.place.close()


def test_nothing_outside_the_repository_is_written(root: Path, tmp_path: Path) -> None:
    work = open_workplace(root, tmp_path / "copy")
    with pytest.raises(ConfigError, match="inside"):
        work.keep({"../outside.py": b""})


def test_only_files_changed_lately_are_recent(root: Path) -> None:
    files = {path: text.encode() for path, text in FILES.items()}
    newest = (root / "pkg/core.py").stat().st_mtime
    assert recent_files(root, files, newest + 10) == ()
    assert len(recent_files(root, files, newest - 1000)) == 3


@pytest.mark.parametrize(
    "path", [".env", "deploy/.env.local", ".ssh/config", "server.pem", "id_rsa", "my_secrets.toml"]
)
def test_a_file_of_secrets_is_never_recent(root: Path, path: str) -> None:
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_text("TOKEN=1")
    assert path not in {shown.path for shown in recent_files(root, {path: b"TOKEN=1"}, 0.0)}


COLLECTED = ("tests/test_a.py::test_x", "tests/test_a.py::test_y[1]", "tests/more/test_b.py::T::t")


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ((), COLLECTED),
        (("tests/test_a.py",), COLLECTED[:2]),
        (("tests/more",), COLLECTED[2:]),
        (("tests/test_a.py::test_y", "tests/more/test_b.py::T"), COLLECTED[1:]),
    ],
)
def test_tests_are_chosen_by_folder_file_class_or_name(wanted, chosen) -> None:
    assert choose_tests(COLLECTED, wanted) == chosen


def test_a_place_without_tests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tests tests/test_c.py: none of 3 collected"):
        choose_tests(COLLECTED, ["tests/test_c.py"])
    assert choose_tests((), ()) == ()


def test_a_chain_of_a_thousand_folders_is_no_traceback(root: Path) -> None:
    with contextlib.chdir(root):
        for _ in range(1_200):
            Path("deep").mkdir()
            os.chdir("deep")
    assert "pkg/core.py" in list_files(root)
    subprocess.run(["rm", "-rf", str(root / "deep")], check=True)  # pytest's own cannot


async def test_edits_that_cannot_be_written_are_named_and_the_others_are_written(
    root: Path, tmp_path: Path
) -> None:
    workplace = open_workplace(root, tmp_path / "copy")
    (root / "outside").symlink_to(tmp_path)
    (root / "new.py" / "inner").mkdir(parents=True)
    written = io.StringIO()
    session = ChatSession(
        ChatModel("model", HarnessConfig()),
        workplace,
        ChatScreen(Console(file=written, width=200)),
        temperature=1.0,
        seed=0,
        facts=PromptFacts(),
        session_id="chat",
        interrupt=Interrupt(),
    )
    edits = {"new.py": b"", "outside/a.py": b"", "pkg/core.py": b"x = 2\n", "z" * 250: b""}
    await keep_edits(session, dict(edits))

    assert (root / "pkg/core.py").read_bytes() == b"x = 2\n"
    shown = written.getvalue()
    assert shown.count("is not written: ") == 3
    assert "written: pkg/core.py\n" in shown
    assert list(root.rglob(".*.ostinato")) == []
    assert not (tmp_path / "a.py").exists()
