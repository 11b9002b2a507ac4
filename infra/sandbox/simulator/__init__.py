"""The fleet's policy on a virtual clock: 100,000 boxes in minutes, the same for the same seed."""
