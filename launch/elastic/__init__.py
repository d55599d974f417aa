"""Runs that continue when replicas are lost: their generations, and the supervisor that restarts their processes."""
