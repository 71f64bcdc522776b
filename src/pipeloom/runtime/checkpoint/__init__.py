"""Checkpoints, written beside training, verified, and resumed with any layout; weights for other libraries."""
