"""``python -m pipeloom``."""

from pipeloom.cli import main

main()
