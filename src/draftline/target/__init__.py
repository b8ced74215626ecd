"""The frozen target model: its facts, its loading, the capture of its hidden states and the self-test."""
