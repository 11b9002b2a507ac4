"""Tokenizer and chat template: the tokens sampled are the tokens trained."""

from ostinato.models.rendering.chat_template import load_renderer
from ostinato.models.rendering.renderer import Renderer
from ostinato.models.rendering.training import train_tokenizer

__all__ = ["Renderer", "load_renderer", "train_tokenizer"]
