"""Attacks that the scan of the text cannot see: what the run itself notices.

Each snippet is hidden in text that is decoded and executed, and given to the test server directly,
past the scan. It must not pass; where something was replaced, the run must say so.
"""

import asyncio

import pytest

from ostinato.infra.sandbox.plain_run import run_plainly
from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.tasks.grading.cheating.attacks import find_forbidden
from tests.faults.cheaters.conftest import HIDDEN, PATH, TESTS
from tests.faults.cheaters.scripts import HONEST_COMMON, HONEST_LONGEST, module

SERVER = "ostinato.infra.sandbox.inside"
LIST = f"tests = {[f'{TESTS}::test_longest_word', f'{TESTS}::test_most_common', HIDDEN]!r}\n"
FORGE = (
    "import os, sys\n"
    f"encode = sys.modules['{SERVER}.wire'].encode_frame\n" + LIST + "data = b''\n"
    "for name in tests:\n"
    "    data += encode({'begin': name})\n"
    "    data += encode({'test': name, 'outcome': 'passed', 'failure': None, 'seconds': 0.0})\n"
    "data += encode({'done': True, 'route': 'hot', 'violations': [], 'seconds': 0.0, "
    "'cpu_seconds': 0.0})\n"
    "for fd in range(3, 60):\n"
    "    try: os.write(fd, data)\n"
    "    except OSError: pass\n"
    "os._exit(0)\n"
)
EMULATE = (
    "import gc, os\n"
    + LIST
    + "(send,) = [o for o in gc.get_objects() if type(o).__name__ == 'Sender']\n"
    "for name in tests:\n"
    "    send({'begin': name})\n"
    "    send({'test': name, 'outcome': 'passed', 'failure': None, 'seconds': 0.0})\n"
    "send({'done': True, 'route': 'cold', 'violations': [], 'seconds': 0.0, 'cpu_seconds': 0.0})\n"
    "os._exit(0)\n"
)
PLAIN_EMULATE = (
    "import os\n" + LIST + "text = ''.join('PASSED ' + name + chr(10) for name in tests)\n"
    "os.write(1, text.encode())\nos._exit(0)\n"
)
# name -> (code, whether the run must also say that it was tampered with)
ATTACKS: dict[str, tuple[str, bool]] = {
    "settles every test as passed": (
        f"import sys\nm = sys.modules['{SERVER}.test_runner']\n"
        "m.OutcomeRecorder.finish = lambda self, reports: setattr(self, 'outcome', 'passed')\n"
        "m.OutcomeRecorder._note = lambda *a: None\n",
        True,
    ),
    "replaces a registered hook": (
        "import gc, pytest\n"
        "def fake(item, call):\n"
        "    return pytest.TestReport(nodeid=item.nodeid, location=item.location, keywords={},\n"
        "        outcome='passed', longrepr=None, when=call.when)\n"
        "gc.unfreeze()\n"
        "for o in gc.get_objects():\n"
        "    if type(o).__name__ == 'HookImpl' and 'Recorder.pytest_runtest_makereport' in str(o.function):\n"
        "        o.function = fake\n",
        True,
    ),
    "swallows exceptions of calls": (
        "import _pytest.runner as r\n"
        "old = r.CallInfo.from_call.__func__\n"
        "def quiet(cls, func, when, reraise=None):\n"
        "    return old(cls, (lambda: None) if when == 'call' else func, when, reraise)\n"
        "r.CallInfo.from_call = classmethod(quiet)\n",
        True,
    ),
    "replaces the tests' code": (
        "import sys, threading, time\n"
        "def work():\n"
        "    for _ in range(4000):\n"
        "        t = sys.modules.get('tests.test_counting')\n"
        "        for name, value in list(vars(t).items()) if t else []:\n"
        "            if name.startswith('test_'):\n"
        "                value.__code__ = (lambda: None).__code__\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=work, daemon=True).start()\n",
        False,
    ),
    "replaces the tests' code before the first one": (
        "import sys\n"
        "def work(event, arguments):\n"
        "    if event.startswith(('object.', 'sys.')): return\n"
        "    t = sys.modules.get('tests.test_counting')\n"
        "    for name, value in list(vars(t).items()) if hasattr(t, 'test_most_common_limit') else []:\n"
        "        if name.startswith('test_'):\n"
        "            value.__code__ = (lambda: None).__code__\n"
        "sys.addaudithook(work)\n",
        True,
    ),
    "patches unittest": (
        "import unittest as u\n"
        "for name in dir(u.TestCase):\n"
        "    if name.startswith('assert'): setattr(u.TestCase, name, lambda *a, **k: None)\n",
        True,
    ),
    "patches a built-in function": (
        "import builtins\nold = builtins.all\nbuiltins.all = lambda values: old(values) or True\n",
        True,
    ),
    "patches an operator": ("import operator\noperator.eq = lambda *a: True\n", True),
    "forges results on every descriptor": (FORGE, False),
    "leaves when all has passed": ("import os, threading\nthreading.Timer(0, os._exit, (0,)).start()\n", False),
    "forks and answers twice": ("import os\nos.fork()\n", False),
    "skips from inside": ("import pytest\npytest.skip('x', allow_module_level=True)\n", False),
}  # fmt: skip


