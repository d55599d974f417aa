"""What only some runs need: parts of the update, wrappers of ports, and wrappers of functions, attached by the builder."""
