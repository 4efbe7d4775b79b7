"""The questions, one per file: its experiment, its figure, and the conclusion from the numbers."""
