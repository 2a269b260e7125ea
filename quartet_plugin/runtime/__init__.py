"""Executes schedules on real processes, whatever the framework: lowered lists, messages, records.

The adapters bring the stages' computation; this room holds the order and the channels. Nothing here
imports a framework but torch.
"""
