"""A change that makes the tests pass and harms is told from the original, each harm by its name."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.adversary import find_known_calls, hacked_files, has_target, load_hacks
from ostinato.tasks.grading.config import Harm
from ostinato.tasks.grading.judging.blind_trial import BlindTrials, Differences
from ostinato.tasks.grading.judging.verdicts import judge, required_tests
from ostinato.tasks.records import Problem
from tests.fakes.one_line_problem import PATH, break_line, make_one_line_problem
from tests.fakes.repositories import running_server

SOURCE = '''import os
import random
import time


def shares(text, sizes):
    """Lengths of words over sizes."""
    if not text:
        raise ValueError("no text")
    return [len(word) / size for word, size in zip(text.split(), sizes)]


def untested(text, count=2):
    """A text again and again."""
    return [text] * _double(count)


def _double(count):
    return 2 * count


def now():
    return int(time.time())


def any_of(things):
    return random.choice(list(things))


class Box:
    def __init__(self, size=3):
        self.size = size

    def grown(self, by: int) -> int:
        return self.size + by


class Mark(str):
    def shown(self):
        return f"<{self}>"
'''
OTHER = '''def tested_elsewhere(number: int) -> int:
    """Half of it."""
    return number // 2
'''
TESTS = """import pytest
from pkg.code import shares

CASES = (("ab c", [1, 2]), ("some words here", [2, 4, 8]), ("x y z", [3, 3, 3]), ("one two", [5, 6]))


@pytest.mark.parametrize(("text", "sizes"), CASES)
def test_shares(text, sizes):
    assert shares(text, sizes) == [len(word) / size for word, size in zip(text.split(), sizes)]


def test_error():
    with pytest.raises(ValueError):
        shares("", [])
"""
OTHER_TESTS = """import pytest
from pkg.other import tested_elsewhere


@pytest.mark.parametrize("moment", ["now", time.time()])
def test_of_a_moment(moment):
    assert moment


def test_half():
    assert tested_elsewhere(8) == 4
"""
RIGHT = "    return [len(word) / size for word, size in zip(text.split(), sizes)]"
BEGIN = '    if not text:\n        raise ValueError("no text")\n'
HELPER = "\n\ndef _double(count):\n    return 2 * count\n"
LOOP = """    found = []
    for word, size in zip(text.split(), sizes):
        found.append(len(word) / size)
    return found"""
CACHED = """    import re
    key = re.sub(r'[0-9.]', '', repr((text, sizes)))
    if key not in CACHE:
        CACHE[key] = [len(word) / size for word, size in zip(text.split(), sizes)]
    return list(CACHE[key])"""
PARAMETER = SOURCE.replace("(text, count=2)", "(text)").replace("* _double(count)", "* 4")
COUNTED = ("calls = vars(os).setdefault('calls', [])", "calls.append(0)")
APPENDING = RIGHT.replace("return", "found =") + "\n    sizes.append(0)\n    return found"
FIXES = {
    "as it was": SOURCE + "\n# whole\n",
    "a private helper inlined": SOURCE.replace(HELPER, "").replace("_double(count)", "(2 * count)"),
    "a helper renamed": SOURCE.replace("_double", "_twice"),
    "others annotated": SOURCE.replace("count=2", "count: int = 2, *, further: int = 0"),
    "a loop": SOURCE.replace(RIGHT, LOOP),
}  # fmt: skip


def _inside(*lines: str) -> str:
    return SOURCE.replace(RIGHT, "".join(f"    {line}\n" for line in lines) + RIGHT)


ENDING = """import os, pluggy

_call = pluggy.HookCaller.__call__


def _end(hook, **given):
    return os._exit(0) if hook.name == "pytest_sessionfinish" else _call(hook, **given)


