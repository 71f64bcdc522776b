"""Compiled loops of the joint search that run a placement under a priority rule, change it and anneal it."""
