"""The commands that the laboratory adds to ``pipeloom``."""

from pipeloom.cli.app import Command

COMMANDS = {
    "bench": Command(
        "pipeloom_lab.cli.bench", "Run search methods on the instance library and print their optimality gaps."
    ),
    "reproduce": Command("pipeloom_lab.cli.reproduce", "Reproduce the tables and figures of a paper's evaluation."),
}
