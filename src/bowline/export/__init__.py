"""Models in the formats of other runtimes: the tie survives, or the report says what became of it."""
