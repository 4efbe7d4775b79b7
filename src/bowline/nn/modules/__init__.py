"""Modules with a tie in them: heads, the tied lookup, the loss, a quantised table, the gradient's two halves."""
