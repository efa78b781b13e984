"""Attacks on a classifier or its smoothed version: an upper bound on robustness, where certificates give a lower bound."""
