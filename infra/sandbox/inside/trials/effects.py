"""Side effects of a call: changed arguments, changed state of the process, changed files, and output. Runs in boxes,
standard library only.
"""

import array
import builtins
import contextlib
import decimal
import functools
import locale
import logging
import os
import random
import sys
import threading
import types
import warnings
from collections import Counter, deque
from types import FunctionType, ModuleType
from typing import Any

from ostinato.infra.sandbox.inside.value_forms import NotEncodable, describe_text, encode

_MUTABLE = (list, dict, set, bytearray, tuple, deque, array.array)
_WITHOUT_STATE = (type, ModuleType, FunctionType)
# audit events of the interpreter, with what they change
_ACTS = {
    "open": "files", "os.remove": "files", "os.rename": "files", "os.mkdir": "files", "os.rmdir": "files",
    "os.link": "files", "os.symlink": "files", "os.truncate": "files", "os.chmod": "files",
    "subprocess.Popen": "processes", "os.system": "processes", "os.posix_spawn": "processes",
    "os.fork": "processes", "os.exec": "processes",
    "socket.bind": "connections", "socket.connect": "connections", "socket.sendto": "connections",
}  # fmt: skip
_MARK = ("default", None, type("EffectsMark", (Warning,), {}), None, 0)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_HELD = ("open files", "threads")  # which a call that waits may hold


class Effects:
    """Side effects of a call: changed arguments, changed state of the process, changed files, and output.

    `is_method`: the first argument is a method's object, which may keep a cache in its attributes.
    """

    def __init__(
        self, plain: tuple[Any, ...], named: dict[str, Any], *, is_method: bool = False
    ) -> None:
        _start_counting()
        self._arguments = [*enumerate(plain), *named.items()]
        if is_method and plain and not isinstance(plain[0], _MUTABLE):
            del self._arguments[0]
        self._before = self._forms()
        filters: Any = warnings.filters
        if _MARK not in filters[:1]:
            # a filter that is the first one already would leave the list as it is
            filters[:] = [_MARK, *(each for each in filters if each != _MARK)]
        self._state = _process_state()
        self._written = _written()

    def find(self, *, is_ended: bool = True) -> set[str]:
        """The side effects so far, as facts. `is_ended`: whether the call still holds nothing open for itself."""
        found = {
            f"changes argument {name}"
            for (name, _), before, after in zip(
                self._arguments, self._before, self._forms(), strict=True
            )
            if _has_changed(before, after)
        }
        state = _process_state()
        for name, value in self._state.items():
            # files that the collector closes meanwhile, and threads that end, are not the call's doing
            is_changed = state[name] > value and is_ended if name in _HELD else state[name] != value
            found |= {f"changes {name}"} if is_changed else set()
        return found | ({"prints"} if _written() != self._written else set())

    def _forms(self) -> list[Any]:
        return [_form_of_argument(value) for _, value in self._arguments]


def _has_changed(before: Any, after: Any) -> bool:
    """Whether an argument changed. New attributes of an object do not count, since it may keep a cache in them."""
    if type(before) is types.SimpleNamespace:
        old, new = vars(before), vars(after)
        return any(name not in new or new[name] != form for name, form in old.items())
    return before != after


def _form_of_argument(value: Any) -> Any:
    """The form of a container, or those of an object's public attributes that are plain data. Calls no hook of an
    object.
    """
    if isinstance(value, _MUTABLE):
        return describe_text(value)
    found = types.SimpleNamespace()
    with contextlib.suppress(AttributeError, TypeError):
        names = object.__getattribute__(value, "__dict__")
        for name in () if isinstance(value, _WITHOUT_STATE) else list(names):
            if type(name) is str and name[:1] != "_":
                with contextlib.suppress(NotEncodable, RecursionError):
                    setattr(found, name, encode(names[name]))
    return found


_num_acts: Counter[str] = Counter()


@functools.cache
def _start_counting() -> None:
    """Counts, from now on, what this process does to files, processes and connections."""
    sys.addaudithook(_count_act)


def _count_act(event: str, arguments: tuple[Any, ...]) -> None:
    kind = _ACTS.get(event)
    if kind == "files" and (arguments[0] == os.devnull or _is_compiled_code(str(arguments[0]))):
        return
    if event == "open":
        # a descriptor was counted when it was opened
        is_descriptor = isinstance(arguments[0], int)
        if is_descriptor or not int(arguments[2] or 0) & _WRITING:
            return
    if kind is not None:
        _num_acts[kind] += 1


def _is_compiled_code(path: str) -> bool:
    """Whether imports write the file, which nobody misses."""
    prefix = sys.pycache_prefix
    return "__pycache__" in path or (prefix is not None and path.startswith(prefix))


def _process_state() -> dict[str, Any]:
    context, log, mask = decimal.getcontext(), logging.getLogger(), os.umask(0o77)
    os.umask(mask)
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "random state": random.getstate(),
        "path of modules": list(sys.path),
        "limit of recursion": sys.getrecursionlimit(),
        "files": _num_acts["files"],
        "processes": _num_acts["processes"],
        "connections": _num_acts["connections"],
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mask of modes": mask,
        "decimal context": (context.prec, context.rounding),
        "locale": locale.setlocale(locale.LC_ALL),
        "filters of warnings": list(warnings.filters),
        "logging": (log.manager.disable, log.level, log.disabled, len(log.handlers)),
        "streams and hooks": [
            id(it) for it in (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, sys.displayhook)
        ],
        "built-in names": {name: id(it) for name, it in vars(builtins).items()},
    }


def _written() -> list[int]:
    """Sizes of the output and error files, and positions of the Python streams."""
    sizes = [os.fstat(number).st_size for number in (1, 2)]
    for stream in (sys.stdout, sys.stderr):
        try:
            sizes.append(stream.tell())
        except (OSError, ValueError, AttributeError):
            sizes.append(0)
    return sizes
