"""A planted answer is found wherever it lies; a clean deletion has none."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from ostinato.tasks.problems.breaking.candidates import Candidate, LinePlan
from ostinato.tasks.problems.breaking.deletions import DeletionMaker
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.problems.proving.leaks import Leak, LeakCheck
from ostinato.tasks.problems.selection import Sources
from ostinato.tasks.records import LineEdit
from tests.fakes.repositories import WORDKIT, open_repository

PATH = "wordkit/shaping.py"


@pytest.fixture(scope="module")
def deletion():
    sources = Sources.read(open_repository(WORDKIT))
    maker = DeletionMaker("wordkit", sources.files, sources.definitions, sources.tests)
    found = [item for item in maker.functions() if item.symbol == "wrap_words"]
    return sources.repository.files, next(item for item in found if item.operator == "body")


def leaks_with(deletion, planted):
    files, candidate = deletion
    return {leak.path for leak in find_leaks(candidate.draft("x"), files, planted)}


def find_leaks(problem, files, planted=None):
    with TemporaryDirectory() as folder:
        for path, text in {**files, **(planted or {})}.items():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / path).write_bytes(text)
        return LeakCheck(SimpleNamespace(files=files, directory=Path(folder))).find(problem)


def test_clean_deletion_leaks_nothing(deletion):
    assert leaks_with(deletion, {}) == set()


def test_removed_lines_in_a_backup_are_found(deletion):
    files, _ = deletion
    assert leaks_with(deletion, {"notes/shaping.py.orig": files[PATH]}) == {"notes/shaping.py.orig"}


def test_names_in_bytecode_and_caches_are_found():
    text = b"def outer():\n    return helper_of_outer()\n\n\ndef helper_of_outer():\n    return 1\n"
    files = {"kit/a.py": text}
    plan = LinePlan(files)
    plan.replace("kit/a.py", 2, 6, ("    raise NotImplementedError",))
    draft = make_draft(plan)
    cache = {".mypy_cache/a.json": b'{"helper_of_outer": "def () -> int"}'}
    leaks = find_leaks(draft, files, cache)
    assert leaks == (Leak("name helper_of_outer", ".mypy_cache/a.json"),)
    assert find_leaks(draft, files) == ()


def test_hidden_test_that_is_still_named_is_found():
    files = {"kit/a.py": b"x = 1\n", "tests/test_a.py": b"def test_secret_thing():\n    pass\n"}
    plan = LinePlan(files)
    plan.replace("kit/a.py", 1, 1, ("x = 2",))
    hidden = make_draft(plan).model_copy(
        update={"hidden_tests": ("tests/test_a.py::test_secret_thing",)}
    )
    assert [leak.path for leak in find_leaks(hidden, files)] == ["tests/test_a.py"]


def make_draft(plan):
    return Candidate(
        repository="kit",
        kind=Kind.DELETED_FEATURE,
        operator="stub",
        path="kit/a.py",
        symbol="outer",
        first_line=1,
        last_line=2,
        blocks=plan.blocks(),
        touched=(),
    ).draft("x")


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        ({"kit/b.py": b"def g(x):\n    if x:\n        return x * factor + 1\n"}, set()),
        ({"kit/b.py": b"# was: return x*factor + 1\n"}, {"kit/b.py"}),
        ({"docs/notes.txt": b"g gives `return x * factor + 1`"}, {"docs/notes.txt"}),
        (
            {
                "kit/b.py": b"def h(x):\n  factor = load_factor()\n  return x * factor + 1\nTAIL = 1\n"
            },
            {"kit/b.py"},
        ),
    ],
)
def test_a_changed_line_that_stands_elsewhere_is_found(
    other: dict[str, bytes], wanted: set[str]
) -> None:
    text = b"def f(x):\n    factor = load_factor()\n    return x * factor + 1\nTAIL = 1\n"
    files = {"kit/a.py": text, **other}
    edit = LineEdit(
        path="kit/a.py",
        line_number=3,
        gold_text="    return x * factor + 1",
        broken_text="    return x * factor - 1",
    )
    problem = make_draft(LinePlan(files)).model_copy(update={"edits": (edit,)})
    repository = SimpleNamespace(files=files)
    assert {leak.path for leak in LeakCheck(repository).find_repeated(problem)} == wanted


def test_a_large_deletion_may_share_a_few_lines_with_its_neighbours() -> None:
    shared = (
        "    first_value = read_value(0)\n    second_value = read_value(1)\n    return join(a, b)\n"
    )
    own = "".join(f"    number_{n} = compute_number({n}, {n} * 7)\n" for n in range(30))
    text = f"def keep():\n{shared}\n\ndef outer():\n{own}{shared}"
    files = {"kit/a.py": text.encode()}
    plan = LinePlan(files)
    plan.replace("kit/a.py", 7, text.count("\n"), ())
    draft = make_draft(plan)
    assert {leak.what for leak in find_leaks(draft, files)} == {"removed lines"}
    large = draft.model_copy(update={"operator": "subject"})
    assert find_leaks(large, files) == ()
    copied = find_leaks(large, files, {"notes/a.py.orig": text.encode()})
    assert {leak.path for leak in copied} >= {"notes/a.py.orig"}
