"""Figures and claims of published papers, redone with a verdict each.

`figures` and `claims` hold one file a figure or claim; `gallery` puts them on a page.
"""
