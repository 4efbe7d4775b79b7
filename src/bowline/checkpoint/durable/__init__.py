"""How files and directories are written for good: all of it or nothing, whenever the machine stops."""
