"""Benchmarks of petra against other ways to train the same network on the same devices."""
