"""Doors of other frameworks, and metrics: each file needs the package that it is named after, and nothing imports it."""
