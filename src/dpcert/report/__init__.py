"""Reports made from stored rows: tables for the terminal, figures and one self-contained page."""
