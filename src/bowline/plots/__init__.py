"""Figures that answer a question, drawn with matplotlib: `pip install 'bowline-ties[plot]'`.

A file here has the numbers of its figure as a record that needs no matplotlib, and a function that draws it,
which is what imports matplotlib.
"""
