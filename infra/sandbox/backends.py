"""The one place that chooses between kinds of sandboxes."""

from pathlib import Path

from ostinato.infra.platform.settings import load_settings
from ostinato.infra.sandbox.host.backend import NamespaceBackend
from ostinato.infra.sandbox.microvm import MicroVmBackend, check_host
from ostinato.infra.sandbox.protocol import SandboxBackend, SandboxKind


def open_backend(kind: SandboxKind = SandboxKind.NAMESPACE) -> SandboxBackend:
    """A backend of this kind for the running event loop."""
    match kind:
        case SandboxKind.NAMESPACE:
            return NamespaceBackend()
        case SandboxKind.MICROVM:
            return MicroVmBackend(_image_folder())


def check_kind(kind: SandboxKind) -> None:
    """Refuse a kind that this machine cannot run. The error names what to install."""
    if kind is SandboxKind.MICROVM:
        check_host(_image_folder())


def _image_folder() -> Path:
    return load_settings().cache_directory / "microvm"
