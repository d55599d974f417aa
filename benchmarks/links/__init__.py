"""What fewer bytes between stages cost: narrow streams and messages of few bits, against full streams in float32."""
