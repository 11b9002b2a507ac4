"""Sandboxes for agents' commands and for verdicts, without network or host files and with limits on every resource."""
