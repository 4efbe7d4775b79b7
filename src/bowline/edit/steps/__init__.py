"""The steps of an edit: each is a plain record that prints as one line, and makes a new draft of a draft."""
