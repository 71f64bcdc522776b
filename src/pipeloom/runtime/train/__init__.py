"""The training loop: one plan for each batch, evaluation, learning rates."""
