"""A program for boxes. It records the arguments of functions while tests run, calls functions with given or drawn
arguments, or runs tests without their expectations, and writes the results.

Calls with arguments that cannot be encoded are left out. Standard library and pytest only. The host reads the output
as data, and only the host knows the expected results.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ostinato.infra.sandbox.inside.sources import argument_of, read_options
from ostinato.infra.sandbox.inside.trials.drawn_calls import draw_calls, make_drawn_calls, prepare
from ostinato.infra.sandbox.inside.trials.repeated_calls import describe_limited
from ostinato.infra.sandbox.inside.trials.trial_observer import Observer
from ostinato.infra.sandbox.inside.value_forms import MAX_TEXT, NotEncodable, encode, expire

CALL_ROOT = "/repo"
_RUN_VARIABLES = ("PYTHONHASHSEED", "LD_PRELOAD", "CLOCK_SHIFT_SECONDS")  # have taken effect
_MAX_ITEMS = 200  # taken from an iterator
_QUIET = ("-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore")


class CallRecorder:
    """Collects calls of the requested functions through the interpreter's profile hook."""

    def __init__(self, request: dict) -> None:
        self.calls: dict[str, list[str]] = {}
        self._root = request["root"] + "/"
        self._max_calls = request["most"]
        self._wanted = {(path, line, name) for path, line, name in request["functions"]}

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """Records one call, as the profile hook."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root):
            return
        key = (code.co_filename[len(self._root) :], code.co_firstlineno, code.co_qualname)
        if key not in self._wanted:
            return
        name = f"{key[0]}:{key[2]}"
        known = self.calls.setdefault(name, [])
        if len(known) >= self._max_calls:
            return
        with contextlib.suppress(NotEncodable, RecursionError, TypeError):
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
        raise NotEncodable  # a resumed generator, which has other locals
    plain = [encode(values[name]) for name in names[:num_plain]]
    plain += [encode(item) for name in extra for item in values[name]]
    named = {name: encode(values[name]) for name in names[num_plain:]}
    named |= {key: encode(item) for name in keywords for key, item in values[name].items()}
    return {"plain": plain, "named": named}


def record(request: dict, answer: str) -> None:
    """Runs tests and writes the recorded calls of each function."""
    import pytest  # noqa: PLC0415 - modes that make calls run without pytest

    recorder = CallRecorder(request)
    place = [f"--rootdir={request['root']}", "-c", os.devnull, *read_options(request["root"])]
    sys.setprofile(recorder)
    try:
        pytest.main([*_QUIET, *place, *map(argument_of, request["tests"])])
    finally:
        sys.setprofile(None)
    with Path(answer).open("w") as file:
        for name, calls in sorted(recorder.calls.items()):
            file.write(json.dumps({"function": name, "calls": calls}) + "\n")


def _call(entry: dict) -> Any:
    return prepare(entry)[0]()


def make_calls(request: dict, answer: str, call: Callable[[dict], Any] = _call) -> None:
    """Calls functions and writes each result at once, so that a crash loses only later results."""
    signal.signal(signal.SIGVTALRM, expire)
    with Path(answer).open("w") as file:
        for entry in request["calls"]:
            made = functools.partial(call, {"on": None, **entry})
            result = describe_limited(made, request["call_seconds"])
            file.write(json.dumps(result) + "\n")
            file.flush()


def _raise_of(entry: dict) -> list | None:
    """Type and text of the exception that a call raises, with the file and line that raise it. None: it returns."""
    try:
        value = _call(entry)
        if isinstance(value, Iterator):
            for _ in zip(value, range(_MAX_ITEMS), strict=False):
                pass
    except Exception as error:  # noqa: BLE001 - code under test may raise anything
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        place = frame.f_code.co_filename.removeprefix(f"{CALL_ROOT}/")
        return [type(error).__name__, str(error)[:MAX_TEXT], place, line]
    return None


def observe_tests(request: dict, answer: str) -> None:
    """Runs tests whose expectations were removed, and writes each value that they observe."""
    import pytest  # noqa: PLC0415 - modes that make calls run without pytest

    signal.signal(signal.SIGVTALRM, expire)
    place = [f"--rootdir={request['root']}", "-c", os.devnull, "--import-mode=prepend"]
    place += read_options(request["root"])
    # A changed literal may break the import of one copy of a test file.
    place += ["--continue-on-collection-errors", "--assert=plain", "--capture=sys"]
    with Path(answer).open("w") as file:
        observer = Observer(request, file)
        functions = {"observe": observer.observe, "catch": observer.catch, "vary": observer.vary}
        builtins.__dict__.update({f"__{name}__": function for name, function in functions.items()})
        files = [argument_of(f"{request['root']}/{path}") for path in request["files"]]
        pytest.main([*_QUIET, *place, *files], plugins=[observer])


def main(mode: str, request_file: str, answer: str) -> None:
    """Runs a mode on a request, writes its answer and ends the process at once, without waiting for threads, pools
    and exit handlers of the code that ran.
    """
    request = json.loads(Path(request_file).read_text())
    for name in _RUN_VARIABLES:
        os.environ.pop(name, None)
    if request["root"] != CALL_ROOT:  # must happen before imports from it
        shutil.rmtree(request["root"], ignore_errors=True)
        shutil.copytree(CALL_ROOT, request["root"], symlinks=True)
        os.chdir(request["root"])
    sys.path.insert(0, request["root"])
    modes = {
        "record": record,
        "call": make_calls,
        "raise": functools.partial(make_calls, call=_raise_of),
        "observe": observe_tests,
        "draw": draw_calls,
        "try": make_drawn_calls,
    }
    if mode in ("observe", "try"):  # into a file, whose size shows how much was printed
        output = os.open(f"{answer}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
    code = 1
    try:
        modes[mode](request, answer)
        code = 0
    except BaseException:  # noqa: BLE001 - it is printed, and the process ends anyway
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
