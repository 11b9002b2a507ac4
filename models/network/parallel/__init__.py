"""How a model and its rows lie on several ranks."""
