"""Private training: one step (Algorithm 2), the loop around it, and what lets it survive a crash."""
