"""The decode engines by name.

A package adds one through the entry point group `ostinato.engines`, which names a function that makes an
`Engine` (start.py) from a shape, weights, their version, an `EngineConfig` and the engine's name. Imports
no torch, so that recipes can be read without it.
"""

from ostinato.infra.platform.plugins import PluginGroup

ENGINES = PluginGroup(
    "ostinato.engines",
    "decoding.engine",
    {
        "local": "ostinato.infra.serving.engine.local:LocalEngine",
        "vllm": "ostinato.infra.serving.engine.vllm_client:VllmEngine",  # needs the extra
    },
)
