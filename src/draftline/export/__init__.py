"""Writing and reading drafters in the formats that servers load."""
