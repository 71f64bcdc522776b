"""The commands that the laboratory adds to ``pipeloom``."""

from pipeloom.cli.app import Command

COMMANDS = {
    "bench": Command("pipeloom_lab.cli.bench", "Run search methods over the public instance library: gaps in a table."),
    "reproduce": Command(
        "pipeloom_lab.cli.reproduce", "Run a paper's evaluation again: every table and figure, from seeds."
    ),
}
