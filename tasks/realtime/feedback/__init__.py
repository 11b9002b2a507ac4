"""Training data from users' feedback: collect interactions, distil rewards, subtract a baseline."""
