"""A run as one self-contained page: read its folder, thin the curves, draw them, write HTML. Imports no torch."""
