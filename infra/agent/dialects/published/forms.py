"""The table of published tool-call forms.

Sources: the chat templates of the models named below, and the formats that their makers document.
"""
# ruff: noqa: RUF001

from ostinato.infra.agent.dialects.dialect import Dialect
from ostinato.infra.agent.dialects.published.json_calls import ARGUMENT_KEYS
from ostinato.infra.agent.dialects.published.reading import CallForm, Texts, Way

_KEYS = "|".join(ARGUMENT_KEYS)
_FUNCTION = r'"type"\s*:\s*"function"\s*,\s*'
_CALL_AHEAD = rf'(?=(?:\[\s*)?\{{\s*(?:{_FUNCTION})?"name"\s*:\s*"[^"\n]*"\s*,\s*"(?:{_KEYS})"\s*:)'
_LINE = r"(?<![^\n])[ \t]*"
_TAGGED = Way(r"<tool_call>\s*", "call", r"\s*</tool_call>")

TAGGED_JSON = CallForm(
    ways=(_TAGGED,),
    marks="<tool_call>",
    wanted="a JSON object with name and arguments between <tool_call> and </tool_call>",
    written='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    openers=("<tool_call>",),
)
"""Calls as Qwen's templates state them. The gateway states them for templates without a known form."""

HERMES_FORM = CallForm(
    ways=(
        _TAGGED,
        # Qwen2.5-Coder was not trained on the tags that its template states
        Way(rf"```[a-z_]*[ \t]*\n\s*{_CALL_AHEAD}", "call", r"\s*```"),
        Way(rf"<tools>\s*{_CALL_AHEAD}", "call", r"\s*</tools>"),
        Way(_LINE + _CALL_AHEAD, "call", r"(?:\s*</tool_call>)?"),
    ),
    marks="</?tool_call>",
    wanted=TAGGED_JSON.wanted,
    written=TAGGED_JSON.written,
)


QWEN3_CODER_FORM = CallForm(
    ways=(
        Way(
            r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>\s*",
            Texts(
                r"<parameter=(?P<key>[^<>\n]+)>",
                r"</parameter>(?=\s*(?:<parameter=|</function>))\s*",
                drops_newlines=True,
            ),
            r"</function>(?:\s*</tool_call>)?",
        ),
    ),
    marks="</?tool_call>|</?function[=>]",
    wanted="<tool_call>, <function=NAME>, a <parameter=KEY> for each argument, and their closing tags",
    written="<tool_call>\n<function=NAME>\n[<parameter=KEY>\nVALUE\n</parameter>\n]</function>\n</tool_call>",
    openers=("<tool_call>", "<function="),
)
LLAMA3_FORM = CallForm(
    ways=(
        Way(r"<\|python_tag\|>\s*", "call", r"\s*(?:;(?=\s*\{))?"),
        Way(rf"(?:{_LINE}|(?<=;)\s*){_CALL_AHEAD}", "call", r"\s*(?:;(?=\s*\{))?"),
    ),
    marks=r"<\|python_tag\|>",
    wanted="a JSON object with name and parameters, and nothing else in the answer",
    written='{"name": "NAME", "parameters": ARGUMENTS}',
    several=False,
    openers=("<|python_tag|>", "{", "["),
)
DEEPSEEK_V3_FORM = CallForm(
    ways=(
        Way(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>(?P<name>[^\s<{]+)\s*```(?:json)?\s*",
            "arguments",
            r"\s*```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        ),
    ),
    marks="<｜tool▁call(?:s▁begin|▁begin|▁end)｜>",
    wanted="<｜tool▁calls▁begin｜>, for each call <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, its arguments as "
    "JSON in a fenced block and <｜tool▁call▁end｜>, then <｜tool▁calls▁end｜>",
    written="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    openers=("<｜tool▁call",),
)
DEEPSEEK_V31_FORM = CallForm(
    ways=(
        Way(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?P<name>[^\s<{]+)\s*<｜tool▁sep｜>\s*",
            "arguments",
            r"\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        ),
    ),
    marks=DEEPSEEK_V3_FORM.marks,
    wanted="<｜tool▁calls▁begin｜>, for each call <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>, its arguments as JSON and "
    "<｜tool▁call▁end｜>, then <｜tool▁calls▁end｜>",
    written="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    openers=DEEPSEEK_V3_FORM.openers,
)
KIMI_K2_FORM = CallForm(
    ways=(
        Way(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
            r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
            "arguments",
            r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        ),
    ),
    marks=r"<\|tool_call(?:s_section_begin|_begin|_end)\|>",
    wanted="<|tool_calls_section_begin|>, for each call <|tool_call_begin|>functions.NAME:INDEX"
    "<|tool_call_argument_begin|>, its arguments as JSON and <|tool_call_end|>, then <|tool_calls_section_end|>",
    written="<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
    "<|tool_call_end|><|tool_calls_section_end|>",
    openers=("<|tool_call",),
)
GLM4_FORM = CallForm(
    ways=(
        Way(
            r"<tool_call>\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>|</tool_call>)",
            Texts(
                r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
                r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))\s*",
            ),
            r"\s*</tool_call>",
        ),
    ),
    marks="</?tool_call>|</?arg_key>",
    wanted="<tool_call>NAME, an <arg_key> and an <arg_value> for each argument, and </tool_call>",
    written="<tool_call>NAME\n[<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n]</tool_call>",
    openers=("<tool_call>",),
)
MISTRAL_FORM = CallForm(
    ways=(
        Way(
            r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)",
            "arguments",
        ),
        Way(r"\[TOOL_CALLS\]\s*(?=[\[{])", "call"),
    ),
    marks=r"\[TOOL_CALLS\]",
    wanted="[TOOL_CALLS] and a JSON list of objects with name and arguments",
    written='[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    openers=("[TOOL_CALLS]",),
)
HARMONY_FORM = CallForm(
    ways=(
        Way(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s?to=functions\.(?P<name>[\w.-]++)\s*"
            r"(?:<\|channel\|>\w++\s*)?(?:(?:<\|constrain\|>)?\w++\s*)?<\|message\|>\s*",
            "arguments",
            r"\s*(?:<\|call\|>|<\|end\|>|\Z)",
        ),
    ),
    marks=r"to=functions\.|<\|call\|>",
    hidden=r"<\|channel\|>analysis\s*<\|message\|>.*?(?:<\|end\|>|\Z)",
    wanted="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|> and its arguments as JSON",
    written="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
    several=False,
)


def _dialect(form: CallForm) -> Dialect:
    return Dialect(
        parse=form.parse,
        write=form.write,
        find_calls=form.find_calls,
        guide=f"A call is {form.wanted}.",
        is_published=True,
        several_calls=form.several,
    )


HERMES = _dialect(HERMES_FORM)
QWEN3_CODER = _dialect(QWEN3_CODER_FORM)
LLAMA3 = _dialect(LLAMA3_FORM)
DEEPSEEK_V3 = _dialect(DEEPSEEK_V3_FORM)
DEEPSEEK_V31 = _dialect(DEEPSEEK_V31_FORM)
KIMI_K2 = _dialect(KIMI_K2_FORM)
GLM4 = _dialect(GLM4_FORM)
MISTRAL = _dialect(MISTRAL_FORM)
HARMONY = _dialect(HARMONY_FORM)
