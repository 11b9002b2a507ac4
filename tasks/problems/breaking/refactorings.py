"""Refactorings, made backwards: the agent finds a public function or class under another name or in another module.

The prepared repository is the state after the refactoring. Its tests judge, and the agent sees them changed with the code,
as are comments, docstrings, `__all__` and documents. A definition is left out if any use of its name could mean
something else: an attribute of an unknown object, a variable, a text that is not a docstring.
"""

import ast
import builtins
import io
import itertools
import keyword
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from ostinato.infra.sandbox.repository import PreparedRepository, module_of
from ostinato.tasks.problems.breaking.candidates import Candidate, LinePlan, draw_rank
from ostinato.tasks.problems.breaking.definitions import Definition
from ostinato.tasks.problems.breaking.moves import move_symbol
from ostinato.tasks.problems.breaking.name_uses import NameUses
from ostinato.tasks.problems.config import Kind, PromptLevel

_DOCUMENTS = (".md", ".rst", ".txt")
_METADATA = ("METADATA", "PKG-INFO", "RECORD")  # written by the build, not by an author
_MAX_MADE = 400  # candidates made of one repository
_LEAST_FILES, _LEAST_LINES = 2, 20  # of a refactoring that is worth an agent
_WORD = re.compile(r"[^\W\d]\w*")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SYNONYMS = tuple(
    row.split()
    for row in (
        "parse read load", "dump write save", "make build create", "find search locate", "get fetch obtain",
        "convert transform translate", "check verify validate", "format render", "split divide", "join merge combine",
        "remove delete drop", "add insert append", "count tally", "strip trim", "wrap fold", "compute calculate",
        "start begin", "end finish", "error failure", "text string", "item element entry", "list sequence", "size length",
        "default fallback", "config settings", "path location", "pad fill", "show display", "run execute", "update refresh",
        "encode pack", "decode unpack", "group cluster", "filter select", "iter iterate", "word term", "key label",
    )
)  # fmt: skip
_REQUESTS: dict[PromptLevel, tuple[str, str]] = {
    PromptLevel.DETAILED: (
        "Rename `{old}` in {path} to `{new}` everywhere: code, tests, comments and documents. Leave no alias "
        "under the old name, and change nothing else.",
        "Move `{new}` from {old_path} to {path} and import it from there everywhere, also in the tests. Nothing of it "
        "may stay in the old module, and its behaviour must not change.",
    ),
    PromptLevel.TERSE: (
        "rename {old} to {new} everywhere, no alias",
        "move {new} from {old_path} to {path}, nothing stays behind",
    ),
    PromptLevel.VAGUE: (
        "`{old}` is a misleading name, I want it to be `{new}`. Please change it throughout, without an alias.",
        "`{new}` does not belong in {old_path}. It should be in {path}, without a trace in the old module.",
    ),
}  # fmt: skip
RENAME, MOVE = "rename", "move"


