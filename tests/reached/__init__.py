"""`make reached`: how much of the product the documented commands run."""
