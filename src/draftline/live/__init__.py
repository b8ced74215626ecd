"""The live page of a run: `draftline watch --web`."""
