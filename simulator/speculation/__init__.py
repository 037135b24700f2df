"""Engines that speculate, in virtual time: what becomes of their drafts, and what drafting and verifying cost."""
