"""Analysis of training runs: figures, timelines and memory."""
