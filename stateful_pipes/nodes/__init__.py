"""The nodes of a pipeline, one file each."""
