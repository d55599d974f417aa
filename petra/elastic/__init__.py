"""Replicas that may be lost: the others continue, and take them back when they have restarted."""