class RefactoringMaker:
    """Maker of the refactoring candidates of one repository."""

    def __init__(
        self, repository: PreparedRepository, definitions: Mapping[str, Sequence[Definition]]
    ) -> None:
        """`definitions`: those that may be renamed or moved, by path."""
        self._repository = repository
        self._definitions = definitions
        self._texts = _read_texts(repository.files)

    @cached_property
    def _uses(self) -> NameUses:
        return NameUses.read({p: text for p, text in self._texts.items() if p.endswith(".py")})

    @cached_property
    def _words(self) -> frozenset[str]:
        found = (_WORD.findall(text) for text in (*self._texts, *self._texts.values()))
        return frozenset(itertools.chain.from_iterable(found)) | frozenset(dir(builtins))

    def candidates(self, seed: int = 0) -> Iterator[Candidate]:
        """Renames and moves in turn, in an order drawn by the seed. Of either, those of several files of code and of 20
        or more changed lines come first.
        """
        counts = Counter(item.name for found in self._definitions.values() for item in found)
        found = [
            (draw_rank(f"{seed}", item.path, item.name, operator), item, operator)
            for items in self._definitions.values()
            for item in items
            for operator in (RENAME, MOVE)
            if item.is_public and not item.is_method and counts[item.name] == 1
        ]
        made = (
            candidate
            for rank, item, operator in sorted(found, key=lambda entry: entry[0])
            if (candidate := self._refactor(item, operator, rank)) is not None
        )
        ordered = sorted(itertools.islice(made, _MAX_MADE), key=_is_small)
        renames = [candidate for candidate in ordered if candidate.operator == RENAME]
        moves = [candidate for candidate in ordered if candidate.operator == MOVE]
        for pair in itertools.zip_longest(renames, moves):
            yield from (candidate for candidate in pair if candidate is not None)

    def _refactor(self, item: Definition, operator: str, rank: str) -> Candidate | None:
        name, module = item.name, module_of(item.path)
        is_module = any(name in path.removesuffix(".py").split("/") for path in self._texts)
        if is_module or not self._uses.is_clear(name, module):
            return None
        plan = LinePlan(self._repository.files)
        if operator == RENAME:
            old_name, old_path = self._propose_name(item, rank), item.path
            is_made = old_name != "" and self._rename(plan, name, old_name)
        else:
            paths = sorted(self._definitions, key=lambda path: draw_rank(rank, path))
            old_path = move_symbol(plan, item, paths, self._texts, self._uses)
            old_name, is_made = name, old_path != ""
        if not is_made:
            return None
        blocks, is_editable = plan.blocks(), self._repository.is_editable
        paths = sorted({block.path for block in blocks})
        return Candidate.at(
            item,
            repository=self._repository.name,
            kind=Kind.REFACTORING,
            operator=operator,
            blocks=tuple(block for block in blocks if is_editable(block.path)),
            adapted_tests=tuple(block for block in blocks if not is_editable(block.path)),
            facts={"old_path": old_path, "old_name": old_name},
            touched=tuple(self._keys_of(item)),
            test_files=tuple(path for path in paths if self._repository.is_test(path)),
        )

    def _keys_of(self, item: Definition) -> Iterator[tuple[str, int, str]]:
        """Keys of a function, or of the methods of a class."""
        inside = f"{item.qualified_name}."
        for other in self._definitions[item.path]:
            if other == item or other.qualified_name.startswith(inside):
                yield other.call_key

    def _propose_name(self, item: Definition, rank: str) -> str:
        """A plausible name that occurs nowhere in the repository, drawn by the rank. Empty: there is none."""
        endings = (
            ["Object"]
            if item.is_class
            else [
                f"_{node.args.args[0].arg}"
                for node in self._uses.trees[item.path].body
                if isinstance(node, ast.FunctionDef) and node.name == item.name and node.args.args
            ]
        )
        for name in propose_names(item.name, endings, rank):
            if name.isidentifier() and not keyword.iskeyword(name) and name not in self._words:
                return name
        return ""

    def _rename(self, plan: LinePlan, name: str, new: str) -> bool:
        """Plans another name in all uses. False: some text may mean the symbol, and the plan is not whole."""
        pattern = _pattern_of(name)
        for path, text in self._texts.items():
            if name not in text or path.endswith(_METADATA):
                continue
            if path in self._uses.trees:
                renamed = _rename_tokens(text, self._uses.trees[path], name, new)
            elif path.endswith(_DOCUMENTS) and ".dist-info/" not in path:
                renamed = pattern.sub(new, text)
            else:  # the form of the file is unknown, or it holds entry points
                renamed = None if re.search(rf"\b{name}\b", text) else text
            if renamed is None:
                return False
            for number, line in enumerate(renamed.split("\n"), 1):
                if line != plan.lines_of(path)[number - 1]:
                    plan.replace(path, number, number, (line,))
        return True


