"""Targets that run elsewhere: a served model, or files that somebody captured."""
