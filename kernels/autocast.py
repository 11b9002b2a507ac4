"""The dtype of torch's autocast, for operations that autocast does not cover."""

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The autocast dtype of the device's type. None if autocast is off or unavailable."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)
