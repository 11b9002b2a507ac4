"""One stage of the chain: look it up by identity, else run it and publish what it made.

`StageContext`, which binds a recipe to this machine's settings, object store, ledger and artifacts,
and `ensure`, the single rule of resumption: an artifact with the same fingerprint is never built
twice. It computes nothing itself.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from ostinato.flows.recipe import Recipe
from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts, fingerprint
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import Settings, load_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageContext:
    """A recipe on this machine."""

    recipe: Recipe
    settings: Settings
    objects: ObjectStore
    ledger: Ledger
    artifacts: Artifacts

    @classmethod
    def open(cls, recipe: Recipe) -> "StageContext":
        """Opens ledger and object store of the current settings; errors name the url."""
        settings = load_settings()
        objects = open_object_store(settings)
        ledger = Ledger(settings.ledger_url)
        ledger.migrate()
        return cls(recipe, settings, objects, ledger, Artifacts(objects, ledger))

    def directory_of(self, ref: ArtifactRef) -> Path:
        """Verified local copy of an artifact."""
        return self.artifacts.fetch(
            ref, self.settings.home / "artifacts" / ref.kind / ref.fingerprint
        )

    def run_directory(self, kind: str, identity: str) -> Path:
        """Where a stage keeps its unfinished work; the same for the same identity, so that it resumes."""
        return (
            self.settings.home
            / "runs"
            / f"{self.recipe.name}-seed{self.recipe.seed}"
            / f"{kind}-{identity}"
        )

    def ensure(
        self,
        kind: str,
        identity_of: BaseModel | dict,
        parents: Sequence[ArtifactRef],
        build: Callable[[Path], tuple[Path, dict]],
    ) -> ArtifactRef:
        """The artifact of this kind and identity, built at most once.

        `build` receives the run directory and returns the directory to publish and its metadata.
        """
        identity = fingerprint(identity_of, parents)
        known = self.artifacts.find(kind, self.recipe.name, identity)
        if known is not None:
            logger.info("stage=%s fingerprint=%s skipped=already_built", kind, identity)
            return known
        made, metadata = build(self.run_directory(kind, identity))
        return self.artifacts.publish(kind, self.recipe.name, identity, made, parents, metadata)