def _read_texts(files: Mapping[str, bytes]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path, content in files.items():
        try:
            texts[path] = content.decode()
        except UnicodeDecodeError:  # compiled modules and other data
            continue
    return texts


def _is_small(candidate: Candidate) -> tuple[bool, bool]:
    blocks = (*candidate.blocks, *candidate.adapted_tests)
    num_lines = sum(max(len(block.gold_lines), len(block.broken_lines)) for block in blocks)
    num_files = len({block.path for block in candidate.blocks})
    return num_files < _LEAST_FILES, num_lines < _LEAST_LINES


def propose_names(name: str, endings: Sequence[str], seed: str) -> Iterator[str]:
    """Other names for a name: synonyms of its words in drawn order, two words swapped, the endings added."""
    is_camel = "_" not in name and not name.islower()
    words = _PARTS.findall(name) if is_camel else name.split("_")
    join = ("" if is_camel else "_").join
    if join(words) != name:
        return
    found: list[str] = []
    for place, word in enumerate(words):
        for row in _SYNONYMS:
            for other in row if word.lower() in row else ():
                spelled = other.capitalize() if word[:1].isupper() else other
                found.append(join([*words[:place], spelled, *words[place + 1 :]]))
    yield from sorted(set(found) - {name}, key=lambda other: draw_rank(seed, other))
    if len(words) == 2 and not is_camel:
        yield join(words[::-1])
    yield from (f"{name}{ending}" for ending in endings)


def _pattern_of(name: str) -> re.Pattern[str]:
    """The name in prose. A name of one plain word counts only as code: in backquotes, or called."""
    if "_" in name or not name.islower():
        return re.compile(rf"\b{name}\b")
    return re.compile(rf"(?<=`){name}(?=[`(])|(?<=\.){name}\b|\b{name}(?=\()")


def _rename_tokens(text: str, tree: ast.Module, name: str, new: str) -> str | None:
    """The file with another name. None: a text other than a docstring or an entry of `__all__` may mean it."""
    documented, exported = _places_of_texts(tree)
    pattern = _pattern_of(name)
    lines = io.StringIO(text).readlines()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return None
    starts = [0, *itertools.accumulate(map(len, lines))]
    parts: list[str] = []
    done = 0
    for token in tokens:
        if name not in token.string or token.type in (tokenize.NEWLINE, tokenize.NL):
            continue
        if token.type == tokenize.NAME:
            renamed = new if token.string == name else token.string
        elif token.type == tokenize.COMMENT or token.start in documented:
            renamed = pattern.sub(new, token.string)
        elif token.start in exported:
            renamed = re.sub(rf"\b{name}\b", new, token.string)
        elif re.search(rf"\b{name}\b", token.string):
            return None
        else:
            continue
        start = starts[token.start[0] - 1] + token.start[1]
        parts += [text[done:start], renamed]
        done = start + len(token.string)
    return "".join([*parts, text[done:]])


def _places_of_texts(tree: ast.Module) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Places of strings that are statements, such as docstrings, and of the entries of `__all__`."""
    documented: set[tuple[int, int]] = set()
    exported: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented.add((node.lineno, node.col_offset))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(it, ast.Name) and it.id == "__all__" for it in targets):
                parts = (part for part in ast.walk(node.value) if isinstance(part, ast.Constant))
                exported.update((part.lineno, part.col_offset) for part in parts)
    return documented, exported


def write_request(candidate: Candidate, level: PromptLevel) -> str:
    """The prompt of a refactoring. Every wording names the old and the new place, since nobody could guess them. The
    wordings `place` and `described` are detailed.
    """
    request = _REQUESTS.get(level, _REQUESTS[PromptLevel.DETAILED])[candidate.operator == MOVE]
    return request.format(
        old=candidate.facts["old_name"],
        old_path=candidate.facts["old_path"],
        new=candidate.symbol,
        path=candidate.path,
    )
