"""Source files that a corpus takes: licences, copies, functions, problems kept apart."""
