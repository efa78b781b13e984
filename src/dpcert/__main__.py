"""``python -m dpcert``."""

from .cli import main

main()
