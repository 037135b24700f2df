"""The causes of pipeline bubbles: their order in every array, their keys and their names."""

from __future__ import annotations

CAUSES = ("pb1", "pb2", "pb3", "stage_split", "fill_drain", "transfer", "host", "starvation", "rank")
PB1, PB2, PB3, STAGE_SPLIT, FILL_DRAIN, TRANSFER, HOST, STARVATION, RANK = range(len(CAUSES))

CAUSE_NAMES = {
    "pb1": "PB1: prefill tokens differ",
    "pb2": "PB2: prefill beside decode",
    "pb3": "PB3: contexts differ",
    "stage_split": "stages uneven",
    "fill_drain": "fill and drain",
    "transfer": "transfer",
    "host": "host",
    "starvation": "starvation",
    "rank": "waiting for a rank",
}
