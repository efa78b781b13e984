"""Everything that exists only for the comparison with the paper: its settings and figures, and our tables and verdicts."""
