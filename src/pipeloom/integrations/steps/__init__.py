"""What integrations share that run a plan made for every step: planning, agreement of ranks, execution."""
