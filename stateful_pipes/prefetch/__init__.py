"""Worker processes: how messages travel, what a worker does, the pool, and the node over it."""
