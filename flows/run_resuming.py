"""Flow: restarts a crashed run, after a wait that grows with each attempt, until a person is needed."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from ostinato.flows.operating.local_prefect import AUTO_RESUME
from ostinato.flows.operating.resuming import MAX_ATTEMPTS, resume_crashed
from ostinato.flows.stages.events import server_of_settings

GIVEN_UP = "GivenUp"  # name of the final state when a run has crashed too often


@flow(name="run-resuming", flow_run_name="resume {run_id}")
def run_resuming(run_id: str) -> State:
    """Schedules a crashed run again. The server starts it whenever a run tagged auto-resume crashes.
    Ends Failed when that run was started too often.

    Args:
        run_id: id of the crashed run, or its resource id in an event.
    """
    run = resume_crashed(server_of_settings(), run_id.removeprefix("prefect.flow-run."))
    if run.state != "CRASHED":
        return Completed(message=f"{run.title} is now {run.state.lower()}")
    if not run.may_resume:
        seen = f"{run.title} crashed {run.attempts} times, wanted fewer than {MAX_ATTEMPTS} and the tag "
        return Failed(name=GIVEN_UP, message=f"{seen}{AUTO_RESUME}; see the stage's child.log")
    return Completed(message=f"{run.title} restarts in {run.wait_seconds:.0f} s")
