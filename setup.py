"""The packages of the wheel: the repository's root as `ostinato`, with its five folders below it."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("flows", "tasks", "infra", "models", "kernels")

below = find_namespace_packages(include=[f"{folder}*" for folder in FOLDERS])
setup(
    packages=["ostinato", *(f"ostinato.{name}" for name in below)],
    script_name="setup.py",  # which then is no module of the root package
)
