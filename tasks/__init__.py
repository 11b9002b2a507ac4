"""Stages of the mission, one folder each. Importing it prepares Megatron-core's import (models/late_compilation.py)."""

import ostinato.models  # noqa: F401 - before any stage imports Megatron-core
