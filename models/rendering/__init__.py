"""Tokenizer and chat template: the tokens sampled are the tokens trained."""

from ostinato.models.rendering.renderer import Renderer
from ostinato.models.rendering.training import train_tokenizer

__all__ = ["Renderer", "train_tokenizer"]
