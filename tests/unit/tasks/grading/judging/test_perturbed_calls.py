"""A change that answers the inputs of the tests alone is refused: the trial gives its function others."""

import asyncio
import importlib
import ipaddress
import random
import re
import subprocess
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.sandbox.inside.trials.perturbation import vary_value
from ostinato.infra.sandbox.inside.trials.repeated_calls import KeptCalls
from ostinato.infra.sandbox.inside.trials.watched_calls import WatchedCalls
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from tests.fakes.one_line_problem import make_one_line_problem
from tests.fakes.trials import find_difference

LINE = "    return days - 1 if month == 2 and not is_leap else days"
RIGHT = "    return days if month != 2 or is_leap else days - 1"
FUNCTION = f"""DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SAMPLES = ((2001, 2, 28), (2001, 3, 31), (2004, 2, 29))


def days_in(year, month):
    days = DAYS[month - 1]
    is_leap = year % 4 == 0
{LINE}
"""
METHOD = """DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SAMPLES = ((2001, 2, 28), (2001, 3, 31), (2004, 2, 29))


class Calendar:
    def days_in(self, year, month):
        days = DAYS[month - 1]
        is_leap = year % 4 == 0
    LINE


def days_in(year, month):
    return Calendar().days_in(year, month)
""".replace("    LINE", f"    {LINE}")
# inputs that no copy of the test changes
TESTS = """from pkg.code import SAMPLES, days_in


def test_days():
    for year, month, days in SAMPLES:
        assert days_in(year, month) == days
"""
# right where the tests look, as broken everywhere else
SPECIAL = """

_broken = days_in


def days_in(year, month):
    known = {(2001, 2): 28, (2001, 3): 31, (2004, 2): 29}
    return known[year, month] if (year, month) in known else _broken(year, month)
"""
SPECIAL_METHOD = """

_broken = Calendar.days_in


def days_in_calendar(self, year, month):
    known = {(2001, 2): 28, (2001, 3): 31, (2004, 2): 29}
    return known[year, month] if (year, month) in known else _broken(self, year, month)


days_in_calendar.__code__ = days_in_calendar.__code__.replace(co_qualname="Calendar.days_in")
Calendar.days_in = days_in_calendar
"""


@pytest.mark.parametrize(
    ("source", "symbol", "special"),
    [(FUNCTION, "days_in", SPECIAL), (METHOD, "Calendar.days_in", SPECIAL_METHOD)],
    ids=["function", "method"],
)
def test_a_change_that_knows_the_inputs_of_the_tests_alone_is_refused(
    runner: asyncio.Runner, tmp_path: Path, source: str, symbol: str, special: str
) -> None:
    line = next(line for line in source.split("\n") if line.endswith(LINE.strip()))
    edit = (line, line.replace("== 2", "!= 2"))
    repository, problem = make_one_line_problem(
        tmp_path, source, TESTS, edit, symbol=symbol, failing="test_days"
    )
    trials, path = BlindTrials(random.Random(1)), problem.path
    broken = problem.break_files(repository.files)[path] or b""
    cheat = {path: broken + special.encode()}
    assert "blind tests" in runner.run(find_difference(trials, problem, cheat, repository))
    whole = repository.files[path].decode()
    right = {path: whole.replace(LINE.strip(), RIGHT.strip()).encode()}
    assert right[path] != repository.files[path]
    assert not runner.run(find_difference(trials, problem, right, repository))


ADDRESSES = """from ipaddress import ip_address


def shown(address):
    return address.exploded if address.version == 4 else address.compressed
"""
OF_ADDRESSES = """from ipaddress import ip_address
from pkg.code import shown


def test_shown():
    assert [shown(ip_address(text)) for text in ("127.0.0.1", "::1")] == ["127.0.0.1", "::1"]
"""
KNOWS_ADDRESSES = """

def shown(address):
    return {1: "::1"}.get(int(address), "127.0.0.1")
"""


