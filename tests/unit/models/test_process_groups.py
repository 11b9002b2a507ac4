"""Meeting of ranks: who is absent is named."""

import pytest
from torch.distributed import HashStore

from ostinato.models import process_groups


@pytest.mark.parametrize("has_server", [False, True])
def test_a_rank_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, has_server: bool
) -> None:
    monkeypatch.setattr(process_groups, "MEETING_SECONDS", 1.0)
    store = process_groups.host_meeting("127.0.0.1")[0] if has_server else HashStore()
    store.set("here-1", b"")
    # not by open_process_groups, which does nothing where another test has opened them
    with pytest.raises(
        TimeoutError, match=r"ranks \[2, 3\] of 4 did not arrive within 1 s, rank 0"
    ):
        process_groups._meet(store, 0, 4)
