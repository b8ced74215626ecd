"""Bounds of numbers that a user gives, shared by the command line, the configuration and the code. Imports nothing."""

# Largest seed: a generator of torch takes 64 bits, and prompts add their place to it.
MAX_SEED = 2**63 - 1
# Between these a temperature leaves every logit a number in fp32; 0 is greedy.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4


def is_temperature(value: float) -> bool:
    """True for 0 and for what can be divided by (not for nan)."""
    return value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE
