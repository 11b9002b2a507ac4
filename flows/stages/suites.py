"""Suites by the names that people type: a folder with suite.toml, or a name below `suites` of the home.

Does not import Prefect, so that the command line can refuse a suite before it starts anything.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.flows.stages import declared
from ostinato.flows.stages.forms import Suite
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.evaluation.config import GateConfig
from ostinato.tasks.problems.suites import SUITE_FILE, SuiteCard, read_suite, write_files

if TYPE_CHECKING:  # it imports Prefect
    from ostinato.flows.stages.stage import StageContext

OpenedSuite = tuple[SuiteCard, dict[str, bytes]]


def open_suite(settings: Settings, suite: str, gate: GateConfig) -> OpenedSuite | None:
    """Card and checked files of a suite. None: `suite` names splits. ConfigError for an unknown name, and for a gate
    with a slice that is not there.
    """
    if suite in list(Suite):
        gate.refuse_slices(f"split {suite}", ())
        return None
    known = settings.home / "suites"
    for folder in (Path(suite).expanduser(), known / suite):
        if (folder / SUITE_FILE).is_file():
            card, files = read_suite(folder)
            gate.refuse_slices(f"suite {card.title}", card.slices)
            return card, files
    raise ConfigError(
        f"suite {suite!r}: no folder with {SUITE_FILE} here or in {known}, wanted one of the splits "
        f"{', '.join(Suite)}, or a suite, which `ostinato problems suite` makes"
    )


def publish_suite(
    context: "StageContext", card: SuiteCard, files: Mapping[str, bytes]
) -> ArtifactRef:
    """The artifact of a suite, from its checked files."""

    def build(directory: Path) -> tuple[Path, dict]:
        write_files(directory / "published", card, files)
        return directory / "published", {}

    return context.ensure(declared.SUITE.name, card, (), build)
