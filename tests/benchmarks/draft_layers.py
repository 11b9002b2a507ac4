"""Acceptance of draft layers by how they were trained.

    python -m tests.benchmarks.draft_layers schedule --corpus DIRECTORY --out DIRECTORY [--share 0.33]
    python -m tests.benchmarks.draft_layers rl --run WORKSPACE --corpus DIRECTORY --out DIRECTORY

`schedule`: nano's model and phases with a share of their tokens, on one rank. Draft layers alone when
pretraining is over, with as many tokens and with those of the joint phases too, against the cut after the
first phase with every weight of the joint loss.
`rl`: the recorded steps of a finished RL run of one rank are taken again, with draft layers that
follow and without; trunk and samples are the same, so the two differ in their drafts alone. Acceptance is
that of the speculation stage's prompts, greedy and sampled at temperature 1, drafted in every step.
Interrupted, the same command goes on.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.cluster.workspace import (
    REQUEST,
    ProgressWriter,
    RequestEnvelope,
    Workspace,
    read_record,
)
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import load_settings
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.engine import DecodeEngine
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.rendering import load_renderer
from ostinato.models.training.config import PhaseConfig
from ostinato.tasks.pretraining.config import PretrainingConfig, PretrainingRequest
from ostinato.tasks.pretraining.mtp.config import MtpConfig, MtpRequest
from ostinato.tasks.pretraining.mtp.run import main as distil
from ostinato.tasks.pretraining.mtp.speculation import _generate, answer_prompts, configure_ways
from ostinato.tasks.pretraining.mtp.speculation_config import SpeculationConfig, SpeculationRequest
from ostinato.tasks.pretraining.run import main as pretrain
from ostinato.tasks.reinforcement.learning.config import (
    ParityConfig,
    TrainerRequest,
    trainer_config,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from ostinato.tasks.reinforcement.records import ReinforcementRequest
from ostinato.tasks.reinforcement.step_samples import StepSamples
from ostinato.tasks.rollout.journal import RolloutJournal

WEIGHTS = (0.3, 0.0)  # of the joint loss
DRAFT_TOKENS = 300_000  # of a distillation, at a third of nano's tokens
MTP = "model.mtp."


def measure(name: str, trunk: Path, drafts: Path, corpus: Path) -> None:
    """Prints the acceptance of one checkpoint's draft layers beside the trunk of another."""
    spec, weights = load_checkpoint(trunk).spec, dict(load_checkpoint(trunk).weights)
    others = load_checkpoint(drafts).weights
    weights |= {name: others[name] for name in others if name.startswith(MTP)}
    config = SpeculationConfig()
    asked = SpeculationRequest(
        config=config, checkpoint_directory=str(trunk), corpus_directory=str(corpus)
    )
    stops = load_renderer(trunk).stop_token_ids
    found: dict[str, Any] = {}
    for temperature, draws in ((0.0, 1), (1.0, 4)):
        engine = DecodeEngine(spec, prepare_weights(spec, weights, 0), configure_ways(asked)[1])
        for index, prompt in enumerate(answer_prompts(corpus, config.prompts)):
            for draw in range(draws):
                number = draws * index + draw
                request = GenerateRequest(
                    f"r{number}",
                    f"s{number}",
                    tuple(prompt),
                    config.max_new_tokens,
                    stops,
                    temperature,
                    seed=number,
                )
                _generate(engine, request)
        seen = engine.statistics
        found[f"temperature {temperature:.0f}"] = {
            "accepted": round(seen.accepted_tokens / seen.drafted_tokens, 4),
            "tokens_per_pass": round(seen.generated_tokens / seen.occupied_slot_steps, 4),
            "drafted": seen.drafted_tokens,
        }
    print(name, json.dumps(found), flush=True)


