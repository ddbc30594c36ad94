"""The two ways in which a command ends badly; the message names the culprit and the cure."""

from __future__ import annotations


class BadInput(Exception):
    """What the user asked for does not exist or makes no sense: exit code 2."""


class Failed(Exception):
    """The thing asked about failed: exit code 1."""
