"""draftline trains, evaluates and ships the drafters of speculative decoding."""

__version__ = "0.1.0"
