"""What torch's autocast asks of operations that it does not know."""

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Dtype that products take on a device of this kind. None outside autocast, and where there is none."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)
