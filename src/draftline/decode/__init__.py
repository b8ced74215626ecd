"""Lossless decoding: plain, prompt lookup, chain and tree. Import the modules; this package imports nothing itself."""
