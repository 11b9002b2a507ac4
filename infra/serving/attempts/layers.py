"""The files of a program, installed once per machine and mounted read-only in its boxes at /harness."""

import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from ostinato.infra.agent.harnesses import HarnessCommand
from ostinato.infra.platform.packages import install_npm_packages, install_packages
from ostinato.infra.sandbox.memory import key_of, prepare


def install_program(program: HarnessCommand) -> Path | None:
    """The folder of a program, which is installed if needed. None: the program has no packages."""
    wanted = (*program.packages, *program.npm_packages)
    if not wanted:
        return None

    def fill(folder: Path) -> None:
        if program.packages:
            install_packages(
                program.packages, folder / "site", with_dependencies=program.with_dependencies
            )
        if program.npm_packages:
            install_npm_packages(program.npm_packages, folder)

    name = re.sub(r"[^a-z0-9]+", "-", wanted[0].lower()).strip("-")
    key = key_of(sys.version.split()[0], str(program.with_dependencies), *wanted)
    return prepare(f"harness-{name}", key, fill)


def paths_installed_by(program: HarnessCommand, paths: Iterable[str]) -> set[str]:
    """The paths that belong to a package which the program installs too. In the installed copy an agent would find
    the code that a problem removed from such a file.
    """
    layer = install_program(program)
    if layer is None or not (layer / "site").is_dir():
        return set()
    installed = {place.name.removesuffix(".py") for place in (layer / "site").iterdir()}
    return paths_of(installed, paths)


def paths_of(packages: Collection[str], paths: Iterable[str]) -> set[str]:
    """The paths that belong to one of the packages, by its import name."""
    named = {*packages}
    return {path for path in paths if named & {*Path(path.removesuffix(".py")).parts}}
