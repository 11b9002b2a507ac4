"""Tasks of Harbor as problems, if the task's folder holds everything that they need.

Here pytest on files decides a pass (SECURITY.md), never a script that writes a reward. A task is therefore accepted
if its image consists of a Python image, packages of the index and files next to the Dockerfile, its tests are pytest
files, and its solution is a patch. Any other task is refused with the reason. No script of a task runs.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from ostinato.infra.platform.bounded_files import parse_toml, read_bounded
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import read_folder
from ostinato.infra.sandbox.discovery.layout import TEST_PATTERNS, ProjectLayout
from ostinato.tasks.problems.given.task import GivenTask, apply_patch
from ostinato.tasks.problems.repositories import MAX_FILE_BYTES

OURS = "ostinato"  # our table in the task's metadata
_CONFIG, _TEXT = "task.toml", "instruction.md"
_PLAIN = frozenset(("ENV", "LABEL", "USER", "CMD", "ENTRYPOINT", "EXPOSE", "ARG", "SHELL"))
_INSTALLS = re.compile(r"(?:python3? -m |uv )?pip3? install (.+)")
_HARMLESS = re.compile(r"(apt-get|apt|mkdir|rm -rf /var/lib/apt|useradd|chown|git config)\b")
_HERE_DOCUMENT = re.compile(
    r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n(.*?)\n\s*\2\s*$", re.DOTALL | re.MULTILINE
)
_DIFF = re.compile(r"^(diff --git |--- )", re.MULTILINE)


def is_task(directory: Path) -> bool:
    """Whether a folder is a task of Harbor."""
    return (directory / _CONFIG).is_file() and (directory / "environment").is_dir()


def find_tasks(directory: Path) -> list[Path]:
    """The folder itself if it is a task, else the tasks in it."""
    if is_task(directory):
        return [directory]
    return [path for path in sorted(directory.iterdir()) if path.is_dir() and is_task(path)]


def read_task(directory: Path) -> tuple[GivenTask, dict[str, bytes], dict[str, bytes]]:
    """The task with its solved and unsolved states, both with its tests. ProblemError says why it is refused."""
    try:
        return _read_task(directory)
    except (AttributeError, IndexError, TypeError, ValueError, OSError) as error:
        raise ProblemError(
            f"it cannot be read, wanted the standard form of Harbor's tasks: {error!r:.200}"
        ) from error


def _read_task(directory: Path) -> tuple[GivenTask, dict[str, bytes], dict[str, bytes]]:
    config = _read_config(directory)
    text = _read_text(directory / _TEXT).strip()
    if not text:
        raise ProblemError(f"its {_TEXT} is missing or empty, wanted the request to the agent")
    image, requires = _read_image(directory / "environment")
    unsolved = {**image, **_read_tests(directory / "tests", image)}
    solved = unsolved
    for patch in _patches(directory / "solution"):
        solved = apply_patch(solved, patch)
    if solved == unsolved:
        raise ProblemError(
            "its solution is no patch (a .patch or .diff file, or a patch in solve.sh)"
        )
    ours = config.get("metadata", {}).get(OURS, {})
    name = str(config.get("task", {}).get("name", directory.resolve().name)).rpartition("/")[2]
    try:
        task = GivenTask(
            name=re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "task",
            origin="harbor",
            prompt=text,
            fail_to_pass=ours.get("fail_to_pass", ()),
            pass_to_pass=ours.get("pass_to_pass", ()),
            package=ours.get("package", _guess_package(image)),
            requires=() if "layout" in ours else tuple(requires),
            layout=ProjectLayout.model_validate(ours["layout"]) if "layout" in ours else None,
        )
    except ValidationError as error:
        raise ProblemError(f"its table [metadata.{OURS}]: {error}") from None
    return task, solved, unsolved


def _read_config(directory: Path) -> dict[str, Any]:
    config = parse_toml(f"its {_CONFIG}", _read_text(directory / _CONFIG).encode(), ProblemError)
    place = config.get("environment", {})
    for wrong, what in (
        (config.get("steps"), "it has several steps"),
        (place.get("docker_image"), "its environment is an image, not files"),
        (str(place.get("os", "linux")).lower() != "linux", "it is for another system than Linux"),
        (place.get("gpus") or place.get("tpu"), "it needs an accelerator"),
        (place.get("mcp_servers"), "it needs servers of tools"),
    ):
        if wrong:
            raise ProblemError(f"{what}, which problems here do not support")
    return config


def _read_image(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """The files in the image's working directory, and the packages that the image installs."""
    others = sorted(path.name for path in folder.glob("*compose*"))
    if others or not (folder / "Dockerfile").is_file():
        raise ProblemError(
            f"its environment is {others or 'without a Dockerfile'}, wanted one image"
        )
    files: dict[str, bytes] = {}
    requires: list[str] = []
    place = PurePosixPath("/")
    for name, rest in _instructions(_read_text(folder / "Dockerfile")):
        if name == "FROM":
            image = rest.split()[0].rpartition("/")[2]
            if not image.startswith(("python:", "ubuntu:", "debian:")):
                raise ProblemError(
                    f"its image is {rest!r}, wanted an image of Python, Debian or Ubuntu"
                )
        elif name == "WORKDIR":
            place = _normal(place / rest)
        elif name in ("COPY", "ADD"):
            files |= _copied(folder, rest, place)
        elif name == "RUN":
            requires += _installed(rest)
        elif name not in _PLAIN:
            raise ProblemError(f"its Dockerfile has {name} {rest[:60]!r}, which is not supported")
    return files, requires


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = text.replace("\r\n", "\n")
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*$", "", lines, flags=re.MULTILINE))
    for line in filter(str.strip, joined.split("\n")):
        name, _, rest = line.strip().partition(" ")
        yield name.upper(), rest.strip()


