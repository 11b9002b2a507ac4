"""The Containerfile: hadolint finds nothing, and what it copies, installs, sets and runs exists."""

import json
import re
import shlex

from ostinato.flows.operating.local_prefect import IMAGE_REPOSITORY
from ostinato.infra.deploy import FOLDER
from ostinato.infra.sandbox.host.box import CONTAINER_OPTIONS, HOW_TO_ALLOW_BOXES
from tests.unit.infra.deploy.reading import (
    ROOT,
    project,
    refuse_unknown_command,
    refuse_unknown_variables,
    run_checker,
)

TEXT = (FOLDER / "Containerfile").read_text()
PLAIN = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE))


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", PLAIN, re.MULTILINE)


def test_hadolint_finds_nothing() -> None:
    assert run_checker("hadolint", FOLDER / "Containerfile") == ""


def test_what_is_copied_and_left_out_is_there() -> None:
    for line in instructions("COPY"):
        *sources, _ = [word for word in line.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
    left_out = (FOLDER / "Containerfile.dockerignore").read_text().split()
    assert {"infra", "ostinato", "prefect.yaml"}.isdisjoint(left_out)
    assert {"tests", "docs", ".git", ".venv", ".ostinato"} <= set(left_out)


def test_packages_are_those_that_boxes_need() -> None:
    installed = re.search(r"apt-get install \S+ \S+ (.*?) &&", PLAIN)
    assert installed is not None
    # on clusters 3.12, which has the newer Megatron-core
    python = {"python3.12", "python3.12-venv"}
    assert {"gcc", "libc6-dev", "git", *python} <= set(installed[1].split())
    assert "python3.12 -m venv venv" in PLAIN
    assert "`gcc libc6-dev`" in (ROOT / "docs/installation.md").read_text()


def test_extras_and_pins_exist() -> None:
    [extras] = re.findall(r"'\./source\[(.+?)\]'", PLAIN)
    assert set(extras.split(",")) <= set(project()["optional-dependencies"])
    assert PLAIN.count("pip install") == PLAIN.count("constraints.txt)") + PLAIN.count("-c constra")
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_variables_are_settings_and_the_user_has_no_rights() -> None:
    pairs = dict(word.split("=", 1) for word in shlex.split(" ".join(instructions("ENV"))))
    refuse_unknown_variables(set(pairs))
    assert pairs["OSTINATO_REPOSITORY"] == IMAGE_REPOSITORY == instructions("WORKDIR")[-1]
    assert instructions("VOLUME") == [pairs["OSTINATO_HOME"]]
    assert instructions("USER") == ["10001"]
    assert "useradd --create-home --uid 10001" in PLAIN


def test_command_exists() -> None:
    [command] = instructions("CMD")
    refuse_unknown_command(shlex.join(json.loads(command)))


def test_options_of_the_documented_line_are_those_of_doctor() -> None:
    guide = (ROOT / "docs/cluster.md").read_text()
    [line] = re.findall(r"^docker run .*$", guide, re.MULTILINE)
    words = shlex.split(line)
    given = [words[index + 1] for index, word in enumerate(words) if word == "--security-opt"]
    assert given == list(CONTAINER_OPTIONS)
    assert all(f"--security-opt {option}" in HOW_TO_ALLOW_BOXES for option in given)
    assert f"source=ostinato,target={instructions('VOLUME')[0]},type=volume" in words
    refuse_unknown_command(shlex.join(words[-4:]))
