"""Processes and their connections: devices, transports, process groups, hosts, the plan store."""
