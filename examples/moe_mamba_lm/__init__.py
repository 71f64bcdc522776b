"""A language model of unlike layers, attention, experts and state space, alone: an example of Pipeloom."""
