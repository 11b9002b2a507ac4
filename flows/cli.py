"""`ostinato`: the commands a person types. Each is a few lines over a flow or a service. Nothing is computed here."""

import importlib.metadata
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from ostinato.flows.commands import models, replaying
from ostinato.flows.commands.answers import CommandResult, answering, launch_flow
from ostinato.flows.commands.cycle_commands import cycles
from ostinato.flows.commands.deploy_commands import deploy, deploy_files
from ostinato.flows.commands.key_commands import keys
from ostinato.flows.commands.launching import (
    FlowFailed,
    KeepOption,
    RebuildOption,
    RecipeOption,
    SeedOption,
    SetOption,
    make_options,
)
from ostinato.flows.commands.plan_commands import ChipOption, dry_run_flow, plan
from ostinato.flows.commands.problem_sets import certify, problem_sets
from ostinato.flows.commands.recipe_commands import recipes, try_formats
from ostinato.flows.commands.sandbox_commands import sandboxes
from ostinato.flows.operating import up as machine
from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.flows.python_api import open_home
from ostinato.flows.recipe import is_reference, load_recipe
from ostinato.flows.stages import lineage
from ostinato.flows.stages.checkpoints import refuse_unknown
from ostinato.flows.stages.console import as_printable, open_console, print_error, say
from ostinato.flows.stages.forms import Suite
from ostinato.flows.stages.server_access import LOGIN_FILE
from ostinato.infra.agent.endpoint import Endpoint, probe
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.cluster.services import interrupt_on_signals
from ostinato.infra.platform.errors import ConfigError, OstinatoError
from ostinato.infra.platform.row_files import find_conversations
from ostinato.infra.platform.settings import check_home, load_launch, load_settings
from ostinato.tasks.reinforcement.records import WEIGHTS

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
CHAT = "ostinato.flows.chat.command"
CHECK_CONVERSATIONS = "ostinato.tasks.corpus.chat_rows:check_conversations"
# Loaded by name: importing scipy, matplotlib or SQLAlchemy would delay every other command by a second.
DOCTOR = "ostinato.flows.commands.doctor"
GARBAGE = "ostinato.flows.commands.garbage"
DESCRIBE_ATTEMPTS = "ostinato.flows.reporting.attempts:describe"
REGISTER_EXPORT = "ostinato.infra.platform.tracking.registries:register_export"
SAVE_ATTEMPTS = "ostinato.flows.reporting.attempt_files:save"
STATUS = "ostinato.flows.operating.status.report"
SHOW_ATTEMPTS = "ostinato.flows.reporting.evaluations:show_attempts"
RepositoryOption = Annotated[Path | None, typer.Option(exists=True, file_okay=False)]
RunOption = Annotated[str, typer.Option(help="RL run: nano-seed0, its id, or its folder")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(importlib.metadata.version("ostinato"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show it")
    ] = False,
) -> None:
    """Trains a coding agent: runs the whole chain or one stage of it, and serves its users."""
    check_home(load_settings().home)


@app.command()
@answering
def run(
    flow: Annotated[
        str, typer.Argument(help="a flow, for example continued_pretraining or search-training")
    ],
    recipe: RecipeOption = "nano",
    seed: SeedOption = None,
    settings: SetOption = None,
    keep: KeepOption = None,
    rebuild: RebuildOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="conversations for sft: a .jsonl or .parquet file, or a data set ORG/NAME[@REVISION] of the hub"
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="checkpoint that reinforcement begins with: kind/name@version, champion or newest; "
            "nothing is pretrained then"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="plan the recipe and walk a step; start nothing")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of the dry run; this machine's when absent", min=1)
    ] = None,
    chip: ChipOption = None,
) -> CommandResult:
    """Runs one flow of the chain and the stages it depends on."""
    name = flow.replace("-", "_")
    if (data is None) == (name == "sft"):
        raise typer.BadParameter("sft needs --data, and no other flow takes it")
    if start is not None and name != "reinforcement":
        raise typer.BadParameter("reinforcement takes --start CHECKPOINT, and no other flow does")
    if not dry_run and (gpus is not None or chip is not None):
        raise typer.BadParameter("--gpus and --chip describe a --dry-run, and no run takes them")
    parameters: dict[str, str] = {}
    if data is not None:
        found = find_conversations(data)
        if isinstance(found, Path):  # rows of the hub are fetched and read by the flow
            load_entry(CHECK_CONVERSATIONS)(found)
        parameters = {"data": str(found)}
    options = make_options(settings, keep, rebuild)
    if start is not None:
        loaded = load_recipe(recipe, seed=seed, overrides=options.overrides)
        refuse_unknown(load_settings(), loaded, [start])
        parameters = {"start": start}
    if dry_run:
        loaded = load_recipe(recipe, seed=seed, overrides=options.overrides)
        return dry_run_flow(name, loaded, gpus, chip)
    result = launch_flow(name, recipe, seed, options, parameters)
    return CommandResult({"flow": name, "result": result})