class Schedule:
    """The arms of the comparison, each in a folder of its own."""

    def __init__(self, corpus: Path, out: Path, share: float) -> None:
        self.corpus, self.out, self.share = corpus, out, share
        self.recipe = load_recipe("nano")
        tokens = [int(phase.tokens * share) for phase in self.recipe.pretraining.phases]
        phases = [
            phase.model_dump() | {"tokens": number}
            for phase, number in zip(self.recipe.pretraining.phases, tokens, strict=True)
        ]
        one_rank = {"world_size": 1, "evaluate_every_steps": None}
        whole = self.recipe.pretraining.model_dump() | one_rank | {"phases": phases}
        self.first = self.recipe.pretraining.phases[0]
        self.earlier, self.later = PretrainingConfig.model_validate(whole).cut_after(
            self.first.name
        )

    def run(self) -> None:
        """Trains what is missing, then measures."""
        drafting = self.recipe.mtp.phases[0]
        seen = {name: (end, end) for name, (_, end) in self.first.blend.items()}
        joint_tokens = sum(phase.tokens for phase in self.later.phases)
        tokens = int(3 * self.share * DRAFT_TOKENS)
        cut = self._pretrain("cut", self.earlier, Path(self.recipe.base_checkpoint))
        middle = self._distil("middle", drafting.model_copy(update={"blend": seen}), cut, tokens)
        rest = self._pretrain("rest", self.later, cut)
        for name, total in (("alone", tokens), ("alone-longer", tokens + joint_tokens)):
            alone = self._distil(name, drafting, rest, total)
            measure(f"alone, at the end, {total} tokens", alone, alone, self.corpus)
        measure("alone, at the cut, then kept", rest, middle, self.corpus)
        for weight in WEIGHTS:
            joint = self._pretrain(f"joint-{weight}", self.later, middle, weight)
            measure(f"cut, then joint at weight {weight}", joint, joint, self.corpus)

    def _pretrain(
        self, name: str, config: PretrainingConfig, start: Path, draft_weight: float | None = None
    ) -> Path:
        request = PretrainingRequest(
            config=config,
            corpus_directory=str(self.corpus),
            checkpoint_directory=str(start),
            draft_weight=draft_weight,
        )
        return self._once(name, pretrain, request)

    def _distil(self, name: str, phase: PhaseConfig, start: Path, tokens: int) -> Path:
        phases = [phase.model_dump() | {"tokens": tokens}]
        settings = self.recipe.mtp.model_dump() | {"world_size": 1, "phases": phases}
        request = MtpRequest(
            config=MtpConfig.model_validate(settings),
            corpus_directory=str(self.corpus),
            checkpoint_directory=str(start),
        )
        return self._once(name, distil, request)

    def _once(self, name: str, work: Any, request: Any) -> Path:
        directory = self.out / name
        checkpoint = directory / "checkpoint"
        if not checkpoint.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            started_at = time.process_time()
            workspace = Workspace(directory, load_settings(), ProgressWriter(directory))
            after = work(request, workspace).after.model_dump()
            print(name, f"{time.process_time() - started_at:.0f} s of CPU", after, flush=True)
        return checkpoint


def follow_run(run: Path, corpus: Path, out: Path) -> None:
    """Takes the steps of a run again, with draft layers that follow and without."""
    settings = load_settings()
    envelope = read_record(run / REQUEST, RequestEnvelope)
    assert envelope is not None, run
    request = ReinforcementRequest.model_validate(envelope.request)
    start = Path(request.checkpoint_directory)
    journal = RolloutJournal(
        open_ledger(settings).journal, open_object_store(settings), request.run_id
    )
    samples = StepSamples(request)
    last: dict[bool, tuple[Path, dict[str, Tensor]]] = {}
    for trains_drafts in (True, False):
        work = out / f"follows-{trains_drafts}"
        config = trainer_config(request.learning, request.decoding)
        parity = ParityConfig(earlier_versions=0)
        config = config.model_copy(update={"trains_drafts": trains_drafts, "parity": parity})
        asked = TrainerRequest(
            config=config, checkpoint_directory=str(start), work_directory=str(work), chain_id="run"
        )
        trainer = RLTrainer(asked, ObjectStore.from_url(f"file://{work}-chain"))
        while groups := journal.trained(trainer.step + 1):
            report = trainer.train_step(samples.of(groups))
            trainer.save()
            print(report.step, trains_drafts, report.draft_kl_nats, report.loss, flush=True)
        last[trains_drafts] = trainer.save(), trainer.export_weights()
        trainer.close()
    (followed, ours), (kept, plain) = last[True], last[False]
    trunk = [name for name in ours if not name.startswith(MTP)]
    print("one trunk:", all(torch.equal(ours[name], plain[name]) for name in trunk))
    measure("before RL", start, start, corpus)
    measure("after RL, followed", followed, followed, corpus)
    measure("after RL, as before", kept, kept, corpus)


def main() -> None:
    """Runs one of the two comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("schedule", "rl"))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--share", type=float, default=1 / 3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "schedule":
        Schedule(given.corpus, given.out, given.share).run()
    else:
        follow_run(given.run, given.corpus, given.out)


if __name__ == "__main__":
    main()
