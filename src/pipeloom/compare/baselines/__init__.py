"""Training systems that others publish, each timed on the same costs, memory and simulator: one module for each."""
