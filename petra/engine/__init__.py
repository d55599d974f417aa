"""Execution of a plan: stages, workers, updates, replicas, and the executor that runs them."""
