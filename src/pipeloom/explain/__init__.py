"""Explanation of measurements: comparison with the plan, causes of differences, and better schedules."""
