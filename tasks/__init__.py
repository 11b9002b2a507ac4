"""Stages, one folder each. Importing this package prepares the import of Megatron-core (models/late_compilation.py)."""

import ostinato.models  # noqa: F401 - before any stage imports Megatron-core
