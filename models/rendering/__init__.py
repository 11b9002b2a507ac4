"""Tokenizer and chat template: the tokens sampled are the tokens trained."""

from models.rendering.renderer import Renderer
from models.rendering.training import train_tokenizer

__all__ = ["Renderer", "train_tokenizer"]