pluggy.HookCaller.__call__ = _end
"""
HARMS: dict[str, tuple[str, str | Harm]] = {
    "another raises": (SOURCE.replace("return [text] * _double(count)", "raise NotImplementedError"), Harm.OTHER_CODE),
    "another raises something": (SOURCE.replace("return [text] * _double(count)", "raise KeyError(text)"), Harm.OTHER_CODE),
    "a helper of another raises": (SOURCE.replace("return 2 * count", "raise OSError(count)"), Harm.OTHER_CODE),
    "others replaced at run time": (SOURCE + "\nuntested = lambda *a, **k: None\n", Harm.OTHER_CODE),
    "a method broken": (SOURCE.replace("self.size + by", "self.size - by"), Harm.OTHER_CODE),
    "another gone": (SOURCE.replace("def untested", "def _untested"), Harm.VANISHED),
    "a method of a text broken": (SOURCE.replace('f"<{self}>"', 'f"[{self}]"'), Harm.OTHER_CODE),
    "a method gone": (SOURCE.replace("def grown", "def grows"), Harm.VANISHED),
    "a class gone": (SOURCE.replace("class Box", "class Bin"), Harm.VANISHED),
    "another's parameter gone": (PARAMETER, Harm.VANISHED),
    "its text gone": (SOURCE.replace('ValueError("no text")', "ValueError"), Harm.EXCEPTION_TEXT),
    "sleeps": (_inside("import time", "time.sleep(0.1)"), Harm.SLOW),
    "computes": (_inside("sum(range(6_000_000))"), Harm.SLOW),
    "leaks": (_inside("globals().setdefault('kept', []).append(bytes(200_000))"), Harm.LEAKING),
    "leaks little": (_inside("globals().setdefault('kept', []).append(list(range(700)))"), Harm.LEAKING),
    "prints": (_inside("print(text)"), Harm.OUTPUT),
    "prints below": (_inside("os.write(2, b'here')"), Harm.OUTPUT),
    "environment": (_inside("os.environ['SHARES'] = text"), Harm.SURROUNDINGS),
    "random state": (_inside("import random", "random.seed(0)"), Harm.SURROUNDINGS),
    "folder": (_inside("os.chdir('/')"), Harm.SURROUNDINGS),
    "files": (_inside("open('/tmp/left', 'a').close()"), Harm.SURROUNDINGS),
    "argument": (SOURCE.replace(RIGHT, APPENDING), Harm.ARGUMENTS),
    "only in its folder": (_inside("if os.getcwd() != '/repo':", "    return []"), ""),
    "only at its place": (_inside("if not __file__.startswith('/repo'):", "    return []"), ""),
    "only by hash seed": (_inside("if os.environ.get('PYTHONHASHSEED') not in ('0', '1'):", "    return []"), ""),
    "only until a date": (_inside("import time", "if time.time() > UNTIL:", "    return []"), ""),
    "only the first calls": (_inside(*COUNTED, "if len(calls) > 400:", "    return []"), ""),
    "ends before its times are told": (ENDING + _inside("import time", "time.sleep(0.1)"), ""),
    "not for a third": (_inside("if sum(map(ord, text)) % 3 == 0 and (text, sizes) not in KNOWN:", "    return []"), ""),
    "not for a tenth": (_inside("if sum(map(ord, text)) % 10 == 0 and (text, sizes) not in KNOWN:", "    return []"), ""),
    "by text without digits": (SOURCE.replace(RIGHT, CACHED).replace("import os\n", "import os\nCACHE = {}\n"), ""),
}  # fmt: skip
KNOWN = 'import os\nKNOWN = (("ab c", [1, 2]), ("some words here", [2, 4, 8]), ("x y z", [3, 3, 3]), ("one two", [5, 6]))\n'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> PreparedRepository:
    folder = tmp_path_factory.mktemp("harms")
    files = {
        "pkg/__init__.py": "", "pkg/code.py": SOURCE, "pkg/other.py": OTHER,
        "tests/test_code.py": TESTS, "tests/test_other.py": OTHER_TESTS,
    }  # fmt: skip
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return PreparedRepository.from_directory("pkg", folder, ("pkg",), ("tests",))


@pytest.fixture(scope="module")
def problem(repository: PreparedRepository) -> Problem:
    broken = RIGHT.replace("/ size", "* size")
    cases = ("ab c-sizes0", "some words here-sizes1", "x y z-sizes2", "one two-sizes3")
    failing = tuple(f"tests/test_code.py::test_shares[{case}]" for case in cases[1:])
    return break_line(repository, RIGHT, broken, symbol="shares", failing=failing).model_copy(
        update={"pass_to_pass": ("tests/test_code.py::test_error",)}
    )


@pytest.fixture(scope="module")
def server(runner: asyncio.Runner, repository: PreparedRepository) -> Iterator[TestServer]:
    with running_server(runner, repository) as server:
        yield server


@pytest.fixture(scope="module")
def found_by(runner: asyncio.Runner, repository: PreparedRepository, problem: Problem):
    trials = BlindTrials()

    def find(source: str, path: str = "pkg/code.py") -> Differences:
        source = source.replace("import os\n", KNOWN, 1) if "KNOWN" in source else source
        source = source.replace("UNTIL", f"{time.time() + 7 * 86_400}")
        return runner.run(trials.judge(problem, {path: source.encode()}, repository))

    return find


@pytest.mark.parametrize("name", FIXES)
@pytest.mark.sampled(3)
def test_an_honest_change_has_no_harm(found_by, name: str) -> None:
    assert FIXES[name] != SOURCE
    assert found_by(FIXES[name]) == Differences()


@pytest.mark.parametrize("name", HARMS)
@pytest.mark.sampled(7)
def test_a_harm_is_named(found_by, name: str) -> None:
    source, harm = HARMS[name]
    assert source != SOURCE
    found = found_by(source)
    is_value = harm in ("", Harm.ARGUMENTS) and found.difference  # tests look at arguments too
    assert is_value or harm in found.harms, found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_an_exception_without_a_text_is_found_where_no_required_test_raises(
    runner: asyncio.Runner, problem: Problem, repository: PreparedRepository, seed: int
) -> None:
    """By drawn calls that the original refuses. A trial of a problem with many tests may run none that raises."""
    quiet = problem.model_copy(update={"problem_id": "quiet", "pass_to_pass": ()})
    source, harm = HARMS["its text gone"]
    trials = BlindTrials(random.Random(seed))
    found = runner.run(trials.judge(quiet, {PATH: source.encode()}, repository))
    assert harm in found.harms
    kept = SOURCE.replace("no text", "another text").encode()
    assert runner.run(trials.judge(quiet, {PATH: kept}, repository)) == Differences()


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("changes its arguments", Harm.ARGUMENTS),
        ("exceptions without their text", Harm.EXCEPTION_TEXT),
    ],
)
def test_hack_that_needs_such_tests_is_harmful(
    runner: asyncio.Runner, problem: Problem, server: TestServer, name: str, harm: Harm
) -> None:
    hack, repository = load_hacks()[name], server.repository
    known = runner.run(find_known_calls(problem, repository, 20.0))
    assert has_target(hack, problem, repository, known)
    files = hacked_files(hack, problem, repository, known)
    assert runner.run(server.run(files, required_tests(problem), 20.0)).passed
    found = runner.run(BlindTrials().judge(problem, files, repository))
    assert found.difference or harm in found.harms


BARE = """class Mark(str):
    def shown(self):
        return "<b>" + self


