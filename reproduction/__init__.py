"""Tables and figures of the papers."""
