"""Virtual machines as sandboxes: templates, copy-on-write forks, branches with memory."""

from infra.sandbox.microvm.backend import MicroVmBackend
from infra.sandbox.microvm.image import ImageKind, build_image
from infra.sandbox.microvm.machine import Accelerator
from infra.sandbox.microvm.templates import BootLimits

__all__ = ["Accelerator", "BootLimits", "ImageKind", "MicroVmBackend", "build_image"]
