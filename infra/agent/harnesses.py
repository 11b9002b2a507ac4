"""Third-party agents, as programs that run in the box of an attempt.

A program talks to a model over HTTP as usual; here the server is the attempt's own session
(infra/serving/attempts/), whose address is in the program's environment and on its command line.
"""

import shlex
from collections.abc import Mapping

from pydantic import Field, PositiveInt

from ostinato.infra.platform.record import Record

HARNESS_FOLDER = "/harness"  # in boxes: site/ of Python packages, node_modules/ of npm's
SERVED_MODEL = "ostinato"


class HarnessCommand(Record):
    """A program and its command line. `command`, `environment` and `files` may contain {url} (the server, without
    /v1), {key} and {model}; `command` also {prompt}, quoted for the shell.
    """

    packages: tuple[str, ...] = ()
    """Python packages as name==version, installed from wheels into /harness/site"""
    with_dependencies: bool = True
    """whether dependencies of the packages are installed too; false: `packages` lists all of them"""
    npm_packages: tuple[str, ...] = ()
    """npm packages as name@version, installed into /harness/node_modules without running their scripts"""
    command: str = Field(description="command line, run by a shell in /repo")
    environment: dict[str, str] = Field(default={})
    """variables of the program, which its own commands inherit"""
    files: dict[str, str] = Field(default={})
    """texts by path below /tmp, its home, written before it starts"""
    final_message: str = ""
    """file that holds its last message; empty: the end of its output"""
    memory_bytes: PositiveInt = Field(default=1 << 30, description="memory of the whole box")
    process_memory_bytes: PositiveInt = 4 << 30
    """address space of one process; JavaScript engines reserve much more than they use"""

    def filled(self, prompt: str, values: Mapping[str, str]) -> "HarnessCommand":
        """The program of one attempt."""

        def fill(text: str) -> str:
            for name, value in values.items():
                text = text.replace(f"{{{name}}}", value)
            return text

        # the prompt comes last, so that braces in it are kept
        return self.model_copy(
            update={
                "command": fill(self.command).replace("{prompt}", shlex.quote(prompt)),
                "environment": {name: fill(text) for name, text in self.environment.items()},
                "files": {path: fill(text) for path, text in self.files.items()},
            }
        )


# The imports of the program mini. The package also requires datasets (half a gigabyte) for its benchmarks alone.
_MINI_PACKAGES = (
    *("mini-swe-agent==2.4.6", "litellm==1.110.2", "openai==3.57.0"),
    *("aiohappyeyeballs==2.7.1", "aiohttp==3.14.5", "aiosignal==1.4.0"),
    *("annotated-doc==0.0.7", "annotated-types==0.8.0", "anyio==4.16.0", "attrs==26.1.0"),
    *("certifi==2026.10.19.post1", "charset-normalizer==3.5.3", "click==8.5.1"),
    *("fastuuid==0.14.0", "frozenlist==1.8.0", "h11==0.16.0", "h2==4.4.1", "hpack==4.2.0"),
    *("httpcore==1.0.9", "httpcore2==2.16.2", "httpx==0.28.1", "httpx2==2.16.2"),
    *("hyperframe==6.1.0", "idna==3.20", "importlib-metadata==8.9.0", "jinja2==3.1.6"),
    *("jiter==0.19.0", "markdown-it-py==4.3.0", "markupsafe==3.0.4", "mdurl==0.1.2"),
    *("multidict==7.2.1", "packaging==26.4", "platformdirs==4.14.8"),
    *("prompt-toolkit==3.0.53", "propcache==0.5.4", "pydantic==2.14.4"),
    *("pydantic-core==2.50.5", "pydantic-settings==2.16.3", "pygments==2.21.0"),
    *("python-dotenv==1.2.4", "pyyaml==6.0.4", "regex==2026.11.19", "requests==2.34.2"),
    *("rich==15.0.0", "shellingham==1.5.4", "sniffio==1.3.1", "tenacity==9.2.1"),
    *("tiktoken==0.14.0", "tqdm==4.70.1", "truststore==0.10.5", "typer==0.29.2"),
    *("typing-extensions==4.16.0", "typing-inspection==0.4.5", "urllib3==2.8.0"),
    *("wcwidth==0.9.4", "yarl==1.25.1", "zipp==4.1.2"),
)
_MINI = HarnessCommand(
    packages=_MINI_PACKAGES,
    with_dependencies=False,
    command="",
    environment={
        "OPENAI_API_BASE": "{url}/v1",
        "OPENAI_API_KEY": "{key}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/.mini",
        "MSWEA_SILENT_STARTUP": "1",
    },
)


def _mini(config: str, model_class: str) -> HarnessCommand:
    start = (
        f"import sys; sys.path.insert(0, '{HARNESS_FOLDER}/site'); "
        "from minisweagent.run.mini import app; app()"
    )
    command = (
        f"python3 -c {shlex.quote(start)} --yolo --exit-immediately --agent-class default "
        f"--config {config} --model-class {model_class} --model openai/{{model}} "
        "--output /tmp/.mini.json --task {prompt}"
    )
    return _MINI.model_copy(update={"command": command})


MINI_SWE_AGENT = _mini("mini_textbased.yaml", "litellm_textbased")
"""mini-swe-agent with commands in fenced blocks, which any model can write."""
MINI_SWE_AGENT_TOOLS = _mini("mini.yaml", "litellm")
"""mini-swe-agent with its one tool, bash, in the model's own form of calls."""

_RESERVED_BYTES = 1 << 40  # address space that JavaScript engines and Go programs reserve at once
CODEX = HarnessCommand(
    npm_packages=("@openai/codex@0.171.0",),
    command=(
        f"{HARNESS_FOLDER}/node_modules/@openai/codex-linux-*/vendor/*/bin/codex exec "
        "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "
        "--output-last-message /tmp/.codex/last.txt {prompt}"
    ),
    environment={"CODEX_HOME": "/tmp/.codex", "OPENAI_API_KEY": "{key}"},
    files={
        "/tmp/.codex/config.toml": """model = "{model}"
model_provider = "session"
[model_providers.session]
name = "session"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    },
    final_message="/tmp/.codex/last.txt",
    process_memory_bytes=_RESERVED_BYTES,
)
"""Codex over /v1/responses."""
CLAUDE_CODE = HarnessCommand(
    npm_packages=("@anthropic-ai/claude-code@2.1.332",),
    command=(
        f"{HARNESS_FOLDER}/node_modules/@anthropic-ai/claude-code-linux-*/claude "
        "--print --dangerously-skip-permissions --model {model} {prompt}"
    ),
    environment={
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_API_KEY": "{key}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": "/tmp/.claude",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    },
    process_memory_bytes=_RESERVED_BYTES,
)
"""Claude Code over /v1/messages."""
OPENCODE = HarnessCommand(
    npm_packages=("opencode-ai@1.18.33",),
    command=f"{HARNESS_FOLDER}/node_modules/opencode-linux-*[0-9]/bin/opencode run {{prompt}}",
    environment={"OPENCODE_CONFIG": "/tmp/.opencode.json", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    files={
        "/tmp/.opencode.json": """{"model": "session/{model}", "small_model": "session/{model}",
"permission": "allow", "provider": {"session": {"npm": "@ai-sdk/openai-compatible",
"options": {"baseURL": "{url}/v1", "apiKey": "{key}"}, "models": {"{model}": {}}}}}
"""
    },
    process_memory_bytes=_RESERVED_BYTES,
)
"""OpenCode over chat completions."""
