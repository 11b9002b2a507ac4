"""What an agent's own test run can print: nothing of the original, nothing of hidden tests.

The change walks everything that a process can reach for two marks, one in the original of the broken
function and one in a hidden test, and prints what it finds in an exception's message.
"""

import asyncio
from pathlib import Path

import pytest

from ostinato.infra.agent.tools.testing import make_test_runner
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer

GOLD, HIDDEN = "markoforiginal", "markofhiddentest"
PRODUCT = f'''"""A kit."""


def join(first, second):
    """Both in one."""
    separator = "{GOLD}"[:0] + "-"
    return first + separator + second


def probe(text):
    """The text."""
    return text
'''
VISIBLE = """from kit.words import join, probe


def test_join():
    assert join("a", "b") == "a-b"


def test_probe():
    assert probe("a") == "a"
"""
HIDDEN_TEST = f"""

def test_hidden():
    assert join("{HIDDEN}", "b") == "{HIDDEN}-b"
"""
TESTS = ("tests/test_words.py::test_probe",)
# Halves apart: the search must not find its own words. Each place is looked at by itself.
SEARCH = r"""
def probe(text):
    import ctypes, gc, os, re, sys, types
    marks = [(b"markof", b"original"), (b"markof", b"hiddentest")]
    found = set()

    def look(place, data):
        for head, tail in marks:
            for match in re.finditer(head, data):
                end = match.end()
                if data[end : end + len(tail)] == tail:
                    found.add(f"{place}: {tail.decode()}")

    def look_at_code(place, code):
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                look_at_code(place, constant)
            elif isinstance(constant, str) and constant not in ("markof",):
                look(place, constant.encode(errors="replace"))

    for thing in [*gc.get_objects(), *[r for o in gc.get_objects() for r in gc.get_referents(o)]]:
        if type(thing) is bytes:
            look("objects", thing)
        elif type(thing) is str:
            look("objects", thing.encode(errors="replace"))
        elif type(thing) is types.CodeType:
            look_at_code("codes", thing)
    frame = sys._getframe()
    while frame is not None:
        for name, value in list(frame.f_locals.items()):
            if name not in ("marks", "found"):
                look("frames", repr(value)[:1000000].encode(errors="replace"))
        frame = frame.f_back
    for name, module in list(sys.modules.items()):
        source = getattr(getattr(module, "__loader__", None), "sources", {})
        for text in list(source.values()):
            look("loaders", text)
    for path in ("/proc/self/fd", "/proc/1/fd"):
        try:
            names = os.listdir(path)
        except OSError:
            continue
        for name in names:
            try:
                if os.path.isfile(f"{path}/{name}"):
                    look("descriptors", open(f"{path}/{name}", "rb").read())
            except OSError:
                pass
    for top in ("/repo", "/tmp", "/run", "/dev/shm", "/root", "/home"):
        for folder, _, names in os.walk(top):
            for name in names:
                try:
                    look("files", open(os.path.join(folder, name), "rb").read())
                except OSError:
                    pass
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    searched = 0
    for process in ("self", "1"):
        try:
            memory = open(f"/proc/{process}/mem", "rb", 0)
            maps = open(f"/proc/{process}/maps").read().splitlines()
        except OSError:
            continue
        for line in maps:
            span, rights = line.split()[:2]
            first, last = (int(part, 16) for part in span.split("-"))
            if "r" in rights and "[v" not in line:
                try:
                    memory.seek(first)
                    look("memory", memory.read(last - first))
                    searched += last - first
                except (OSError, OverflowError, ValueError):
                    pass
    raise AssertionError(f"searched {searched > 1000000}; {sorted(found)}")
"""


@pytest.fixture
def kit(tmp_path: Path) -> PreparedRepository:
    """A pristine repository with the original and the hidden test."""
    files = {
        "kit/__init__.py": "",
        "kit/words.py": PRODUCT,
        "tests/conftest.py": "import kit\n",
        "tests/test_words.py": VISIBLE + HIDDEN_TEST,
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return PreparedRepository.from_directory("kit", tmp_path, ("kit",), ("tests",))


def attack() -> dict[str, bytes]:
    """What an agent leaves: the broken function, and a probe that searches."""
    broken = PRODUCT.partition("def join")[0] + "def join(first, second):\n    return first\n"
    return {"kit/words.py": (broken + "\n" + SEARCH).encode()}


def test_own_test_run_reaches_neither_original_nor_hidden_tests(kit):
    given = {**kit.files, **attack(), "tests/test_words.py": VISIBLE.encode()}

    async def run():
        server = TestServer(kit)
        run_tests = make_test_runner(server, TESTS, 60.0, given)
        try:
            # a verdict on a right change, and another agent's run, came before
            right = {"kit/words.py": PRODUCT.encode() + b"\n# right\n"}
            assert (await server.run(right, server.tests or TESTS)).passed
            assert (await server.run_visible(right, given, TESTS)).passed
            async with open_box(kit, {**attack(), "tests/test_words.py": VISIBLE.encode()}) as box:
                return await run_tests(box)
        finally:
            await server.close()

    with asyncio.Runner() as runner:
        failure = runner.run(run()).first_failure
    assert failure is not None
    assert failure.message == "searched True; []"


@pytest.mark.parametrize("has_conftest", [True, False])
def test_a_verdicts_run_reaches_the_tests_alone(kit, has_conftest):
    if not has_conftest:
        (kit.directory / "tests/conftest.py").unlink()
    plain = PreparedRepository.from_directory("kit", kit.directory, ("kit",), ("tests",))

    async def run():
        server = TestServer(plain)
        try:
            # verdicts on the original and on a right change came before, in the same box
            right = {"kit/words.py": PRODUCT.encode() + b"\n# right\n"}
            assert (await server.run({}, TESTS)).passed
            assert (await server.run(right, TESTS)).passed
            return await server.run_again(attack(), TESTS, 60.0)
        finally:
            await server.close()

    with asyncio.Runner() as runner:
        failure = runner.run(run()).first_failure
    assert failure is not None
    assert "original" not in failure.message
    for found in ("codes: hiddentest", "files: hiddentest"):  # it runs them, so the search works
        assert found in failure.message
