"""A server that rents boxes to programs, with the API of E2B, so that its SDK works with `ostinato sandboxes serve`."""
