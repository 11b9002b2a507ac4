"""What an evaluation is asked: the recipe's encoder, and the harness that its checkpoint can use."""

from pathlib import Path

import pytest

from ostinato.flows.stages import chain, stage
from ostinato.flows.stages.declared import RETRIEVAL
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.models.rendering.chat_template import PUBLISHED
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest
from ostinato.tasks.records import Split


def publish(context: StageContext, name: str, folder: str = "") -> ArtifactRef:
    """An artifact without content, as the stage would leave it."""

    def build(directory: Path) -> tuple[Path, dict]:
        (directory / "made" / folder).mkdir(parents=True)
        (directory / "made" / folder / "name").write_text(folder)
        (directory / "made" / "file").write_text(name)
        return directory / "made", {chain.SUMMARY: {}}

    settings = RETRIEVAL.identity_of(RETRIEVAL.request_of(context.recipe, {}))
    return context.ensure(name, settings, (), build)


@pytest.mark.parametrize("search", ["words", "encoder"])
def test_evaluation_gets_the_encoder_that_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    options = RunOptions(overrides=(f'harness.search = "{search}"',))
    context = StageContext.open("miniature", None, options)
    encoder = publish(context, "retrieval")
    problems, checkpoint = publish(context, "problems"), publish(context, "pretraining")
    asked: list[EvaluationRequest] = []

    def run_stage(_: str, __: str, request: EvaluationRequest, *___: object) -> None:
        asked.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "run_stage", run_stage)
    with pytest.raises(KeyboardInterrupt):
        chain.evaluation(context, problems, checkpoint, Split.HELD_OUT)
    wanted = str(context.directory_of(encoder)) if search == "encoder" else None
    assert asked[0].search_directory == chain.search_directory(context) == wanted
    assert asked[0].problems_directory == str(context.directory_of(problems))
    assert chain.encoder_of(context) == (encoder if search == "encoder" else None)


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_checkpoint_with_a_published_template_talks_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_imported: bool
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    context = StageContext.open("miniature")
    checkpoint = publish(context, "pretraining", PUBLISHED if is_imported else "")

    fields = chain.evaluation_fields(context, checkpoint, Split.HELD_OUT)
    harness = fields["harness"]
    assert harness.dialect == ("full" if is_imported else context.recipe.harness.dialect)
    assert fields["context_tokens"] == (harness.context_tokens if is_imported else 0)


def test_an_imported_checkpoint_gets_the_harness_of_a_recipe_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    room = ("harness.context_tokens = 700", "model.max_sequence_tokens = 700")
    overrides = ('harness.dialect = "full"', *room)
    context = StageContext.open("miniature", None, RunOptions(overrides=overrides))
    checkpoint = publish(context, "pretraining", PUBLISHED)
    harness = chain.harness_for(context.recipe, context.directory_of(checkpoint))
    assert harness == context.recipe.harness
    assert harness.context_tokens == 700


def test_a_corpus_keeps_the_template_of_an_imported_model_apart(tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    corpus = ("tokenizer.json", "statistics.json", "demonstrations.safetensors", "shards/code.bin")
    for name in (*corpus, f"{PUBLISHED}/chat_template.jinja"):
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text(name)
    for _ in range(2):  # again, as after a kill
        published = chain.corpus_files(stage)
    found = {str(path.relative_to(published)) for path in published.rglob("*") if path.is_file()}
    assert found == {*corpus, f"{PUBLISHED}/chat_template.jinja"}
    assert [path.name for path in (stage / PUBLISHED).iterdir()] == ["chat_template.jinja"]
