"""Running totals of one decode engine. A reader subtracts two snapshots."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class EngineStatistics:
    """Totals since the engine was made."""

    steps: int = 0
    busy_seconds: float = 0.0
    decode_only_seconds: float = 0.0  # of steps that fed no prompt
    decode_only_tokens: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens found in the cache
    occupied_slot_steps: int = 0  # sum over steps of decoding slots
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def count_step(self, decoding: int, gained: int, seconds: float, *, has_prefill: bool) -> None:
        """Adds one step."""
        self.steps += 1
        self.busy_seconds += seconds
        self.generated_tokens += gained
        self.occupied_slot_steps += decoding
        if not has_prefill:
            self.decode_only_seconds += seconds
            self.decode_only_tokens += gained

    def snapshot(self) -> dict[str, float]:
        """The totals as plain numbers."""
        return {name: float(value) for name, value in asdict(self).items()}