@app.command()
@answering
def demo(
    recipe: RecipeOption = "nano",
    seed: SeedOption = None,
    settings: SetOption = None,
    keep: KeepOption = None,
    rebuild: RebuildOption = None,
) -> CommandResult:
    """Runs the whole chain. Run it again and it continues where it stopped."""
    options = make_options(settings, keep, rebuild)
    report = launch_flow("agent_training", recipe, seed, options)
    return CommandResult({"flow": "agent_training", "result": report})


@app.command()
@answering
def evaluate(
    checkpoint: Annotated[
        str, typer.Option(help="champion, newest (the recipe's), or kind/name@version")
    ] = "newest",
    suite: Annotated[
        str,
        typer.Option(
            help="held-out-mutations, held-out-functions or both; or a suite: its folder, or its name in the home"
        ),
    ] = Suite.BOTH.value,
    against: Annotated[
        str | None, typer.Option(help="checkpoint to compare with; the champion when absent")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-style API, scored as an outside baseline")
    ] = None,
    model: Annotated[str | None, typer.Option(help="name of a model of the endpoint")] = None,
    key_env: Annotated[
        str | None, typer.Option(help="environment variable that holds the endpoint's key")
    ] = None,
    recipe: RecipeOption = "nano",
    seed: SeedOption = None,
    settings: SetOption = None,
    keep: KeepOption = None,
    commit: Annotated[
        str, typer.Option(help="commit or job that requested the evaluation, shown in the report")
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="folder for scorecard.json and scorecard.md")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="progress as lines on stderr, even without a terminal")
    ] = False,
) -> CommandResult:
    """Evaluates a checkpoint on held-out problems. Exit code 1: the gate failed. 2 or 3: the evaluation itself failed."""
    try:
        made = open_home().evaluate(
            checkpoint,
            recipe,
            suite=suite,
            against=against,
            endpoint=_endpoint(endpoint, model, key_env),
            seed=seed,
            options=make_options(settings, keep, None),
            commit=commit,
            report_directory=report,
            is_watched=watch,
        )
    except FlowFailed as error:
        raise typer.Exit(error.code) from None
    code = 1 if made.decision is not None and not made.decision.passed else 0
    return CommandResult(made, lambda: load_entry(SHOW_ATTEMPTS)(made, open_console()), code)


@app.command("compare-bases")
@answering
def compare_bases(
    checkpoints: Annotated[
        list[str], typer.Argument(help="champion, newest (the recipe's), or kind/name@version")
    ],
    recipe: RecipeOption = "nano",
    seed: SeedOption = None,
    settings: SetOption = None,
) -> CommandResult:
    """Compares candidate base models: loss on code, HumanEval, patches, speed. Trains nothing."""
    options = make_options(settings, None, None)
    loaded = load_recipe(recipe, seed=seed, overrides=options.overrides)
    refuse_unknown(load_settings(), loaded, checkpoints)
    measures = launch_flow("base_selection", recipe, seed, options, {"checkpoints": checkpoints})
    return CommandResult({"flow": "base_selection", "result": measures})


def _endpoint(url: str | None, model: str | None, key_env: str | None) -> Endpoint | None:
    """The endpoint that the options name, after it answered a probe. None without these options."""
    if url is None and model is None and key_env is None:
        return None
    if url is None or model is None:
        raise ConfigError(
            f"--endpoint is {url!r} and --model {model!r}, wanted both: a URL with /v1 and a name"
        )
    try:
        endpoint = Endpoint(url=url, model=model, key_env=key_env)
    except ValidationError:
        wanted = "https://host/v1, without user, query and fragment"
        raise ConfigError(f"--endpoint is {url!r}, wanted a URL like {wanted}") from None
    probe(endpoint)
    return endpoint


