"""All that exists only to compare with the paper: what it ran and printed, and our tables, figures and verdicts next to it."""
