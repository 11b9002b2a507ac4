"""What real users' responses teach: collect interactions, distil rewards, subtract a baseline."""