app.add_typer(recipes, name="recipe")
app.add_typer(cycles, name="cycle")
app.add_typer(keys, name="keys")
app.add_typer(sandboxes, name="sandboxes")
app.command()(certify)
app.command("try")(try_formats)
app.command()(deploy)
app.command("deploy-files")(deploy_files)
app.add_typer(problem_sets, name="problems")
app.command()(plan)


@app.command("import")
@answering
def import_command(
    place: Annotated[
        str,
        typer.Argument(
            help="model directory, GGUF file, archive, ORG/NAME[@REVISION] of the Hugging Face hub, or "
            "a pinned model: smollm2, qwen_coder"
        ),
    ],
    name: Annotated[str | None, typer.Option("--as", help="name of the artifact")] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="chatml, plain or a Jinja file, in place of the model's own"),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(help="tool-call dialect, in place of that of its template")
    ] = None,
) -> CommandResult:
    """Imports a published model. The last word printed is its reference."""
    ref = models.import_model(load_settings(), place, name, chat_template, dialect)
    value = {"artifact": str(ref), "fingerprint": ref.fingerprint}
    return CommandResult(value, lambda: typer.echo(f"imported {ref}"))


@app.command("export")
@answering
def export_command(
    reference: Annotated[str, typer.Argument(help="an artifact, or a checkpoint directory")],
    directory: Annotated[Path, typer.Argument(help="new or empty", file_okay=False)],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; as stored when absent")
    ] = None,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="also write model.gguf, which llama.cpp loads")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="only the LoRA adapter, which PEFT loads")
    ] = False,
) -> CommandResult:
    """Writes a checkpoint as a directory that transformers and vLLM load."""
    if adapter:
        if gguf or dtype is not None:
            raise ConfigError("--adapter cannot be combined with --gguf or --dtype")
        models.export_adapter(load_settings(), reference, directory)
    else:
        models.export_model(load_settings(), reference, directory, dtype, with_gguf=gguf)
    if not Path(reference).is_dir():
        load_entry(REGISTER_EXPORT)(load_settings(), reference, directory)
    files = sorted(path.name for path in directory.iterdir())
    value = {"source": reference, "directory": directory.resolve(), "files": files}
    return CommandResult(value)


@app.command()
def up(
    recipe: RecipeOption = "nano",
    settings: SetOption = None,
    line: Annotated[
        str | None, typer.Option(help="serving line of the gateway; the recipe's when absent")
    ] = None,
) -> None:
    """Starts Prefect server, worker, deployments and gateway, and keeps them running. Ctrl-C stops them all."""
    choice = RecipeChoice(name=recipe, overrides=tuple(settings or ()))
    machine.up(load_settings(), choice, line, Console())


@app.command()
def down() -> None:
    """Stops everything that `ostinato up` started here, even if `up` itself was killed."""
    machine.down(load_settings(), Console())


