"""One file a question: its experiment, its figure, and the sentences that follow from the numbers."""
