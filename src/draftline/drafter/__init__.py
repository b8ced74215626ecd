"""The drafter: its architecture, masks, blocks, objective and step."""
