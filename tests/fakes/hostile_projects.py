"""Twenty-four small projects as strangers have them, each with what `problems from` makes of it."""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.shop_project import CODE as SHOP_CODE
from tests.fakes.shop_project import TESTS as SHOP_TESTS

CODE = SHOP_CODE.partition("\ndef middle")[0]  # two functions
TESTS = SHOP_TESTS.partition("\ndef test_middle")[0]
_HEAD = "[project]\nname = 'shop'\nversion = '1'\n"
_PYTEST = f"{_HEAD}[tool.pytest.ini_options]\n"


def _do_nothing(folder: Path) -> None:
    pass


@dataclass(frozen=True)
class HostileProject:
    """Files by path, what is done with the folder that holds them, and the refusal, empty where problems are made."""

    files: Mapping[str, str | bytes]
    prepare: Callable[[Path], object] = _do_nothing
    refusal: str = ""
    missing: str = ""  # part of the id of a test that takes no part
    needed: tuple[str, ...] = ()  # parts of ids of tests that do
    findings: tuple[str, ...] = ()  # what a certificate may name

    def write(self, folder: Path) -> Path:
        """The folder, which holds the project."""
        folder.mkdir()
        for path, text in self.files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text if isinstance(text, bytes) else text.encode())
        self.prepare(folder)
        return folder


def _flat(tests: str = "", **others: str | bytes) -> dict[str, str | bytes]:
    """One module, its tests with some more, and other files."""
    return {"shop.py": CODE, "tests/test_shop.py": TESTS + tests, **others}


def _spoil(folder: Path) -> None:
    """A file of 30 GB, a ring of links, a pipe, a name that is no text, folders deeper than the stack."""
    with (folder / "model.bin").open("wb") as file:
        file.truncate(30 << 30)
    (folder / "tests" / "ring").symlink_to(folder)
    (folder / "tests" / "self.py").symlink_to("self.py")
    os.mkfifo(folder / "tests" / "pipe.py")
    (folder / os.fsdecode(b"caf\xe9.py")).write_text("")
    deep = folder
    for _ in range(1200):
        deep = deep / "d"
    subprocess.run(["mkdir", "-p", str(deep.relative_to(folder))], cwd=folder, check=True)


def _begin_git(folder: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)


_PARAMETERS = """

import pytest


@pytest.mark.parametrize("numbers", [[3, 1]], ids=[IDS])
def test_named(numbers):
    assert shop.clamp(numbers) == [2, 4]
    assert shop.spread(numbers) == [2, 4]
"""
_LEAVES_WORK = """

import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor


def test_leaves_work():
    threading.Thread(target=time.sleep, args=(300,)).start()
    ThreadPoolExecutor(1).submit(time.sleep, 300)
    atexit.register(time.sleep, 300)
    assert shop.clamp([3, 1]) == [2, 4]
    assert shop.spread([3, 1]) == [2, 4]
"""
_DESCRIBED = """import shop


class DescribeShop:
    def it_clamps(self):
        assert shop.clamp([3, 1, 20]) == [2, 4]
        assert shop.clamp([9]) == [8]

    def it_spreads(self):
        assert shop.spread([3, 1, 20]) == [2, 4]
        assert shop.spread([9]) == [8]


def it_is_empty():
    assert shop.clamp([]) == shop.spread([]) == []
"""
_UNITTEST = """import unittest

import shop


class ShopTest(unittest.TestCase):
    def setUp(self):
        self.numbers = [3, 1, 20]

    def test_clamp(self):
        self.assertEqual(shop.clamp(self.numbers), [2, 4])
        self.assertEqual(shop.clamp([9]), [8])

    def test_spread(self):
        for numbers, wanted in (([9], [8]), ([], []), (self.numbers, [2, 4])):
            with self.subTest(numbers=numbers):
                self.assertEqual(shop.spread(numbers), wanted)
"""
_ORDERED = """

SEEN = []


def test_first():
    SEEN.append(shop.clamp([3, 1]))


def test_second():
    assert SEEN == [[2, 4]]
"""
_NETWORK = """

import urllib.request


def test_network():
    assert urllib.request.urlopen("http://example.org", timeout=2).status == 200
"""
_WRITES = """

from pathlib import Path


def test_writes():
    Path(__file__).with_suffix(".out").write_text(str(shop.clamp([3, 1])))
"""
_CART = """

def test_cart(CART):
    HEAD
    assert shop.clamp(cart) == [2, 4]
    assert shop.spread(cart) == [2, 4]
"""
_NAMED = """

def test_name():
    from shop.names import NAME
    assert shop.clamp([3, len(NAME)]) == [2, 4]
"""
_UNMET = "minversion = 99\nrequired_plugins = gone\nfilterwarnings = error\n"
_DEEP = 'TOTAL = "0"' + ' + "1"' * 6000 + "\n"
_NESTED = "TOTAL = 0" + " + 1" * 700 + "\n"
_DOCTESTS = 'def add(a, b):\n    """\n    >>> add(1, 2)\n    3\n    """\n    return a + b\n'

