"""Rows of interactions with deployed checkpoints."""

from ostinato.infra.platform.ledger.rows import NewInteraction


def new_interaction(
    interaction_id: str, line: str, checkpoint_id: str = "nano@1"
) -> NewInteraction:
    """An interaction of people with the control arm."""
    return NewInteraction(
        interaction_id=interaction_id,
        line=line,
        tenant="people",
        session_id=f"session-{interaction_id}",
        arm="control",
        checkpoint_id=checkpoint_id,
        weight_version=0,
        problem_kind="mutation",
        consent=True,
        object_key=f"interactions/{interaction_id}",
        created_at=1.0,
    )
