"""Benchmarks: one script per question. Each reports interleaved ratios of one run as JSON, a table and a plot."""
