"""Configs, presets, and the joint that runs them from data to report."""
