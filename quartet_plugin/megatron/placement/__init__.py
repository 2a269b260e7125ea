"""Stages anywhere: what Megatron takes for granted about loop order, answered for any placement.

Stage 0 is on pipeline rank 0 and every device holds equally many chunks, numbered by stage. Then only "which
pipeline rank is the last" and the layers of each chunk differ from Megatron's own order.
"""
