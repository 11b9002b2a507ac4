"""Layers, snapshots and forks by a user without any right: us, or nobody where we are root."""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_NOBODY = 65534


def _interpreter_of_everyone() -> str:
    """An interpreter of this version that another user may run too."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (Path(sys.executable).resolve(), Path("/usr/bin", version)):
        if path.exists() and all(parent.stat().st_mode & 0o005 == 0o005 for parent in path.parents):
            return str(path)
    raise AssertionError(
        f"root's {sys.executable} is closed to others and so is /usr/bin/{version}"
    )


def _run(kind: str) -> dict:
    interpreter, options = sys.executable, {}
    folder = Path(tempfile.mkdtemp())
    if os.geteuid() == 0:
        os.chown(folder, _NOBODY, _NOBODY)
        interpreter = _interpreter_of_everyone()
        options = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
    (folder / "ostinato").symlink_to(_ROOT)
    paths = ":".join([str(folder), str(_ROOT), *map(sysconfig.get_path, ("purelib", "platlib"))])
    done = subprocess.run(
        [interpreter, "-m", "tests.contracts.unprivileged_sandbox", kind, str(folder)],
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=220,
        **options,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["overlays", "copies"])
def test_layers_work_without_rights(kind):
    told = _run(kind)
    assert told["capabilities"] == "0000000000000000"
    assert told["user"] != 0
    assert told["edited"] == ""
    assert told["changes"] == {
        "closed": "secret\n",
        "gone.txt": None,
        "pack/a": None,
        "pack/b": "new\n",
        "plain": "x\n",
        "shut/file": "in\n",
    }
    assert told["looked"] == ("closed\nkept\npack\nplain\nshut\nb\n777\n0\n0\nin\n")
    assert told["grandchild"] == "b\nnew\n"
    assert told["repository"] == ["a", "b", "gone.txt", "kept", "pack"]
    assert told["bomb"]
    assert told["usable"] == "fine\n"
    assert told["grown"] == "OutOfMemory"
    assert not told["left"]
