"""Features deleted over several files: no trace of them stays, every module still imports, and the other tests pass."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.tasks.problems.breaking.definitions import read_definitions
from ostinato.tasks.problems.breaking.features import FeatureMaker, names_at_import
from ostinato.tasks.problems.config import Kind

FILES = {
    "shop/__init__.py": '''"""A shop: carts, and coupons by `apply_coupon`."""

import re

from shop.cart import Cart
from shop.coupons import Coupon, apply_coupon
from shop.report import coupon_report, report

__all__ = ["Cart", "Coupon", "apply_coupon", "coupon_report", "report"]
''',
    "shop/cart.py": '''"""Carts."""


class Cart:
    """Prices of a customer.

    Prices are in cents.

    For less money see `apply_coupon`, which takes
    a code.
    """

    def __init__(self):
        self.prices = []

    def add(self, price):
        self.prices.append(_checked(price))

    def total(self):
        """Sum of all prices."""
        return sum(self.prices)


def _checked(price):
    if price < 0:
        raise ValueError(price)
    return price
''',
    "shop/coupons.py": '''"""Money off."""

import re

_CODE = re.compile("([A-Z]+)([0-9]+)")
_MOST = 90


class Coupon:
    """A share taken off."""

    def __init__(self, code):
        self.percent = _parse_code(code)

    def off(self, cents):
        """Cents off."""
        return cents * self.percent // 100


# codes such as SALE20
def _parse_code(code):
    match = _CODE.fullmatch(code)
    if match is None:
        raise ValueError(code)
    return min(int(match[2]), _MOST)


def apply_coupon(cart, code):
    """Total of a cart with a coupon."""
    total = cart.total()
    return total - Coupon(code).off(total)
''',
    "shop/report.py": '''"""Texts."""

from shop.coupons import apply_coupon


def report(cart):
    """The total as text."""
    return f"total {cart.total()}"


def coupon_report(cart, code):
    """The total with a coupon as text."""
    return f"total {apply_coupon(cart, code)} with {code}"
''',
}
README = """# Shop

Carts and reports.

## Money off with `apply_coupon`

Give it a code.

### Codes

SALE20 takes off 20 %.

## Reports

- `report` for a total
- `coupon_report` for less
"""
TESTS = {
    "tests/test_cart.py": """import pytest
import shop


def test_total():
    cart = shop.Cart()
    cart.add(3)
    assert shop.report(cart) == "total 3"


def test_negative():
    with pytest.raises(ValueError):
        shop.Cart().add(-1)
""",
    "tests/test_less.py": """import pytest
import shop


class TestCoupons:
    def test_apply(self):
        cart = shop.Cart()
        cart.add(200)
        assert shop.apply_coupon(cart, "SALE20") == 160
        assert shop.coupon_report(cart, "SALE20") == "total 160 with SALE20"

    def test_bad_code(self):
        with pytest.raises(ValueError):
            shop.Coupon("sale")
