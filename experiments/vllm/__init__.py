"""Against vLLM itself: parity of scheduling step by step, and fidelity of whole recorded runs.

Times of steps are rebuilt from the recorded times of requests.
"""
