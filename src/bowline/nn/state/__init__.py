"""A model's state in and out of it: no end of a tie is lost on the way, and no file is half-written."""
