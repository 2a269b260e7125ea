"""Megatron's assumptions about the loop placement, replaced for any placement of stages.

Stage 0 is on pipeline rank 0 and every device holds equally many chunks, numbered by stage. Then only the
pipeline rank of the last stage and the layers of each chunk differ from stock.
"""
