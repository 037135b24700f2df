"""Speculation for real: who drafts tokens of a live engine, and which of them its own samples accept."""
