"""Evaluation by real decoding: acceptance length, speed, and equality with the target's own output."""
