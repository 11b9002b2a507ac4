"""Known ways to cheat, and alarms on their rates."""
