"""Units of work: a `Request`, its `Track` while it runs, the `Cohort` of decodes in lockstep, and the `Batch` of one
iteration. Facts about tokens are kept per cohort, so that an iteration costs what changed and not what runs.
"""
