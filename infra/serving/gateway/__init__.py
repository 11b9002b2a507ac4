"""HTTP gateway for users: an OpenAI-compatible API, agent sessions, feedback, arms."""
