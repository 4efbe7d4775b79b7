"""The plots of a page, one file each; beside every plot stands a table with its numbers."""
