"""Entry points through which installed packages add environments, tools, rewards, dialects, trackers and more."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, SupportsFloat

from ostinato.infra.platform.errors import ConfigError, GradingError

_MAX_TERM = 1e6  # bound on a package's term of the reward, so that squares of rewards stay finite
VERIFIERS = "verifiers:"  # prefix of the names of environments of the package verifiers


def verifiers_module(name: str) -> str:
    """The module from which verifiers loads the environment of this name."""
    return name.removeprefix(VERIFIERS).rpartition("/")[2].replace("-", "_")


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """Named extensions of one kind: those of this project and those of installed packages.

    Names are read from package metadata; nothing is imported before `load`.
    """

    group: str  # of entry points, such as ostinato.tools
    noun: str
    built_in: Mapping[str, str]  # name -> module:object
    families: frozenset[str] = frozenset()
    """names of functions: FAMILY:NAME is the object that the function FAMILY returns for NAME"""

    @property
    def names(self) -> tuple[str, ...]:
        """Every known name, this project's own first."""
        return tuple(self._entries())

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Raises ValueError for a name that nothing provides."""
        known = self.names
        for name in names:
            family, is_inner, _ = name.partition(":")
            if name not in known and not (is_inner and family in self.families):
                raise ValueError(
                    f"{self.noun} is {name!r}, wanted one of {', '.join(known) or 'none installed'};"
                    f" packages add more through the entry point group {self.group!r}"
                )

    def known(self, name: str) -> str:
        """The name, if something provides it. ValueError otherwise. The validator of a setting."""
        self.refuse_unknown([name])
        return name

    def load(self, name: str) -> Any:
        """The object behind a name. ConfigError when there is none."""
        try:
            self.refuse_unknown([name])
        except ValueError as error:
            raise ConfigError(str(error)) from None
        entries = self._entries()
        family, _, inner = name.partition(":")
        entry = entries[name] if name in entries else entries[family]
        try:
            return entry.load() if name in entries else entry.load()(inner)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.noun} {name!r} is {entry.value!r} in group {self.group!r}, "
                f"which cannot be imported: {error}"
            ) from error

    def _entries(self) -> dict[str, EntryPoint]:
        installed = installed_entries(self.group)
        for name in installed.keys() & self.built_in.keys():
            raise ConfigError(
                f"{self.noun} {name!r} of an installed package ({installed[name].value}) has the "
                f"name of a built-in one, wanted another name"
            )
        own = {name: EntryPoint(name, value, self.group) for name, value in self.built_in.items()}
        return own | installed


@cache
def installed_entries(group: str) -> dict[str, EntryPoint]:
    """Entry points of installed packages by name, sorted. ConfigError for two with the same name."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two installed packages name a plug-in {entry.name!r} in group {group!r}: "
                f"{other.value} and {entry.value}"
            )
    return found


def bounded_number(what: str, value: object, weight: float = 1.0) -> float:
    """A number that a package measured. GradingError unless it is finite and bounded times its weight. Weight 0: any
    finite number, such as a metric that no reward counts.
    """
    if not isinstance(value, SupportsFloat):
        raise GradingError(f"{what} is {value!r:.200}, wanted a number")
    number = float(value)
    if not abs(weight * number) <= _MAX_TERM:
        raise GradingError(
            f"{what} is {number!r} times weight {weight!r}, wanted a number "
            f"between {-_MAX_TERM:g} and {_MAX_TERM:g}"
        )
    return number