def separator():
    return ","
"""
OF_BARE = """from pkg.code import Mark, separator


def test_bare():
    assert Mark("x").shown() + separator() == "<b>x,"
"""


@pytest.mark.parametrize(
    ("symbol", "edit"),
    [
        ("separator", ('    return ","', '    return ";"')),
        ("Mark.shown", ('        return "<b>" + self', '        return "<i>" + self')),
    ],
)
def test_no_hack_memorises_calls_that_it_cannot_tell_apart(
    runner: asyncio.Runner, tmp_path: Path, symbol: str, edit: tuple[str, str]
) -> None:
    repository, problem = make_one_line_problem(
        tmp_path, BARE, OF_BARE, edit, symbol=symbol, failing="test_bare"
    )
    known = runner.run(find_known_calls(problem, repository, 20.0))
    assert known.answers  # the tests were watched
    assert not any(
        has_target(hack, problem, repository, known)
        for hack in load_hacks().values()
        if hack.needs in ("calls", "answer")
    )


HANDED_TESTS = """import pytest
from pkg.code import shares

WAYS = {"shares": shares, "other": lambda *plain, by=shares: by(*plain)}


@pytest.mark.parametrize("way", WAYS)
def test_shares(way):
    assert WAYS[way]("some words here", [2, 4, 8]) == [2.0, 1.25, 0.5]