def _copied(folder: Path, rest: str, place: PurePosixPath) -> dict[str, bytes]:
    """Files of a COPY instruction, by path in the working directory."""
    *sources, target = [word for word in shlex.split(rest) if not word.startswith("--")]
    destination = place / target
    files: dict[str, bytes] = {}
    for source in sources:
        path = folder / source
        if not path.resolve().is_relative_to(folder.resolve()) or not path.exists():
            raise ProblemError(f"its Dockerfile copies {source!r}, which is no file of the task")
        if path.is_dir():
            found = {destination / name: text for name, text in _read_folder(path).items()}
        else:
            is_folder = target.endswith("/") or target == "." or len(sources) > 1
            found = {destination / path.name if is_folder else destination: _read_file(path)}
        for name, content in found.items():
            inside = _normal(name)
            if not inside.is_relative_to(place):
                raise ProblemError(f"its Dockerfile copies to {target!r}, outside {place}")
            files[str(inside.relative_to(place))] = content
    files.pop("Dockerfile", None)
    return files


def _normal(path: PurePosixPath) -> PurePosixPath:
    """The absolute path without `..`."""
    return PurePosixPath(posixpath.normpath(path))


def _installed(rest: str) -> list[str]:
    """Packages that a RUN instruction installs from the index. ProblemError for commands that may write files."""
    requires: list[str] = []
    for command in re.split(r"&&|;", rest):
        text = " ".join(command.split())
        if found := _INSTALLS.fullmatch(text):
            words = [word for word in shlex.split(found[1]) if not word.startswith("-")]
            requires += [
                word for word in words if re.fullmatch(r"[A-Za-z0-9][\w.-]*([<>=!~].*)?", word)
            ]
        elif text and not _HARMLESS.match(text):
            raise ProblemError(
                f"its image is made by running {text[:80]!r}, and no script runs here"
            )
    return requires


def _read_tests(folder: Path, image: Mapping[str, bytes]) -> dict[str, bytes]:
    """Test files by path in the project. Files that the image does not have are placed below `tests`."""
    script = _read_text(folder / "test.sh")
    if not re.search(r"\bpytest\b", script):
        raise ProblemError("its tests/test.sh runs no pytest, which decides a pass here")
    files = _read_folder(folder)
    del files["test.sh"]
    files.pop("Dockerfile", None)
    tests = [p for p in files if any(PurePosixPath(p).match(form) for form in TEST_PATTERNS)]
    if not tests:
        raise ProblemError(f"its folder tests has no test file ({', '.join(TEST_PATTERNS)})")
    return {
        path if path in image or path.startswith("tests/") else f"tests/{path}": content
        for path, content in files.items()
    }


def _patches(folder: Path) -> Iterator[str]:
    """Unified diffs of a solution, in the order of their file names."""
    if not folder.is_dir():
        raise ProblemError("it has no solution, which a problem needs as proof")
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".patch", ".diff"):
            yield _read_text(path)
        elif path.name == "solve.sh":
            for _, _, content in _HERE_DOCUMENT.findall(_read_text(path)):
                if _DIFF.match(content):
                    yield content + "\n"


def _guess_package(files: Mapping[str, bytes]) -> str:
    """The only package or module at the top level of files without metadata. Empty if there are several."""
    paths = [PurePosixPath(path) for path in files]
    found = {p.parts[0] for p in paths if len(p.parts) == 2 and p.name == "__init__.py"} - {"tests"}
    found = found or {p.stem for p in paths if len(p.parts) == 1 and p.suffix == ".py"} - {
        "setup",
        "conftest",
    }
    return found.pop() if len(found) == 1 else ""


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Files of a task's folder, without caches and files that are too large."""
    return read_folder(folder, left_out=("__pycache__",), most_bytes=MAX_FILE_BYTES)


def _read_text(path: Path) -> str:
    if not path.is_file() or path.is_symlink():
        return ""
    return _read_file(path).decode(errors="replace")


def _read_file(path: Path) -> bytes:
    return read_bounded(path, MAX_FILE_BYTES, ProblemError)
