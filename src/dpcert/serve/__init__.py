"""Certified predictions over HTTP, with a page."""
