"""What people see, made from rows: tables for the terminal, figures, one self-contained page."""
