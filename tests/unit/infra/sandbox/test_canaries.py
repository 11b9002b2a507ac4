"""Canaries of the test server: an outcome that a patched runner gives is a sign, one that load gives is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
import sys
import pytest
from ostinato.infra.sandbox.inside.test_runner import OutcomeRecorder, _run_canaries


class Loop:
    def pytest_runtestloop(self, session):
        recorder = OutcomeRecorder(str(session.config.rootpath))
        session.config.pluginmanager.register(recorder)
        print("fooled:", _run_canaries(session.items, recorder))
        return True


sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", sys.argv[1]], plugins=[Loop()]))
"""
HONEST = {"test_must_pass": "pass", "test_must_fail": "assert False"}
ENDS = {
    "honest": (HONEST, "[]"),
    "no memory": (HONEST | {"test_must_pass": "raise MemoryError"}, "[]"),
    "no memory twice": ({"test_must_pass": "raise MemoryError", "test_must_fail": "raise MemoryError"}, "[]"),
    "error before": (HONEST | {"test_must_pass(broken)": "pass"}, "[]"),
    "all fail": (HONEST | {"test_must_pass": "assert False"}, "['canary test_must_pass failed']"),
    "all pass": (HONEST | {"test_must_fail": "pass"}, "['canary test_must_fail passed']"),
}  # fmt: skip
FIXTURE = "import pytest\n\n\n@pytest.fixture\ndef broken():\n    raise OSError\n"


@pytest.mark.parametrize("end", ENDS)
def test_a_canary_that_has_no_memory_or_does_not_begin_says_nothing(
    end: str, tmp_path: Path
) -> None:
    bodies, wanted = ENDS[end]
    named = {name if "(" in name else f"{name}()": body for name, body in bodies.items()}
    if "test_must_pass(broken)" in named:
        del named["test_must_pass()"]
    tests = "\n\n".join(f"def {name}:\n    {body}" for name, body in named.items())
    (tmp_path / "test_them.py").write_text(f"{FIXTURE}\n\n{tests}\n")
    ran = subprocess.run(
        [sys.executable, "-c", PLUGIN, str(tmp_path)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"fooled: {wanted}" in ran.stdout, ran.stdout + ran.stderr