@app.command()
@answering
def doctor(
    deep: Annotated[bool, typer.Option(help="also starts Ray and calls an actor")] = False,
    recipe: Annotated[str, typer.Option(help="recipe to check free memory and disk for")] = "nano",
) -> CommandResult:
    """Checks this machine. Each line is ok, or gives the reason and the remedy. Exit code 1: a check failed."""
    checks = load_entry(f"{DOCTOR}:run_checks")(load_settings(), load_recipe(recipe), deep=deep)
    code = 0 if all(check.ok for check in checks) else 1
    return CommandResult(checks, lambda: load_entry(f"{DOCTOR}:show")(checks), code)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def chat(context: typer.Context, repo: RepositoryOption = None) -> None:
    """A terminal agent on a repository: `chat --repo PATH [--gateway URL | --checkpoint REF]`."""
    # A separate process keeps torch out of the other commands. The flags silence Megatron's warnings about
    # packages that are not installed, and switch off Prefect's telemetry.
    place = [] if repo is None else ["--repo", str(repo)]
    # -P, as wherever a process is started: nothing is imported from the current directory
    command = [sys.executable, "-P", "-W", "ignore::UserWarning", "-m", CHAT]
    environment = {**os.environ, "DO_NOT_TRACK": "1", "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, [*command, *context.args, *place], environment)


@app.command()
@answering
def status() -> CommandResult:
    """Shows the state of each part, what it waits for and since when, and the likely cause of a fault."""
    rows = load_entry(f"{STATUS}:collect")(load_settings())
    return CommandResult(rows, lambda: load_entry(f"{STATUS}:print_rows")(rows, open_console()))


@app.command()
def dashboard() -> None:
    """Serves a live page on this machine: runs, curves, weights, cycles, reports. Ctrl-C stops it."""
    settings = load_settings()
    address = f"http://127.0.0.1:{settings.dashboard_port}"
    login = f"login: the line in {settings.home / LOGIN_FILE}, user:password"
    Console().out(f"{address}, {login}", highlight=False)
    load_entry("ostinato.flows.operating.dashboard.server:serve")(settings)


@app.command()
@answering
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="kind/name@version, or the id of an RL run, group, trajectory, interaction or session"
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="write the attempts instead: NAME.html for a page, NAME.parquet for rows, any other name "
            "for a folder with an ATIF document per attempt"
        ),
    ] = None,
) -> CommandResult:
    """Shows an artifact's lineage, or attempts: prompt, calls, results, diff, verdict, reward."""
    if is_reference(name):
        if output is not None:
            raise ConfigError(f"--output writes attempts, and {name} is an artifact")
        found = lineage.trace(load_settings(), name)
        return CommandResult(found, lambda: typer.echo("\n".join(lineage.describe(found))))
    attempts = open_home().attempts(name)
    if output is not None:
        written = load_entry(SAVE_ATTEMPTS)(output, name, attempts)
        return CommandResult(
            {"output": output, "attempts": len(attempts)}, lambda: typer.echo(written)
        )
    facts = [attempt.facts for attempt in attempts]
    return CommandResult(
        facts, lambda: typer.echo(as_printable("\n".join(load_entry(DESCRIBE_ATTEMPTS)(attempts))))
    )


@app.command()
@answering
def gc(
    older_than_days: Annotated[float, typer.Option(help="keep younger files", min=0)] = 7.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list, remove nothing")] = False,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=r"recipe whose `\[retention]` also removes checkpoints from the object store"
        ),
    ] = None,
    overrides: SetOption = None,
) -> CommandResult:
    """Removes working files of published stages and local copies of artifacts. With --recipe also old checkpoints."""
    if overrides and recipe is None:
        raise typer.BadParameter("--set needs --recipe")
    loaded = None if recipe is None else load_recipe(recipe, overrides=overrides or ())
    collect_garbage = load_entry(f"{GARBAGE}:collect")
    removal = collect_garbage(load_settings(), loaded, older_than_days, is_dry=dry_run)
    return CommandResult(removal, lambda: load_entry(f"{GARBAGE}:show")(removal))


@app.command()
@answering
def replay(
    run: RunOption,
    step: Annotated[
        int | None, typer.Option(help="only this step; all steps when absent", min=1)
    ] = None,
) -> CommandResult:
    """Recomputes steps of an RL run from its stored files. Exit code 1 when a bit of the weights differs."""
    return _compute_again(run, step, WEIGHTS, replaying.REPLAY)


@app.command()
@answering
def bisect(
    run: RunOption,
    metric: Annotated[
        str, typer.Option(help="weights, or a name in the run's metrics.jsonl, such as loss")
    ] = WEIGHTS,
) -> CommandResult:
    """Finds the first step of an RL run that today's code computes differently. Exit code 1 when there is one."""
    return _compute_again(run, None, metric, replaying.BISECT)


def _compute_again(run: str, step: int | None, metric: str, entry: str) -> CommandResult:
    """The result of `replay` and `bisect`. Its exit code is 1 when a step differs."""
    home = open_home()
    report = replaying.ask(home.settings, home.run(run).directory, step, metric, entry)

    def show() -> None:
        replaying.show(report)
        say(replaying.conclude(report, metric))

    return CommandResult(report, show, 0 if report.first_different is None else 1)


def main() -> None:
    """Console entry point. A known error prints one line and exits with code 2, without a traceback."""
    interrupt_on_signals()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    launch = load_launch()
    try:
        if launch is None:
            app()
        else:
            load_entry("ostinato.infra.platform.cluster.launch:run_launched")(launch, app)
    except OstinatoError as error:
        print_error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        say("stopped; the same command continues from here")
        sys.exit(130)
