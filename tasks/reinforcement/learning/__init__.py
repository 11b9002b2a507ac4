"""Optimiser steps on graded groups (Dr. GRPO), and publishing of the new weights."""
