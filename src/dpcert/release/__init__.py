"""Sharing a run: bundles that contain nothing secret, and the verification that anyone can run on them."""
