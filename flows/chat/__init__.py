"""`ostinato chat`: a terminal agent over any served checkpoint, with the harness of training."""
