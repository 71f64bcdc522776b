"""Measurement of layers, operators and links, and the undivided model as a reference."""
