"""Checkpoints: written while training goes on, verified, resumed in any layout; weights for other libraries."""
