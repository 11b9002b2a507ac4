"""A task of Harbor, and a clone with an instance of SWE-bench, as small as they can be."""

import json
import subprocess
from pathlib import Path

BROKEN = 'def half(number):\n    """Half of a number."""\n    return number // 2\n'
WHOLE = BROKEN.replace("//", "/")
DOUBLE = "\n\ndef double(number):\n    return number * 2\n"
TEST = "from kit.core import double, half\n\n\ndef test_even():\n    assert half(4) == 2\n"
TEST += "\n\ndef test_double():\n    assert double(4) == 8\n"
NEW_TEST = TEST + "\n\ndef test_odd():\n    assert half(3) == 1.5\n    assert half(5) == 2.5\n"
PROJECT = '[project]\nname = "kit"\nversion = "1"\n'
PATCH = """--- a/kit/core.py
+++ b/kit/core.py
@@ -1,6 +1,6 @@
 def half(number):
     \"\"\"Half of a number.\"\"\"
-    return number // 2
+    return number / 2
 
 
 def double(number):
"""
DOCKERFILE = """FROM python:3.12-slim
RUN apt-get update && apt-get install -y git && \\
    pip install --no-cache-dir pytest
WORKDIR /app
COPY project/ .
CMD ["bash"]
"""
TEST_SCRIPT = """#!/bin/bash
if pytest /tests/test_core.py -rA; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def write_files(directory: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return directory


def write_harbor_task(directory: Path, **changed: str) -> Path:
    """A task with another text at each path of `changed` ("solution/solve.sh"); an empty text: no such file."""
    files = {
        "task.toml": 'schema_version = "1.4"\n[task]\nname = "people/halve"\n',
        "instruction.md": "Half of an odd number is rounded. Make it exact.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/project/pyproject.toml": PROJECT,
        "environment/project/kit/__init__.py": "",
        "environment/project/kit/core.py": BROKEN + DOUBLE,
        "tests/test.sh": TEST_SCRIPT,
        "tests/test_core.py": NEW_TEST,
        "solution/solve.sh": f"#!/bin/bash\ncd /app\npatch -p1 << 'DONE'\n{PATCH}DONE\n",
    } | changed
    return write_files(directory, {path: text for path, text in files.items() if text})


def write_clone(directory: Path) -> str:
    """The commit of a clone without the fix and its test."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=A Person", "-c", "user.email=a@example.org"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=directory, check=True, capture_output=True, text=True
        ).stdout

    write_files(
        directory,
        {
            "pyproject.toml": PROJECT,
            "src/kit/__init__.py": "",
            "src/kit/core.py": BROKEN + DOUBLE,
            "tests/test_core.py": TEST,
        },
    )
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "-m", "First version of the kit")
    return git("rev-parse", "HEAD").strip()


TEST_PATCH = """diff --git a/tests/test_core.py b/tests/test_core.py
--- a/tests/test_core.py
+++ b/tests/test_core.py
@@ -7,3 +7,8 @@

 def test_double():
     assert double(4) == 8
+
+
+def test_odd():
+    assert half(3) == 1.5
+    assert half(5) == 2.5
"""


def instance(commit: str, **changed: object) -> dict:
    """A row as data sets have it, with more columns than are read."""
    return {
        "instance_id": "people__kit-7",
        "repo": "people/kit",
        "base_commit": commit,
        "version": "1.0",
        "patch": "diff --git a/src/kit/core.py b/src/kit/core.py\n"
        + PATCH.replace("kit/", "src/kit/"),
        "test_patch": TEST_PATCH,
        "problem_statement": "Half of an odd number is rounded.",
        "hints_text": "",
        "FAIL_TO_PASS": json.dumps(["tests/test_core.py::test_odd"]),
        "PASS_TO_PASS": json.dumps(["tests/test_core.py::test_even"]),
    } | changed
