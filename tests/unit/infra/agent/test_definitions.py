"""One definition a tool: schemas are valid, checks and schemas agree, paths have one spelling."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.config import HarnessConfig, ToolPolicy
from ostinato.infra.agent.dialects.dialect import catalogue_of, enabled_tools
from ostinato.infra.agent.dialects.full.calls import call_from_json
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.tools.definition import normalize_path, tool_schemas
from ostinato.infra.agent.transcript import CallStatus

values = (
    st.none()
    | st.booleans()
    | st.integers(-3, 700)
    | st.text(max_size=5)
    | st.lists(st.sampled_from(["a.py", "[ ] test", "[x] done", "src", "1"]), max_size=3)
    | st.sampled_from(["lines", "files", "a/b.py", "job-1", "*.py"])
)


@pytest.mark.parametrize("dialect", ["compact", "full"])
def test_schemas_are_valid_json_schemas(dialect: str) -> None:
    tools = catalogue_of(HarnessConfig(dialect=dialect))
    for schema, tool in zip(tool_schemas(tools.values()), tools.values(), strict=True):
        parameters = schema["function"]["parameters"]
        jsonschema.Draft202012Validator.check_schema(parameters)
        assert set(parameters["properties"]) == {argument.name for argument in tool.arguments}
        assert json.loads(json.dumps(schema)) == schema


@settings(deadline=None)
@given(st.data())
def test_what_the_check_accepts_the_schema_accepts(data: st.DataObject) -> None:
    tool = data.draw(st.sampled_from(list(FULL_TOOLS.values())))
    names = st.sampled_from([*(argument.name for argument in tool.arguments), "other"])
    arguments = data.draw(st.dictionaries(names, values, max_size=4))
    (schema,) = tool_schemas([tool])
    call = call_from_json(tool.name, json.dumps(arguments), FULL_TOOLS)
    if call.status is CallStatus.OK:
        jsonschema.validate(arguments, schema["function"]["parameters"])


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b.py", "..", ".", "", "/", "repo"]), max_size=5))
def test_a_path_is_inside_in_one_spelling_or_refused(parts: list[str]) -> None:
    try:
        path = normalize_path("/".join(parts))
    except ValueError:
        return
    assert not path.startswith(("/", "../", "./"))
    assert path not in ("..", ".")
    assert normalize_path(path) == normalize_path(f"./{path}") == path


def test_a_tool_set_may_be_smaller_and_knows_its_dialect() -> None:
    config = HarnessConfig(dialect="full")
    assert list(enabled_tools(config, ToolPolicy())) == list(FULL_TOOLS)
    assert list(enabled_tools(config, ToolPolicy(tools=("grep",)))) == ["grep"]
    assert list(enabled_tools(HarnessConfig(dialect="full", tools=("glob",)), ToolPolicy())) == [
        "glob"
    ]
    with pytest.raises(ValueError, match="glob"):
        HarnessConfig(tools=("glob",))


def test_limits_that_cannot_hold_together_are_refused() -> None:
    with pytest.raises(ValueError, match="at most context_tokens"):
        HarnessConfig(summarise_at_tokens=500, summary_limit_tokens=100)
    with pytest.raises(ValueError, match="for each of max_calls_per_turn"):
        HarnessConfig(turn_limit_characters=400)
