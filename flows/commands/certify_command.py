"""Options of `ostinato certify`."""

from pathlib import Path
from typing import Annotated

import typer

from ostinato.flows.commands.answers import Answer, answering
from ostinato.flows.commands.launching import SetOption
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.console import say
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.settings import load_settings

# by name: their imports take a second that other commands need not wait
CERTIFYING = "ostinato.flows.commands.certifying"
OPTIONS = "ostinato.tasks.problems.certification.records:CertifyOptions"


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
        str, typer.Option(help="whose harness and engine the checkpoint is measured with")
    ] = "nano",
    settings: SetOption = None,
    report: Annotated[
        Path | None, typer.Option(help="folder for certificate.json and certificate.html")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="checks the signature of a certificate; runs nothing")
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="with --verify: the public key that it must be signed by")
    ] = None,
) -> Answer:
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
    return Answer(signed, lambda: None, 1 if signed.certificate.counts else 0)
