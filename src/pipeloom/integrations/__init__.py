"""Bridges to other projects' files."""
