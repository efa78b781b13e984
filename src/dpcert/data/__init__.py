"""Data sets: readers that check everything, and the places where files are looked for."""
