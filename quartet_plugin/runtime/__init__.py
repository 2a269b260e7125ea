"""Executes schedules on real processes, whatever the framework: lowered lists, messages, records.

The adapters bring what a stage computes; here is only in which order and over which channels. Nothing here
imports a framework but torch.
"""
