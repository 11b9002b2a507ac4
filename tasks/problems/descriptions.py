"""Descriptions of functions by purpose instead of name, and the prompts made from them."""

import ast
import re

from ostinato.infra.platform.syntax import parse_python

MAX_CHARACTERS = 110
MIN_WORDS = 3
_ROLE = re.compile(r":\w+:`~?\.?([^`]*)`")


def describe_functions(text: str) -> dict[str, str]:
    """Usable first sentences of a file's top-level functions, by name. Names defined twice are left out."""
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):
        return {}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [node.name for node in functions]
    found = {node.name: first_sentence(ast.get_docstring(node) or "") for node in functions}
    return {
        name: sentence
        for name, sentence in found.items()
        if is_usable(sentence, name) and names.count(name) == 1
    }


def first_sentence(docstring: str) -> str:
    """The first sentence of the first paragraph, without markup."""
    first = " ".join(docstring.strip().split("\n\n")[0].split())
    plain = _ROLE.sub(r"\1", first).replace("`", "").replace("*", "")
    return plain.split(". ")[0].rstrip(".: ")


def is_usable(sentence: str, name: str) -> bool:
    """Whether the sentence has enough words, is short, and does not name the function."""
    is_named = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sentence) is not None
    return len(sentence) <= MAX_CHARACTERS and len(sentence.split()) >= MIN_WORDS and not is_named


def write_prompt(repository: str, description: str) -> str:
    """The user's request for a problem with this description."""
    return f"This fails in {repository}: {description}"


def read_description(prompt: str) -> str:
    """The description in a prompt of `write_prompt`."""
    return prompt.partition(": ")[2]
