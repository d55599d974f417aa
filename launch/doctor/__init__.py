"""Checks of the machines and links of a job."""
