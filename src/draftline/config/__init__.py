"""Configuration: the schema (pydantic, no torch) and how it is read from files and command lines."""
