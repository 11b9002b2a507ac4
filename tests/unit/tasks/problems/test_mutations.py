"""Operators make what their table says; every mutation is the difference of one line."""

import ast

import pytest

from ostinato.tasks.problems.breaking.mutations import NOTICED_SHARES, OPERATORS, mutate_function
from ostinato.tasks.problems.config import ProblemsConfig
from ostinato.tasks.problems.selection import Sources
from tests.fakes.repositories import LEDGERKIT, WORDKIT, cover_everything, open_repository

CONFIG = ProblemsConfig(plain_functions=True, max_function_lines=24, max_function_characters=600)


def make_function(*body: str) -> list[str]:
    return ["def f(a, b, items):", *(f"    {line}" for line in body)]


def broken_by(operator: str, *body: str) -> set[str]:
    mutations = mutate_function(make_function(*body))
    return {item.broken_text.strip() for item in mutations if item.operator == operator}


@pytest.mark.parametrize(
    ("operator", "line", "broken"),
    [
        ("wrong_variable", "return a", "return b"),
        ("name_typo", "return items", "return item"),
        ("name_typo", "return items", "return iitems"),
        ("keyword_swap", "return a and b", "return a or b"),
        ("keyword_swap", "return f(a, key=None)", "return f(a, key=False)"),
        ("keyword_swap", "return a", "yield a"),
        ("keyword_swap", "yield from items", "yield items"),
        ("deleted_statement", "a += 1", "pass"),
        ("deleted_statement", "items.append(a)", "pass"),
        ("unwrapped_call", "return list(items)", "return items"),
        ("comparison", "return a < b", "return a <= b"),
        ("comparison", "return a not in items", "return a in items"),
        ("arithmetic", "return (a + b) * 2", "return (a - b) * 2"),
        ("arithmetic", "return (a + b) * 2", "return (a + b) + 2"),
        ("arithmetic", "return (a + b) * 2", "return (a + b) // 2"),
        ("arithmetic", "a += b", "a -= b"),
        ("arithmetic", "return -a", "return a"),
        ("integer", "return items[0]", "return items[1]"),
        ("integer", "return a + 3", "return a + 2"),
        ("negated_condition", "return a if a > b else b", "return a if not (a > b) else b"),
        ("negated_condition", "return a if not b else b", "return a if b else b"),
        ("swapped_arguments", "return max(a, b)", "return max(b, a)"),
        ("dropped_argument", "return max(a, b)", "return max(a)"),
        ("dropped_argument", "return sorted(items, key=a)", "return sorted(items)"),
        ("wrong_method", "items.append(a)", "items.extend(a)"),
        ("wrong_method", "return min(items)", "return max(items)"),
        ("dropped_subscript", "return items[0] + a", "return items + a"),
        ("slice_bound", "return items[1:a]", "return items[:a]"),
        ("slice_bound", "return items[1:a]", "return items[a:1]"),
        ("dropped_guard", "return [x for x in items if x]", "return [x for x in items if True]"),
        ("wrong_return", "return a", "return None"),
    ],
)
def test_operator_makes_the_bug_of_its_name(operator, line, broken):
    assert broken in broken_by(operator, line)


def test_every_operator_has_an_example():
    cases = test_operator_makes_the_bug_of_its_name.pytestmark[0].args[1]
    assert {operator for operator, _, _ in cases} == set(OPERATORS)


def test_guards_of_branches_are_dropped_and_negated():
    body = ("if a > b:", "    return a", "return b")
    assert "if False:" in broken_by("dropped_guard", *body)
    assert "if not (a > b):" in broken_by("negated_condition", *body)


def test_every_operator_has_its_share():
    assert NOTICED_SHARES.keys() == OPERATORS.keys()
    assert all(share > 0 for share in NOTICED_SHARES.values())


def candidates_of(source, config=CONFIG):
    sources = Sources.read(open_repository(source), source.mutated_paths)
    return [
        item
        for make in sources.mutations_of(cover_everything(sources), config).values()
        for item in make()
    ]


@pytest.mark.parametrize("source", [WORDKIT, LEDGERKIT])
@pytest.mark.parametrize("is_plain", [True, False])
def test_mutations_change_one_line_and_parse(source, is_plain):
    repository = open_repository(source)
    found = candidates_of(source, CONFIG.model_copy(update={"plain_functions": is_plain}))
    assert len({item.candidate_id for item in found}) == len(found) > 50
    for item in found:
        (edit,) = item.edits
        lines = repository.files[item.path].decode().split("\n")
        assert lines[edit.line_number - 1] == edit.gold_text != edit.broken_text
        assert item.first_line <= edit.line_number <= item.last_line
        lines[edit.line_number - 1] = edit.broken_text
        ast.parse("\n".join(lines))


def test_mutations_have_a_fixed_order():
    function = make_function("if a > b:", "    return max(a, b)", "return items[0]")
    assert mutate_function(function) == mutate_function(function)


def test_only_small_plain_top_level_functions_take_part():
    names = {item.symbol for item in candidates_of(LEDGERKIT)}
    assert names == {"_checked", "_make_symbols", "parse_amount", "total_by_account"}
    small = CONFIG.model_copy(update={"max_function_lines": 6})
    few = {item.symbol for item in candidates_of(LEDGERKIT, small)}
    assert few == {"_make_symbols", "parse_amount", "total_by_account"}
    every = CONFIG.model_copy(update={"plain_functions": False})
    assert names < {item.symbol for item in candidates_of(LEDGERKIT, every)}
