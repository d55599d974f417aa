"""Files that commands fill in: pages, and jobs of clusters."""
