"""Virtual machines as sandboxes: templates, copy-on-write forks, and snapshots with memory."""

from ostinato.infra.sandbox.microvm.backend import MicroVmBackend, check_host
from ostinato.infra.sandbox.microvm.image import ImageKind, build_image
from ostinato.infra.sandbox.microvm.machine import Accelerator
from ostinato.infra.sandbox.microvm.templates import BootLimits

__all__ = ["Accelerator", "BootLimits", "ImageKind", "MicroVmBackend", "build_image", "check_host"]
