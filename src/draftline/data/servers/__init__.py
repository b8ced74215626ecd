"""Answers from servers that speak the OpenAI protocol."""
