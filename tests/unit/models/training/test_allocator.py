"""Memory of blocks that were freed goes back to the kernel once it is much, and what is in use stays."""

import json
import os
import subprocess
import sys

from ostinato.infra.platform.cluster.child import CHILD_ENVIRONMENT

PROGRAM = """
import json, psutil, torch
from ostinato.models.training.allocator import free_memory_bytes, return_free_memory

def held():
    return psutil.Process().memory_info().rss

blocks = [torch.ones(1 << 18, dtype=torch.float32) for _ in range(300)]  # a MiB each
kept = blocks[::10]
del blocks
full = held()
return_free_memory(1 << 30)
unchanged = held()
free = free_memory_bytes()
return_free_memory(1 << 26)
print(json.dumps([full, unchanged, free, held(), all(bool((block == 1).all()) for block in kept)]))
"""


def test_free_blocks_between_used_ones_go_back_to_the_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env={**os.environ, **CHILD_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    full, unchanged, free, left, is_whole = json.loads(done.stdout)
    blocks = 270 << 20  # bytes of freed ones
    assert unchanged > full - (blocks >> 3)  # less than the bound
    assert free > 0.9 * blocks
    assert left < full - 0.9 * blocks
    assert is_whole
