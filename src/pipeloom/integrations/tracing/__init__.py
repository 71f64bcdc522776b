"""Read a model for planning from its own code."""
