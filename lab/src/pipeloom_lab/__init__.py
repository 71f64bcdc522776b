"""The laboratory: exact solvers, the papers' searches and evaluations, the instance library.

The product never imports it. It adds commands and search methods through the entry points of its ``pyproject.toml``.
"""