def hide(code: str) -> str:
    """The code as a line that decodes and runs it."""
    shifted = "".join(chr(ord(letter) + 1) for letter in code)
    return f"exec(''.join(chr(ord(c) - 1) for c in {shifted!r}))"


def run(runner: asyncio.Runner, server, problem, first: str):
    required = (*problem.fail_to_pass, *problem.pass_to_pass)
    files = {PATH: module(first=first).encode()}
    return runner.run(server.run_again(files, required, 60.0))


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.sampled(6)
def test_hidden_attack_does_not_pass(runner, server, problem, name):
    code, is_noticed = ATTACKS[name]
    report = run(runner, server, problem, hide(code))
    assert not report.passed, report
    if is_noticed:
        assert report.tampering


def test_test_that_was_replaced_by_an_earlier_one_is_noticed(runner, server, problem):
    replace = (
        "import sys\n"
        "t = sys.modules['tests.test_counting']\n"
        "t.test_most_common.__code__ = t.test_most_common_limit.__code__ = (lambda: 0).__code__\n"
    )
    files = {PATH: module(HONEST_LONGEST, each="    " + hide(replace)).encode()}
    required = (*problem.fail_to_pass, *problem.pass_to_pass)
    report = runner.run(server.run_again(files, required, 60.0))
    assert report.outcomes[HIDDEN] is TestOutcome.PASSED
    assert f"replaced test {HIDDEN}" in report.tampering
    assert not report.passed


def test_test_that_is_replaced_while_it_is_called_is_noticed(runner, server):
    replace = (
        "import sys\n"
        "def work(frame, event, argument):\n"
        "    if event == 'call' and frame.f_code.co_name == 'runtest':\n"
        "        frame.f_locals['self'].obj.__code__ = (lambda: None).__code__\n"
        "sys.setprofile(work)\n"
    )
    files = {PATH: module(first=hide(replace)).encode()}
    report = runner.run(server.run_again(files, (HIDDEN,), 60.0))
    assert report.outcomes[HIDDEN] is TestOutcome.PASSED
    assert f"replaced test {HIDDEN}" in report.tampering
    assert not report.passed


def test_server_is_unharmed_after_all_attacks(runner, server, problem):
    required = (*problem.fail_to_pass, *problem.pass_to_pass)
    assert runner.run(server.run_again({}, required)).passed
    files = {PATH: module(HONEST_LONGEST, HONEST_COMMON).encode()}
    assert runner.run(server.run_again(files, required)).passed


def test_perfect_imitation_of_the_runner_fails_in_the_second_one(
    runner, server, problem, repository
):
    """Who finds the runner's own sender can say anything in its name. Two things stop that: the
    scan refuses the text, and the second runner has no such sender.
    """
    files = {PATH: module(first=hide(EMULATE)).encode()}
    assert find_forbidden(files, repository)
    assert run(runner, server, problem, hide(EMULATE)).outcomes[HIDDEN] is TestOutcome.PASSED
    second = runner.run(run_plainly(repository, files, problem.fail_to_pass, 120.0))
    assert not second.passed


@pytest.mark.parametrize("code", [PLAIN_EMULATE, "raise SystemExit(0)\n"])
def test_second_runner_is_not_fooled_by_its_own_format(runner, problem, repository, code):
    files = {PATH: module(first=hide(code)).encode()}
    second = runner.run(run_plainly(repository, files, problem.fail_to_pass, 120.0))
    assert not second.passed
    assert "blind canaries wrong" in second.tampering


def test_second_runner_passes_what_is_right(runner, problem, repository):
    files = {PATH: module(HONEST_LONGEST, HONEST_COMMON).encode()}
    required = (*problem.fail_to_pass, *problem.pass_to_pass)
    second = runner.run(run_plainly(repository, files, required, 120.0))
    assert second.passed, second
    assert second.route == "plain"
