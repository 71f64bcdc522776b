"""Measurement of layers, operators and links; the undivided model to compare with."""
