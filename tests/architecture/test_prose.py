"""Docstrings name the thing: a class docstring is a noun phrase, not an embedded question. Documents use plain sentences."""

import ast
import re

from tests.architecture.source import ROOT, list_files, list_modules, parse

QUESTION = re.compile(r"(What|Who|Whose|Where|How|Whether|Which|When|Why)\b")
BENT = re.compile(r"\b(whose|stands|so\s+does)\b", re.IGNORECASE)
DOCUMENT = re.compile(r"(README|SECURITY|docs/(?!lab-log)[^/]+)\.md")


def _class_docstrings() -> list[tuple[str, str]]:
    """Place and text of every class docstring of the packages."""
    return [
        (f"{name}:{node.lineno} {node.name}", text)
        for name in list_modules()
        for node in ast.walk(parse(name))
        if isinstance(node, ast.ClassDef) and (text := ast.get_docstring(node))
    ]


def test_no_class_docstring_is_a_question() -> None:
    found = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in _class_docstrings()
        if QUESTION.match(text)
    ]

    assert found == [], "write a noun phrase that names the thing"


def test_no_module_docstring_lists_what_enters_and_leaves() -> None:
    chant = re.compile(r"^(Owns|Enters|Leaves)\b", re.MULTILINE)

    assert [
        name
        for name in list_modules(with_tests=True)
        if chant.search(ast.get_docstring(parse(name)) or "")
    ] == []


def test_documents_use_plain_sentences() -> None:
    """In README, SECURITY and the pages of docs/. The lab log and decisions are records of their day."""
    documents = [name for name in list_files() if DOCUMENT.fullmatch(name)]
    texts = {name: (ROOT / name).read_text() for name in documents}
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in texts.items()
        for match in BENT.finditer(text)
    ]

    assert len(texts) > 10
    assert found == [], "write a plain sentence: subject, verb, object"
