"""Deleted features of real size: subjects and skeletons.

A subject is everything that one group of tests alone calls, in any number of files: the group is a test class, a test
module, or the tests of one public symbol. A skeleton is a class or function of which the public signatures and
docstrings stay. Helpers, constants, imports, exports and documentation that nothing else needs are removed with either.
Names that test files use while they are imported, or that other product code uses, stay as stubs.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ostinato.infra.platform.syntax import parse_python, walk_definitions
from ostinato.infra.sandbox.inside.sources import function_of
from ostinato.tasks.problems.breaking.candidates import Candidate, LinePlan, draw_rank
from ostinato.tasks.problems.breaking.definitions import CallKey, Definition, read_names
from ostinato.tasks.problems.breaking.deletions import DeletionMaker, remove_unused_imports, stub
from ostinato.tasks.problems.breaking.mentions import remove_mentions
from ostinato.tasks.problems.config import Kind

Called = Mapping[Definition, frozenset[int]]


class FeatureMaker(DeletionMaker):
    """Maker of the large deletions of one repository."""

    def __init__(
        self,
        repository: str,
        files: Mapping[str, bytes],
        definitions: Mapping[str, Sequence[Definition]],
        tests: Mapping[str, bytes],
        *,
        documents: Mapping[str, bytes],
        lines: range,
    ) -> None:
        """`documents`: text files with documentation. `lines`: permitted numbers of changed lines."""
        super().__init__(repository, files, definitions, tests)
        self._tests = tests
        self._documents = documents
        self._lines = lines
        self._every = [item for found in definitions.values() for item in found]
        self._num_defined = Counter(item.name for item in self._every)

    def _is_unique_method(self, item: Definition) -> bool:
        is_special = item.name.startswith("__") and item.name.endswith("__")
        return not (item.is_class or is_special) and self._num_defined[item.name] == 1

    def skeletons(self, seed: int = 0) -> Iterator[Candidate]:
        """Skeletons of public classes, and of public functions with helpers, in an order drawn by the seed."""
        for root in self._public(seed):
            found = self._graph.helpers_of([root], self._named_in_tests)
            group = [root, *(item for item in found if item != root)]
            if root.is_class or len(group) > 1:
                yield from self._delete_group("skeleton", root, group, [root])

    def subjects(
        self,
        tests: Sequence[str],
        covering: Callable[[Iterable[CallKey]], list[int]],
        max_tests: int,
        seed: int = 0,
    ) -> list[Candidate]:
        """Deletions of subjects, those over several files first, then in an order drawn by the seed.

        `tests`: stable tests. `covering`: positions of the tests that call any of some functions. `max_tests`: maximum
        number of tests that call a subject.
        """
        called = {
            item: frozenset(covering(member.call_key for member in self._members(item)))
            for item in self._every
            if not item.is_method or self._is_unique_method(item)
        }
        texts = [content.decode(errors="replace") for content in self._tests.values()]
        held = frozenset(name for text in texts for name in names_at_import(text))
        groups = dict.fromkeys(found for item, found in called.items() if item.is_public)
        groups |= dict.fromkeys(_tests_by_scope(tests))
        roots = {
            tuple(item for item, found in called.items() if found and found <= wanted): wanted
            for wanted in groups
        }
        made = [
            candidate
            for group, wanted in roots.items()
            if len(frozenset[int]().union(*(called[item] for item in group))) <= max_tests
            for candidate in self._delete_subject(group, wanted, called, held)
        ]

        def rank(candidate: Candidate) -> tuple[bool, str]:
            num_files = len({block.path for block in candidate.blocks})
            return num_files == 1, draw_rank(f"{seed}", "subject", candidate.candidate_id)

        return sorted({item.candidate_id: item for item in made}.values(), key=rank)

    def _delete_subject(
        self,
        roots: Sequence[Definition],
        wanted: frozenset[int],
        called: Called,
        held: frozenset[str],
    ) -> Iterator[Candidate]:
        """Deletion of definitions that only the tests `wanted` call, with the helpers that only they use. `held`: names
        that test files use while they are imported.
        """
        if sum(item.num_lines for item in roots) > 2 * self._lines.stop:
            return
        found = self._graph.helpers_of(roots, self._named_in_tests)
        group = [item for item in found if called.get(item, frozenset()) <= wanted]
        while used := [
            item
            for item in group
            if (item.is_method or item not in roots) and self._graph.users_of(item.name, group)
        ]:
            group = [item for item in group if item not in used]
        public = [item for item in group if item.is_public]
        if not public or (len(group) < 2 and not group[0].is_class):
            return  # nothing to ask for, or a deleted function
        root = max(public, key=lambda item: (not item.is_method, item.num_lines, item.path))
        kept = [
            item
            for item in group
            if item.name in held or self._graph.users_of(item.name, group)
            if not item.is_method
        ]
        yield from self._delete_group("subject", root, group, kept)

    def _delete_group(
        self,
        operator: str,
        root: Definition,
        group: Sequence[Definition],
        kept: Sequence[Definition],
    ) -> Iterator[Candidate]:
        """The deletion of a group. `kept`: definitions of it with signatures that stay."""
        plan = LinePlan({**self._files, **self._documents})
        gone = [item for item in group if item not in kept]
        for item in kept:
            members = self._members(item)
            own = [one for one in members if one != item and self._is_own_helper(one, group)]
            gone += own
            for member in members:
                if member not in own and member.body_line and not member.is_one_liner:
                    stub(plan, member, keep_docstring=operator == "skeleton")
        for item in gone:
            first, lines = item.decorator_line, plan.lines_of(item.path)
            while first > 1 and lines[first - 2].strip().startswith("#"):
                first -= 1
            plan.remove_with_space(item.path, first, item.last_line)
        self._remove_exports(plan, gone)
        for path in sorted({item.path for item in group}):
            self._remove_constants(plan, path, group)
            remove_unused_imports(plan, path, self._trees[path], of_packages=True)
        names = {item.name for item in gone if self._num_defined[item.name] == 1}
        remove_mentions(plan, self._trees, self._documents, names)
        candidate = self._finish(plan, Kind.DELETED_FEATURE, operator, root, group)
        if candidate and candidate.draft("").num_changed_lines in self._lines:
            yield candidate

    def _is_own_helper(self, member: Definition, group: Sequence[Definition]) -> bool:
        """Whether a method is private, and nothing outside of a group and no test uses it."""
        is_private = member.name.startswith("_") and self._is_unique_method(member)
        is_used = member.name in self._named_in_tests or self._graph.users_of(member.name, group)
        return is_private and not is_used

    def _remove_constants(self, plan: LinePlan, path: str, group: Sequence[Definition]) -> None:
        """Removes assignments at the top of a module to names that only a group uses."""
        for node in self._trees[path].body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    last = node.end_lineno or node.lineno
                    own = {(path, number) for number in range(node.lineno, last + 1)}
                    is_used = not own.issuperset(self._graph.users_of(name, group))
                    is_needed = not own.issuperset(self._graph.users_of(name, ()))
                    if is_needed and not is_used and name not in self._named_in_tests:
                        plan.remove_with_space(path, node.lineno, last)
                case _:
                    pass


def _tests_by_scope(tests: Sequence[str]) -> list[frozenset[int]]:
    """Positions of the tests of each module and each class."""
    found: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for position, test in enumerate(tests):
        scopes = tuple(function_of(test).split("::")[:-1])
        for depth in range(1, len(scopes) + 1):
            found[scopes[:depth]].add(position)
    return [frozenset(positions) for positions in found.values()]


def names_at_import(text: str) -> set[str]:
    """Names that a module uses while it is imported: all but those in bodies of functions."""
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):  # test data rather than a module
        return set()
    bodies = {
        number
        for _, node in walk_definitions(tree)
        if not isinstance(node, ast.ClassDef)
        for number in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
    }
    return {name for name, line in read_names(text) if line not in bodies}
