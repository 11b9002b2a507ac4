"""Options of `ostinato certify`, and of `ostinato problems`: problems of repositories and of other collections."""

from pathlib import Path
from typing import Annotated

import typer

from ostinato.flows.commands.answers import CommandResult, answering
from ostinato.flows.commands.launching import SetOption, launch_flow, make_options
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.console import say
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import load_settings

# by name: their imports take a second that other commands need not wait
CERTIFYING = "ostinato.flows.commands.certifying"
OPTIONS = "ostinato.tasks.problems.certification.records:CertifyOptions"
RECIPES = "ostinato.flows.commands.problem_recipes"
SMALLEST = 20  # every split gets a problem

problem_sets = typer.Typer(no_args_is_help=True, help="Problems of repositories.")


@problem_sets.command("from")
@answering
def problems_from(
    place: Annotated[
        str,
        typer.Argument(
            help="a directory, a git repository (path or URL), NAME or NAME==VERSION, a folder of tasks "
            "of Harbor, or a file of instances of SWE-bench (.json, .jsonl, .parquet)"
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--as", help="name of the recipe; the source's when absent")
    ] = None,
    problems: Annotated[int, typer.Option(help="mutations over all splits", min=SMALLEST)] = 100,
    commits: Annotated[
        int, typer.Option(help="newest commits of a git repository to mine for problems", min=0)
    ] = 0,
    extends: Annotated[
        str, typer.Option(help="recipe whose other settings it takes")
    ] = "problems_16",
    clones: Annotated[
        Path | None,
        typer.Option(help="folder of clones, for SWE-bench: OWNER__NAME or NAME", file_okay=False),
    ] = None,
) -> CommandResult:
    """Makes problems of a repository that nobody prepared, or of tasks of another collection: writes NAME.toml
    here, then builds and proves them. Run it again and it continues. Exit code 2 when a repository leaves
    a split empty, or no task is a problem.
    """
    load_recipe(extends)
    if load_entry(f"{RECIPES}:is_collection")(place):
        write = load_entry(f"{RECIPES}:write_collection_recipe")
        path = write(load_settings(), place, name, extends, clones)
        made = launch_flow("problem_building", str(path), None, make_options(None, None, None))
        say(f"next: `ostinato run reinforcement --recipe {path}`")
        return CommandResult({"recipe": path, "problems": made}, lambda: None)
    if clones is not None:
        raise ConfigError(f"--clones {clones} with {place}, wanted it with instances of SWE-bench")
    write = load_entry(f"{RECIPES}:write_recipe")
    path = write(load_settings(), place, name, extends, problems, commits)
    parameters = {"needs_all_splits": True}
    options = make_options(None, None, None)
    made = launch_flow("problem_building", str(path), None, options, parameters)
    say(
        f"next: `ostinato demo --recipe {path}`, or name its table [[problems.repositories]] in another recipe"
    )
    return CommandResult({"recipe": path, "problems": made}, lambda: None)


@problem_sets.command("export")
@answering
def problems_export(
    problems: Annotated[
        str, typer.Argument(help="artifact problems/NAME@VERSION, or folder of a built set")
    ],
    directory: Annotated[Path, typer.Argument(help="gets a folder per problem", file_okay=False)],
    form: Annotated[str, typer.Option("--format", help="harbor")] = "harbor",
    limit: Annotated[
        int | None, typer.Option(help="problems written, the first ones", min=1)
    ] = None,
) -> CommandResult:
    """Writes problems as tasks of Harbor."""
    if form != "harbor":
        raise ConfigError(f"--format is {form!r}, wanted harbor")
    written = load_entry(f"{RECIPES}:export_tasks")(load_settings(), problems, directory, limit)
    return CommandResult(
        {"directory": directory, "tasks": written},
        lambda: typer.echo(f"{written} tasks written to {directory}"),
    )


@answering
def certify(
    problems: Annotated[
        str,
        typer.Argument(
            help="artifact problems/NAME@VERSION, folder of a built set, or an installed environment; "
            "with --verify a certificate.json"
        ),
    ],
    limit: Annotated[
        int | None, typer.Option(help="problems drawn; all when absent", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="draws problems, orders and hacks", min=0)] = 0,
    repeats: Annotated[int, typer.Option(help="rounds of runs that must agree", min=1)] = 2,
    hacks: Annotated[
        int, typer.Option(help="hacks of the adversary suite tried on each problem", min=0)
    ] = 5,
    fixes: Annotated[
        int, typer.Option(help="right fixes in other words, judged for each problem", min=0)
    ] = 1,
    at_a_time: Annotated[int, typer.Option(help="problems checked together", min=1)] = 2,
    checkpoint: Annotated[
        str | None, typer.Option(help="also measures how many of the problems it solves")
    ] = None,
    attempts: Annotated[
        int, typer.Option(help="attempts of the checkpoint at each problem", min=1)
    ] = 4,
    recipe: Annotated[
        str, typer.Option(help="recipe with the harness and engine that measure the checkpoint")
    ] = "nano",
    settings: SetOption = None,
    report: Annotated[
        Path | None, typer.Option(help="folder for certificate.json and certificate.html")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="checks the signature of a certificate; runs nothing")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(help="public key that a certificate must be signed by, with --verify"),
    ] = None,
) -> CommandResult:
    """Proves the problems of a set and tries to cheat on them, or continues. Exit code 1 when something is found."""
    if verify:
        signed = load_entry(f"{CERTIFYING}:verify")(Path(problems), key)
    else:
        options = load_entry(OPTIONS)(
            seed=seed, limit=limit, repeats=repeats, hacks=hacks, fixes=fixes
        )
        loaded = load_recipe(recipe, overrides=settings or ())
        try:
            signed = load_entry(f"{CERTIFYING}:certify")(
                load_settings(),
                problems,
                options,
                checkpoint=checkpoint,
                attempts=attempts,
                recipe=loaded,
                directory=report,
                at_a_time=at_a_time,
            )
        except KeyboardInterrupt:
            say("stopped; the same command continues from here")
            raise typer.Exit(130) from None
    return CommandResult(signed, lambda: None, 1 if signed.certificate.counts else 0)
