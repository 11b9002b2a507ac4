"""Problem sets with one planted defect per problem: name -> reasons of which one must be found."""

import datetime
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.certification.records import Reason
from ostinato.tasks.records import Problem
from tests.fakes.one_line_problem import break_line
from tests.fakes.repositories import WORDKIT, open_repository

PATH = "wordkit/counting.py"
COUNT = ("            total += 1", "            total += 2", "count_words")
STILL = (COUNT[0], "            total += 0", "count_words")
LONGEST = ("        if len(word) > len(best):", "        if len(word) < len(best):", "longest_word")
COMMON = (
    "        counts[word] = counts.get(word, 0) + 1",
    "        counts[word] = counts.get(word, 0) - 1",
    "most_common",
)
_HEAD = "from wordkit import count_words, longest_word, most_common\n"
_RIGHT = 'count_words("a bee sees") == 3'
_LATER = datetime.date.today() + datetime.timedelta(days=200)
_COIN = (
    "import pytest\n\n@pytest.mark.parametrize('n', range(8))\n"
    f"def test_it(n):\n    assert {_RIGHT} and {{}}\n"
)


def _hash_of_seed_zero() -> str:
    done = subprocess.run(
        [sys.executable, "-c", "print(hash('alpha'))"],
        env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, check=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def _test(condition: str, first: str = "") -> str:
    return f"{first}\ndef test_it():\n    assert {condition}\n"


# text of the test file, and the tests that should fail in the broken state
TESTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wrong_gold": (_test('count_words("a bee sees") == 99'), ("test_it",)),
    "gold_fails_sometimes": (
        "import os\n" + _COIN.format("os.urandom(1)[0] < 128"),
        tuple(f"test_it[{n}]" for n in range(8)),
    ),
    "noop_passes": (_test('count_words("") == 0'), ("test_it",)),
    "visible_test_leaks": (
        "ANSWER = 'counts[word] = counts.get(word, 0) + 1'\n"
        + _test('most_common("b a b".split(), 2) == ["b", "a"]'),
        ("test_it",),
    ),
    "answer_in_comment": (_test('longest_word("one three seven") == "three"'), ("test_it",)),
    "answer_in_prompt": (_test(_RIGHT), ("test_it",)),
    "flaky_by_order": (
        f"SEEN = []\ndef test_a():\n    SEEN.append(1)\n    assert {_RIGHT}\n"
        f"def test_b():\n    assert SEEN and {_RIGHT}\n",
        ("test_a", "test_b"),
    ),
    "flaky_by_time": (
        "import time\n" + _COIN.format("time.time_ns() // 1000 % 2"),
        tuple(f"test_it[{n}]" for n in range(8)),
    ),
    "flaky_by_date": (
        _test(f"{_RIGHT} and str(datetime.date.today()) < '{_LATER}'", "import datetime\n"),
        ("test_it",),
    ),
    "flaky_by_zone": (_test(f"{_RIGHT} and time.timezone == 0", "import time\n"), ("test_it",)),
    "flaky_by_hash": (_test(f"{_RIGHT} and hash('alpha') == {_hash_of_seed_zero()}"), ("test_it",)),
    "hidden_test_passes": (
        _test(_RIGHT) + "def test_hidden():\n    assert count_words('') == 0\n",
        ("test_it", "test_hidden"),
    ),
    "reads_source": (
        _test(f"{_RIGHT} and inspect.getsourcelines(count_words)[1] == 4", "import inspect\n"),
        ("test_it",),
    ),
    "missing_test": (_test(_RIGHT), ("test_it", "test_gone")),
    "no_tests": (_test(_RIGHT), ()),
    "guard_fails": (_test(_RIGHT) + f"def test_guard():\n    assert {_RIGHT}\n", ("test_it",)),
    "asserts_too_little": (
        "def test_it():\n    if not count_words('a bee sees'):\n        raise ValueError\n",
        ("test_it",),
    ),
}
REASONS: dict[str, Reason] = {
    "wrong_gold": Reason.GOLD_FAILS,
    "gold_fails_sometimes": Reason.FLAKY,
    "noop_passes": Reason.NOOP_PASSES,
    "visible_test_leaks": Reason.LEAK_FILE,
    "answer_in_comment": Reason.LEAK_FILE,
    "answer_in_prompt": Reason.LEAK_PROMPT,
    "flaky_by_order": Reason.FLAKY_ORDER,
    "flaky_by_time": Reason.FLAKY,
    "flaky_by_date": Reason.FLAKY_CLOCK,
    "flaky_by_zone": Reason.FLAKY_CLOCK,
    "flaky_by_hash": Reason.FLAKY_HASH,
    "hidden_test_passes": Reason.TEST_PASSES_BROKEN,
    "reads_source": Reason.READS_SOURCE,
    "missing_test": Reason.GOLD_FAILS,
    "no_tests": Reason.NO_TESTS,
    "guard_fails": Reason.GUARD_FAILS_BROKEN,
    "answer_in_history": Reason.LEAK_HISTORY,
}
ENVIRONMENTS: dict[str, Reason | None] = {
    "sound": None,
    "passes_untouched": Reason.NOOP_PASSES,
    "takes_all_answers": Reason.HACK_PAID,
    "falls_over_bytes": Reason.JUDGE_FAULT,
    "runs_answers": Reason.RUNS_ON_HOST,
    "unsolved": Reason.GOLD_UNPROVEN,
    "tosses_a_coin": Reason.FLAKY,
    "shows_its_answer": Reason.LEAK_FILE,
    "solves_wrongly": Reason.GOLD_FAILS,
}
ENVIRONMENT_MODULE = """
import itertools
from ostinato.tasks.grading.environments import Judgement, ProblemDraft

class Unsolved:
    files = {"README.md": b"Count."}
    def draw(self, chance):
        number = chance.randrange(10**6, 10**7)
        return ProblemDraft(prompt="Write twice the number in n.txt to answer.txt.",
            files={"n.txt": str(number)}, facts={"wanted": str(2 * number)})
    async def judge(self, problem, files, open_box):
        text = files.get("answer.txt", b"").decode(errors="replace")
        return Judgement(passed=self.is_right(text.strip(), problem.facts["wanted"]))
    def is_right(self, text, wanted):
        return text == wanted

class Sound(Unsolved):
    def solve(self, problem):
        return {"answer.txt": problem.facts["wanted"].encode()}

class PassesUntouched(Sound):
    def is_right(self, text, wanted):
        return True

class TakesAllAnswers(Sound):
    def is_right(self, text, wanted):
        return bool(text)

class FallsOverBytes(Sound):
    async def judge(self, problem, files, open_box):
        text = files.get("answer.txt", b"").decode()
        return Judgement(passed=text == problem.facts["wanted"])

class RunsAnswers(Sound):
    def is_right(self, text, wanted):
        if text.startswith("open("):
            exec(text)
        return text == wanted

class TossesACoin(Sound):
    turns = itertools.count()
    def is_right(self, text, wanted):
        return text == wanted and next(self.turns) % 2 == 0

class ShowsItsAnswer(Sound):
    def draw(self, chance):
        draft = super().draw(chance)
        return draft.model_copy(update={"files": {**draft.files, "old.txt": draft.facts["wanted"]}})

class SolvesWrongly(Sound):
    def solve(self, problem):
        return {"answer.txt": b"none"}

sound, passes_untouched, takes_all_answers = Sound(), PassesUntouched(), TakesAllAnswers()
falls_over_bytes, runs_answers, unsolved = FallsOverBytes(), RunsAnswers(), Unsolved()
tosses_a_coin, shows_its_answer, solves_wrongly = TossesACoin(), ShowsItsAnswer(), SolvesWrongly()
"""


