"""Integrations with other libraries and their file formats."""
