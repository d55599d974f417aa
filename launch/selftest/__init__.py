"""A test of this machine's GPUs with petra, and a report of it."""
