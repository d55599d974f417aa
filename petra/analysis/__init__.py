"""What a run was like: plots."""
