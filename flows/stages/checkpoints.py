"""Checkpoints by the names that people type: champion, newest, kind/name@version.

Does not import Prefect, so that the command line can refuse a wrong name before it starts anything.
"""

from ostinato.flows.recipe import Recipe
from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts, open_artifacts
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.settings import Settings

CHAMPION, NEWEST = "champion", "newest"
PROBLEM_KINDS = ("problems", "environments")
KINDS = (
    "pretrained",
    "drafted",
    "reinforced",
    "derived",
    "candidate",
    "checkpoint",
)  # have weights
_DERIVED = "derived"  # kind of the checkpoints of added stages
_TRAINED = "reinforced"  # kind of the checkpoint that a recipe's chain ends with


def checkpoint_named(
    recipe: Recipe, ledger: Ledger, artifacts: Artifacts, reference: str
) -> ArtifactRef:
    """The checkpoint of a reference: `champion` of the recipe's serving line, the recipe's `newest`,
    or kind/name@version. When it is missing, ConfigError says how to make one; nothing is trained.
    """
    if reference == CHAMPION:
        return artifacts.get(champion_id(ledger, line_of(recipe)))
    if reference == NEWEST:
        return _with_added_stages(artifacts.get(_newest(recipe.name, ledger)), ledger, artifacts)
    ref = artifacts.get(reference)
    if ref.kind not in KINDS:
        raise ConfigError(
            f"artifact {reference!r} has no weights, wanted one of the kinds {', '.join(KINDS)}"
        )
    return ref


def refuse_unknown(settings: Settings, recipe: Recipe, references: list[str]) -> None:
    """Raises ConfigError when one of the checkpoints does not exist."""
    ledger = open_ledger(settings)
    artifacts = open_artifacts(settings, ledger)
    for reference in references:
        checkpoint_named(recipe, ledger, artifacts, reference)


def line_of(recipe: Recipe) -> str:
    """Serving line of a recipe. ConfigError when it has none."""
    if recipe.serving.line is None:
        raise ConfigError(
            f"recipe {recipe.name!r} has no serving line, so its checkpoints are never "
            'served; wanted `[serving]` with `line = "NAME"` in the recipe itself'
        )
    return recipe.serving.line


def champion_id(ledger: Ledger, line: str) -> str:
    """Reference of the checkpoint that a line serves. ConfigError when nothing was promoted yet."""
    champion = ledger.promotions.current(line)
    if champion is None:
        others = ", ".join(ledger.promotions.lines()) or "none"
        raise ConfigError(
            f"serving line {line!r} has no checkpoint, wanted one that passed its gate; "
            f"`ostinato demo` trains one. Lines that serve: {others}"
        )
    return champion.checkpoint_id


def has_trained(recipe: Recipe, ledger: Ledger) -> bool:
    """Whether the recipe has a newest checkpoint."""
    return bool(ledger.artifacts.list(_TRAINED, recipe.name))


def _with_added_stages(ref: ArtifactRef, ledger: Ledger, artifacts: Artifacts) -> ArtifactRef:
    """The last checkpoint that added stages derived from this one; itself when there is none."""
    for row in ledger.artifacts.list(_DERIVED, ref.name):
        later = artifacts.get(f"{_DERIVED}/{ref.name}@{row.version}")
        if ref in artifacts.manifest(later).parents:
            ref = later
    return ref


def _newest(name: str, ledger: Ledger) -> str:
    rows = ledger.artifacts.list(_TRAINED, name)
    if not rows:
        known = sorted(
            f"{row.kind}/{row.name}@{row.version}"
            for kind in KINDS
            for row in ledger.artifacts.list(kind)
        )
        raise ConfigError(
            f"recipe {name!r} has no trained checkpoint, wanted {_TRAINED}/{name}@VERSION; "
            f"`ostinato run reinforcement --recipe {name}` trains one, and --checkpoint names "
            f"another; known: {', '.join(known) or 'none'}"
        )
    return f"{_TRAINED}/{name}@{rows[-1].version}"
