"""Reads what a described package's functions are for, before their docstrings are taken out."""

import ast
from collections.abc import Mapping

from ostinato.infra.platform.syntax import parse_python
from ostinato.tasks.descriptions import first_sentence, is_usable
from ostinato.tasks.problems.config import DescribedSource

Descriptions = Mapping[tuple[str, str, str], str]
"""(repository, path, function) -> sentence."""


def describe_functions(
    source: DescribedSource, files: Mapping[str, bytes]
) -> dict[tuple[str, str, str], str]:
    """Sentences of the top-level functions of the files that may be broken."""
    found: dict[tuple[str, str, str], str] = {}
    for path in source.mutated_paths:
        for node in parse_python(files[path].decode()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            sentence = first_sentence(ast.get_docstring(node) or "")
            if is_usable(sentence, node.name):
                found[source.name, path, node.name] = sentence
    return found
