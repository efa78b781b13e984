"""One script for one question; ratios measured in one run, interleaved, as JSON, a table and a plot."""
