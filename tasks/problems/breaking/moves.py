"""Moves a function or class to another module and changes the imports of its users.

Only definitions move that nothing else in their module uses, and that use no other name of it than imports which the
other module has as well.
"""

import ast
import builtins
import re
import symtable
from collections.abc import Mapping, Sequence

from ostinato.infra.platform.syntax import module_names
from ostinato.infra.sandbox.repository import module_of
from ostinato.tasks.problems.breaking.candidates import LinePlan
from ostinato.tasks.problems.breaking.definitions import Definition
from ostinato.tasks.problems.breaking.name_uses import NameUses, resolve_import


def move_symbol(
    plan: LinePlan, item: Definition, paths: Sequence[str], texts: Mapping[str, str], uses: NameUses
) -> str:
    """Plans the move of a definition to the first of `paths` that can hold it. Returns this path. Empty: there is none."""
    name, home = item.name, module_of(item.path)
    # a test may replace `MODULE.NAME`, given as text, and a document may name it
    dotted = re.compile(rf"\b{home.rpartition('.')[2]}\.{name}\b")
    own = texts[item.path].split("\n")[item.decorator_line - 1 : item.last_line]
    others = texts[item.path].replace("\n".join(own), "", 1)
    is_named = any(dotted.search(text) for text in texts.values() if name in text)
    if is_named or re.search(rf"\b{name}\b", others) or item.path.endswith("__init__.py"):
        return ""
    imports = _imports_of(item.path, uses.trees[item.path])
    used = _globals_of(symtable.symtable("\n".join(own), item.path, "exec")) - {name}
    needed = {local: imports.get(local, "") for local in used.difference(dir(builtins))}
    for path in paths:
        has = _imports_of(path, uses.trees[path])
        # a module that imports the name would need it back, so that its old place could not be told from an alias
        is_free = name not in module_names(texts[path])
        fits = all(source and has.get(local) == source for local, source in needed.items())
        is_place = path != item.path and not path.endswith("__init__.py")
        if is_place and is_free and fits and _redirect(plan, item, path, uses):
            plan.remove_with_space(item.path, item.decorator_line, item.last_line)
            last = texts[path].rstrip().count("\n") + 1
            end = texts[path].count("\n") + 1
            plan.replace(path, last, end, (plan.lines_of(path)[last - 1], "", "", *own, ""))
            return path
    return ""


def _imports_of(path: str, tree: ast.Module) -> dict[str, str]:
    """`MODULE:NAME` or `MODULE:` of each import at the top of a file, by local name."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                is_name = isinstance(node, ast.ImportFrom)
                source = f"{resolve_import(path, node)}:{alias.name}" if is_name else alias.name
                found[alias.asname or alias.name] = source
    return found


def _globals_of(table: symtable.SymbolTable) -> set[str]:
    """Names of the module that a definition and its inner scopes use."""
    is_module = table.get_type() == "module"
    found = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (is_module or symbol.is_global())
    }
    return found.union(*map(_globals_of, table.get_children()))


def _redirect(plan: LinePlan, item: Definition, target: str, uses: NameUses) -> bool:
    """Plans the changes of all imports of a definition from its module. False: not every import has lines of its own."""
    changes: list[tuple[str, int, int, list[str]]] = []
    for path, source in sorted(uses.imported[item.name]):
        for node in ast.walk(uses.trees[path]) if source == module_of(item.path) else ():
            if not isinstance(node, ast.ImportFrom) or resolve_import(path, node) != source:
                continue
            moved = [alias for alias in node.names if alias.name == item.name]
            if not moved:
                continue
            rest = [alias for alias in node.names if alias.name != item.name]
            made = [ast.ImportFrom(node.module, rest, node.level)] if rest else []
            if path != target:
                made.append(ast.ImportFrom(module_of(target), moved, 0))
            first, last = node.lineno, node.end_lineno or node.lineno
            margin = plan.lines_of(path)[first - 1][: node.col_offset]
            if margin.strip() or ";" in plan.lines_of(path)[last - 1] or (margin and not made):
                return False
            changes.append((path, first, last, [margin + ast.unparse(it) for it in made]))
    for path, first, last, lines in changes:
        plan.replace(path, first, last, lines)
    return True
