"""Writes files and directories completely or not at all, even if the machine stops in between."""
