"""Checkpoints, written during training, verified, and resumed with any layout; weights for other libraries."""
