"""Explain measurements: planned beside measured, why they differ, and what other schedules would take."""
