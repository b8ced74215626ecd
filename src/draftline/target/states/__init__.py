"""Hidden states on disk: captured once, read many times."""