PROJECTS = {
    "spaced_ids": HostileProject(
        _flat(_PARAMETERS.replace("IDS", repr("a - b :: [c] PASSED x - y"))), needed=("a - b",)
    ),
    "unicode_ids": HostileProject(
        _flat(_PARAMETERS.replace("IDS", repr("\xe9t\xe9 \u2028 \U0001f600\n\t\\")))
    ),
    "leaves_work": HostileProject(_flat(_LEAVES_WORK), needed=("test_leaves_work",)),
    "namespace": HostileProject(
        {
            "pyproject.toml": "[project]\nname = 'acme-shop'\nversion = '1'\n",
            "acme/shop/__init__.py": CODE,
            "tests/test_shop.py": TESTS.replace("import shop", "from acme import shop"),
        }
    ),
    "own_names": HostileProject(
        {
            "shop.py": CODE,
            "tests/test_shop.py": _DESCRIBED,
            "pyproject.toml": f"{_PYTEST}python_functions = ['it_*']\npython_classes = ['Describe*']\n",
        },
        needed=("DescribeShop::it_",),
    ),
    "pythonpath": HostileProject(
        {
            "src/shop.py": CODE,
            "checks/lib/carts.py": "CART = [3, 1]\n",
            "checks/test_shop.py": TESTS + _CART.replace("CART", "").replace("HEAD", "from carts import CART as cart"),
            "setup.cfg": "[tool:pytest]\npythonpath = src checks/lib\n",
        },
        needed=("test_cart",),
    ),
    "twins": HostileProject(
        {
            "shop.py": CODE,
            "tests/a/test_shop.py": TESTS,
            "tests/b/test_shop.py": TESTS.replace("[3, 1, 20]", "[1, 3, 30]"),
            "tox.ini": "[pytest]\naddopts = --import-mode=importlib\n",
        },
        needed=("tests/a/", "tests/b/"),
    ),
    "line_ends": HostileProject(
        {
            "shop.py": b"\xef\xbb\xbf" + CODE.replace("\n", "\r\n").encode(),
            "tests/test_shop.py": TESTS.replace("\n", "\r\n"),
        }
    ),
    "other_text": HostileProject(
        {
            "shop/__init__.py": CODE.replace("\ndef spread", "\n\x0c\ndef spread"),
            "shop/names.py": b"# -*- coding: latin-1 -*-\nNAME = '\xe9'\n",
            "shop/broken.py": b"\xff\xfe\x00",
            "shop/newer.py": "type Pair[T] = tuple[T, T]\n",
            "tests/test_shop.py": TESTS + _NAMED,
        }
    ),
    "deep_tree": HostileProject(
        {
            "shop/__init__.py": CODE,
            "shop/made.py": _DEEP,
            "shop/nested.py": _NESTED,
            "tests/test_shop.py": TESTS,
            "tests/test_deep.py": _DEEP,
        }
    ),
    "no_project_should_hold": HostileProject(_flat(), _spoil),
    "src_layout": HostileProject(
        {"src/shop/__init__.py": CODE, "tests/test_shop.py": TESTS, "pyproject.toml": _HEAD}
    ),
    "tests_inside": HostileProject(
        {"shop/__init__.py": CODE, "shop/tests/__init__.py": "", "shop/tests/test_shop.py": TESTS}
    ),
    "unittest_only": HostileProject({"shop.py": CODE, "tests/__init__.py": "", "tests/test_shop.py": _UNITTEST}),
    "conftest_plugins": HostileProject(
        {
            "shop.py": CODE,
            "conftest.py": "pytest_plugins = ['tests.given']\n",
            "tests/__init__.py": "",
            "tests/given.py": "import pytest\n\n\n@pytest.fixture\ndef cart():\n    return [3, 1]\n",
            "tests/test_shop.py": TESTS + _CART.replace("CART", "cart").replace("HEAD", "pass"),
        },
        needed=("test_cart",),
    ),
    "writes_beside": HostileProject(_flat(_WRITES), missing="test_writes"),
    "ordered": HostileProject(_flat(_ORDERED), findings=("flaky_order",)),
    "network": HostileProject(_flat(_NETWORK), missing="test_network"),
    "missing_plugins": HostileProject(
        _flat(**{"pytest.ini": f"[pytest]\naddopts = -n auto -p no_such_plugin\n{_UNMET}"})
    ),
    "doctest_only": HostileProject({"shop.py": _DOCTESTS}, refusal="no test file"),
    "no_tests": HostileProject({"shop.py": CODE}, refusal="no test file"),
    "no_code": HostileProject({"tests/test_shop.py": TESTS}, refusal="no package or module"),
    "empty_repository": HostileProject({}, _begin_git, refusal="HEAD of it is no commit"),
    "fails_from_the_start": HostileProject(
        _flat() | {"tests/test_shop.py": TESTS.replace("[2, 4]", "[5]").replace("[8]", "[9]")},
        refusal="no source gave a problem",
    ),
}  # fmt: skip