""",
}
IDS = (
    "tests/test_cart.py::test_total",
    "tests/test_cart.py::test_negative",
    "tests/test_less.py::TestCoupons::test_apply",
    "tests/test_less.py::TestCoupons::test_bad_code",
)
CALLERS = {
    "Cart.__init__": {0, 1, 2}, "Cart.add": {0, 1, 2}, "_checked": {0, 1, 2},
    "Cart.total": {0, 2}, "report": {0}, "Coupon.__init__": {2, 3}, "_parse_code": {2, 3},
    "Coupon.off": {2}, "apply_coupon": {2}, "coupon_report": {2},
}  # fmt: skip
ENCODED = {path: text.encode() for path, text in FILES.items()}


def make(tests=TESTS, lines=range(1, 300)) -> FeatureMaker:
    return FeatureMaker(
        "shop",
        ENCODED,
        read_definitions(ENCODED),
        {path: text.encode() for path, text in tests.items()},
        documents={"README.md": README.encode()},
        lines=lines,
    )


def covering(keys) -> list[int]:
    return sorted(set().union(*(CALLERS.get(name, set()) for _, _, name in keys)))


def delete_subject(symbol: str, tests=TESTS, max_tests=2):
    found = make(tests).subjects(IDS, covering, max_tests)
    return next(item for item in found if item.symbol == symbol)


def broken(candidate) -> dict[str, str]:
    files = {**ENCODED, "README.md": README.encode()}
    made = {**files, **candidate.broken_files(files)}
    return {path: text.decode() for path, text in made.items()}


def run_tests(folder: Path, files: dict[str, str], tests=TESTS) -> set[str]:
    """Ids of the tests that pass, after an import of every module."""
    for path, text in {**files, **tests}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    names = [path.removesuffix(".py").replace("/", ".") for path in FILES]
    modules = ", ".join(name.removesuffix(".__init__") for name in names)
    whole = f"import {modules}; from shop import *"
    subprocess.run([sys.executable, "-c", whole], cwd=folder, check=True)
    command = [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "tests"]
    shown = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert not re.findall("^ERROR", shown.stdout, re.MULTILINE)
    return set(re.findall(r"^PASSED (\S+)", shown.stdout, re.MULTILINE))


def test_a_subject_is_gone_from_every_file_and_the_other_tests_pass(tmp_path: Path) -> None:
    files = {**FILES, "README.md": README}
    assert run_tests(tmp_path / "whole", files) == set(IDS)
    candidate = delete_subject("Coupon")
    assert (candidate.kind, candidate.operator) == (Kind.DELETED_FEATURE, "subject")
    left = broken(candidate)
    changed = {path for path in left if left[path] != files[path]}
    assert changed == {*FILES, "README.md"}
    for text in left.values():
        assert not re.search("coupon_|_coupon|Coupon|_parse_code|_CODE|_MOST|SALE", text)
    assert "import re" not in left["shop/coupons.py"]
    assert "import re" in left["shop/__init__.py"]  # unused before, so no trace of it
    assert "Prices are in cents." in left["shop/cart.py"]
    assert "- `report` for a total" in left["README.md"]
    assert run_tests(tmp_path / "broken", left) == set(IDS[:2])


def test_no_export_dangles() -> None:
    for candidate in make().subjects(IDS, covering, 4):
        left = broken(candidate)
        tree = ast.parse(left["shop/__init__.py"])
        bound = {
            alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        exported = {
            name
            for node in tree.body
            if isinstance(node, ast.Assign)
            for name in ast.literal_eval(node.value)
        }
        assert exported <= bound


def test_what_test_files_import_stays_as_a_stub(tmp_path: Path) -> None:
    late = "from shop import Coupon, apply_coupon\n\nCODES = [Coupon]\n"
    tests = {**TESTS, "tests/test_late.py": late + "\n\ndef test_codes():\n    assert CODES\n"}
    left = broken(delete_subject("Coupon", tests))
    assert "def off(self, cents):\n        raise NotImplementedError" in left["shop/coupons.py"]
    assert "_parse_code" not in left["shop/coupons.py"]
    assert "coupon_report" not in left["shop/report.py"]
    kept = {*IDS[:2], "tests/test_late.py::test_codes"}
    assert run_tests(tmp_path, left, tests) == kept


def test_sizes_and_numbers_of_tests_are_bounds() -> None:
    assert not make().subjects(IDS, covering, 0)
    assert not make(lines=range(200, 300)).subjects(IDS, covering, 4)
    assert not list(make(lines=range(200, 300)).skeletons())
    sizes = [item.draft("").num_changed_lines for item in make().subjects(IDS, covering, 4)]
    assert sizes
    assert all(1 <= size < 300 for size in sizes)


def test_subjects_over_several_files_come_first_and_none_twice() -> None:
    found = make().subjects(IDS, covering, 4, seed=1)
    counts = [len({block.path for block in item.blocks}) for item in found]
    assert [count == 1 for count in counts] == sorted(count == 1 for count in counts)
    assert len({item.candidate_id for item in found}) == len(found)
    assert found == make().subjects(IDS, covering, 4, seed=1)


def test_a_skeleton_keeps_public_signatures_and_nothing_private() -> None:
    found = {item.symbol: broken(item) for item in make().skeletons()}
    coupons = found["Coupon"]["shop/coupons.py"]
    assert '"""Cents off."""\n        raise NotImplementedError' in coupons
    assert "self.percent" not in coupons
    assert "apply_coupon" in coupons
    assert "_parse_code" not in coupons
    assert "_CODE" not in coupons
    assert "_checked" not in found["Cart"]["shop/cart.py"]
    assert "Cart" in found["Cart"]["shop/__init__.py"]


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("import kit\nX = kit.shout(1)\n", {"kit", "shout"}),
        ("def test(a=first):\n    late(1)\n", {"first"}),
        ("@mark(second)\nclass A(Base):\n    C = third\n", {"mark", "second", "Base", "third"}),
        ("from kit import fourth as other\n\n\nasync def test():\n    late()\n", {"fourth"}),
        ("class A:\n    def test(self):\n        late()\n", set()),
        ("not python at all", set()),
    ],
)
def test_names_of_bodies_are_not_used_at_import(text: str, used: set[str]) -> None:
    assert used <= names_at_import(text)
    assert "late" not in names_at_import(text)
