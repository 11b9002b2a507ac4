"""A name with a colon is a family's alone: in every other group of plug-ins it is unknown, not a call of what it names."""

import pytest

from ostinato.infra.agent.extensions import DIALECTS, HARNESSES, TOOLS
from ostinato.infra.platform.plugins import PluginGroup
from ostinato.infra.platform.tracking.registries import REGISTRIES
from ostinato.infra.platform.tracking.trackers import TRACKERS
from ostinato.infra.serving.engine.extensions import ENGINES
from ostinato.infra.serving.published_models import FAMILIES
from ostinato.tasks.grading.environments import ENVIRONMENTS
from ostinato.tasks.rollout.config import ADMISSIONS, CURRICULA

GROUPS = (
    TOOLS, DIALECTS, HARNESSES, REGISTRIES, TRACKERS, ENGINES, FAMILIES, ENVIRONMENTS, ADMISSIONS,
    CURRICULA,
)  # fmt: skip


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.noun)
def test_colon_is_for_families_alone(group: PluginGroup) -> None:
    for name in set(group.names) - group.families:
        with pytest.raises(ValueError, match=f"{group.noun} is '{name}:x', wanted one of"):
            group.refuse_unknown([f"{name}:x"])
    group.refuse_unknown([f"{name}:x" for name in group.families])
    group.refuse_unknown(group.names)
