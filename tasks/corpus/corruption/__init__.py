"""Functions broken in one line, and what tests would report."""
