"""Figures about how models lie on devices: one file an experiment, as in the room `figures`."""
