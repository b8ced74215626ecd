"""Watching a run: spans, metrics, verdicts, the status line, trackers."""
