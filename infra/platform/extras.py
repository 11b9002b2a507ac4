"""Extras of the installation: which of them brings a package, and the text that names it where the package is missing.

Without extras the installation operates: commands, Prefect's server and worker, dashboard, boxes and the ledger.
"""

from importlib.util import find_spec

from ostinato.infra.platform.errors import ConfigError

_PACKAGES = {"serve": ("torch", "numba"), "train": ("torch", "numba", "megatron")}


def explain_missing(package: str) -> str:
    """Which extra brings a package that is not installed. Empty if none does."""
    extras = [extra for extra, packages in _PACKAGES.items() if package in packages]
    return say_missing(package, extras[0]) if extras else ""


def find_missing(extra: str) -> str:
    """Which package of `serve` or `train` is not installed. Empty if all are. Imports none of them."""
    missing = [package for package in _PACKAGES[extra] if find_spec(package) is None]
    return say_missing(missing[0], extra) if missing else ""


def require_extra(extra: str) -> None:
    """Raises ConfigError if a package of `serve` or `train` is not installed."""
    if missing := find_missing(extra):
        raise ConfigError(missing)


def say_missing(package: str, extra: str) -> str:
    """The text of an error without a package."""
    return f"{package} is not installed; `pip install 'ostinato[{extra}]'` brings it"
