"""Side effects of a call are noticed: on the process, on files, on arguments, and inside coroutines and imports."""

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.infra.sandbox.inside.trials.effects import Effects
from ostinato.infra.sandbox.inside.trials.repeated_calls import KeptCalls
from ostinato.infra.sandbox.inside.trials.watched_calls import WatchedCalls

LASTING = {
    "open('left', 'a').close()": "changes files",
    "os.mkdir('made')": "changes files",
    "os.rmdir('given')": "changes files",
    "subprocess.run(['true'])": "changes processes",
    "socket.socket(socket.AF_UNIX).bind('here')": "changes connections",
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()": "changes threads",
    "os.open('/dev/null', os.O_RDONLY)": "changes open files",
    "os.umask(0)": "changes mask of modes",
    "decimal.getcontext().prec = 3": "changes decimal context",
    "locale.setlocale(locale.LC_ALL, 'C.UTF-8')": "changes locale",
    "warnings.simplefilter('ignore')": "changes filters of warnings",
    "warnings.simplefilter('ignore', Warning)": "changes filters of warnings",  # the same filter again
    "logging.disable(50)": "changes logging",
    "logging.getLogger().addHandler(logging.NullHandler())": "changes logging",
    "sys.excepthook = print": "changes streams and hooks",
    "sys.stdin = None": "changes streams and hooks",
    "builtins.sorted = list": "changes built-in names",
}
HONEST = (
    "open('given_file').read()",
    "os.listdir('.')",
    "open(os.devnull, 'w').close()",
    "os.fdopen(os.dup(2), 'w').close()",
    "__import__('pkg_beside')",  # its compiled code is written
    "decimal.Decimal(1) / 3",
    "threading.Thread(target=int).run()",
)
MEASURE = """
import builtins, decimal, json, locale, logging, os, socket, subprocess, sys, threading, time, warnings
from ostinato.infra.sandbox.inside.trials.effects import Effects

sys.path.insert(0, os.getcwd())
for line in json.loads(sys.argv[1]):
    effects = Effects((), {})
    exec(line)
    print(json.dumps([line, *effects.find()]))
"""


@pytest.fixture(scope="module", params=["none", "beside", "apart"])
def facts_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """Facts by line, in a process of its own, which the lines change. Imports write no compiled code, or they write it
    beside the source or into a folder apart.
    """
    folder = tmp_path_factory.mktemp("effects")
    apart = str(folder / "compiled") if request.param == "apart" else ""
    compiled = {
        "PYTHONDONTWRITEBYTECODE": "1" if request.param == "none" else "",
        "PYTHONPYCACHEPREFIX": apart,
    }
    (folder / "given").mkdir()
    (folder / "given_file").write_text("text")
    (folder / "pkg_beside.py").write_text("LINE = 1\n")
    lines = json.dumps([*HONEST, *LASTING])
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, lines],
        cwd=folder, capture_output=True, text=True, check=True, env={**os.environ, **compiled},
    )  # fmt: skip
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    return {line: facts for line, *facts in rows}


@pytest.mark.parametrize("line", LASTING)
def test_what_a_call_leaves_behind_is_a_fact(facts_of: dict[str, list[str]], line: str) -> None:
    assert LASTING[line] in facts_of[line]


@pytest.mark.parametrize("line", HONEST)
def test_a_call_that_leaves_nothing_has_no_fact(facts_of: dict[str, list[str]], line: str) -> None:
    assert facts_of[line] == []


class Order:
    def __init__(self) -> None:
        self.lines, self.state, self._seen = [1, 2], "new", 0


def _set_state(order: Order) -> None:
    order.state = "sent"


def _note_seen(order: Order) -> None:
    order._seen, order.further = 1, 2  # a cache


@pytest.mark.parametrize(
    ("change", "argument", "is_seen"),
    [
        (lambda it: it[0].append(3), ([1, 2], 0), True),
        (lambda it: it.append(3), deque([1]), True),
        (_set_state, Order(), True),
        (lambda it: it.lines.append(3), Order(), True),
        (lambda it: it.lines.copy().append(3), Order(), False),
        (_note_seen, Order(), False),
        (len, ([1, 2], 0), False),
    ],
)
def test_changed_parts_of_arguments_are_facts(change: Any, argument: Any, is_seen: bool) -> None:
    effects = Effects((argument,), {})
    change(argument)
    assert effects.find() == ({"changes argument 0"} if is_seen else set())


def test_a_method_may_keep_a_cache_on_its_object() -> None:
    order, other = Order(), Order()
    effects = Effects((order, other), {}, is_method=True)
    order.state = "sent"
    assert effects.find() == set()
    other.state = "sent"
    assert effects.find() == {"changes argument 1"}


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def _watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, symbol: str = "f"
) -> tuple[Any, WatchedCalls]:
    """The module of a source text, imported with its function watched from the import on."""
    name = f"watched_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    watched = WatchedCalls(str(tmp_path / f"{name}.py"), symbol, KeptCalls("", ()))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    watched.install_at_import([])
    return __import__(name), watched


