"""Whether prediction intervals hold as often as they say.

Structures are left out of a fit and asked for again.
"""
