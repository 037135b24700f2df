"""Tables and figures of runs: matplotlib figures, pipeline charts, text tables, and timelines for Perfetto.

Colours, fonts and axes are decided once, in `figure_style` and `log_axis`.
"""
