"""Distribution of a model and its rows over ranks."""
