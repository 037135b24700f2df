"""How good a fit is: errors on structures left out, reports by GPU, and comparisons of learners.

Nothing here is needed for a prediction.
"""
