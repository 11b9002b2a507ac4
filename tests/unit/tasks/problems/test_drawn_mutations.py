"""Drawn mutations: one line, valid Python, different, and honest about undefined names."""

import ast
import random

import pytest

from ostinato.tasks.corpus.config import DemonstrationConfig, FunctionLimits
from ostinato.tasks.corpus.decontamination import Guard
from ostinato.tasks.corpus.repairs.transcripts import FailureReports, RepairScript, draw_plan
from ostinato.tasks.corpus.source_code.functions import extract_functions, read_function
from ostinato.tasks.problems.breaking.drawn_mutations import draw_mutation
from tests.unit.tasks.corpus.conftest import BUGS, MODULE, make_problem

LIMITS = FunctionLimits(max_lines=24, max_characters=600)
FUNCTION = read_function(MODULE, "tiny/core.py", "largest_gap")
METHODS = """class Box:
    def size(self, scale=1):
        \"\"\"The size.\"\"\"
        if self.width > 2 or self.empty:
            return self.width * scale
        return 0

    @property
    def skipped(self):
        return 1
"""


@pytest.mark.parametrize("seed", range(50))
def test_a_drawn_mutation_changes_one_line_into_other_valid_python(seed: int) -> None:
    mutation = draw_mutation(FUNCTION.lines, random.Random(seed))
    assert mutation is not None
    assert mutation.gold_text == FUNCTION.lines[mutation.line_number - 1]
    assert mutation.broken_text.strip() != mutation.gold_text.strip()
    lines = list(FUNCTION.lines)
    lines[mutation.line_number - 1] = mutation.broken_text
    ast.parse("\n".join(lines))
    if mutation.undefined_name:
        assert mutation.undefined_name in mutation.broken_text
        assert mutation.undefined_name not in "\n".join(FUNCTION.lines).split()


def test_drawn_mutations_are_of_many_kinds_and_repeatable() -> None:
    drawn = [draw_mutation(FUNCTION.lines, random.Random(seed)) for seed in range(200)]
    assert drawn == [draw_mutation(FUNCTION.lines, random.Random(seed)) for seed in range(200)]
    assert len({item.operator for item in drawn if item is not None}) >= 6


def test_drawn_mutations_can_be_kept_to_some_lines() -> None:
    for seed in range(20):
        mutation = draw_mutation(FUNCTION.lines, random.Random(seed), [3])
        assert mutation is None or mutation.line_number == 3


def test_functions_lose_docstrings_and_keep_their_indent() -> None:
    (method,) = extract_functions(METHODS, "box.py", LIMITS)
    assert method.symbol == "Box.size"
    assert method.lines[0] == "    def size(self, scale=1):"
    assert not any("The size" in line for line in method.lines)
    assert method.lines == tuple(
        line for line in METHODS.split("\n")[1:6] if "The size" not in line
    )
    assert draw_mutation(method.lines, random.Random(0)) is not None


def test_reserved_bugs_are_never_made() -> None:
    guard = Guard([make_problem("0" * 16, index) for index in range(len(BUGS))])
    function = read_function(MODULE, "tiny/core.py", "keep_even")
    reserved = "    kept = [value for value in values if value % 2 != 0]"
    made = [draw_mutation(function.lines, random.Random(seed)) for seed in range(300)]
    found = [item for item in made if item is not None and item.broken_text == reserved]
    assert found
    assert all(guard.forbids(function, item) for item in found)
    demonstrated = [item for item in made if item and item.broken_text == "    return values"]
    assert not any(guard.forbids(function, item) for item in demonstrated)
    assert guard.allowed([FUNCTION]) == []
    assert guard.forbids_text(f"x = 1\n{reserved}\n")
    assert not guard.forbids_text("x = 1\n")


def test_invented_reports_name_undefined_names_and_borrow_real_words() -> None:
    rng = random.Random(0)
    book = FailureReports()
    made = [draw_mutation(FUNCTION.lines, random.Random(seed)) for seed in range(100)]
    named = next(item for item in made if item is not None and item.undefined_name)
    other = next(item for item in made if item is not None and not item.undefined_name)
    assert book.invent(FUNCTION, named, rng) == (
        f"failed: NameError: name '{named.undefined_name}' is not defined at <L{named.line_number}>"
    )
    assert book.invent(FUNCTION, other, rng) == "failed: AssertionError"
    book.add(*FUNCTION.key, "failed: TypeError: no len at <L2>")
    book.add(*FUNCTION.key, "failed: AssertionError: assert 1 == 2")
    words = {book.invent(FUNCTION, other, rng).partition(" at <L")[0] for _ in range(50)}
    assert words == {"failed: TypeError: no len", "failed: AssertionError: assert 1 == 2"}


def test_plans_follow_their_shares() -> None:
    style = DemonstrationConfig(parallel_share=0.5, wrong_first_share=0.3, give_up_share=0.1)
    rng = random.Random(0)
    plans = [draw_plan(style, rng) for _ in range(2000)]
    assert sum(plan.is_parallel for plan in plans) / 2000 == pytest.approx(0.5, abs=0.05)
    wrong = sum(plan.script is RepairScript.WRONG_THEN_RIGHT for plan in plans)
    assert wrong / 2000 == pytest.approx(0.3, abs=0.05)
