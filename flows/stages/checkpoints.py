"""Checkpoints by the names that people type: champion, newest, kind/name@version."""

from ostinato.flows.stages import realtime
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError

CHAMPION, NEWEST = "champion", "newest"
KINDS = ("pretrained", "drafted", "reinforced", "candidate", "checkpoint")  # what has weights
_TRAINED = "reinforced"  # what the chain of a recipe ends with


def checkpoint_named(context: StageContext, reference: str) -> ArtifactRef:
    """The checkpoint of a reference: `champion` of the recipe's serving line, the recipe's `newest`,
    or kind/name@version. ConfigError says how to get one; nothing is trained.
    """
    if reference == CHAMPION:
        return realtime.champion_ref(context)
    if reference == NEWEST:
        return _newest(context)
    ref = context.artifacts.get(reference)
    if ref.kind not in KINDS:
        raise ConfigError(
            f"artifact {reference!r} has no weights, wanted one of the kinds {', '.join(KINDS)}"
        )
    return ref


def _newest(context: StageContext) -> ArtifactRef:
    name = context.recipe.name
    rows = context.ledger.artifacts.list(_TRAINED, name)
    if not rows:
        known = sorted(
            f"{row.kind}/{row.name}@{row.version}"
            for kind in KINDS
            for row in context.ledger.artifacts.list(kind)
        )
        raise ConfigError(
            f"recipe {name!r} has no trained checkpoint, wanted {_TRAINED}/{name}@VERSION; "
            f"`ostinato run reinforcement --recipe {name}` trains one, and --checkpoint names "
            f"another; known: {', '.join(known) or 'none'}"
        )
    return context.artifacts.get(f"{_TRAINED}/{name}@{rows[-1].version}")
