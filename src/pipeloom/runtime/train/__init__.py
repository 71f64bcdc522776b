"""The training loop: a plan for each batch, evaluation, learning rates."""
