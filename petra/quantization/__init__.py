"""Streams as integers or float8 times scales, for messages and stored inputs."""

from petra.quantization.quantized import Quantized, format_named, hash_bits

__all__ = ["Quantized", "format_named", "hash_bits"]