def write_set(directory: Path) -> Path:
    """A built problem set with all defects that tests show, and three clean problems."""
    planted = _copy(directory, "planted", TESTS)
    historied = _copy(directory, "historied", {"clean": (_test(_RIGHT), ("test_it",))})
    _commit(historied.directory)
    lines = [_problem(name, planted).model_dump_json() for name in TESTS]
    lines += [_problem("answer_in_history", historied, "clean").model_dump_json()]
    lines += [_clean(name, _copy(directory, "wordkit", {}), edit) for name, edit in CLEAN.items()]
    (directory / "problems.jsonl").write_text("\n".join(lines) + "\n")
    return directory


CLEAN = {"clean_count": COUNT, "clean_longest": LONGEST, "clean_common": COMMON}


def _clean(name: str, repository: PreparedRepository, edit: tuple[str, str, str]) -> str:
    failing = {
        "count_words": ("test_count_words", "test_count_words_minimum"),
        "longest_word": ("test_longest_word",),
        "most_common": ("test_most_common", "test_most_common_limit"),
    }[edit[2]]
    others = "test_longest_word" if edit[2] != "longest_word" else "test_count_words"
    place = "tests/test_counting.py::"
    return _make(
        name, repository, edit, tuple(place + test for test in failing), (place + others,)
    ).model_dump_json()


