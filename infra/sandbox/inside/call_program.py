"""Runs in a box as a program: notes the arguments that functions are called with while tests run,
calls functions with given arguments, or runs tests without their expectations, and notes the values.

A call with anything that has no form is left out. Standard library and pytest only. What this
writes is read as data by the host, which alone knows the results wanted.
"""

import builtins
import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from ostinato.infra.sandbox.inside.sources import read_options
from ostinato.infra.sandbox.inside.trials.drawn_calls import (
    describe_limited,
    draw_calls,
    make_drawn_calls,
    prepare,
)
from ostinato.infra.sandbox.inside.trials.trial_observer import Observer
from ostinato.infra.sandbox.inside.value_forms import (
    MAX_TEXT,
    NoForm,
    encode,
    expire,
)

CALL_ROOT = "/repo"
_OF_THIS_RUN = ("PYTHONHASHSEED", "LD_PRELOAD", "CLOCK_SHIFT_SECONDS")  # read by then
_QUIET = ("-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore")  # of pytest


class Notes:
    """Collects calls of wanted functions through the interpreter's profile hook."""

    def __init__(self, request: dict) -> None:
        self.calls: dict[str, list[str]] = {}
        self._root = request["root"] + "/"
        self._most = request["most"]
        self._wanted = {(path, line, name) for path, line, name in request["functions"]}

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """The profile hook."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root):
            return
        key = (code.co_filename[len(self._root) :], code.co_firstlineno, code.co_qualname)
        if key not in self._wanted:
            return
        name = f"{key[0]}:{key[2]}"
        known = self.calls.setdefault(name, [])
        if len(known) >= self._most:
            return
        with contextlib.suppress(NoForm, RecursionError, TypeError):
            text = json.dumps(_arguments(frame))
            if len(text) <= MAX_TEXT and text not in known:
                known.append(text)


def _arguments(frame: Any) -> dict:
    code, values = frame.f_code, frame.f_locals
    num_plain = code.co_argcount
    num_named = num_plain + code.co_kwonlyargcount
    names = list(code.co_varnames[:num_named])
    extra = code.co_varnames[num_named : num_named + bool(code.co_flags & 4)]
    rest_at = num_named + len(extra)
    keywords = code.co_varnames[rest_at : rest_at + bool(code.co_flags & 8)]
    if set(values) - {*names, *extra, *keywords}:
        raise NoForm  # a resumed generator, which has other locals
    plain = [encode(values[name]) for name in names[:num_plain]]
    plain += [encode(item) for name in extra for item in values[name]]
    named = {name: encode(values[name]) for name in names[num_plain:]}
    named |= {key: encode(item) for name in keywords for key, item in values[name].items()}
    return {"plain": plain, "named": named}


def record(request: dict, answer: str) -> None:
    """Run tests and write, function by function, the calls seen."""
    import pytest  # noqa: PLC0415 - not needed, and not there, when calls are made

    notes = Notes(request)
    place = [f"--rootdir={request['root']}", "-c", os.devnull, *read_options(request["root"])]
    sys.setprofile(notes)
    try:
        pytest.main([*_QUIET, *place, *request["tests"]])
    finally:
        sys.setprofile(None)
    with Path(answer).open("w") as file:
        for name, calls in sorted(notes.calls.items()):
            file.write(json.dumps({"function": name, "calls": calls}) + "\n")


def make_calls(request: dict, answer: str) -> None:
    """Calls functions and writes each result at once, so that a crash loses only later ones."""

    signal.signal(signal.SIGVTALRM, expire)
    with Path(answer).open("w") as file:
        for entry in request["calls"]:
            call = functools.partial(_call, {"on": None, **entry})
            result = describe_limited(call, request["call_seconds"])
            file.write(json.dumps(result) + "\n")
            file.flush()


def _call(entry: dict) -> Any:
    return prepare(entry)[0]()


def observe_tests(request: dict, answer: str) -> None:
    """Run tests whose expectations were taken out and write each value they look at."""
    import pytest  # noqa: PLC0415 - not needed, and not there, when calls are made

    signal.signal(signal.SIGVTALRM, expire)
    place = [f"--rootdir={request['root']}", "-c", os.devnull, "--import-mode=prepend"]
    # a literal that was changed may break the import of one copy
    place += read_options(request["root"])
    place += ["--continue-on-collection-errors", "--assert=plain", "--capture=sys"]
    with Path(answer).open("w") as file:
        observer = Observer(request, file)
        given = {"observe": observer.observe, "catch": observer.catch, "vary": observer.vary}
        builtins.__dict__.update({f"__{name}__": function for name, function in given.items()})
        files = [f"{request['root']}/{path}" for path in request["files"]]
        pytest.main([*_QUIET, *place, *files], plugins=[observer])


def main(mode: str, request_file: str, answer: str) -> None:
    """Runs a mode (record, call or observe) on a request and writes its answer. Ends the process then, which
    else waits for threads, pools and exit handlers of what it ran.
    """
    request = json.loads(Path(request_file).read_text())
    for name in _OF_THIS_RUN:
        os.environ.pop(name, None)
    if request["root"] != CALL_ROOT:  # before it is on the path
        shutil.rmtree(request["root"], ignore_errors=True)
        shutil.copytree(CALL_ROOT, request["root"], symlinks=True)
        os.chdir(request["root"])
    sys.path.insert(0, request["root"])
    modes = {
        "record": record,
        "call": make_calls,
        "observe": observe_tests,
        "draw": draw_calls,
        "try": make_drawn_calls,
    }
    if mode in ("observe", "try"):  # to a file, whose size tells what was written
        output = os.open(f"{answer}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
    code = 1
    try:
        modes[mode](request, answer)
        code = 0
    except BaseException:  # noqa: BLE001 - told, and the process ends all the same
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
