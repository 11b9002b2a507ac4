"""The weight chain: a trainer hands each new version of its weights to every engine, through the object store alone.

README.md has the format of the chain in the store. Nothing is imported here: readers of the store need no torch.
"""