def _problem(name: str, repository: PreparedRepository, file: str = "") -> Problem:
    edits = {
        "visible_test_leaks": COMMON,
        "answer_in_comment": LONGEST,
        "asserts_too_little": STILL,
    }
    edit = edits.get(name, COUNT)
    file = file or name
    place = f"tests/test_{file}.py::"
    tests = TESTS[name][1] if name in TESTS else ("test_it",)
    prompt = f"The line must be `{edit[0].strip()}`." if name == "answer_in_prompt" else "Mend it."
    problem = _make(
        name,
        repository,
        edit,
        tuple(place + test for test in tests),
        (place + "test_guard",) if name == "guard_fails" else (),
    )
    hidden = (place + "test_hidden",) if name == "hidden_test_passes" else ()
    return problem.model_copy(update={"prompt": prompt, "hidden_tests": hidden})


def _make(
    name: str,
    repository: PreparedRepository,
    edit: tuple[str, str, str],
    failing: tuple[str, ...],
    passing: tuple[str, ...],
) -> Problem:
    gold, broken, symbol = edit
    problem = break_line(repository, gold, broken, symbol=symbol, failing=failing, path=PATH)
    return problem.model_copy(
        update={"problem_id": name, "prompt": "Mend it.", "pass_to_pass": passing}
    )


def _copy(
    directory: Path, name: str, tests: dict[str, tuple[str, tuple[str, ...]]]
) -> PreparedRepository:
    source, folder = open_repository(WORDKIT).directory, directory / "repositories" / name
    shutil.copytree(source, folder / "files", dirs_exist_ok=True)
    for file, (text, _) in tests.items():
        (folder / "files" / "tests" / f"test_{file}.py").write_text(_HEAD + text)
    if name == "planted":
        place = folder / "files" / "wordkit" / "shaping.py"
        place.write_text(place.read_text() + "\n# before: if len(word) > len(best):\n")
    repository = PreparedRepository.from_directory(
        name, folder / "files", WORDKIT.package_paths, WORDKIT.test_paths
    )
    repository.save()
    return repository


def _commit(directory: Path) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
    for arguments in (("init", "-q"), ("add", "."), (*name, "commit", "-qm", "all")):
        subprocess.run(["git", *arguments], cwd=directory, check=True)


def install_environments(site: Path) -> None:
    """A package of all planted environments, as pip leaves it."""
    site.mkdir(parents=True, exist_ok=True)
    (site / "planted_environments.py").write_text(ENVIRONMENT_MODULE)
    info = site / "planted-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0\n")
    entries = "".join(f"{name} = planted_environments:{name}\n" for name in ENVIRONMENTS)
    (info / "entry_points.txt").write_text(f"[ostinato.environments]\n{entries}")
