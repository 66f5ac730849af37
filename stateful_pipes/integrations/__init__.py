"""Pipelines of other libraries as nodes. Each module needs its own extra, and none is imported before it is asked for."""
