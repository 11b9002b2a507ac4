"""Engines as services: a thread around the decode engine, Ray replicas of it, and the fleet that
routes requests.
"""
