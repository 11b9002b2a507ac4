"""The RayJob: fields that KubeRay and Kubernetes know, options that Ray knows, commands and variables of ours."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ostinato.infra.deploy import FOLDER
from tests.unit.infra.deploy.reading import (
    ray_start_options,
    refuse_unknown_command,
    refuse_unknown_fields,
    refuse_unknown_variables,
)

CLAIM, JOB = yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
POOL = json.loads((FOLDER / "pool_kubernetes.json").read_text())
SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())


def test_fields_are_those_of_kuberay_and_kubernetes() -> None:
    jsonschema.validate(JOB, SCHEMA, cls=jsonschema.Draft202012Validator)
    refuse_unknown_fields(CLAIM, "V1PersistentVolumeClaim")
    for group in GROUPS:
        refuse_unknown_fields(group["template"], "V1PodTemplateSpec")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"hostUser": False}, "V1PodSpec"), ({"hostUsers": "no"}, "V1PodSpec"), ([{}], "V1PodSpec")],
)
def test_unknown_fields_are_refused(fields: Any, kind: str) -> None:
    with pytest.raises(AssertionError):
        refuse_unknown_fields(fields, kind)


def test_options_of_ray_and_its_version_are_ours() -> None:
    assert CLUSTER["rayVersion"] == importlib.metadata.version("ray")
    assert CLUSTER["authOptions"] == {"mode": "token"}
    for group in GROUPS:
        assert set(group["rayStartParams"]) <= ray_start_options()


def test_the_entry_is_a_command_of_ours() -> None:
    refuse_unknown_command(JOB["spec"]["entrypoint"])


def test_pods_have_volumes_and_rights_as_those_of_the_pool() -> None:
    in_pool = POOL["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    defaults = {name: item.get("default") for name, item in POOL["variables"]["properties"].items()}
    assert defaults["home_claim"] == CLAIM["metadata"]["name"]
    for group in GROUPS:
        pod = group["template"]["spec"]
        [container], [other] = pod["containers"], in_pool["containers"]
        refuse_unknown_variables({item["name"] for item in container["env"]})
        assert container["envFrom"][0]["secretRef"]["name"] == defaults["settings_secret"]
        assert container["image"] == defaults["image"]
        assert container["securityContext"] == other["securityContext"]
        assert container["volumeMounts"] == other["volumeMounts"]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == defaults["home_claim"]
        assert (pod["hostUsers"], pod["securityContext"]) == (False, in_pool["securityContext"])
