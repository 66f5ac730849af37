"""Input pipelines for PyTorch that resume bit for bit (work in progress)."""