@pytest.mark.parametrize(
    "source",
    [
        "import os\nasync def f(n):\n    os.environ['EFFECT'] = str(n)\n    return n\n",
        "import asyncio, os\nasync def f(n):\n    await asyncio.sleep(0)\n    os.environ['EFFECT'] = str(n)\n    return n\n",
    ],
)
def test_effects_and_time_inside_a_coroutine_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("EFFECT", "")
    slow = source.replace("    return n", "    import time\n    time.sleep(0.05)\n    return n")
    module, watched = _watch(tmp_path, monkeypatch, slow)
    assert asyncio.run(module.f(7)) == 7
    assert watched.facts == {
        "changes environment",
        "returns coroutine",
        "returns item builtins:int",
    }
    assert watched.median_seconds > 0.04


CANCELLED = """import asyncio
STOPS = []


async def f(n):
    try:
        await asyncio.sleep(n)
    finally:
        STOPS.append(n)
    raise KeyError
"""


def test_a_coroutine_that_raises_or_is_cancelled_behaves_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CANCELLED
    module, watched = _watch(tmp_path, monkeypatch, source)

    async def cancel() -> None:
        task = asyncio.create_task(module.f(60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    with pytest.raises(KeyError):
        asyncio.run(module.f(0))
    assert module.STOPS == [60, 0]
    assert "raises KeyError without a text" in watched.facts


def test_an_iterator_that_raises_without_a_text_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def f(known):\n    yield 1\n    raise KeyError(*known)\n"
    for known, is_noted in (([], True), (["name"], False)):
        module, watched = _watch(tmp_path, monkeypatch, source)
        with pytest.raises(KeyError):
            list(module.f(known))
        assert ("raises KeyError without a text" in watched.facts) is is_noted


DESCRIBED = """
import functools, sys

class OwnProperty(property):
    pass

class Lazy:
    def __init__(self, function):
        self.function = function
    def __get__(self, found, owner=None):
        return self if found is None else self.function(found)

class Slotted:
    __slots__ = ("function",)
    def __init__(self, function):
        self.function = function
    def __get__(self, found, owner=None):
        return self if found is None else self.function(found)

class Box:
    @KIND
    def f(self):
        return print("here")
"""


@pytest.mark.parametrize(
    "kind", ["property", "functools.cached_property", "OwnProperty", "Lazy", "Slotted"]
)
def test_a_function_behind_a_descriptor_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    module, watched = _watch(tmp_path, monkeypatch, DESCRIBED.replace("KIND", kind), "Box.f")
    assert module.Box().f is None
    assert "prints" in watched.facts
    assert watched.median_seconds > 0


def test_what_the_collector_closes_during_a_call_is_no_effect_of_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    held = [(tmp_path / "file").open()]
    effects = Effects((), {})
    held.clear()
    assert effects.find() == set()


def test_effects_of_the_import_are_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFECT", "")
    _, watched = _watch(
        tmp_path, monkeypatch, "import os\nos.environ['EFFECT'] = 'x'\ndef f(): pass\n"
    )
    assert watched.facts == {"changes environment"}


@pytest.mark.parametrize("result", ["(it, 1)", "[[it]]", "{1: {2: it}}", "iter([it])"])
def test_kinds_of_what_a_result_holds_are_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str
) -> None:
    """An object that equals everything may hide in a container."""
    module, watched = _watch(tmp_path, monkeypatch, f"def f(it):\n    return {result}\n")
    list(module.f("text"))
    known = set(watched.facts)
    assert "returns item builtins:str" in known
    list(module.f("other"))
    assert watched.facts == known
    list(module.f(AlwaysEqual()))
    assert len(watched.facts - known) == 1


def list_as_deep_as_can_be_copied(spare: int) -> list[object]:
    """A nested list of which `spare` more levels could be copied from here."""
    levels: list[list[object]] = [[]]
    while True:
        levels.append([levels[-1]])
        try:
            copy.deepcopy(levels[-1])
        except RecursionError:
            return levels[-spare]


def below_frames(frames: int, call: Callable[[], dict | None]) -> dict | None:
    """The result of a call that is made below this many further frames."""
    return call() if frames == 0 else below_frames(frames - 1, call)


@pytest.mark.parametrize("frames", [0, 60, 120])
def test_a_later_run_copies_what_the_first_one_did_also_below_more_frames(frames: int) -> None:
    """A change may be called below other frames than the original was: a decorator's, a helper's."""
    nested = list_as_deep_as_can_be_copied(spare=20)
    first = KeptCalls(None, ())
    first.offer("test 0", len, (nested,), {})
    wanted = first.repeat(40)
    assert wanted is not None
    assert wanted["key"].startswith("copied")
    later = KeptCalls(wanted["key"], first.copied)

    def again() -> dict | None:
        later.offer("test 0", len, (nested,), {})
        return later.repeat(40)

    seen = below_frames(frames, again)
    assert seen is not None
    assert seen["is_copied"]