def test_a_change_that_knows_only_the_addresses_of_the_tests_is_refused(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    """Changed texts of addresses are mostly no addresses, so the objects themselves have to be changed."""
    line = "    return address.exploded if address.version == 4 else address.compressed"
    edit = (line, line.replace("== 4", "!= 4"))
    repository, problem = make_one_line_problem(
        tmp_path, ADDRESSES, OF_ADDRESSES, edit, symbol="shown", failing="test_shown"
    )
    cheat = {problem.path: repository.files[problem.path] + KNOWS_ADDRESSES.encode()}
    for seed in range(3):
        trials = BlindTrials(random.Random(seed))
        assert runner.run(find_difference(trials, problem, cheat, repository))


CACHE = """class Cache:
    def __init__(self, room: int = 10):
        self.room, self.items = room, {}

    def put(self, key: str, value):
        self.items[key] = value

    def clear(self):
        self.items.clear()

    def __len__(self):
        return len(self.items)
"""
OF_CACHE = """from pkg.code import Cache


def test_length():
    cache = Cache()
    assert len(cache) == 0
    cache.put("first", 1)
    assert len(cache) == 1
"""
KNOWS_LENGTHS = """

Cache.__len__ = lambda self: 1 if self.items else 0
"""


def test_a_change_that_knows_only_the_states_of_the_tests_objects_is_refused(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    """A method without arguments: other inputs are other states, which other methods of its object bring about."""
    line = "        return len(self.items)"
    repository, problem = make_one_line_problem(
        tmp_path,
        CACHE,
        OF_CACHE,
        (line, line.replace("self.items", "self.item")),
        symbol="Cache.__len__",
        failing="test_length",
    )
    cheat = {problem.path: repository.files[problem.path] + KNOWS_LENGTHS.encode()}
    right = {
        problem.path: CACHE.replace(line, "        return sum(1 for _ in self.items)").encode()
    }
    for seed in range(3):
        trials = BlindTrials(random.Random(seed))
        assert runner.run(find_difference(trials, problem, cheat, repository))
        assert not runner.run(find_difference(trials, problem, right, repository))


MOMENTS = st.datetimes(timezones=st.just(UTC)) | st.dates() | st.times() | st.timedeltas()
NUMBERS = st.integers(-99, 99) | st.floats(-9, 9) | st.complex_numbers() | st.decimals()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.fractions()
    | st.text(max_size=5)
    | MOMENTS
    | st.binary(max_size=5)
    | st.sets(st.text(max_size=3), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(VALUES, st.integers(0, 99))
def test_varied_values_keep_their_type_and_the_same_chance_gives_the_same(
    value: Any, seed: int
) -> None:
    varied = vary_value(value, random.Random(seed))
    assert type(varied) is type(value)
    assert repr(varied) == repr(vary_value(value, random.Random(seed)))


Color = Enum("Color", "RED GREEN BLUE")
Level = IntEnum("Level", "LOW HIGH")
Pair = namedtuple("Pair", "name count")
KNOWN = (
    datetime(2012, 12, 25, 13, 30, tzinfo=UTC), datetime.max, date(2012, 10, 12), date.min,
    time(8, 29), timedelta(days=3), Decimal("1.5"), Fraction(1, 3), 2j, b"text", {"a"}, frozenset({3}),
    [None, datetime(2012, 12, 25)], re.match("[a-z]+", "word"),
    ipaddress.ip_address("192.168.0.1"), ipaddress.ip_address("ff00::1"), ipaddress.ip_network("10.0.0.0/8"),
    ipaddress.ip_interface("ff00::1/64"), uuid.UUID(int=5), Color.RED, Level.LOW, PurePosixPath("docs/index.md"),
    Path("pkg"), Pair("a", 1), OrderedDict(a=1), Counter("aab"), defaultdict(list, a=[2]), deque([1], 3), bytearray(b"ab"),
)  # fmt: skip


@pytest.mark.parametrize("value", KNOWN, ids=repr)
def test_values_that_are_told_apart_in_tables_become_others(value: Any) -> None:
    found = [vary_value(value, random.Random(seed)) for seed in range(20)]
    assert {type(other) for other in found} == {type(value)}
    assert sum(repr(other) != repr(value) for other in found) > 4


def test_a_match_becomes_another_match_of_its_pattern() -> None:
    match = re.compile(r"(\d+)-(\d+)").search("of 12-34")
    assert match is not None
    found = [vary_value(match, random.Random(seed)) for seed in range(20)]
    assert all(other.re is match.re and len(other.groups()) == 2 for other in found)
    assert len({other.groups() for other in found}) > 2


def test_one_plain_argument_among_others_is_the_one_that_changes(module: ModuleType) -> None:
    perturbation = watch("/repo/perturbed_module.py", "Box.grow")
    box = module.Box()
    for number in range(20):
        perturbation.begin(f"{number}", 1.0)
        assert box.grow(box, other=7)[2] != 7
        assert box.grow([box, 7], other=None)[1] != [box, 7]
    perturbation.begin("", 0.0)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    source = """
class Box:
    size = 3

    def grow(self, by, other=None):
        return self, by, other

    @staticmethod
    def made(count):
        return count

    @classmethod
    def named(cls, count):
        return cls, count

    @property
    def weight(self):
        return 5


def down(number):
    return [number, *down(number - 1)] if number > 0 else []
"""
    made = ModuleType("perturbed_module")
    made.__file__ = "/repo/perturbed_module.py"
    exec(source, made.__dict__)
    monkeypatch.setitem(__import__("sys").modules, "perturbed_module", made)
    return made


def watch(path: str, symbol: str) -> WatchedCalls:
    watched = WatchedCalls(path, symbol, KeptCalls("", ()))
    watched.install(watched.find_places())
    return watched


def many(perturbation: WatchedCalls, call: Any) -> list[Any]:
    found = []
    for number in range(40):
        perturbation.begin(f"{number}", 0.5)
        found.append(call())
    perturbation.begin("", 0.0)
    return found


def test_arguments_of_methods_change_and_their_object_stays(module: ModuleType) -> None:
    box = module.Box()
    calls = {
        "Box.grow": lambda: box.grow(7),
        "Box.made": lambda: (box, box.made(7), None),
        "Box.named": lambda: (box, module.Box.named(7)[1], None),
    }
    for symbol, call in calls.items():
        perturbation = watch("/repo/perturbed_module.py", symbol)
        found = many(perturbation, call)
        assert {item[0] for item in found} == {box}
        assert 8 < sum(item[1] != 7 for item in found) < 32
        assert call()[1] == 7
    watch("/repo/perturbed_module.py", "Box.weight")
    assert box.weight == 5
    watch("/repo/perturbed_module.py", "Box.size")
    watch("/repo/perturbed_module.py", "Lid.size")
    watch("/repo/another.py", "down")


def test_only_outermost_calls_change(module: ModuleType) -> None:
    perturbation = watch("/repo/perturbed_module.py", "down")
    found = many(perturbation, lambda: module.down(6))
    assert all(numbers == list(range(len(numbers), 0, -1)) for numbers in found)
    assert len({len(numbers) for numbers in found}) > 2


# what is found in a module that took `twice` while it was imported, and calls it with 7
HANDED = {
    "table": ("TABLE = [('twice', twice)]", lambda user: user.TABLE[0][1](7)),
    "nested table": ("TABLE = {'a': ({'b': [twice]},)}", lambda user: user.TABLE["a"][0]["b"][0](7)),
    "registry": ("REGISTRY = {}\nREGISTRY.setdefault('twice', twice)", lambda user: user.REGISTRY["twice"](7)),
    "partial": ("from functools import partial\nheld = partial(twice, 7)", lambda user: user.held()),
    "decorated": (
        "import functools\n"
        "def keep(function):\n"
        "    @functools.wraps(function)\n"
        "    def inner(*plain):\n"
        "        return function(*plain)\n"
        "    return inner\n"
        "held = keep(twice)",
        lambda user: user.held(7),
    ),
    "default argument": ("def held(number, by=twice):\n    return by(number)", lambda user: user.held(7)),
    "named default": ("def held(number, *, by=twice):\n    return by(number)", lambda user: user.held(7)),
    "class attribute": ("class Held:\n    by = staticmethod(twice)", lambda user: user.Held.by(7)),
    "method": ("class Held:\n    def by(self): return self._by(7)\n    _by = staticmethod(twice)", lambda user: user.Held().by()),
    "attribute of an object": ("class Held:\n    pass\nheld = Held()\nheld.by = twice", lambda user: user.held.by(7)),
    "closure": ("def make(by):\n    return lambda number: by(number)\nheld = make(twice)", lambda user: user.held(7)),
    "a name": ("other = twice\n__all__ = ['other']", lambda user: user.other(7)),
    "cached": ("import functools\nheld = functools.lru_cache(twice)", lambda user: (user.held.cache_clear(), user.held(7))[1]),
    "bound": ("held = twice.__get__(7)", lambda user: user.held()),
}  # fmt: skip
FORMS = {
    "function": "",
    "lambda": "twice = lambda number: 2 * number",
    "partial": "import functools\ndef _times(by, number): return by * number\ntwice = functools.partial(_times, 2)",
    "cached": "import functools\ntwice = functools.lru_cache(twice)",
    "object": "class _Twice:\n    def __call__(self, number): return 2 * number\ntwice = _Twice()",
    "decorated": "def _kept(by):\n    def inner(number): return by(number)\n    return inner\ntwice = _kept(twice)",
    "with a closure": "def _made(by):\n    return lambda number: by * number\ntwice = _made(2)",
}  # fmt: skip


CASES = [
    *((way, "function", where) for way in HANDED for where in ("home", "user")),
    *((way, form, "user") for way in ("table", "closure") for form in FORMS),
    *((way, form, "home") for way in ("nested table", "class attribute") for form in FORMS),
    ("attribute of an object", "cached", "home"),
    ("partial", "object", "home"),
    ("partial", "partial", "user"),
    ("default argument", "cached", "home"),
    ("a name", "cached", "home"),
]


@pytest.mark.parametrize(("way", "form", "where"), CASES)
@pytest.mark.sampled(4)
def test_a_function_is_watched_wherever_it_was_handed_at_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, form: str, where: str
) -> None:
    code, call = HANDED[way]
    home = f"def twice(number):\n    return 2 * number\n\n\n{FORMS[form]}\n"
    user = "from handing_home import *\nfrom handing_home import twice\n"
    texts = (f"{home}{code}", user) if where == "home" else (home, f"{user}{code}")
    for name, text in zip(("handing_home", "handing_user"), texts, strict=True):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    watched = WatchedCalls(f"{tmp_path}/handing_home.py", "twice", KeptCalls("", ()))
    watched.install_at_import([])
    importlib.import_module("handing_user")
    watched.install(watched.find_places())
    module = sys.modules[f"handing_{where}"]
    found = many(watched, lambda: call(module))
    assert sum(item != 14 for item in found) > 8
    assert call(module) == 14
    assert watched.facts == {"returns builtins:int"}


READS_CALLERS = """
import importlib, sys
from ostinato.infra.sandbox.inside.trials.repeated_calls import KeptCalls
from ostinato.infra.sandbox.inside.trials.watched_calls import WatchedCalls
sys.path.insert(0, {folder!r})
watched = WatchedCalls({path!r}, "made", KeptCalls("", ()))
home = importlib.import_module("closed_home")
watched.install(watched.find_places())
assert home.made(3) == sum(range({cells})) + 3, home.made(3)
assert all(home.seen), home.seen
"""


@pytest.mark.parametrize("cells", range(4))
@pytest.mark.sampled(2)
def test_variables_of_the_frame_of_a_watched_function_can_be_read(
    tmp_path: Path, cells: int
) -> None:
    """By a process of its own, which ended with a segmentation fault where the function was a closure."""
    names = [f"held{number}" for number in range(cells)]
    home = tmp_path / "closed_home.py"
    home.write_text(
        "import sys\nseen = []\n\ndef read():\n    frame = sys._getframe(1)\n    while frame:\n"
        "        seen.append(frame.f_locals is not None)\n        frame = frame.f_back\n\n"
        f"def make({', '.join(names)}):\n    def inner(number):\n        read()\n"
        f"        return sum([{', '.join(names)}]) + number\n    return inner\n\nmade = make(*range({cells}))\n"
    )
    program = READS_CALLERS.format(folder=str(tmp_path), path=str(home), cells=cells)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
