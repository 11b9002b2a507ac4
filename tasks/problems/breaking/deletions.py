"""Deleted functions and deleted features: working code is removed so that the rest still imports.

A function is deleted at three levels: `body` keeps signature and docstring, `signature` keeps the signature, and
`everything` keeps nothing, not even the imports that only the function used. A feature is a public symbol with the
helpers that only it used. If tests import the symbol by name, a stub of it stays, because their files could not be
collected otherwise.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ostinato.infra.platform.syntax import parse_python
from ostinato.tasks.problems.breaking.candidates import Candidate, LinePlan, draw_rank
from ostinato.tasks.problems.breaking.definitions import CallKey, Definition, NameGraph, read_names
from ostinato.tasks.problems.config import LEVELS, Kind

_PLACEHOLDER = "raise NotImplementedError"
_MIN_BODY_LINES = 2
_MIN_FEATURE_LINES = 12


class DeletionMaker:
    """Maker of the deletion candidates of one repository."""

    def __init__(
        self,
        repository: str,
        files: Mapping[str, bytes],
        definitions: Mapping[str, Sequence[Definition]],
        tests: Mapping[str, bytes],
    ) -> None:
        """`files`: product code that may be broken. `tests`: test files, which may import it by name."""
        self._repository = repository
        self._files = files
        self._definitions = definitions
        self._graph = NameGraph(files, definitions)
        self._trees = {path: parse_python(files[path]) for path in sorted(files)}
        texts = [content.decode(errors="replace") for content in tests.values()]
        self._named_in_tests = frozenset(name for text in texts for name, _ in read_names(text))
        self._imported = frozenset(name for text in texts for name in _imported_names(text))

    def functions(self, seed: int = 0, levels: Sequence[str] = LEVELS) -> Iterator[Candidate]:
        """Deletions of every function that is large enough, at each level, in an order drawn by the seed."""
        found = [
            (definition, level)
            for definitions in self._definitions.values()
            for definition in definitions
            for level in levels
            if not definition.is_class
        ]
        found.sort(key=lambda item: draw_rank(f"{seed}", *_place(item[0]), item[1]))
        for definition, level in found:
            if self._body_lines(definition) >= _MIN_BODY_LINES:
                candidate = self._delete(definition, level)
                if candidate is not None:
                    yield candidate

    def features(self, seed: int = 0) -> Iterator[Candidate]:
        """Deletions of every public symbol with its own helpers, in an order drawn by the seed."""
        for definition in self._public(seed):
            candidate = self._delete_feature(definition)
            if candidate is not None:
                yield candidate

    def _public(self, seed: int) -> list[Definition]:
        """Public definitions, in an order drawn by the seed."""
        found = [item for some in self._definitions.values() for item in some if item.is_public]
        return sorted(found, key=lambda item: draw_rank(f"{seed}", *_place(item)))

    def _body_lines(self, definition: Definition) -> int:
        if definition.is_one_liner or not definition.body_line:
            return 0
        lines = self._files[definition.path].decode().split("\n")
        body = lines[definition.body_line - 1 : definition.last_line]
        return sum(1 for line in body if line.strip() and not line.strip().startswith("#"))

    def _delete(self, definition: Definition, level: str) -> Candidate | None:
        plan = LinePlan(self._files)
        if level == "everything":
            is_used = bool(self._graph.users_of(definition.name, [definition]))
            is_imported = not definition.is_method and definition.name in self._imported
            if is_used or is_imported:
                return None  # the deletion would break an import or code outside the problem
            self._remove(plan, [definition])
        elif level == "signature" and not definition.docstring_line:
            return None  # the same as `body`
        else:
            stub(plan, definition, keep_docstring=level == "body")
        return self._finish(plan, Kind.DELETED_FUNCTION, level, definition, [definition])

    def _delete_feature(self, root: Definition) -> Candidate | None:
        found = self._graph.helpers_of([root], self._named_in_tests)
        helpers = [item for item in found if item != root]
        group = [root, *helpers]
        if sum(item.num_lines for item in group) < _MIN_FEATURE_LINES:
            return None
        if not helpers and not root.is_class:
            return None  # this would be a deleted function
        plan = LinePlan(self._files)
        must_stay = root.name in self._imported or self._graph.users_of(root.name, group)
        if must_stay:
            for definition in self._members(root):
                if not definition.is_one_liner and definition.body_line:
                    stub(plan, definition, keep_docstring=True)
            self._remove(plan, helpers)
        else:
            self._remove(plan, group)
        return self._finish(
            plan, Kind.DELETED_FEATURE, "stub" if must_stay else "whole", root, group
        )

    def _members(self, root: Definition) -> list[Definition]:
        """The functions of a class, or the function itself."""
        if not root.is_class:
            return [root]
        inside = f"{root.qualified_name}."
        return [
            item
            for item in self._definitions[root.path]
            if item.qualified_name.startswith(inside) and not item.is_class
        ]

    def _remove(self, plan: LinePlan, group: Sequence[Definition]) -> None:
        for definition in group:
            plan.remove_with_space(definition.path, definition.decorator_line, definition.last_line)
        self._remove_exports(plan, group)
        for path in sorted({item.path for item in group}):
            remove_unused_imports(plan, path, self._trees[path])

    def _remove_exports(self, plan: LinePlan, group: Sequence[Definition]) -> None:
        names = frozenset(item.name for item in group if not item.is_method)
        for path, tree in self._trees.items():
            _remove_exports(plan, path, tree, names)

    def _finish(
        self,
        plan: LinePlan,
        kind: Kind,
        operator: str,
        root: Definition,
        group: Sequence[Definition],
    ) -> Candidate | None:
        blocks = plan.blocks()
        if not blocks or not plan.parses():
            return None
        touched: dict[CallKey, None] = {}
        for definition in group:
            for member in self._members(definition):
                touched.setdefault(member.call_key)
        return Candidate.at(
            root,
            repository=self._repository,
            kind=kind,
            operator=operator,
            blocks=blocks,
            touched=tuple(touched),
        )


def _place(definition: Definition) -> tuple[str, str, str]:
    return (definition.path, definition.qualified_name, str(definition.first_line))


def stub(plan: LinePlan, definition: Definition, *, keep_docstring: bool) -> None:
    first = definition.body_line
    if not keep_docstring and definition.docstring_line:
        first = definition.docstring_line
    text = " " * definition.body_indent + _PLACEHOLDER
    plan.replace(definition.path, first, definition.last_line, (text,))


def _imported_names(text: str) -> set[str]:
    """Names that the top-level statements `from MODULE import NAME` of a file import."""
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):  # test data rather than a module
        return set()
    return {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def _remove_exports(plan: LinePlan, path: str, tree: ast.Module, names: frozenset[str]) -> None:
    """Removes names from top-level imports and `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            gone = [alias for alias in node.names if alias.name in names]
            _remove_elements(plan, path, node, gone, len(node.names))
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and _assigns_all(node):
            value = node.value
            if isinstance(value, (ast.List, ast.Tuple)):
                gone = [
                    item
                    for item in value.elts
                    if isinstance(item, ast.Constant) and item.value in names
                ]
                _remove_elements(plan, path, node, gone, 0)


def _assigns_all(node: ast.Assign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _remove_elements(
    plan: LinePlan,
    path: str,
    node: ast.stmt,
    gone: Sequence[ast.alias | ast.expr],
    num_elements: int,
) -> None:
    """Removes elements of a statement. Elements on lines of their own are cut, otherwise the statement is rewritten.
    `num_elements`: if as many are removed, the whole statement is.
    """
    if not gone:
        return
    last = node.end_lineno or node.lineno
    if len(gone) == num_elements:
        plan.replace(path, node.lineno, last)
        return
    lines = plan.lines_of(path)
    have_own_lines = all(
        item.lineno == item.end_lineno
        and lines[item.lineno - 1].strip().rstrip(",")
        == lines[item.lineno - 1][item.col_offset : item.end_col_offset]
        for item in gone
    )
    if have_own_lines:
        for item in gone:
            plan.replace(path, item.lineno, item.lineno)
        return
    kept = copy.copy(node)
    if isinstance(node, ast.ImportFrom) and isinstance(kept, ast.ImportFrom):
        kept.names = [alias for alias in node.names if alias not in gone]
    elif isinstance(kept, (ast.Assign, ast.AugAssign)) and isinstance(
        kept.value, (ast.List, ast.Tuple)
    ):
        kept.value = copy.copy(kept.value)
        kept.value.elts = [item for item in kept.value.elts if item not in gone]
    plan.replace(path, node.lineno, last, ast.unparse(kept).split("\n"))


def remove_unused_imports(
    plan: LinePlan, path: str, tree: ast.Module, *, of_packages: bool = False
) -> None:
    """Removes imports that only removed lines used, because they would reveal the removed code. `of_packages`: also
    whole modules in `__init__.py`, where imported names may be exports.
    """
    is_package = path.endswith("__init__.py")
    if (is_package and not of_packages) or not plan.parses():
        return
    text = "\n".join(plan.lines_of(path))
    before = Counter(name for name, _ in read_names(text))
    after = Counter(name for name, _ in read_names(plan.text_of(path)))
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or plan.is_changed(path, node.lineno):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        if is_package and isinstance(node, ast.ImportFrom):
            continue
        gone = [
            alias
            for alias in node.names
            if after[_bound_name(alias)] == 1 < before[_bound_name(alias)]
        ]
        if isinstance(node, ast.ImportFrom) or len(gone) == len(node.names):
            _remove_elements(plan, path, node, gone, len(node.names))


def _bound_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]
