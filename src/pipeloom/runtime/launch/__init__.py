"""Processes and what connects them: devices, transports, groups, hosts, the store."""