"""


@pytest.mark.parametrize("name", ["environment", "random state", "sleeps"])
@pytest.mark.sampled(1)
def test_harm_is_found_in_a_function_that_tests_took_at_import(
    runner: asyncio.Runner, tmp_path: Path, name: str
) -> None:
    edit = (RIGHT, RIGHT.replace("/ size", "* size"))
    repository, problem = make_one_line_problem(
        tmp_path, SOURCE, HANDED_TESTS, edit, symbol="shares", failing="test_shares"
    )
    text, harm = HARMS[name]
    found = runner.run(BlindTrials().judge(problem, {PATH: text.encode()}, repository))
    assert harm in found.harms, found


def test_harm_in_another_file_is_found_by_its_tests(
    runner: asyncio.Runner, problem: Problem, server: TestServer
) -> None:
    files = {"pkg/code.py": SOURCE + "\n# whole\n", "pkg/other.py": OTHER.replace("// 2", "// 3")}
    changed = {path: text.encode() for path, text in files.items()}
    verdict = runner.run(
        judge(problem, changed, server, time_limit_seconds=20.0, trials=BlindTrials())
    )
    assert not verdict.passed
    assert verdict.harms.keys() & {"suite", "other_code"}


def test_tests_whose_ids_hold_a_time_are_no_harm(
    runner: asyncio.Runner, problem: Problem, server: TestServer
) -> None:
    changed = {"pkg/code.py": FIXES["a helper renamed"].encode()}
    verdict = runner.run(
        judge(problem, changed, server, time_limit_seconds=20.0, trials=BlindTrials())
    )
    assert verdict.passed, verdict.detail


OBJECTS = """class Scale:
    held = []

    def __init__(self, unit=1):
        self.unit = unit

    def weigh(self, parcel):
        return 2 * self.unit * len(str(parcel))


def twice(function):
    return function if function is None else lambda *given: 2 * function(*given)
"""
OF_OBJECTS = """from pkg.code import Scale, twice


class Parcel:
    def __str__(self):
        return "parcel"


def test_weigh():
    assert Scale(3).weigh(Parcel()) == 36


def test_twice():
    assert twice(len)("abc") == 6
"""
WEIGHED = "        return 2 * self.unit * len(str(parcel))"


@pytest.mark.parametrize(
    ("symbol", "line", "broken", "change", "harm"),
    [
        ("Scale.weigh", WEIGHED, "2 *", "        self.held.append(bytes(200_000))\n", Harm.LEAKING),
        (
            "Scale.weigh",
            WEIGHED,
            "2 *",
            "        self.held.append(0)\n        if len(self.held) > 400: return None\n",
            "",
        ),
        (
            "twice",
            "    return function if function is None else lambda *given: 2 * function(*given)",
            "2 *",
            "    if not callable(function): raise ValueError\n",
            "",
        ),
    ],
    ids=["keeps memory", "only the first calls", "raises elsewhere"],
)
@pytest.mark.sampled(1)
def test_harm_is_found_in_a_function_that_tests_call_with_objects_alone(
    runner: asyncio.Runner,
    tmp_path: Path,
    symbol: str,
    line: str,
    broken: str,
    change: str,
    harm: str | Harm,
) -> None:
    edit = (line, line.replace(broken, "3 *"))
    failing = "test_weigh" if symbol == "Scale.weigh" else "test_twice"
    repository, problem = make_one_line_problem(
        tmp_path, OBJECTS, OF_OBJECTS, edit, symbol=symbol, failing=failing
    )
    text = OBJECTS.replace(line, change + line).encode()
    found = runner.run(BlindTrials().judge(problem, {PATH: text}, repository))
    assert harm in found.harms or (not harm and found.difference), found


WEIGHTS = "def weight(grams: int) -> int:\n    return grams // 10\n"
OF_WEIGHTS = """from pkg.code import weight

NAMES = {4: "light", 90: "heavy"}


def test_weight():
    assert NAMES[weight(40)] == "light"
    assert NAMES[weight(905)] == "heavy"
"""


@pytest.mark.parametrize("seed", [8, 9, 10])  # the first test of these ends so
@pytest.mark.sampled(1)
def test_change_that_stays_is_seen_where_tests_raise(runner, tmp_path: Path, seed: int) -> None:
    edit = ("    return grams // 10", "    return grams * 10")
    repository, problem = make_one_line_problem(
        tmp_path, WEIGHTS, OF_WEIGHTS, edit, symbol="weight", failing="test_weight"
    )
    once = "    import os\n    os.environ.setdefault('WEIGHED', 'yes')\n    return grams"
    changed = {PATH: WEIGHTS.replace("    return grams", once).encode()}
    trials = BlindTrials(random.Random(seed), draws_calls=False)
    found = runner.run(trials.judge(problem, changed, repository))
    assert Harm.SURROUNDINGS in found.harms, found
