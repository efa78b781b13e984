"""The command line: one file per command; each parses options, calls the library and prints."""

from .app import main as main
