"""The gateway against its published schema: what fits it is answered, what does not is refused, and
every answer looks as the schema says. Requests are drawn by schemathesis.
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from ostinato.infra.serving.gateway.config import GatewayConfig
from ostinato.infra.serving.gateway.limits import UPLOADS_PATH
from tests.fakes.toy_gateway import Toy, make_renderer, make_toy_gateway

SERVED = GatewayConfig.model_fields["model_name"].default
KEY = {"Authorization": "Bearer key-of-team"}
SETTINGS = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.generate, Phase.shrink],
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy_gateway(tmp_path_factory.mktemp("gateway"), make_renderer())


@pytest.mark.parametrize("examples", [8, pytest.param(25, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_requests_of_the_schema_are_answered_as_it_says(
    toy: Toy, mode: GenerationMode, examples: int
) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", toy.app)
    tried = []
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        is_without_wrongs = operation.method != "post" or operation.path == UPLOADS_PATH
        if mode is GenerationMode.NEGATIVE and is_without_wrongs:
            continue  # no body at all, or one of any bytes

        @settings(SETTINGS, max_examples=examples)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case) -> None:
            # no schema says which bytes are an archive, or which results belong to which calls of a conversation: any
            # are answered, few are taken. Only a request that names the served model gets so far, and hypothesis draws
            # that name in about one run of ten, from the constants of our own sources
            is_archive = case.operation.path == UPLOADS_PATH and case.method == "POST"
            names_model = isinstance(case.body, dict) and case.body.get("model") == SERVED
            unasked: list[CheckFunction] = (
                [positive_data_acceptance] if is_archive or names_model else []
            )
            case.call_and_validate(headers=KEY, excluded_checks=unasked)

        ask()
        tried.append(operation.path)
    assert {"/v1/chat/completions", "/v1/feedback"} <= set(tried)


async def test_every_route_but_health_wants_a_key(toy: Toy) -> None:
    async with toy.client(key="nobody") as client:
        for path, operations in toy.app.openapi()["paths"].items():
            for method in operations:
                names = dict.fromkeys(("session_id", "repository_id", "model_id"), "none")
                answer = await client.request(method, path.format(**names), json={})
                assert answer.status_code == (200 if path == "/healthz" else 401), path


def test_every_route_is_in_the_schema(toy: Toy) -> None:
    unlisted = {getattr(route, "path_format", "") for route in toy.app.routes} - set(
        toy.app.openapi()["paths"]
    )
    assert unlisted <= {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
