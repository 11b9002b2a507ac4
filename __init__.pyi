from ostinato.flows.python_api import CheckpointArtifact as CheckpointArtifact
from ostinato.flows.python_api import Home as Home
from ostinato.flows.python_api import ReinforcementRun as ReinforcementRun
from ostinato.flows.python_api import evaluate as evaluate
from ostinato.flows.python_api import open_home
from ostinato.flows.recipe import Recipe as Recipe

open = open_home
