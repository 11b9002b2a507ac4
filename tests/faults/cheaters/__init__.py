"""Every known way to cheat as a scripted policy that drives the real harness in a real box."""
