"""Tasks of Harbor: read when files alone hold them, written so that they read back and their scripts decide."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest

from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.sandbox.host.mounts import find_bubblewrap
from ostinato.tasks.problems.config import ProblemsConfig
from ostinato.tasks.problems.given.harbor_reading import find_tasks, read_task
from ostinato.tasks.problems.given.harbor_writing import solution_patch, write_task
from ostinato.tasks.problems.given.task import store_task
from ostinato.tasks.records import Problem, Split
from tests.unit.tasks.problems.builds import build_set, check_proofs, load
from tests.unit.tasks.problems.given.collections import (
    BROKEN,
    DOCKERFILE,
    DOUBLE,
    NEW_TEST,
    PATCH,
    WHOLE,
    write_harbor_task,
)

# of `harbor.models.task.config.TaskConfig` in harbor 0.25.0, without its texts
SCHEMA = Path(__file__).parents[4] / "fakes" / "harbor_task_v1_4.schema.json"


def build(tmp_path: Path, task: Path) -> Problem:
    given, solved, unsolved = read_task(task)
    source, _ = store_task(given, solved, unsolved, tmp_path / "archives", Split.TRAIN)
    result, (problem,) = build_set(tmp_path, ProblemsConfig(given=(source,)), "run")
    check_proofs(tmp_path, result, [problem])
    return problem


def test_a_task_is_read_as_two_states_and_a_text(tmp_path: Path) -> None:
    task = write_harbor_task(tmp_path / "tasks" / "halve")
    assert find_tasks(tmp_path / "tasks") == [task] == find_tasks(task)

    given, solved, unsolved = read_task(task)

    assert given.name == "halve"
    assert given.prompt == "Half of an odd number is rounded. Make it exact."
    assert given.requires == ("pytest",)
    assert unsolved["kit/core.py"].decode() == BROKEN + DOUBLE
    assert solved["kit/core.py"].decode() == WHOLE + DOUBLE
    assert solved["tests/test_core.py"].decode() == NEW_TEST
    assert "Dockerfile" not in solved


def test_a_task_becomes_a_proven_problem(tmp_path: Path) -> None:
    task = write_harbor_task(
        tmp_path / "halve", **{"solution/solve.sh": "git apply x", "solution/x.patch": PATCH}
    )
    problem = build(tmp_path, task)
    assert problem.fail_to_pass == ("tests/test_core.py::test_odd",)
    assert problem.hidden_tests == problem.fail_to_pass
    assert set(problem.pass_to_pass) == {
        f"tests/test_core.py::test_{n}" for n in ("even", "double")
    }


CONFIG = 'schema_version = "1.4"\n'


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("task.toml", "a b", "is not TOML"),
        ("task.toml", CONFIG + '[[steps]]\nname = "one"\n', "several steps"),
        ("task.toml", CONFIG + '[environment]\ndocker_image = "x"\n', "is an image"),
        ("task.toml", CONFIG + '[environment]\nos = "windows"\n', "another system"),
        ("task.toml", CONFIG + "[environment]\ngpus = 1\n", "accelerator"),
        ("instruction.md", "", "instruction.md is missing"),
        ("environment/docker-compose.yaml", "a: 1", "wanted one image"),
        ("environment/Dockerfile", "FROM nginx:1\n", "its image is 'nginx:1'"),
        ("environment/Dockerfile", DOCKERFILE + "RUN git clone X\n", "running 'git clone X'"),
        ("environment/Dockerfile", DOCKERFILE + "COPY ../../x y\n", "no file of the task"),
        ("environment/Dockerfile", DOCKERFILE + "COPY project /other/\n", "outside /app"),
        ("environment/Dockerfile", DOCKERFILE + "HEALTHCHECK x\n", "HEALTHCHECK"),
        ("environment/Dockerfile", DOCKERFILE + "COPY project ../other\n", "outside /app"),
        ("environment/Dockerfile", DOCKERFILE + 'COPY "a b\n', "standard form of Harbor"),
        ("environment/Dockerfile", DOCKERFILE + "COPY\n", "standard form of Harbor"),
        ("environment/Dockerfile", DOCKERFILE + "FROM\n", "standard form of Harbor"),
        ("environment/Dockerfile", DOCKERFILE + f"COPY {'a' * 300} b\n", "standard form of Harbor"),
        ("environment/Dockerfile", DOCKERFILE + 'RUN pip install "a\n', "standard form of Harbor"),
        ("task.toml", CONFIG + "metadata = 3\n", "standard form of Harbor"),
        ("task.toml", CONFIG + 'environment = "x"\n', "standard form of Harbor"),
        ("tests/test.sh", "diff a b\n", "runs no pytest"),
        ("tests/test_core.py", "", "no test file"),
        ("solution/solve.sh", "sed -i s,//,/, kit/core.py\n", "no patch"),
        ("solution/x.patch", "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "git apply"),
    ],
)
def test_a_task_that_cannot_be_a_problem_says_why(
    path: str, text: str, told: str, tmp_path: Path
) -> None:
    task = write_harbor_task(tmp_path / "halve", **{path: text})
    with pytest.raises(ProblemError, match=told):
        read_task(task)


def test_a_dockerfile_with_line_ends_of_windows_is_read(tmp_path: Path) -> None:
    text = DOCKERFILE.replace("\n", "\r\n")
    task = write_harbor_task(tmp_path / "halve", **{"environment/Dockerfile": text})
    assert read_task(task)[0].requires == ("pytest",)


def test_a_copy_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    line = f"COPY project/kit/core.py ../../../../..{tmp_path}/outside.py\n"
    text = {"environment/Dockerfile": DOCKERFILE + line}
    with pytest.raises(ProblemError, match="outside /app"):
        read_task(write_harbor_task(tmp_path / "halve", **text))
    assert not (tmp_path / "outside.py").exists()


def test_a_solution_that_adds_a_file_is_refused(tmp_path: Path) -> None:
    added = "--- /dev/null\n+++ b/kit/more.py\n@@ -0,0 +1 @@\n+x = 1\n"
    task = write_harbor_task(tmp_path / "halve", **{"solution/x.patch": added})
    given, solved, unsolved = read_task(task)
    with pytest.raises(ProblemError, match=r"adds or removes kit/more\.py"):
        store_task(given, solved, unsolved, tmp_path / "archives", Split.TRAIN)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Problem, Path]:
    """A problem, and its task."""
    problem = build(tmp_path, write_harbor_task(tmp_path / "halve"))
    repository = load(tmp_path, problem.repository)
    return problem, write_task(problem, repository, tmp_path / "out", "8.4.0")


def test_a_written_task_reads_back_as_the_same_problem(
    written: tuple[Problem, Path], tmp_path: Path
) -> None:
    problem, task = written
    (tmp_path / "again").mkdir()
    again = build(tmp_path / "again", task)
    same = {"prompt", "fail_to_pass", "pass_to_pass", "blocks", "hidden_tests", "path", "symbol"}
    assert again.model_dump(include=same) == problem.model_dump(include=same)
    config = tomllib.loads((task / "task.toml").read_text())
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(config, schema)
    assert set(config) <= set(schema["properties"])
    assert set(config["environment"]) <= set(schema["$defs"]["EnvironmentConfig"]["properties"])
    assert config["task"]["name"] == f"ostinato/{problem.problem_id}"
    # the agent's image has no test that decides
    assert "test_odd" not in (task / "environment/repository/tests/test_core.py").read_text()
    with pytest.raises(ConfigError, match="wanted a new folder"):
        write_task(problem, load(tmp_path, problem.repository), tmp_path / "out", "8.4.0")


def test_solution_of_a_file_with_other_line_breaks_is_applied_by_git(tmp_path: Path) -> None:
    text = "# one \x0c page\r\ndef halve(number):\r\n    return number"
    files = {"kit/core.py": f"{text} / 2".encode(), "tests/test_core.py": b"def test(): pass"}
    patch = solution_patch({"kit/core.py": f"{text} // 2".encode()}, files)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/core.py").write_bytes(f"{text} // 2".encode())
    subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], cwd=tmp_path, input=patch.encode(), check=True
    )
    assert (tmp_path / "kit/core.py").read_bytes() == files["kit/core.py"]


@pytest.mark.nightly
def test_scripts_of_a_written_task_refuse_the_broken_and_pay_the_solved(
    written: tuple[Problem, Path], tmp_path: Path
) -> None:
    _, task = written
    assert reward(task, tmp_path / "broken", "/tests/test.sh") == "0"
    assert reward(task, tmp_path / "solved", "/solution/solve.sh && /tests/test.sh") == "1"


def reward(task: Path, place: Path, command: str) -> str:
    """What the scripts write in a box that has the folders of Harbor's container."""
    app, logs = place / "app", place / "logs"
    (logs / "verifier").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(task / "environment/repository"), str(app)], check=True)
    own = {"/app", "/tests", "/logs", "/solution", "/proc", "/dev"}
    shared = [str(path) for path in Path("/").iterdir() if path.is_dir() and str(path) not in own]
    system = [word for name in shared for word in ("--ro-bind", name, name)]
    folders = {app: "/app", logs: "/logs"}
    inside = [
        word for source, target in folders.items() for word in ("--bind", str(source), target)
    ]
    for name in ("tests", "solution"):
        inside += ["--ro-bind", str(task / name), f"/{name}"]
    python = Path(sys.executable).parent
    subprocess.run(
        [str(find_bubblewrap()), *system, "--proc", "/proc", "--dev", "/dev", *inside,
         "--setenv", "PATH", f"{python}:{os.environ['PATH']}", "--unsetenv", "PYTHONPATH",
         "bash", "-c", command],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return (logs / "verifier" / "reward.txt").read_text().strip()
