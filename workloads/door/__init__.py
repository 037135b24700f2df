"""One HTTP door for load clients: OpenAI's protocol in front of any engine, simulated or real.

`contract.py` says what an engine behind it does. Everything that a client can see (protocol, SSE, metrics, admission,
limits, shutdown) is here, so that two worlds cannot differ in it.
"""
