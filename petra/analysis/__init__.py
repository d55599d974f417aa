"""Analysis of training runs: figures, timelines, memory, complexity and FLOPs."""
