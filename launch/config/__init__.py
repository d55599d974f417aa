"""Configuration: schema, checks, composition and one-line errors."""
