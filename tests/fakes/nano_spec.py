"""Shape of the model of the `nano` recipe."""

from ostinato.flows.recipe import load_recipe

NANO = load_recipe("nano").model
