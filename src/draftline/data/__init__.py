"""Conversations in, token shards and planned rows out. Nothing here imports torch except `regenerate`."""
