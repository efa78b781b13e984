"""Configs, presets, and the pipeline that runs them from data to report."""
