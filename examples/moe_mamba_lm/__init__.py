"""Example: a language model with attention, mixture-of-experts and state space layers."""
