"""Command lines of `ostinato certify` and `ostinato problems`."""

from pathlib import Path
from typing import Annotated

import typer

from ostinato.flows.commands.answers import CommandResult, answering, launch_flow
from ostinato.flows.commands.launching import RecipeOption, SeedOption, SetOption, make_options
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.checkpoints import NEWEST, refuse_unknown
from ostinato.flows.stages.console import say
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.records import Split
from ostinato.tasks.rollout.config import PROBE_ATTEMPTS

# Loaded by name: their imports would delay every other command by a second.
CERTIFYING = "ostinato.flows.commands.certifying"
OPTIONS = "ostinato.tasks.problems.certification.records:CertifyOptions"
RECIPES = "ostinato.flows.commands.problem_recipes"
SMALLEST = 20  # enough for every split to get a problem

problem_sets = typer.Typer(no_args_is_help=True, help="Problems of repositories.")


@problem_sets.command("from")
@answering
def problems_from(
    place: Annotated[
        str,
        typer.Argument(
            help="a directory, a git repository (path or URL), NAME or NAME==VERSION, a folder of Harbor "
            "tasks, or a file of SWE-bench instances (.json, .jsonl, .parquet)"
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--as", help="name of the recipe; the source's when absent")
    ] = None,
    problems: Annotated[int, typer.Option(help="mutations over all splits", min=SMALLEST)] = 100,
    commits: Annotated[
        int, typer.Option(help="newest commits of a git repository to mine for problems", min=0)
    ] = 0,
    refactorings: Annotated[
        int, typer.Option(help="renames and moves of public definitions over all splits", min=0)
    ] = 0,
    questions: Annotated[
        int, typer.Option(help="questions about the code over all splits", min=0)
    ] = 0,
    no_edits: Annotated[
        int, typer.Option(help="problems in which nothing is wrong over all splits", min=0)
    ] = 0,
    extends: Annotated[
        str, typer.Option(help="recipe to take all other settings from")
    ] = "problems_16",
    split: Annotated[
        Split | None,
        typer.Option(
            help="split that gets all problems: of every kind of the recipe, by its quotas; when absent, mutations "
            "are divided among the splits"
        ),
    ] = None,
    clones: Annotated[
        Path | None,
        typer.Option(help="folder of SWE-bench clones: OWNER__NAME or NAME", file_okay=False),
    ] = None,
) -> CommandResult:
    """Makes problems from any repository or another task collection: writes NAME.toml to the current folder, then
    builds and proves the problems. Run it again and it continues. Exit code 2 when a repository leaves a split
    empty, or no task can become a problem.
    """
    load_recipe(extends)
    if load_entry(f"{RECIPES}:is_collection")(place):
        write = load_entry(f"{RECIPES}:write_collection_recipe")
        path = write(load_settings(), place, name, extends, clones)
        built = launch_flow("problem_building", str(path), None, make_options(None, None, None))
        say(f"next: `ostinato run reinforcement --recipe {path}`")
        return CommandResult({"recipe": path, "problems": built})
    if clones is not None:
        raise ConfigError(f"--clones {clones} with {place}, wanted it with SWE-bench instances")
    write = load_entry(f"{RECIPES}:write_recipe")
    quotas = {"refactoring": refactorings, "question": questions, "no_edit": no_edits}
    path = write(load_settings(), place, name, extends, problems, commits, split, quotas)
    parameters = {"needs_all_splits": split is None}
    options = make_options(None, None, None)
    built = launch_flow("problem_building", str(path), None, options, parameters)
    say(
        f"next: `ostinato demo --recipe {path}`, or copy its table [[problems.repositories]] into another recipe"
    )
    return CommandResult({"recipe": path, "problems": built})


@problem_sets.command("export")
@answering
def problems_export(
    problems: Annotated[
        str, typer.Argument(help="artifact problems/NAME@VERSION, or folder of a built set")
    ],
    directory: Annotated[
        Path,
        typer.Argument(
            help="target: a folder per Harbor task, or the verifiers package", file_okay=False
        ),
    ],
    form: Annotated[str, typer.Option("--format", help="harbor or verifiers")] = "harbor",
    limit: Annotated[
        int | None, typer.Option(help="number of problems to write; all when absent", min=1)
    ] = None,
) -> CommandResult:
    """Writes problems as Harbor tasks, or as a package with a verifiers environment."""
    exports = {"harbor": "export_tasks", "verifiers": "export_package"}
    if form not in exports:
        raise ConfigError(f"--format is {form!r}, wanted {' or '.join(exports)}")
    export = load_entry(f"{RECIPES}:{exports[form]}")
    written = export(load_settings(), problems, directory, limit)
    return CommandResult(
        {"directory": directory, "tasks": written},
        lambda: typer.echo(f"{written} tasks written to {directory}"),
    )


@problem_sets.command("suite")
@answering
def problems_suite(
    problems: Annotated[
        str, typer.Argument(help="artifact problems/NAME@VERSION, or folder of a built set")
    ],
    to: Annotated[Path, typer.Option(help="new folder, which names the suite", file_okay=False)],
    split: Annotated[
        list[Split], typer.Option(help="split that its problems are of; repeatable")
    ] = [Split.HELD_OUT],  # noqa: B006 - typer copies it
    max_per_slice: Annotated[
        int | None, typer.Option(help="problems that each slice draws; all when absent", min=1)
    ] = None,
    version: Annotated[int, typer.Option(help="version of the suite", min=1)] = 1,
) -> CommandResult:
    """Makes a suite for `ostinato evaluate --suite`: a folder with problems, their repositories, slices and checksums."""
    make = load_entry(f"{RECIPES}:make_suite")
    title, slices = make(load_settings(), problems, to, version, split, max_per_slice)
    say(f"{title}: " + ", ".join(f"{name} {count}" for name, count in slices.items()))
    return CommandResult({"suite": title, "directory": to.resolve(), "slices": slices})


@problem_sets.command("probe")
@answering
def problems_probe(
    checkpoint: Annotated[
        str, typer.Option(help="champion, newest (the recipe's), or kind/name@version")
    ] = NEWEST,
    attempts: Annotated[int, typer.Option(help="attempts at each problem", min=1)] = PROBE_ATTEMPTS,
    problems: Annotated[
        str | None, typer.Option(help="artifact problems/NAME@VERSION; the recipe's when absent")
    ] = None,
    recipe: RecipeOption = "nano",
    seed: SeedOption = None,
    settings: SetOption = None,
) -> CommandResult:
    """Measures how often a checkpoint solves each training problem, for `[rollout.curriculum]` of RL. Run it again and
    it continues.
    """
    options = make_options(settings, None, None)
    loaded = load_recipe(recipe, seed=seed, overrides=options.overrides)
    refuse_unknown(load_settings(), loaded, [checkpoint])
    parameters = {"checkpoint": checkpoint, "attempts": attempts, "problems": problems}
    probes = launch_flow("problem_probing", recipe, seed, options, parameters)
    say(f'next: `[rollout.curriculum]` `probes = "{probes}"` in the recipe')
    return CommandResult({"probes": probes})


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
        int | None, typer.Option(help="number of problems to draw; all when absent", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of drawn problems, orders and hacks", min=0)] = 0,
    repeats: Annotated[int, typer.Option(help="rounds of runs that must agree", min=1)] = 2,
    hacks: Annotated[
        int, typer.Option(help="hacks of the adversary suite tried per problem", min=0)
    ] = 5,
    fixes: Annotated[
        int, typer.Option(help="differently written right fixes judged per problem", min=0)
    ] = 1,
    at_a_time: Annotated[int, typer.Option(help="problems checked in parallel", min=1)] = 2,
    checkpoint: Annotated[
        str | None, typer.Option(help="checkpoint whose solve rate is also measured")
    ] = None,
    attempts: Annotated[
        int, typer.Option(help="attempts of the checkpoint per problem", min=1)
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
        typer.Option(help="public key of the required signature, with --verify"),
    ] = None,
) -> CommandResult:
    """Proves the problems of a set and tries to cheat on them. Run it again and it continues. Exit code 1: findings."""
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
    return CommandResult(signed, exit_code=1 if signed.certificate.counts else 0)
