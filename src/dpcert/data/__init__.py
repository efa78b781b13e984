"""Data sets: strict readers, and the folders that are searched for files."""
