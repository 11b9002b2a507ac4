"""Engines as services: one engine in an event loop, Ray replicas of it, and the fleet that routes requests."""
