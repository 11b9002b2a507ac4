"""How the guides' `ostinato` commands are run: alone, on a finished miniature run, or not, each with its reason."""

import re

CHEAP = ("deploy-files", "keys", "recipe", "status")
"""Run alone by the default tests."""
ON_A_RUN = (
    "chat",
    "demo --keep",
    "demo --recipe miniature",
    "evaluate",
    "export",
    "import model.gguf",
    "import ~",
    "plan",
    "problems export",
    "replay",
    "run continued-pretraining --recipe miniature",
    "run reinforcement --recipe miniature",
    "show",
)
"""Run by the tests marked `chain`, in .ci/nightly, with `miniature` in place of nano. A plan needs no run, but seconds."""
NOT_RUN = {
    "certify": "takes minutes; tests/flows/test_certify.py",
    "compare-bases": "reads HumanEval from the package index; tests/flows/test_base_selection.py",
    "demo": "trains for longer than a test may; the chain's tests run miniature",
    "deploy": "needs a Prefect server; tests/flows/test_deployments.py",
    "doctor": "says what this machine lacks; tests/unit/flows/commands/test_doctor.py",
    "evaluate --endpoint": "needs somebody's server; tests/flows/test_checkpoint_evaluation.py",
    "export REFERENCE out/ --adapter": "needs a run with adapters; tests/flows/test_sft.py",
    "import": "fetches from hub or index; tests/unit/flows/commands/test_models.py",
    "plan --recipe kimi_k2": "walks a step; tests/unit/flows/commands/test_planning.py",
    "problems probe": "attempts every training problem; tests/flows/test_problem_probing.py",
    "problems from": "proves problems for minutes; tests/flows/test_problems_from.py",
    "evaluate --checkpoint candidate/nano@5 --against champion --suite shop": "needs a suite of another set; "
    "tests/flows/test_suite_evaluation.py",
    "problems suite": "writes into the home; tests/flows/test_suite_evaluation.py",
    "run": "trains for longer than a test may, or needs a cluster",
    "sandboxes serve": "runs until Ctrl-C; tests/contracts/test_e2b_client.py",
    "try": "builds problems of sixteen packages; tests/flows/test_format_trial.py",
    "up": "runs until Ctrl-C; tests/faults/test_up.py",
}
"""Read by the command line's own parser, and no more."""
OF_THE_RUN = (
    (r"/nano@\d+", "/miniature@1"),
    (r"\bnano-seed0\b", "miniature-seed0"),
    (r"^problems/shop@1$", "problems/miniature@1"),
    (r'^nano$|(?<=")nano(?=")', "miniature"),
)
"""Names of the guides, and what the finished run has in their place."""


def way_of(text: str) -> str:
    """The longest entry of the three tables that a command begins with. AssertionError when there is none."""
    entries = (entry for entry in (*CHEAP, *ON_A_RUN, *NOT_RUN) if is_start(entry, text))
    found = max(entries, key=len, default=None)
    assert found is not None, f"{text!r}: wanted an entry in CHEAP, ON_A_RUN or NOT_RUN"
    return found


def is_start(entry: str, text: str) -> bool:
    """Whether a command begins with the entry's words. The last one may be cut: `import ~`."""
    return text == entry or text.startswith((f"{entry} ", f"{entry}/"))


def on_the_run(word: str) -> str:
    """A word of a command, or a line of a program, with the names of the finished run."""
    for pattern, name in OF_THE_RUN:
        word = re.sub(pattern, name, word)
    return word
