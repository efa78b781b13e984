"""Attacks on a classifier or its smoothed version: an upper bound on robustness, beside the certificates' lower one."""
