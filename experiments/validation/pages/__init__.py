"""What a validation writes for people: the report, its figures, and the interactive page.

Verdicts come from `comparing`; nothing is computed here.
"""
