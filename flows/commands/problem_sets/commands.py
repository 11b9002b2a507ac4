"""`ostinato problems`: problems of repositories and of other collections, and tasks for others."""

from pathlib import Path
from typing import Annotated

import typer

from ostinato.flows.commands.answers import Answer, answering
from ostinato.flows.commands.launching import launch_flow, make_options
from ostinato.flows.commands.problem_sets import bringing, collecting
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.console import say
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import load_settings

EXPORTING = "ostinato.flows.commands.problem_sets.exporting:export_tasks"  # a second that other commands need not wait

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
    problems: Annotated[
        int, typer.Option(help="mutations over all splits", min=bringing.SMALLEST)
    ] = 100,
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
) -> Answer:
    """Makes problems of a repository that nobody prepared, or of tasks of another collection: writes NAME.toml
    here, then builds and proves them. Run it again and it continues. Exit code 2 when a repository leaves
    a split empty, or no task is a problem.
    """
    load_recipe(extends)
    if collecting.is_collection(place):
        path = collecting.write_collection_recipe(load_settings(), place, name, extends, clones)
        made = launch_flow("problem_building", str(path), None, make_options(None, None, None))
        say(f"next: `ostinato run reinforcement --recipe {path}`")
        return Answer({"recipe": path, "problems": made}, lambda: None)
    if clones is not None:
        raise ConfigError(f"--clones {clones} with {place}, wanted it with instances of SWE-bench")
    path = bringing.write_recipe(load_settings(), place, name, extends, problems, commits)
    parameters = {"needs_all_splits": True}
    options = make_options(None, None, None)
    made = launch_flow("problem_building", str(path), None, options, parameters)
    say(
        f"next: `ostinato demo --recipe {path}`, or name its table [[problems.repositories]] in another recipe"
    )
    return Answer({"recipe": path, "problems": made}, lambda: None)


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
) -> Answer:
    """Writes problems as tasks of Harbor."""
    if form != "harbor":
        raise ConfigError(f"--format is {form!r}, wanted harbor")
    written = load_entry(EXPORTING)(load_settings(), problems, directory, limit)
    return Answer(
        {"directory": directory, "tasks": written},
        lambda: typer.echo(f"{written} tasks written to {directory}"),
    )
