"""Compiled loops of tuning: costs of workloads, simulation of one 1F1B iteration with encoders, search of orders."""
