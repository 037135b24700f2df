"""Many runs over axes of settings, in a folder that can be stopped and resumed.

`axes` reads what varies, `point` runs one, `folder` keeps the results.
"""
