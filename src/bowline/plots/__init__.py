"""Figures that answer a question, drawn with matplotlib.

`pip install '.[plot]'` in a checkout installs it, or `pip install 'bowline-ties[plot]'` once Bowline is on the index.

A file here has the numbers of its figure as a record that needs no matplotlib, and a function that draws it,
which is what imports matplotlib.
"""
