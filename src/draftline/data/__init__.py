"""Conversations in, token shards and planned rows out. Only reading a tokenizer and `regenerate` import torch."""
