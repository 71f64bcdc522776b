"""Training systems as their users run them, on one model, cluster and batch."""
