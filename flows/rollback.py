"""Flow: gives a serving line's users the previous champion again."""

from prefect import flow

from ostinato.flows.stages import realtime
from ostinato.flows.stages.artifacts import show_markdown
from ostinato.flows.stages.checkpoints import CHAMPION, line_of
from ostinato.flows.stages.forms import CheckpointName, Options, RecipeName, RunOptions
from ostinato.flows.stages.naming import run_name
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.realtime.promotion.serving_line import PromotionReport


@flow(name="rollback", flow_run_name=run_name)
def rollback(
    recipe: RecipeName = "nano",
    line: str = "",
    checkpoint: CheckpointName = CHAMPION,
    reason: str = "by hand",
    options: Options = None,
) -> PromotionReport:
    """Withdraws a checkpoint from users. Started by hand, or by the event checkpoint.regressed. Changes
    nothing when the checkpoint serves nobody.

    Args:
        recipe: its serving line is used when `line` is empty.
        line: serving line; that of the recipe when empty.
        checkpoint: champion, or kind/name@version, withdrawn only if it is the champion.
        reason: kept in the line's history.
    """
    name = line or line_of((options or RunOptions()).recipe_of(recipe))
    ledger = open_ledger(load_settings())
    report = realtime.roll_back(
        ledger, name, None if checkpoint == CHAMPION else checkpoint, reason
    )
    text = f"**{report.outcome.value}**: {report.candidate}; {report.champion} serves. {reason}"
    show_markdown(text, key="rollback", description=name)
    return report
