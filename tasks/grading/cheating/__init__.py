"""Known ways to cheat, and alarms at their rates."""
