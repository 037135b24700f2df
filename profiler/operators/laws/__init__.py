"""How the time of an operator grows with its shape, as formulas that hold between and beyond measured points.

Each law is a few coefficients with a physical meaning.
"""
