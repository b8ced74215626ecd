"""The pipeline between targets and drafters: a pure core, the thread driver around it, and who owns the run."""
