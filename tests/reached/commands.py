"""The documented commands, at miniature size, in the order in which one can build on another."""

import json
import subprocess
from pathlib import Path

from tests.fakes.shop_project import CODE, FUNCTIONS, TESTS

RUN = "miniature-seed0"
ATTEMPTS = "{attempts}"  # the id of the RL run within RUN, which its settings and code decide
CHECKPOINT = "candidate/miniature@1"
MINIATURE = ("--recipe", "miniature")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("doctor", "--deep"),
    ("recipe", "list"),
    ("recipe", "show", "miniature"),
    ("demo", *MINIATURE),
    ("evaluate", "--recipe", "miniature", "--watch"),
    ("evaluate", "--recipe", "miniature", "--checkpoint", CHECKPOINT, "--json"),
    ("show", CHECKPOINT),
    ("show", ATTEMPTS, "--output", "attempts.html"),
    ("show", ATTEMPTS, "--output", "attempts.parquet"),
    ("show", ATTEMPTS, "--output", "documents"),
    ("replay", "--run", RUN),
    ("bisect", "--run", RUN, "--metric", "loss"),
    ("export", CHECKPOINT, "exported"),
    ("import", "exported", "--as", "again"),
    ("compare-bases", CHECKPOINT, "--recipe", "miniature"),
    ("plan", "--recipe", "qwen3_30b_a3b", "--gpus", "16", "--chip", "h200",
     "--layout", "context=4", "--layout", "pipeline=4"),
    ("plan", "--recipe", "kimi_k2", "--gpus", "512", "--chip", "h200", "--dry-run"),
    ("keys", "add", "acme", "--consent"),
    ("keys", "list"),
    ("deploy-files", "deploy"),
    ("run", "sft", "--recipe", "miniature", "--data", "told.jsonl"),
    ("run", "sft", "--recipe", "miniature", "--data", "told.jsonl", "--set", "pretraining.lora.rank=4"),
    ("export", "pretrained/miniature-sft@2", "adapter", "--adapter"),
    ("run", "reinforcement", *MINIATURE, "--set", "learning.world_size=2", "--set", "rollout.boxes=fleet",
     "--set", "learning.objective.hint_coefficient=0.1", "--set", "learning.objective.entropy_floor_nats=9.0"),
    ("problems", "from", "shop", "--problems", "20", "--commits", "20"),
    ("problems", "export", "problems/shop@1", "tasks", "--format", "harbor", "--limit", "4"),
    ("problems", "export", "problems/shop@1", "shop-problems", "--format", "verifiers", "--limit", "4"),
    ("problems", "from", "tasks", "--as", "again"),
    ("certify", "problems/shop@1", "--limit", "2", "--report", "certified"),
    ("certify", "certified/certificate.json", "--verify"),
    ("run", "search-training", "--recipe", "miniature"),
    ("run", "controls", *MINIATURE),
    ("run", "realtime-cycle", *MINIATURE, "--set", "cycle.canary.share=0.5"),
    ("cycle", "show", "--recipe", "miniature", "--line", "tests"),
    # last, as what follows from it is out of date then; without --rebuild the layout changes nothing
    ("run", "continued-pretraining", *MINIATURE, "--rebuild", "pretraining", "--set", "pretraining.layout.tensor=2"),
)  # fmt: skip
# the chain of an imported model, last: it takes as long as all others together
IMPORTED: tuple[tuple[str, ...], ...] = (
    ("import", "smollm2"),
    ("try", "checkpoint/smollm2@1", "--problems", "2"),
    ("export", "checkpoint/smollm2@1", "dense", "--dtype", "bfloat16", "--gguf"),
    ("import", "dense/model.gguf", "--as", "quantised"),
    # without a cycle: on the line of tests `miniature` serves, whose context is shorter
    ("demo", "--recipe", "smollm2_tiny", "--set", "serving.line=null"),
)
AFTER_SERVICES: tuple[tuple[str, ...], ...] = (
    ("cycle", "roll-back", "--recipe", "miniature", "--line", "tests", "--reason", "tried"),
    ("gc", "--dry-run"),
    ("gc", "--recipe", "miniature", "--set", "retention.checkpoints_per_line=2", "--older-than-days", "0"),
    ("status",),
    ("down",),
)  # fmt: skip


def write_inputs(folder: Path) -> None:
    """A git repository that nobody prepared, and conversations to fine-tune on."""
    shop = folder / "shop"
    if shop.exists():  # of an earlier run in the folder that is kept
        return
    (shop / "shop").mkdir(parents=True)
    (shop / "tests").mkdir()
    (shop / "tests" / "test_shop.py").write_text(TESTS.replace(FUNCTIONS[0], FUNCTIONS[1]))
    (shop / "shop" / "__init__.py").write_text(CODE.replace("< high", "<= high", 1))
    git = ("git", "-C", str(shop), "-c", "user.name=reached", "-c", "user.email=reached@localhost")
    subprocess.run((*git, "init", "-q"), check=True)
    for message in ("first version", "clamp counts the upper bound once, as the others do"):
        subprocess.run((*git, "add", "."), check=True)
        subprocess.run((*git, "commit", "-q", "-m", message), check=True)
        (shop / "shop" / "__init__.py").write_text(CODE)
        (shop / "tests" / "test_shop.py").write_text(TESTS)
    rows = (
        [
            {"role": "user", "content": f"Say the word for {number % 4}."},
            {"role": "assistant", "content": ("zero", "one", "two", "three")[number % 4]},
        ]
        for number in range(60)
    )
    (folder / "told.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in rows)
    )
