"""Bugs with one cause: two to five places in several functions, the same idea in each, and all files still parse."""

import ast

from ostinato.tasks.problems.breaking.definitions import read_definitions
from ostinato.tasks.problems.breaking.multi_place import find_multi_place
from ostinato.tasks.problems.config import Kind

FILES = {
    "kit/box.py": b"""class Box:
    def __init__(self, limit):
        self.limit = limit
        self.items = []

    def put(self, item):
        if len(self.items) >= self.limit:
            raise ValueError(item)
        self.items.append(item)

    def fill(self, items):
        while len(self.items) < self.limit:
            self.put(next(items))

    def reset(self):
        self.items = []
        return describe(self.limit, 86400)


def describe(limit, seconds):
    return {"limit": limit, "seconds": seconds}
""",
    "kit/page.py": b"""from kit.box import describe


def day(number):
    return describe(number, 86400)


def entry(name):
    row = {}
    row["limit"] = name
    return row


def show(row):
    return row["limit"], row.get("seconds")
""",
}


def find(seed: int = 0):
    definitions = [item for found in read_definitions(FILES).values() for item in found]
    lines = {path: text.decode().split("\n") for path, text in FILES.items()}
    return list(find_multi_place("kit", definitions, lines.__getitem__, seed))


def texts_of(operator: str) -> list[set[tuple[str, str]]]:
    found = [item for item in find() if item.operator == operator]
    return [
        {(edit.gold_text.strip(), edit.broken_text.strip()) for edit in item.edits}
        for item in found
    ]


def test_every_candidate_is_one_cause_in_several_functions() -> None:
    found = find()
    assert {item.kind for item in found} == {Kind.MULTI_PLACE}
    assert len({item.candidate_id for item in found}) == len(found)
    for item in found:
        assert 2 <= len(item.edits) <= 5
        assert len({(edit.path, edit.line_number) for edit in item.edits}) == len(item.edits)
        assert len(item.touched) >= 2
        for text in item.broken_files(FILES).values():
            ast.parse(text)


def test_a_value_is_wrong_wherever_it_is_used() -> None:
    assert {
        ("return describe(self.limit, 86400)", "return describe(self.limit, 86401)"),
        ("return describe(number, 86400)", "return describe(number, 86401)"),
    } in texts_of("integer")


def test_a_key_is_renamed_where_it_is_written_and_not_where_it_is_read() -> None:
    assert {
        (
            'return {"limit": limit, "seconds": seconds}',
            'return {"limits": limit, "seconds": seconds}',
        ),
        ('row["limit"] = name', 'row["limits"] = name'),
    } in texts_of("renamed_key")
    assert ("self.items = []", "self.item = []") in texts_of("renamed_attribute")[0]


def test_parameters_are_swapped_in_the_definition_and_its_calls() -> None:
    (changes,) = texts_of("swapped_arguments")
    assert ("def describe(limit, seconds):", "def describe(seconds, limit):") in changes
    assert ("return describe(number, 86400)", "return describe(86400, number)") in changes
    assert len(changes) == 3


def test_bugs_over_several_files_come_first_and_the_seed_draws_the_order() -> None:
    for operator in ("integer", "renamed_key"):
        counts = [
            len({edit.path for edit in item.edits}) for item in find() if item.operator == operator
        ]
        assert counts == sorted(counts, reverse=True)
    orders = [[item.candidate_id for item in find(seed)] for seed in range(6)]
    assert orders[0] == [item.candidate_id for item in find(0)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
