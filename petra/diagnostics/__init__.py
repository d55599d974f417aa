"""Observers of a run: times, memory, reconstruction error and gradient quality."""
