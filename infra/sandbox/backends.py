"""The one place that chooses between kinds of sandboxes.

A backend is imported only when it is opened or checked, because every flow imports this module and few open a sandbox.
"""

from pathlib import Path
from pkgutil import resolve_name

from ostinato.infra.platform.settings import load_settings
from ostinato.infra.sandbox.protocol import SandboxBackend, SandboxKind


def open_backend(kind: SandboxKind = SandboxKind.NAMESPACE) -> SandboxBackend:
    """A backend of this kind for the running event loop."""
    match kind:
        case SandboxKind.NAMESPACE:
            return resolve_name("ostinato.infra.sandbox.host.backend:NamespaceBackend")()
        case SandboxKind.MICROVM:
            return resolve_name("ostinato.infra.sandbox.microvm:MicroVmBackend")(_image_folder())


def check_kind(kind: SandboxKind) -> None:
    """Raises SandboxError for a kind that this machine cannot run. The message names what to install."""
    if kind is SandboxKind.MICROVM:
        resolve_name("ostinato.infra.sandbox.microvm:check_host")(_image_folder())


def _image_folder() -> Path:
    return load_settings().cache_directory / "microvm"
