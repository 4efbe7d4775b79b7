"""What only a GPU can show; without one, all of it is left out."""
