"""Ranks, error reporting, signals, network variables and torchrun's agent."""
