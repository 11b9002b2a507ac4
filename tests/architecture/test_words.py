"""Words of the product: descriptions that read by themselves, one name for one thing, names of the field."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.architecture.source import list_modules, parse

# a description begins with a noun, an adjective or a verb
STUMPS = {
    "of", "that", "whose", "which", "on", "in", "by", "at", "for", "to", "with", "from", "as", "if", "when", "what",
    "who", "and", "or", "than", "not", "so", "among", "because", "per", "where",
}  # fmt: skip
# words of this house, not of the field; parts of public names are compared
HOUSE_WORDS = {
    "begun", "beside", "beat", "brought", "caught", "chance", "complain", "course", "deal", "dealt", "donor", "hear", "heard",
    "owed", "room", "said", "soften", "spooled", "standing", "standstill", "telling", "told", "untold", "wake", "walked",
}  # fmt: skip
HOUSE_NAMES = {
    "agreed_lines", "be_made", "behind_norm", "blank_out", "cut_mine", "even_out", "in_order", "lay_over", "look_turns",
    "leaves_two_readings", "matrix_holders", "own_tensors", "saw_group", "settle", "speaking_of", "take_mine", "take_share",
    "tight_birth", "weigh_layers", "works_since", "HeldState", "InOnePiece", "MadeByRun", "RunningUp",
}  # fmt: skip


def _strings(node: ast.AST) -> Iterator[str]:
    """Literal text of an expression, of the parts of a joined one too."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr) and node.values:
        yield from _strings(node.values[0])


def descriptions(path: str) -> Iterator[tuple[int, str]]:
    """Descriptions of fields, beside them and below, and help of options, with their lines."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in ("description", "help"):
                    yield from ((keyword.value.lineno, text) for text in _strings(keyword.value))
        elif isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    yield from ((below.lineno, text) for text in _strings(below.value))


def test_descriptions_begin_with_a_noun_an_adjective_or_a_verb() -> None:
    stumps = [
        f"{path}:{line}: {text[:60]}"
        for path in list_modules()
        for line, text in descriptions(path)
        if re.sub(r"[^a-z]", "", (text.split() or [""])[0].lower()) in STUMPS
    ]

    assert stumps == []


def test_no_public_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in list_modules():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)

    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def public_names(path: str) -> Iterator[tuple[int, str]]:
    """Names of classes, functions and methods, and fields of classes, with their lines."""
    for node in ast.walk(parse(path)):
        if isinstance(
            node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and not node.name.startswith("_"):
            yield node.lineno, node.name
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.lineno, item.target.id


def parts_of(name: str) -> set[str]:
    """Words of a name, in lower case: of `SlotTable` and of `slot_table`."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_public_names_hold_no_house_words() -> None:
    found = [
        f"{path}:{line} {name}"
        for path in list_modules()
        for line, name in public_names(path)
        if name in HOUSE_NAMES or parts_of(name) & HOUSE_WORDS
    ]

    assert found == []
