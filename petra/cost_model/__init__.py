"""Predicted time and memory: costs of blocks and links, simulator, auto-tuning."""
