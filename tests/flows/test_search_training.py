"""The search flow for real at a small size: packages in, a published encoder out, and nothing of it twice."""

from pathlib import Path

import pytest

from ostinato.flows.search_training import search_training
from ostinato.flows.stages import chain
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.encoder import BagEncoder
from ostinato.infra.agent.search.index import CodeIndex
from ostinato.tasks.retrieval.config import RetrievalResult

FILES = {
    "kit/waiting.py": b"def sleep_until(moment):\n    while now() < moment:\n        pause()\n",
    "kit/sums.py": b"def add_up(numbers):\n    return sum(numbers)\n",
}


@pytest.mark.nightly  # by day unit/tasks/retrieval/test_measure.py runs the stage
@pytest.mark.timeout(600)
def test_search_training_publishes_an_encoder_that_serves(prefect_server: None, home: Path) -> None:
    encoder = search_training("miniature")

    context = StageContext.open("miniature")
    result = chain.result_of(context, encoder, RetrievalResult)
    assert result.num_pairs > 0
    assert len(result.loss_nats) == context.recipe.retrieval.contrastive.epochs
    assert {"bm25", "fused, untrained", "fused, trained"} <= set(result.held_out)

    served = BagEncoder(context.directory_of(encoder))
    index = CodeIndex(ChunkCache(served), FILES)
    assert [hit.path for hit in index.search("add numbers", 1)] == ["kit/sums.py"]

    finished = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/*/result.json")}
    assert search_training("miniature") == encoder
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
